"""`pd profile`: traces a few training steps of a run and prints where their time goes."""

import json
import time
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from param_decomp_jax.method.state import State
from param_decomp_lab.config import RunConfig
from param_decomp_lab.errors import UserError
from param_decomp_lab.folders import refuse_unwritable
from param_decomp_lab.processes.group import ALONE, Processes
from param_decomp_lab.profile.scopes import read_times
from param_decomp_lab.profile.table import Profile, times_table
from param_decomp_lab.setup import ResolvedConfig, Setup, set_up
from param_decomp_lab.setup.base import Outline
from param_decomp_lab.setup.programs import init_program
from param_decomp_lab.training.loop import compile_steps

__all__ = ["fresh_state", "profile", "traced"]

UNKNOWN_SHARE = 0.1
"""A share of device time: from here on the missing names are worth a word."""


def profile(
    config: RunConfig,
    console: Console,
    steps: int = 5,
    warmup: int = 2,
    out: Path | None = None,
    processes: Processes = ALONE,
) -> Path:
    """Traces ``steps`` steps after ``warmup`` others, prints where the time went, and gives the trace's folder.

    The program, the data and the placement are the run's; the state is fresh (without the faithfulness warm-up), at the
    first step at which every attack is on. No run folder is made. UserError for what `pd train` would refuse.
    """
    name = processes.from_first(time.strftime("%Y-%m-%d_%H-%M-%S"))
    folder = out or config.wrapper.out_dir / "profiles" / name
    with processes.sharing_errors():
        setup = set_up(ResolvedConfig(config), console, processes)
    with processes.sharing_errors():
        if processes.first:
            _make_folder(folder)
    with jax.set_mesh(setup.mesh):
        runner = _Runner(setup, config.wrapper.steps_per_dispatch)
        started = time.monotonic()
        program = runner.compile()
        console.print(f"compiled the step in {time.monotonic() - started:.0f} s")
        untraced = runner.untraced(warmup)
        traced_from = runner.step
        trace = folder / "plugins" / "profile" / name
        with traced(folder, name) if processes.first else nullcontext():  # those of one machine would write one file
            seconds = runner.run(steps)
    if processes.first:
        kinds = {site.kind for site in setup.problem.target.sites.all}
        (file,) = trace.glob("*.xplane.pb")
        times = read_times(file, program, kinds, len(setup.mesh.local_devices))
        found = Profile(steps, traced_from, prod(setup.leading), seconds / steps, untraced, times)
        (folder / "profile.json").write_text(json.dumps(found.as_json(), indent=1) + "\n")
        _print_profile(found, folder, trace, setup, console)
    return folder


def _make_folder(folder: Path) -> None:
    refuse_unwritable(folder, "--out")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out: cannot write {folder}: {error.strerror or error}") from error


def fresh_state(outline: Outline) -> tuple[State, int]:
    """A fresh state at the first step at which every attack is on, and the number of that step."""
    spec = outline.problem.decomposition
    first = max((attack.first_step(spec.steps) for _, attack in spec.persistent.values()), default=0)
    state: State = init_program(outline).function()
    at = jax.jit(partial(jnp.full, (), first, state.step.dtype), out_shardings=state.step.sharding)()
    return eqx.tree_at(lambda s: s.step, state, at), first


class _Runner:
    """Steps of the run's program, one dispatch after the other, as `pd train` starts them."""

    def __init__(self, setup: Setup, per_dispatch: int) -> None:
        self.setup, self.per_dispatch = setup, per_dispatch
        self._state, self.step = fresh_state(setup.outline)

    def compile(self) -> str:
        """The text of the program."""
        self._dispatch = compile_steps(self.setup, self.per_dispatch)
        text: str = self._dispatch.as_text()
        return text

    def untraced(self, warmup: int) -> float | None:
        """``warmup`` steps; seconds of one of them, the first dispatch left out. None if there were no others."""
        first = min(warmup, self.per_dispatch)
        if first:
            self.run(first)
        return self.run(warmup - first) / (warmup - first) if warmup > first else None

    def run(self, steps: int) -> float:
        """Seconds that ``steps`` steps take, from the first dispatch to the last result."""
        started, end = time.perf_counter(), self.step + steps
        rows: Any = None
        while self.step < end:
            n = min(self.per_dispatch, end - self.step)
            with jax.profiler.StepTraceAnnotation("step", step_num=self.step):
                inputs = self.setup.train.inputs(self.step, n, self.per_dispatch)
                self._state, rows = self._dispatch(self._state, self.setup.weights, inputs, np.int32(n))
            self.step += n
        jax.block_until_ready((self._state, rows))
        return time.perf_counter() - started


def traced(folder: Path, name: str) -> AbstractContextManager[None]:
    """A trace into ``folder``."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # calls of Python functions say nothing about a device, and there are thousands
    options.session_id = name
    return jax.profiler.trace(folder, profiler_options=options)


def _print_profile(found: Profile, folder: Path, trace: Path, setup: Setup, console: Console) -> None:
    device = setup.mesh.devices.flat[0].device_kind
    on = f"{setup.mesh.size} × {device}"
    console.print(f"{found.steps} steps from step {found.first_step} on, traced, on {on}\n", highlight=False)
    console.print(times_table(found))
    untraced = "" if found.untraced_s is None else f" ({1e3 * found.untraced_s:,.2f} ms without the trace)"
    console.print(
        f"\nstep {1e3 * found.traced_s:,.2f} ms{untraced}, {found.tokens_per_step / found.step_s:,.0f} tokens/s; "
        f"operations were under way in {found.busy:.0%} of the time",
        soft_wrap=True, highlight=False,
    )  # fmt: skip
    console.print(_explain_counting(device, found), soft_wrap=True, highlight=False)
    console.print(
        f"trace {trace}\n"
        f"  all of it: pip install xprof; xprof --port 8791 {folder} (and a browser at http://localhost:8791)\n"
        "  the timeline alone: open the *.trace.json.gz there in https://ui.perfetto.dev",
        soft_wrap=True, highlight=False,
    )  # fmt: skip


def _explain_counting(device: str, found: Profile) -> str:
    if device.lower() == "cpu":
        explanation = (
            "Shares are of the operations' own time, summed over the threads that execute them, per device: their sum "
            "is not wall time. What an operation does on further threads is not seen."
        )
    else:
        explanation = (
            "Shares are of the kernels' own time, summed over a device's streams, mean over this process's devices."
        )
    unknown = found.times.unknown_ns / max(1, found.total_ns + found.times.unknown_ns)
    if unknown > UNKNOWN_SHARE:
        explanation += (
            f" Another {unknown:.0%} of the device's time is in kernels without an operation's name: with XLA_FLAGS="
            "--xla_gpu_enable_command_buffer= kernels are not run from CUDA graphs, and keep their names."
        )
    return explanation
