"""The optimisers of components and CI function (T1), and the gradient clip of section 8."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from param_decomp_jax.schedules import Schedule


@dataclass(frozen=True)
class AdamW:
    """T1: decoupled decay (default 0, unlike optax), eps 1e-8; ``clip_norm``: bound on the gradient's global norm."""

    schedule: Schedule
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.0
    clip_norm: float | None = None


def transformation(spec: AdamW, total: int) -> optax.GradientTransformation:
    """The optax transformation, without the clip. ``total``: steps of the whole training (T2)."""
    return optax.adamw(lambda count: spec.schedule(count, total), *spec.betas, eps=1e-8, weight_decay=spec.weight_decay)


def global_norm(tree: Any) -> Float[Array, ""]:
    """√ of the sum of squares of all entries, in fp32."""
    return jnp.sqrt(sum((jnp.sum(x**2) for x in jax.tree.leaves(tree)), start=jnp.zeros(())))


def clip(tree: Any, norm: Float[Array, ""], max_norm: float | None) -> Any:
    """Scales by ``min(1, max_norm / (norm + 1e-6))``; unlike optax's clip, the 1e-6 is part of the method."""
    if max_norm is None:
        return tree
    scale = jnp.minimum(1.0, max_norm / (norm + 1e-6))
    return jax.tree.map(lambda g: g * scale, tree)
