"""Attributions (section 13): which components, at which positions, an activation or an output directly comes from.

The network is cut at every site: what a site gives is held constant, and what later sites read is a function of it.
One backward pass of this cut network is one target's incoming edges; passes of many targets run side by side under
`jax.vmap`, which computes the forward once for all of them.
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
"""Record name of what a layer's sites read along a direction."""


class ReadDirections(NamedTuple):
    """What sites read along a direction, as the target of a backward pass. By stack, and in a layer by kind.

    ``weight``: of every row that is read, a position or an experts' slot: 1 at one row of one layer, or at all of it;
    with a leading layer axis until a scan takes it apart.
    """

    direction: dict[str, Float[Array, "_d_in"]]
    weight: dict[str, Float[Array, "*layers _rows"]]


@dataclass
class CutLayer:
    """One layer of the cut network: its sites give ``outputs`` (E1), whatever they read."""

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
            # Slots that share a position's row read that.
            read = jnp.repeat(of_rows, weight.shape[0] // of_rows.shape[0]) @ weight
            self.records[READINGS] = self.records[READINGS] + read if READINGS in self.records else read
        return y


@dataclass(frozen=True)
class CutLinears(WholeForward):
    """The cut network (E1). ``outputs``: what the sites give, by stack. ``chosen``: of the stacks of experts, by stack.

    With a ``reading`` every layer records what is read along it.
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
    """K components that edges lead to, each given by the number of its stack, the row of its layer there, its position
    or slot, its number, and its expert (0 for other sites). Under `jax.vmap` it is one of them."""

    stack: Int[Array, "*K"]
    layer: Int[Array, "*K"]
    row: Int[Array, "*K"]
    component: Int[Array, "*K"]
    expert: Int[Array, "*K"]


class Outputs(NamedTuple):
    """K outputs that edges lead to: logits of tokens, or features, at positions. Under `jax.vmap` it is one of them."""

    row: Int[Array, "*K"]
    number: Int[Array, "*K"]


class Firing(NamedTuple):
    """Which components fire, of one stack: their numbers at every position or slot, as many for each; those that
    ``fires`` denies are padding."""

    number: Int[Array, "layers rows M"]
    fires: Float[Array, "layers rows M"]


class Cut(eqx.Module):
    """One row of inputs taken apart at every site (E1, E5), in fp32 or wider. By stack:

    ``outputs``: those of the sites. ``activations``: ``x · V_c`` of the components that fire (without ‖U_c‖), 0 for
    padding. ``rest``: what they do not give of the output, the delta's part included; ``delta``: that part.
    ``chosen``: experts. ``entry``: what goes into the first cut layer; None where that reads tokens.
    ``embeddings``: by each embedding, its part in the entry; None: each is its own position of the entry.
    ``biases``: their part in the entry.
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
    """Incoming edges of K targets (E2, E5). ``components``: by stack, of those that fire. ``rest`` (the delta's part
    included) and ``delta``: by stack, of every position or slot. ``embeddings``: none where the embedding is a site.
    ``gradient``: by stack, the sum over the targets of their gradients with respect to what the site gives, each times
    its factor there; None where no factors are given."""

    components: dict[str, Float[Array, "_K _layers _rows _M"]]
    rest: dict[str, Float[Array, "_K _layers _rows"]]
    delta: dict[str, Float[Array, "_K _layers _rows"]]
    embeddings: Float[Array, "K E"]
    biases: Float[Array, " K"]
    gradient: dict[str, Float[Array, "_layers _rows _d_out"]] | None = None


class RestsOfStack(NamedTuple):
    """N rests of one stack, each given by the row of its layer there, its position or slot, and its expert (0 for other
    sites)."""

    layer: Int[Array, " N"]
    row: Int[Array, " N"]
    expert: Int[Array, " N"]


def for_attribution(problem: Problem) -> Problem:
    """The same problem as attributions compute it: in fp32 or wider, with nothing recomputed.

    In bf16 the parts of an activation would not add up to it.
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
    """The cut network of one row of inputs, ``[1, T]`` token ids or ``[1, n]`` features; ``firing``: by stack."""
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
    """Parts of one layer's site: activations of what fires, the residual error of its output, and the delta's part of
    that."""
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
    """U of the components of each row."""
    return U[number] if experts is None else U[experts.reshape(-1, 1), number]


def _parts_of_entry(
    target: Any, weights: Weights, inputs: Array, first: int
) -> tuple[Float[Array, "E B *n d"] | None, Float[Array, "B *n d"] | None]:
    """What each embedding, and all biases together, add to the residual stream before layer ``first``, to first order.

    Where nothing lies between, (None, None): a position's embedding is its residual.
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
    # Forward mode, as the transpose of reverse mode: products with a rule of their own have no other.
    push = jax.linear_transpose(pull, jax.ShapeDtypeStruct(y.shape, y.dtype))
    no_biases = jax.tree.map(jnp.zeros_like, biases)
    of_embeddings = lax.map(lambda dx: push((dx, no_biases))[0], one_hot, batch_size=8)
    return of_embeddings, push((jnp.zeros_like(x), biases))[0]


def split_biases(weights: Weights) -> tuple[Weights, Weights]:
    """The frozen biases of a target, learned positions among them, and its other arrays; None in place of the others.

    (Positions that are part of the embeddings do not reach a cut network, so as biases they add nothing to it.)
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
    """Incoming edges of every target, one backward pass of the cut network each (E2).

    ``factors``: by stack, what each target's gradient is multiplied by at each row in `Edges.gradient`.
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
    """What rests are made of, along a gradient with respect to what the sites give (E10). By stack, for each rest:

    the slope ``Û_c · gradient`` of every component of its site, which times a component's activation a is its part;
    and the delta's part, ``d · gradient``. Slopes are 0 where U_c is.
    """
    sites = problem.target.sites
    components = with_views(components, sites)
    slopes, deltas = {}, {}
    for stack in sites.stacks:
        U, d, g = components[stack.name].U, cut.delta[stack.name], gradient[stack.name]
        is_expert = stack.experts is not None

        # One rest at a time: U of them all would be as large as many copies of the site.
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
    """From embeddings, and from all biases."""
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
    """The value of one target (E3), as a function of the outputs of the sites, of the entry and of the biases."""
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
    """What the activation ``‖U_c‖ (x · V_c)`` of one component is measured by, at some ``rows`` of its stack."""
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
