"""Tied weights (T4): one trained pair for two sites."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from param_decomp_jax.ci import LayerwiseMLP
from param_decomp_jax.decomposition.components import Factors, with_views
from param_decomp_jax.decomposition.schedules import Anneal
from param_decomp_jax.decomposition.sites import Site, Sites
from param_decomp_jax.method.losses import Faithfulness, ImportanceMinimality, Lp, faithfulness
from param_decomp_jax.method.masks import Stochastic
from param_decomp_jax.method.recon import AllSites, EachSite, Reconstruction
from param_decomp_jax.method.routing import Everywhere
from param_decomp_jax.method.state import FaithfulnessWarmup, init_state
from param_decomp_jax.method.step import Problem, warmup_step, warmup_transformation
from param_decomp_jax.sharding.memory import PLAIN
from tests import reference as ref
from tests.core import tiny, toys

CONFIG, WEIGHTS, FEATURES = toys.SPARSE, toys.weights(toys.SPARSE), toys.features(toys.SPARSE)
FAITHFUL = Faithfulness("FaithfulnessLoss", 0.5)
IMPORTANCE = ImportanceMinimality("ImportanceMinimalityLoss", 0.03, Lp(Anneal(1.0, 1.0), eps=1e-6), beta=0.5)
STOCHASTIC = Reconstruction("StochasticReconLoss", 1.0, AllSites(), Everywhere(), Stochastic())
LAYERWISE = Reconstruction("StochasticReconLayerwiseLoss", 1.0, EachSite(), Everywhere(), Stochastic())
OTHER_ORDER = (("linear2", "linear1"),)


def problem(*terms: Any, tied: tuple[tuple[str, str], ...] = toys.TIED, **changes: Any) -> Problem:
    return tiny.problem(terms, toys.target(CONFIG, toys.EVERY_MATRIX, tied), **changes)


@pytest.mark.slow
@tiny.SLOW_IN_FP32
def test_the_published_step(exact: bool) -> None:
    """TMS with a tie, a stack of two hidden layers, and C5: V of the second site sends gradient to U of the first.

    The tie counts once in the norm by which the gradients are clipped.
    """
    published = problem(STOCHASTIC, LAYERWISE, IMPORTANCE, FAITHFUL, ci=LayerwiseMLP("mlp", (4,)))
    tiny.assert_step_is_the_reference(published, WEIGHTS, FEATURES, exact)


@pytest.mark.slow
def test_importance_alone_moves_both_factors() -> None:
    """C5 under T4: `mlp` reads V of both sites, and V of the second one is U of the first."""
    of_importance = problem(IMPORTANCE, ci=LayerwiseMLP("mlp", (4,)))
    state = tiny.ruffled_state(of_importance, seed=5, leading=(toys.ROWS,))
    gradients = tiny.jit_step(of_importance, state, WEIGHTS, jnp.asarray(FEATURES)).gradients.components
    pair = gradients["linear1"]
    assert jnp.linalg.norm(pair.V) > 1e-4
    assert jnp.linalg.norm(pair.U) > 1e-4
    assert not np.any(gradients["hidden_layers.0-1"].U)


@pytest.mark.parametrize("tied", [toys.TIED, OTHER_ORDER], ids=["in order", "against it"])
def test_faithfulness_warmup(tied: tuple[tuple[str, str], ...]) -> None:
    """T3: L1 counts both sites, its optimiser the pair once."""
    warming = problem(FAITHFUL, tied=tied, warmup=FaithfulnessWarmup(steps=4, lr=1e-2, weight_decay=0.1))
    sites = warming.target.sites
    components = tiny.ruffled_state(warming, leading=(toys.ROWS,)).components
    clean = ref.clean_pass(tiny.ref_target(warming.target, WEIGHTS, FEATURES), [site.name for site in sites.all])
    want = ref.faithfulness_warmup(tiny.ref_components(components, sites), clean.weights, tiny.schema(warming))
    with jax.enable_x64(True):
        components, weights = tiny.to_float64(components), tiny.to_float64(WEIGHTS)
        moments = warmup_transformation(warming).init(components)
        step = jax.jit(warmup_step, static_argnums=0)
        for _ in range(4):
            components, moments, _ = step(warming, components, moments, weights)
        tiny.assert_alike(want, tiny.ref_components(components, sites), 1e-9)
    assert want.keys() == {tied[0][0], "hidden_layers.0", "hidden_layers.1"}


@pytest.mark.parametrize("tied", [toys.TIED, OTHER_ORDER], ids=["in order", "against it"])
def test_one_trained_pair(tied: tuple[tuple[str, str], ...]) -> None:
    """One entry in components and moments; CI heads and sources are of every site."""
    of_tie = problem(STOCHASTIC, tied=tied)
    state = jax.eval_shape(lambda: init_state(of_tie.decomposition, of_tie.target.sites, (toys.ROWS,)))
    trained = {tied[0][0], "hidden_layers.0-1"}
    assert set(state.components) == trained
    for part in (state.components_moments[0].mu, state.components_moments[0].nu):
        assert set(part) == trained
    assert set(state.ci.heads) == {"linear1", "hidden_layers.0-1", "linear2"}


def test_views_are_transposes_and_gradients_add() -> None:
    sites = toys.target(CONFIG, toys.EVERY_MATRIX, toys.TIED).sites
    trained = tiny.ruffled_state(problem(FAITHFUL), leading=(toys.ROWS,)).components
    both = with_views(trained, sites)
    assert list(both) == [stack.name for stack in sites.stacks]
    np.testing.assert_array_equal(both["linear2"].V, trained["linear1"].U.transpose(0, 2, 1))
    np.testing.assert_array_equal(both["linear2"].U, trained["linear1"].V.transpose(0, 2, 1))
    # A linear function of all factors with one number for each: its gradients are these numbers, added up.
    numbers = jax.tree.map(lambda x: jnp.arange(x.size, dtype=x.dtype).reshape(x.shape) + x.shape[-1], both)

    def total(trained: Any) -> jax.Array:
        products = jax.tree.map(lambda x, n: jnp.sum(x * n), with_views(trained, sites), numbers)
        return sum(jax.tree.leaves(products))

    pair = jax.grad(total)(trained)["linear1"]
    first, second = numbers["linear1"], numbers["linear2"]
    np.testing.assert_array_equal(pair.V, first.V + second.U.transpose(0, 2, 1))
    np.testing.assert_array_equal(pair.U, first.U + second.V.transpose(0, 2, 1))


def test_faithfulness_counts_both_sites() -> None:
    """L1: a pair that explains the first site exactly leaves what the second is not its transpose."""
    W, other = jnp.asarray(WEIGHTS["linear1"]), jnp.asarray(WEIGHTS["linear2"])
    sites = toys.target(dataclasses.replace(CONFIG, n_hidden_layers=0), {"linear1": 5, "linear2": 5}, toys.TIED).sites
    exact = with_views({"linear1": Factors(jnp.eye(5)[None], W[None])}, sites)
    got = faithfulness(exact, {"linear1": W[None], "linear2": other[None]}, PLAIN)
    assert float(got) == pytest.approx(float(jnp.sum((other - W.T) ** 2)) / (2 * W.size), rel=1e-5)


def test_a_tied_site_is_a_stack_of_its_own() -> None:
    """Layers otherwise alike are parted by a tie, and layers beside it stay together."""

    def layer(n: int) -> tuple[Site, Site]:
        return (
            Site(f"layers.{n}.mlp_in", n, "mlp_in", "x", 6, 4, 5),
            Site(f"layers.{n}.mlp_out", n, "mlp_out", "h", 4, 6, 5),
        )

    sites = Sites(tuple(site for n in range(5) for site in layer(n)), (("layers.2.mlp_in", "layers.2.mlp_out"),))
    assert [(s.first, s.stop) for s in sites.segments] == [(0, 2), (2, 3), (3, 5)]
    assert sites.views == {"layers.2.mlp_out": "layers.2.mlp_in"}


def test_impossible_ties_are_refused() -> None:
    a, b = Site("a", 0, "a", "x", 5, 3, 4), Site("b", 1, "b", "h", 3, 5, 4)
    Sites((a, b), (("a", "b"),))
    for other in (dataclasses.replace(b, C=5), dataclasses.replace(b, d_in=5, d_out=3)):
        with pytest.raises(AssertionError, match="cannot be tied"):
            Sites((a, other), (("a", "b"),))
    with pytest.raises(AssertionError, match="tied twice"):
        Sites((a, b, dataclasses.replace(b, name="c")), (("a", "b"), ("a", "c")))
