"""Learning-rate schedules (T2) and the annealing of p (L4)."""

from dataclasses import dataclass
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
class Anneal:
    """L4: linear from ``start`` to ``final`` between two fractions of training, constant outside them."""

    start: float
    final: float
    start_frac: float = 1.0
    end_frac: float = 1.0

    def __call__(self, step: Step, total: int) -> Float[Array, ""]:
        fraction = jnp.asarray(step, float) / total
        span = self.end_frac - self.start_frac
        # An empty span is a jump: constant before it, ``final`` from it on.
        t = (fraction - self.start_frac) / span if span > 0 else jnp.where(fraction < self.start_frac, 0.0, 1.0)
        return self.start + (self.final - self.start) * jnp.clip(t, 0.0, 1.0)
