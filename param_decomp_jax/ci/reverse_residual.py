"""The global CI function that reads blocks of sites from the last to the first, along a residual (C4)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import pairwise
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from param_decomp_jax.ci.affine import (
    HIDDEN_GAIN,
    MLP,
    Affine,
    GlobalCI,
    JointAffine,
    apply_mlp,
    gelu,
    init_affine,
    init_heads,
    init_joint_affine,
    init_mlp,
)  # fmt: skip
from param_decomp_jax.ci.inputs import ChosenExperts, CIInputs, KeptInputs, SiteInputs
from param_decomp_jax.ci.outputs import StackFeatures
from param_decomp_jax.ci.transformer import EPS, attended
from param_decomp_jax.memory import Attention, MemoryPolicy
from param_decomp_jax.mesh import Axes, constrain, gather_tree, replace_fields
from param_decomp_jax.numerics import rms_norm
from param_decomp_jax.sites import Sites, Stack


@dataclass(frozen=True)
class SiteGroup:
    """A block: sites whose name one of ``patterns`` (fnmatch) matches, alone or behind one of ``prefixes``."""

    name: str
    patterns: tuple[str, ...]
    prefixes: tuple[str, ...] = ()

    def has(self, site: str) -> bool:
        return any(fnmatchcase(prefix + site, p) for p in self.patterns for prefix in ("", *self.prefixes))


@dataclass(frozen=True)
class TransitionAttention:
    """``max_len``: longest sequence admitted."""

    n_heads: int
    max_len: int = 2048
    rope_base: float = 10000.0


@dataclass(frozen=True)
class GlobalReverseResidual:
    """``groups``: in network order. ``reader_hidden``: widths of a reader's hidden layers. ``attention``,
    ``transition_hidden``: the two parts of a transition; None leaves one out."""

    d_resid: int
    groups: tuple[SiteGroup, ...]
    reader_hidden: tuple[int, ...]
    attention: TransitionAttention | None = None
    transition_hidden: int | None = None


class UnfitGroups(ValueError):
    """Groups that do not cover the sites, each once; the message names the group or the site."""


def blocks_of_layers(groups: Sequence[SiteGroup], sites: Sites) -> dict[str, tuple[int, ...]]:
    """For every stack, the numbers of the blocks in which its layers are.

    UnfitGroups for a site in none or in several, a group without a site, and experts of one layer in several.
    """

    found = []
    for site in sites.all:
        own = [n for n, group in enumerate(groups) if group.has(site.name)]
        if len(own) != 1:
            which = " and ".join(groups[n].name for n in own) if own else "none"
            raise UnfitGroups(f"{site.name} is in {which} of the groups; every site must be in exactly one")
        found += own
    for n, group in enumerate(groups):
        if n not in found:
            raise UnfitGroups(f"group {group.name} has no site; its patterns are {', '.join(group.patterns)}")
    by_layer = {s.name: [{found[n] for n in s.of_layer(layer)} for layer in s.layers] for s in sites.stacks}
    for name, layers in by_layer.items():
        if any(len(blocks) > 1 for blocks in layers):
            raise UnfitGroups(f"the experts of {name} are in several groups; those of one layer must be in one")
    return {name: tuple(min(blocks) for blocks in layers) for name, layers in by_layer.items()}


class ReverseBlock(eqx.Module):
    """``project``: from the inputs of the block's sites to the residual. ``hidden``: of its reader."""

    project: JointAffine
    hidden: MLP

    def axes(self) -> Any:
        hidden = tuple(layer.axes(columns="split") for layer in self.hidden)
        return replace_fields(self, project=self.project.axes(), hidden=hidden)


class Transition(eqx.Module):
    """``attention``: q, k, v and o, ``[d_resid, d_resid]``. None, like no ``mlp``: left out."""

    attention: tuple[Array, Array, Array, Array] | None
    mlp: MLP | None

    def axes(self) -> Any:
        matrix = Axes((None, "split"), product=True)
        return replace_fields(
            self,
            attention=self.attention and (matrix,) * 4,
            mlp=self.mlp and tuple(layer.axes(columns="split") for layer in self.mlp),
        )


class ReverseResidualCI(GlobalCI):
    """``blocks`` in network order; ``transitions[n]`` leads from block n + 1 to block n. A site's head is its part of
    the last layer of its block's reader. ``places``: of every stack, the blocks of its layers."""

    jointly: ClassVar[bool] = False
    blocks: tuple[ReverseBlock, ...]
    transitions: tuple[Transition, ...]
    heads: dict[str, Affine]
    places: tuple[tuple[str, tuple[int, ...]], ...] = eqx.field(static=True)
    config: GlobalReverseResidual = eqx.field(static=True)

    def features(
        self, inputs: CIInputs, leading: tuple[int, ...], compute_dtype: Any, memory: MemoryPolicy
    ) -> StackFeatures:
        """The last hidden layer of every site's reader, from the clean inputs; ``leading`` as for the transformer."""
        assert isinstance(inputs, KeptInputs), "a block's inputs are kept"
        limit = self.config.attention
        if limit is not None and len(leading) > 1:
            assert leading[1] <= limit.max_len, f"sequence of {leading[1]} beyond max_len {limit.max_len}"

        def read(
            residual: Array, block: ReverseBlock, by_stack: SiteInputs, chosen: ChosenExperts
        ) -> tuple[Array, Array]:
            own = KeptInputs(by_stack, chosen)
            summand = block.project(own, leading, lambda x: rms_norm(x.astype(compute_dtype), EPS), memory)
            residual = constrain((residual + summand).astype(compute_dtype), "batch")
            h = residual
            for layer in block.hidden:
                gathered = gather_tree(layer, layer.axes(columns="split"), compute_dtype)
                h = gelu(gathered(h)).astype(compute_dtype)
            return residual, constrain(h, "batch")

        def move(residual: Array, transition: Transition) -> Array:
            return constrain(self._move(residual, transition, memory.attention), "batch")

        if memory.recomputes("ci"):
            read, move = jax.checkpoint(read), jax.checkpoint(move)
        residual = jnp.zeros((*leading, self.config.d_resid), compute_dtype)
        hidden: dict[int, Array] = {}
        for n in reversed(range(len(self.blocks))):
            by_stack, chosen = (self._of_block(arrays, n) for arrays in (inputs.by_stack, inputs.chosen))
            residual, hidden[n] = read(residual, self.blocks[n], by_stack, chosen)
            if n > 0:
                residual = move(residual, self.transitions[n - 1])
        # One array for all stacks whose layers are in the same blocks, under the first one's name.
        names: dict[tuple[int, ...], str] = {}
        for name, blocks in self.places:
            names.setdefault(blocks, name)
        shared = {name: jnp.stack([hidden[n] for n in blocks]) for blocks, name in names.items()}
        return StackFeatures(shared, tuple((name, names[blocks]) for name, blocks in self.places))

    def _of_block(self, by_stack: dict[str, Array], number: int) -> dict[str, Array]:
        """Of arrays by stack, the layers that are in a block."""
        places = dict(self.places)
        rows = {name: [row for row, n in enumerate(places[name]) if n == number] for name in by_stack}

        def take(x: Array, own: list[int]) -> Array:
            consecutive = own[-1] - own[0] == len(own) - 1
            return x[own[0] : own[-1] + 1] if consecutive else jnp.stack([x[row] for row in own])

        return {name: take(by_stack[name], own) for name, own in rows.items() if own}

    def _move(self, h: Float[Array, "*n d"], w: Transition, attention: Attention) -> Float[Array, "*n d"]:
        w = gather_tree(w, w.axes(), h.dtype)
        if w.attention is not None:
            shape, config = h.shape, self.config.attention
            assert config is not None
            rows = h[:, None] if h.ndim == 2 else h
            h = attended(rows, w.attention, config.n_heads, config.rope_base, attention).reshape(shape)
        return h if w.mlp is None else h + apply_mlp(w.mlp, rms_norm(h, EPS)).astype(h.dtype)

    def axes(self) -> Any:
        """Every matrix is split by output, the heads by component."""
        return replace_fields(
            self,
            blocks=tuple(block.axes() for block in self.blocks),
            transitions=tuple(transition.axes() for transition in self.transitions),
            heads=self.heads_axes(),
        )


def init_reverse_residual(config: GlobalReverseResidual, key: PRNGKeyArray, sites: Sites) -> ReverseResidualCI:
    """Fresh weights (C4). Raises UnfitGroups."""
    to_input, to_reader, to_transition, to_heads = jax.random.split(key, 4)
    places, d = blocks_of_layers(config.groups, sites), config.d_resid
    widths = (d, *config.reader_hidden)

    def part(stack: Stack, number: int) -> Stack | None:
        """The layers of a stack that are in a block, as a stack."""
        own = [layer for layer, n in zip(stack.layers, places[stack.name], strict=True) if n == number]
        return replace(stack, sites=tuple(s for layer in own for s in stack.of_layer(layer))) if own else None

    def block(number: int) -> ReverseBlock:
        parts = [own for stack in sites.stacks if (own := part(stack, number)) is not None]
        of_reader = jax.random.fold_in(to_reader, number)
        hidden = tuple(
            init_affine(jax.random.fold_in(of_reader, n), (), d_in, d_out, HIDDEN_GAIN)
            for n, (d_in, d_out) in enumerate(pairwise(widths))
        )
        return ReverseBlock(init_joint_affine(to_input, parts, d), hidden)

    def transition(number: int) -> Transition:
        of_attention, of_mlp = jax.random.split(jax.random.fold_in(to_transition, number))
        bound, hidden = d**-0.5, config.transition_hidden
        q, k, v, o = (
            jax.random.uniform(n, (d, d), jnp.float32, -bound, bound) for n in jax.random.split(of_attention, 4)
        )
        return Transition(
            attention=None if config.attention is None else (q, k, v, o),
            mlp=None if hidden is None else init_mlp(of_mlp, (), (d, hidden, d)),
        )

    return ReverseResidualCI(
        blocks=tuple(map(block, range(len(config.groups)))),
        transitions=tuple(map(transition, range(len(config.groups) - 1))),
        heads=init_heads(to_heads, sites, widths[-1]),
        places=tuple(places.items()),
        config=config,
    )
