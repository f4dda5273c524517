"""Faithfulness and importance minimality (section 6), and the sum type of all terms."""

from dataclasses import dataclass
from math import prod

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from param_decomp_jax.components import Components, delta
from param_decomp_jax.recon import Reconstruction
from param_decomp_jax.schedules import Anneal, Schedule


@dataclass(frozen=True)
class Faithfulness:
    """L1: mean squared entry of the deltas W − V U over all sites."""

    name: str
    coeff: float


@dataclass(frozen=True)
class Lp:
    """ψ(υ) = (υ + eps)^p with p annealed (L4)."""

    p: Anneal
    eps: float


@dataclass(frozen=True)
class SmoothL0:
    """ψ(υ) = υ² / (υ² + γ²) with γ on a schedule."""

    gamma: Schedule


@dataclass(frozen=True)
class Frequency:
    """The batch-size-invariant part of L2: ``coeff · Σ f_c · log2(1 + a · f_c)``; its coefficient is its own."""

    coeff: float
    reference_token_count: float


@dataclass(frozen=True)
class ImportanceMinimality:
    """L2: ``Σ f_c · (1 + β · log2(1 + S_c))``, and the frequency form beside it if there is one."""

    name: str
    coeff: float
    penalty: Lp | SmoothL0
    beta: float = 0.0
    frequency: Frequency | None = None


Term = Faithfulness | ImportanceMinimality | Reconstruction


def faithfulness(components: Components, weights: dict[str, Float[Array, "layers d_in d_out"]]) -> Float[Array, ""]:
    """L1: ``Σ ‖Δ_s‖² / Σ d_in · d_out``, in fp32 from the fp32 masters."""
    total = sum((jnp.sum(delta(W, components[name]) ** 2) for name, W in weights.items()), start=jnp.zeros(()))
    return total / sum(W.size for W in weights.values())


def penalty_of(
    penalty: Lp | SmoothL0, upper: Float[Array, "*n"], step: Int[Array, ""], total: int
) -> Float[Array, "*n"]:
    """ψ of L2, elementwise."""
    match penalty:
        case Lp(p, eps):
            return (upper + eps) ** p(step, total).astype(upper.dtype)
        case SmoothL0(gamma):
            return upper**2 / (upper**2 + gamma(step, total).astype(upper.dtype) ** 2)


def importance_minimality(
    term: ImportanceMinimality, uppers: dict[str, Float[Array, "layers *n C"]], step: Int[Array, ""], total: int
) -> tuple[Float[Array, ""], Float[Array, ""] | None]:
    """L2 without coefficients: the main value, and the frequency part's (None without one).

    The logarithm is of the sum over the global batch (L3).
    """
    main, frequency = jnp.zeros(()), jnp.zeros(())
    for upper in uppers.values():
        positions = tuple(range(1, upper.ndim - 1))
        N = prod(upper.shape[axis] for axis in positions)
        S = jnp.sum(penalty_of(term.penalty, upper, step, total), axis=positions)  # [layers, C]
        f = S / N
        main += jnp.sum(f * (1 + term.beta * jnp.log2(1 + S)))
        if term.frequency is not None:
            frequency += jnp.sum(f * jnp.log2(1 + term.frequency.reference_token_count * f))
    return main, None if term.frequency is None else frequency
