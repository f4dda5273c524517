"""Makes `tests/lab/old_run/`: two small run folders that an earlier version of the code wrote, and what it read there.

    python -m tests.lab.make_old_run        # run at commit d16f549, whose code the folders are to be of

`llama/` holds a target, token data and a run that SIGTERM stopped at step 10 of 16, with checkpoints of steps 8 and 10
and the state of a persistent adversary. `toy/` holds a TMS and a finished run on it, without its page, which nothing
reads. `expected.json` holds what `observe` found in copies of them with the code of that commit (but for MMCS and ML2R,
whose rule has changed since); `tests/lab/test_old_run.py` asks the code of today the same questions.

Run folders hold absolute paths. These were made at ``MADE_AT``, and `copy_of` puts the place of the copy there.
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from safetensors.numpy import load_file

import tests.conftest  # noqa: F401  (devices and quick compilation as when the tests run)
from param_decomp_jax.targets.tms import TMSConfig
from param_decomp_lab import load_run
from param_decomp_lab.data.tokenize import tokenize_files
from tests.core import toys
from tests.core.tiny import weights
from tests.lab import tiny_run
from tests.lab.tiny_run import ROOT, Tree, pd_here, programs_kept_in, rows, saved_arrays, saved_steps

COMMIT = "d16f549"
OLD_RUN = Path(__file__).with_name("old_run")
EXPECTED = OLD_RUN / "expected.json"
MADE_AT = "/tmp/param-decomp-old-run"
LLAMA, TOY = Path("llama", "p-00000001"), Path("toy", "p-00000002")
"""The two run folders."""

SEQ_LEN, BATCH, STEPS, STOPPED = 8, 4, 16, 10
ARCHITECTURE = replace(tiny_run.ARCHITECTURE, d_model=4, head_dim=2, d_mlp=6)
METHOD: Tree = {
    "pd": {
        "ci_config": {"mode": "layerwise", "fn_type": "shared_mlp", "hidden_dims": [4]},
        "decomposition_targets": [
            {"module_pattern": "model.layers.*.mlp.up_proj", "C": 6},
            {"module_pattern": "model.layers.*.mlp.down_proj", "C": 5},
        ],
        "components_optimizer": {
            "lr_schedule": {"start_val": 0.01, "fn_type": "cosine", "final_val_frac": 0.1}, "grad_clip_norm": 0.1
        },
        "ci_fn_optimizer": {"lr_schedule": {"start_val": 0.01}, "weight_decay": 0.01},
        "steps": STEPS,
        "batch_size": BATCH,
        "n_mask_samples": 1,
        "faithfulness_warmup_steps": 2,
        "loss_metrics": [
            {"type": "FaithfulnessLoss", "coeff": 100.0},
            {"type": "ImportanceMinimalityLoss", "coeff": 1e-3, "pnorm": 2.0, "beta": 0.2, "eps": 1e-6,
             "p_anneal_start_frac": 0.0, "p_anneal_final_p": 0.5},
            {"type": "PersistentPGDReconLoss", "coeff": 0.5, "n_warmup_steps": 1,
             "scope": {"type": "broadcast_across_batch"},
             "optimizer": {"type": "adam", "beta1": 0.5, "beta2": 0.99, "lr_schedule": {"start_val": 0.02}}},
        ],
    },
    "runtime": {"autocast_bf16": False},
    "cadence": {"train_log_every": 4, "save_every": 4, "keep_last_n_checkpoints": 2},
    "eval": {"batch_size": BATCH, "n_steps": 2, "every": 8, "slow_every": 16, "slow_on_first_step": False,
             "metrics": [{"type": "CI_L0", "groups": None}, {"type": "CEandKLLosses", "rounding_threshold": 0.0}]},
    "target": {"spec": {"kind": "hf", "model_class": "transformers.LlamaForCausalLM", "model_name": "tiny"}},
    "data": {"dataset_name": "parquet", "tokenizer_name": "bytes", "column_name": "input_ids", "is_tokenized": True,
             "max_seq_len": SEQ_LEN},
}  # fmt: skip
TOY_SETTINGS = (
    "pd.steps=6",
    "pd.batch_size=8",
    "pd.faithfulness_warmup_steps=2",
    "pd.decomposition_targets=[{module_pattern: linear1, C: 6}, {module_pattern: linear2, C: 6}]",
    "pd.ci_config.hidden_dims=[4]",
    "cadence={train_log_every: 2, save_every: 3, keep_last_n_checkpoints: 1}",
    "steps_per_dispatch=2",
    "eval={batch_size: 8, n_steps: 1, every: 3, slow_every: 6, slow_on_first_step: false, metrics: "
    "[{type: CI_L0, groups: null}, {type: IdentityCIError, identity_ci: [{layer_pattern: linear1, n_features: 5}], "
    "dense_ci: null}]}",
)
TOKENS = np.random.default_rng(7).integers(0, 256, (2, SEQ_LEN))
FEATURES = np.random.default_rng(8).uniform(size=(3, 5)).astype(np.float32)


# ---- what is asked, of the code then and of the code now ----


def copy_of(old_run: Path, folder: Path) -> None:
    """``old_run`` as the new ``folder``, with its paths in the configurations."""
    shutil.copytree(old_run, folder)
    for run in (folder / LLAMA, folder / TOY):
        (run / "figures").mkdir(exist_ok=True)  # empty, which git does not keep
        config = run / "config.yaml"
        config.write_text(config.read_text().replace(MADE_AT, str(folder)))


def importances(folder: Path) -> Tree:
    """λ and masked outputs of the newest checkpoints."""
    found: Tree = {}
    for run, inputs in ((LLAMA, TOKENS), (TOY, FEATURES)):
        opened = load_run(folder / run)
        outputs = opened.logits if run == LLAMA else opened.output
        found[str(run)] = {
            "importances": listed(opened.causal_importances(inputs)),
            "outputs": np.asarray(outputs(inputs))[..., :8].tolist(),
            "masked by importance": np.asarray(outputs(inputs, masks="ci", delta=0.25))[..., :8].tolist(),
        }
    return found


def listed(arrays: Any) -> Tree:
    return {name: np.asarray(array).tolist() for name, array in arrays.items()}


def evaluated(folder: Path, run: Path) -> Tree:
    """The row of `pd eval`, of the newest checkpoint."""
    out = folder / "evaluated.json"
    succeeds("eval", folder / run, "--out", out)
    row: Tree = json.loads(out.read_text())["row"]
    return row


def exported(folder: Path, run: Path) -> Tree:
    """A digest of every tensor that `pd export` writes: these are copied, not computed."""
    out = folder / "exported"
    succeeds("export", folder / run, "--out", out, "--overwrite")
    tensors = {name: x for file in sorted(out.glob("*.safetensors")) for name, x in load_file(file).items()}
    return {name: f"{x.dtype} {list(x.shape)} {digest(x)}" for name, x in sorted(tensors.items())}


def digest(array: Any) -> str:
    return hashlib.sha256(np.asarray(array).tobytes()).hexdigest()[:16]


def reported(folder: Path, run: Path) -> list[str]:
    """Numbers in the tables of the page that `pd report` writes; of those that depend on a clock, none."""
    succeeds("report", folder / run)
    page = (folder / run / "report.html").read_text()
    cells = (
        unescape(re.sub("<[^>]*>", "", cell)).strip() for cell in re.findall("<td[^>]*>(.*?)</td>", page, re.DOTALL)
    )
    return sorted({cell for cell in cells if re.fullmatch(r"[-+]?\d[\d.,e]*\s?%?", cell)})


def listing(folder: Path) -> Tree:
    """`pd runs`, by id."""
    found = json.loads(succeeds("runs", folder / LLAMA.parent, folder / TOY.parent, "--json"))
    keys = ("state", "name", "step", "steps", "checkpoint", "why", "main")
    return {run["id"]: {key: run[key] for key in keys} for run in found}


def resumed(folder: Path, run: Path) -> Tree:
    """Rows and arrays of the run when it has been resumed to its end."""
    said = succeeds("train", "--resume", folder / run)
    steps = saved_steps(folder / run)
    arrays = saved_arrays(folder / run, steps[-1])
    return {
        "from step": int(re.findall(r"at step (\d+) of", said)[0]),
        "checkpoints": steps,
        "rows": rows(folder / run),
        "arrays": {
            name: {"shape": list(x.shape), "sum": float(x.sum(dtype=np.float64)),
                   "norm": float(np.linalg.norm(x.astype(np.float64)))}
            for name, x in sorted(arrays.items())
        },
    }  # fmt: skip


def succeeds(*arguments: str | Path) -> str:
    """What `pd` says."""
    outcome = pd_here(*arguments)
    assert outcome.status == 0, outcome
    return outcome.out


def observe(folder: Path) -> Tree:
    """All of it, of a copy; the run is resumed last."""
    return {
        "listing": listing(folder),
        "importances": importances(folder),
        "evaluated": {str(run): evaluated(folder, run) for run in (LLAMA, TOY)},
        "exported": {str(run): exported(folder, run) for run in (LLAMA, TOY)},
        "reported": {str(run): reported(folder, run) for run in (LLAMA, TOY)},
        "resumed": resumed(folder, LLAMA),
        "listing when resumed": listing(folder),
        "reported when resumed": reported(folder, LLAMA),
    }


# ---- how it was made ----


def make_llama(folder: Path) -> None:
    """Target, data, and the run, which a signal stops."""
    from param_decomp_lab.recorder import Recorder
    from param_decomp_lab.weights.hf_llama import save_llama  # of that commit

    save_llama(folder / "target", ARCHITECTURE, weights(ARCHITECTURE))
    (folder / "text").mkdir()
    for n in range(12):
        (folder / "text" / f"{n}.txt").write_text("".join(f"{n} times {m} makes {n * m}.\n" for m in range(20)))
    tokenize_files([folder / "text"], folder / "data", seq_len=SEQ_LEN, eval_fraction=0.2)
    shutil.rmtree(folder / "text")
    (folder / "method.yaml").write_text(yaml.safe_dump(METHOD))
    wrapper: Tree = {
        "torch_config": "method.yaml",
        "run_name": "old llama",
        "run_id": LLAMA.name,
        "out_dir": str(folder),
    }
    wrapper |= {"data": {"train": "data/train", "eval": "data/eval"}, "target": {"folder": "target"}}
    (folder / "wrapper.yaml").write_text(yaml.safe_dump(wrapper))
    add = Recorder.add

    def add_and_stop(self: Any, step: int, n: int, values: Any) -> None:
        add(self, step, n, values)
        if step + n == STOPPED:
            os.kill(os.getpid(), signal.SIGTERM)

    Recorder.add = add_and_stop  # type: ignore[assignment, method-assign]
    stopped = pd_here("train", folder / "wrapper.yaml")
    Recorder.add = add  # type: ignore[method-assign]
    assert stopped.status == 75, stopped
    assert saved_steps(folder / LLAMA.name) == [8, STOPPED]


def make_toy(folder: Path) -> None:
    config = TMSConfig(n_features=5, n_hidden=2, n_hidden_layers=0)
    from param_decomp_lab.weights.toys import save_toy  # of that commit

    save_toy(folder / "target", config, toys.weights(config))
    given = (f"target={{folder: {folder / 'target'}}}", f"out_dir={folder}", f"run_id={TOY.name}", *TOY_SETTINGS)
    configs = folder / "configs"
    shutil.copytree(ROOT / "configs", configs)  # a run notes where its configuration was
    succeeds("train", configs / "toys" / "tms_5-2.yaml", *(word for key in given for word in ("--set", key)))
    shutil.rmtree(configs)


def make_nameless(run: Path) -> None:
    """Takes the machine's name and system out of what a run notes of its start."""
    with contextlib.suppress(FileNotFoundError):
        (run / "lock").unlink()
    for path in (run / "environment.json", run / "history.jsonl"):
        text = re.sub(r'"host": "[^"]*"', '"host": "somewhere"', path.read_text())
        path.write_text(re.sub(r'"platform": "[^"]*"', '"platform": "Linux"', text))


def rounded(values: Any) -> Any:
    """To six digits, which is more than is compared."""
    if isinstance(values, dict):
        return {key: rounded(value) for key, value in values.items()}
    if isinstance(values, list):
        return [rounded(value) for value in values]
    return float(f"{values:.6g}") if isinstance(values, float) else values


def main() -> None:
    """Makes the folder anew."""
    git = ("git", "-C", str(ROOT))
    packages = ("param_decomp_jax", "param_decomp_lab", "configs")
    if subprocess.run([*git, "diff", "--quiet", COMMIT, "--", *packages], check=False).returncode:
        sys.exit(f"the code here is not that of {COMMIT}: make a worktree of that commit, and run this there")
    made = Path(MADE_AT)
    made.mkdir()  # and not over somebody else's
    try:
        (made / "llama").mkdir()
        (made / "toy").mkdir()
        with tempfile.TemporaryDirectory() as folder, programs_kept_in(Path(folder) / "compiled"):
            make_llama(made / "llama")
            make_toy(made / "toy")
            for run in (LLAMA, TOY):
                make_nameless(made / run)
            (made / TOY / "report.html").unlink()  # large, and read by nothing
            copy_of(made, Path(folder) / "copy")
            expected = observe(Path(folder) / "copy")
        shutil.rmtree(OLD_RUN, ignore_errors=True)
        shutil.copytree(made, OLD_RUN)
        EXPECTED.write_text(json.dumps(rounded(expected)) + "\n")
    finally:
        shutil.rmtree(made)
    files = [path for path in OLD_RUN.rglob("*") if path.is_file()]
    print(f"{OLD_RUN}: {len(files)} files, {sum(path.stat().st_size for path in files) / 1000:.0f} kB")


if __name__ == "__main__":
    main()
