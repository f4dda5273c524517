"""Attributions (section 13): edges against finite differences of their leaves, and against what they must add up to."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from param_decomp_jax.analysis.attribution import (
    Cut,
    Edges,
    Firing,
    Outputs,
    RestsOfStack,
    Targets,
    _measure,
    behind_rests,
    edges,
    for_attribution,
    split_biases,
    take_apart,
)
from param_decomp_jax.decomposition.components import with_views
from param_decomp_jax.decomposition.sites import PRE_IDENTITY
from param_decomp_jax.method.step import Problem
from param_decomp_jax.targets.base import choose_sites
from param_decomp_jax.targets.gpt import GPT, GPTConfig
from param_decomp_jax.targets.plain_linears import RESIDUAL, PlainLinears
from tests import reference as ref
from tests.cases import slow_but
from tests.core import test_embedding_site as with_embedding
from tests.core import test_experts as with_experts
from tests.core import tiny, toys

T = 4


class Case(NamedTuple):
    """A network taken apart in float64, every component a node."""

    problem: Problem
    components: Any
    weights: Any
    inputs: jax.Array
    firing: dict[str, Firing]
    cut: Cut


def taken_apart(target: Any, weights: Any, inputs: np.ndarray, fires: float = 1.0) -> Case:
    """``fires``: the share of components that fire."""
    problem = for_attribution(tiny.in_float64(tiny.problem((), target)))
    sites = target.sites
    rng = np.random.default_rng(3)
    components = tiny.to_float64(tiny.ruffled_state(tiny.problem((), target)).components)
    weights = tiny.to_float64(weights)
    inputs = jnp.asarray(inputs if inputs.dtype.kind == "i" else inputs.astype(np.float64))
    n = inputs.shape[1] if inputs.dtype.kind == "i" else 1

    def firing(stack: Any) -> Firing:
        k = target.architecture.experts.per_token if stack.experts is not None else 1
        number = np.broadcast_to(np.arange(stack.C), (stack.n_layers, n * k, stack.C))
        return Firing(jnp.asarray(number), jnp.asarray((rng.uniform(size=number.shape) < fires).astype(np.float64)))

    of_stacks = {stack.name: firing(stack) for stack in sites.stacks}
    cut = jax.jit(take_apart, static_argnums=0)(problem, components, weights, inputs, of_stacks)
    return Case(problem, components, weights, inputs, of_stacks, cut)


def found_edges(case: Case, wanted: Targets | Outputs) -> Edges:
    return jax.jit(edges, static_argnums=0)(
        case.problem, case.components, case.weights, case.inputs, case.cut, case.firing, wanted
    )


def some_targets(case: Case) -> Targets:
    """Of every stack: the last layer's site, at the last row, one component."""
    stacks = case.problem.target.sites.stacks
    entries = [
        (n, s.n_layers - 1, case.firing[s.name].number.shape[1] - 1, s.C - 1, int(_expert(case, s)))
        for n, s in enumerate(stacks)
        if not s.lookup
    ]
    return Targets(*(jnp.asarray(column) for column in zip(*entries, strict=True)))


def _expert(case: Case, stack: Any) -> int:
    return 0 if stack.experts is None else case.cut.chosen[stack.name][-1].reshape(-1)[-1]


def output_target(case: Case, number: int = 2) -> Outputs:
    last = next(iter(case.firing.values())).number.shape[1] - 1 if case.inputs.dtype.kind == "i" else 0
    return Outputs(jnp.asarray([min(last, case.inputs.shape[1] - 1)]), jnp.asarray([number]))


def measured(case: Case) -> Any:
    """A function from (held, entry, biases) and a single target to its value."""
    biases, others = split_biases(case.weights)

    @jax.jit
    def value(held: Any, entry: Any, biases: Any, wanted: Any) -> jax.Array:
        return _measure(
            case.problem, case.components, case.inputs, case.cut.chosen, others, held, entry, biases, wanted
        )

    return value, biases


def leaf_of(case: Case, stack: Any, layer: int, row: int, m: int) -> np.ndarray:
    """What one component contributes to what is held of its stack: ``[layers, rows, d_out]``."""
    held = np.asarray(case.cut.outputs[stack.name])
    flat = np.zeros((held.shape[0], held[0, ..., 0].size, held.shape[-1]))
    U = np.asarray(case.components[stack.name].U if stack.name in case.components else 0)[layer]
    if stack.experts is not None:
        U = U[np.asarray(case.cut.chosen[stack.name])[layer].reshape(-1)[row]]
    number = int(case.firing[stack.name].number[layer, row, m])
    flat[layer, row] = float(case.cut.activations[stack.name][layer, row, m]) * U[number]
    return flat.reshape(held.shape)


def llama(chosen: Mapping[str, int] = tiny.CHOSEN) -> Case:
    return taken_apart(tiny.target(chosen=chosen), tiny.weights(), tiny.TOKENS[:1, :T])


def llama_from_its_last_layer() -> Case:
    return llama({name: C for name, C in tiny.CHOSEN.items() if name.startswith("layers.2")})


def tms() -> Case:
    return taken_apart(
        toys.target(toys.SPARSE, toys.EVERY_MATRIX), toys.weights(toys.SPARSE), toys.features(toys.SPARSE)[:1]
    )


def late_tms() -> Case:
    return taken_apart(
        toys.target(toys.SPARSE, {"linear2": 4}), toys.weights(toys.SPARSE), toys.features(toys.SPARSE)[:1]
    )


def resid_mlp() -> Case:
    config = toys.residual("gelu", "in_bias", "out_bias")
    return taken_apart(toys.target(config, toys.EVERY_LAYER), toys.weights(config), toys.features(config)[:1])


def gpt() -> Case:
    """Biases everywhere, and learned positions; the first layer is whole."""
    config = GPTConfig(vocab_size=7, n_positions=6, d_model=8, n_layers=2, n_heads=2, d_mlp=6)
    rng = np.random.default_rng(4)
    weights = jax.tree.map(
        lambda shape: jnp.asarray(rng.normal(size=shape), jnp.float32),
        config.weight_shapes(),
        is_leaf=lambda x: isinstance(x, tuple),
    )
    chosen = {"layers.1.mlp_in": 4, "layers.1.v_proj": 3, "layers.1.o_proj": 3, "layers.1.q_proj": 3}
    sites = choose_sites(config.matrices(), chosen)
    return taken_apart(GPT(config, sites), weights, np.asarray([[1, 5, 2, 2]], np.int32))


def identities() -> Case:
    names = {name: C for name, C in tiny.CHOSEN.items() if "up_proj" in name}
    return llama({**names, **{name + PRE_IDENTITY: 4 for name in names}})


def embedding() -> Case:
    return llama(with_embedding.CHOSEN)


def experts() -> Case:
    """Sites among the experts of two layers of four; half of the components fire."""
    return taken_apart(with_experts.target(), with_experts.weights(), tiny.TOKENS[:1, :3], fires=0.5)


CASES = {
    f.__name__: f
    for f in (llama, llama_from_its_last_layer, tms, late_tms, resid_mlp, gpt, identities, embedding, experts)
}


FAST = ("tms",)
"""The others differ from these where the reference, too, tells whether they are right."""


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in CASES])
def test_edges_are_finite_differences_of_their_leaves(name: str) -> None:
    with jax.enable_x64():
        case = CASES[name]()
        value, biases = measured(case)
        for wanted in (some_targets(case), output_target(case)):
            found = found_edges(case, wanted)
            for k in range(wanted.row.shape[0]):
                one = jax.tree.map(lambda x, k=k: x[k], wanted)

                def change(held: Any, entry: Any, of_biases: Any, one: Any = one) -> float:
                    """The central difference along these parts of the leaves; None: nothing of them."""
                    leaves = case.cut.outputs, case.cut.entry, biases

                    def moved(by: float) -> Any:
                        given = (held, entry, of_biases)
                        pairs = zip(leaves, given, strict=True)
                        return [old if part is None else added(old, part, by) for old, part in pairs]

                    return float(value(*moved(1e-4), one) - value(*moved(-1e-4), one)) / 2e-4

                scale, total = 0.0, 0.0
                zero = jax.tree.map(np.zeros_like, case.cut.outputs)
                checks = []
                for stack in case.problem.target.sites.stacks:
                    layers, rows, M = case.firing[stack.name].number.shape
                    own = np.asarray(found.components[stack.name][k])
                    scale, total = max(scale, np.abs(own).max()), total + own.sum()
                    total += np.asarray(found.rest[stack.name][k]).sum()
                    for layer in range(layers):
                        for row in range(rows):
                            for m in range(M):
                                leaf = leaf_of(case, stack, layer, row, m)
                                checks.append((own[layer, row, m], change({**zero, stack.name: leaf}, None, None)))
                of_delta = {n: np.asarray(d).reshape(case.cut.outputs[n].shape) for n, d in case.cut.delta.items()}
                checks.append((sum(float(x[k].sum()) for x in found.delta.values()), change(of_delta, None, None)))
                of_biases = case.cut.biases
                checks.append((float(found.biases[k]), change(None, of_biases, biases)))
                np.testing.assert_allclose(*zip(*checks, strict=True), rtol=1e-6, atol=1e-6 * scale + 1e-9)
                # E4: all sources together are the derivative along all leaves together.
                total += float(found.embeddings[k].sum()) + float(found.biases[k])
                assert total == pytest.approx(change(case.cut.outputs, whole_entry(case), biases), rel=1e-6, abs=1e-8)


EDGES = slow_but(("llama", "resid_mlp", "identities", "late_tms"), [name for name in CASES if name != "gpt"])


@pytest.mark.parametrize("name", EDGES)
def test_edges_are_the_reference_s(name: str) -> None:
    """E1 to E5, to 1e-9 of the largest edge; the reference knows no stacks, no slots and no layer to begin at."""
    with jax.enable_x64():
        case = CASES[name]()
        sites = case.problem.target.sites
        plain = tiny.ref_target(case.problem.target, case.weights, np.asarray(case.inputs))
        components = tiny.ref_components(with_views(case.components, sites), sites)
        fires = {site: mask > 0.5 for site, mask in by_site(case, {n: f.fires for n, f in case.firing.items()}).items()}
        is_text = case.inputs.dtype.kind == "i"
        for wanted in (some_targets(case), output_target(case)):
            found = found_edges(case, wanted)
            for k in range(wanted.row.shape[0]):
                want = ref.attributions(plain, components, ref_node(case, wanted, k, is_text))
                firing, rests = ref.with_rests(want, fires)
                mine = by_site(case, {n: w[k] for n, w in found.components.items()})
                scale = max(np.abs(w).max() for w in mine.values())
                for site in firing:
                    np.testing.assert_allclose(mine[site], firing[site], atol=1e-9 * scale)
                for which, wants in ((found.rest, rests), (found.delta, want.deltas)):
                    each = by_site(case, {n: w[k][..., None] for n, w in which.items()})
                    for site in wants:
                        np.testing.assert_allclose(each[site][..., 0], wants[site], atol=1e-9 * scale)
                if want.embeddings is not None:
                    np.testing.assert_allclose(found.embeddings[k], want.embeddings.reshape(-1), atol=1e-9 * scale)
                assert float(found.biases[k]) == pytest.approx(want.biases, abs=1e-9 * scale)


def half_of_it_fires(case: Case) -> Case:
    rng = np.random.default_rng(7)
    firing = {
        name: Firing(f.number, jnp.asarray((rng.uniform(size=f.fires.shape) < 0.5).astype(np.float64)))
        for name, f in case.firing.items()
    }
    cut = jax.jit(take_apart, static_argnums=0)(case.problem, case.components, case.weights, case.inputs, firing)
    return case._replace(firing=firing, cut=cut)


def every_rest(case: Case, stack: Any) -> RestsOfStack:
    layers, rows = case.firing[stack.name].number.shape[:2]
    expert = np.zeros((layers, rows), int)
    if stack.experts is not None:
        expert = np.asarray(case.cut.chosen[stack.name]).reshape(layers, rows)
    return RestsOfStack(*(jnp.asarray(x.reshape(-1)) for x in (*np.indices((layers, rows)), expert)))


@pytest.mark.parametrize("name", slow_but(("resid_mlp",), ("llama", "resid_mlp", "experts", "embedding", "identities")))
def test_parts_of_rests_are_the_reference_s(name: str) -> None:
    """E10, of every rest, along its edges into a component of each stack."""
    with jax.enable_x64():
        case = half_of_it_fires(CASES[name]())
        sites, wanted = case.problem.target.sites, some_targets(case)
        n = wanted.row.shape[0]
        influences = np.random.default_rng(5).uniform(0.1, 1, n)
        program = jax.jit(edges, static_argnums=0)

        def with_factors(factors: Mapping[str, Any]) -> Edges:
            given = case.problem, case.components, case.weights, case.inputs, case.cut, case.firing
            found: Edges = program(*given, wanted, factors)
            return found

        rows = {stack.name: case.firing[stack.name].number.shape[:2] for stack in sites.stacks}
        found = with_factors({name: np.zeros((n, *shape)) for name, shape in rows.items()})
        all_sources = jax.tree.leaves(found._replace(delta={}, gradient=None))
        sizes = sum(np.abs(w).reshape(n, -1).sum(axis=1) for w in all_sources)
        factors = {name: (influences / sizes)[:, None, None] * np.sign(w) for name, w in found.rest.items()}
        gradient = with_factors(factors).gradient
        assert gradient is not None
        slopes, deltas = jax.jit(behind_rests, static_argnums=0)(
            case.problem, case.components, case.cut, gradient, {s.name: every_rest(case, s) for s in sites.stacks}
        )
        slope = by_site(case, {name: x.reshape(*rows[name], -1) for name, x in slopes.items()})
        delta = by_site(case, {name: x.reshape(*rows[name], 1) for name, x in deltas.items()})

        plain = tiny.ref_target(case.problem.target, case.weights, np.asarray(case.inputs))
        components = tiny.ref_components(with_views(case.components, sites), sites)
        fires = {site: mask > 0.5 for site, mask in by_site(case, {n: f.fires for n, f in case.firing.items()}).items()}
        is_text = case.inputs.dtype.kind == "i"
        nodes = [ref_node(case, wanted, k, is_text) for k in range(n)]
        kept = [(ref.attributions(plain, components, node), own) for node, own in zip(nodes, influences, strict=True)]
        a = ref.cut_leaves(plain, components)[0]["components"]
        largest = 0.0
        for site, fire in fires.items():
            for at in np.ndindex(fire.shape[:-1]):
                want = ref.rest_parts(kept, fires, site, at)
                largest = max(largest, np.abs(want.components).max())
                np.testing.assert_allclose(a[site][at] * slope[site][at] * ~fire[at], want.components, atol=1e-10)
                np.testing.assert_allclose(delta[site][(*at, 0)], want.delta, atol=1e-10)
                # The parts add up to the rest's share of each target, times the target's influence.
                shares = (
                    np.abs(ref.with_rests(e, fires)[1][site][at]) * own / size
                    for (e, own), size in zip(kept, sizes, strict=True)
                )
                assert want.components.sum() + want.delta == pytest.approx(sum(shares), abs=1e-10)
        assert largest > 1e-3


def by_site(case: Case, of_stacks: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """From the tables, in which every component has its own column, to ``[*n, C]`` by site; an expert's site has 0 at
    the positions that do not take it."""
    found = {}
    sites = case.problem.target.sites
    for site, (stack, place) in zip(sites.all, sites.stack_rows, strict=True):
        values = np.asarray(of_stacks[stack.name])
        if stack.experts is None:
            own = values[place]
        else:
            layer, expert = place
            slots = np.asarray(case.cut.chosen[stack.name])[layer].reshape(-1)
            of_expert = (values[layer] * (slots == expert)[:, None]).reshape(
                *case.inputs.shape[1:], -1, values.shape[-1]
            )
            own = of_expert.sum(axis=-2)
        found[site.name] = own[None] if case.inputs.dtype.kind == "i" else own
    return found


def ref_node(case: Case, wanted: Targets | Outputs, k: int, is_text: bool) -> ref.Node:
    row = int(wanted.row[k])
    if isinstance(wanted, Outputs):
        return (
            ref.Node(ref.LOGIT, (0, row), int(wanted.number[k]))
            if is_text
            else ref.Node(ref.FEATURE, (0,), int(wanted.number[k]))
        )
    sites = case.problem.target.sites
    stack = sites.stacks[int(wanted.stack[k])]
    site = stack.of_layer(stack.first + int(wanted.layer[k]))[int(wanted.expert[k])]
    if stack.experts is not None:
        row //= case.problem.target.architecture.experts.per_token
    return ref.Node(sites.all[site].name, (0, row) if is_text else (0,), int(wanted.component[k]))


def added(old: Any, part: Any, by: float) -> Any:
    return jax.tree.map(lambda x, d: x + by * d, old, part)


def whole_entry(case: Case) -> Any:
    """What all embeddings and all biases add to the entry, to first order."""
    cut = case.cut
    parts = cut.entry if cut.embeddings is None else cut.embeddings.sum(axis=0)
    return parts if cut.biases is None else parts + cut.biases


@pytest.mark.parametrize("name", ["llama_from_its_last_layer", "gpt", "late_tms"])
def test_what_lies_before_the_first_site_is_followed_to_the_embeddings(name: str) -> None:
    """To first order, through attention and norms; against finite differences of the network itself."""
    with jax.enable_x64():
        case = CASES[name]()
        target, biases = case.problem.target, split_biases(case.weights)
        x = target.embed(case.weights, case.inputs)
        layer = target.sites.all[0].layer

        @jax.jit
        def residual(x: Any, biases: Any) -> jax.Array:
            weights = eqx.combine(biases, split_biases(case.weights)[1])
            records = target.forward(weights, case.inputs, PlainLinears(target.sites), (0, x)).records
            return records[layer][RESIDUAL][0]

        def difference(dx: Any, by: float = 1e-5) -> np.ndarray:
            return np.asarray(residual(x + by * dx, biases[0]) - residual(x - by * dx, biases[0])) / (2 * by)

        assert case.cut.embeddings is not None
        for number, part in enumerate(case.cut.embeddings):
            dx = np.zeros(x.shape)
            place = (0, number)
            dx[place] = np.asarray(x)[place]
            np.testing.assert_allclose(part, difference(dx), atol=1e-8)
        if case.cut.biases is not None:
            ahead, back = (residual(x, jax.tree.map(lambda b, h=h: b * (1 + h), biases[0])) for h in (1e-5, -1e-5))
            np.testing.assert_allclose(case.cut.biases, np.asarray(ahead - back) / 2e-5, atol=1e-8)
