"""Outputs of the CI function on a batch, in the form that the memory policy asks for, and how sites read them.

`Logits` holds the logits of every site. `LazyLogits` holds what they are computed from, the last hidden layer and every
site's head: then a site's logits exist only where they are used, for one block of its components at a time.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import equinox as eqx
import jax
from jaxtyping import Array, Float

from param_decomp_jax.ci.function import CIFunction
from param_decomp_jax.ci.inputs import CIInputs, SiteInputs
from param_decomp_jax.ci.squash import Squash
from param_decomp_jax.components import V_AXES, Components
from param_decomp_jax.memory import MemoryPolicy
from param_decomp_jax.mesh import Axes, constrain, cut_tree, gather_tree, uncut, with_block
from param_decomp_jax.numerics import wide
from param_decomp_jax.remat import component_blocks, over_layers
from param_decomp_jax.sites import Sites, Stack


class Logits(eqx.Module):
    """Logits of every site at once, by stack."""

    by_stack: dict[str, Float[Array, "layers *n C"]]


class LazyLogits(eqx.Module):
    """``features``: of all positions, None for a layerwise function. ``heads``: the CI function's own, by stack."""

    features: Any
    heads: dict[str, Any]


CIOutputs = Logits | LazyLogits
"""A pytree with respect to which losses are differentiated."""


def run_ci_function(
    ci: CIFunction,
    inputs: CIInputs,
    leading: tuple[int, ...],
    components: Components,
    compute_dtype: Any,
    memory: MemoryPolicy,
) -> CIOutputs:
    """The CI function's outputs on clean, constant ``inputs`` (F5); V is not detached (C5).

    ``leading``: axes of an activation before its last one.
    """
    features = ci.features(inputs, leading, compute_dtype, memory)
    if memory.recomputes("logits"):
        # Wide, so that the gradients of all sites are added up in fp32.
        return LazyLogits(jax.tree.map(wide, features), ci.heads)
    heads = gather_tree(ci.heads, ci.axes().heads, compute_dtype)

    def stack_logits(name: str, V: Array) -> Array:
        x = inputs.by_stack[name].astype(compute_dtype) if features is None else None
        per_layer = jax.vmap(ci.logits, in_axes=(0, None, None if x is None else 0, 0))
        return per_layer(heads[name], features, x, V)

    return Logits({name: constrain(stack_logits(name, f.V), None, "batch") for name, f in components.items()})


class SiteCI(NamedTuple):
    """What one site's logits are read from: the logits themselves, or the site's head and clean input."""

    logits: Any
    head: Any
    x: Any


@dataclass(frozen=True)
class ImportanceReader:
    """Reads a site's causal importances from the CI function's outputs, layer by layer and block by block.

    ``squash``: from logits to what masks are interpolated from (λ in training). ``site_inputs``: needed where the CI
    function is layerwise. ``n_leading``: number of an activation's axes before its last one. ``head_axes``: of one
    layer's heads, by stack. ``head_logits``: the CI function's own way from a head to logits.
    """

    outputs: CIOutputs
    squash: Squash
    site_inputs: SiteInputs
    n_leading: int
    head_axes: dict[str, Any]
    head_logits: Callable[..., Array]
    compute_dtype: Any

    @classmethod
    def from_ci_function(
        cls,
        ci: CIFunction,
        outputs: CIOutputs,
        squash: Squash,
        site_inputs: SiteInputs,
        n_leading: int,
        compute_dtype: Any,
    ) -> "ImportanceReader":
        """A reader of ``outputs``, which `run_ci_function` computed with ``ci``."""
        head_axes = jax.tree.map(Axes.below, ci.axes().heads)
        return cls(outputs, squash, site_inputs, n_leading, head_axes, ci.logits, compute_dtype)

    @property
    def features(self) -> Any:
        """What all sites' logits are computed from; None where every site has its own logits or input."""
        return None if isinstance(self.outputs, Logits) else self.outputs.features

    @property
    def features_axes(self) -> Any:
        """Logical axes of `features`, in its structure."""
        return jax.tree.map(lambda _: Axes(("batch", "seq")[: self.n_leading]), self.features)

    def at(self, features: Any) -> "ImportanceReader":
        """The same for some of the positions: those of ``features``."""
        if isinstance(self.outputs, Logits):
            return self
        return replace(self, outputs=LazyLogits(features, self.outputs.heads))

    def slices(self, stack: Stack, first: int, stop: int) -> SiteCI:
        """For the layers ``first .. stop - 1``, with a leading layer axis."""
        rows = slice(first - stack.first, stop - stack.first)
        if isinstance(self.outputs, Logits):
            return SiteCI(self.outputs.by_stack[stack.name][rows], None, None)
        x = self.site_inputs[stack.name][rows] if self.outputs.features is None else None
        return SiteCI(None, jax.tree.map(lambda a: a[rows], self.outputs.heads[stack.name]), x)

    def axes(self, stack: Stack) -> SiteCI:
        """Logical axes of one layer's slice, in its structure."""
        rows = ("batch", "seq")[: self.n_leading]
        if isinstance(self.outputs, Logits):
            return SiteCI(Axes((*rows, "component_in_use")), None, None)
        x = Axes(rows) if self.outputs.features is None else None
        return SiteCI(None, self.head_axes[stack.name], x)

    def logits(self, site: SiteCI, V: Float[Array, "d_in C"]) -> Float[Array, "*n C"]:
        """Logits of one layer's site from its slice, or from one block of it, gathered for use."""
        if isinstance(self.outputs, Logits):
            return site.logits
        features = None if self.features is None else self.features.astype(self.compute_dtype)
        x = None if site.x is None else site.x.astype(self.compute_dtype)
        return self.head_logits(site.head, features, x, V)


def per_component(
    reader: ImportanceReader,
    components: Components,
    sites: Sites,
    memory: MemoryPolicy,
    reduce: Callable[[Float[Array, "*n C"]], Any],
) -> dict[str, Any]:
    """A summary of each component's logits over the batch, by stack: arrays ``[layers, C, …]``.

    ``reduce`` sums up the logits of some components of one site: arrays ``[C, …]``.
    """

    def reduce_stack(stack: Stack) -> Any:
        slices = reader.slices(stack, stack.first, stack.first + stack.n_layers)
        if isinstance(reader.outputs, Logits):
            return jax.vmap(reduce)(slices.logits)
        axes, n_blocks = (reader.axes(stack), V_AXES), component_blocks(memory, stack.C)

        def reduce_block(site: Any, block: Any) -> Any:
            site_ci, V = gather_tree(with_block(site, block), axes, reader.compute_dtype)
            return reduce(reader.logits(site_ci, V))

        def reduce_site(_: None, site: Any) -> tuple[None, Any]:
            blocks = cut_tree(site, axes, n_blocks, "component")
            if n_blocks == 1:
                return None, reduce_block(site, jax.tree.map(lambda x: x[0], blocks))
            recomputed = jax.checkpoint(reduce_block, prevent_cse=False)
            found = jax.lax.map(lambda block: recomputed(site, block), blocks)
            return None, jax.tree.map(lambda x: uncut(x, 0, "component"), found)

        return over_layers(memory, reduce_site, None, (slices, components[stack.name].V))[1]

    return {stack.name: reduce_stack(stack) for stack in sites.stacks}
