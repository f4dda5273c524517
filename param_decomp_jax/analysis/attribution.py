"""Attributions (section 13): the components, and their positions, that directly produce an activation or an output.

The network is cut at every site: a site's output is held constant, and what later sites read is a function of it. One
backward pass of this cut network gives the incoming edges of one target. The passes of many targets run side by side
under `jax.vmap`, which computes the forward pass once for all of them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Shaped

from param_decomp_jax.decomposition.components import Components, look_up, row_or_product, with_views
from param_decomp_jax.decomposition.sites import PRE_IDENTITY, Sites, Stack
from param_decomp_jax.method.step import Problem
from param_decomp_jax.nn.grouped import ExpertGroups, group, grouped_matmul
from param_decomp_jax.nn.numerics import matmul
from param_decomp_jax.sharding.memory import PLAIN
from param_decomp_jax.sharding.mesh import Axes, constrain, gather
from param_decomp_jax.targets.base import UniformLayers, Weights, WholeForward, run_layers
from param_decomp_jax.targets.plain_linears import (
    CHOSEN,
    RESIDUAL,
    UNTOUCHED,
    PlainLinears,
    frozen_axes,
    output_record,
    top_experts,
)

READINGS = "readings"
"""The name of the record of what a layer's sites read along a direction."""


class ReadDirections(NamedTuple):
    """What sites read along a direction, as the target of a backward pass. Keyed by stack, within a layer by kind.

    ``weight``: a factor for each row that is read (a position, or a slot of experts). It is 1 at one row of one layer,
    or at all rows of a layer, and 0 elsewhere. It has a leading layer axis until a scan slices it.
    """

    direction: dict[str, Float[Array, "_d_in"]]
    weight: dict[str, Float[Array, "*layers _rows"]]


@dataclass
class CutLayer:
    """One layer of the cut network, whose sites return ``outputs`` (E1) whatever they read."""

    outputs: dict[str, Array]
    reading: ReadDirections | None
    frozen: Axes
    chosen: Int[Array, "B *n k"] | None
    records: dict[str, Array] = field(default_factory=dict)

    def enter(self, x: Shaped[Array, "B *n"]) -> None:
        pass

    def choose(self, logits: Float[Array, "B *n experts"], k: int) -> Int[Array, "B *n k"]:
        return top_experts(logits, k) if self.chosen is None else self.chosen

    def look_up(
        self, kind: str, rows: Int[Array, "B *n"], table: Float[Array, "n d"], dtype: Any
    ) -> Float[Array, "B *n d"]:
        return (
            self.outputs[kind].astype(dtype)
            if kind in self.outputs
            else look_up(table, rows, self.frozen).astype(dtype)
        )

    def __call__(
        self, kind: str, x: Float[Array, "B *n d_in"], W: Float[Array, "d_in d_out"]
    ) -> Float[Array, "B *n d_out"]:
        x = self._cut(kind + PRE_IDENTITY, x, lambda: x)
        return self._cut(kind, x, lambda: constrain(matmul(x, gather(W, self.frozen, x.dtype)), "batch"))

    def grouped(
        self, kind: str, x: Float[Array, "B *n s d_in"], W: Float[Array, "experts d_in d_out"], groups: ExpertGroups
    ) -> Float[Array, "B *n k d_out"]:
        return self._cut(kind, x, lambda: grouped_matmul(x, gather(W, self.frozen.under(), x.dtype), groups))

    def _cut(self, kind: str, x: Float[Array, "..."], apply: Callable[[], Array]) -> Float[Array, "..."]:
        if kind not in self.outputs:
            return apply()
        y = self.outputs[kind]
        if self.reading is not None:
            weight = self.reading.weight[kind]
            of_rows = x.reshape(-1, x.shape[-1]) @ self.reading.direction[kind]
            # Slots of one position may share its row.
            read = jnp.repeat(of_rows, weight.shape[0] // of_rows.shape[0]) @ weight
            self.records[READINGS] = self.records[READINGS] + read if READINGS in self.records else read
        return y


@dataclass(frozen=True)
class CutLinears(WholeForward):
    """The cut network (E1). ``outputs``: the sites' outputs, by stack. ``chosen``: the experts taken, by stack of
    experts.

    With a ``reading``, every layer records what its sites read along the direction.
    """

    outputs: Mapping[str, Float[Array, "_layers *_n _d_out"]]
    chosen: Mapping[str, Int[Array, "_layers *_n _k"]]
    reading: ReadDirections | None = None

    def slices(self, first: int, stop: int) -> Any:
        stacks = self.stacks_at(first)
        chosen = [self.chosen[stack.name] for stack in stacks if stack.experts is not None]
        weight = {} if self.reading is None else {s.kind: self.reading.weight[s.name] for s in stacks}
        return {stack.kind: self.outputs[stack.name] for stack in stacks}, chosen[0] if chosen else None, weight

    def layer(self, first: int, stop: int, slice_: Any) -> CutLayer:
        outputs, chosen, weight = slice_
        reading = None
        if self.reading is not None and outputs:
            direction = {stack.kind: self.reading.direction[stack.name] for stack in self.stacks_at(first)}
            reading = ReadDirections(direction, weight)
        return CutLayer(outputs, reading, frozen_axes(PLAIN), chosen)


class Targets(NamedTuple):
    """K components that edges lead to. Each is given by the number of its stack, the row of its layer there, its
    position or slot, its number, and its expert (0 for other sites). Under `jax.vmap` this is one component."""

    stack: Int[Array, "*K"]
    layer: Int[Array, "*K"]
    row: Int[Array, "*K"]
    component: Int[Array, "*K"]
    expert: Int[Array, "*K"]


class Outputs(NamedTuple):
    """K outputs that edges lead to: logits of tokens, or features, at positions. Under `jax.vmap` this is one
    output."""

    row: Int[Array, "*K"]
    number: Int[Array, "*K"]


class Firing(NamedTuple):
    """The components of one stack that fire: M numbers for every position or slot. Those for which ``fires`` is 0 are
    padding."""

    number: Int[Array, "layers rows M"]
    fires: Float[Array, "layers rows M"]


class Cut(eqx.Module):
    """One row of inputs taken apart at every site (E1, E5), in fp32 or wider.

    By stack: ``outputs``: the outputs of the sites. ``activations``: ``x · V_c`` of the components that fire (without
    ‖U_c‖), 0 for padding. ``rest``: the residual error, what the firing components leave of the output, including the
    delta's part. ``delta``: the delta's part. ``chosen``: the experts taken.

    ``entry``: the input of the first cut layer; None if that layer reads tokens. ``embeddings``: the part of each
    embedding in the entry; None if each embedding is its own position of the entry. ``biases``: the part of the biases
    in the entry.
    """

    outputs: dict[str, Float[Array, "_layers *_n _d_out"]]
    activations: dict[str, Float[Array, "_layers _rows _M"]]
    rest: dict[str, Float[Array, "_layers _rows _d_out"]]
    delta: dict[str, Float[Array, "_layers _rows _d_out"]]
    chosen: dict[str, Int[Array, "_layers *_n _k"]]
    entry: Float[Array, "B *n d"] | None
    embeddings: Float[Array, "E B *n d"] | None
    biases: Float[Array, "B *n d"] | None


class Edges(NamedTuple):
    """Incoming edges of K targets (E2, E5). ``components``: from the components that fire, by stack. ``rest``: from the
    residual errors (including the delta's part), by stack, one for every position or slot. ``delta``: from the delta's
    part alone, likewise. ``embeddings``: empty if the embedding is a site. ``gradient``: the sum over the targets of
    their gradients with respect to a site's output, each times its factor there, by stack; None without factors."""

    components: dict[str, Float[Array, "_K _layers _rows _M"]]
    rest: dict[str, Float[Array, "_K _layers _rows"]]
    delta: dict[str, Float[Array, "_K _layers _rows"]]
    embeddings: Float[Array, "K E"]
    biases: Float[Array, " K"]
    gradient: dict[str, Float[Array, "_layers _rows _d_out"]] | None = None


class RestsOfStack(NamedTuple):
    """N residual errors of one stack. Each is given by the row of its layer there, its position or slot, and its expert
    (0 for other sites)."""

    layer: Int[Array, " N"]
    row: Int[Array, " N"]
    expert: Int[Array, " N"]


def for_attribution(problem: Problem) -> Problem:
    """Returns the problem as attributions compute it: in fp32 or wider, with nothing recomputed.

    In bf16 the parts of an activation would not add up to the activation.
    """
    wide = jnp.promote_types(problem.compute_dtype, jnp.float32)
    target = replace(problem.target, memory=PLAIN, compute_dtype=wide)  # type: ignore[type-var]
    decomposition = replace(
        problem.decomposition, compute_dtype="float64" if wide == jnp.float64 else "float32", memory=PLAIN
    )
    return replace(problem, target=target, decomposition=decomposition)


def take_apart(
    problem: Problem, components: Components, weights: Weights, inputs: Array, firing: Mapping[str, Firing]
) -> Cut:
    """Cuts the network for one row of inputs, ``[1, T]`` token ids or ``[1, n]`` features. ``firing``: by stack."""
    target, sites = problem.target, problem.target.sites
    components = with_views(components, sites)
    clean = target.forward(weights, inputs, PlainLinears(sites, outputs=True, memory=target.memory))
    outputs, activations, rest, deltas, chosen = {}, {}, {}, {}, {}
    for segment in sites.segments:
        records = clean.records[segment.first]
        for stack in segment.stacks:
            name, own = stack.name, components[stack.name]
            outputs[name] = records[output_record(stack.kind)]
            experts = records[CHOSEN] if stack.experts is not None else None
            if experts is not None:
                chosen[name] = experts
            x = jnp.broadcast_to(inputs, (1, *inputs.shape)) if stack.lookup else records[stack.reads]
            parts = (x, outputs[name], own, firing[name], experts)
            activations[name], rest[name], deltas[name] = lax.map(partial(_parts_of_site, stack), parts)
    first = sites.all[0].layer
    entry, embeddings, biases = None, None, None
    if first >= 0:
        start = max(layer for layer in clean.records if layer <= first)
        entry = clean.records[start][RESIDUAL][first - start]
        embeddings, biases = _parts_of_entry(target, weights, inputs, first)
    return Cut(outputs, activations, rest, deltas, chosen, entry, embeddings, biases)


def _parts_of_site(stack: Stack, of_layer: Any) -> tuple[Array, Array, Array]:
    """Returns the parts of a site in one layer: the activations of the components that fire, the residual error of its
    output, and the delta's part of that error."""
    x, y, own, firing, experts = of_layer
    groups = None if experts is None else group(experts, stack.experts or 0)
    inner = row_or_product(x, own.V, groups)
    inner = inner.reshape(-1, inner.shape[-1])
    y = y.reshape(-1, y.shape[-1])
    inner_of_firing = jnp.take_along_axis(inner, firing.number, axis=1) * firing.fires
    U = _rows_of(own.U, firing.number, experts)
    if groups is None:
        all_components = inner @ own.U
    else:
        assert experts is not None
        shape = (*experts.shape, inner.shape[-1])
        all_components = grouped_matmul(inner.reshape(shape), own.U, groups).reshape(y.shape)
    fired = jnp.einsum("rm,rmd->rd", inner_of_firing, U)
    return inner_of_firing, y - fired, y - all_components


def _rows_of(
    U: Float[Array, "*experts C d"], number: Int[Array, "rows M"], experts: Int[Array, "*n k"] | None
) -> Float[Array, "rows M d"]:
    """Returns U of the components that fire in each row."""
    return U[number] if experts is None else U[experts.reshape(-1, 1), number]


def _parts_of_entry(
    target: Any, weights: Weights, inputs: Array, first: int
) -> tuple[Float[Array, "E B *n d"] | None, Float[Array, "B *n d"] | None]:
    """Returns what each embedding, and all biases together, add to the residual stream before layer ``first``, to first
    order.

    If nothing lies between, it returns (None, None): the embedding of a position is its residual.
    """
    biases, rest = split_biases(weights)
    x = target.embed(weights, inputs)
    is_text = jnp.issubdtype(inputs.dtype, jnp.integer)
    if is_text and first == 0:
        return None, None

    def before(x: Array, biases: Weights) -> Array:
        own = eqx.combine(biases, rest)
        groups = [
            UniformLayers(g.apply, g.slice_weights(g.first, min(g.stop, first)), g.first, min(g.stop, first))
            for g in target.uniform_layers(own)
            if g.first < first
        ]
        y: Array = run_layers(groups, x, UNTOUCHED, 0, target.memory)[0]
        return y

    if is_text:
        one_hot = jnp.eye(x.shape[1], dtype=x.dtype)[:, None, :, None] * x
    else:
        one_hot = jax.vmap(lambda row: target.embed(weights, row))(jnp.eye(inputs.shape[1])[:, None] * inputs)
    if first == 0:
        return one_hot, None
    y, pull = jax.vjp(before, x, biases)
    # Forward mode is computed as the transpose of reverse mode, because products with a custom VJP have no JVP.
    push = jax.linear_transpose(pull, jax.ShapeDtypeStruct(y.shape, y.dtype))
    no_biases = jax.tree.map(jnp.zeros_like, biases)
    of_embeddings = lax.map(lambda dx: push((dx, no_biases))[0], one_hot, batch_size=8)
    return of_embeddings, push((jnp.zeros_like(x), biases))[0]


def split_biases(weights: Weights) -> tuple[Weights, Weights]:
    """Returns two trees: the frozen biases of a target, including learned positions, and its other arrays. Each has
    None in place of what the other has.

    Positions that are part of the embeddings do not reach a cut network, so as biases they add nothing to it.
    """

    def is_bias(path: Any, _: Array) -> bool:
        name = path[-1].key
        return name.endswith("bias") or name == "positions"

    return eqx.partition(weights, jax.tree_util.tree_map_with_path(is_bias, weights))


def edges(
    problem: Problem,
    components: Components,
    weights: Weights,
    inputs: Array,
    cut: Cut,
    firing: Mapping[str, Firing],
    targets: Targets | Outputs,
    factors: Mapping[str, Float[Array, "K _layers _rows"]] | None = None,
) -> Edges:
    """Returns the incoming edges of every target, by one backward pass of the cut network each (E2).

    ``factors``: what each target's gradient is multiplied by at each row in `Edges.gradient`, by stack.
    """
    sites = problem.target.sites
    components = with_views(components, sites)
    biases, others = split_biases(weights)

    def back(wanted: Targets | Outputs) -> tuple[Any, Any, Any]:
        def value(leaves: tuple[Any, Any, Any]) -> Float[Array, ""]:
            return _measure(problem, components, inputs, cut.chosen, others, *leaves, wanted)

        gradients: tuple[Any, Any, Any] = jax.grad(value)((cut.outputs, cut.entry, biases))
        return gradients

    to_held, to_entry, to_biases = jax.vmap(back)(targets)
    of_components, of_rest, of_delta = {}, {}, {}
    gradient: dict[str, Array] | None = None if factors is None else {}
    for stack in sites.stacks:
        g = to_held[stack.name]
        g = jnp.moveaxis(g.reshape(*g.shape[:2], -1, g.shape[-1]), 0, 1)  # [layers, K, rows, d_out]
        own = (
            g,
            components[stack.name].U,
            firing[stack.name].number,
            cut.activations[stack.name],
            cut.rest[stack.name],
            cut.delta[stack.name],
            cut.chosen.get(stack.name),
        )
        found = lax.map(_edges_from_site, own)
        of_components[stack.name], of_rest[stack.name], of_delta[stack.name] = (jnp.moveaxis(w, 0, 1) for w in found)
        if gradient is not None:
            assert factors is not None
            gradient[stack.name] = jnp.einsum("klr,lkrd->lrd", factors[stack.name], g)
    from_entry = _edges_from_entry(cut, biases, to_entry, to_biases, targets.row.shape[0])
    return Edges(of_components, of_rest, of_delta, *from_entry, gradient)


def behind_rests(
    problem: Problem,
    components: Components,
    cut: Cut,
    gradient: Mapping[str, Float[Array, "_layers _rows _d_out"]],
    rests: Mapping[str, RestsOfStack],
) -> tuple[dict[str, Float[Array, "_N _C"]], dict[str, Float[Array, " _N"]]]:
    """Returns what residual errors consist of, along a gradient with respect to the sites' outputs (E10).

    By stack, for each residual error: the slope ``Û_c · gradient`` of every component of its site, and the delta's
    part, ``d · gradient``. A slope times the component's activation a is that component's part. Slopes are 0 where U_c
    is 0.
    """
    sites = problem.target.sites
    components = with_views(components, sites)
    slopes, deltas = {}, {}
    for stack in sites.stacks:
        U, d, g = components[stack.name].U, cut.delta[stack.name], gradient[stack.name]
        is_expert = stack.experts is not None

        # One residual error at a time, because U for all of them would be as large as many copies of the site.
        def of_rest(rest: RestsOfStack, U: Array = U, d: Array = d, g: Array = g, is_expert: bool = is_expert) -> Any:
            layer, row, expert = rest
            own = U[layer, expert] if is_expert else U[layer]
            length = jnp.linalg.norm(own, axis=-1)
            along = g[layer, row]
            return jnp.where(length > 0, own @ along / jnp.where(length > 0, length, 1), 0), d[layer, row] @ along

        slopes[stack.name], deltas[stack.name] = lax.map(of_rest, rests[stack.name])
    return slopes, deltas


def _edges_from_site(of_layer: Any) -> tuple[Array, Array, Array]:
    g, U, number, activations, rest, delta, experts = of_layer
    rows = _rows_of(U, number, experts)
    of_components = jnp.einsum("krd,rmd->krm", g, rows) * activations
    return of_components, jnp.einsum("krd,rd->kr", g, rest), jnp.einsum("krd,rd->kr", g, delta)


def _edges_from_entry(
    cut: Cut, biases: Weights, to_entry: Array | None, to_biases: Weights, n_targets: int
) -> tuple[Float[Array, "K E"], Float[Array, " K"]]:
    """Returns the edges from each embedding, and from all biases together."""
    dtype = jax.tree.leaves(cut.outputs)[0].dtype
    products = jax.tree.map(lambda g, b: jnp.sum(g * b, axis=tuple(range(1, g.ndim))), to_biases, biases)
    of_biases = sum(jax.tree.leaves(products), start=jnp.zeros(n_targets, dtype))
    if to_entry is None:
        return jnp.zeros((n_targets, 0), dtype), of_biases
    if cut.biases is not None:
        of_biases = of_biases + jnp.einsum("k...,...->k", to_entry, cut.biases)
    if cut.embeddings is None:
        assert cut.entry is not None
        return jnp.einsum("kbtd,btd->kt", to_entry, cut.entry), of_biases
    return jnp.einsum("k...,e...->ke", to_entry, cut.embeddings), of_biases


def _measure(
    problem: Problem,
    components: Components,
    inputs: Array,
    chosen: Mapping[str, Array],
    others: Weights,
    outputs: Mapping[str, Array],
    entry: Array | None,
    biases: Weights,
    wanted: Targets | Outputs,
) -> Float[Array, ""]:
    """Returns the value of one target (E3) as a function of the sites' outputs, the entry and the biases."""
    target, sites = problem.target, problem.target.sites
    weights = eqx.combine(biases, others)
    start = (sites.all[0].layer, inputs if entry is None else entry)
    reading = None
    if isinstance(wanted, Targets):
        rows = {name: _one_row(y, wanted.row) for name, y in outputs.items()}
        reading = reading_of(sites, components, wanted, rows)
    forward = target.forward(weights, inputs, CutLinears(sites, outputs, chosen, reading), start)
    if isinstance(wanted, Targets):
        read = [jnp.sum(records[READINGS]) for records in forward.records.values() if READINGS in records]
        return jnp.sum(jnp.stack(read))
    rows = forward.output.reshape(-1, forward.output.shape[-1])
    predictions = target.predictions(weights, rows[wanted.row][None])[0]
    value = predictions[wanted.number]
    is_text = jnp.issubdtype(inputs.dtype, jnp.integer)
    return value - jnp.mean(predictions) if is_text else value


def _one_row(outputs: Float[Array, "layers *n d_out"], row: Int[Array, ""]) -> Float[Array, "layers rows"]:
    n_layers, n_rows = outputs.shape[0], outputs[0, ..., 0].size
    return jnp.broadcast_to(jax.nn.one_hot(row, n_rows, dtype=outputs.dtype), (n_layers, n_rows))


def reading_of(
    sites: Sites, components: Components, wanted: Targets, rows: Mapping[str, Float[Array, "layers _rows"]]
) -> ReadDirections:
    """Returns the direction that measures the activation ``‖U_c‖ (x · V_c)`` of one component, at some ``rows`` of its
    stack."""
    direction, weight = {}, {}
    for number, stack in enumerate(sites.stacks):
        own = components[stack.name]
        layer, component = jnp.minimum(wanted.layer, stack.n_layers - 1), jnp.minimum(wanted.component, stack.C - 1)
        V, U = own.V[layer], own.U[layer]
        if stack.experts is not None:
            expert = jnp.minimum(wanted.expert, stack.experts - 1)
            V, U = V[expert], U[expert]
        direction[stack.name] = V[:, component] * jnp.linalg.norm(U[component])
        of_layers = jax.nn.one_hot(wanted.layer, stack.n_layers, dtype=V.dtype)[:, None] * rows[stack.name]
        weight[stack.name] = jnp.where(wanted.stack == number, of_layers, 0)
    return ReadDirections(direction, weight)
