"""Sites `<module>.pre_identity`: an identity put before a matrix, decomposed like any other."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from param_decomp_jax.ci import GlobalMLP, LayerwiseMLP
from param_decomp_jax.decomposition.components import Factors
from param_decomp_jax.decomposition.schedules import Anneal, Schedule
from param_decomp_jax.decomposition.sites import PRE_IDENTITY
from param_decomp_jax.method.adversary import AdamAscent, BroadcastAcrossBatch, PersistentAttack
from param_decomp_jax.method.clean_pass import DecomposedBatch
from param_decomp_jax.method.losses import Faithfulness, ImportanceMinimality, Lp
from param_decomp_jax.method.masked import Stream
from param_decomp_jax.method.masks import Constant, ConstantSources
from param_decomp_jax.method.recon import AllSites, EachSite, Reconstruction, errors
from param_decomp_jax.method.routing import Everywhere, UniformKSubset
from param_decomp_jax.targets.llama import module_name
from tests.core import tiny, toys

FAITHFUL = Faithfulness("FaithfulnessLoss", 0.5)
IMPORTANCE = ImportanceMinimality("ImportanceMinimalityLoss", 0.03, Lp(Anneal(1.5, 1.0), eps=1e-6), beta=0.5)
HIDDEN_ACTS = Reconstruction("CIHiddenActsReconLoss", 0.9, AllSites(), Everywhere(), Constant(0.0), error="hidden_acts")
LAYERWISE = Reconstruction("CIMaskedReconLayerwiseLoss", 0.7, EachSite(), Everywhere(), Constant(0.0))
SUBSET = Reconstruction("CIMaskedReconSubsetLoss", 0.6, AllSites(), UniformKSubset(), Constant(0.0))
ATTACK = PersistentAttack(AdamAscent(Schedule(0.05), 0.5, 0.99), BroadcastAcrossBatch())
PERSISTENT = Reconstruction("PersistentPGDReconSubsetLoss", 0.5, AllSites(), UniformKSubset(), ATTACK)


def before(module: str) -> str:
    return module + PRE_IDENTITY


Q, UP = ([module_name(n, kind) for n in range(3)] for kind in ("q_proj", "up_proj"))
IN_LLAMA = {
    # Two alike layers: one with its module, one without.
    **dict.fromkeys(map(before, Q[:2]), 3), **dict.fromkeys(Q[:2], 4), **dict.fromkeys(map(before, UP[:2]), 5),
    # The last layer: the other way round.
    before(Q[2]): 4, before(UP[2]): 3, UP[2]: 6,
}  # fmt: skip
IN_RESIDUAL = {
    before("layers.0.mlp_in"): 4, before("layers.1.mlp_in"): 4, before("layers.2.mlp_out"): 3, "layers.2.mlp_out": 4,
}  # fmt: skip
IN_SPARSE = toys.with_identities(toys.EVERY_MATRIX, 3)


def test_an_identity_stands_before_its_module() -> None:
    """In canonical order, as wide as what the module reads, which it reads in its place; stacked over alike layers."""
    sites = tiny.target(chosen=dict(reversed(IN_LLAMA.items()))).sites
    assert [site.name for site in sites.all] == [
        *(name for n in range(2) for name in (before(Q[n]), Q[n], before(UP[n]))), before(Q[2]), before(UP[2]), UP[2],
    ]  # fmt: skip
    by_name = {site.name: site for site in sites.all}
    for module in (Q[0], UP[2]):
        identity, site = by_name[before(module)], by_name[module]
        assert (identity.d_in, identity.d_out) == (site.d_in, site.d_in)
        assert identity.reads == site.reads
        assert identity.layer == site.layer
    assert [(stack.name, stack.n_layers) for stack in sites.stacks][:3] == [
        ("layers.0-1.self_attn.q_proj.pre_identity", 2),
        ("layers.0-1.self_attn.q_proj", 2),
        ("layers.0-1.mlp.up_proj.pre_identity", 2),
    ]
    narrow = tiny.target(chosen={before(module_name(1, "down_proj")): 3}).sites.all[0]
    assert (narrow.d_in, narrow.d_out) == (tiny.CONFIG.d_mlp, tiny.CONFIG.d_mlp)


@pytest.mark.parametrize(
    ("module", "match"), [("layers.3.mlp.up_proj", "not matrices"), (before(before(UP[0])), "not matrices")]
)
def test_an_identity_before_nothing_is_refused(module: str, match: str) -> None:
    with pytest.raises(AssertionError, match=match):
        tiny.target(chosen={before(module): 3})


def without_identities(chosen: dict[str, int]) -> dict[str, int]:
    return {name.removesuffix(PRE_IDENTITY): 2 for name in chosen}


@pytest.mark.parametrize(
    ("make", "config", "chosen"),
    [
        (tiny.target, tiny.CONFIG, IN_LLAMA),
        (toys.target, toys.residual("gelu", "in_bias"), IN_RESIDUAL),
        (toys.target, toys.SPARSE, IN_SPARSE),
    ],
    ids=["Llama", "ResidMLP", "TMS"],
)
def test_the_clean_pass_is_the_same_with_and_without(make: Any, config: Any, chosen: dict[str, int]) -> None:
    """F3, F4: but for how XLA compiles the same operations beside others; an identity's input is its module's, its W
    the identity."""
    weights = tiny.weights() if make is tiny.target else toys.weights(config)
    inputs = tiny.TOKENS if make is tiny.target else toys.features(config)

    def clean(chosen: dict[str, int]) -> tuple[Any, Any, Any]:
        target = make(config, chosen)

        @jax.jit
        def run(weights: Any, inputs: jax.Array) -> tuple[Any, Any, Any]:
            clean_pass = tiny.clean_pass(target, weights, inputs, outputs=True)
            return clean_pass.forward.output, clean_pass.site_inputs, target.site_weights(weights)

        output, read, W = run(weights, jnp.asarray(inputs))
        return output, target.sites.unstack(read), target.sites.unstack(W)

    plain_output, plain_read, _ = clean(without_identities(chosen))
    output, read, W = clean(chosen)
    close = partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
    close(output, plain_output)
    assert any(name.endswith(PRE_IDENTITY) for name in read)
    for name, x in read.items():
        close(x, plain_read[name.removesuffix(PRE_IDENTITY)], err_msg=name)
        if name.endswith(PRE_IDENTITY):
            np.testing.assert_array_equal(W[name], np.eye(x.shape[-1]))


@pytest.mark.slow
@tiny.SLOW_IN_FP32
def test_step_of_a_llama(exact: bool) -> None:
    """Every way to be live: with the module or without it, in a stack or alone; hidden acts count the identities."""
    problem = tiny.problem(
        (HIDDEN_ACTS, PERSISTENT, IMPORTANCE, FAITHFUL), tiny.target(chosen=IN_LLAMA), ci=GlobalMLP((6, 5))
    )
    tiny.assert_step_is_the_reference(problem, tiny.weights(), tiny.TOKENS, exact)


@pytest.mark.slow
@tiny.SLOW_IN_FP32
def test_step_of_a_residual_mlp(exact: bool) -> None:
    """Layerwise, so that an identity is live alone; routed without a delta; C5 with V of the identity."""
    config = toys.residual("gelu", "in_bias", "out_bias")
    problem = tiny.problem(
        (HIDDEN_ACTS, LAYERWISE, SUBSET, IMPORTANCE, FAITHFUL),
        toys.target(config, IN_RESIDUAL), ci=LayerwiseMLP("mlp", (3,)), use_delta=False,
    )  # fmt: skip
    tiny.assert_step_is_the_reference(problem, toys.weights(config), toys.features(config), exact)


def test_components_that_make_up_the_identity_change_nothing() -> None:
    """F1 with V U = 1: the masked output is the clean one; with mask 0 it is not."""
    target = tiny.target(chosen={before(q): tiny.CONFIG.d_model for q in Q})
    (stack,) = target.sites.stacks
    identity = jnp.broadcast_to(jnp.eye(stack.d_in), (3, stack.d_in, stack.d_in))
    logits = {stack.name: jnp.zeros((3, *tiny.LEADING, stack.C))}
    streams = [Stream((0, 1, 2), ConstantSources(Constant(mask))) for mask in (1.0, 0.0)]

    @jax.jit
    def found() -> jax.Array:
        clean_pass = tiny.clean_pass(target, tiny.weights(), tiny.TOKENS)
        components = {stack.name: Factors(identity, identity)}
        found, *_ = errors(
            DecomposedBatch(clean_pass, components, tiny.importance_reader(logits, clean_pass)), streams, ["output"] * 2
        )
        return found

    on, off = found()
    assert abs(float(on)) < 1e-6
    assert float(off) > 1e-3
