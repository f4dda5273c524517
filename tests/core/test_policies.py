"""D4 for the memory policy: every lever on against off, and the presets against `PLAIN`, whole steps with gradients."""

import dataclasses
import functools
import inspect
import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from param_decomp_jax.method import adversary as adversary_module
from param_decomp_jax.method import losses as losses_module
from param_decomp_jax.method import masked as masked_module
from param_decomp_jax.method import objective as objective_module
from param_decomp_jax.method import recon as recon_module
from param_decomp_jax.method import step as step_module
from param_decomp_jax.method.recon import AllSites, Reconstruction
from param_decomp_jax.method.routing import Everywhere
from param_decomp_jax.method.step import Problem, training_step
from param_decomp_jax.nn import fused_kl as fused_kl_module
from param_decomp_jax.nn import numerics as numerics_module
from param_decomp_jax.sharding.by_layer import ByLayer
from param_decomp_jax.sharding.memory import (
    BALANCED,
    INTERMEDIATES,
    LEAN,
    ONE_CARD,
    PLAIN,
    PUBLISHED,
    STATE_PARTS,
    MemoryPolicy,
)
from param_decomp_jax.targets import decoder as decoder_module
from tests.cases import slow_but
from tests.core import tiny
from tests.core.test_step import CASES as OF_STEPS
from tests.core.test_step import CHUNKWISE, FAITHFUL, IMPORTANCE, PERSISTENT, wanted

TRANSFORMER, SHARED, SCALAR, NO_DELTA = OF_STEPS
LATE = "persistent terms that begin later (A6), one of them on"
CASES = {
    **OF_STEPS,
    LATE: tiny.problem(
        (
            FAITHFUL,
            *(
                Reconstruction(
                    name, 0.4, AllSites(), Everywhere(), dataclasses.replace(PERSISTENT, start_frac=start)
                )
                for name, start in (("on", 0.2), ("off", 0.9))
            ),
        ),
        ci=tiny.SHARED,
    ),
    "a CI transformer for each layer": tiny.problem(
        (FAITHFUL, IMPORTANCE, CHUNKWISE, Reconstruction("late", 0.4, AllSites(), Everywhere(), PERSISTENT)),
        ci=tiny.CHUNKWISE,
    ),
}  # fmt: skip
SMALL = {"component_block": 2, "vocabulary_block": 8}
EVERYTHING = frozenset(INTERMEDIATES)
POLICIES: dict[str, MemoryPolicy] = {
    "lean": dataclasses.replace(LEAN, **SMALL),
    "balanced": dataclasses.replace(BALANCED, **SMALL),
    "one_card": ONE_CARD,
    "published": PUBLISHED,
    "unroll": MemoryPolicy(layers="unroll"),
    "lazy logits": MemoryPolicy(save=EVERYTHING - {"logits"}),
    "lazy logits in blocks": MemoryPolicy(save=EVERYTHING - {"logits"}, component_block=2),
    "blocks": MemoryPolicy(component_block=2),
    "blocks of tokens": MemoryPolicy(token_block=8),
    "blocks of tokens and components, lazy": MemoryPolicy(
        save=EVERYTHING - {"logits"}, component_block=2, token_block=8
    ),
    "recomputed layers": MemoryPolicy(save=EVERYTHING - {"layers"}),
    "recomputed layers in groups": MemoryPolicy(save=EVERYTHING - {"layers"}, layer_group=2),
    "offloaded outputs": MemoryPolicy(
        save=EVERYTHING - {"layers", "site_outputs"}, offload=frozenset({"site_outputs"})
    ),
    "recomputed ci": MemoryPolicy(save=EVERYTHING - {"ci"}),
    "replayed site inputs": MemoryPolicy(save=EVERYTHING - {"site_inputs"}),
    "fused kl": MemoryPolicy(save=EVERYTHING - {"vocabulary"}, vocabulary_block=8),
    "offloaded moments": MemoryPolicy(offload_state=frozenset(STATE_PARTS)),
    "micro-batches": MemoryPolicy(micro_batches=2),
}


def under(problem: Problem, policy: MemoryPolicy) -> Problem:
    spec = dataclasses.replace(problem.decomposition, memory=policy)
    return Problem(spec, dataclasses.replace(problem.target, memory=policy))


@functools.cache
def outcome(case: str, policy: MemoryPolicy, exact: bool) -> Any:
    """State, metrics and gradients of a step, by path, as NumPy arrays."""
    problem, state, weights = under(CASES[case], policy), tiny.ruffled_state(CASES[case]), tiny.weights()
    with jax.enable_x64(exact):
        if exact:
            problem, state, weights = tiny.in_float64(problem), tiny.to_float64(state), tiny.to_float64(weights)
        got = tiny.jit_step(problem, state, weights, jnp.asarray(tiny.TOKENS))
        leaves = jax.tree_util.tree_leaves_with_path(got)
        found = {jax.tree_util.keystr(path): np.asarray(x) for path, x in leaves}
    jax.clear_caches()  # a hundred programs would be 10 GB
    return found


def assert_same(case: str, name: str, exact: bool) -> None:
    want, got = outcome(case, PLAIN, exact), outcome(case, POLICIES[name], exact)
    assert want.keys() == got.keys()
    deviations = {path: tiny.deviation(want[path], got[path]) for path in want}
    worst = max(deviations, key=lambda path: deviations[path])
    print(f"{case}, {name}: {deviations[worst]:.1e} at {worst}")
    assert deviations[worst] <= (1e-9 if exact else 2e-5), (worst, deviations[worst])


SAME_FOR_ALL = {
    objective_module: ["streams", "errors", "importance_minimality", "penalty_sum"],
    losses_module: ["faithfulness"],
    step_module: ["descend", "ascend"],
    masked_module: ["interpolate", "through_components", "past_components"],
    numerics_module: ["divergence_from"],
}
"""What computes losses and updates: of these there is one of each."""


def calls_in_a_step(policy: MemoryPolicy, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Which of these functions a step goes through, under this policy."""
    called: set[str] = set()

    def spied(name: str, function: Any) -> Any:
        def spy(*args: Any, **kwargs: Any) -> Any:
            called.add(name)
            return function(*args, **kwargs)

        return spy

    with monkeypatch.context() as patch:
        for module, names in SAME_FOR_ALL.items():
            for name in names:
                function = getattr(module, name)
                for user in (module, fused_kl_module, decoder_module):
                    if getattr(user, name, None) is function:
                        patch.setattr(user, name, spied(name, function))
        problem = under(CASES[TRANSFORMER], policy)
        state = tiny.ruffled_state(CASES[TRANSFORMER])
        jax.eval_shape(partial(training_step, problem), state, tiny.weights(), jnp.asarray(tiny.TOKENS))
    return called


@pytest.mark.parametrize(
    "preset",
    slow_but([LEAN], [PLAIN, ONE_CARD, LEAN, BALANCED, PUBLISHED]),
    ids=["plain", "one_card", "lean", "balanced", "published"],
)
def test_no_preset_has_losses_of_its_own(preset: MemoryPolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    """All go through the same functions, and none of these knows one preset from another."""
    everything = {name for names in SAME_FOR_ALL.values() for name in names}
    assert calls_in_a_step(preset, monkeypatch) == everything
    for module in (*SAME_FOR_ALL, recon_module, adversary_module):
        source = inspect.getsource(module)
        assert not re.search(r"\b(PLAIN|ONE_CARD|BALANCED|LEAN|PUBLISHED|preset)\b", source), module.__name__


COMBINED = ("lean", "one_card", "balanced", "published", "blocks of tokens and components, lazy")
ALL = [
    (case, name, exact)
    for p, name in enumerate(POLICIES)
    for c, case in enumerate(CASES)
    for exact in (True, False)
    # Each takes half a minute. What combines levers meets every case, a lever alone three of the six, by turns; in
    # float64, where a difference is one of the method. fp32 shows what rounding makes of a policy: one case each.
    if (name in COMBINED or (p + c) % 6 < 3 if exact else (p + c) % 6 == 0)
]


@pytest.mark.parametrize("name", ["lean", "one_card"])
def test_a_step_is_the_reference(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole step under the presets with the most levers: what they differ in from `PLAIN` would show here as well."""
    monkeypatch.setattr(masked_module, "may_share_rows", lambda dtype: True)  # as in bf16
    policy = POLICIES[name]
    with jax.enable_x64(True):
        state, weights = map(tiny.to_float64, (tiny.ruffled_state(CASES[TRANSFORMER]), tiny.weights()))
        if name == "one_card":
            weights["layers"] = {kind: ByLayer(tuple(W)) for kind, W in weights["layers"].items()}
            policy = dataclasses.replace(policy, save=policy.save - {"site_inputs"})  # which reads the layers too
        problem = tiny.in_float64(under(CASES[TRANSFORMER], policy))
        got = tiny.jit_step(problem, state, weights, jnp.asarray(tiny.TOKENS))
        tiny.assert_step(problem, got, wanted(TRANSFORMER), 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize(("case", "name", "exact"), ALL)
def test_a_policy_changes_no_number(case: str, name: str, exact: bool) -> None:
    assert_same(case, name, exact)
