"""Alike layers that do not run in one scan: segments end where a group of layers ends."""

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from param_decomp_jax.ci import GlobalMLP
from param_decomp_jax.method.inspection import loss_and_gradients, stack_sites, unstack_sites
from param_decomp_jax.method.masks import Stochastic
from param_decomp_jax.method.recon import EachSite, Reconstruction
from param_decomp_jax.method.routing import Everywhere
from param_decomp_jax.sharding.memory import INTERMEDIATES, MemoryPolicy
from param_decomp_jax.targets.base import UniformLayers, choose_sites
from param_decomp_jax.targets.resid_mlp import ResidMLP
from tests.core import tiny, toys

CONFIG = toys.residual()
TERM = Reconstruction("StochasticReconLayerwiseLoss", 0.7, EachSite(), Everywhere(), Stochastic())
# Site inputs are recomputed segment by segment, too.
LEAN = MemoryPolicy(save=frozenset(INTERMEDIATES) - {"site_inputs", "logits"})
ONE_GROUP = toys.target(CONFIG, toys.EVERY_LAYER)


class TwoGroups(ResidMLP):
    """Layers 0 and 1 run in one scan, layer 2 in another, though all three are alike."""

    def uniform_layers(self, weights: Any) -> Sequence[UniformLayers]:
        (layers,) = super().uniform_layers(weights)
        return tuple(layers._replace(weights=layers.slice_weights(a, b), first=a, stop=b) for a, b in ((0, 2), (2, 3)))


def two_groups(named: bool) -> TwoGroups:
    """``named``: the matrices say which group their layer is in."""
    matrices = CONFIG.matrices()
    if named:
        matrices = tuple(dataclasses.replace(m, group=m.layer // 2) for m in matrices)
    return TwoGroups(CONFIG, choose_sites(matrices, toys.EVERY_LAYER))


def loss_and_factor_gradients(target: ResidMLP) -> Any:
    """From the same state whatever the stacks, by site."""
    target = dataclasses.replace(target, memory=LEAN)
    state = tiny.ruffled_state(tiny.problem((TERM,), ONE_GROUP, ci=GlobalMLP((4,))), leading=(toys.ROWS,))

    def moved(stacked: Any) -> Any:
        return stack_sites(target.sites, unstack_sites(ONE_GROUP.sites, stacked))

    first = dataclasses.replace(state.ci.first, rows=moved(state.ci.first.rows))
    ci = dataclasses.replace(state.ci, first=first, heads=moved(state.ci.heads))
    state = dataclasses.replace(state, components=moved(state.components), ci=ci)
    call = jax.jit(partial(loss_and_gradients, tiny.problem((TERM,), target, ci=GlobalMLP((4,)))))
    losses, gradients = call(state, toys.weights(CONFIG), jnp.asarray(toys.features(CONFIG)))
    return losses["loss/total"], unstack_sites(target.sites, gradients.components)


@pytest.mark.slow
def test_two_groups_are_two_segments_and_no_number_changes() -> None:
    want, got = loss_and_factor_gradients(ONE_GROUP), loss_and_factor_gradients(two_groups(named=True))
    assert [(s.first, s.stop) for s in two_groups(named=True).sites.segments] == [(0, 2), (2, 3)]
    assert max(map(tiny.deviation, jax.tree.leaves(want), jax.tree.leaves(got))) <= 1e-5


def test_a_segment_in_two_groups_is_refused() -> None:
    """It would be scanned with the weights of one of them."""
    with pytest.raises(AssertionError, match="layers 0 to 2 form one segment, but layer 2 begins another"):
        loss_and_factor_gradients(two_groups(named=False))
