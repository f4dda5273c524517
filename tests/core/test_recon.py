"""Section 5: every row of the table against the reference, and what must not change a number."""

import dataclasses
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from param_decomp_jax.decomposition.schedules import Schedule
from param_decomp_jax.method import recon
from param_decomp_jax.method.adversary import BroadcastAcrossBatch, FreshAttack, PersistentAttack, SignAscent, effective
from param_decomp_jax.method.clean_pass import CleanPass, DecomposedBatch
from param_decomp_jax.method.masked import MaskedLinears, Stream
from param_decomp_jax.method.masks import Constant, GivenSources, Stochastic
from param_decomp_jax.method.recon import (
    AllSites,
    Chunks,
    EachSite,
    Reconstruction,
    errors,
    live_sets,
    n_forwards,
    reconstruction,
)  # fmt: skip
from param_decomp_jax.method.routing import Everywhere, StaticProbability, UniformKSubset
from param_decomp_jax.sharding.memory import INTERMEDIATES, MemoryPolicy
from param_decomp_jax.targets.llama import module_name
from param_decomp_jax.targets.transformer import Transformer
from tests import reference as ref
from tests.core import tiny

# Undecomposed layers before and between the segments.
CONFIG = dataclasses.replace(tiny.CONFIG, n_layers=5)
CHOSEN = {module_name(1, "k_proj"): 3, module_name(2, "k_proj"): 3}
CHOSEN |= {module_name(4, "o_proj"): 4, module_name(4, "down_proj"): 5}
TARGET = tiny.target(CONFIG, CHOSEN)
N_SITES = len(CHOSEN)

STEPPED = FreshAttack("random", 0.125, 2, "unique_per_datapoint")
# Not "ones": with the delta on that is the clean output, whose error has gradient 0 and the sign of rounding.
SHARED = FreshAttack("zeroes", 0.25, 2, "shared_across_batch")
LASTING = PersistentAttack(SignAscent(Schedule(0.1)), BroadcastAcrossBatch(), sigmoid=True)

ROWS = [
    Reconstruction("UnmaskedReconLoss", 1.0, AllSites(), Everywhere(), Constant(1.0)),
    Reconstruction("CIMaskedReconLoss", 1.0, AllSites(), Everywhere(), Constant(0.0)),
    Reconstruction("CIMaskedReconSubsetLoss", 1.0, AllSites(), UniformKSubset(), Constant(0.0)),
    Reconstruction("CIMaskedReconLayerwiseLoss", 1.0, EachSite(), Everywhere(), Constant(0.0)),
    Reconstruction("StochasticReconLoss", 1.0, AllSites(), Everywhere(), Stochastic(), 2),
    Reconstruction("StochasticReconSubsetLoss", 1.0, AllSites(), UniformKSubset(), Stochastic("binomial"), 2),
    Reconstruction("StochasticReconSubsetLoss_p", 1.0, AllSites(), StaticProbability(0.3), Stochastic()),
    Reconstruction("StochasticReconLayerwiseLoss", 1.0, EachSite(), Everywhere(), Stochastic()),
    Reconstruction("ChunkwiseSubsetReconLoss", 1.0, Chunks(3), UniformKSubset(), Stochastic(), 2),
    Reconstruction("PGDReconLoss", 1.0, AllSites(), Everywhere(), STEPPED),
    Reconstruction("PGDReconSubsetLoss", 1.0, AllSites(), UniformKSubset(), SHARED),
    Reconstruction("PGDReconLayerwiseLoss", 1.0, EachSite(), Everywhere(), STEPPED),
    Reconstruction("PersistentPGDReconLoss", 1.0, AllSites(), Everywhere(), LASTING, 3),
    Reconstruction("PersistentPGDReconSubsetLoss", 1.0, AllSites(), UniformKSubset(), LASTING, 2),
    Reconstruction("StochasticHiddenActsReconLoss", 1.0, AllSites(), Everywhere(), Stochastic(), error="hidden_acts"),
    Reconstruction("CIHiddenActsReconLoss", 1.0, AllSites(), Everywhere(), Constant(0.0), error="hidden_acts"),
]


FAST = {"PersistentPGDReconSubsetLoss", "CIHiddenActsReconLoss"}
"""Every kind of masks and of error is among them."""


def test_the_table_is_complete() -> None:
    assert {term.name.split("_")[0] for term in ROWS} == set(ref.RECONSTRUCTION)


@dataclasses.dataclass(frozen=True)
class Setting:
    """float64 (under ``jax.enable_x64``) arguments of a reconstruction term."""

    weights: Any
    components: Any
    logits: dict[str, jax.Array]
    bundle: Any


def setting() -> Setting:
    """Logits on both sides of 0 and of 1."""
    term = ROWS[[row.name for row in ROWS].index("PersistentPGDReconLoss")]
    state = tiny.ruffled_state(tiny.problem((term,), TARGET))
    rng = np.random.default_rng(3)
    logits = {s.name: rng.normal(0.5, 0.7, (s.n_layers, *tiny.LEADING, s.C)) for s in TARGET.sites.stacks}
    arrays = tiny.weights(CONFIG), state.components, logits, state.adversaries[term.name].raw
    return Setting(*map(tiny.to_float64, arrays))


def core_term(term: Reconstruction, target: Transformer, given: Setting, key: Any) -> tuple[Any, Any]:
    """Value, and gradients by components, logits and raw sources."""
    target = dataclasses.replace(target, compute_dtype=jnp.float64)

    def value(components: Any, logits: Any, raw: Any, weights: Any, key: Any) -> jax.Array:
        clean_pass = tiny.clean_pass(target, weights, tiny.TOKENS, term.error == "hidden_acts")
        return reconstruction(
            term,
            DecomposedBatch(clean_pass, components, tiny.importance_reader(logits, clean_pass)),
            key,
            effective(LASTING, raw),
        )[0]

    of = jax.jit(jax.value_and_grad(value, argnums=(0, 1, 2)))
    return of(given.components, given.logits, given.bundle, given.weights, key)


def per_site(arrays: dict[str, jax.Array]) -> dict[str, np.ndarray]:
    return {name: tiny.array(x) for name, x in TARGET.sites.unstack(arrays).items()}


@pytest.mark.parametrize(
    "term", [pytest.param(t, id=t.name, marks=[] if t.name in FAST else pytest.mark.slow) for t in ROWS]
)
def test_row(term: Reconstruction) -> None:
    sites, key = TARGET.sites, jax.random.key(5)
    draws = tiny.ref_term_draws(term, key, sites, tiny.LEADING, True)
    with jax.enable_x64(True):
        given = setting()
        value, (to_components, to_logits, to_raw) = core_term(term, TARGET, given, key)

    forward = tiny.ref_target(TARGET, given.weights, tiny.TOKENS)
    trained = {
        "components": tiny.ref_components(given.components, sites),
        "logits": per_site(given.logits),
        "raw": tiny.ref_bundle(given.bundle, sites),
    }
    variables = ref.tree_map(ref.Var, trained)
    model = ref.Decomposition(
        forward,
        ref.kl_error,
        ref.clean_pass(forward, [site.name for site in sites.all]),
        variables["components"],
        {s: ref.lower(z, "leaky_hard") for s, z in variables["logits"].items()},
    )
    loss = tiny.schema_term(term)
    forwards = ref.forwards_of(model.detached(), loss, term.n_samples, draws, variables["raw"])
    assert n_forwards(term, N_SITES) == len(forwards)
    want = ref.reconstruction_term(model, 1.0, forwards, ref.RECONSTRUCTION[loss["type"]].hidden_acts)
    gradients = ref.gradients(want, variables)

    assert tiny.deviation(want.value, value) <= 1e-9
    got = {
        "components": tiny.ref_components(to_components, sites),
        "logits": per_site(to_logits),
        "raw": tiny.ref_bundle(to_raw, sites),
    }
    tiny.assert_alike(gradients, got, 1e-9)


# ---- what must not change a number ----

CHUNKWISE = dataclasses.replace(next(term for term in ROWS if isinstance(term.live, Chunks)), n_samples=1)


RECOMPUTED = MemoryPolicy(save=frozenset(INTERMEDIATES) - {"layers"})


@pytest.fixture(scope="module")
def plain() -> tuple[Any, Any]:
    with jax.enable_x64(True):
        return core_term(CHUNKWISE, TARGET, setting(), jax.random.key(5))


@pytest.mark.slow
@pytest.mark.parametrize(
    "memory",
    [
        MemoryPolicy(layers="unroll"),
        RECOMPUTED,
        dataclasses.replace(RECOMPUTED, layers="unroll"),
    ],
    ids=["unrolled", "recomputed", "both"],
)
def test_memory_policy_changes_no_number(memory: MemoryPolicy, plain: tuple[Any, Any]) -> None:
    with jax.enable_x64(True):
        other = core_term(CHUNKWISE, dataclasses.replace(TARGET, memory=memory), setting(), jax.random.key(5))
    worst = max(map(tiny.deviation, jax.tree.leaves(plain), jax.tree.leaves(other)))
    assert worst <= 1e-11


@pytest.mark.slow
def test_start_from_the_clean_residual() -> None:
    """F6: every site's own start, the middle of a scanned segment among them, against the very beginning."""
    layerwise = next(term for term in ROWS if isinstance(term.live, EachSite))

    def embedded(clean_pass: CleanPass, live: tuple[int, ...]) -> Any:
        return clean_pass.weights["embed"][clean_pass.inputs]

    def at_the_beginning(linears: MaskedLinears) -> tuple[int, ...]:
        return (0,) * len(linears.streams)

    with jax.enable_x64(True):
        want = core_term(layerwise, TARGET, setting(), jax.random.key(5))
        with (
            mock.patch.object(CleanPass, "residual", embedded),
            mock.patch.object(MaskedLinears, "starts", property(at_the_beginning)),
        ):
            got = core_term(layerwise, TARGET, setting(), jax.random.key(5))
    assert max(map(tiny.deviation, jax.tree.leaves(want), jax.tree.leaves(got))) <= 1e-11


def error_of(live: tuple[int, ...], given: Setting, weights: Any, components: Any) -> jax.Array:
    """The error of one forward; ``weights`` are of the masked pass, the clean one has those of the setting."""
    clean_pass = tiny.clean_pass(dataclasses.replace(TARGET, compute_dtype=jnp.float64), given.weights, tiny.TOKENS)
    stream = Stream(live, GivenSources(effective(LASTING, given.bundle), clean_pass.batch))
    reader = tiny.importance_reader(given.logits, clean_pass)
    batch = DecomposedBatch(dataclasses.replace(clean_pass, weights=weights), components, reader)
    return errors(batch, [stream], ["output"]).by_stream[0]


def test_layers_before_the_first_live_site_are_not_run() -> None:
    """F6: they may hold anything."""
    with jax.enable_x64(True):
        given = setting()
        error = jax.jit(lambda weights: error_of((2, 3), given, weights, given.components))  # layer 4
        layers = jax.tree.map(lambda w: w.at[:4].set(jnp.nan), given.weights["layers"])
        spoiled = {**given.weights, "embed": given.weights["embed"] * jnp.nan, "layers": layers}
        want, got = float(error(given.weights)), float(error(spoiled))
    assert want > 1e-3
    assert want == got


def test_dead_sites_do_not_matter() -> None:
    """F3: their components may hold anything, and get no gradient."""
    live = (0, 3)  # k_proj of layer 1, down_proj of layer 4
    with jax.enable_x64(True):
        given = setting()
        k, o, down = (stack.name for stack in TARGET.sites.stacks)
        nan = jax.tree.map(lambda x: x * jnp.nan, given.components)
        second_layer_dead = jax.tree.map(lambda x: x.at[1].set(jnp.nan), given.components[k])
        spoiled = {k: second_layer_dead, o: nan[o], down: given.components[down]}
        error = jax.jit(jax.value_and_grad(lambda components: error_of(live, given, given.weights, components)))
        want, gradient = error(given.components)
        got, _ = error(spoiled)
    assert want == got
    by_site = tiny.ref_components(gradient, TARGET.sites)
    alive = [bool(np.abs(by_site[site.name]["V"]).max() > 0) for site in TARGET.sites.all]
    assert alive == [n in live for n in range(N_SITES)]


# ---- live sets and their number ----


@pytest.mark.parametrize(("size", "groups"), [(3, 2), (2, 2), (4, 1), (7, 1), (1, 4)])
def test_chunks(size: int, groups: int) -> None:
    """R4: consecutive in canonical order, the last may be smaller."""
    lives = live_sets(Chunks(size), N_SITES)
    assert len(lives) == groups
    assert [n for live in lives for n in live] == list(range(N_SITES))
    assert all(len(live) == size for live in lives[:-1])


@pytest.mark.parametrize(
    ("term", "expected"),
    [
        (ROWS[0], 1), (ROWS[3], 4), (ROWS[4], 2), (ROWS[8], 4), (ROWS[11], 4),
        (ROWS[12], 1),  # R5: routed everywhere, computed once
        (ROWS[13], 2),
    ],
    ids=lambda x: getattr(x, "name", str(x)),
)  # fmt: skip
def test_number_of_forwards(term: Reconstruction, expected: int) -> None:
    """As counted on the way: an attack adds one (the body of its loop) per forward. The term's own run together."""
    counted = mock.Mock(side_effect=recon.run_masked)
    with jax.enable_x64(True):
        given = setting()

    def value(weights: Any) -> jax.Array:
        clean_pass = tiny.clean_pass(TARGET, weights, tiny.TOKENS, term.error == "hidden_acts")
        reader = tiny.importance_reader(given.logits, clean_pass)
        return reconstruction(
            term, DecomposedBatch(clean_pass, given.components, reader), jax.random.key(0), given.bundle
        )[0]

    with jax.enable_x64(True), mock.patch.object(recon, "run_masked", counted):
        jax.eval_shape(value, given.weights)
    run_together = [len(call.args[1]) for call in counted.call_args_list]
    assert run_together == [1] * (expected if isinstance(term.sources, FreshAttack) else 0) + [expected]
    assert n_forwards(term, N_SITES) == expected
