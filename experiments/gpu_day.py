"""What only a real GPU can tell: memory planned against taken, speed of the layer-18 step, its phases, toys, SmolLM2.

    python -m experiments.gpu_day --seconds 570 --json gpu.json              # all of it; again, to go on with the rest
    python -m experiments.gpu_day --part plan --part step --json gpu.json    # of these parts what the file has not yet
    python -m experiments.gpu_day --count                                    # afterwards, without a GPU: the arithmetic
    python -m experiments.gpu_day --toy --json toy.json                      # two small ones, on a CPU too
    python -m experiments.gpu_day --page docs/measurements/gpu.md            # the page, from docs/measurements/gpu.json

Every item is a configuration with weights and tokens drawn on the device: no file of weights is needed. It is measured
in a process of its own, since a process has one peak. JAX takes 0.92 of the memory at the start, as in a run
(slurm/task.sh): what its allocator has handed out at most (`peak_bytes_in_use`) is then compared with XLA's plan, and
what the driver counts beyond the pool is the libraries' (contexts, kernels, graphs). Beside it, in processes without
the GPU, the same configuration is compiled as `pd probe` does it. The file is written anew after every item; items that
are in it are not measured again.
"""

import argparse
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

ROOT = Path(__file__).parents[1]
JSON_FILE = ROOT / "docs" / "measurements" / "gpu.json"
PARTS = ("plan", "step", "phases", "toys", "small")
GIB = 2**30
DENSE_BF16 = 989e12
"""FLOP/s of an H100 or H200, from the vendor's data sheet, without sparsity."""
NOT_NEEDED = ("pyarrow", "orbax", "matplotlib")
"""Packages that modules of the laboratory import and that nothing here uses; large ones, and not on every machine."""


@dataclass(frozen=True)
class Item:
    """A configuration to be measured.

    ``parts``: those that show it. ``expected_s``: it is not begun with less time left. ``rounds``: dispatches that are
    timed, after a first. ``traced``: by the profiler, without CUDA graphs, whose kernels have no names. ``over_plan``:
    GiB that the pool is larger than the plan of the item ``of``, in place of 0.92 of the card.
    """

    name: str
    parts: tuple[str, ...]
    config: str
    sets: tuple[str, ...]
    expected_s: float
    rounds: int = 6
    traced: bool = False
    over_plan: float | None = None
    of: str = ""


def _layer_18(name: str, parts: tuple[str, ...], preset: str, batch: int, seq: int = 512, **more: Any) -> Item:
    config = more.pop("config", "configs/llama8b_l18.yaml")
    sets = (
        "mesh={replica: 1, fsdp: 1}",
        "eval=null",
        f"data.max_seq_len={seq}",
        f"pd.batch_size={batch}",
        f"memory={{preset: {preset}}}",
        f"remat_recon_forwards={'false' if preset == 'plain' else 'true'}",
    )
    return Item(name, parts, config, sets, more.pop("expected_s", 90.0), **more)


def _toy(name: str, parts: tuple[str, ...], at_once: int) -> Item:
    return Item(
        f"{name}, {at_once:,} at once", parts, f"configs/toys/{name}.yaml",
        ("eval=null", f"steps_per_dispatch={at_once}"), 30.0, rounds=20,
    )  # fmt: skip


def _smollm2(name: str, parts: tuple[str, ...], *sets: str) -> Item:
    return Item(name, parts, "configs/demo-smollm2.yaml", ("eval=null", *sets), 60.0, rounds=20)


_LARGER = ("pd.batch_size=64", "data.max_seq_len=512", "runtime.autocast_bf16=true", "memory={preset: balanced}",
           "pd.ci_config.simple_transformer_ci_cfg.attn_config.max_len=512")  # fmt: skip

# Batches are such that the plans fit: of 16 × 512 tokens the plain policy's is 142 GiB, of 64 × 512 the balanced one's
# 138 (`pd probe`).
ITEMS = (
    _toy("tms_5-2", ("plan", "toys"), 100),
    _layer_18("layer 18, balanced, 8 × 512", ("plan", "step"), "balanced", 8),
    _layer_18("layer 18, plain, 8 × 512", ("plan", "step"), "plain", 8),
    _layer_18("layer 18, lean, 8 × 512", ("plan", "step"), "lean", 8),
    _smollm2("SmolLM2-135M, 64 × 512, bf16, balanced", ("plan", "small"), *_LARGER),
    _layer_18("layer 18, balanced, 32 × 512", ("plan", "step"), "balanced", 32),
    _layer_18("layer 18, balanced, 32 × 512, traced", ("phases",), "balanced", 32, traced=True, expected_s=110.0),
    _layer_18("layer 18, lean, 96 × 512", ("plan", "step"), "lean", 96, rounds=5),
    _toy("resid_mlp1", ("toys",), 50),
    _toy("tms_5-2", ("toys",), 1000),
    _toy("resid_mlp1", ("toys",), 1000),
    _smollm2("SmolLM2-135M, 4 × 64 as configured", ("small",)),
    _layer_18(
        "layer 18, balanced, 32 × 512, 0.5 GiB over its plan", ("plan",), "balanced", 32, rounds=2,
        over_plan=0.5, of="layer 18, balanced, 32 × 512",
    ),
    _layer_18(
        "layer 18 of C 49,152, balanced, 16 × 512", ("plan",), "balanced", 16, rounds=3,
        config="configs/llama8b_l18_C49k.yaml",
    ),
    _layer_18("layer 18, balanced, 48 × 512", ("plan", "step"), "balanced", 48, rounds=5),
    _smollm2("SmolLM2-135M, 4 × 64, 10 at once", ("small",), "steps_per_dispatch=10"),
    _layer_18("layer 18, published, 4 × 512", ("plan", "step"), "published", 4, rounds=5, expected_s=180.0),
)  # fmt: skip

_TINY_TARGET = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "vocab_size": 64,
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "intermediate_size": 24, "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "torch_dtype": "float32",
}  # fmt: skip


def toy_items(folder: Path) -> tuple[Item, ...]:
    """Of every kind a small one. ``folder``: for the description of a small target."""
    (folder / "config.json").write_text(json.dumps(_TINY_TARGET))
    tiny = (
        f"target={{folder: {folder}}}",
        "mesh={replica: 1, fsdp: 1}",
        "eval=null",
        "memory={preset: balanced}",
        "runtime.autocast_bf16=false",
        "pd.faithfulness_warmup_steps=0",
        "pd.decomposition_targets=[{module_pattern: model.layers.1.mlp.*_proj, C: 8}]",
        "pd.ci_config={mode: layerwise, fn_type: shared_mlp, hidden_dims: [8]}",
        "pd.loss_metrics=[{type: FaithfulnessLoss, coeff: 100}, {type: CIMaskedReconLoss, coeff: 1}]",
        "pd.batch_size=2",
        "data.max_seq_len=8",
    )
    return (
        Item("tiny", ("plan", "step", "phases"), "configs/llama8b_l18.yaml", tiny, 0.0, rounds=2, traced=True),
        Item("tms", ("plan", "toys"), "configs/toys/tms_5-2.yaml",
             ("eval=null", "pd.batch_size=8", "steps_per_dispatch=2"), 0.0, rounds=2),
    )  # fmt: skip


# ---- packages that are not there ----


class _StandIns(MetaPathFinder, Loader):
    """Modules whose every attribute can be named and called, for packages that are imported and not used."""

    def __init__(self, packages: Sequence[str]) -> None:
        self._packages = frozenset(packages)

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if fullname.split(".")[0] in self._packages else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = ModuleType(spec.name)
        setattr(module, "__getattr__", _anything)  # noqa: B010  (mypy refuses the assignment)
        return module

    def exec_module(self, module: ModuleType) -> None:
        pass


def _anything(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return MagicMock(name=name)


def stand_in_for_missing() -> None:
    """Before anything of the laboratory is imported."""
    sys.meta_path.append(_StandIns([name for name in NOT_NEEDED if importlib.util.find_spec(name) is None]))


# ---- one item, in a process of its own ----


def measure(item: Item) -> dict[str, Any]:
    """Plan, live memory and time of the item's training step, and where the time went if that is asked for."""
    import jax

    from param_decomp_aot.compile import memory_plan
    from param_decomp_lab.config import load_config
    from param_decomp_lab.probe.outline import known_target, outline_on
    from param_decomp_lab.setup.base import build_mesh
    from param_decomp_lab.setup.programs import steps_program

    config = load_config(ROOT / item.config, item.sets)
    outline = outline_on(config, known_target(config), build_mesh(config))
    at_once = config.wrapper.steps_per_dispatch
    device = outline.mesh.devices.flat[0]
    found: dict[str, Any] = {
        "device": device.device_kind,
        "leading": list(outline.leading),
        "sites": len(outline.problem.target.sites),
        "steps_per_dispatch": at_once,
    }
    with jax.set_mesh(outline.mesh):
        started = time.perf_counter()
        lowered = steps_program(outline, at_once).lower()
        lowered_at = time.perf_counter()
        step = lowered.compile()
        plan = memory_plan(step)
        found |= {
            "lower_s": lowered_at - started,
            "compile_s": time.perf_counter() - lowered_at,
            "plan": {**vars(plan), "peak": plan.peak},
            "pool": _stats(device).get("bytes_limit"),
            "live": {"compiled": _stats(device).get("peak_bytes_in_use")},
        }
        if found["pool"] is not None and item.over_plan is None and plan.peak > found["pool"]:
            return {**found, "failed": "the plan is larger than the pool"}
        try:
            found |= _run(item, outline, step, at_once, found["live"])
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            return {**found, "failed": f"out of memory: {str(error)[:500]}"}
    return found


def _run(item: Item, outline: Any, step: Any, at_once: int, live: dict[str, Any]) -> dict[str, Any]:
    """Times of the compiled ``step``, its metrics, and the phases if they are asked for; the peaks go into ``live``."""
    import jax
    import numpy as np

    device = outline.mesh.devices.flat[0]
    weights = _weights(outline.weights)
    state, first_step = _fresh_state(outline)
    draw = _draws(outline, at_once)
    jax.block_until_ready((state, weights))
    live["made"] = _stats(device).get("peak_bytes_in_use")
    number, times = np.int32(at_once), []
    rows: Any = None
    for n in range(item.rounds + 1):
        inputs = jax.block_until_ready(draw(n))
        if n == 1:
            live["in_use_before"] = _stats(device).get("bytes_in_use")
        started = time.perf_counter()
        state, rows = step(state, weights, inputs, number)
        jax.block_until_ready((state, rows))
        times.append(time.perf_counter() - started)
    stats = _stats(device)
    live["steps"] = stats.get("peak_bytes_in_use")
    values = np.asarray(rows.values)
    found: dict[str, Any] = {
        "stats": stats,
        "driver_used": _driver_used(device),
        "first_s": times[0],
        "step_s": statistics.median(times[1:]) / at_once,
        "steps_s": [seconds / at_once for seconds in times[1:]],
        "finite": bool(np.isfinite(values).all()),
        "metrics": dict(zip(rows.names, map(float, values[-1]), strict=True)),
    }
    if item.traced:
        run = _Traced(outline, step, weights, draw, at_once, first_step + at_once * (item.rounds + 1))
        found["phases"] = run(state, found["step_s"])
    return found


def _stats(device: Any) -> dict[str, Any]:
    """The allocator's account; empty where there is none (CPUs)."""
    return dict(device.memory_stats() or {})


def _driver_used(device: Any) -> int | None:
    """Bytes of the card in use as the driver says it, by all processes; None where there is no such card."""
    if device.platform != "gpu":
        return None
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    said = subprocess.run(command, capture_output=True, text=True).stdout.split()
    return int(said[0]) * 2**20 if said else None


def _fresh_state(outline: Any) -> tuple[Any, int]:
    """A fresh state at the first step at which every attack is on, and the number of that step."""
    from functools import partial

    import equinox as eqx
    import jax
    import jax.numpy as jnp

    from param_decomp_lab.setup.programs import init_program

    spec = outline.problem.decomposition
    first = max((attack.first_step(spec.steps) for _, attack in spec.persistent.values()), default=0)
    state = init_program(outline).function()
    at = jax.jit(partial(jnp.full, (), first, state.step.dtype), out_shardings=state.step.sharding)()
    return eqx.tree_at(lambda s: s.step, state, at), first


def _weights(shapes: Any) -> Any:
    """Random weights where they lie, norms of ones; one array after the other, or their making would be the peak."""
    from functools import partial

    import jax
    import jax.numpy as jnp

    def make(key: Any, name: str, shape: Any) -> Any:
        if "norm" in name:
            return jnp.ones(shape.shape, shape.dtype)
        if len(shape.shape) < 3:
            return 0.02 * jax.random.normal(key, shape.shape, shape.dtype)
        # Layer by layer, since bits are drawn in 32 of them.
        keys = jax.random.split(key, shape.shape[0])
        return jax.lax.map(lambda k: 0.02 * jax.random.normal(k, shape.shape[1:], shape.dtype), keys)

    named, structure = jax.tree.flatten_with_path(shapes)
    keys = jax.random.split(jax.random.key(0), len(named))
    arrays = []
    for key, (path, shape) in zip(keys, named, strict=True):
        of_shape = partial(make, name=jax.tree_util.keystr(path), shape=shape)
        made = jax.jit(of_shape, out_shardings=shape.sharding)(key)
        arrays.append(jax.block_until_ready(made))
    return jax.tree.unflatten(structure, arrays)


def _draws(outline: Any, at_once: int) -> Callable[[int], Any]:
    """What a dispatch is handed: random tokens, or nothing where the program draws its batches itself."""
    import jax
    import jax.numpy as jnp

    inputs = outline.train.input_shapes(at_once)
    if not jax.tree.leaves(inputs):
        return lambda number: inputs
    vocabulary = outline.problem.target.architecture.vocab_size

    def draw(number: Any) -> Any:
        return jax.random.randint(jax.random.key(number), inputs.shape, 0, vocabulary, jnp.int32)

    drawn: Callable[[int], Any] = jax.jit(draw, out_shardings=inputs.sharding)
    return drawn


@dataclass(frozen=True)
class _Traced:
    """Some steps under the profiler."""

    outline: Any
    step: Any
    weights: Any
    draw: Callable[[int], Any]
    at_once: int
    number: int

    def __call__(self, state: Any, untraced_s: float, dispatches: int = 3) -> dict[str, Any]:
        """The profile, as `pd profile` writes it, and milliseconds by phase."""
        from math import prod

        import jax
        import numpy as np

        from param_decomp_lab.profile.scopes import read_times
        from param_decomp_lab.profile.table import Profile

        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0
        drawn = [jax.block_until_ready(self.draw(n)) for n in range(dispatches)]
        with tempfile.TemporaryDirectory(prefix="param-decomp-") as folder:
            with jax.profiler.trace(folder, profiler_options=options):
                started = time.perf_counter()
                for n, inputs in enumerate(drawn):
                    with jax.profiler.StepTraceAnnotation("step", step_num=n):
                        state, rows = self.step(state, self.weights, inputs, np.int32(self.at_once))
                jax.block_until_ready((state, rows))
                traced = time.perf_counter() - started
            (file,) = Path(folder).rglob("*.xplane.pb")
            kinds = {site.kind for site in self.outline.problem.target.sites.all}
            times = read_times(file, self.step.as_text(), kinds, 1)
        steps = dispatches * self.at_once
        tokens = prod(self.outline.leading)
        profile = Profile(steps, self.number, tokens, traced / steps, untraced_s, times)
        return {**profile.as_json(), "phases": {name: profile.ms(ns) for name, ns in profile.phases()}}


def measure_rates(size: int = 8192, copied: int = 4 * GIB) -> dict[str, Any]:
    """FLOP/s of bf16 products of two square matrices of normal numbers; bytes/s, read and written, of a copy."""
    import jax
    import jax.numpy as jnp

    def median_s(work: Callable[[], Any], times: int) -> float:
        jax.block_until_ready([work() for _ in range(3)])
        found = []
        for _ in range(7):
            started = time.perf_counter()
            jax.block_until_ready([work() for _ in range(times)][-1])
            found.append((time.perf_counter() - started) / times)
        return statistics.median(found)

    a, b = (jax.random.normal(jax.random.key(n), (size, size), jnp.bfloat16) for n in range(2))
    product = jax.jit(lambda x, y: x @ y)
    long = jax.random.normal(jax.random.key(2), (copied // 4,), jnp.float32)
    more = jax.jit(lambda x: x + 1)
    of_product = median_s(lambda: product(a, b), 10)
    of_copy = median_s(lambda: more(long), 2)
    return {
        "size": size,
        "matmul_s": of_product,
        "matmul_flops_per_s": 2 * size**3 / of_product,
        "copy_bytes_per_s": 2 * copied / of_copy,
    }


def probe(item: Item) -> dict[str, Any]:
    """What `pd probe` says of the item's step, for a card that need not be there."""
    from param_decomp_lab.config import load_config
    from param_decomp_lab.errors import CannotTell, UserError
    from param_decomp_lab.probe.cards import card
    from param_decomp_lab.probe.measure import Where
    from param_decomp_lab.probe.measure import measure as compile_step
    from param_decomp_lab.probe.subject import STEP, run_subject

    subject = run_subject(load_config(ROOT / item.config, item.sets))
    try:
        step = compile_step(subject, STEP, Where(card("h200"), 1, None))
    except (UserError, CannotTell) as error:
        return {"failed": str(error)}
    return {"plan": {**vars(step.memory), "peak": step.peak}, "compile_s": step.compile_s}


def count(item: Item) -> dict[str, Any]:
    """The arithmetic of the item's step (`pd probe` counts it so), as a whole and by phase."""
    from collections import Counter

    from param_decomp_lab.config import load_config
    from param_decomp_lab.probe.subject import run_subject
    from param_decomp_lab.profile.scopes import classify_scope

    counted = run_subject(load_config(ROOT / item.config, item.sets)).flops()
    by_phase: Counter[str] = Counter()
    for scope, flops in counted.by_scope.items():
        by_phase[classify_scope(scope, ()).phase] += flops
    return {"total": counted.total, "by_phase": dict(by_phase), "counted_once": list(counted.unknown)}


def machine(toy: bool) -> dict[str, Any]:
    """What the figures were measured on, and with what."""
    from importlib.metadata import PackageNotFoundError, version

    import jax

    def of(package: str) -> str | None:
        try:
            return version(package)
        except PackageNotFoundError:
            return None

    packages = ("jax", "jaxlib", "jax-cuda13-plugin", "nvidia-cudnn-cu13", "equinox", "optax", "numpy")
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    on_gpu = jax.default_backend() == "gpu"
    return {
        "date": time.strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "device": jax.devices()[0].device_kind,
        "card": subprocess.run(query, capture_output=True, text=True).stdout.strip() if on_gpu else None,
        "packages": {name: of(name) for name in packages},
        "rates": measure_rates(64, 1 << 20) if toy else measure_rates(),
    }


# ---- all items ----


class Found:
    """The file of results, written anew after each: ``measured``, ``probed``, ``counted`` by item; ``machine``."""

    def __init__(self, file: Path) -> None:
        self._file, self._lock = file, threading.Lock()
        self.all: dict[str, Any] = {"measured": {}, "probed": {}, "counted": {}}
        if file.is_file():
            self.all |= json.loads(file.read_text())

    def add(self, kind: str, name: str, result: Mapping[str, Any]) -> None:
        with self._lock:
            self.all[kind][name] = result
            self._write()

    def describe(self, here: Mapping[str, Any]) -> None:
        with self._lock:
            self.all["machine"] = here
            self._write()

    def has(self, kind: str, name: str) -> bool:
        """Whether it is there, and came to an end."""
        there = self.all[kind].get(name)
        return there is not None and "unfinished" not in there

    def _write(self) -> None:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        new = self._file.with_name(self._file.name + ".new")
        new.write_text(json.dumps(self.all, indent=1) + "\n")
        new.replace(self._file)


def run_all(options: argparse.Namespace, items: Sequence[Item], folder: Path) -> None:
    """Measures one item after the other, those compiled without the GPU beside them."""
    ends = time.monotonic() + options.seconds
    found = Found(options.json)
    chosen = [item for item in items if {*item.parts} & {*options.part}]
    apart = _Apart(options, folder, ends)
    if "machine" not in found.all:
        found.describe(apart("machine", "", 120.0))
        print(found.all["machine"], flush=True)
    to_probe = [item for item in chosen if (item.over_plan is None and not item.traced) or options.toy]
    with ThreadPoolExecutor(max(1, options.beside)) as pool:
        if options.beside:
            for item in to_probe:
                if not found.has("probed", item.name):
                    pool.submit(_probe_beside, found, apart, item.name)
        for item in chosen:
            if found.has("measured", item.name):
                continue
            if ends - time.monotonic() < item.expected_s:
                print(f"{item.name}: left for the next call", flush=True)
                continue
            environment = _environment(item, found)
            if environment is None:
                print(f"{item.name}: needs {item.of} first", flush=True)
                continue
            started = time.monotonic()
            result = apart("measure", item.name, 300.0, environment)
            result |= {"config": item.config, "sets": [*item.sets], "parts": [*item.parts]}
            result |= {"over_plan_gib": item.over_plan, "of": item.of, "traced": item.traced}
            found.add("measured", item.name, result)
            print(f"{_line(item.name, result)} ({time.monotonic() - started:.0f} s)", flush=True)


def _probe_beside(found: Found, apart: "_Apart", name: str) -> None:
    found.add("probed", name, apart("probe", name, 400.0))


def _environment(item: Item, found: Found) -> dict[str, str] | None:
    """Variables of the item's process; None where they depend on an item that is not there."""
    if item.traced:
        return {"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_enable_command_buffer=".strip()}
    if item.over_plan is None:
        return {}
    base = found.all["measured"].get(item.of, {})
    if not base.get("pool") or "failed" in base:
        return None
    total = base["pool"] / MEM_FRACTION
    fraction = (base["plan"]["peak"] + item.over_plan * GIB) / total
    return {"XLA_PYTHON_CLIENT_MEM_FRACTION": f"{fraction:.5f}"}


MEM_FRACTION = 0.92
"""As in `param_decomp_lab.probe`, whose packages this process does not import."""


class _Apart:
    """A process for each thing, this script with `--do`."""

    def __init__(self, options: argparse.Namespace, folder: Path, ends: float) -> None:
        self._toy, self._folder, self._ends = options.toy, folder, ends

    def __call__(self, what: str, name: str, limit_s: float, extra: Mapping[str, str] | None = None) -> dict[str, Any]:
        """What it found; ``failed`` says why it did not, ``unfinished`` that there was no time."""
        with tempfile.TemporaryDirectory(dir=self._folder) as own:
            out = Path(own) / "found.json"
            command = [sys.executable, "-m", "experiments.gpu_day", "--do", what, "--name", name, "--json", str(out)]
            command += ["--toy", "--folder", str(self._folder)] if self._toy else []
            environment = {
                **os.environ,
                "HF_HUB_OFFLINE": "1",
                "XLA_PYTHON_CLIENT_MEM_FRACTION": str(MEM_FRACTION),
                "JAX_COMPILATION_CACHE_DIR": os.environ.get(
                    "JAX_COMPILATION_CACHE_DIR", str(self._folder / "compiled")
                ),
                **({"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""} if what == "probe" else {}),
                **(extra or {}),
            }
            limit = max(1.0, min(limit_s, self._ends - time.monotonic()))
            try:
                done = subprocess.run(
                    command, cwd=ROOT, env=environment, capture_output=True, text=True, errors="replace", timeout=limit
                )
            except subprocess.TimeoutExpired:
                return {"failed": f"not done in {limit:.0f} s", "unfinished": True}
            if out.is_file():
                result: dict[str, Any] = json.loads(out.read_text())
                return result
        print(f"---- {what} {name}: status {done.returncode}\n{done.stderr[-3000:]}\n----", flush=True)
        out_of_memory = "RESOURCE_EXHAUSTED" in done.stderr
        said = (done.stderr.strip().splitlines() or [""])[-1]
        reason = "out of memory" if out_of_memory else f"status {done.returncode}: {said[:500]}"
        return {"failed": reason, **({} if out_of_memory else {"unfinished": True})}


def _line(name: str, result: Mapping[str, Any]) -> str:
    """One line for the terminal."""
    words = []
    if "plan" in result:
        words.append(f"plan {result['plan']['peak'] / GIB:.3f} GiB")
    if result.get("live", {}).get("steps"):
        words.append(f"live {result['live']['steps'] / GIB:.3f} (made {result['live']['made'] / GIB:.2f})")
    if "step_s" in result:
        words.append(f"step {1e3 * result['step_s']:.3f} ms, compiled in {result['compile_s']:.0f} s")
    if "failed" in result:
        words.append(f"FAILED: {result['failed'][:300]}")
    return f"{name}: {', '.join(words)}"


@contextmanager
def _folder(given: Path | None) -> Iterator[Path]:
    if given is not None:
        yield given
        return
    with tempfile.TemporaryDirectory(prefix="param-decomp-gpu-") as folder:
        yield Path(folder)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", action="append", choices=PARTS, help="measure this (default: all)")
    parser.add_argument("--json", type=Path, default=JSON_FILE, help="results (default: docs/measurements/gpu.json)")
    parser.add_argument("--seconds", type=float, default=1500.0, help="begin nothing that would end later")
    parser.add_argument("--beside", type=int, default=3, help="processes that compile without the GPU meanwhile")
    parser.add_argument("--toy", action="store_true", help="two small items, on whatever device is here")
    parser.add_argument("--count", action="store_true", help="count the arithmetic of what is in --json; no GPU needed")
    parser.add_argument("--page", type=Path, help="measure nothing; write the page of what is in --json")
    for name, kind in (("--do", str), ("--name", str), ("--folder", Path)):
        parser.add_argument(name, type=kind, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    options.part = options.part or [*PARTS]
    if options.page is not None:
        from experiments.gpu_day_page import page

        options.page.write_text(page(json.loads(options.json.read_text())))
        return
    with _folder(options.folder) as folder:
        items = toy_items(folder) if options.toy else ITEMS
        if options.do is None and not options.count:
            run_all(options, items, folder)
            return
        stand_in_for_missing()
        if options.count:
            found = Found(options.json)
            for item in items:
                if item.name in found.all["measured"] and not found.has("counted", item.name):
                    found.add("counted", item.name, count(item))
            return
        options.json.write_text(json.dumps(_do(options.do, {item.name: item for item in items}, options), default=str))


def _do(what: str, items: Mapping[str, Item], options: argparse.Namespace) -> dict[str, Any]:
    match what:
        case "machine":
            return machine(options.toy)
        case "probe":
            return probe(items[options.name])
        case _:
            return measure(items[options.name])


if __name__ == "__main__":
    main()
