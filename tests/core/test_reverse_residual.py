"""The CI function that reads blocks of sites along a residual: a step with it, its blocks, its initial weights.

Its logits and gradients are held against the reference in `test_ci.py`, as those of the others are.
"""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from param_decomp_jax.adversary import AdamAscent, BroadcastAcrossBatch, PersistentAttack
from param_decomp_jax.ci import (
    GlobalReverseResidual,
    SiteGroup,
    TransitionAttention,
    UnfitGroups,
    blocks_of_layers,
    init_ci,
)
from param_decomp_jax.losses import ImportanceMinimality, Lp
from param_decomp_jax.masks import Stochastic
from param_decomp_jax.memory import LEAN, PLAIN, MemoryPolicy
from param_decomp_jax.mesh import MeshShape
from param_decomp_jax.recon import AllSites, Reconstruction
from param_decomp_jax.routing import UniformKSubset
from param_decomp_jax.schedules import Anneal, Schedule
from param_decomp_jax.sites import Site, Sites
from param_decomp_jax.step import Problem
from tests.core import test_devices as devices
from tests.core import tiny, toys
from tests.core.test_ci import KEY, assert_mlp, assert_normal

TERMS = (
    ImportanceMinimality("ImportanceMinimalityLoss", 0.03, Lp(Anneal(2.0, 0.5, 0.0, 0.6), eps=1e-6), beta=0.5),
    Reconstruction("StochasticReconSubsetLoss", 0.7, AllSites(), UniformKSubset(), Stochastic()),
)
LASTING = Reconstruction(
    "PersistentPGDReconSubsetLoss", 0.4, AllSites(), UniformKSubset(),
    PersistentAttack(AdamAscent(Schedule(0.05)), BroadcastAcrossBatch(), n_warmup_steps=2),
)  # fmt: skip
READER = GlobalReverseResidual(
    8,
    # The first two cut the stacks of layers 0 and 1.
    (SiteGroup("a", ("layers.0.*",)), SiteGroup("b", ("layers.1.*",)), SiteGroup("c", ("*.2.*",))),
    (6,),
    TransitionAttention(2, max_len=8),
    transition_hidden=5,
)
TOY = toys.residual("gelu", "in_bias", "out_bias")
TOY_SITES = {"layers.0.mlp_in": 4, "layers.0.mlp_out": 3, "layers.1.mlp_in": 4, "layers.1.mlp_out": 3}
TOY_READER = dataclasses.replace(
    READER, groups=(SiteGroup("0", ("layers.0.*",)), SiteGroup("1", ("layers.1.*",))), reader_hidden=(), attention=None
)


@pytest.mark.slow
@tiny.SLOW_IN_FP32
def test_a_step_is_the_reference(exact: bool) -> None:
    """Without a hidden layer in the readers and without attention."""
    problem = tiny.problem(TERMS, toys.target(TOY, TOY_SITES), ci=TOY_READER)
    tiny.assert_step_is_the_reference(problem, toys.weights(TOY), toys.features(TOY), exact)


@pytest.mark.slow
def test_a_step_on_a_llama_is_the_reference() -> None:
    """In float64 alone: in fp32 the gradients of q and k, small differences of large numbers here, are 3e-5 away."""
    problem = tiny.problem((*TERMS, LASTING), ci=READER)
    tiny.assert_step_is_the_reference(problem, tiny.weights(), tiny.TOKENS, exact=True)


@pytest.mark.slow
def test_one_device_is_eight() -> None:
    """Split over all axes of the mesh, most levers of memory on."""
    terms = devices.terms_with(devices.attacked("PersistentPGDReconLoss", BroadcastAcrossBatch(), 1), TERMS[1])
    target = tiny.target(devices.CONFIG, devices.CHOSEN)
    problem = tiny.problem(terms, target, ci=READER, batch_size=devices.LEADING[0])
    devices.assert_eight_is_one(problem, 2, MeshShape(2, 2, 2))


@pytest.mark.slow
@pytest.mark.parametrize(
    "policy",
    [
        dataclasses.replace(LEAN, component_block=2, token_block=4, attention="blocked"),
        dataclasses.replace(LEAN, micro_batches=2, attention="plain"),
        dataclasses.replace(PLAIN, micro_batches=2),
    ],
    ids=["lean, in blocks", "lean, in two parts", "plain, in two parts"],
)
def test_no_policy_changes_a_number(policy: MemoryPolicy) -> None:
    def outcome(memory: MemoryPolicy) -> Any:
        problem = tiny.in_float64(tiny.problem((*TERMS, LASTING), tiny.target(memory=memory), ci=READER, memory=memory))
        state, weights = map(tiny.to_float64, (tiny.ruffled_state(problem), tiny.weights()))
        return jax.device_get(tiny.jit_step(problem, state, weights, jnp.asarray(tiny.TOKENS)))

    with jax.enable_x64(True):
        want, got = outcome(PLAIN), outcome(policy)
    for a, b in ((want.metrics, got.metrics), (want.gradients, got.gradients), (want.state, got.state)):
        assert max(map(tiny.deviation, jax.tree.leaves(a), jax.tree.leaves(b))) <= 1e-9


# ---- blocks ----


def sites_of(*names: str) -> Sites:
    found = []
    for name in names:
        _, layer, kind = name.split(".")[:3]
        expert = int(name.split(".")[3]) if name.count(".") == 3 else None
        found.append(Site(name, int(layer), kind, "x", 40, 4, 30, expert=expert))
    return Sites(tuple(found))


def test_blocks_of_layers() -> None:
    sites = sites_of("layers.0.a", "layers.0.b", "layers.1.a", "layers.1.b", "layers.2.a", "layers.2.b")
    # With the prefix that names have in files, and without it.
    outer = (SiteGroup("outer", ("layers.[02].*",)), SiteGroup("inner", ("model.layers.1.*",), ("model.",)))
    assert blocks_of_layers(outer, sites) == {"layers.0-2.a": (0, 1, 0), "layers.0-2.b": (0, 1, 0)}


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ((SiteGroup("a", ("*.a",)),), r"layers\.0\.b is in none of the groups"),
        ((SiteGroup("a", ("*",)), SiteGroup("b", ("*.b",))), r"layers\.0\.b is in a and b of the groups"),
        ((SiteGroup("a", ("*",)), SiteGroup("c", ("*.c", "d"))), r"group c has no site; its patterns are \*\.c, d"),
    ],
)
def test_groups_that_do_not_fit(groups: tuple[SiteGroup, ...], message: str) -> None:
    with pytest.raises(UnfitGroups, match=message):
        blocks_of_layers(groups, sites_of("layers.0.a", "layers.0.b"))


def test_experts_of_a_layer_are_in_one_block() -> None:
    sites = sites_of("layers.0.up.0", "layers.0.up.1", "layers.1.up.0", "layers.1.up.1")
    layers = (SiteGroup("0", ("layers.0.*",)), SiteGroup("1", ("layers.1.*",)))
    assert list(blocks_of_layers(layers, sites).values()) == [(0, 1)]
    with pytest.raises(UnfitGroups, match="are in several groups; those of one layer must be in one"):
        blocks_of_layers((SiteGroup("0", ("*.0",)), SiteGroup("1", ("*.1",))), sites)


def test_blocks_of_layers_that_are_not_consecutive() -> None:
    """A block reads its own layers of a stack, in their order."""
    sites = sites_of("layers.0.a", "layers.1.a", "layers.2.a")
    config = GlobalReverseResidual(
        6, (SiteGroup("outer", ("layers.[02].*",)), SiteGroup("inner", ("layers.1.*",))), (4,)
    )
    ci: Any = jax.eval_shape(partial(init_ci, config, sites=sites), KEY)
    assert {n: block.project.rows["layers.0-2.a"].shape for n, block in enumerate(ci.blocks)} == {
        0: (2, 40, 6), 1: (1, 40, 6)
    }  # fmt: skip
    x = jnp.arange(3.0)[:, None, None] + jnp.zeros((3, 2, 40))
    assert ci._of_block({"layers.0-2.a": x}, 0)["layers.0-2.a"][:, 0, 0].tolist() == [0, 2]
    assert ci._of_block({"layers.0-2.a": x}, 1)["layers.0-2.a"][:, 0, 0].tolist() == [1]


# ---- initial values ----


@pytest.mark.slow
def test_initial_weights() -> None:
    """C4: gain √2 into the residual, over the width of the block's concatenation, and into hidden layers; 1 into the
    heads; attention is uniform; every block and transition has its own."""
    d, sites = 64, sites_of("layers.0.a", "layers.0.b", "layers.1.a", "layers.2.a")
    groups = tuple(SiteGroup(str(n), (f"layers.{n}.*",)) for n in range(3))
    config = GlobalReverseResidual(d, groups, (70, 50), TransitionAttention(4), 90)
    ci: Any = jax.jit(partial(init_ci, config, sites=sites))(KEY)
    for block, n_sites in zip(ci.blocks, (2, 1, 1), strict=True):
        for rows in block.project.rows.values():
            assert_normal(rows, (2 / (40 * n_sites)) ** 0.5)
        assert not np.any(block.project.b)
        for layer, fan_in in zip(block.hidden, (d, 70), strict=True):
            assert_normal(layer.W, (2 / fan_in) ** 0.5)
            assert not np.any(layer.b)
    assert not np.array_equal(ci.blocks[0].hidden[0].W, ci.blocks[1].hidden[0].W)
    assert len(ci.transitions) == 2
    bound = d**-0.5
    for transition in ci.transitions:
        assert_mlp(transition.mlp, (d, 90))
        for x in map(tiny.array, transition.attention):
            assert 0.999 * bound < np.abs(x).max() <= bound * (1 + 1e-6)
            assert x.std() == pytest.approx(bound / 3**0.5, rel=0.05)
    assert not np.array_equal(ci.transitions[0].attention[0], ci.transitions[1].attention[0])
    for stack in sites.stacks:
        assert_mlp((ci.heads[stack.name],), (50,))


def test_without_transitions() -> None:
    config = GlobalReverseResidual(4, (SiteGroup("0", ("layers.0.*",)), SiteGroup("1", ("layers.1.*",))), ())
    ci: Any = jax.eval_shape(partial(init_ci, config, sites=sites_of("layers.0.a", "layers.1.a")), KEY)
    assert [(t.attention, t.mlp) for t in ci.transitions] == [(None, None)]
    assert not [path for path, _ in jax.tree_util.tree_leaves_with_path(ci) if "transitions" in str(path[0])]


def test_sequences_beyond_max_len_are_refused() -> None:
    config = dataclasses.replace(READER, attention=TransitionAttention(2, max_len=4))
    problem: Problem = tiny.problem(TERMS, ci=config)
    with pytest.raises(AssertionError, match="sequence of 5 beyond max_len 4"):
        jax.eval_shape(
            lambda *a: tiny.step_outcome(problem, *a), tiny.ruffled_state(problem), tiny.weights(), tiny.TOKENS
        )
