"""One CI transformer for each group of sites, usually for each layer (C6)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import groupby
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from param_decomp_jax.ci.affine import HIDDEN_GAIN, Affine, GlobalCI, JointAffine, draw_rows, draw_tap_rows, init_heads
from param_decomp_jax.ci.inputs import KeptInputs, LayerRange, SummableInputs
from param_decomp_jax.ci.outputs import StackFeatures
from param_decomp_jax.ci.taps import TAPS, Reads, ResidualInputs, Taps
from param_decomp_jax.ci.transformer import EPS, Block, GlobalTransformer, init_blocks, through_blocks
from param_decomp_jax.decomposition.draws import draw_per_site
from param_decomp_jax.decomposition.sites import Segment, Sites, Stack
from param_decomp_jax.nn.numerics import rms_norm
from param_decomp_jax.sharding.memory import MemoryPolicy
from param_decomp_jax.sharding.mesh import Axes, constrain, gather_tree, replace_fields
from param_decomp_jax.sharding.remat import over_layers


@dataclass(frozen=True)
class InputPatterns:
    """The sites whose name matches one of ``patterns`` (fnmatch), with or without one of ``prefixes`` before the
    pattern."""

    patterns: tuple[str, ...]
    prefixes: tuple[str, ...] = ()

    def has(self, site: str) -> bool:
        return any(fnmatchcase(prefix + site, p) for p in self.patterns for prefix in ("", *self.prefixes))


class UnfitGroups(ValueError):
    """Input patterns that do not fit the groups of sites. The message names the pattern or the site."""


@dataclass(frozen=True)
class ChunkwiseTransformer:
    """The settings of C6. ``transformer``: the transformer of every group. ``layers_per_chunk``: how many layers with
    sites form a group. ``inputs``: the sites whose inputs are read; None: all. ``taps``: what is read in place of
    inputs (C10)."""

    transformer: GlobalTransformer
    layers_per_chunk: int = 1
    inputs: InputPatterns | None = None
    taps: Taps | None = None


@dataclass(frozen=True)
class AlikeGroups:
    """Consecutive groups whose layers have the same kinds of sites, so that one scan computes them.

    ``first``: the number of the first group. ``n``: how many groups. ``layers``: the layers of all of them, by segment.
    There are several segments only if ``n`` is 1.
    """

    first: int
    n: int
    layers: tuple[LayerRange, ...]

    @property
    def groups(self) -> slice:
        return slice(self.first, self.first + self.n)

    def layers_per_group(self, first: int, stop: int) -> int:
        return (stop - first) // self.n

    def layers_of_groups(self) -> list[list[int]]:
        """Returns the layers with sites of each group."""
        layers = [layer for _, first, stop in self.layers for layer in range(first, stop)]
        size = len(layers) // self.n
        return [layers[n : n + size] for n in range(0, len(layers), size)]

    def boundaries(self, taps: Taps) -> list[tuple[int, ...]]:
        """Returns the residual streams that each group reads, the same number for each."""
        return [taps.boundaries(layers) for layers in self.layers_of_groups()]


def runs_of_groups(sites: Sites, layers_per_chunk: int) -> tuple[AlikeGroups, ...]:
    """Returns the groups of C6 in order, in runs that one scan computes."""
    layers = [(segment, layer) for segment in sites.segments for layer in range(segment.first, segment.stop)]
    chunks = [layers[n : n + layers_per_chunk] for n in range(0, len(layers), layers_per_chunk)]

    def segment_of(layer: tuple[Segment, int]) -> int:
        return layer[0].first

    runs: list[AlikeGroups] = []
    for _, alike in groupby(chunks, key=lambda chunk: [segment_of(layer) for layer in chunk]):
        own = list(alike)
        parts = []
        for _, of_segment in groupby([layer for chunk in own for layer in chunk], key=segment_of):
            (segment, first), *rest = of_segment
            parts.append((segment, first, first + 1 + len(rest)))
        runs.append(AlikeGroups(sum(run.n for run in runs), len(own), tuple(parts)))
    return tuple(runs)


def stacks_read(config: ChunkwiseTransformer, sites: Sites) -> frozenset[str]:
    """Returns the stacks whose sites' inputs are read.

    Raises UnfitGroups for a pattern without a site, for a stack of which only some sites are read, and for a group that
    reads nothing.
    """
    assert config.taps is None, "taps are read in place of inputs"
    if config.inputs is None:
        return frozenset(stack.name for stack in sites.stacks)
    for pattern in config.inputs.patterns:
        alone = InputPatterns((pattern,), config.inputs.prefixes)
        if not any(alone.has(site.name) for site in sites.all):
            raise UnfitGroups(f"'{pattern}' matches no site")
    read = set[str]()
    for stack in sites.stacks:
        names = [sites.all[n].name for n in stack.sites]
        matched = [name for name in names if config.inputs.has(name)]
        if matched and len(matched) < len(names):
            other = next(name for name in names if name not in matched)
            raise UnfitGroups(
                f"match {matched[0]} and not {other}; of alike sites in neighbouring layers, read all or none"
            )
        if matched:
            read.add(stack.name)
    for run in runs_of_groups(sites, config.layers_per_chunk):
        own = [stack for segment, _, _ in run.layers for stack in segment.stacks]
        if not any(stack.name in read for stack in own):
            unread = ", ".join(stack.name for stack in own)
            raise UnfitGroups(f"match none of {unread}; of every group of sites at least one is read")
    return frozenset(read)


class ChunkwiseCI(GlobalCI):
    """The CI function of C6. ``project``: as in one transformer for all sites, but with a bias for each group.
    ``blocks``: the blocks of all groups, with two leading axes, groups and blocks."""

    project: JointAffine
    blocks: Block
    heads: dict[str, Affine]
    runs: tuple[AlikeGroups, ...] = eqx.field(static=True)
    config: ChunkwiseTransformer = eqx.field(static=True)

    @property
    def boundaries(self) -> tuple[int, ...]:
        """`CIFunction.boundaries`."""
        return tuple(boundary for run in self.runs for boundary in self._boundaries(run))

    def _boundaries(self, run: AlikeGroups) -> list[int]:
        """Returns the boundaries of all groups of a run, in the order of the groups."""
        return [] if self.config.taps is None else [own for group in run.boundaries(self.config.taps) for own in group]

    def features(
        self, inputs: Reads, leading: tuple[int, ...], compute_dtype: Any, memory: MemoryPolicy
    ) -> StackFeatures:
        """Returns the last hidden state of every group's transformer, from what is read. ``leading``: as for the global
        transformer.

        The stacks of a segment share an array.
        """
        found: dict[str, list[Array]] = {}
        for run in self.runs:
            of_groups = self._run_features(run, inputs, leading, compute_dtype, memory)
            for segment, first, stop in run.layers:
                n = run.layers_per_group(first, stop)
                of_layers = of_groups if n == 1 else jnp.repeat(of_groups, n, axis=0)
                found.setdefault(segment.stacks[0].name, []).append(of_layers)
        shared = {name: own[0] if len(own) == 1 else jnp.concatenate(own) for name, own in found.items()}
        segments = dict.fromkeys(segment for run in self.runs for segment, _, _ in run.layers)
        return StackFeatures(
            shared, tuple((stack.name, segment.stacks[0].name) for segment in segments for stack in segment.stacks)
        )

    def _read(self, run: AlikeGroups, inputs: Reads) -> tuple[Any, Callable[[Any], SummableInputs], dict[str, Any]]:
        """Returns what the groups of a run read: arrays whose first axis is cut into groups, a function from one
        group's arrays to inputs, and the rows that multiply these."""
        if self.config.taps is not None:
            assert isinstance(inputs, ResidualInputs), "taps are residual streams"
            boundaries = self._boundaries(run)
            first = sum(len(self._boundaries(other)) for other in self.runs if other.first < run.first)
            own = slice(first, first + len(boundaries))
            rows = jax.tree.map(lambda x: x[own], self.project.rows)
            return {TAPS: inputs.at(boundaries)}, KeptInputs, rows
        assert not isinstance(inputs, ResidualInputs), "without taps, inputs of sites are read"
        arrays, of_arrays = inputs.of_layers(run.layers)
        rows = {}
        for segment, first, stop in run.layers:
            for stack in segment.stacks:
                if stack.name in self.project.rows:
                    own = slice(first - stack.first, stop - stack.first)
                    rows[stack.name] = jax.tree.map(lambda x, own=own: x[own], self.project.rows[stack.name])
        return arrays, of_arrays, rows

    def _run_features(
        self, run: AlikeGroups, inputs: Reads, leading: tuple[int, ...], compute_dtype: Any, memory: MemoryPolicy
    ) -> Float[Array, "groups *n d"]:
        arrays, of_arrays, rows = self._read(run, inputs)
        by_layer = jax.tree.map(lambda x: x.reshape(run.n, x.shape[0] // run.n, *x.shape[1:]), (arrays, rows))
        by_group = jax.tree.map(lambda x: x[run.groups], (self.project.b, self.blocks))
        block_axes = jax.tree.map(Axes.under, self.blocks.axes())
        # A group's blocks are unrolled if their transfers are to be combined, because transfers of different iterations
        # of a loop cannot be.
        inside = memory if memory.collective_mib is None else replace(memory, layers="unroll")

        def group(_: None, own: Any) -> tuple[None, Array]:
            (arrays, rows), (b, blocks) = own
            # Gathered for a whole group at once: few and large gathers.
            blocks = gather_tree(blocks, block_axes, compute_dtype)
            into = replace_fields(self.project, rows=rows, b=b)
            h = into(of_arrays(arrays), leading, lambda x: rms_norm(x.astype(compute_dtype), EPS), memory)
            h = through_blocks(self.config.transformer, blocks, h.astype(compute_dtype), inside)
            return None, constrain(h, "batch")

        found: Array = over_layers(memory, group, None, (by_layer, by_group), "ci")[1]
        return found

    def axes(self) -> Any:
        """Returns the axes: every matrix is split by output, the heads by component."""
        return replace_fields(
            self,
            project=self.project.axes(),
            blocks=jax.tree.map(lambda a: a.under().under(), self.blocks.axes()),
            heads=self.heads_axes(),
        )


def init_chunkwise(config: ChunkwiseTransformer, key: PRNGKeyArray, sites: Sites) -> ChunkwiseCI:
    """Draws fresh weights (C6, C10). Raises UnfitGroups, UnfitTaps."""
    to_input, to_blocks, to_heads = jax.random.split(key, 3)
    d, runs = config.transformer.d_model, runs_of_groups(sites, config.layers_per_chunk)
    n_groups = sum(run.n for run in runs)

    def rows() -> dict[str, Array]:
        if config.taps is not None:
            n_taps = [len(group) for run in runs for group in run.boundaries(config.taps)]
            return {TAPS: draw_tap_rows(to_input, n_taps, config.taps.known_width, d)}
        read = stacks_read(config, sites)
        widths = widths_of_layers(runs, read)
        return {stack.name: stack_rows(stack, widths) for stack in sites.stacks if stack.name in read}

    def stack_rows(stack: Stack, widths: Mapping[int, int]) -> Array:
        drawn = draw_rows(to_input, stack, d)
        scale = HIDDEN_GAIN / np.sqrt([widths[layer] for layer in stack.layers])
        return jnp.asarray(scale, jnp.float32).reshape(-1, *(1,) * (drawn.ndim - 1)) * drawn

    return ChunkwiseCI(
        project=JointAffine(rows(), jnp.zeros((n_groups, d), jnp.float32)),
        blocks=draw_per_site(
            lambda k: init_blocks(config.transformer, *jax.random.split(k)), to_blocks, tuple(range(n_groups))
        ),
        heads=init_heads(to_heads, sites, d),
        runs=runs,
        config=config,
    )


def widths_of_layers(runs: Sequence[AlikeGroups], read: frozenset[str]) -> dict[int, int]:
    """Returns, for every layer with sites, the width of its group's concatenation. ``read``: the stacks that are in
    it."""
    found: dict[int, int] = {}
    for run in runs:
        width = sum(
            run.layers_per_group(first, stop) * stack.read_width * (stack.experts or 1)
            for segment, first, stop in run.layers
            for stack in segment.stacks
            if stack.name in read
        )
        found |= {layer: width for _, first, stop in run.layers for layer in range(first, stop)}
    return found
