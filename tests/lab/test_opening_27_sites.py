"""`load_run` of the 27 matrices of a large run, at toy width: trained on 8 devices, opened on one, and only the learned
part of the checkpoint is read."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from param_decomp_jax.targets.llama import LlamaConfig
from param_decomp_lab.weights.target_folder import save_target
from tests.core import tiny as core
from tests.lab.several import environment_of
from tests.lab.tiny_run import ROOT, SEQ_LEN, Tiny

SCHEMA = ROOT / "configs" / "torch" / "llama8b_l18-26_9layer_chunkwise.yaml"
ARCHITECTURE = LlamaConfig(
    vocab_size=256, d_model=32, n_layers=32, n_heads=4, n_kv_heads=2, head_dim=8, d_mlp=48, tied=True
)
C, D_CI = 2048, 32
SETTINGS = (
    f"pd.decomposition_targets.0.C={C}",
    f"pd.decomposition_targets.1.C={C}",
    f"pd.ci_config.simple_transformer_ci_cfg={{d_model: {D_CI}, n_blocks: 1, mlp_hidden_dim: [64], "
    f"attn_config: {{n_heads: 4, max_len: {SEQ_LEN}}}}}",
    "pd.steps=2",
    "pd.batch_size=8",
    "pd.faithfulness_warmup_steps=0",
    "eval=null",
    "wandb=null",
    f"data.max_seq_len={SEQ_LEN}",
    "cadence={train_log_every: 1}",
    "mesh={fsdp: 8}",
)
MB = 1e6

pytestmark = [pytest.mark.slow, pytest.mark.one_part]


@pytest.fixture(scope="module")
def run(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wide")
    save_target(folder / "target", ARCHITECTURE, core.weights(ARCHITECTURE))
    wrapper = {"torch_config": str(SCHEMA), "run_name": "27 sites", "target": {"folder": "target"}}
    wrapper |= {"data": {split: str(tiny.folder / "data" / split) for split in ("train", "eval")}}
    (folder / "wrapper.yaml").write_text(yaml.safe_dump(wrapper))
    sets = [word for text in (*SETTINGS, f"out_dir={folder}", "run_id=p-00000027") for word in ("--set", text)]
    process = tiny.pd("train", folder / "wrapper.yaml", *sets, timeout=1200)
    assert process.returncode == 0, process.stdout + process.stderr
    return folder / "p-00000027"


@dataclass(frozen=True)
class Opened:
    """What a process of its own, with one device, says of opening a run. ``read``: bytes from files meanwhile.
    ``anonymous``: the most memory that it took meanwhile, beyond what it had. ``learned``: bytes of the arrays."""

    read: int
    anonymous: int
    learned: int
    devices: int
    sites: dict[str, list[int]]
    sums: dict[str, float]


CHILD = """
import ctypes, gc, json, sys
from pathlib import Path
from tests.lab.child import peak_memory
import jax, numpy as np
from param_decomp_lab import load_run

def read():
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("rchar"))

load_run(sys.argv[1])  # imports, the storage library's threads, JAX's backend, what is compiled for each shape
gc.collect()
ctypes.CDLL(None).malloc_trim(0)
memory, before = {}, read()
with peak_memory(memory):
    run = load_run(sys.argv[1])
    jax.block_until_ready(run.learned)
arrays = jax.tree.leaves(run.learned)
after = read()
importances = run.causal_importances(np.arange(16)) if len(sys.argv) > 2 else {}
print(json.dumps({
    "read": after - before, "anonymous": memory["peak"] - memory["base"], "learned": sum(x.nbytes for x in arrays),
    "devices": jax.device_count(), "sites": {name: [s.d_in, s.d_out, s.C] for name, s in run.sites.items()},
    "sums": {name: float(value.sum()) for name, value in importances.items()},
}))
"""


def opened(run: Path, *more: str) -> Opened:
    """The second time: the first has compiled what takes more memory than these small arrays."""
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(run), *more],
        env={**environment_of(1, {}), "CHILD_NUMBER": "0", "PYTHONPATH": str(ROOT)},
        cwd=ROOT, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return Opened(**found)


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in files(folder))


def files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file())


def test_reads_and_holds_the_learned_part_alone(run: Path) -> None:
    found = opened(run)
    learned, training = (size(run / "ckpts" / "2" / item) for item in ("learned", "training"))
    print(f"learned {learned / MB:.1f} MB in files, training {training / MB:.1f} MB; {found}")
    assert found.devices == 1
    assert len(found.sites) == 27
    assert found.sites["layers.18.mlp.up_proj"] == [32, 48, C]
    assert found.sites["layers.26.mlp.down_proj"] == [48, 32, C]
    assert found.learned > 20 * MB
    assert training > 1.9 * learned  # reading it would show
    assert found.read < 1.1 * learned + 1 * MB
    assert found.anonymous < 3 * found.learned  # the whole state is 3.4 times as much, and is copied on the way


@pytest.mark.parametrize("how", ["overwritten", "removed"])
def test_the_training_part_is_not_touched(run: Path, tmp_path: Path, how: str) -> None:
    want = opened(run, "importances").sums
    damaged = tmp_path / run.name
    shutil.copytree(run, damaged)
    training = damaged / "ckpts" / "2" / "training"
    if how == "removed":
        shutil.rmtree(training)
    else:
        for path in files(training):
            path.write_bytes(b"\xa5" * path.stat().st_size)
    assert opened(damaged, "importances").sums == want
    assert len(want) == 27
    assert all(value > 0 for value in want.values())
