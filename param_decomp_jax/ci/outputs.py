"""Outputs of the CI function on a batch, in the form that the memory policy asks for, and how sites read them.

`Logits` holds the logits of every site. `LazyLogits` holds what they are computed from, the last hidden layer and every
site's head. A site's logits then exist only where they are used, for one block of its components at a time.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from param_decomp_jax.ci.function import CIFunction
from param_decomp_jax.ci.inputs import ChosenExperts
from param_decomp_jax.ci.squash import Squash
from param_decomp_jax.ci.taps import Reads
from param_decomp_jax.decomposition.components import Components, site_axes
from param_decomp_jax.decomposition.sites import Sites, Stack
from param_decomp_jax.nn.grouped import ExpertGroups, OverPositions, group
from param_decomp_jax.nn.numerics import wide
from param_decomp_jax.sharding.memory import MemoryPolicy
from param_decomp_jax.sharding.mesh import Axes, at_rest, constrain, gather_tree, join_blocks, split_tree, with_block
from param_decomp_jax.sharding.remat import component_blocks, over_layers

Summarise = Callable[[Float[Array, "*n C"], OverPositions], Any]
"""A function from the logits of some components of one site to sums over the positions: arrays ``[C, …]``."""


class Logits(eqx.Module):
    """The logits of every site at once, by stack; for experts, those of every slot."""

    by_stack: dict[str, Float[Array, "layers *n C"]]


class StackFeatures(eqx.Module):
    """What heads read if it differs between sites. Several stacks may share an array; ``of_stack`` gives the array that
    the heads of each stack read."""

    shared: dict[str, Float[Array, "layers *n d"]]
    of_stack: tuple[tuple[str, str], ...] = eqx.field(static=True)

    @property
    def by_stack(self) -> dict[str, Float[Array, "layers *n d"]]:
        return {stack: self.shared[name] for stack, name in self.of_stack}


class LazyLogits(eqx.Module):
    """What logits are computed from. ``features``: those of all positions, one array for all sites or `StackFeatures`;
    None for a layerwise function. ``heads``: the heads of the CI function, by stack."""

    features: Any
    heads: dict[str, Any]


CIOutputs = Logits | LazyLogits
"""The outputs of a CI function: a pytree with respect to which losses are differentiated."""


def run_ci_function(
    ci: CIFunction,
    inputs: Reads,
    leading: tuple[int, ...],
    components: Components,
    compute_dtype: Any,
    memory: MemoryPolicy,
    chosen: ChosenExperts | None = None,
    head_inputs: dict[str, Any] | None = None,
) -> CIOutputs:
    """Returns the CI function's outputs on clean, constant ``inputs`` (F5, C10). V is not detached (C5).

    ``leading``: the axes of an activation before its last one. ``chosen``: the experts taken, by stack of experts.
    ``head_inputs``: what the CI function's `head_inputs` returned for the same inputs.
    """
    features = ci.features(inputs, leading, compute_dtype, memory)
    if memory.recomputes("logits"):
        # Wide, so that the gradients of all sites are summed in fp32.
        return LazyLogits(jax.tree.map(wide, features), ci.heads)
    heads = gather_tree(ci.heads, ci.axes().heads, compute_dtype)
    by_stack = features.by_stack if isinstance(features, StackFeatures) else None

    def of_layer(head: Any, features: Any, x: Any, V: Array, chosen: Array | None) -> Array:
        return ci.logits(head, features, x, V, None if chosen is None else group(chosen, V.shape[0]))

    def stack_logits(name: str, V: Array) -> Array:
        x = _cast((head_inputs or {}).get(name), compute_dtype)
        read = features if by_stack is None else by_stack[name]
        per_layer = jax.vmap(of_layer, in_axes=(0, None if by_stack is None else 0, 0, 0, 0))
        return per_layer(heads[name], read, x, V, chosen.get(name) if chosen else None)

    V = {name: at_rest(factors.V) for name, factors in components.items()}
    return Logits({name: constrain(stack_logits(name, own), None, "batch") for name, own in V.items()})


def _cast(x: Any, dtype: Any) -> Any:
    """Casts what a head reads of its site to the dtype of products; numbers of rows stay as they are."""
    return jax.tree.map(lambda a: a.astype(dtype) if jnp.issubdtype(a.dtype, jnp.floating) else a, x)


class SiteCI(NamedTuple):
    """What one site's logits are read from: the logits themselves, or the site's head and what it reads of the site, if
    anything."""

    logits: Any
    head: Any
    x: Any


@dataclass(frozen=True)
class ImportanceReader:
    """Reads a site's causal importances from the CI function's outputs, layer by layer and block by block.

    ``squash``: turns logits into what masks are interpolated from (λ in training). ``head_inputs``: what the CI
    function's `head_inputs` returned. ``n_leading``: the number of an activation's axes before its last one.
    ``head_axes``: the axes of one layer's heads, by stack. ``head_logits``: the CI function's `logits`. ``chosen``: the
    experts taken, by stack of experts.
    """

    outputs: CIOutputs
    squash: Squash
    head_inputs: dict[str, Any]
    n_leading: int
    head_axes: dict[str, Any]
    head_logits: Callable[..., Array]
    compute_dtype: Any
    chosen: ChosenExperts = field(default_factory=dict)

    @classmethod
    def from_ci_function(
        cls,
        ci: CIFunction,
        outputs: CIOutputs,
        squash: Squash,
        head_inputs: dict[str, Any],
        n_leading: int,
        compute_dtype: Any,
        chosen: ChosenExperts | None = None,
    ) -> "ImportanceReader":
        """Returns a reader of ``outputs``, which `run_ci_function` computed with ``ci``."""
        head_axes = jax.tree.map(Axes.below, ci.axes().heads)
        return cls(outputs, squash, head_inputs, n_leading, head_axes, ci.logits, compute_dtype, chosen or {})

    @property
    def features(self) -> Any:
        """What all sites' logits are computed from; None if they have nothing in common."""
        if isinstance(self.outputs, Logits) or isinstance(self.outputs.features, StackFeatures):
            return None
        return self.outputs.features

    def at(self, features: Any) -> "ImportanceReader":
        """Returns the reader for some of the positions: those of ``features``."""
        if isinstance(self.outputs, Logits) or features is None:
            return self
        return replace(self, outputs=LazyLogits(features, self.outputs.heads))

    def layer_features(self, stacks: Iterable[Stack], first: int, stop: int) -> dict[str, Array]:
        """Returns what these stacks' heads read in the layers ``first .. stop - 1``, with a leading layer axis, if it
        differs between sites; otherwise empty. An array that several stacks read appears once."""
        features = self.outputs.features if isinstance(self.outputs, LazyLogits) else None
        if not isinstance(features, StackFeatures):
            return {}
        of_stack = dict(features.of_stack)
        return {
            of_stack[stack.name]: features.shared[of_stack[stack.name]][first - stack.first : stop - stack.first]
            for stack in stacks
        }

    def at_layer(self, stack: Stack, features: dict[str, Array]) -> "ImportanceReader":
        """Returns the reader for the site of a stack in one layer. ``features``: that layer's slice of
        `layer_features`."""
        if isinstance(self.outputs, Logits) or not isinstance(self.outputs.features, StackFeatures):
            return self
        return self.at(features[dict(self.outputs.features.of_stack)[stack.name]])

    def slices(self, stack: Stack, first: int, stop: int) -> SiteCI:
        """Returns what is read for the layers ``first .. stop - 1``, with a leading layer axis."""
        rows = slice(first - stack.first, stop - stack.first)
        return jax.tree.map(lambda x: x[rows], self.of_stack(stack))

    def of_stack(self, stack: Stack) -> SiteCI:
        """Returns what is read for all layers of a stack."""
        if isinstance(self.outputs, Logits):
            return SiteCI(self.outputs.by_stack[stack.name], None, None)
        return SiteCI(None, self.outputs.heads[stack.name], self.head_inputs.get(stack.name))

    def axes(self, stack: Stack) -> SiteCI:
        """Returns the logical axes of one layer's slice, in its structure."""
        rows = ("batch", "seq")[: self.n_leading]
        if isinstance(self.outputs, Logits):
            return SiteCI(Axes((*rows, "component_in_use")), None, None)
        x = jax.tree.map(lambda _: Axes(rows), self.head_inputs.get(stack.name))
        return SiteCI(None, self.head_axes[stack.name], x)

    def logits(
        self, site: SiteCI, V: Float[Array, "*experts d_in C"], groups: ExpertGroups | None = None
    ) -> Float[Array, "*slots C"]:
        """Returns the logits of one layer's site from its slice, or from one block of it, gathered for use; for
        experts, those of every slot."""
        if isinstance(self.outputs, Logits):
            return site.logits
        features = None if self.features is None else self.features.astype(self.compute_dtype)
        return self.head_logits(site.head, features, _cast(site.x, self.compute_dtype), V, groups)

    def groups(self, stack: Stack, chosen: Any) -> ExpertGroups | None:
        """Returns the slots of experts in one layer of a stack of experts; None for other stacks."""
        return None if stack.experts is None else group(chosen, stack.experts)


SumComponents = Callable[[Float[Array, "*slots C"]], Any]
"""A function from the logits of some components of one site to sums over these components: arrays ``[*slots, …]``."""


def per_component(
    reader: ImportanceReader,
    components: Components,
    sites: Sites,
    memory: MemoryPolicy,
    summarise: Summarise,
) -> dict[str, Any]:
    """Returns a summary of each component's logits over the batch, by stack: arrays ``[layers, C, …]``; for experts,
    ``[layers, experts, C, …]``."""

    def reduce(stack: Stack, logits: Array, groups: ExpertGroups | None) -> Any:
        return summarise(logits, OverPositions(groups, stack.experts or 0))

    def join(blocks: Array, groups: ExpertGroups | None) -> Array:
        return join_blocks(blocks, 0 if groups is None else 1, "component")

    return _reduce_sites(reader, components, sites, memory, reduce, join)


def per_position(
    reader: ImportanceReader,
    components: Components,
    sites: Sites,
    memory: MemoryPolicy,
    sum_components: SumComponents,
) -> dict[str, Any]:
    """Returns sums over each site's components at every position, by stack: arrays ``[layers, *n, …]``. For experts,
    the sums run over those that a position takes."""

    def reduce(stack: Stack, logits: Array, groups: ExpertGroups | None) -> Any:
        found = sum_components(logits)
        return found if groups is None else jax.tree.map(lambda x: jnp.sum(x, axis=reader.n_leading), found)

    return _reduce_sites(reader, components, sites, memory, reduce, lambda blocks, _: jnp.sum(blocks, axis=0))


def _reduce_sites(
    reader: ImportanceReader,
    components: Components,
    sites: Sites,
    memory: MemoryPolicy,
    reduce: Callable[[Stack, Array, ExpertGroups | None], Any],
    join: Callable[[Array, ExpertGroups | None], Array],
) -> dict[str, Any]:
    """Returns ``reduce`` of each site's logits, by stack, with a leading layer axis. ``join``: joins the results of a
    site's blocks of components, which have a leading axis of blocks."""

    def reduce_stack(stack: Stack) -> Any:
        slices = reader.slices(stack, stack.first, stack.first + stack.n_layers)
        features = reader.layer_features([stack], stack.first, stack.first + stack.n_layers)
        chosen = reader.chosen.get(stack.name)
        if isinstance(reader.outputs, Logits):
            of_layer = lambda logits, chosen: reduce(stack, logits, reader.groups(stack, chosen))  # noqa: E731
            return jax.vmap(of_layer, in_axes=(0, None if chosen is None else 0))(slices.logits, chosen)
        axes, n_blocks = (reader.axes(stack), site_axes(stack)[0]), component_blocks(memory, stack.C)

        def reduce_block(site: Any, block: Any, features: dict[str, Array], groups: ExpertGroups | None) -> Any:
            site_ci, V = gather_tree(with_block(site, block), axes, reader.compute_dtype)
            return reduce(stack, reader.at_layer(stack, features).logits(site_ci, V, groups), groups)

        def reduce_site(_: None, layer: Any) -> tuple[None, Any]:
            site, features, chosen = layer
            groups = reader.groups(stack, chosen)
            blocks = split_tree(site, axes, n_blocks, "component")
            if n_blocks == 1:
                return None, reduce_block(site, jax.tree.map(lambda x: x[0], blocks), features, groups)
            recomputed = jax.checkpoint(reduce_block, prevent_cse=False)
            found = jax.lax.map(lambda block: recomputed(site, block, features, groups), blocks)
            return None, jax.tree.map(lambda x: join(x, groups), found)

        return over_layers(memory, reduce_site, None, ((slices, components[stack.name].V), features, chosen))[1]

    return {stack.name: reduce_stack(stack) for stack in sites.stacks}
