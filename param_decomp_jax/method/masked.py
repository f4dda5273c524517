"""Masked forwards of one batch, run together: where sections 2, 3 and 4 meet, inside one layer.

All masked forwards of a step pass through each layer at the same time, as *streams*: the layer sees their rows side by
side. So a site's causal importance is computed once for all of them, and their gradients with respect to it are added
*before* they pass the squashing function, whose leak (C1) is not linear. That holds under every memory policy.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped, UInt32

from param_decomp_jax.ci import ImportanceReader, Summarise
from param_decomp_jax.decomposition.components import (
    Components,
    component_gate,
    look_up,
    past_components,
    site_axes,
    through_components,
)
from param_decomp_jax.decomposition.sites import PRE_IDENTITY, Sites, Stack
from param_decomp_jax.method.masks import SourceKind, interpolate
from param_decomp_jax.nn.grouped import ExpertGroups, OverPositions, at_chosen, group, grouped_matmul
from param_decomp_jax.nn.numerics import matmul, wide
from param_decomp_jax.sharding.memory import Intermediate, MemoryPolicy
from param_decomp_jax.sharding.mesh import (
    Axes,
    cast_tree,
    constrain,
    gather,
    gather_tree,
    indices,
    is_axes,
    join_blocks,
    rows_at_rest,
    split_tree,
    with_block,
    with_row,
)
from param_decomp_jax.sharding.remat import component_blocks, named, over_blocks, token_blocks
from param_decomp_jax.targets.plain_linears import CHOSEN, frozen_axes, output_record, top_experts
from param_decomp_jax.targets.points import RESID_PRE, Point


@dataclass(frozen=True)
class Stream:
    """One masked forward: the sites that are live in it (canonical numbers), their sources, their routes.

    ``routes``: ``[…, live sites]``, or None (everywhere). ``points``: where the stream is compared with the clean pass
    besides its output (R6).
    """

    live: tuple[int, ...]
    sources: SourceKind
    routes: Bool[Array, "*n live"] | None = None
    points: tuple[Point, ...] = ()


class LiveSite(NamedTuple):
    """The arrays of a site that is live in some streams, in one layer or stacked over layers.

    ``column``: global numbers of its components. ``ci`` is a slice of the pass's `ImportanceReader`. ``sources`` and
    ``routes`` are by stream: slices of the streams' own.
    """

    V: Any
    U: Any
    ci: Any
    column: Any
    sources: dict[int, Any]
    routes: dict[int, Any]


class Positions(NamedTuple):
    """A live site and its inputs at some of the positions. ``xs``: ``[B, …, d_in]`` for each stream. ``at``: global
    numbers of the positions. ``features``: those of the `ImportanceReader` in this layer. ``chosen``: the positions'
    experts, for experts' sites."""

    site: LiveSite
    xs: list[Any]
    at: Any
    features: Any
    chosen: Any


def side_by_side(streams: Sequence[Shaped[Array, "B *n"]]) -> Shaped[Array, "rows *n"]:
    """Puts row b of stream i at ``b · streams + i``, so that rows stay on the device that has the batch row."""
    if len(streams) == 1:
        return streams[0]
    stacked = jnp.stack(streams, axis=1)
    return stacked.reshape(-1, *stacked.shape[2:])


def split_rows(rows: Shaped[Array, "rows ..."], n_streams: int) -> list[Shaped[Array, "B ..."]]:
    """Inverts `side_by_side`."""
    if n_streams == 1:
        return [rows]
    stacked = rows.reshape(-1, n_streams, *rows.shape[1:])
    return [stacked[:, i] for i in range(n_streams)]


@dataclass
class MaskedLayer:
    """One layer of all streams that have started. Live kinds get the masked product, the others ``xW`` (F3)."""

    live: dict[str, LiveSite]
    forward: "MaskedLinears"
    stacks: dict[str, Stack]
    n_streams: int
    records_outputs: frozenset[str]
    chosen: Int[Array, "B *n k"] | None = None
    """The experts that the clean pass has chosen, in a layer with sites among its experts."""
    shares_rows: bool = False
    """Whether one row is read by all streams, up to the first masked matrix."""
    features: dict[str, Array] = field(default_factory=dict)
    """Features of the layer, if sites differ in what they read (`ImportanceReader.layer_features`)."""
    clean_points: dict[str, Float[Array, "B *n d"]] = field(default_factory=dict)
    """The clean activations at the hooks where streams are compared with the clean pass."""
    compared: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """The numbers of the streams that are compared, by hook."""
    records: dict[str, Array] = field(default_factory=dict)

    @property
    def frozen(self) -> Axes:
        return self.forward.frozen

    def enter(self, x: Shaped[Array, "rows *n"]) -> None:
        self.hook(RESID_PRE, x)

    def hook(self, name: str, x: Shaped[Array, "rows *n"]) -> Shaped[Array, "rows *n"]:
        """Records the squared difference of each stream from the clean pass, ``[streams, B, …]``."""
        if name in self.compared:
            clean = self.clean_points[name]
            # Rows that all streams share equal those of the clean pass.
            xs = [x] * self.n_streams if x.shape[0] == clean.shape[0] else split_rows(x, self.n_streams)
            found = jnp.stack([_squared_difference(xs[i], clean) for i in self.compared[name]])
            self.records[name] = constrain(found, None, "batch")
        return x

    def look_up(
        self, kind: str, rows: Int[Array, "rows *n"], table: Float[Array, "n d"], dtype: Any
    ) -> Float[Array, "rows *n d"]:
        table = constrain(table, *self.frozen.names)
        y = self._masked(kind, rows, table) if kind in self.live else look_up(table, rows, self.frozen)
        y = constrain(y.astype(dtype), "batch")
        if kind in self.records_outputs:
            self.records[output_record(kind)] = y
        return y

    def __call__(
        self, kind: str, x: Float[Array, "given *n d_in"], W: Float[Array, "d_in d_out"]
    ) -> Float[Array, "rows *n d_out"]:
        return self._apply(kind, self._apply(kind + PRE_IDENTITY, x, None), W)

    def alike(self, *arrays: Float[Array, "..."]) -> tuple[Float[Array, "rows ..."], ...]:
        """Repeats rows that all streams share, once per stream, if another of the arrays has the streams' own rows."""
        most = max(x.shape[0] for x in arrays)

        def as_many(x: Array) -> Array:
            return x if x.shape[0] == most else constrain(side_by_side([x] * self.n_streams), "batch")

        return tuple(map(as_many, arrays))

    def choose(self, logits: Float[Array, "rows *n experts"], k: int) -> Int[Array, "rows *n k"]:
        """Chooses experts: those of the clean pass, if experts are sites (X3)."""
        return top_experts(logits, k) if self.chosen is None else side_by_side([self.chosen] * self.n_streams)

    def grouped(
        self, kind: str, x: Float[Array, "rows *n s d_in"], W: Float[Array, "experts d_in d_out"], groups: ExpertGroups
    ) -> Float[Array, "rows *n k d_out"]:
        W = gather(W, self.frozen.under(), x.dtype)
        y = constrain(self._masked(kind, x, W) if kind in self.live else grouped_matmul(x, W, groups), "batch")
        if kind in self.records_outputs:
            self.records[output_record(kind)] = y
        return y

    def _apply(self, kind: str, x: Float[Array, "given *n d_in"], W: Array | None) -> Float[Array, "rows *n d_out"]:
        """Returns the product with one matrix; W None stands for the identity."""
        W = None if W is None else gather(W, self.frozen, x.dtype)
        y = constrain(self._masked(kind, x, W) if kind in self.live else _product(x, W), "batch")
        if kind in self.records_outputs:
            self.records[output_record(kind)] = y
        return y

    def _masked(self, kind: str, rows: Shaped[Array, "given *n"], W: Array | None) -> Float[Array, "rows *slots d_out"]:
        """Computes a site that is live in some streams, in blocks of positions if the policy says so."""
        forward, site, stack = self.forward, self.live[kind], self.stacks[kind]
        axes = forward.site_axes(stack, tuple(site.sources))
        n_blocks = forward.token_blocks
        chosen = None if stack.experts is None else self.chosen
        features = forward.reader.at_layer(stack, self.features).features
        shared = self.shares_rows and rows.shape[0] == forward.at.shape[0]
        xs = [rows] * self.n_streams if shared else split_rows(rows, self.n_streams)
        everywhere = Positions(site, xs, forward.at, features, chosen)

        def apply_block(block: Positions) -> tuple[Any, list[Array]]:
            return self._at_positions(stack, with_block(everywhere, block), axes, W, shared)

        blocks = split_tree(everywhere, forward.positions_axes(everywhere, axes), n_blocks, "seq")
        with jax.named_scope(kind):
            summary, ys = over_blocks(apply_block, blocks, n_blocks)
        if forward.summarise is not None:
            self.records[summary_record(kind)] = summary
        outputs = [join_blocks(y, 1, "seq") if n_blocks > 1 else y[0] for y in ys]
        return side_by_side([named(y, forward.output_name) if i in site.sources else y for i, y in enumerate(outputs)])

    def _at_positions(
        self, stack: Stack, here: "Positions", axes: LiveSite, W: Array | None, shared: bool
    ) -> tuple[Any, list[Array]]:
        """Computes F2 with the mask of M1, in blocks of the site's components, over which the product is a sum.

        ``shared``: whether all streams read the same rows. Returns the summary of the site's logits (None without
        `MaskedLinears.summarise`) and every stream's output.
        """
        forward, site, streams = self.forward, here.site, self.forward.streams
        dtype = forward.reader.compute_dtype if stack.lookup else here.xs[0].dtype
        reader = forward.reader.at(here.features)
        groups = None if stack.experts is None else group(here.chosen, stack.experts)
        deltas = {i: streams[i].sources.delta(source, here.at, groups) for i, source in site.sources.items()}
        routes = {i: _at_slots(route, groups) for i, route in site.routes.items()}
        n_blocks = component_blocks(forward.memory, stack.C)
        # Wide if blocks add up their gradients.
        inputs = {i: wide(here.xs[i]) if n_blocks > 1 and not stack.lookup else here.xs[i] for i in site.sources}

        def apply_components(block: LiveSite) -> tuple[dict[int, Float[Array, "B *n d_out"]], Any]:
            part: LiveSite = gather_tree(with_block(site, block), axes, dtype)
            logits = reader.logits(part.ci, part.V, groups)
            importance = reader.squash(logits)

            def gate(i: int) -> Float[Array, "B *n C"]:
                source = streams[i].sources.components(part.sources[i], here.at, part.column, groups)
                return component_gate(interpolate(importance, source), deltas[i], routes[i])

            def added(of: Sequence[int], gates: Sequence[Array]) -> Float[Array, "rows *n C"] | None:
                found = [streams[i].sources.added(part.sources[i], here.at, groups) for i in of]
                if all(own is None for own in found):
                    return None

                def routed(i: int, own: Array | None, gate: Array) -> Array:
                    if own is None:
                        return jnp.zeros_like(gate)
                    route = routes[i]
                    return jnp.broadcast_to(own if route is None else route[..., None] * own, gate.shape)

                return side_by_side([routed(*each) for each in zip(of, found, gates, strict=True)])

            def outputs(of: Sequence[int]) -> list[Float[Array, "B *n d_out"]]:
                xs = [inputs[i] if stack.lookup else inputs[i].astype(dtype) for i in (of[:1] if shared else of)]
                each = [gate(i) for i in of]
                gates = side_by_side(each)
                through = through_components(side_by_side(xs), part.V, part.U, gates, groups, added(of, each))
                y = constrain(through, "batch")
                return split_rows(y, len(of))

            over = OverPositions(groups, stack.experts or 0)
            summary = None if forward.summarise is None else forward.summarise(logits, over)
            # One product for all streams, so that V and U are read once and their gradients are summed over devices
            # once. Rows of experts are in their stream's own order.
            together = [tuple(part.sources)] if groups is None else [(i,) for i in part.sources]
            return {i: y for of in together for i, y in zip(of, outputs(of), strict=True)}, summary

        ys, summaries = over_blocks(apply_components, split_tree(site, axes, n_blocks, "component"), n_blocks)

        def output(i: int, x: Shaped[Array, "B *n"]) -> Float[Array, "B *slots d_out"]:
            if i not in ys:
                if stack.lookup:
                    assert W is not None
                    return look_up(W, x, forward.frozen).astype(dtype)
                return _product(x, W, groups)
            past = past_components(x, W, deltas[i], routes[i], groups)
            return (ys[i] if past is None else ys[i] + past).astype(dtype)

        summary = None if summaries is None else join_blocks(summaries, 0 if groups is None else 1, "component")
        return summary, [output(i, x) for i, x in enumerate(here.xs)]


@jax.checkpoint
def _squared_difference(x: Float[Array, "*n d"], clean: Float[Array, "*n d"]) -> Float[Array, "*n"]:
    """Returns ``‖x − clean‖²`` at every position, in fp32. Only the two arguments are kept for the backward pass."""
    return jnp.sum((wide(x) - wide(clean)) ** 2, axis=-1)


def may_share_rows(dtype: Any) -> bool:
    """Returns whether products of fewer rows may replace others. In float32 they may not: the last bits of a row can
    depend on the number of rows, and a run must keep its bits."""
    return dtype == jnp.bfloat16


def _product(x: Array, W: Array | None, groups: ExpertGroups | None = None) -> Float[Array, "rows *n d_out"]:
    if W is None:
        return x
    return matmul(x, W) if groups is None else grouped_matmul(x, W, groups)


def summary_record(kind: str) -> str:
    """Returns the name of the record of a summary of a site's logits."""
    return f"{kind}.summary"


@dataclass(frozen=True)
class MaskedLinears:
    """A pass of ``streams``, sorted by their first live layer: each starts there, from the clean pass (F6).

    ``at``: global numbers of the positions. ``clean_records``: the records of the clean pass. ``residuals``: the clean
    residual at each stream's first live layer (tokens, if that is the embedding). ``summarise``: a function of the
    logits whose results are recorded; logits that are computed in blocks are computed once for the masks and for this.
    ``output_name``: the memory policy's name for the outputs of live sites. ``joins_rows``: as in `Target`.
    ``at_hook``: the clean activations at a hook in some layers, if streams have points.
    """

    sites: Sites
    streams: tuple[Stream, ...]
    residuals: tuple[Shaped[Array, "B ..."], ...]
    components: Components
    reader: ImportanceReader
    at: UInt32[Array, "*leading"]
    clean_records: Mapping[int, dict[str, Array]]
    memory: MemoryPolicy
    record_outputs: bool = False
    summarise: Summarise | None = None
    output_name: Intermediate = "site_outputs"
    joins_rows: bool = False
    at_hook: Callable[[str, range], Array] | None = None

    @cached_property
    def frozen(self) -> Axes:
        """The logical axes of one layer's frozen matrix."""
        return frozen_axes(self.memory)

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """The first live layer of each stream."""
        return tuple(self.sites.all[stream.live[0]].layer for stream in self.streams)

    def start(self) -> tuple[int, Array]:
        """The layer and the rows that the pass starts with."""
        first = min(self.starts)
        starting = self._starting(first)
        return first, side_by_side(starting[:1] if self._shares_rows(first) else starting)

    def _shares_rows(self, layer: int) -> bool:
        """Returns whether the streams share their rows in this layer, one for each row of the batch. They can only in
        the first live layer, and not in a scan, where the number of rows cannot change."""
        shares = self.joins_rows and may_share_rows(self.residuals[0].dtype)
        if not shares or self.record_outputs or layer != min(self.starts):
            return False
        own = [stack for stack in self.sites.stacks if layer in stack.layers]
        written_out = self.memory.layers == "unroll" or layer + 1 in self.scan_boundaries()
        return written_out and not any(stack.lookup or stack.experts is not None for stack in own)

    def join(self, layer: int, x: Shaped[Array, "rows *n"]) -> Shaped[Array, "more *n"]:
        """Returns ``x`` with the rows of the streams that start at this layer."""
        starting, running = self._starting(layer), self.n_running(layer - 1)
        if not starting or running == 0:
            return x
        return constrain(side_by_side([*split_rows(x, running), *starting]), "batch")

    def _starting(self, layer: int) -> list[Array]:
        return [x for x, start in zip(self.residuals, self.starts, strict=True) if start == layer]

    def n_running(self, layer: int) -> int:
        """Returns the number of streams that run through this layer."""
        return sum(start <= layer for start in self.starts)

    def _live(self, layer: int) -> dict[Stack, tuple[int, ...]]:
        """Returns the numbers of the streams in which each stack of this layer is live, without the stacks that are
        live in none."""
        found = {}
        for stack in self.sites.stacks:
            if layer in stack.layers:
                sites = set(stack.of_layer(layer))
                streams = tuple(i for i, stream in enumerate(self.streams) if sites & set(stream.live))
                if streams:
                    found[stack] = streams
        return found

    def compared(self, layer: int) -> dict[str, tuple[int, ...]]:
        """Returns the numbers of the streams that are compared at each hook in this layer."""
        found: dict[str, tuple[int, ...]] = {}
        for i, (stream, start) in enumerate(zip(self.streams, self.starts, strict=True)):
            for point in stream.points if start <= layer else ():
                if point.layer == layer:
                    found[point.hook] = (*found.get(point.hook, ()), i)
        return found

    def scan_boundaries(self) -> frozenset[int]:
        """The layers at which a stream starts, other sites are live, or streams are compared at other points. If
        outputs are recorded, the boundaries of segments are included."""
        edges = {segment.first for segment in self.sites.segments} | {s.stop for s in self.sites.segments}
        points = {point.layer for stream in self.streams for point in stream.points}
        layers = range(min(edges | points), max(edges | {layer + 1 for layer in points}) + 1)
        return frozenset(
            layer
            for layer in layers
            if layer in self.starts
            or (self.record_outputs and layer in edges)
            or self._live(layer) != self._live(layer - 1)
            or self.compared(layer) != self.compared(layer - 1)
        )

    def slices(self, first: int, stop: int) -> Any:
        def stack_slice(stack: Stack, streams: tuple[int, ...]) -> LiveSite:
            rows = slice(first - stack.first, stop - stack.first)
            found = LiveSite(
                V=rows_at_rest(self.components[stack.name].V, rows),
                U=rows_at_rest(self.components[stack.name].U, rows),
                ci=rows_at_rest(self.reader.of_stack(stack), rows),
                column=jnp.broadcast_to(indices(stack.C), (stop - first, stack.C)),
                sources={i: self.streams[i].sources.slices(stack, first, stop) for i in streams},
                routes={i: self._routes(self.streams[i], stack, range(first, stop)) for i in streams},
            )
            axes = jax.tree.map(Axes.under, self.site_axes(stack, streams), is_leaf=is_axes)
            # Wide if blocks of tokens add up its gradients.
            return found if self.token_blocks > 1 else cast_tree(found, axes, self.reader.compute_dtype)

        of_experts = any(stack.experts is not None and first in stack.layers for stack in self.sites.stacks)
        chosen = self.chosen_experts(first, stop) if of_experts else None
        found = self._live(first)
        live = {stack.kind: stack_slice(stack, streams) for stack, streams in found.items()}
        # Each layer takes its row of the held copies.
        any_held = self.memory.held_by("components") or self.memory.held_by("heads")
        layers = jnp.arange(first, stop) if any_held else None
        points = {hook: self.clean_point(hook, first, stop) for hook in self.compared(first)}
        return live, chosen, self.reader.layer_features(found, first, stop), layers, points

    def clean_point(self, hook: str, first: int, stop: int) -> Float[Array, "layers B *n d"]:
        """Returns the clean pass's activations at a hook in some layers."""
        assert self.at_hook is not None
        return self.at_hook(hook, range(first, stop))

    def chosen_experts(self, first: int, stop: int) -> Int[Array, "layers B *n k"]:
        """Returns the experts that the positions of the clean pass take in some layers (X3)."""
        start = max(layer for layer in self.clean_records if layer <= first)
        return self.clean_records[start][CHOSEN][first - start : stop - start]

    def site_axes(self, stack: Stack, streams: Sequence[int]) -> LiveSite:
        """Returns the logical axes of one layer's `LiveSite`."""
        V, U = site_axes(stack)
        return LiveSite(
            V=V,
            U=U,
            ci=self.reader.axes(stack),
            column=Axes(("component_in_use",)),
            sources={i: self.streams[i].sources.axes(stack) for i in streams},
            routes={i: self._route_axes(stack) if self._is_routed(self.streams[i], stack) else None for i in streams},
        )

    def positions_axes(self, positions: Positions, site: LiveSite) -> Positions:
        """Returns the logical axes of ``positions``. ``site``: the axes of its site."""
        chosen = None if positions.chosen is None else self._rows
        features = jax.tree.map(lambda _: self._rows, positions.features)
        return Positions(site, [self._rows] * len(positions.xs), self._rows, features, chosen)

    def _route_axes(self, stack: Stack) -> Axes:
        return self._rows if stack.experts is None else self._rows.under()

    @staticmethod
    def _is_routed(stream: Stream, stack: Stack) -> bool:
        """Returns whether the sites of a stack need routes: experts that are not live, next to live ones, get r = 0
        (F3)."""
        return stream.routes is not None or (stack.experts is not None and not set(stack.sites) <= set(stream.live))

    def _routes(self, stream: Stream, stack: Stack, layers: Sequence[int]) -> Float[Array, "..."] | None:
        """Returns the routes of a stack's sites in some layers: ``[layers, *n]``, or ``[layers, experts, *n]`` for
        experts."""
        if not self._is_routed(stream, stack):
            return None
        place = {site: n for n, site in enumerate(stream.live)}

        def of_site(site: int) -> Array:
            if site not in place:
                return jnp.zeros(self.at.shape, jnp.float32)
            if stream.routes is None:
                return jnp.ones(self.at.shape, jnp.float32)
            return stream.routes[..., place[site]].astype(jnp.float32)

        of_layers = [[of_site(site) for site in stack.of_layer(layer)] for layer in layers]
        return jnp.stack([own[0] if stack.experts is None else jnp.stack(own) for own in of_layers])

    @property
    def _rows(self) -> Axes:
        return Axes(("batch", "seq")[: self.at.ndim])

    @property
    def token_blocks(self) -> int:
        """Returns the number of blocks of positions in which a site is computed."""
        return token_blocks(self.at.shape, self.memory.token_block)

    def layer(self, first: int, stop: int, slice_: Any) -> MaskedLayer:
        here = {stack.kind: stack for stack in self.sites.stacks if first in stack.layers}
        recorded = frozenset(here) if self.record_outputs else frozenset[str]()
        live, chosen, features, layer, points = slice_
        if layer is not None:
            for kind, site in live.items():
                factors, row = self.components[here[kind].name], layer - here[kind].first
                own = (site.V, site.U, site.ci)
                V, U, ci = with_row(own, (factors.V, factors.U, self.reader.of_stack(here[kind])), row)
                live[kind] = site._replace(V=V, U=U, ci=ci)
        return MaskedLayer(
            live, self, here, self.n_running(first), recorded, chosen, self._shares_rows(first), features, points,
            self.compared(first),
        )  # fmt: skip


def _at_slots(route: Float[Array, "*experts_n"] | None, groups: ExpertGroups | None) -> Float[Array, "*n"] | None:
    return route if route is None or groups is None else at_chosen(route, groups)
