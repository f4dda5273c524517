"""L0, routing and statistics of experts' matrices (X4) against NumPy, from importances at every position."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from param_decomp_jax.analysis.importances import read_batch, site_logits
from param_decomp_jax.ci import GlobalMLP
from param_decomp_jax.decomposition.components import with_views
from param_decomp_jax.method.masks import Stochastic
from param_decomp_jax.method.state import Learned
from param_decomp_jax.sharding.memory import MemoryPolicy
from param_decomp_lab.eval.examples import n_shown
from param_decomp_lab.metrics import CI_L0, CIActiveCountsPerPosition
from param_decomp_lab.metrics.active_per_position import THRESHOLDS
from param_decomp_lab.metrics.batch import Batch
from param_decomp_lab.metrics.snapshot import Snapshot
from param_decomp_lab.metrics.statistics import BINS, Statistics, batch_statistics
from tests import reference as ref
from tests.core import tiny
from tests.core.test_experts import CONFIG

THRESHOLD = 0.3
LAZY = MemoryPolicy(save=frozenset({"layers", "ci", "vocabulary", "attention"}), component_block=2)


@pytest.mark.parametrize(
    "memory", [pytest.param(MemoryPolicy(), id="kept"), pytest.param(LAZY, id="lazy", marks=pytest.mark.slow)]
)
def test_evaluated_where_they_are_taken(memory: MemoryPolicy) -> None:
    experts = dataclasses.replace(CONFIG.experts, dense_layers=(0,))  # type: ignore[type-var]
    config = dataclasses.replace(CONFIG, n_layers=2, experts=experts, qk_norm=None)
    chosen = {m.name: 4 for m in config.matrices() if m.expert is not None and m.kind.endswith("up_proj")}
    chosen |= {"layers.0.mlp.up_proj": 4}
    problem = tiny.problem((), tiny.target(config, chosen, memory), ci=GlobalMLP((6,)), memory=memory)
    state, weights, tokens = tiny.ruffled_state(problem), tiny.weights(config), jnp.asarray(tiny.TOKENS)
    sites = problem.target.sites
    metrics = [CI_L0(type="CI_L0", groups=None, ci_alive_threshold=threshold) for threshold in (0.0, THRESHOLD)]

    by_position = CIActiveCountsPerPosition(type="CIActiveCountsPerPosition")

    @jax.jit
    def measured(learned: Learned, weights: Any) -> Any:
        components = with_views(learned.components, sites)
        read = read_batch(problem, learned._replace(components=components), weights, tokens)
        batch = Batch(read.clean_pass, components, read.reader, Stochastic(), jax.random.key(0))
        statistics = batch_statistics(batch, THRESHOLD)
        logits = site_logits(problem, learned, weights, tokens, chosen)
        return CI_L0.measure_all(metrics, batch), by_position.measure(batch), statistics, logits

    l0, at_positions, statistics, logits = jax.device_get(measured(state.learned, weights))
    lower = {name: np.clip(z, 0, 1) for name, z in logits.items()}  # of −∞, 0
    exists = {name: np.isfinite(z).all(-1) for name, z in logits.items() if ref.expert_of(name)}
    assert all(0 < own.mean() < 1 for own in exists.values())

    of_sites = Statistics.over(sites, [statistics])
    snapshot = Snapshot(sites, None, lambda: of_sites, lambda _: {})
    row: dict[str, float] = {}
    for metric, means in zip(metrics, l0, strict=True):
        row |= metric.row(means, snapshot)
    expected = {f"eval/l0/{t}_{site}": mean for t in (0.0, THRESHOLD) for site, mean in ref.l0(lower, t).items()}
    routed = {f"eval/routed/{expert}": share for expert, share in ref.routed_shares(exists).items()}
    assert row == pytest.approx(expected | routed)
    assert list(row) == [*expected, *routed]  # once, after all of L0
    assert sum(row[key] for key in routed) == pytest.approx(experts.per_token)

    active = [sum((lam > t).sum(-1) for lam in lower.values()).mean(0) for t in THRESHOLDS]
    np.testing.assert_allclose(at_positions, np.stack(active, axis=-1), atol=1e-5)

    for name, lam in lower.items():
        np.testing.assert_allclose(of_sites.means[name], lam.mean((0, 1)), atol=1e-6)
        np.testing.assert_allclose(of_sites.densities[name], (lam > THRESHOLD).mean((0, 1)), atol=1e-6)
        at = lam[exists[name]] if name in exists else lam
        counts, _ = np.histogram(at, np.linspace(0, 1, BINS + 1))
        assert of_sites.counts[name].sum() == at.size
        assert np.abs(of_sites.counts[name] - counts).sum() <= 4  # of the edges of bins in fp32


def test_examples_of_many_sites_fit_a_page() -> None:
    assert [n_shown(n_sites) for n_sites in (1, 224, 768, 5000)] == [16, 16, 5, 1]


def test_many_experts_are_shown_together() -> None:
    """A panel for each layer and kind, with all components; every other site by itself."""
    rng = np.random.default_rng(0)
    experts = [f"layers.{n}.mlp.experts.{e}.{kind}_proj" for n in (0, 1) for kind in ("up", "down") for e in range(40)]
    names = [*experts, "layers.1.self_attn.q_proj"]
    means, densities = ({name: rng.random(3) for name in names} for _ in range(2))
    all_of_them = Statistics({name: rng.integers(0, 9, BINS) for name in names}, means, densities)
    shown = all_of_them.pooled()
    assert [*shown.counts] == [*shown.means] == [*shown.densities] == [
        *(f"layers.{n}.mlp.experts.*.{kind}_proj" for n in (0, 1) for kind in ("up", "down")), names[-1]
    ]  # fmt: skip
    assert sorted(shown.means["layers.1.mlp.experts.*.down_proj"]) == sorted(
        value for name in experts[-40:] for value in means[name]
    )
    assert sum(counts.sum() for counts in shown.counts.values()) == sum(c.sum() for c in all_of_them.counts.values())
    few = Statistics(*({name: x[name] for name in names[:60]} for x in vars(all_of_them).values()))
    assert few.pooled() is few
