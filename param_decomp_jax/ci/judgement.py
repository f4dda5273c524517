"""What the CI function says of a batch, kept as the memory policy has it.

`Logits` holds those of every site. `Lazy` holds what they are made from, the last hidden layer and every site's head:
then a site's logits exist only where they are used, for one block of its components at a time.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import equinox as eqx
import jax
from jaxtyping import Array, Float

from param_decomp_jax.ci.function import CIFunction
from param_decomp_jax.ci.squash import Squash
from param_decomp_jax.components import V_AXES, Components
from param_decomp_jax.memory import MemoryPolicy
from param_decomp_jax.mesh import Axes, constrain, cut_tree, gather_tree, uncut, with_block
from param_decomp_jax.numerics import wide
from param_decomp_jax.reads import Reads, SiteInputs
from param_decomp_jax.remat import component_blocks, over_layers
from param_decomp_jax.sites import Sites, Stack


class Logits(eqx.Module):
    """Logits of every site at once, by stack."""

    by_stack: dict[str, Float[Array, "layers *n C"]]


class Lazy(eqx.Module):
    """``features``: of all positions, None for a layerwise function. ``heads``: the CI function's own, by stack."""

    features: Any
    heads: dict[str, Any]


Judgement = Logits | Lazy
"""A pytree that losses are differentiated by."""


def judge(
    ci: CIFunction,
    reads: Reads,
    leading: tuple[int, ...],
    components: Components,
    compute_dtype: Any,
    memory: MemoryPolicy,
) -> Judgement:
    """``reads`` are clean and constant (F5); V is not detached (C5). ``leading``: axes but an activation's last."""
    features = ci.features(reads, leading, compute_dtype, memory)
    if memory.recomputes("logits"):
        # Wide, so that the gradients of all sites are added up so.
        return Lazy(jax.tree.map(wide, features), ci.heads)
    heads = gather_tree(ci.heads, ci.axes().heads, compute_dtype)

    def of_stack(name: str, V: Array) -> Array:
        x = reads.inputs[name].astype(compute_dtype) if features is None else None
        per_layer = jax.vmap(ci.logits, in_axes=(0, None, None if x is None else 0, 0))
        return per_layer(heads[name], features, x, V)

    return Logits({name: constrain(of_stack(name, f.V), None, "batch") for name, f in components.items()})


class SiteJudgement(NamedTuple):
    """What one site's logits are read from: the logits, or its head and clean input."""

    logits: Any
    head: Any
    x: Any


@dataclass(frozen=True)
class Judge:
    """How a site's importances are read, layer by layer and block by block.

    ``squash``: from logits to what masks are interpolated from (λ in training). ``inputs`` are needed where the CI
    function is layerwise; ``n_leading``: axes of an activation before its last one; ``head_axes`` are of one layer's
    heads, by stack; ``head_logits`` is the CI function's own way from a head to logits.
    """

    judgement: Judgement
    squash: Squash
    inputs: SiteInputs
    n_leading: int
    head_axes: dict[str, Any]
    head_logits: Callable[..., Array]
    compute_dtype: Any

    @classmethod
    def of(
        cls,
        ci: CIFunction,
        judgement: Judgement,
        squash: Squash,
        inputs: SiteInputs,
        n_leading: int,
        compute_dtype: Any,
    ) -> "Judge":
        """``judgement`` was made by `judge` from these."""
        return cls(
            judgement, squash, inputs, n_leading, jax.tree.map(Axes.below, ci.axes().heads), ci.logits, compute_dtype
        )

    @property
    def features(self) -> Any:
        """What all sites' logits are made from; None where every site has its own."""
        return None if isinstance(self.judgement, Logits) else self.judgement.features

    @property
    def features_axes(self) -> Any:
        """Of `features`, in its structure."""
        return jax.tree.map(lambda _: Axes(("batch", "seq")[: self.n_leading]), self.features)

    def at(self, features: Any) -> "Judge":
        """The same at some of the positions: those of ``features``."""
        if isinstance(self.judgement, Logits):
            return self
        return replace(self, judgement=Lazy(features, self.judgement.heads))

    def slices(self, stack: Stack, first: int, stop: int) -> SiteJudgement:
        """For the layers ``first .. stop - 1``, with a leading layer axis."""
        rows = slice(first - stack.first, stop - stack.first)
        if isinstance(self.judgement, Logits):
            return SiteJudgement(self.judgement.by_stack[stack.name][rows], None, None)
        x = self.inputs[stack.name][rows] if self.judgement.features is None else None
        return SiteJudgement(None, jax.tree.map(lambda a: a[rows], self.judgement.heads[stack.name]), x)

    def axes(self, stack: Stack) -> SiteJudgement:
        """Of one layer's slice, in its structure."""
        rows = ("batch", "seq")[: self.n_leading]
        if isinstance(self.judgement, Logits):
            return SiteJudgement(Axes((*rows, "component_in_use")), None, None)
        x = Axes(rows) if self.judgement.features is None else None
        return SiteJudgement(None, self.head_axes[stack.name], x)

    def logits(self, of_site: SiteJudgement, V: Float[Array, "d_in C"]) -> Float[Array, "*n C"]:
        """From a slice, or one block of it, gathered for use."""
        if isinstance(self.judgement, Logits):
            return of_site.logits
        now = None if self.features is None else self.features.astype(self.compute_dtype)
        x = None if of_site.x is None else of_site.x.astype(self.compute_dtype)
        return self.head_logits(of_site.head, now, x, V)


def per_component(
    judge: Judge,
    components: Components,
    sites: Sites,
    memory: MemoryPolicy,
    reduce: Callable[[Float[Array, "*n C"]], Any],
) -> dict[str, Any]:
    """A summary of each component's logits over the batch, by stack: arrays ``[layers, C, …]``.

    ``reduce`` sums up the logits of some components of one site: arrays ``[C, …]``.
    """

    def of_stack(stack: Stack) -> Any:
        of_sites = judge.slices(stack, stack.first, stack.first + stack.n_layers)
        if isinstance(judge.judgement, Logits):
            return jax.vmap(reduce)(of_sites.logits)
        axes, n_blocks = (judge.axes(stack), V_AXES), component_blocks(memory, stack.C)

        def of_block(site: Any, block: Any) -> Any:
            of_site, V = gather_tree(with_block(site, block), axes, judge.compute_dtype)
            return reduce(judge.logits(of_site, V))

        def of_site(_: None, site: Any) -> tuple[None, Any]:
            blocks = cut_tree(site, axes, n_blocks, "component")
            if n_blocks == 1:
                return None, of_block(site, jax.tree.map(lambda x: x[0], blocks))
            recomputed = jax.checkpoint(of_block, prevent_cse=False)
            found = jax.lax.map(lambda block: recomputed(site, block), blocks)
            return None, jax.tree.map(lambda x: uncut(x, 0, "component"), found)

        return over_layers(memory, of_site, None, (of_sites, components[stack.name].V))[1]

    return {stack.name: of_stack(stack) for stack in sites.stacks}
