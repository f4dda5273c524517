"""Faithfulness and importance minimality (section 6), and the sum type of all terms."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from math import log, prod
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from param_decomp_jax.decomposition.components import Components, Factors, delta, with_lead
from param_decomp_jax.decomposition.schedules import Anneal, AnySchedule
from param_decomp_jax.method.clean_pass import DecomposedBatch
from param_decomp_jax.method.recon import Reconstruction
from param_decomp_jax.nn.grouped import OverPositions
from param_decomp_jax.nn.numerics import wide
from param_decomp_jax.nn.split_product import DeltaProduct
from param_decomp_jax.sharding.memory import MemoryPolicy
from param_decomp_jax.sharding.mesh import pin
from param_decomp_jax.sharding.remat import named, over_layers
from param_decomp_jax.targets.plain_linears import frozen_axes


@dataclass(frozen=True)
class DirectTerm(ABC):
    """A term that is computed from the clean pass and the trained arrays, without masked forwards.

    A subclass is a term of its own. The objective asks it for its value and differentiates that.
    """

    name: str
    coeff: float | AnySchedule

    @abstractmethod
    def value(self, batch: DecomposedBatch, step: Int[Array, ""]) -> Float[Array, ""]:
        """Returns the term without its coefficient. ``step``: the number of this step.

        `ci.per_component` sums a function of ``batch``'s causal importances over positions.
        """

    @abstractmethod
    def describe(self) -> str:
        """Returns a description of the term in a few words."""


Normalize = Literal["entries", "per_site"]
"""What the squares of deltas are divided by: the number of all entries (L1), or each site's own ‖W‖² (L5)."""


@dataclass(frozen=True)
class Faithfulness(DirectTerm):
    """The faithfulness term: L1, or L5 with ``normalize`` "per_site". ``product``: how V U is computed (N4)."""

    product: DeltaProduct = "fp32"
    normalize: Normalize = "entries"

    def value(self, batch: DecomposedBatch, step: Int[Array, ""]) -> Float[Array, ""]:
        target, weights = batch.target, batch.clean_pass.weights
        with jax.named_scope("faithfulness"):
            site_weights = target.site_weights(weights)
            return faithfulness(batch.components, site_weights, target.memory, self.product, self.normalize)

    def describe(self) -> str:
        return "mean squared entry of W − V U" if self.normalize == "entries" else "mean of ‖W − V U‖² / ‖W‖²"


@dataclass(frozen=True)
class Lp:
    """ψ(υ) = (υ + eps)^p with p annealed (L4) or on a schedule; divided by ψ(1) with ``normalize_at_one``."""

    p: Anneal | AnySchedule
    eps: float
    normalize_at_one: bool = False


@dataclass(frozen=True)
class SmoothL0:
    """ψ(υ) = υ² / (υ² + γ²) with γ on a schedule; divided by ψ(1) with ``normalize_at_one``."""

    gamma: AnySchedule
    normalize_at_one: bool = False


@dataclass(frozen=True)
class Frequency:
    """The batch-size-invariant part of L2: ``coeff · Σ f_c · log2(1 + a · f_c)``, with a coefficient of its own.

    ``ema_halflife_steps``: the half-life of the mean over steps that replaces f_c (L6).
    """

    coeff: float | AnySchedule
    reference_token_count: float
    ema_halflife_steps: float | None = None


@dataclass(frozen=True)
class ImportanceMinimality:
    """L2: ``Σ f_c · (1 + β · log2(1 + S_c))``, plus the frequency form if there is one."""

    name: str
    coeff: float | AnySchedule
    penalty: Lp | SmoothL0
    beta: float = 0.0
    frequency: Frequency | None = None


def has_means(term: ImportanceMinimality) -> bool:
    """Returns whether a term's frequencies are means over steps (L6), which are part of the state."""
    return term.frequency is not None and term.frequency.ema_halflife_steps is not None


Term = DirectTerm | ImportanceMinimality | Reconstruction


def faithfulness(
    components: Components,
    weights: dict[str, Float[Array, "*lead d_in d_out"]],
    memory: MemoryPolicy,
    product: DeltaProduct = "fp32",
    normalize: Normalize = "entries",
) -> Float[Array, ""]:
    """Returns L1, ``Σ ‖Δ_s‖² / Σ d_in · d_out``, or L5, the mean of ``‖Δ_s‖² / ‖W_s‖²``, in fp32 from the fp32 masters.
    Every expert's matrix counts (X7).

    ``product``: how V U is computed (N4).
    """
    per_site = normalize == "per_site"

    frozen = frozen_axes(memory)

    def squares(_: None, sites: dict[str, tuple[Array, Factors]]) -> tuple[None, list[Array]]:
        """Returns sums by column, because Δ is split so: devices add up what they have when all layers are done."""
        pinned = [(pin(W, with_lead(frozen, W.ndim)), factors) for W, factors in sites.values()]
        deltas = [named(delta(W, factors, product), "deltas") for W, factors in pinned]
        if per_site:
            own = zip(deltas, pinned, strict=True)
            return None, [jnp.sum(x**2, axis=-2) / _squares(W)[..., None] for x, (W, _) in own]
        return None, [jnp.sum(x**2, axis=tuple(range(x.ndim - 1))) for x in deltas]

    total = jnp.zeros(())
    # Stacks with the same number of layers go through one scan, so that what the sites of a layer send can be sent
    # together.
    for n_layers in sorted({W.shape[0] for W in weights.values()}):
        alike = {name: (W, components[name]) for name, W in weights.items() if W.shape[0] == n_layers}
        if memory.recomputes("layers"):
            _, columns = over_layers(memory, squares, None, alike)
        else:
            _, columns = squares(None, alike)
        total += sum(map(jnp.sum, columns))
    if per_site:
        return total / float(sum(prod(W.shape[:-2]) for W in weights.values()))
    return total / float(sum(W.size for W in weights.values()))  # 5.6e9 for the MLPs of an 8B: too large for int32


def _squares(W: Float[Array, "*lead d_in d_out"]) -> Float[Array, "*lead"]:
    """Returns ‖W‖² of each matrix, in fp32."""
    return jnp.sum(wide(W) ** 2, axis=(-2, -1))


def penalty_of(
    penalty: Lp | SmoothL0, upper: Float[Array, "*n"], step: Int[Array, ""], total: int
) -> Float[Array, "*n"]:
    """Returns ψ of L2, elementwise."""
    match penalty:
        case Lp(p, eps):
            # Evaluations after the last step ask for step ``total``, where T2 would go beyond its final value.
            at = step if isinstance(p, Anneal) else jnp.minimum(step, total - 1)
            power = p(at, total).astype(upper.dtype)
            value = (upper + eps) ** power
            return value * (1 + eps) ** -power if penalty.normalize_at_one else value
        case SmoothL0(gamma):
            squared = gamma(step, total).astype(upper.dtype) ** 2
            value = upper**2 / (upper**2 + squared)
            return value * (1 + squared) if penalty.normalize_at_one else value


def penalty_sum(
    penalty: Lp | SmoothL0,
    upper: Float[Array, "*n C"],
    step: Int[Array, ""],
    total: int,
    over: OverPositions = OverPositions(),  # noqa: B008
) -> Float[Array, "*experts C"]:
    """Returns ``S_c = Σ ψ(υ_c)`` of L2 over all positions of the global batch; for experts, over those that take each
    (X4)."""
    return over.sum(penalty_of(penalty, upper, step, total))


def importance_minimality(
    term: ImportanceMinimality, sums: dict[str, Float[Array, "*lead C"]], n_positions: int
) -> tuple[Float[Array, ""], Float[Array, ""] | None]:
    """Returns L2 without coefficients: the main value, and that of the frequency part (None without one).

    ``sums``: S_c by stack. The logarithm is taken of the sum over the global batch (L3).
    """
    main, frequency = jnp.zeros(()), jnp.zeros(())
    for S in sums.values():
        f = S / n_positions
        main += jnp.sum(f * (1 + term.beta * jnp.log2(1 + S)))
        if term.frequency is not None:
            frequency += jnp.sum(_frequency_penalty(f, term.frequency.reference_token_count))
    return main, None if term.frequency is None else frequency


def _frequency_penalty(f: Float[Array, "*lead C"], a: float) -> Float[Array, "*lead C"]:
    """Returns Φ of L2 and L6."""
    return f * jnp.log2(1 + a * f)


Means = dict[str, Float[Array, "..."]]
"""A decaying mean over steps of every component's frequency, which starts at 0 (L6); ``[*lead, C]`` by stack."""


def mean_frequency(
    term: Frequency, means: Means, sums: dict[str, Float[Array, "..."]], n_positions: int, step: Int[Array, ""]
) -> tuple[Float[Array, ""], Means]:
    """Returns L6 without its coefficient, and the means after this step.

    The value is computed from the means. The gradient is the full one of a batch whose frequencies are the means.
    """
    assert term.ema_halflife_steps is not None
    decay, a = 2.0 ** (-1.0 / term.ema_halflife_steps), term.reference_token_count
    total, moved = jnp.zeros(()), {}
    for name, S in sums.items():
        f = S / n_positions
        moved[name] = decay * means[name] + (1 - decay) * jax.lax.stop_gradient(f)
        mean = moved[name] / (1 - decay ** (jnp.asarray(step, float) + 1))
        slope = jnp.log2(1 + a * mean) + a * mean / ((1 + a * mean) * log(2.0))
        # The second part is 0 and only adds its gradient.
        total += jnp.sum(_frequency_penalty(mean, a)) + jnp.sum(slope * (f - jax.lax.stop_gradient(f)))
    return total, moved
