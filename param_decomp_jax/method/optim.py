"""The optimisers of components and CI function (T1, T7), and the gradient clip of section 8."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from param_decomp_jax.decomposition.schedules import AnySchedule
from param_decomp_jax.method.muon import Muon, muon


@dataclass(frozen=True)
class _Optimizer:
    """``weight_decay``: decoupled (default 0, unlike optax). ``clip_norm``: bound on the gradient's global norm."""

    schedule: AnySchedule
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.0
    clip_norm: float | None = None


class AdamW(_Optimizer):
    """T1, with eps 1e-8: two moments of every parameter (Loshchilov and Hutter 2019)."""


class Lion(_Optimizer):
    """The sign of an average of gradients, one moment of every parameter (Chen et al. 2023).

    Every entry moves by the whole learning rate: a tenth of AdamW's is a usual one.
    """


class Adafactor(_Optimizer):
    """Second moments by row and column alone, no first moments (Shazeer and Stern 2018).

    Updates are of the size of AdamW's: not multiplied by the size of the parameter. ``betas`` have no part in it.
    """


Optimizer = AdamW | Muon | Lion | Adafactor
"""`Lion` and `Adafactor` trade T1 for memory."""


def transformation(spec: Optimizer, total: int, axes: Any) -> optax.GradientTransformation:
    """The optax transformation, without the clip.

    ``total``: steps of the whole training (T2). ``axes``: descriptions of the parameters, in their structure.
    """

    def rate(count: Any) -> Any:
        return spec.schedule(count, total)

    match spec:
        case AdamW(betas=(b1, b2), weight_decay=decay):
            return optax.adamw(rate, b1, b2, eps=1e-8, weight_decay=decay)
        case Muon():
            return muon(spec, rate, axes)
        case Lion(betas=(b1, b2), weight_decay=decay):
            return optax.lion(rate, b1, b2, weight_decay=decay)
        case Adafactor(weight_decay=decay):
            # Not `optax.adafactor`, whose decay is not multiplied by the learning rate.
            return optax.chain(
                optax.scale_by_factored_rms(),
                optax.clip_by_block_rms(1.0),
                optax.add_decayed_weights(decay),
                optax.scale_by_learning_rate(rate),
            )


def global_norm(tree: Any) -> Float[Array, ""]:
    """√ of the sum of squares of all entries, in fp32.

    Not `optax.tree.norm`, which adds the square of an imaginary part to every entry (0.2.8): another program.
    """
    return jnp.sqrt(sum((jnp.sum(x**2) for x in jax.tree.leaves(tree)), start=jnp.zeros(())))


def clip(tree: Any, norm: Float[Array, ""], max_norm: float | None) -> Any:
    """Scales by ``min(1, max_norm / (norm + 1e-6))``; unlike optax's clip, the 1e-6 is part of the method."""
    if max_norm is None:
        return tree
    scale = jnp.minimum(1.0, max_norm / (norm + 1e-6))
    return jax.tree.map(lambda g: g * scale, tree)
