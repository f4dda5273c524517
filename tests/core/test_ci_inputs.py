"""F5: what the sites read on the clean pass, kept or made again: constants, and the same either way."""

import dataclasses
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from param_decomp_jax.ci import CIConfig, GlobalMLP, GlobalTransformer, LayerwiseMLP, LazyLogits, init_ci
from param_decomp_jax.ci.inputs import KeptInputs, RecomputedInputs
from param_decomp_jax.method.step import Problem, causal_importance, run_clean_pass
from param_decomp_jax.sharding.memory import INTERMEDIATES, PLAIN, MemoryPolicy
from param_decomp_jax.targets.llama import module_name
from param_decomp_jax.targets.plain_linears import RESIDUAL
from tests.cases import slow_but
from tests.core import tiny, toys
from tests.core.test_identity_sites import IN_LLAMA, IN_RESIDUAL, IN_SPARSE

EVERYTHING = frozenset(INTERMEDIATES)
KEPT = MemoryPolicy(save=EVERYTHING - {"logits"})
REPLAYED = MemoryPolicy(save=EVERYTHING - {"logits", "site_inputs"})
RECOMPUTED = MemoryPolicy(save=EVERYTHING - {"logits", "site_inputs", "ci"}, layers="unroll")

# Layers without a site before, between and behind those with one; sites that read the same activation.
WITH_GAPS = {module_name(1, "k_proj"): 3, module_name(1, "v_proj"): 4, module_name(3, "down_proj"): 5}
RESIDUAL_MLP = toys.residual("gelu", "in_bias", "out_bias")
FIVE_LAYERS = dataclasses.replace(tiny.CONFIG, n_layers=5)
CASES: dict[str, tuple[Any, Any, Any, CIConfig]] = {
    "Llama, transformer": (tiny.target(), tiny.weights(), tiny.TOKENS, tiny.TRANSFORMER),
    "Llama with gaps, MLP": (
        tiny.target(FIVE_LAYERS, WITH_GAPS), tiny.weights(FIVE_LAYERS), tiny.TOKENS, GlobalMLP((6, 5)),
    ),
    "Llama with gaps, a transformer for both layers": (
        tiny.target(FIVE_LAYERS, WITH_GAPS), tiny.weights(FIVE_LAYERS), tiny.TOKENS,
        dataclasses.replace(tiny.CHUNKWISE, layers_per_chunk=2),
    ),
    "Llama with identities, MLP": (tiny.target(chosen=IN_LLAMA), tiny.weights(), tiny.TOKENS, GlobalMLP((5,))),
    "residual MLP with identities, transformer": (
        toys.target(RESIDUAL_MLP, IN_RESIDUAL), toys.weights(RESIDUAL_MLP), toys.features(RESIDUAL_MLP),
        GlobalTransformer(4, 1, (5,), n_heads=2, max_len=1),
    ),
    "TMS with identities, MLP": (
        toys.target(toys.SPARSE, IN_SPARSE), toys.weights(toys.SPARSE), toys.features(toys.SPARSE), GlobalMLP((6,)),
    ),
}  # fmt: skip


FAST = ("Llama with identities, MLP", "TMS with identities, MLP")


def problem_of(case: str, memory: MemoryPolicy) -> Problem:
    target, _, _, ci = CASES[case]
    return tiny.in_float64(tiny.problem((), dataclasses.replace(target, memory=memory), ci=ci))


def leading_of(case: str) -> tuple[int, ...]:
    target, _, inputs, _ = CASES[case]
    return tiny.leading_axes(target, inputs)


@cache
def features_and_gradients(case: str, memory: MemoryPolicy) -> Any:
    """In float64: the shared features, and the gradients of a projection of them by the CI function and the weights."""
    problem = problem_of(case, memory)
    _, weights, inputs, _ = CASES[case]
    state = tiny.ruffled_state(problem, leading=leading_of(case))

    def projected(ci: Any, weights: Any, components: Any) -> tuple[jax.Array, Any]:
        clean_pass = run_clean_pass(problem, ci, weights, jnp.asarray(inputs), False)
        assert isinstance(clean_pass.ci_inputs, KeptInputs if "site_inputs" in memory.save else RecomputedInputs)
        ci_outputs = causal_importance(problem, clean_pass, components, ci)
        assert isinstance(ci_outputs, LazyLogits)
        # Of every layer, where a transformer is a layer's own.
        features = jnp.concatenate([x.reshape(-1, x.shape[-1]) for x in jax.tree.leaves(ci_outputs.features)])
        to = jnp.asarray(np.random.default_rng(0).normal(size=features.shape))
        return jnp.sum(features * to), features

    with jax.enable_x64(True):
        args = tiny.to_float64((state.ci, weights, state.components))
        return jax.device_get(jax.jit(jax.grad(projected, argnums=(0, 1), has_aux=True))(*args))


@pytest.mark.parametrize("memory", [REPLAYED, pytest.param(RECOMPUTED, marks=pytest.mark.slow)], ids=["again", "both"])
@pytest.mark.parametrize("case", slow_but(FAST, CASES))
def test_kept_or_made_again(case: str, memory: MemoryPolicy) -> None:
    """To the features, and back to every parameter of the CI function's shared part."""
    ((want, _), wanted), ((got, of_weights), found) = (features_and_gradients(case, of) for of in (KEPT, memory))
    assert tiny.deviation(wanted, found) <= 1e-11
    assert max(map(tiny.deviation, jax.tree.leaves(want), jax.tree.leaves(got))) <= 1e-11
    joint = want.project if hasattr(want, "project") else want.first
    assert all(np.linalg.norm(row) > 1e-6 for rows in joint.rows.values() for row in rows), "every site is read"
    assert not any(np.any(x) for x in jax.tree.leaves(of_weights)), "F5: inputs are constants"


@pytest.mark.parametrize("case", ["Llama, transformer", "TMS with identities, MLP"])
def test_inputs_that_are_kept_are_constants(case: str) -> None:
    """F5: no loss moves anything through what a site read."""
    target, weights, inputs, _ = CASES[case]

    def total(weights: Any) -> jax.Array:
        clean_pass = tiny.clean_pass(target, weights, inputs)
        return sum(
            jnp.sum(x)
            for x in jax.tree.leaves(
                (clean_pass.site_inputs, dict(clean_pass.forward.records), clean_pass.forward.output)
            )
        )

    assert not any(np.any(x) for x in jax.tree.leaves(jax.jit(jax.grad(total))(weights)))


def test_what_is_made_again_is_not_recorded() -> None:
    """Of a clean pass the residuals alone; a layerwise CI function reads site by site and has its inputs kept."""
    case = "Llama, transformer"
    target, weights, inputs, _ = CASES[case]

    def recorded(ci: CIConfig, memory: MemoryPolicy) -> tuple[set[str], set[str]]:
        problem = tiny.problem((), dataclasses.replace(target, memory=memory), ci=ci)
        function = jax.eval_shape(lambda: init_ci(ci, jax.random.key(0), target.sites))
        names: list[set[str]] = []

        def clean(weights: Any) -> Any:
            clean_pass = run_clean_pass(problem, function, weights, jnp.asarray(inputs), False)
            names.append({name for of_layers in clean_pass.forward.records.values() for name in of_layers})
            names.append(set(clean_pass.site_inputs))
            return clean_pass.forward.output

        jax.eval_shape(clean, weights)
        return names[0], names[1]

    read = {site.reads for site in target.sites.all}
    stacks = {stack.name for stack in target.sites.stacks}
    everything = {RESIDUAL, *read}, stacks
    assert recorded(tiny.TRANSFORMER, PLAIN) == everything
    assert recorded(tiny.TRANSFORMER, REPLAYED) == ({RESIDUAL}, set())
    assert recorded(LayerwiseMLP("mlp", (3,)), REPLAYED) == everything
