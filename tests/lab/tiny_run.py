"""A run that takes seconds: a random Llama, a little text, every kind of state; and `pd` in processes of its own."""

import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple
from unittest import mock

import jax
import numpy as np
import orbax.checkpoint as ocp
import yaml
from jax.experimental.compilation_cache import compilation_cache

from param_decomp_jax.targets.llama import LlamaConfig
from param_decomp_lab.cli import main
from param_decomp_lab.data.tokenize import tokenize_files
from param_decomp_lab.weights.target_folder import save_target
from tests.core.tiny import weights

ARCHITECTURE = LlamaConfig(
    vocab_size=256, d_model=16, n_layers=2, n_heads=2, n_kv_heads=1, head_dim=8, d_mlp=24, tied=True
)
SEQ_LEN, BATCH, STEPS = 16, 8, 80
SAVE_EVERY, EVAL_EVERY, WARM_UP = 20, 40, 60
SECOND_ON = 32
"""The step at which the second adversary joins."""
EARLY, LATE = SAVE_EVERY, STEPS - SAVE_EVERY
"""Steps whose checkpoints an undisturbed run keeps, besides its last: a milestone, before the second adversary is on,
and the last but one, after."""
ROOT = Path(__file__).parents[2]
PD = (sys.executable, "-m", "param_decomp_lab")
TIMEOUT = 240.0
"""Seconds that a `pd` process may take; the machine may be busy with other tests."""
SITES = {
    "layers.0.mlp.up_proj": 20,
    "layers.0.mlp.down_proj": 12,
    "layers.1.mlp.up_proj": 20,
    "layers.1.mlp.down_proj": 12,
}
Tree = dict[str, Any]

LOSSES: list[Tree] = [
    {"type": "FaithfulnessLoss", "coeff": 100.0},
    {"type": "ImportanceMinimalityLoss", "coeff": 1e-3, "pnorm": 2.0, "beta": 0.2, "eps": 1e-6,
     "p_anneal_start_frac": 0.0, "p_anneal_final_p": 0.5},
    {"type": "ChunkwiseSubsetReconLoss", "coeff": 1.0, "sites_per_chunk": 4, "routing": {"type": "uniform_k_subset"}},
    {"type": "PersistentPGDReconLoss", "coeff": 0.5, "n_warmup_steps": 1, "scope": {"type": "broadcast_across_batch"},
     "optimizer": {"type": "adam", "beta1": 0.5, "beta2": 0.99, "lr_schedule": {"start_val": 0.02, "warmup_pct": 0.2}}},
    {"type": "PersistentPGDReconSubsetLoss", "coeff": 0.5, "start_frac": SECOND_ON / STEPS,
     "use_sigmoid_parameterization": True, "scope": {"type": "per_batch_per_position"},
     "routing": {"type": "static_probability", "p": 0.5},
     "optimizer": {"type": "adam", "lr_schedule": {"start_val": 0.1}}},
]  # fmt: skip
METRICS: list[Tree] = [
    {"type": "CEandKLLosses", "rounding_threshold": 0.0},
    {"type": "CI_L0", "groups": {"first": ["layers.0.*"], "everything": ["*"]}},
    {"type": "CI_L0", "groups": None, "ci_alive_threshold": 0.5},
    {"type": "PGDReconLoss", "init": "random", "step_size": 0.1, "n_steps": 3, "mask_scope": "shared_across_batch"},
    {"type": "CIHiddenActsReconLoss"},
    {"type": "CIHistograms", "n_batches_accum": 1},
    {"type": "CIMeanPerComponent"},
    {"type": "ComponentActivationDensity", "ci_alive_threshold": 0.1},
]


LIGHT = (
    "pd.steps=12",
    "pd.faithfulness_warmup_steps=0",
    "pd.ci_config={mode: layerwise, fn_type: shared_mlp, hidden_dims: [8]}",
    "pd.loss_metrics=[{type: FaithfulnessLoss, coeff: 100}, {type: CIMaskedReconLoss, coeff: 1}]",
    "eval=null",
)
"""Assignments that make a run compile in a second or two: no adversary, no evaluation."""


def torch_file() -> Tree:
    """The schema file, without the places of target and data, which the wrapper gives."""
    cosine = {"fn_type": "cosine", "final_val_frac": 0.1, "warmup_pct": 0.2}
    return {
        "pd": {
            "n_mask_samples": 1,
            "ci_config": {
                "mode": "global",
                "fn_type": "global_shared_transformer",
                "simple_transformer_ci_cfg": {
                    "d_model": 16, "n_blocks": 1, "mlp_hidden_dim": [16],
                    "attn_config": {"n_heads": 2, "max_len": SEQ_LEN},
                },
            },
            "decomposition_targets": [
                {"module_pattern": "model.layers.*.mlp.up_proj", "C": 20},
                {"module_pattern": "layers.*.mlp.down_proj", "C": 12},
            ],
            "components_optimizer": {"lr_schedule": {"start_val": 0.01, **cosine}, "grad_clip_norm": 0.1},
            "ci_fn_optimizer": {"lr_schedule": {"start_val": 0.01}, "weight_decay": 0.01},
            "steps": STEPS,
            "batch_size": BATCH,
            "faithfulness_warmup_steps": WARM_UP,
            "faithfulness_warmup_lr": 0.01,
            "loss_metrics": LOSSES,
        },
        "runtime": {"autocast_bf16": False},
        "cadence": {"train_log_every": 3, "save_every": SAVE_EVERY, "keep_last_n_checkpoints": 2},
        "eval": {"batch_size": BATCH, "n_steps": 2, "every": EVAL_EVERY, "slow_every": STEPS,
                 "slow_on_first_step": False, "metrics": METRICS},
        "target": {"spec": {"kind": "hf", "model_class": "transformers.LlamaForCausalLM", "model_name": "tiny"}},
        "data": {"dataset_name": "parquet", "tokenizer_name": "bytes", "column_name": "input_ids", "is_tokenized": True,
                 "max_seq_len": SEQ_LEN},
    }  # fmt: skip


@dataclass(frozen=True)
class Tiny:
    """What all tiny runs share: ``folder`` with `target/`, `data/`, and the two files of the configuration."""

    folder: Path
    compiled: Path

    def make(self) -> None:
        save_target(self.folder / "target", ARCHITECTURE, weights(ARCHITECTURE))
        (self.folder / "text").mkdir()
        for n in range(20):
            text = "".join(f"{n} times {m} makes {n * m}.\n" for m in range(50))
            (self.folder / "text" / f"{n}.txt").write_text(text)
        tokenize_files([self.folder / "text"], self.folder / "data", seq_len=SEQ_LEN, eval_fraction=0.2)
        wrapper: Tree = {"torch_config": "torch.yaml", "run_name": "tiny", "target": {"folder": "target"}}
        wrapper |= {"data": {"train": "data/train", "eval": "data/eval"}, "milestones": [EARLY]}
        self.config.write_text(yaml.safe_dump(wrapper))
        (self.folder / "torch.yaml").write_text(yaml.safe_dump(torch_file()))

    @property
    def config(self) -> Path:
        return self.folder / "wrapper.yaml"

    def environment(self) -> dict[str, str]:
        """Of a `pd` process: eight devices and quick compilation as here, and each program compiled once for all."""
        return {
            **os.environ,
            "JAX_COMPILATION_CACHE_DIR": str(self.compiled),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "WANDB_MODE": "disabled",
            "COLUMNS": "200",
        }

    def pd(self, *arguments: str | Path, timeout: float = TIMEOUT) -> subprocess.CompletedProcess[str]:
        """`pd` with these arguments, to its end."""
        return subprocess.run(
            [*PD, *map(str, arguments)],
            env=self.environment(),
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=timeout,
        )

    @contextmanager
    def started(self, *arguments: str | Path) -> Iterator["Process"]:
        """`pd` with these arguments, in the background; killed at the end of the block if it still runs."""
        with tempfile.TemporaryFile() as output:
            command, environment = [*PD, *map(str, arguments)], self.environment()
            popen = subprocess.Popen(command, env=environment, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
            try:
                yield Process(popen, output)
            finally:
                popen.kill()
                popen.wait()

    def train(self, runs: Path, number: int, *assignments: str) -> list[str | Path]:
        """Arguments that start the run ``runs/p-0000000<number>``."""
        sets = (f"out_dir={runs}", f"run_id=p-{number:08x}", *assignments)
        return ["train", self.config, *(word for assignment in sets for word in ("--set", assignment))]


@dataclass(frozen=True)
class Process:
    popen: "subprocess.Popen[bytes]"
    output: IO[bytes]

    def text(self) -> str:
        """stdout and stderr so far."""
        # The child writes at the offset that it shares with us: read by position.
        return os.pread(self.output.fileno(), 1 << 20, 0).decode()

    def wait_until(self, happened: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + TIMEOUT
        while not happened():
            assert self.popen.poll() is None, f"ended with {self.popen.returncode} before {what}:\n{self.text()}"
            assert time.monotonic() < end, f"{what}: not in {TIMEOUT} s:\n{self.text()}"
            time.sleep(0.005)

    def stop(self, number: signal.Signals) -> int:
        """Sends the signal; the exit status that follows."""
        self.popen.send_signal(number)
        return self.popen.wait(TIMEOUT)


class Outcome(NamedTuple):
    status: int
    out: str
    err: str


def pd_here(*arguments: str | Path) -> Outcome:
    """`pd` in this process: what a process would give, without the seconds that one takes to start."""
    out, err, status = io.StringIO(), io.StringIO(), 0
    with mock.patch.object(sys, "argv", ["pd", *map(str, arguments)]), redirect_stdout(out), redirect_stderr(err):
        try:
            main()
        except SystemExit as ended:
            status = int(ended.code or 0)
    return Outcome(status, out.getvalue(), err.getvalue())


@contextmanager
def programs_kept_in(folder: Path) -> Iterator[None]:
    """Programs compiled in this process are found again by others, and theirs by this one."""
    names = {"jax_compilation_cache_dir": str(folder), "jax_persistent_cache_min_compile_time_secs": 0.0}
    before = {name: getattr(jax.config, name) for name in names}
    try:
        for name, value in names.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()


def rows(run: Path) -> list[Tree]:
    """`metrics.jsonl` without what depends on the clock."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith(("train/perf/", "train/mem/"))} for row in lines]


def saved_steps(run: Path) -> list[int]:
    """Of complete checkpoints."""
    return sorted(int(path.name) for path in (run / "ckpts").glob("*") if path.name.isdecimal())


def saved_arrays(run: Path, step: int) -> dict[str, np.ndarray]:
    """Every array of a checkpoint under ``item/path``, read without our code."""
    arrays = {}
    # Also what other devices, or several processes, have saved.
    here = ocp.args.StandardRestore(fallback_sharding=jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    for item in ("learned", "training"):
        path = (run / "ckpts" / str(step) / item).resolve()
        tree = ocp.Checkpointer(ocp.StandardCheckpointHandler()).restore(path, args=here)
        arrays |= {f"{item}/{name}": np.asarray(array) for name, array in tree.items()}
    return arrays
