"""Whether two versions of the code compute the same numbers, to the last bit: ten steps each of three runs, as digests.

    python -m tests.same_bits                        # this version; some minutes on two cores
    python -m tests.same_bits --against d16f549      # that commit as well, side by side; status 1 if they differ
    python -m tests.same_bits --against d16f549 --page docs/measurements/same_bits.md
    python -m tests.same_bits --only transformer     # one of the runs; may be repeated

The runs are the demo's model with a transformer as the CI function (`configs/demo/transformer.yaml`, with random
weights), TMS 5-2 (`configs/toys`, with random weights), and a tiny
Llama on 8 simulated devices with every kind of reconstruction loss and both scopes of persistent sources. Each run
yields two SHA-256 digests: of the metrics, training and evaluation, without those that depend on the clock
(`train/perf/`, `train/mem/`); and of every array of the last checkpoint, learned state and training state, in the order
of their names, which are part of the digest.

Both versions get the same targets and the same token data, and each reads its own `configs/`. They are driven through
the command line, in processes of their own, and checkpoints are read with Orbax alone, so modules may differ in name
and place.
"""

import argparse
import hashlib
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"  # before JAX is imported; in every process started here, too

import jax
import numpy as np
import orbax.checkpoint as ocp
from safetensors.numpy import save_file

ROOT = Path(__file__).parents[1]
STEPS = 10
CLOCK = ("train/perf/", "train/mem/")
"""Prefixes of metrics that depend on the clock and the machine."""
Digests = tuple[str, str]
"""Of metrics and of state."""


@dataclass(frozen=True)
class Subject:
    """One run. ``configs``: relative to the code; the first that a version has. ``settings``: values of `--set`.
    ``devices``: simulated ones."""

    name: str
    configs: tuple[str, ...]
    settings: tuple[str, ...]
    devices: int


COMMON = (
    f"pd.steps={STEPS}",
    "pd.faithfulness_warmup_steps=3",
    f"cadence={{train_log_every: 1, save_every: {STEPS}, keep_last_n_checkpoints: 1}}",
    "eval.every=5",
    f"eval.slow_every={STEPS}",
)
TINY = (
    "mesh={replica: 2, fsdp: 2, tensor: 2}",
    "memory={layers: scan}",
    "pd.batch_size=8",
    "data.max_seq_len=16",
    "pd.decomposition_targets=[{module_pattern: 'layers.*.mlp.up_proj', C: 20},"
    " {module_pattern: 'layers.*.mlp.down_proj', C: 12}]",
    "pd.ci_config={mode: global, fn_type: global_shared_transformer, simple_transformer_ci_cfg: {d_model: 16,"
    " n_blocks: 1, mlp_hidden_dim: [16], attn_config: {n_heads: 2, max_len: 16}}}",
    "pd.loss_metrics=[{type: FaithfulnessLoss, coeff: 100.0}, {type: ImportanceMinimalityLoss, coeff: 1.0e-3,"
    " pnorm: 2.0, beta: 0.2, eps: 1.0e-6, p_anneal_start_frac: 0.0, p_anneal_final_p: 0.5},"
    " {type: ChunkwiseSubsetReconLoss, coeff: 1.0, sites_per_chunk: 2, routing: {type: uniform_k_subset}},"
    " {type: StochasticReconLayerwiseLoss, coeff: 1.0}, {type: PersistentPGDReconLoss, coeff: 0.5, n_warmup_steps: 1,"
    " scope: {type: broadcast_across_batch}, optimizer: {type: adam, beta1: 0.5, beta2: 0.99,"
    " lr_schedule: {start_val: 0.02, warmup_pct: 0.2}}}, {type: PersistentPGDReconSubsetLoss, coeff: 0.5,"
    " start_frac: 0.3, use_sigmoid_parameterization: true, scope: {type: per_batch_per_position},"
    " routing: {type: static_probability, p: 0.5}, optimizer: {type: adam, lr_schedule: {start_val: 0.1}}}]",
    "eval.batch_size=8",
    "eval.metrics=[{type: CEandKLLosses, rounding_threshold: 0.0}, {type: CI_L0, groups: null}, {type: PGDReconLoss,"
    " init: random, step_size: 0.1, n_steps: 3, mask_scope: shared_across_batch}, {type: CIHiddenActsReconLoss}]",
)
TRANSFORMER = ("configs/demo/transformer.yaml", "configs/demo/decompose.yaml")
"""The second is what the first was called until 25 November 2026."""
SUBJECTS = (
    Subject("transformer", TRANSFORMER, (), 1),
    Subject("TMS 5-2", ("configs/toys/tms_5-2.yaml",), ("steps_per_dispatch=5",), 1),
    Subject("tiny Llama, 8 devices", TRANSFORMER, TINY, 8),
)


# ---- what both versions are given ----


def write_llama(folder: Path, d_model: int, n_layers: int, n_heads: int, n_kv_heads: int, d_mlp: int) -> None:
    """A random Llama as a Hugging Face folder, the same on every call."""
    folder.mkdir(parents=True)
    vocabulary, head_dim = 256, d_model // n_heads
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "vocab_size": vocabulary,
        "hidden_size": d_model, "intermediate_size": d_mlp, "num_hidden_layers": n_layers, "head_dim": head_dim,
        "num_attention_heads": n_heads, "num_key_value_heads": n_kv_heads, "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "rope_scaling": None, "tie_word_embeddings": True, "max_position_embeddings": 64,
        "attention_bias": False, "mlp_bias": False,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    rng = np.random.default_rng(0)

    def drawn(d_out: int, d_in: int) -> np.ndarray:
        return (rng.normal(size=(d_out, d_in)) / d_in**0.5).astype(np.float32)

    def scale() -> np.ndarray:
        return (1 + 0.1 * rng.normal(size=d_model)).astype(np.float32)

    d_kv = n_kv_heads * head_dim
    shapes = {
        "self_attn.q_proj": (d_model, d_model), "self_attn.k_proj": (d_kv, d_model),
        "self_attn.v_proj": (d_kv, d_model), "self_attn.o_proj": (d_model, d_model),
        "mlp.gate_proj": (d_mlp, d_model), "mlp.up_proj": (d_mlp, d_model), "mlp.down_proj": (d_model, d_mlp),
    }  # fmt: skip
    tensors = {"model.embed_tokens.weight": drawn(vocabulary, d_model), "model.norm.weight": scale()}
    for layer in range(n_layers):
        for name, shape in shapes.items():
            tensors[f"model.layers.{layer}.{name}.weight"] = drawn(*shape)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{layer}.{name}.weight"] = scale()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def write_toy(folder: Path) -> None:
    """A random TMS 5-2 whose second matrix is the transpose of the first, the same on every call."""
    folder.mkdir(parents=True)
    config = {"architecture": "tms", "n_features": 5, "n_hidden": 2, "n_hidden_layers": 0}
    (folder / "config.json").write_text(json.dumps(config))
    rng = np.random.default_rng(0)
    W = rng.normal(size=(5, 2)).astype(np.float32)
    tensors = {"linear1": W, "linear2": np.ascontiguousarray(W.T), "bias": np.full(5, -0.1, np.float32)}
    save_file(tensors, folder / "model.safetensors")


def write_inputs(folder: Path) -> None:
    """Targets, and token data, which this version of the code makes."""
    write_llama(folder / "demo" / "target", 64, 4, 4, 2, 192)
    write_llama(folder / "tiny" / "target", 16, 2, 2, 1, 24)
    write_toy(folder / "toy" / "target")
    (folder / "text").mkdir()
    for n in range(50):
        text = "".join(f"{n} times {m} makes {n * m}.\n" for m in range(100))
        (folder / "text" / f"{n}.txt").write_text(text)
    for name, seq_len in (("demo", 64), ("tiny", 16)):
        out = str(folder / name / "data")
        given = ("--out", out, "--seq-len", str(seq_len), "--eval-fraction", "0.2")
        pd(ROOT, 1, "data", "tokenize", str(folder / "text"), *given)


def given_to(subject: Subject, inputs: Path) -> tuple[str, ...]:
    """Settings that say where target and data are."""
    place = inputs / {"transformer": "demo", "TMS 5-2": "toy"}.get(subject.name, "tiny")
    target = f"target={{folder: {place / 'target'}}}"
    data = (f"data.train={place}/data/train", f"data.eval={place}/data/eval")
    return (target,) if place.name == "toy" else (target, *data)


# ---- one version ----


def pd(code: Path, devices: int, *arguments: str) -> None:
    """`pd` of the code in the folder ``code``. SystemExit with what it said if it fails."""
    run_python(code, devices, "-m", "param_decomp_lab", *arguments)


def refuse_another(code: Path) -> None:
    """SystemExit when Python started in the folder ``code`` imports the laboratory from elsewhere."""
    found = run_python(code, 1, "-c", "import param_decomp_lab; print(param_decomp_lab.__file__)").strip()
    if not Path(found).resolve().is_relative_to(code.resolve()):
        sys.exit(f"in {code}, another installation is imported: {found}")


def run_python(code: Path, devices: int, *arguments: str) -> str:
    """What Python prints that is started in the folder ``code`` with so many simulated devices."""
    dropped = ("PYTHONPATH", "PYTHONSAFEPATH", "XLA_FLAGS", "NPROC", "JAX_COMPILATION_CACHE_DIR")
    environment = {name: value for name, value in os.environ.items() if name not in dropped}
    environment |= {"WANDB_MODE": "disabled", "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}
    if devices > 1:
        environment["NPROC"] = "16"  # threads for all devices to meet in a collective
    done = subprocess.run(
        [sys.executable, *arguments], cwd=code, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"in {code}: python {' '.join(arguments)}\nended with {done.returncode}:\n{done.stderr[-3000:]}")
    return done.stdout


def digests_of(subject: Subject, code: Path, inputs: Path) -> Digests:
    """Makes the run with the code in the folder ``code``."""
    with tempfile.TemporaryDirectory() as folder:
        settings = (*COMMON, *subject.settings, *given_to(subject, inputs), f"out_dir={folder}", "run_id=p-00000001")
        config = next(config for config in subject.configs if (code / config).is_file())
        pd(code, subject.devices, "train", config, *(word for key in settings for word in ("--set", key)))
        run = Path(folder) / "p-00000001"
        return metrics_digest(run), state_digest(run)


def metrics_digest(run: Path) -> str:
    """Of all rows of `metrics.jsonl`, in their order; keys within a row in alphabetical order."""
    digest = hashlib.sha256()
    for line in (run / "metrics.jsonl").read_text().splitlines():
        row: dict[str, Any] = json.loads(line)
        kept = {name: value for name, value in row.items() if not name.startswith(CLOCK)}
        digest.update(json.dumps(kept, sort_keys=True).encode() + b"\n")
    return digest.hexdigest()


def state_digest(run: Path) -> str:
    """Of names, dtypes, shapes and bytes of the arrays of the last checkpoint."""
    # Saved by other devices than there are here.
    here = ocp.args.StandardRestore(fallback_sharding=jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    digest = hashlib.sha256()
    for item in ("learned", "training"):
        path = (run / "ckpts" / str(STEPS) / item).resolve()
        arrays: dict[str, Any] = ocp.Checkpointer(ocp.StandardCheckpointHandler()).restore(path, args=here)
        for name, array in sorted(arrays.items()):
            values = np.asarray(array)
            digest.update(f"{item}/{name} {values.dtype} {values.shape}\n".encode() + values.tobytes())
    return digest.hexdigest()


# ---- two versions ----


@contextmanager
def checked_out(ref: str) -> Iterator[Path]:
    """A worktree of the commit, for the time of the block."""
    git = ("git", "-C", str(ROOT), "worktree")
    with tempfile.TemporaryDirectory(prefix="param-decomp-same-bits-") as folder:
        code = Path(folder) / "code"
        subprocess.run([*git, "add", "--quiet", "--detach", str(code), ref], check=True)
        try:
            yield code
        finally:
            subprocess.run([*git, "remove", "--force", str(code)], check=True)


def commit_of(ref: str, code: Path = ROOT) -> str:
    """The full name of the commit. SystemExit where there is none."""
    git = ("git", "-C", str(code), "rev-parse", "--verify", "--quiet", f"{ref}^{{commit}}")
    found = subprocess.run(git, capture_output=True, text=True, check=False)
    if found.returncode:
        sys.exit(f"{ref} is not a commit")
    return found.stdout.strip()


def is_changed() -> bool:
    """Whether the code of the packages here is not that of the commit."""
    git = ("git", "-C", str(ROOT), "status", "--porcelain", "--", "param_decomp_*", "configs")
    return bool(subprocess.run(git, capture_output=True, check=True).stdout)


def page(found: dict[str, dict[str, Digests]], against: str | None) -> str:
    """The page, in Markdown: a row for each run and version."""
    command = "python -m tests.same_bits" + (f" --against {against[:7]}" if against else "")
    lines = [
        "# The same numbers after refactoring",
        "",
        f"`{command}`: {STEPS} steps of each run, Python {platform.python_version()}, JAX {version('jax')},",
        f"{platform.machine()} CPU. The first 32 digits of SHA-256, of metrics and of the state at the end.",
        "",
        "| run | commit | metrics | state | |",
        "|---|---|---|---|---|",
    ]
    for name, by_commit in found.items():
        first = next(iter(by_commit.values()))
        for commit, digests in by_commit.items():
            verdict = "" if digests is first else "same" if digests == first else "**different**"
            metrics, state = (digest[:32] for digest in digests)
            lines.append(f"| {name} | {commit} | `{metrics}` | `{state}` | {verdict} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Prints one line for each run and version as they come."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", metavar="GITREF", help="another version of the code, to compare with")
    parser.add_argument("--only", action="append", choices=[s.name for s in SUBJECTS], help="may be repeated")
    parser.add_argument("--page", type=Path, help="write the table here as well")
    given = parser.parse_args()
    against = commit_of(given.against) if given.against else None
    here = commit_of("HEAD")[:7] + (" and changes" if is_changed() else "")
    found: dict[str, dict[str, Digests]] = {}
    with tempfile.TemporaryDirectory() as folder:
        write_inputs(Path(folder))

        def measure(code: Path, commit: str) -> None:
            refuse_another(code)
            for subject in SUBJECTS:
                if given.only is None or subject.name in given.only:
                    digests = digests_of(subject, code, Path(folder))
                    found.setdefault(subject.name, {})[commit] = digests
                    print(f"{subject.name:22} {commit:20} metrics {digests[0]} state {digests[1]}", flush=True)

        if against is not None:
            with checked_out(against) as code:
                measure(code, against[:7])
        # Named apart also where the two are the same commit, which must agree with itself.
        measure(ROOT, f"{here}, again" if against and here == against[:7] else here)
    if given.page is not None:
        given.page.write_text(page(found, against))
    different = [name for name, by_commit in found.items() if len(set(by_commit.values())) > 1]
    if different:
        sys.exit(f"different: {', '.join(different)}")


if __name__ == "__main__":
    main()
