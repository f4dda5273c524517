"""Schedules in two forms (T2, T8), and the annealing of p (L4)."""

from dataclasses import dataclass
from math import ceil
from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

Step = int | Int[Array, ""]


@dataclass(frozen=True)
class Schedule:
    """A value over training (T2), reaching its final one at step ``total - 1``.

    ``start``: the full value, after the warm-up. ``warmup_pct``: share of all steps spent rising linearly
    from 0. ``final_val_frac``: final value over ``start``; a constant schedule has 1.
    """

    start: float
    kind: Literal["constant", "linear", "cosine"] = "constant"
    warmup_pct: float = 0.0
    final_val_frac: float = 1.0

    def __post_init__(self) -> None:
        assert self.kind != "constant" or self.final_val_frac == 1.0

    def __call__(self, step: Step, total: int) -> Float[Array, ""]:
        """Value at ``step`` of ``total``; differentiable in nothing, traceable in ``step``."""
        warmup = int(self.warmup_pct * total)
        step = jnp.asarray(step, float)
        t = (step - warmup) / max(1, total - warmup - 1)
        f = self.final_val_frac
        match self.kind:
            case "constant":
                factor = jnp.ones_like(t)
            case "linear":
                factor = f + (1 - f) * (1 - t)
            case "cosine":
                factor = f + (1 - f) * 0.5 * (1 + jnp.cos(jnp.pi * t))
        return self.start * jnp.where(step < warmup, step / max(1, warmup), factor)


@dataclass(frozen=True)
class Knot:
    """A point of `Knots`. ``at``: share of training. ``frac``: share of the peak.

    ``interp``: how the value comes to it from the knot before; the first knot's has no effect.
    """

    at: float
    frac: float
    interp: Literal["linear", "cosine", "hold"] = "linear"


@dataclass(frozen=True)
class Knots:
    """A value over training by ``points`` (T8), the first of which is at 0 and the last at 1, in increasing order."""

    max_val: float
    points: tuple[Knot, ...]

    def __call__(self, step: Step, total: int) -> Float[Array, ""]:
        """Value at ``step`` of ``total``; differentiable in nothing, traceable in ``step``. From the last step on it is
        the last knot's."""
        last = max(1, total - 1)
        rows = []
        beyond = Knot(2.0, 0.0, "hold")  # after the last knot its value stays
        for knot, then in zip(self.points, (*self.points[1:], beyond), strict=True):
            # Steps are compared as integers: a t in float32 could miss a knot by its last bit. ``passed``: how many
            # steps the first step that has reached the knot lies behind it, less than one.
            reached = first_step(knot.at, last)
            passed = 0.0 if reached / last == knot.at else reached - knot.at * last
            rise = 0.0 if then.interp == "hold" else then.frac - knot.frac
            rows.append((reached, passed, (then.at - knot.at) * last, knot.frac, rise, then.interp == "cosine"))
        columns = [jnp.asarray(column) for column in zip(*rows, strict=True)]
        here = jnp.sum(jnp.asarray(step) >= columns[0]) - 1
        first, passed_by_then, span, frac, change, is_cosine = (column[here] for column in columns)
        u = (step - first + passed_by_then) / span
        return self.max_val * (frac + change * jnp.where(is_cosine, jnp.sin(jnp.pi / 2 * u) ** 2, u))


def first_step(share: float, n: int) -> int:
    """The first k ≥ 0 with k / n ≥ ``share``, in float64."""
    k = max(0, ceil(share * n) - 1)
    while k / n < share:
        k += 1
    return k


AnySchedule = Schedule | Knots


def value_at(value: float | AnySchedule, step: Step, total: int) -> float | Float[Array, ""]:
    """Value at ``step`` of ``total``; a number as it is, which stays static in a program."""
    return value(step, total) if isinstance(value, Schedule | Knots) else value


@dataclass(frozen=True)
class Anneal:
    """L4: linear from ``start`` to ``final`` between two fractions of training, constant outside them."""

    start: float
    final: float
    start_frac: float = 1.0
    end_frac: float = 1.0

    @property
    def moves(self) -> bool:
        return self.final != self.start and self.start_frac < 1

    def __call__(self, step: Step, total: int) -> Float[Array, ""]:
        fraction = jnp.asarray(step, float) / total
        span = self.end_frac - self.start_frac
        # An empty span is a jump: constant before it, ``final`` from it on.
        t = (fraction - self.start_frac) / span if span > 0 else jnp.where(fraction < self.start_frac, 0.0, 1.0)
        return self.start + (self.final - self.start) * jnp.clip(t, 0.0, 1.0)
