"""Faithfulness and importance minimality (section 6), and the sum type of all terms."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from param_decomp_jax.decomposition.components import Components, Factors, delta, with_lead
from param_decomp_jax.decomposition.schedules import Anneal, Schedule
from param_decomp_jax.method.clean_pass import DecomposedBatch
from param_decomp_jax.method.recon import Reconstruction
from param_decomp_jax.nn.grouped import OverPositions
from param_decomp_jax.nn.split_product import DeltaProduct
from param_decomp_jax.sharding.memory import MemoryPolicy
from param_decomp_jax.sharding.mesh import pin
from param_decomp_jax.sharding.remat import named, over_layers
from param_decomp_jax.targets.plain_linears import frozen_axes


@dataclass(frozen=True)
class DirectTerm(ABC):
    """A term that is computed from the clean pass and from what is trained, without masked forwards.

    A subclass is a term of its own: the objective asks it for its value, and gradients follow by differentiation.
    """

    name: str
    coeff: float

    @abstractmethod
    def value(self, batch: DecomposedBatch, step: Int[Array, ""]) -> Float[Array, ""]:
        """The term without its coefficient. ``step``: the number of this step.

        `ci.per_component` sums a function of ``batch``'s causal importances over positions.
        """

    @abstractmethod
    def describe(self) -> str:
        """What the term is, in a few words."""


@dataclass(frozen=True)
class Faithfulness(DirectTerm):
    """L1: mean squared entry of the deltas W − V U over all sites. ``product``: how V U is computed (N4)."""

    product: DeltaProduct = "fp32"

    def value(self, batch: DecomposedBatch, step: Int[Array, ""]) -> Float[Array, ""]:
        target, weights = batch.target, batch.clean_pass.weights
        with jax.named_scope("faithfulness"):
            return faithfulness(batch.components, target.site_weights(weights), target.memory, self.product)

    def describe(self) -> str:
        return "mean squared entry of W − V U"


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


Term = DirectTerm | ImportanceMinimality | Reconstruction


def faithfulness(
    components: Components,
    weights: dict[str, Float[Array, "*lead d_in d_out"]],
    memory: MemoryPolicy,
    product: DeltaProduct = "fp32",
) -> Float[Array, ""]:
    """L1: ``Σ ‖Δ_s‖² / Σ d_in · d_out``, in fp32 from the fp32 masters. Every expert's matrix counts (X7).

    ``product``: how V U is computed (N4).
    """

    frozen = frozen_axes(memory)

    def squares(_: None, sites: dict[str, tuple[Array, Factors]]) -> tuple[None, list[Array]]:
        """By column, for that is how Δ is split: devices add up what they have when all layers are done."""
        pinned = [(pin(W, with_lead(frozen, W.ndim)), factors) for W, factors in sites.values()]
        deltas = [named(delta(W, factors, product), "deltas") for W, factors in pinned]
        return None, [jnp.sum(x**2, axis=tuple(range(x.ndim - 1))) for x in deltas]

    total = jnp.zeros(())
    # Stacks of as many layers go through one scan, so that what the sites of a layer send can be sent together.
    for n_layers in sorted({W.shape[0] for W in weights.values()}):
        alike = {name: (W, components[name]) for name, W in weights.items() if W.shape[0] == n_layers}
        if memory.recomputes("layers"):
            _, columns = over_layers(memory, squares, None, alike)
        else:
            _, columns = squares(None, alike)
        total += sum(map(jnp.sum, columns))
    return total / float(sum(W.size for W in weights.values()))  # 5.6e9 for the MLPs of an 8B: no int32


def penalty_of(
    penalty: Lp | SmoothL0, upper: Float[Array, "*n"], step: Int[Array, ""], total: int
) -> Float[Array, "*n"]:
    """ψ of L2, elementwise."""
    match penalty:
        case Lp(p, eps):
            return (upper + eps) ** p(step, total).astype(upper.dtype)
        case SmoothL0(gamma):
            return upper**2 / (upper**2 + gamma(step, total).astype(upper.dtype) ** 2)


def penalty_sum(
    penalty: Lp | SmoothL0,
    upper: Float[Array, "*n C"],
    step: Int[Array, ""],
    total: int,
    over: OverPositions = OverPositions(),  # noqa: B008
) -> Float[Array, "*experts C"]:
    """``S_c = Σ ψ(υ_c)`` of L2, over all positions of the global batch; of experts, over those of each (X4)."""
    return over.sum(penalty_of(penalty, upper, step, total))


def importance_minimality(
    term: ImportanceMinimality, sums: dict[str, Float[Array, "*lead C"]], n_positions: int
) -> tuple[Float[Array, ""], Float[Array, ""] | None]:
    """L2 without coefficients: the main value, and the frequency part's (None without one).

    ``sums``: S_c by stack. The logarithm is of the sum over the global batch (L3).
    """
    main, frequency = jnp.zeros(()), jnp.zeros(())
    for S in sums.values():
        f = S / n_positions
        main += jnp.sum(f * (1 + term.beta * jnp.log2(1 + S)))
        if term.frequency is not None:
            frequency += jnp.sum(f * jnp.log2(1 + term.frequency.reference_token_count * f))
    return main, None if term.frequency is None else frequency
