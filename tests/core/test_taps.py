"""CI functions that read the residual stream in place of the inputs of sites (C10)."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from param_decomp_jax.analysis.importances import read_sites
from param_decomp_jax.ci import (
    ChunkwiseTransformer,
    CIConfig,
    ComponentReadout,
    GlobalMLP,
    GlobalTransformer,
    Taps,
    UnfitTaps,
    init_ci,
    taps_of_groups,
    with_residual_width,
)
from param_decomp_jax.ci.taps import TAPS
from param_decomp_jax.decomposition.sites import Sites
from param_decomp_jax.method.adversary import BroadcastAcrossBatch
from param_decomp_jax.method.step import Problem, run_clean_pass
from param_decomp_jax.sharding.memory import PLAIN
from param_decomp_jax.sharding.mesh import MeshShape, is_axes
from param_decomp_jax.targets.llama import module_name
from param_decomp_jax.targets.plain_linears import RESIDUAL
from tests import reference as ref
from tests.core import test_devices as devices
from tests.core import tiny, toys
from tests.core.test_chunkwise import FLAT, TERMS, TOY, TOY_SITES, sites_of
from tests.core.test_ci import KEY, assert_normal, initialise
from tests.core.test_ci_inputs import FIVE_LAYERS, WITH_GAPS
from tests.core.test_embedding_site import EMBEDDING
from tests.core.test_policies import POLICIES, under

WIDTH = tiny.CONFIG.d_model
FIRST, ALL = Taps("first_block_resid", WIDTH), Taps("all_block_resids", WIDTH)


def offsets(*numbers: int, width: int = WIDTH) -> Taps:
    return Taps(numbers, width)


@tiny.SLOW_IN_FP32
def test_a_step_is_the_reference(exact: bool) -> None:
    """Two alike groups, the last of whose taps is what the last block gives; logits made where they are read."""
    ci = dataclasses.replace(FLAT, taps=offsets(0, 1, width=TOY.d_embed))
    problem = under(tiny.problem(TERMS, toys.target(TOY, TOY_SITES), ci=ci), POLICIES["lean"])
    tiny.assert_step_is_the_reference(problem, toys.weights(TOY), toys.features(TOY), exact)


TWO_LAYERS = ChunkwiseTransformer(tiny.TRANSFORMER, 2)
GAPS = tiny.target(FIVE_LAYERS, WITH_GAPS)
WITH_EMBEDDING = tiny.target(chosen={EMBEDDING: 6, **tiny.CHOSEN})
CASES: dict[str, tuple[Any, CIConfig]] = {
    # A group of two taps and one of one.
    "chunkwise, with a readout": (tiny.target(), ComponentReadout(dataclasses.replace(TWO_LAYERS, taps=ALL))),
    # Blocks without sites before, between and behind those that have some; offsets count them.
    "transformer, gaps": (GAPS, dataclasses.replace(tiny.WITH_OPTIONS, taps=offsets(0, 1, 4))),
    "chunkwise, gaps": (GAPS, ChunkwiseTransformer(tiny.TRANSFORMER, taps=offsets(0, 2))),
    "MLP": (tiny.target(), GlobalMLP((6, 5), ALL)),
    "chunkwise, embedding": (WITH_EMBEDDING, dataclasses.replace(TWO_LAYERS, taps=FIRST)),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_step_on_a_llama_is_the_reference(case: str) -> None:
    target, ci = CASES[case]
    problem = under(tiny.problem(TERMS, target, ci=ci), POLICIES["lean"] if "gaps" in case else PLAIN)
    tiny.assert_step_is_the_reference(problem, tiny.weights(target.architecture), tiny.TOKENS, exact=True)


@pytest.mark.slow
def test_one_device_is_eight() -> None:
    """Split over all axes of the mesh, most levers of memory on."""
    terms = devices.terms_with(devices.attacked("PersistentPGDReconLoss", BroadcastAcrossBatch(), 1), TERMS[1])
    target = tiny.target(devices.CONFIG, devices.CHOSEN)
    ci = ChunkwiseTransformer(tiny.TRANSFORMER, taps=offsets(0, 1))
    problem = tiny.problem(terms, target, ci=ci, batch_size=devices.LEADING[0])
    devices.assert_eight_is_one(problem, 2, MeshShape(2, 2, 2))


# ---- what is read ----


def clean(problem: Problem, weights: Any, boundaries: tuple[int, ...]) -> jax.Array:
    function = jax.eval_shape(lambda: init_ci(problem.decomposition.ci, KEY, problem.target.sites))
    clean_pass = run_clean_pass(problem, function, weights, jnp.asarray(tiny.TOKENS), False)
    return clean_pass.at_boundaries(boundaries)


def test_residual_streams_are_the_reference_s() -> None:
    """Recorded with sites and without, one by one, as slices of one array, in any order; constants."""
    ci = dataclasses.replace(tiny.TRANSFORMER, taps=offsets(0, 1, 3, 4))
    problem = tiny.in_float64(tiny.problem((), GAPS, ci=ci))
    weights = tiny.weights(FIVE_LAYERS)
    want = ref.clean_points(tiny.ref_target(GAPS, weights, tiny.TOKENS))
    boundaries = (1, 2, 4, 5, 3, 1)
    with jax.enable_x64(True):

        def found(weights: Any) -> tuple[jax.Array, jax.Array]:
            read = clean(problem, weights, boundaries)
            return jnp.sum(read**2), read

        gradient, read = jax.jit(jax.grad(found, has_aux=True))(tiny.to_float64(weights))
    for boundary, own in zip(boundaries, read, strict=True):
        assert tiny.deviation(want[f"resid.{boundary}"], own) < 1e-12
    assert not any(np.any(x) for x in jax.tree.leaves(gradient))


@pytest.mark.parametrize("readout", [False, True])
def test_inputs_of_sites_are_not_kept_for_it(readout: bool) -> None:
    """A readout reads its own component's activation, so that it needs them."""
    ci: CIConfig = dataclasses.replace(tiny.TRANSFORMER, taps=ALL)
    ci = ComponentReadout(ci) if readout else ci
    target = tiny.target()
    function = jax.eval_shape(lambda: init_ci(ci, KEY, target.sites))
    names: list[Any] = []

    def run(weights: Any, **kept: bool) -> Any:
        clean_pass = run_clean_pass(tiny.problem((), target, ci=ci), function, weights, jnp.asarray(tiny.TOKENS), False,
                                    **kept)  # fmt: skip
        names.append((set(clean_pass.site_inputs), {n for own in clean_pass.forward.records.values() for n in own}))
        return clean_pass.forward.output

    stacks = {stack.name for stack in target.sites.stacks}
    everything = stacks, {RESIDUAL, *(site.reads for site in target.sites.all)}
    jax.eval_shape(run, tiny.weights())
    jax.eval_shape(lambda weights: run(weights, inputs_of_sites=True), tiny.weights())
    assert names == [everything if readout else (set(), {RESIDUAL}), everything]


def test_sites_can_be_read_beside_it() -> None:
    """What harvests, graphs and opened runs read of a site: activations need its inputs."""
    problem = tiny.problem((), ci=dataclasses.replace(tiny.TRANSFORMER, taps=FIRST))
    state, name = tiny.ruffled_state(problem), module_name(1, "up_proj")
    found = jax.jit(lambda *args: read_sites(problem, *args, [name])[1])(state.learned, tiny.weights(), tiny.TOKENS)
    x = ref.clean_pass(tiny.ref_target(problem.target, tiny.weights(), tiny.TOKENS), [name]).inputs[name]
    factors = tiny.ref_components(state.components, problem.target.sites)[name]
    want = x @ factors["V"] * np.linalg.norm(factors["U"], axis=1)
    np.testing.assert_allclose(found[name].activation, want, rtol=1e-4, atol=1e-5)


# ---- groups ----


@pytest.mark.parametrize(
    ("taps", "wanted"),
    [
        ("first_block_resid", [(1,), (4,), (6,)]),
        ("all_block_resids", [(1, 2), (4, 5), (6,)]),
        ((0, 3), [(1, 4), (4, 7), (6, 9)]),
    ],
)
def test_what_groups_read(taps: Any, wanted: list[tuple[int, ...]]) -> None:
    """Blocks without sites are not counted among a group's, but by offsets; the embedding is no block."""
    sites = sites_of((1, "ab"), (2, "ab"), (4, "ab"), (5, "ab"), (6, "a"))
    config = dataclasses.replace(FLAT, layers_per_chunk=2, taps=Taps(taps))
    assert taps_of_groups(config, sites) == wanted
    assert taps_of_groups(ComponentReadout(config), sites) == wanted
    whole = [tuple(dict.fromkeys(n for group in wanted for n in group))] if taps == "all_block_resids" else wanted[:1]
    assert taps_of_groups(GlobalMLP((3,), config.taps), sites) == whole
    assert taps_of_groups(FLAT, sites) == []


def test_the_embedding_has_no_residual_stream() -> None:
    sites = WITH_EMBEDDING.sites
    assert taps_of_groups(GlobalMLP((3,), FIRST), sites) == [(0,)]
    assert taps_of_groups(dataclasses.replace(TWO_LAYERS, taps=ALL), sites) == [(0,), (1, 2)]
    with pytest.raises(UnfitTaps, match="no site but the embedding"):
        taps_of_groups(dataclasses.replace(FLAT, taps=FIRST), sites)


def test_width_comes_from_the_target() -> None:
    config = ComponentReadout(dataclasses.replace(FLAT, taps=Taps("all_block_resids")))
    assert with_residual_width(config, 7).function.taps == Taps("all_block_resids", 7)  # type: ignore[attr-defined]
    assert with_residual_width(tiny.SCALAR, 7) == tiny.SCALAR
    widths = [config.residual_width for config in (tiny.CONFIG, TOY, toys.SPARSE)]
    assert widths == [tiny.CONFIG.d_model, TOY.d_embed, None]


# ---- initial values, and where they lie ----


def rows_of(config: CIConfig, sites: Sites) -> Any:
    ci: Any = initialise(config, KEY, sites)
    joint = ci.project if hasattr(ci, "project") else ci.first
    described = ci.axes().project if hasattr(ci, "project") else ci.axes().first
    assert set(joint.rows) == {TAPS}
    for x, axes in zip(jax.tree.leaves(joint), jax.tree.leaves(described, is_leaf=is_axes), strict=True):
        assert len(axes.names) == x.ndim
    assert described.rows[TAPS].product
    assert not np.any(joint.b)
    return joint.rows[TAPS]


@pytest.mark.slow
def test_initial_weights() -> None:
    """Gain √2 over the width of the group's concatenation; each tap has its own, whatever is computed together (M4)."""
    sites = sites_of((0, "ab"), (1, "ab"), (2, "ab"), (3, "ab"), (4, "a"))
    transformer = GlobalTransformer(64, 1, (5,), n_heads=2, taps=Taps("all_block_resids", 40))
    rows = rows_of(transformer, sites)
    assert rows.shape == (5, 40, 64)
    assert_normal(rows, (2 / 200) ** 0.5)
    assert np.unique(rows[:, 0, 0]).size == 5
    chunks = ChunkwiseTransformer(dataclasses.replace(transformer, taps=None), 2, taps=transformer.taps)
    grouped = rows_of(chunks, sites)
    np.testing.assert_allclose(grouped[:4], rows[:4] * 2.5**0.5, rtol=1e-6)
    np.testing.assert_allclose(grouped[4], rows[4] * 5**0.5, rtol=1e-6)
    apart = Sites(tuple(dataclasses.replace(site, group=site.layer) for site in sites.all))
    assert np.array_equal(grouped, rows_of(chunks, apart))
    assert rows_of(GlobalMLP((64,), Taps((0, 2), 40)), sites).shape == (2, 40, 64)
