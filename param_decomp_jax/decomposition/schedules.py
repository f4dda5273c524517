"""Schedules in two forms (T2, T8), and the annealing of p (L4)."""

from dataclasses import dataclass
from math import ceil
from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

Step = int | Int[Array, ""]


@dataclass(frozen=True)
class Schedule:
    """A value over training (T2) that reaches its final value at step ``total - 1``.

    ``start``: the full value, after the warm-up. ``warmup_pct``: the share of all steps in which the value rises
    linearly from 0. ``final_val_frac``: final value over ``start``; a constant schedule has 1.
    """

    start: float
    kind: Literal["constant", "linear", "cosine"] = "constant"
    warmup_pct: float = 0.0
    final_val_frac: float = 1.0

    def __post_init__(self) -> None:
        assert self.kind != "constant" or self.final_val_frac == 1.0

    def __call__(self, step: Step, total: int) -> Float[Array, ""]:
        """Returns the value at ``step`` of ``total``. ``step`` may be traced; there are no gradients."""
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
    """A point of `Knots`. ``at``: a share of training. ``frac``: a share of the peak.

    ``interp``: how the value moves to this knot from the one before; it has no effect for the first knot.
    """

    at: float
    frac: float
    interp: Literal["linear", "cosine", "hold"] = "linear"


@dataclass(frozen=True)
class Knots:
    """A value over training given by ``points`` (T8), in increasing order: the first is at 0, the last at 1."""

    max_val: float
    points: tuple[Knot, ...]

    def __call__(self, step: Step, total: int) -> Float[Array, ""]:
        """Returns the value at ``step`` of ``total``. ``step`` may be traced; there are no gradients. From the last
        step on, the value is that of the last knot."""
        last = max(1, total - 1)
        rows = []
        beyond = Knot(2.0, 0.0, "hold")  # after the last knot, the value stays
        for knot, then in zip(self.points, (*self.points[1:], beyond), strict=True):
            # Steps are compared as integers, because a t in float32 could miss a knot by its last bit. ``passed``: the
            # distance in steps, below one, from the knot to the first step that has reached it.
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
    """Returns the first k ≥ 0 with k / n ≥ ``share``, computed in float64."""
    k = max(0, ceil(share * n) - 1)
    while k / n < share:
        k += 1
    return k


AnySchedule = Schedule | Knots


def value_at(value: float | AnySchedule, step: Step, total: int) -> float | Float[Array, ""]:
    """Returns the value at ``step`` of ``total``. A number is returned as it is, and stays static in a program."""
    return value(step, total) if isinstance(value, Schedule | Knots) else value


@dataclass(frozen=True)
class Anneal:
    """A value that goes linearly from ``start`` to ``final`` between two fractions of training, and is constant outside
    (L4)."""

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
