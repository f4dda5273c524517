"""Nonlinearity locality (L7): whole steps against the reference, and what the soft count counts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from param_decomp_jax.ci import LayerwiseMLP
from param_decomp_jax.decomposition.components import Factors
from param_decomp_jax.decomposition.schedules import Knot, Knots, Schedule
from param_decomp_jax.decomposition.sites import Units
from param_decomp_jax.method.locality import NonlinearityLocality, nonlinearity_locality, soft_counts
from param_decomp_jax.method.losses import Faithfulness
from param_decomp_jax.sharding.mesh import MeshShape
from tests import reference as ref
from tests.core import tiny, toys
from tests.core.test_devices import CHOSEN, CONFIG, LEADING, assert_eight_is_one

BOTH = (("neuron", 0.7), ("attention_head", 1.3))
FALLING = Knots(0.5, (Knot(0.0, 1.0), Knot(1.0, 0.2, "cosine")))
NAME = "NonlinearityLocalityLoss"
EVERY_KIND = {
    f"layers.0.{kind}": C
    for kind, C in {
        "self_attn.q_proj": 3, "self_attn.k_proj": 4, "self_attn.v_proj": 4, "self_attn.o_proj": 5,
        "mlp.gate_proj": 3, "mlp.up_proj": 4, "mlp.down_proj": 6,
    }.items()
} | {"layers.1.self_attn.o_proj.pre_identity": 2}  # fmt: skip


def test_a_step() -> None:
    """Every kind of matrix of a Llama with grouped queries; an identity, which faces nothing; a falling threshold."""
    terms = (
        NonlinearityLocality(NAME, Knots(0.8, (Knot(0.0, 0.5), Knot(1.0, 1.0))), BOTH, FALLING, 10, True),
        NonlinearityLocality(f"{NAME}_2", 0.3, (("attention_head", 1.0),), 0.25, 10),
        Faithfulness("FaithfulnessLoss", 1.0),
    )
    problem = tiny.problem(terms, tiny.target(chosen=EVERY_KIND))
    state = tiny.ruffled_state(problem, seed=5)
    want = tiny.ref_step(problem, tiny.ref_state(state, problem.target.sites), tiny.weights(), tiny.TOKENS)
    with jax.enable_x64(True):
        exact, state = tiny.in_float64(problem), tiny.to_float64(state)
        got = tiny.jit_step(exact, state, tiny.to_float64(tiny.weights()), jnp.asarray(tiny.TOKENS))
        tiny.assert_step(exact, got, want, 1e-9)


def test_a_step_of_a_toy() -> None:
    term = NonlinearityLocality(NAME, 0.8, (("neuron", 0.6),), Schedule(0.4, "linear", 0.0, 0.5), 10)
    config = toys.residual()
    problem = tiny.problem((term,), toys.target(config, toys.EVERY_LAYER), ci=LayerwiseMLP("mlp", (3,)), batch_size=6)
    inputs = toys.features(config)
    state = tiny.ruffled_state(problem, seed=5, leading=(6,))
    want = tiny.ref_step(problem, tiny.ref_state(state, problem.target.sites), toys.weights(config), inputs)
    with jax.enable_x64(True):
        exact, state = tiny.in_float64(problem), tiny.to_float64(state)
        got = tiny.jit_step(exact, state, tiny.to_float64(toys.weights(config)), jnp.asarray(inputs))
        tiny.assert_step(exact, got, want, 1e-9)


@pytest.mark.slow
def test_eight_devices_are_one() -> None:
    term = NonlinearityLocality(NAME, 0.8, BOTH, 0.5, 10)
    of_devices = tiny.problem((term,), tiny.target(CONFIG, CHOSEN), ci=tiny.TRANSFORMER, batch_size=LEADING[0])
    assert_eight_is_one(of_devices, 2, MeshShape(2, 2, 2))


def test_what_is_counted() -> None:
    """With a threshold near 0, the units touched: a vector on k of them counts k; m times, and 0 for a zero vector."""
    U = np.zeros((1, 4, 6))
    U[0, 0, 1] = 2.0
    U[0, 1, [0, 2, 3]] = 1.0, -3.0, 0.5
    U[0, 2] = 1.0
    tiny_share = 1e-6
    with jax.enable_x64(True):

        def counted(units: Units, at_one: bool = False) -> np.ndarray:
            side = Factors(jnp.zeros((1, 5, 4)), jnp.asarray(U))
            if units.side == "input":
                side = Factors(jnp.asarray(U).mT, jnp.zeros((1, 4, 5)))
            return np.asarray(soft_counts(side, units, tiny_share, at_one))[0]

        for side in ("output", "input"):
            np.testing.assert_allclose(counted(Units("neuron", side, 6)), [1, 3, 6, 0], atol=1e-5)
            np.testing.assert_allclose(counted(Units("attention_head", side, 3, 2)), [2, 4, 6, 0], atol=1e-5)
        one = soft_counts(Factors(jnp.zeros((1, 5, 4)), jnp.asarray(U)), Units("neuron", "output", 6), 0.9, True)
        assert float(one[0, 0]) == pytest.approx(1.0, rel=1e-12)


def test_experts() -> None:
    """Every expert's matrix counts; arrays have an axis of experts behind the layers."""
    rng = np.random.default_rng(3)
    factors = Factors(jnp.asarray(rng.normal(size=(2, 3, 4, 5))), jnp.asarray(rng.normal(size=(2, 3, 5, 6))))
    of_llama = tiny.target(chosen={"layers.0.mlp.up_proj": 5}).sites
    found = soft_counts(factors, of_llama.stacks[0].faces, 0.3, False)
    assert found.shape == (2, 3, 5)
    U = np.asarray(factors.U, np.float64)
    for at in np.ndindex(2, 3):
        np.testing.assert_allclose(
            found[at], ref.soft_counts(U[at], ref.Units("output", "neuron", 6), 0.3, False), 1e-5
        )


def test_tied_sites_both_count() -> None:
    """T4: a pair's views face their own units."""
    sites = tiny.target(chosen={"layers.0.mlp.up_proj": 3, "layers.0.mlp.down_proj": 3}).sites
    rng = np.random.default_rng(3)
    components = {
        stack.name: Factors(jnp.asarray(rng.normal(size=(1, s.d_in, 3))), jnp.asarray(rng.normal(size=(1, 3, s.d_out))))
        for stack, s in zip(sites.stacks, sites.all, strict=True)
    }
    found = nonlinearity_locality(components, sites, (("neuron", 2.0),), 0.3)
    by_site = {
        site.name: {"V": np.asarray(own.V[0], np.float64), "U": np.asarray(own.U[0], np.float64)}
        for site, own in zip(sites.all, components.values(), strict=True)
    }
    units = ref.faced_units({site.name: np.zeros((site.d_in, site.d_out)) for site in sites.all})
    assert float(found) == pytest.approx(float(ref.nonlinearity_locality(by_site, units, {"neuron": 2.0}, 0.3)), 1e-5)
