"""The command line: help with examples everywhere, and `pd report`."""

import platform
import shutil
import subprocess
from pathlib import Path

import jax
import pytest
import typer
from typer.testing import CliRunner

from param_decomp_lab import __version__
from param_decomp_lab.cli import app
from param_decomp_lab.runs.folder import commit_of_the_code
from tests.lab.tiny_run import PD, ROOT, pd_here

HELP = {
    (): ("train", "launch", "check", "profile", "pretrain", "data", "weights", "report", "runs", "eval", "export"),
    ("demo",): ("pd demo --out /tmp/demo --set pd.steps=200",),
    ("configs",): ("pd configs toys/tms_5-2", "--overwrite"),
    ("train",): (
        "pd train configs/demo/decompose.yaml",
        "--set pd.steps=200",
        "pd train --resume runs/p-1a2b3c4d",
        "srun --ntasks=8 pd train",
        "--coordinator node01:29400 --processes 2 --process-id 0",
    ),
    ("launch",): (
        "pd launch configs/llama8b_l18-26_9layer_chunkwise.yaml --nodes 8 --gpus-per-node 8 --partition gpu",
        "--dry-run",
        "--sweep pd.seed=0,1,2",
        "--local",
        "pd launch runs/p-1a2b3c4d --nodes 4",
    ),
    ("check",): ("pd check configs/toys/tms_5-2.yaml", "--set pd.batch_size=32", "status is 0"),
    ("profile",): ("pd profile configs/demo/decompose.yaml", "--steps 20 --warmup 5 --out", "--set memory.preset=lean"),
    ("pretrain",): ("pd pretrain configs/demo/pretrain.yaml",),
    ("data",): ("tokenize",),
    ("data", "tokenize"): ("pd data tokenize --stdlib --bpe 1024 --out data/demo", "--tokenizer meta/tokenizer.json"),
    ("weights",): ("import-gguf",),
    ("weights", "import-gguf"): ("pd weights import-gguf SmolLM2-135M-Instruct.Q4_1.gguf", "--dtype", "--no-tokenizer"),
    ("browse",): ("pd browse runs /scratch/me/runs --port 9000", "ssh -L"),
    ("label",): ("pd label runs/p-1a2b3c4d --model gpt-5-mini", "--dry-run", "--max-cost", "--score", "status 75"),
    ("graph",): (
        'pd graph runs/p-1a2b3c4d "The capital of France is" --target " Paris"',
        "--threshold",
        "pd graph runs/p-5e6f7a8b",
    ),
    ("claim",): (
        'pd claim runs/p-1a2b3c4d layers.2.mlp.down_proj:18 --after " rais" --token ed',
        "--controls 5 --exceptions",
        "--scale 0 --scale 2",
    ),
    ("compare",): ("--agreement", "pd compare runs --json"),
    ("share",): ("graph", "components", "site"),
    ("share", "graph"): (
        "pd share graph runs/p-1a2b3c4d --out shared/graphs",
        "--for neuronpedia --model my-llama --source-set pd",
        "--group",
        "--features-url",
    ),
    ("share", "components"): (
        "--sites '*.down_proj' --model smollm2-135m --gzip",
        "--for neuronpedia --model my-llama",
        "--batch",
    ),
    ("share", "site"): ("--components layers.3.mlp.down_proj:1,2,17", "--most 100 --overwrite"),
    ("harvest",): ("pd harvest runs/p-1a2b3c4d --tokens 10e6 --sites '*.down_proj' --threshold 0.1", "status 75"),
    ("cluster",): ("pd cluster runs/p-1a2b3c4d --alpha 0.25 --min-density 0.001 --seeds 5", "--draw", "--harvest"),
    ("runs",): ("pd runs runs/sweep-1 /scratch/me/runs", "--json", "waiting", "broken"),
    ("eval",): (
        "pd eval runs/p-1a2b3c4d --step 20000 --metric CI_L0",
        "--metrics metrics.yaml",
        "--batch-size",
        "--out",
    ),
    ("import",): (
        "pd import out/s-55ea3f9b --out runs/s-55ea3f9b --target out/t-9d2b8f02/model_config.yaml",
        "--step",
        "--overwrite",
    ),
    ("export",): ("pd export runs/p-1a2b3c4d --out exported/my-llama", "--overwrite", "--step"),
    ("report",): ("pd report runs/p-1a2b3c4d",),
    ("probe",): ("pd probe configs/ladder/bf16-scan.yaml --gpu a5000 --seq 512", "--no-cache", "--quick"),
    ("fit",): ("pd fit configs/llama8b_l18-26_9layer_chunkwise_seq2048.yaml --gpus 64", "--vary"),
    ("wandb",): ("pd wandb runs/p-1a2b3c4d", "WANDB_BASE_URL"),
}


@pytest.mark.parametrize("command", HELP, ids=lambda command: " ".join(("pd", *command)))
def test_help(command: tuple[str, ...]) -> None:
    result = CliRunner().invoke(app, [*command, "--help"], env={"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"})
    assert result.exit_code == 0
    for text in HELP[command]:
        assert text in result.output
    if command not in ((), ("data",), ("weights",), ("share",)):
        assert "Example" in result.output


def test_help_imports_nothing_heavy() -> None:
    """Somebody who asks for help does not wait for a backend, nor for anything else that takes long to import."""
    code = """
import sys
from param_decomp_lab.cli import main
words, sys.argv = sys.argv[1:], ["pd"]
for command in ["", *words]:
    sys.argv[1:] = [*command.split(), "--help"]
    try:
        main()
    except SystemExit as ended:
        assert ended.code == 0, command
heavy = {"jax", "numpy", "equinox", "yaml", "matplotlib", "transformers", "pyarrow", "wandb"}
sys.exit(str(heavy & sys.modules.keys()) if heavy & sys.modules.keys() else 0)
"""
    commands = [" ".join(command) for command in HELP]
    done = subprocess.run([PD[0], "-c", code, *commands], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_every_command_has_a_help_text_that_is_checked() -> None:
    names = set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
    assert names <= {command[0] for command in HELP if command}


def test_version() -> None:
    """What a report of a bug needs, in a run's folder and here alike; the commit only of a checkout."""
    outcome = pd_here("--version")
    assert outcome.status == 0
    first, second = outcome.out.splitlines()
    commit = commit_of_the_code()
    assert first == f"param-decomp {__version__}" + (f", commit {commit}" if commit else "")
    assert f"Python {platform.python_version()}, JAX {jax.__version__}, " in second


def test_wrong_usage() -> None:
    outcome = pd_here("train", "--resum", "x")
    assert outcome.status == 2
    assert "--resume" in outcome.err


def test_report_is_written_again(finished: Path, tmp_path: Path) -> None:
    run = tmp_path / finished.name
    shutil.copytree(finished, run, ignore=shutil.ignore_patterns("ckpts"))
    (run / "report.html").unlink()
    outcome = pd_here("report", run)
    assert outcome.status == 0, outcome
    assert outcome.out.strip() == str(run / "report.html")
    page = (run / "report.html").read_text()
    assert page == (finished / "report.html").read_text()
    for text in ("PersistentPGDReconSubsetLoss", "layers.1.mlp.down_proj", "data:image/png;base64"):
        assert text in page


def test_report_of_what_is_no_run(tmp_path: Path) -> None:
    outcome = pd_here("report", tmp_path)
    assert outcome.status == 2
    assert str(tmp_path) in outcome.err
    assert "Traceback" not in outcome.err
