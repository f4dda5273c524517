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
    """What all optimisers share. ``weight_decay``: decoupled (default 0, unlike optax). ``clip_norm``: a bound on the
    gradient's global norm."""

    schedule: AnySchedule
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.0
    clip_norm: float | None = None


class AdamW(_Optimizer):
    """T1, with eps 1e-8: two moments of every parameter (Loshchilov and Hutter 2019)."""


class Lion(_Optimizer):
    """Lion: the sign of an average of gradients, with one moment of every parameter (Chen et al. 2023).

    Every entry moves by the whole learning rate, which is usually a tenth of AdamW's.
    """


class Adafactor(_Optimizer):
    """Adafactor: second moments by row and column alone, no first moments (Shazeer and Stern 2018).

    Updates have the size of AdamW's: they are not multiplied by the size of the parameter. ``betas`` are not used.
    """


Optimizer = AdamW | Muon | Lion | Adafactor
"""`Lion` and `Adafactor` trade T1 for memory."""


def transformation(spec: Optimizer, total: int, axes: Any) -> optax.GradientTransformation:
    """Returns the optax transformation, without the clip.

    ``total``: the number of steps of the whole training (T2). ``axes``: descriptions of the parameters, in their
    structure.
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
            # `optax.adafactor` does not multiply its decay by the learning rate.
            return optax.chain(
                optax.scale_by_factored_rms(),
                optax.clip_by_block_rms(1.0),
                optax.add_decayed_weights(decay),
                optax.scale_by_learning_rate(rate),
            )


def global_norm(tree: Any) -> Float[Array, ""]:
    """Returns the square root of the sum of squares of all entries, in fp32.

    `optax.tree.norm` (0.2.8) adds the square of an imaginary part to every entry, which makes another program.
    """
    return jnp.sqrt(sum((jnp.sum(x**2) for x in jax.tree.leaves(tree)), start=jnp.zeros(())))


def clip(tree: Any, norm: Float[Array, ""], max_norm: float | None) -> Any:
    """Scales by ``min(1, max_norm / (norm + 1e-6))``; unlike optax's clip, the 1e-6 is part of the method."""
    if max_norm is None:
        return tree
    scale = jnp.minimum(1.0, max_norm / (norm + 1e-6))
    return jax.tree.map(lambda g: g * scale, tree)
