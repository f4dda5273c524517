"""A configuration's training step on the card: plan, live memory, times, phases; and what can be computed without the
card.

JAX takes 0.92 of the memory at the start, as in a run (slurm/task.sh). The peak of its allocator (`peak_bytes_in_use`)
is then compared with XLA's plan. What the driver counts beyond JAX's memory belongs to libraries (contexts, kernels,
graphs).
"""

import os
import platform
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.gpu_day.cards import cards_here
from experiments.gpu_day.items import Step
from experiments.gpu_day.job import ROOT
from param_decomp_aot.compile import memory_plan
from param_decomp_lab.config import load_config
from param_decomp_lab.errors import CannotTell, UserError
from param_decomp_lab.probe.answer import compile_parts
from param_decomp_lab.probe.cards import MemoryPool, find_card
from param_decomp_lab.probe.compiler import installed
from param_decomp_lab.probe.measure import Where
from param_decomp_lab.probe.outline import known_target, outline_on
from param_decomp_lab.probe.subject import STEP, run_subject
from param_decomp_lab.profile import fresh_state, traced
from param_decomp_lab.profile.scopes import classify_scope, read_times
from param_decomp_lab.profile.table import Profile
from param_decomp_lab.setup.base import Outline, build_mesh
from param_decomp_lab.setup.programs import steps_program
from param_decomp_lab.setup.resolved import ResolvedConfig

PACKAGES = ("jax", "jaxlib", "jax-cuda13-plugin", "nvidia-cudnn-cu13", "nvidia-nccl-cu13", "equinox", "optax", "numpy")


def machine(toy: bool) -> dict[str, Any]:
    """Describes the machine and the software of the measurements. ``toy``: measures products and copies of sizes for a
    CPU."""
    return {
        "date": time.strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "platform": jax.default_backend(),
        "device": jax.devices()[0].device_kind,
        "packages": {name: found for name in PACKAGES if (found := installed(name)) is not None},
        "rates": measure_rates(64, 1 << 20) if toy else measure_rates(),
    }


def median_s(work: Callable[[], Any], times: int) -> float:
    """Returns the median seconds of ``times`` back-to-back calls; the first three are not counted."""
    jax.block_until_ready([work() for _ in range(3)])
    found = []
    for _ in range(7):
        started = time.perf_counter()
        jax.block_until_ready([work() for _ in range(times)][-1])
        found.append((time.perf_counter() - started) / times)
    return statistics.median(found)


def measure_rates(size: int = 8192, copied: int = 4 << 30) -> dict[str, Any]:
    """Measures FLOP/s of bf16 products of two square matrices of normal numbers, and bytes/s, read and written, of a
    copy."""

    a, b = (jax.random.normal(jax.random.key(n), (size, size), jnp.bfloat16) for n in range(2))
    long = jax.random.normal(jax.random.key(2), (copied // 4,), jnp.float32)
    product, more = jax.jit(lambda x, y: x @ y), jax.jit(lambda x: x + 1)
    matmul_s, copy_s = median_s(lambda: product(a, b), 10), median_s(lambda: more(long), 2)
    rates = {"matmul_flops_per_s": 2 * size**3 / matmul_s, "copy_bytes_per_s": 2 * copied / copy_s}
    return {"size": size, "matmul_s": matmul_s, **rates}


def measure(item: Step) -> dict[str, Any]:
    """Measures plan, live memory and time of the item's training step, and where the time went if asked for."""
    resolved = ResolvedConfig(load_config(ROOT / item.config, item.sets))
    outline = outline_on(resolved, known_target(resolved), build_mesh(resolved.mesh))
    at_once = resolved.config.wrapper.steps_per_dispatch
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
        lowered_at, when = time.perf_counter(), "while it was compiled"
        try:
            step = lowered.compile()
            plan, stats = memory_plan(step), allocated(device)
            found |= {
                "lower_s": lowered_at - started,
                "compile_s": time.perf_counter() - lowered_at,
                "plan": {**vars(plan), "peak": plan.peak},
                "pool": stats.get("bytes_limit"),
                "live": {"compiled": stats.get("peak_bytes_in_use")},
            }
            if found["pool"] is not None and item.over_plan is None and plan.peak > found["pool"]:
                return {**found, "failed": "the plan is larger than JAX's memory"}
            when = "while it ran"
            found |= _run(item, Runner(outline, step, at_once), found["live"])
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            return {**found, "failed": f"out of memory {when}: {str(error)[:500]}"}
    return found


class Runner:
    """The compiled ``step``, with ``at_once`` steps per dispatch, on random weights and tokens. The state is fresh, at
    the first step at which every attack is on (``first_step``)."""

    def __init__(self, outline: Outline, step: Any, at_once: int) -> None:
        self.outline, self.step, self.at_once = outline, step, at_once
        self._weights, self._draw = random_weights(outline.weights), _draws(outline, at_once)
        self._state, self.first_step = fresh_state(outline)
        self.rows: Any = None
        jax.block_until_ready((self._state, self._weights))

    def run(self, draws: Sequence[int]) -> float:
        """Returns the seconds per dispatch, with one dispatch for each of the draws, back to back."""
        drawn = [jax.block_until_ready(self._draw(n)) for n in draws]
        started = time.perf_counter()
        for n, inputs in zip(draws, drawn, strict=True):
            with jax.profiler.StepTraceAnnotation("step", step_num=n):
                self._state, self.rows = self.step(self._state, self._weights, inputs, np.int32(self.at_once))
        jax.block_until_ready((self._state, self.rows))
        return time.perf_counter() - started


def _run(item: Step, runner: Runner, live: dict[str, Any]) -> dict[str, Any]:
    """Returns the times of the step, its metrics, and the phases if asked for. The peaks are stored in ``live``."""
    device, at_once = runner.outline.mesh.devices.flat[0], runner.at_once
    live["made"] = allocated(device).get("peak_bytes_in_use")
    times = [runner.run([n]) for n in range(item.rounds + 1)]
    stats = allocated(device)
    live["steps"] = stats.get("peak_bytes_in_use")
    cards = cards_here() if device.platform == "gpu" else []
    values = np.asarray(runner.rows.values)
    found: dict[str, Any] = {
        "stats": stats,
        "driver_used": cards[0].used if cards else None,
        "first_s": times[0],
        "step_s": statistics.median(times[1:]) / at_once,
        "steps_s": [seconds / at_once for seconds in times[1:]],
        "finite": bool(np.isfinite(values).all()),
        "metrics": dict(zip(runner.rows.names, map(float, values[-1]), strict=True)),
    }
    if item.traced:
        number = runner.first_step + at_once * (item.rounds + 1)
        found["phases"] = _phases(runner, number, found["step_s"])
    return found


def allocated(device: Any) -> dict[str, Any]:
    """Returns the allocator's statistics; empty if there are none (CPUs)."""
    return dict(device.memory_stats() or {})


def random_weights(shapes: Any) -> Any:
    """Returns random weights, with norms of ones, in their place on the devices. They are made one array at a time,
    because otherwise making them would be the peak."""

    def make(key: Any, name: str, shape: Any) -> Any:
        if "norm" in name:
            return jnp.ones(shape.shape, shape.dtype)
        if len(shape.shape) < 3:
            return 0.02 * jax.random.normal(key, shape.shape, shape.dtype)
        # Drawn layer by layer, because random bits take 32 bits per number.
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


def _draws(outline: Outline, at_once: int) -> Callable[[int], Any]:
    """Returns a function that makes the inputs of a dispatch: random tokens, or nothing if the program draws its own
    batches."""
    inputs: Any = outline.train.input_shapes(at_once)
    if not jax.tree.leaves(inputs):
        return lambda number: inputs
    target: Any = outline.problem.target
    vocabulary = target.architecture.vocab_size

    def draw(number: Any) -> Any:
        return jax.random.randint(jax.random.key(number), inputs.shape, 0, vocabulary, jnp.int32)

    drawn: Callable[[int], Any] = jax.jit(draw, out_shardings=inputs.sharding)
    return drawn


def _phases(runner: Runner, number: int, untraced_s: float) -> dict[str, Any]:
    """Runs three dispatches under the profiler, as `pd profile` does, and returns milliseconds by phase. ``number``:
    that of the first step."""
    outline, steps = runner.outline, 3 * runner.at_once
    with tempfile.TemporaryDirectory(prefix="param-decomp-") as folder:
        with traced(Path(folder), "step"):
            seconds = runner.run(range(3))
        (file,) = Path(folder).rglob("*.xplane.pb")
        kinds = {site.kind for site in outline.problem.target.sites.all}
        times = read_times(file, runner.step.as_text(), kinds, 1)
    profile = Profile(steps, number, prod(outline.leading), seconds / steps, untraced_s, times)
    phases = {name: profile.ms(ns) for name, ns in profile.phases()}
    return {**profile.as_json(), "phases": phases, "kernels": profile.kernels(10)}


# ---- without the card ----


def plan(item: Step, card_name: str | None) -> dict[str, Any]:
    """Returns the arithmetic of the item's step, in total, by phase and by precision, and what `pd probe` says about
    the step for a card that need not be present: its plan, and how long it should take."""
    config = load_config(ROOT / item.config, item.sets)
    subject = run_subject(config)
    counted = subject.flops()
    by_phase: Counter[str] = Counter()
    for scope, flops in counted.by_scope.items():
        by_phase[classify_scope(scope, ()).phase] += flops
    found = {
        "total": counted.total,
        "leading": [*ResolvedConfig(config).leading],
        "by_phase": dict(by_phase),
        "by_precision": dict(counted.by_precision),
        "counted_once": list(counted.unknown),
    }
    if card_name is None:
        return found
    try:
        card = find_card(card_name)
        where, pool = Where(card.description, 1, None), MemoryPool.from_card(card)
        answer = compile_parts(subject, card, where, pool, lambda _: None, quick=True)
    except (UserError, CannotTell) as error:
        return {**found, "failed": str(error)}
    step = answer.parts[STEP]
    return {
        **found,
        "plan": {**vars(step.memory), "peak": step.peak},
        "compile_s": step.compile_s,
        "predicted_s": answer.roofline.one_by_one,
    }
