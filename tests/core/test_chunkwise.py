"""A CI transformer for each group of sites (C6): a step with it, its groups, its initial weights.

Its logits and gradients are held against the reference in `test_ci.py`, its inputs in `test_ci_inputs.py`, the memory
policies in `test_policies.py`, as those of the others are.
"""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from param_decomp_jax.ci import ChunkwiseTransformer, GlobalTransformer, InputPatterns, UnfitGroups, stacks_read
from param_decomp_jax.ci.chunkwise import runs_of_groups
from param_decomp_jax.ci.inputs import KeptInputs
from param_decomp_jax.decomposition.schedules import Anneal, Schedule
from param_decomp_jax.decomposition.sites import Site, Sites
from param_decomp_jax.method.adversary import AdamAscent, BroadcastAcrossBatch, PersistentAttack
from param_decomp_jax.method.losses import ImportanceMinimality, Lp
from param_decomp_jax.method.masks import Stochastic
from param_decomp_jax.method.recon import AllSites, Reconstruction
from param_decomp_jax.method.routing import UniformKSubset
from param_decomp_jax.method.state_sharding import state_shardings
from param_decomp_jax.method.step import hold_trained
from param_decomp_jax.sharding.memory import PLAIN
from param_decomp_jax.sharding.mesh import Axes, MeshShape, is_axes, make_mesh, sharding
from tests.core import test_devices as devices
from tests.core import test_experts as experts
from tests.core import tiny, toys
from tests.core.test_ci import KEY, WIDE, assert_mlp, assert_normal, initialise
from tests.core.test_policies import POLICIES, under

TERMS = (
    ImportanceMinimality("ImportanceMinimalityLoss", 0.03, Lp(Anneal(2.0, 0.5, 0.0, 0.6), eps=1e-6), beta=0.5),
    Reconstruction("StochasticReconSubsetLoss", 0.7, AllSites(), UniformKSubset(), Stochastic()),
)
LASTING = Reconstruction(
    "PersistentPGDReconSubsetLoss", 0.4, AllSites(), UniformKSubset(),
    PersistentAttack(AdamAscent(Schedule(0.05)), BroadcastAcrossBatch(), n_warmup_steps=2),
)  # fmt: skip
TOY = toys.residual("gelu", "in_bias", "out_bias")
TOY_SITES = {"layers.0.mlp_in": 4, "layers.0.mlp_out": 3, "layers.1.mlp_in": 4, "layers.1.mlp_out": 3}
FLAT = ChunkwiseTransformer(GlobalTransformer(4, 1, (5,), n_heads=2, max_len=1))


@tiny.SLOW_IN_FP32
def test_a_step_is_the_reference(exact: bool) -> None:
    """Two alike groups, their inputs recomputed, logits made where they are read, in blocks."""
    problem = under(tiny.problem(TERMS, toys.target(TOY, TOY_SITES), ci=FLAT), POLICIES["lean"])
    tiny.assert_step_is_the_reference(problem, toys.weights(TOY), toys.features(TOY), exact)


@pytest.mark.slow
@pytest.mark.parametrize("layers_per_chunk", [1, 2])
def test_a_step_on_a_llama_is_the_reference(layers_per_chunk: int) -> None:
    """Groups of one layer, and, with the options of C9, one of two alike layers before another kind. In float64 alone:
    in fp32 the gradients of q and k, small differences of large numbers here, are 3e-5 away."""
    transformer = tiny.TRANSFORMER if layers_per_chunk == 1 else tiny.WITH_OPTIONS
    ci = ChunkwiseTransformer(transformer, layers_per_chunk, InputPatterns(("*q_proj",)))
    problem = tiny.problem((*TERMS, LASTING), ci=ci)
    tiny.assert_step_is_the_reference(problem, tiny.weights(), tiny.TOKENS, exact=True)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["plain", "lean"])
def test_a_step_with_experts_is_the_reference(policy: str) -> None:
    """X5: what an expert does not read is 0 in its layer's concatenation."""
    problem = tiny.problem(experts.TERMS, experts.target(), ci=tiny.CHUNKWISE)
    problem = under(problem, PLAIN if policy == "plain" else POLICIES["lean"])
    tiny.assert_step_is_the_reference(problem, experts.weights(), tiny.TOKENS, exact=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "policy"),
    [(MeshShape(2, 2, 2), "lean"), (MeshShape(fsdp=8), "lean"), (MeshShape(fsdp=8, nodes=2), "whole 8B")],
    ids=["2x2x2", "1x8x1", "held"],
)
def test_one_device_is_eight(shape: MeshShape, policy: str) -> None:
    """Split over all axes of the mesh, most levers of memory on; held, as the whole 8B model is. Without levels of
    nodes, with the options of C9."""
    transformer = tiny.TRANSFORMER if shape.nodes > 1 else tiny.WITH_OPTIONS
    terms = devices.terms_with(devices.attacked("PersistentPGDReconLoss", BroadcastAcrossBatch(), 1), TERMS[1])
    target = tiny.target(devices.CONFIG, devices.CHOSEN)
    problem = tiny.problem(terms, target, ci=ChunkwiseTransformer(transformer), batch_size=devices.LEADING[0])
    devices.assert_eight_is_one(problem, 2, shape, policy)


@pytest.mark.parametrize(("heads", "wanted"), [({"heads": "device"}, "device"), ({}, "node")], ids=["own", "as ci"])
def test_heads_are_held_by_themselves(heads: Any, wanted: str) -> None:
    """By each device while the transformers are by each node; as they are where nothing is said of heads."""
    held = tuple(sorted({"ci": "node", **heads}.items()))
    problem = under(tiny.problem(TERMS, ci=tiny.CHUNKWISE), dataclasses.replace(POLICIES["lean"], held=held))
    state = tiny.ruffled_state(problem, step=0, seed=2, leading=(8, 5))
    mesh = make_mesh(MeshShape(fsdp=4, nodes=2))
    with jax.set_mesh(mesh):
        places = state_shardings(mesh, problem.decomposition, state)
        state = jax.device_put(state, places)
        copies = jax.jit(hold_trained, static_argnums=0)(problem, state.learned)
    assert jax.tree.leaves(copies.components) == []
    axes = state.ci.axes()

    def by(of: Axes, copy: jax.Array | None) -> str | None:
        """Which of the two the copy is laid out for; None where they are alike."""
        if copy is None:
            return None
        places = {by: sharding(mesh, copy.shape, of.held(by).names) for by in ("node", "device")}
        (found,) = (by for by, place in places.items() if copy.sharding.is_equivalent_to(place, copy.ndim))
        return found

    found = jax.tree.map(by, axes, copies.ci, is_leaf=lambda x: is_axes(x) or x is None)
    assert set(jax.tree.leaves(found.heads)) == {wanted}
    assert set(jax.tree.leaves((found.blocks, found.project))) == {"node"}


@pytest.mark.parametrize(("collective_mib", "scanned"), [(None, True), (64, False)])
def test_blocks_are_written_out_where_they_send_together(collective_mib: int | None, scanned: bool) -> None:
    memory = dataclasses.replace(POLICIES["lean"], collective_mib=collective_mib)
    sites = tiny.problem(TERMS, ci=tiny.CHUNKWISE).target.sites
    config = dataclasses.replace(tiny.CHUNKWISE, transformer=dataclasses.replace(tiny.TRANSFORMER, n_blocks=7))
    ci = initialise(config, KEY, sites)
    read = {s.name: jax.ShapeDtypeStruct((s.n_layers, 4, 5, s.read_width), jnp.float32) for s in sites.stacks}
    program = jax.make_jaxpr(lambda x: ci.features(KeptInputs(x, {}), (4, 5), jnp.float32, memory))(read)
    lengths = lengths_of_scans(program.jaxpr)
    assert 2 in lengths  # the groups of layers 0 and 1
    assert (7 in lengths) == scanned


def lengths_of_scans(jaxpr: Any) -> set[int]:
    """Also of those in one another."""
    inner = [lengths_of_scans(within) for e in jaxpr.eqns for within in jaxprs_in_params(e.params)]
    return {e.params["length"] for e in jaxpr.eqns if e.primitive.name == "scan"}.union(*inner)


# ---- groups ----


def sites_of(*layers: tuple[int, str]) -> Sites:
    """Kinds by letter, layer by layer; a capital letter is a kind with another C."""
    return Sites(
        tuple(
            Site(f"layers.{n}.{kind.lower()}", n, kind.lower(), "x", 4, 3, C=5 if kind.islower() else 6)
            for n, kinds in layers
            for kind in kinds
        )
    )


@pytest.mark.parametrize(
    ("layers", "layers_per_chunk", "runs"),
    [
        # (number of groups, their layers, of every segment)
        ([(n, "ab") for n in range(4)], 1, [(4, [range(4)])]),
        ([(n, "ab") for n in range(4)], 2, [(2, [range(4)])]),
        ([(n, "ab") for n in range(5)], 2, [(2, [range(4)]), (1, [range(4, 5)])]),
        ([(n, "ab") for n in range(4)], 9, [(1, [range(4)])]),
        # Another C begins another segment.
        ([(0, "a"), (1, "a"), (2, "A"), (3, "A")], 1, [(2, [range(2)]), (2, [range(2, 4)])]),
        ([(0, "a"), (1, "a"), (2, "a"), (3, "A"), (4, "A"), (5, "A")], 2,
         [(1, [range(2)]), (1, [range(2, 3), range(3, 4)]), (1, [range(4, 6)])]),
        # Layers without a site are not counted.
        ([(0, "a"), (5, "a"), (6, "a")], 2, [(1, [range(1), range(5, 6)]), (1, [range(6, 7)])]),
    ],
)  # fmt: skip
def test_runs_of_groups(layers: list[tuple[int, str]], layers_per_chunk: int, runs: list[tuple[int, Any]]) -> None:
    found = runs_of_groups(sites_of(*layers), layers_per_chunk)
    assert [(run.n, [range(first, stop) for _, first, stop in run.layers]) for run in found] == runs
    assert [run.first for run in found] == np.cumsum([0] + [n for n, _ in runs[:-1]]).tolist()


def test_what_is_read() -> None:
    sites = sites_of((0, "ab"), (1, "ab"), (2, "b"))
    read = ChunkwiseTransformer(FLAT.transformer, 1, InputPatterns(("model.layers.*.b",), ("model.",)))
    assert stacks_read(read, sites) == {"layers.0-1.b", "layers.2.b"}
    assert stacks_read(FLAT, sites) == {stack.name for stack in sites.stacks}


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        (("*.b", "*.c"), "'*.c' matches no site"),
        (("layers.0.a", "layers.1.b", "layers.0.b", "*.2.*"), "match layers.0.a and not layers.1.a; of alike sites"),
        (("*.a",), "match none of layers.2.b; of every group"),
    ],
)
def test_what_cannot_be_read(patterns: tuple[str, ...], message: str) -> None:
    config = dataclasses.replace(FLAT, inputs=InputPatterns(patterns))
    with pytest.raises(UnfitGroups, match=re.escape(message)):
        stacks_read(config, sites_of((0, "ab"), (1, "ab"), (2, "b")))


# ---- initial values ----

CONFIG = ChunkwiseTransformer(GlobalTransformer(d_model=64, n_blocks=2, mlp_hidden=(96,), n_heads=4))


@pytest.mark.slow
def test_initial_weights() -> None:
    """C6: gain √2 over the width of the group's concatenation; attention is uniform; every group has its own."""
    ci: Any = initialise(CONFIG, KEY, WIDE)
    pairs: Any = initialise(dataclasses.replace(CONFIG, layers_per_chunk=2), KEY, WIDE)
    for of, n_groups, widths in ((ci, 3, (40, 24)), (pairs, 2, (80, 24))):
        for stack, width in zip(WIDE.stacks, widths, strict=True):
            assert_normal(of.project.rows[stack.name], (2 / width) ** 0.5)
            assert_mlp((of.heads[stack.name],), (64,))
        assert of.project.b.shape == (n_groups, 64)
        assert not np.any(of.project.b)
        assert_mlp(of.blocks.mlp, (64, 96))
        bound = 64**-0.5
        for x in (of.blocks.q, of.blocks.k, of.blocks.v, of.blocks.o):
            assert x.shape == (n_groups, 2, 64, 64)
            assert 0.999 * bound < np.abs(x).max() <= bound * (1 + 1e-6)
            assert tiny.array(x).std() == pytest.approx(bound / 3**0.5, rel=0.05)
            assert np.unique(x[..., 0, 0]).size == n_groups * 2


def test_draws_do_not_depend_on_what_is_computed_together() -> None:
    """M4, C6: layers 0 and 1 as one stack, or as layers that are not scanned together."""
    apart = Sites(tuple(dataclasses.replace(site, group=site.layer) for site in WIDE.all))
    one, two = (initialise(CONFIG, KEY, sites) for sites in (WIDE, apart))
    assert len(one.runs) == 2 < len(two.runs)  # type: ignore[attr-defined]
    tiny.assert_alike(tiny.ref_ci(one, WIDE), tiny.ref_ci(two, apart), 1e-7)
    leaves = zip(jax.tree.leaves(one.blocks), jax.tree.leaves(two.blocks), strict=True)  # type: ignore[attr-defined]
    assert all(jnp.array_equal(a, b) for a, b in leaves)
