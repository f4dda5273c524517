"""Averages of attributions over data (E8): between all pairs of components, against the reference."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from param_decomp_jax.analysis.attribution import Targets, for_attribution
from param_decomp_jax.analysis.average_attribution import Normalizers, edge_sums, normalizers
from param_decomp_jax.decomposition.components import Components, Factors, with_views
from param_decomp_jax.decomposition.sites import PRE_IDENTITY, Sites, Stack
from param_decomp_jax.method.state import State
from param_decomp_jax.method.state_sharding import state_shardings
from param_decomp_jax.method.step import Problem
from param_decomp_jax.sharding.mesh import Axes, MeshShape, make_mesh
from param_decomp_jax.sharding.placement import batch_sharding, shardings
from tests import reference as ref
from tests.core import test_embedding_site as with_embedding
from tests.core import test_experts as with_experts
from tests.core import tiny, toys


class Case(NamedTuple):
    """A network, a batch, and λ: by stack, of experts by slot. ``chosen``: the expert of every slot, by stack."""

    problem: Problem
    state: State
    weights: Any
    inputs: np.ndarray
    importances: dict[str, np.ndarray]
    chosen: Mapping[str, np.ndarray]

    @property
    def sites(self) -> Sites:
        return self.problem.target.sites


def make_case(target: Any, weights: Any, inputs: np.ndarray) -> Case:
    """In float64. Half of all λ are 0, and those of the last site's component 0. U of the first's component 1 is 0."""
    is_text, sites = inputs.dtype.kind == "i", target.sites
    problem = for_attribution(tiny.in_float64(tiny.problem((), target)))
    state = tiny.to_float64(tiny.ruffled_state(tiny.problem((), target)))
    weights, inputs = tiny.to_float64(weights), inputs if is_text else inputs.astype(np.float64)
    (first, place), (last, _) = sites.stack_rows[0], sites.stack_rows[-1]
    own = state.components[first.name]
    U = np.array(own.U)
    U[place, 1] = 0
    state.components[first.name] = Factors(own.V, jnp.asarray(U))
    chosen = {}
    if any(stack.experts for stack in sites.stacks):
        chosen = jax.jit(lambda: tiny.clean_pass(problem.target, weights, inputs).chosen)()
    rng = np.random.default_rng(5)

    def importance(stack: Stack) -> np.ndarray:
        n = inputs.shape if is_text else inputs.shape[:1]
        slots = () if stack.experts is None else (target.architecture.experts.per_token,)
        shape = (stack.n_layers, *n, *slots, stack.C)
        values: np.ndarray = rng.uniform(size=shape) * (rng.uniform(size=shape) < 0.5)
        values[..., 0] *= stack.name != last.name
        return values

    importances = {stack.name: importance(stack) for stack in sites.stacks}
    return Case(problem, state, weights, inputs, importances, jax.device_get(chosen))


def llama(rows: int = 2, chosen: Mapping[str, int] = tiny.CHOSEN) -> Case:
    tokens = np.random.default_rng(8).integers(0, tiny.CONFIG.vocab_size, (rows, 4)).astype(np.int32)
    return make_case(tiny.target(chosen=chosen), tiny.weights(), tokens)


def identities() -> Case:
    names = {name: C for name, C in tiny.CHOSEN.items() if "up_proj" in name}
    return llama(chosen={**names, **{name + PRE_IDENTITY: 4 for name in names}})


def embedding() -> Case:
    return llama(chosen=with_embedding.CHOSEN)


def embedding_alone() -> Case:
    return llama(chosen=with_embedding.ALONE)


def experts(rows: int = 2) -> Case:
    """Sites among the experts of two layers of four."""
    tokens = np.random.default_rng(8).integers(0, tiny.CONFIG.vocab_size, (rows, 3)).astype(np.int32)
    return make_case(with_experts.target(), with_experts.weights(), tokens)


def tms(rows: int = 4) -> Case:
    target = toys.target(toys.SPARSE, toys.EVERY_MATRIX)
    return make_case(target, toys.weights(toys.SPARSE), toys.features(toys.SPARSE, rows))


def tied_tms() -> Case:
    target = toys.target(toys.SPARSE, toys.EVERY_MATRIX, toys.TIED)
    return make_case(target, toys.weights(toys.SPARSE), toys.features(toys.SPARSE, 4))


def resid_mlp() -> Case:
    config = toys.residual("gelu", "in_bias", "out_bias")
    return make_case(toys.target(config, toys.EVERY_LAYER), toys.weights(config), toys.features(config, 3))


CASES = {f.__name__: f for f in (llama, identities, embedding, embedding_alone, experts, tms, tied_tms, resid_mlp)}
FAST = ("llama", "tms")


def all_targets(sites: Sites) -> tuple[list[str], Targets]:
    """Every component of every site, and the site of each."""
    names, entries = [], []
    stacks = [stack.name for stack in sites.stacks]
    for site, (stack, place) in zip(sites.all, sites.stack_rows, strict=True):
        layer, expert = (place, 0) if stack.experts is None else place
        entries += [(stacks.index(stack.name), layer, 0, c, expert) for c in range(stack.C)]
        names += [site.name] * stack.C
    return names, Targets(*(jnp.asarray(column, jnp.int32) for column in zip(*entries, strict=True)))


_edge_sums = jax.jit(edge_sums, static_argnums=0)
_normalizers = jax.jit(normalizers, static_argnums=0)


def sums_of(case: Case) -> tuple[dict[str, Any], Normalizers]:
    arguments = case.problem, case.state.components, case.weights, jnp.asarray(case.inputs), case.importances
    return jax.device_get((_edge_sums(*arguments, all_targets(case.sites)[1]), _normalizers(*arguments)))


def of_site(sites: Sites, by_stack: Mapping[str, np.ndarray], name: str, axis: int = 0) -> np.ndarray:
    """A site's part; ``axis``: the one of the layers."""
    stack, place = next(row for site, row in zip(sites.all, sites.stack_rows, strict=True) if site.name == name)
    return by_stack[stack.name][(*[slice(None)] * axis, *(place if isinstance(place, tuple) else (place,)))]


def by_pair(case: Case, found: Mapping[str, np.ndarray]) -> dict[tuple[str, str], np.ndarray]:
    """{(site of t, site of s): [C_t, C_s]}."""
    names = np.asarray(all_targets(case.sites)[0])
    sites = [site.name for site in case.sites.all]
    return {(t, s): of_site(case.sites, found, s, axis=1)[names == t] for t in sites for s in sites}


def importances_by_site(case: Case) -> dict[str, np.ndarray]:
    """``[*n, C]``; of an expert's site 0 at the positions that do not take it."""
    found = {}
    for site, (stack, place) in zip(case.sites.all, case.sites.stack_rows, strict=True):
        if stack.experts is None:
            found[site.name] = case.importances[stack.name][place]
        else:
            layer, expert = place
            taken = np.asarray(case.chosen[stack.name])[layer] == expert
            found[site.name] = (case.importances[stack.name][layer] * taken[..., None]).sum(axis=-2)
    return found


def reference_sums(case: Case) -> list[ref.EdgeSums]:
    """Of every row by itself."""
    components = tiny.ref_components(with_views(case.state.components, case.sites), case.sites)
    importances = importances_by_site(case)

    def of_row(n: int) -> ref.EdgeSums:
        target = tiny.ref_target(case.problem.target, case.weights, case.inputs[n : n + 1])
        return ref.edge_sums(target, components, {s: x[n : n + 1] for s, x in importances.items()})

    return [of_row(n) for n in range(len(case.inputs))]


def averages(case: Case, found: Mapping[str, np.ndarray], by: Normalizers) -> dict[tuple[str, str], np.ndarray]:
    """E8 from the sums, as one divides them."""

    def scale(t: str, s: str) -> np.ndarray:
        squares, positions = (of_site(case.sites, part, t) for part in (by.square, by.positions))
        return np.outer(np.sqrt(squares / np.maximum(positions, 1)), of_site(case.sites, by.importance, s))

    pairs = {pair: (x, scale(*pair)) for pair, x in by_pair(case, found).items()}
    return {pair: np.divide(x, own, out=np.zeros(x.shape), where=own > 0) for pair, (x, own) in pairs.items()}


def assert_close(got: Mapping[Any, Any], want: Mapping[Any, Any]) -> None:
    """To 1e-9 of the largest of all entries."""
    assert got.keys() == want.keys()
    scale = max(np.abs(x).max() for x in want.values())
    assert scale > 0
    for key in want:
        np.testing.assert_allclose(got[key], want[key], rtol=0, atol=1e-9 * scale, err_msg=str(key))


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in CASES])
def test_all_pairs_are_the_reference_s(name: str) -> None:
    """E8. A batch of rows gives the sums over the rows, each of which the reference takes by itself."""
    with jax.enable_x64():
        case = CASES[name]()
        sums, by = sums_of(case)
        rows = reference_sums(case)
        sites = [site.name for site in case.sites.all]
        if name != "embedding_alone":
            assert_close(by_pair(case, sums), {k: sum(row.edges[k] for row in rows) for k in rows[0].edges})
            assert_close(averages(case, sums, by), ref.average_attributions(rows))
        else:
            assert not any(np.any(x) for x in sums.values())
        for part, of_rows in (
            (by.importance, [row.importances for row in rows]),
            (by.square, [row.squares for row in rows]),
            (by.positions, [row.positions for row in rows]),
        ):
            assert_close(
                {s: of_site(case.sites, part, s) for s in sites}, {s: sum(r[s] for r in of_rows) for s in sites}
            )
        # What never matters and what never does anything has no edge, and no division by 0.
        assert not np.any(of_site(case.sites, by.importance, sites[-1])[0])
        assert not np.any(of_site(case.sites, by.square, sites[0])[1])


SHAPES = [MeshShape(fsdp=8), MeshShape(replica=2, fsdp=2, tensor=2)]


def assert_eight_are_one(case: Case, shape: MeshShape) -> None:
    problem, (wanted, by) = case.problem, sums_of(case)
    mesh = make_mesh(shape)
    places = state_shardings(mesh, problem.decomposition, case.state).components
    components: Components = jax.tree.map(jax.device_put, case.state.components, places)
    frozen = shardings(mesh, problem.target.weight_axes(case.weights), case.weights)
    weights = jax.tree.map(jax.device_put, case.weights, frozen)
    inputs = jax.device_put(case.inputs, batch_sharding(mesh, case.inputs.shape))
    axes = {name: Axes((None, "batch", *(None,) * (x.ndim - 2))) for name, x in case.importances.items()}
    importances = jax.tree.map(jax.device_put, case.importances, shardings(mesh, axes, case.importances))
    with jax.set_mesh(mesh):
        arguments = problem, components, weights, inputs, importances
        got = jax.jit(edge_sums, static_argnums=0)(*arguments, all_targets(case.sites)[1])
        got_by = jax.jit(normalizers, static_argnums=0)(*arguments)
    assert_close(jax.device_get(got), wanted)
    for mine, alone in zip(jax.device_get(got_by), by, strict=True):
        assert_close(mine, alone)
    jax.clear_caches()  # programs for eight devices are large, and no other test asks for the same


@pytest.mark.slow
def test_eight_devices_are_one() -> None:
    with jax.enable_x64():
        assert_eight_are_one(tms(8), SHAPES[0])


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("make", [llama, experts], ids=lambda f: f.__name__)
def test_eight_devices_are_one_with_attention(make: Any, shape: MeshShape) -> None:
    with jax.enable_x64():
        assert_eight_are_one(make(8), shape)
