"""The table of schedules that `pd check` prints: learning rates, coefficients that move, and annealed parameters."""

from collections.abc import Iterator
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from rich.table import Table
from rich.text import Text

from param_decomp_jax.decomposition.schedules import Anneal, AnySchedule, Knots, Schedule
from param_decomp_jax.method.locality import NonlinearityLocality
from param_decomp_jax.method.losses import ImportanceMinimality, Lp, SmoothL0
from param_decomp_jax.method.recon import Reconstruction
from param_decomp_jax.method.state import Decomposition
from param_decomp_lab.check.plots import curve
from param_decomp_lab.ui.numbers import exact
from param_decomp_lab.ui.tables import plain_table

HEIGHT = 2
"""Lines per curve; a constant one takes a single line."""


@dataclass(frozen=True)
class Course:
    """A scheduled quantity. ``begins``: the first step at which it is used."""

    name: str
    value: AnySchedule | Anneal
    begins: int = 0

    def at(self, steps: list[int], total: int) -> list[float]:
        values = jax.vmap(lambda step: self.value(step, total))(jnp.asarray(steps))
        return [float(value) for value in np.asarray(values)]


def courses(spec: Decomposition) -> list[Course]:
    """Learning rates, then by term its scheduled coefficient and annealed parameters; constant numbers are left out."""
    found = [
        Course("components lr", spec.components_optimizer.schedule),
        Course("CI function lr", spec.ci_optimizer.schedule),
    ]
    begins = {name: attack.first_step(spec.steps) for name, (_, attack) in spec.persistent.items()}
    for name, (_, attack) in spec.persistent.items():
        found.append(Course(f"{name} lr", attack.optimizer.schedule, begins[name]))
    for term in spec.terms:
        moving: list[tuple[str, float | AnySchedule | Anneal]] = [("coeff", term.coeff)]
        if isinstance(term, ImportanceMinimality):
            moving += _parameters(term)
        if isinstance(term, NonlinearityLocality):
            moving.append(("relative threshold", term.threshold))
        if isinstance(term, Reconstruction) and term.beside is not None:
            moving.append(("hidden activations coeff", term.beside.coeff))
        found += [
            Course(f"{term.name} {name}", value, begins.get(term.name, 0))
            for name, value in moving
            if isinstance(value, Schedule | Knots | Anneal)
        ]
    return found


def _parameters(term: ImportanceMinimality) -> Iterator[tuple[str, float | AnySchedule | Anneal]]:
    match term.penalty:
        case Lp(Anneal() as p):
            yield "p", p if p.moves else p.start
        case Lp(p):
            yield "p", p
        case SmoothL0(gamma):
            yield "γ", gamma
    if term.frequency is not None:
        yield "frequency coeff", term.frequency.coeff


def schedules_table(spec: Decomposition, width: int) -> Table:
    """A curve over all of training for each, ``width`` columns wide, between its first and its last value."""
    title = f"Schedules over {spec.steps:,} steps"
    table = plain_table(title, ("", "wrap"), ("first", "right"), ("", "left"), ("last", "right"))
    steps = [int(step) for step in np.linspace(0, spec.steps - 1, 2 * width)]
    for course in courses(spec):
        values = course.at(steps, spec.steps)
        shown = [value if step >= course.begins else None for step, value in zip(steps, values, strict=True)]
        first, last = course.at([min(course.begins, spec.steps - 1), spec.steps - 1], spec.steps)
        lines = curve(shown, HEIGHT if len(set(values)) > 1 else 1)
        table.add_row(course.name, exact(_rounded(first)), Text("\n".join(lines), style="cyan"), exact(_rounded(last)))
    return table


def _rounded(value: float) -> float:
    """Rounded to the precision of fp32."""
    return float(f"{value:.5g}")
