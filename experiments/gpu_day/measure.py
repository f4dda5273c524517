"""A configuration's training step on the card: plan, live memory, times, phases.

JAX takes 0.92 of the memory at the start, as in a run (slurm/task.sh). What its allocator has handed out at most
(`peak_bytes_in_use`) is then compared with XLA's plan; what the driver counts beyond JAX's memory is the libraries'
(contexts, kernels, graphs).
"""

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from experiments.gpu_day.cards import cards_here
from experiments.gpu_day.items import Step
from param_decomp_aot.compile import memory_plan
from param_decomp_lab.config import load_config
from param_decomp_lab.probe.outline import known_target, outline_on
from param_decomp_lab.profile.scopes import read_times
from param_decomp_lab.profile.table import Profile
from param_decomp_lab.setup.base import Outline, build_mesh
from param_decomp_lab.setup.programs import init_program, steps_program
from param_decomp_lab.setup.resolved import ResolvedConfig

ROOT = Path(__file__).parents[2]


def measure(item: Step) -> dict[str, Any]:
    """Plan, live memory and time of the item's training step, and where the time went if that is asked for."""
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
        lowered_at = time.perf_counter()
        try:
            step = lowered.compile()
        except jax.errors.JaxRuntimeError as error:
            return {**found, "failed": _out_of_memory(error, "while it was compiled")}
        plan = memory_plan(step)
        found |= {
            "lower_s": lowered_at - started,
            "compile_s": time.perf_counter() - lowered_at,
            "plan": {**vars(plan), "peak": plan.peak},
            "pool": _stats(device).get("bytes_limit"),
            "live": {"compiled": _stats(device).get("peak_bytes_in_use")},
        }
        if found["pool"] is not None and item.over_plan is None and plan.peak > found["pool"]:
            return {**found, "failed": "the plan is larger than JAX's memory"}
        try:
            found |= _run(item, outline, step, at_once, found["live"])
        except jax.errors.JaxRuntimeError as error:
            return {**found, "failed": _out_of_memory(error, "while it ran")}
    return found


def _out_of_memory(error: jax.errors.JaxRuntimeError, when: str) -> str:
    """What went wrong; raises other errors again."""
    if "RESOURCE_EXHAUSTED" not in str(error):
        raise error
    return f"out of memory {when}: {str(error)[:500]}"


def _run(item: Step, outline: Outline, step: Any, at_once: int, live: dict[str, Any]) -> dict[str, Any]:
    """Times of the compiled ``step``, its metrics, and the phases if they are asked for; the peaks go into ``live``."""
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
        started = time.perf_counter()
        state, rows = step(state, weights, inputs, number)
        jax.block_until_ready((state, rows))
        times.append(time.perf_counter() - started)
    stats = _stats(device)
    live["steps"] = stats.get("peak_bytes_in_use")
    cards = cards_here() if device.platform == "gpu" else []
    values = np.asarray(rows.values)
    found: dict[str, Any] = {
        "stats": stats,
        "driver_used": cards[0].used if cards else None,
        "first_s": times[0],
        "step_s": statistics.median(times[1:]) / at_once,
        "steps_s": [seconds / at_once for seconds in times[1:]],
        "finite": bool(np.isfinite(values).all()),
        "metrics": dict(zip(rows.names, map(float, values[-1]), strict=True)),
    }
    if item.traced:
        drawn = [jax.block_until_ready(draw(n)) for n in range(3)]
        number_now = first_step + at_once * (item.rounds + 1)
        found["phases"] = _phases(outline, step, weights, drawn, at_once, state, number_now, found["step_s"])
    return found


def _stats(device: Any) -> dict[str, Any]:
    """The allocator's account; empty where there is none (CPUs)."""
    return dict(device.memory_stats() or {})


def _fresh_state(outline: Outline) -> tuple[Any, int]:
    """A fresh state at the first step at which every attack is on, and the number of that step."""
    spec = outline.problem.decomposition
    first = max((attack.first_step(spec.steps) for _, attack in spec.persistent.values()), default=0)
    state = init_program(outline).function()
    at = jax.jit(partial(jnp.full, (), first, state.step.dtype), out_shardings=state.step.sharding)()
    return eqx.tree_at(lambda s: s.step, state, at), first


def _weights(shapes: Any) -> Any:
    """Random weights where they lie, norms of ones; one array after the other, or their making would be the peak."""

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


def _draws(outline: Outline, at_once: int) -> Callable[[int], Any]:
    """What a dispatch is handed: random tokens, or nothing where the program draws its batches itself."""
    inputs: Any = outline.train.input_shapes(at_once)
    if not jax.tree.leaves(inputs):
        return lambda number: inputs
    target: Any = outline.problem.target
    vocabulary = target.architecture.vocab_size

    def draw(number: Any) -> Any:
        return jax.random.randint(jax.random.key(number), inputs.shape, 0, vocabulary, jnp.int32)

    drawn: Callable[[int], Any] = jax.jit(draw, out_shardings=inputs.sharding)
    return drawn


def _phases(
    outline: Outline, step: Any, weights: Any, inputs: Sequence[Any], at_once: int, state: Any, number: int,
    untraced_s: float,
) -> dict[str, Any]:  # fmt: skip
    """Dispatches of ``inputs`` under the profiler, as `pd profile` writes it, and milliseconds by phase. ``number``: of
    the first step."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory(prefix="param-decomp-") as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            started = time.perf_counter()
            for n, one in enumerate(inputs):
                with jax.profiler.StepTraceAnnotation("step", step_num=n):
                    state, rows = step(state, weights, one, np.int32(at_once))
            jax.block_until_ready((state, rows))
            traced = time.perf_counter() - started
        (file,) = Path(folder).rglob("*.xplane.pb")
        kinds = {site.kind for site in outline.problem.target.sites.all}
        times = read_times(file, step.as_text(), kinds, 1)
    steps = len(inputs) * at_once
    profile = Profile(steps, number, prod(outline.leading), traced / steps, untraced_s, times)
    return {**profile.as_json(), "phases": {name: profile.ms(ns) for name, ns in profile.phases()}}
