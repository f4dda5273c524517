"""Nonlinearity locality (L7): a component should touch few units of the nonlinearity that its matrix faces."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from param_decomp_jax.decomposition.components import Components, Factors
from param_decomp_jax.decomposition.schedules import AnySchedule, value_at
from param_decomp_jax.decomposition.sites import Sites, UnitKind, Units
from param_decomp_jax.method.clean_pass import DecomposedBatch
from param_decomp_jax.method.losses import DirectTerm
from param_decomp_jax.nn.numerics import wide


@dataclass(frozen=True)
class NonlinearityLocality(DirectTerm):
    """The term of L7. ``kinds``: the kinds of units that count, each with its weight. ``threshold``: t, above 0 at each
    of the ``steps`` of training."""

    kinds: tuple[tuple[UnitKind, float], ...]
    threshold: float | AnySchedule
    steps: int
    normalize_at_one: bool = False

    def value(self, batch: DecomposedBatch, step: Int[Array, ""]) -> Float[Array, ""]:
        # An evaluation after the last step asks for step ``steps``, where T2 would go beyond its final value.
        threshold = value_at(self.threshold, jnp.minimum(step, self.steps - 1), self.steps)
        with jax.named_scope("nonlinearity_locality"):
            return nonlinearity_locality(
                batch.components, batch.target.sites, self.kinds, threshold, self.normalize_at_one
            )

    def describe(self) -> str:
        of = " and ".join(f"{kind.replace('_', ' ')}s (times {weight:g})" for kind, weight in self.kinds)
        return f"soft count of {of} per component" + ", 1 for a single one" * self.normalize_at_one


def nonlinearity_locality(
    components: Components,
    sites: Sites,
    kinds: tuple[tuple[UnitKind, float], ...],
    threshold: float | Float[Array, ""],
    normalize_at_one: bool = False,
) -> Float[Array, ""]:
    """Returns L7 without its coefficient, in fp32 from the fp32 masters. Both sites of a tied pair (T4) count."""
    total = jnp.zeros(())
    for kind, weight in kinds:
        facing = [(stack, stack.faces) for stack in sites.stacks if stack.faces and stack.faces.kind == kind]
        assert facing, f"no site faces units of the kind {kind}"
        n_components = sum(len(stack.sites) * stack.C for stack, _ in facing)
        counts = (soft_counts(components[stack.name], of, threshold, normalize_at_one) for stack, of in facing)
        total += weight * sum(map(jnp.sum, counts)) / float(n_components)
    return total


def soft_counts(
    factors: Factors, units: Units, threshold: float | Float[Array, ""], normalize_at_one: bool
) -> Float[Array, "*lead C"]:
    """Returns a soft count of the units that each component of a stack touches: ``m · Σ_u f_u / (f_u + t/N)``. Units
    with less than a share t/N of the component's length count little."""

    # The intermediates are larger than the factors, and fast to recompute.
    @jax.checkpoint
    def count(vectors: Array, relative: Array) -> Array:
        if units.side == "output":
            axis, shape = -1, (*vectors.shape[:-1], units.n, -1)
        else:
            axis, shape = -2, (*vectors.shape[:-2], units.n, -1, vectors.shape[-1])
        squares = jnp.sum(wide(vectors).reshape(shape) ** 2, axis=axis)
        length = jnp.sum(squares, axis=axis, keepdims=True)
        shares = squares / jnp.where(length == 0, 1, length)
        soft = units.multiplier * jnp.sum(shares / (shares + relative), axis=axis)
        return soft * (1 + relative) if normalize_at_one else soft

    return count(factors.U if units.side == "output" else factors.V, jnp.asarray(threshold, float) / units.n)
