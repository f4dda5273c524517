"""Activations besides what matrices read: names, patterns, and what the clean pass records of them (R6)."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from param_decomp_jax.decomposition.sites import Sites
from param_decomp_jax.method.clean_pass import CleanPass
from param_decomp_jax.method.step import run_clean_pass
from param_decomp_jax.targets.base import choose_sites
from param_decomp_jax.targets.gpt import GPTConfig
from param_decomp_jax.targets.points import Point, UnfitPoints, match_points
from param_decomp_jax.targets.tms import TMSConfig
from tests import reference as ref
from tests.core import tiny, toys

POINTS = tiny.CONFIG.points()


def test_patterns() -> None:
    """A pattern may match several; each point once, in the network's order."""
    assert len(POINTS) == 3 * 4
    names = [point.name for point in match_points(POINTS, ("resid_post.*", "attn_out.1", "*_out.1"))]
    assert names == ["resid_post.0", "attn_out.1", "mlp_out.1", "resid_post.1", "resid_post.2"]


@pytest.mark.parametrize(
    ("points", "patterns", "words"),
    [
        (
            POINTS,
            ("resid_mid.0",),
            "'resid_mid.0' matches no point; there are resid_pre, attn_out,",
        ),
        (POINTS, ("resid_pre.*", "resid_post.1"), "resid_post.1 and resid_pre.2 are one activation"),
        (TMSConfig(4, 2).points(), ("*",), "no residual stream"),
    ],
)
def test_patterns_that_do_not_fit(points: tuple[Point, ...], patterns: tuple[str, ...], words: str) -> None:
    with pytest.raises(UnfitPoints, match=words):
        match_points(points, patterns)


def test_the_clean_pass_records_points() -> None:
    """Those of the reference, in layers of several scans, with sites and without; only what was asked for is kept."""
    chosen = {name: C for name, C in tiny.CHOSEN.items() if not name.startswith("layers.2")}
    target = tiny.target(chosen=chosen)
    asked = match_points(POINTS, ("resid_post.*", "attn_out.1", "mlp_out.2", "resid_pre.0"))
    want = ref.clean_points(tiny.ref_target(target, tiny.weights(), tiny.TOKENS))
    with jax.enable_x64(True):
        problem = tiny.in_float64(tiny.problem((), target))
        weights, ci = tiny.to_float64(tiny.weights()), tiny._ci_shapes(target.sites, True)
        clean_pass = jax.jit(lambda w, t: _found(run_clean_pass(problem, ci, w, t, False, asked)))(weights, tiny.TOKENS)
        for point in asked:
            found, squares = clean_pass[point.name]
            expected = want[tiny.ref_point(point.name)]
            np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)
            assert float(squares) == pytest.approx(float((expected**2).sum()), rel=1e-12)


def _found(clean_pass: CleanPass) -> dict[str, tuple[jax.Array, jax.Array]]:
    layers = {hook: sorted(n for own in by for n in own) for hook, by in clean_pass.points.items()}
    assert layers == {"hook_resid_post": [0, 1, 2], "hook_attn_out": [1], "hook_mlp_out": [2], "hook_resid_pre": [0]}
    assert not any(name.startswith("hook_") for own in clean_pass.forward.records.values() for name in own)
    return {
        name: (clean_pass.at_point(Point(int(name[-1]), name[:-2])), own)
        for name, own in clean_pass.point_squares.items()
    }


def test_points_of_other_targets() -> None:
    """What a layer adds to its residual stream is what its parts add; a ResidMLP has no attention."""
    gpt = GPTConfig(vocab_size=7, n_positions=6, d_model=4, n_layers=2, n_heads=2, d_mlp=6)
    toy = toys.residual()
    for architecture, inputs in ((gpt, tiny.TOKENS % 7), (toy, toys.features(toy))):
        weights = toys.weights(architecture)
        target = architecture.target(Sites(()))
        matrix = architecture.matrices()[0]
        target = replace(target, sites=choose_sites(architecture.matrices(), {matrix.name: 3}))
        asked = architecture.points()
        ci = tiny._ci_shapes(target.sites, False)
        x = run_clean_pass(tiny.problem((), target), ci, weights, jnp.asarray(inputs), False, asked)
        for layer in range(architecture.n_layers):
            at = {point.kind: x.at_point(point) for point in asked if point.layer == layer}
            added = sum(own for kind, own in at.items() if kind.endswith("_out"))
            np.testing.assert_allclose(at["resid_pre"] + added, at["resid_post"], rtol=1e-5, atol=1e-5)
            assert len(at) == (4 if architecture is gpt else 3)
