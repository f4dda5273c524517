"""TMS and the residual MLP: the networks, whole training steps on inputs without a sequence axis, and F6."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from param_decomp_jax.ci import GlobalMLP, GlobalTransformer, LayerwiseMLP
from param_decomp_jax.decomposition.schedules import Anneal, Schedule
from param_decomp_jax.method.adversary import (
    AdamAscent,
    BroadcastAcrossBatch,
    FreshAttack,
    PerBatchPerPosition,
    PersistentAttack,
    RepeatAcrossBatch,
    SignAscent,
    SingleSource,
)  # fmt: skip
from param_decomp_jax.method.clean_pass import DecomposedBatch
from param_decomp_jax.method.losses import Faithfulness, ImportanceMinimality, Lp
from param_decomp_jax.method.masked import MaskedLinears, Stream
from param_decomp_jax.method.masks import Constant, ConstantSources, Stochastic
from param_decomp_jax.method.recon import AllSites, Chunks, EachSite, Reconstruction, run_masked
from param_decomp_jax.method.routing import Everywhere, UniformKSubset
from param_decomp_jax.method.step import Problem
from param_decomp_jax.targets.plain_linears import UNTOUCHED
from param_decomp_jax.targets.resid_mlp import ResidMLPConfig
from param_decomp_jax.targets.tms import TMSConfig
from tests.core import tiny, toys

FAITHFUL = Faithfulness("FaithfulnessLoss", 0.5)
IMPORTANCE = ImportanceMinimality("ImportanceMinimalityLoss", 0.03, Lp(Anneal(1.5, 1.0), eps=1e-6), beta=0.5)
HALF = ConstantSources(Constant(0.5))
ADAM = AdamAscent(Schedule(0.05, "linear", 0.5, 0.2), 0.5, 0.99)


# ---- the networks ----


@pytest.mark.parametrize(
    "config",
    [
        TMSConfig(5, 3),
        toys.SPARSE,
        toys.residual("relu"),
        toys.residual("gelu", "in_bias"),
        toys.residual("relu", "out_bias"),
        toys.residual("gelu", "in_bias", "out_bias"),
    ],
    ids=str,
)
def test_network(config: toys.Config) -> None:
    """As the issue describes them, every layer with its own weights."""
    target, weights, inputs = toys.target(config, {}), toys.weights(config), toys.features(config)
    want = tiny.ref_target(target, weights, inputs)(lambda module, x, W: x @ W)
    with jax.enable_x64(True):
        exact = dataclasses.replace(target, compute_dtype=jnp.float64)
        got = exact.forward(tiny.to_float64(weights), jnp.asarray(inputs), UNTOUCHED).output
    assert tiny.deviation(want, got) <= 1e-12


# ---- whole steps ----


def persistent(attack: PersistentAttack) -> Reconstruction:
    return Reconstruction("PersistentPGDReconLoss", 0.5, AllSites(), Everywhere(), attack)


CASES: dict[str, Problem] = {
    # C5 with a tie across layers (T4): two segments, and a layer without sites between them.
    "mlp, leaky_hard, relu": tiny.problem(
        (
            Reconstruction("StochasticReconLayerwiseLoss", 0.7, EachSite(), Everywhere(), Stochastic()),
            IMPORTANCE,
            FAITHFUL,
        ),
        toys.target(
            toys.residual("relu", "in_bias", "out_bias"),
            {"layers.0.mlp_in": 5, "layers.2.mlp_in": 4, "layers.2.mlp_out": 5},
            (("layers.0.mlp_in", "layers.2.mlp_out"),),
        ),
        ci=LayerwiseMLP("mlp", (3,)),
    ),
    "vector_mlp, swish_hard, gelu": tiny.problem(
        (
            Reconstruction("ChunkwiseSubsetReconLoss", 0.7, Chunks(4), UniformKSubset(), Stochastic()),
            persistent(PersistentAttack(ADAM, RepeatAcrossBatch(2))),
            # υ of swish_hard falls a little below 0, where only an integer power is defined.
            dataclasses.replace(IMPORTANCE, penalty=Lp(Anneal(2.0, 2.0), eps=1e-6)),
        ),
        toys.target(toys.residual("gelu", "in_bias", "out_bias"), toys.EVERY_LAYER),
        ci=LayerwiseMLP("vector_mlp", (3,)),
        squashing="swish_hard",
    ),
    "shared_mlp, hard, relu, no delta": tiny.problem(
        (
            Reconstruction(
                "StochasticHiddenActsReconLoss", 0.9, AllSites(), Everywhere(), Stochastic(), error="hidden_acts"
            ),
            Reconstruction(
                "PersistentPGDReconSubsetLoss", 0.5, AllSites(), UniformKSubset(),
                PersistentAttack(ADAM, PerBatchPerPosition(), sigmoid=True, n_warmup_steps=1),
            ),
            IMPORTANCE,
            FAITHFUL,
        ),
        toys.target(toys.residual("relu"), toys.EVERY_LAYER),
        ci=LayerwiseMLP("shared_mlp", ()),
        squashing="hard",
        use_delta=False,
    ),
    "global_shared_mlp, upper_leaky_hard, gelu": tiny.problem(
        (
            Reconstruction("StochasticReconLoss", 0.8, AllSites(), Everywhere(), Stochastic("binomial")),
            persistent(PersistentAttack(ADAM, BroadcastAcrossBatch(), n_warmup_steps=1)),
            Reconstruction(
                "PGDReconLayerwiseLoss", 0.6, EachSite(), Everywhere(),
                FreshAttack("zeroes", 0.25, 2, "shared_across_batch"),
            ),
            IMPORTANCE,
        ),
        toys.target(
            toys.residual("gelu", "in_bias"), {"layers.0.mlp_in": 5, "layers.1.mlp_in": 5, "layers.2.mlp_out": 3}
        ),
        ci=GlobalMLP((6, 5)),
        squashing="upper_leaky_hard",
    ),
    "global_shared_transformer, normal, relu": tiny.problem(
        (
            persistent(PersistentAttack(SignAscent(Schedule(0.1)), SingleSource(), n_warmup_steps=1)),
            Reconstruction(
                "PGDReconLoss", 0.6, AllSites(), Everywhere(), FreshAttack("random", 0.125, 2, "unique_per_datapoint")
            ),
            Reconstruction("CIMaskedReconLayerwiseLoss", 0.4, EachSite(), Everywhere(), Constant(0.0)),
            IMPORTANCE,
        ),
        toys.target(
            toys.residual("relu", "out_bias"), {"layers.0.mlp_in": 4, "layers.1.mlp_in": 4, "layers.1.mlp_out": 3}
        ),
        ci=GlobalTransformer(4, 1, (5,), n_heads=2, max_len=1),
        squashing="normal",
    ),
}  # fmt: skip


FAST = ("shared_mlp, hard, relu, no delta",)


@tiny.SLOW_IN_FP32
@pytest.mark.parametrize("case", [pytest.param(case, marks=[] if case in FAST else pytest.mark.slow) for case in CASES])
def test_step(case: str, exact: bool) -> None:
    problem = CASES[case]
    config = problem.target.architecture
    tiny.assert_step_is_the_reference(problem, toys.weights(config), toys.features(config), exact)


# ---- F6 ----


def spoiled(weights: Any, config: toys.Config, layers: int) -> Any:
    """NaN in all that only the first ``layers`` layers read."""
    if isinstance(config, ResidMLPConfig):
        return {**weights, "layers": jax.tree.map(lambda w: w.at[:layers].set(jnp.nan), weights["layers"])}
    hidden = weights["hidden_layers"].at[: layers - 1].set(jnp.nan) if layers else weights["hidden_layers"]
    return {**weights, "linear1": weights["linear1"] * (jnp.nan if layers else 1), "hidden_layers": hidden}


@pytest.mark.parametrize(
    ("config", "chosen"),
    [
        (toys.SPARSE, toys.EVERY_MATRIX),
        (toys.residual("gelu", "in_bias", "out_bias"), toys.with_identities(toys.EVERY_LAYER, 2)),
    ],
    ids=["TMS", "ResidMLP"],
)
def test_a_forward_begins_at_its_first_live_layer(config: toys.Config, chosen: dict[str, int]) -> None:
    """From the clean residual of every layer, the middle of a stack too: the same, and nothing before it is run."""
    target, weights, inputs = toys.target(config, chosen), toys.weights(config), jnp.asarray(toys.features(config))
    sites = target.sites
    lives = [
        tuple(n for n, site in enumerate(sites.all) if site.layer >= layer)
        for layer in sorted({site.layer for site in sites.all})
    ]

    def outputs(components: Any, weights: Any, inputs: jax.Array) -> list[tuple[jax.Array, jax.Array]]:
        clean_pass = tiny.clean_pass(target, weights, inputs)
        logits = {s.name: jnp.full((s.n_layers, *clean_pass.leading, s.C), 0.3) for s in sites.stacks}
        reader = tiny.importance_reader(logits, clean_pass)
        pairs = []
        for live in lives:
            layer, stream = sites.all[live[0]].layer, Stream(live, HALF)
            late = dataclasses.replace(
                clean_pass, weights=spoiled(weights, config, layer), inputs=inputs * (jnp.nan if layer else 1)
            )
            # Run from the inputs, it does not look at the residual.
            nothing = clean_pass.residual(live) * jnp.nan
            records = clean_pass.forward.records
            full = MaskedLinears(
                sites, (stream,), (nothing,), components, reader, clean_pass.at, records, target.memory
            )
            [begun] = run_masked(DecomposedBatch(late, components, reader), [stream]).forwards
            pairs.append((target.forward(weights, inputs, full).output, begun.output))
        return pairs

    components = tiny.ruffled_state(tiny.problem((FAITHFUL,), target), leading=(toys.ROWS,)).components
    pairs = jax.jit(outputs)(components, weights, inputs)
    assert len(pairs) == (3 if isinstance(config, ResidMLPConfig) else 4)
    for full, begun in pairs:
        np.testing.assert_array_equal(begun, full)
    assert len({np.asarray(full).tobytes() for full, _ in pairs}) == len(pairs)
