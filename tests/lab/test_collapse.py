"""The warning before a late collapse: what it is given for, and what it is not."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from param_decomp_lab.config.loss_schema import ImportanceMinimalityLoss
from param_decomp_lab.report.verdict import verdict
from param_decomp_lab.runs.configuration import least_p
from param_decomp_lab.tracking.collapse import (
    CI_GRADIENTS,
    LEAST_STEPS,
    LIMIT,
    TAIL_LIMIT,
    CollapseWatch,
    GradientTail,
    Growth,
    Tail,
    growths,
    may_collapse,
)
from param_decomp_lab.ui.charts import Series

N = 400
RNG = np.random.default_rng(0)
NOISE = np.exp(0.3 * RNG.normal(size=N))


def found(norms: Sequence[float]) -> Growth | None:
    seen = growths([(1000 * n, norm) for n, norm in enumerate(norms)])
    return next((growth for growth in seen if growth.is_large), None)


def published() -> np.ndarray:
    """0.16 for 300,000 of 400,000 steps, then growing to 57."""
    level = np.full(N, 0.16)
    level[300:] = np.minimum(57.0, 0.16 * (57 / 0.16) ** (np.arange(100) / 60))
    return level * NOISE


def test_the_growth_of_the_published_run() -> None:
    """The warning comes while the gradients are at a tenth or less of what they become."""
    growth = found(published().tolist())
    assert growth is not None
    assert 320_000 < growth.step < 335_000
    assert 0.1 < growth.lowest < 0.16
    assert growth.now < 5.7
    assert LIMIT < growth.factor < 1.5 * LIMIT
    assert f"at step {growth.step} the CI function's gradients are {growth.factor:.0f} times" in str(growth)


@pytest.mark.parametrize(
    "norms",
    [
        NOISE,
        # Single rows, as heavy-tailed gradients of a small p have them, however large.
        np.where(np.arange(N) % 9 == 0, 1e4, NOISE),
        # Training falls from a large gradient, and may begin with a small one.
        NOISE * np.geomspace(100.0, 0.1, N),
        NOISE * np.where(np.arange(N) < 0.04 * N, 1e-3, 1.0),
        NOISE * np.geomspace(1.0, 0.5 * LIMIT, N),
        np.zeros(N),
        np.where(np.arange(N) < 200, 0.0, NOISE),
        published()[:300],
        [0.1, 100.0, 100.0],
        [],
    ],
    ids=["noise", "spikes", "falling", "from a start", "half of it", "zeros", "from zero", "before", "short", "empty"],
)  # fmt: skip
def test_no_warning(norms: Sequence[float]) -> None:
    assert found(list(norms)) is None


def tails(norms: Sequence[float]) -> list[Tail]:
    watch = GradientTail(len(norms))
    return list(filter(None, (watch.add(step, norm) for step, norm in enumerate(norms))))


def test_a_tail_that_grows() -> None:
    """Ten steps of a hundred become ever larger, while the median stays: what a run that collapses begins with."""
    norms = np.exp(0.5 * RNG.normal(size=100_000))
    outer = np.arange(norms.size) % 10 == 0
    norms[outer] *= np.geomspace(1.0, 10.0, int(outer.sum()))
    found = tails(norms.tolist())
    assert [(tail.first, tail.last) for tail in found[:2]] == [(0, 5999), (2000, 7999)]
    assert len(found) == 48
    large = [tail.last for tail in found if tail.ratio > TAIL_LIMIT]
    assert 50_000 < large[0] < 85_000
    assert large[-1] == 99_999
    assert f"in steps {found[0].first} to {found[0].last} one in twenty" in str(found[0])


@pytest.mark.parametrize("spread", [0.2, 0.6])
def test_no_tail(spread: float) -> None:
    """Nor with single steps that are larger still, nor in a fall of the gradients that takes the whole run."""
    norms = np.exp(spread * RNG.normal(size=20_000)) * np.geomspace(100.0, 0.1, 20_000)
    norms[::100] *= 1e3
    norms[:1000] *= np.where(np.arange(1000) % 10 == 0, 100.0, 1.0)  # one window alone
    found = tails(norms.tolist())
    assert len(found) == 18
    assert max(tail.ratio for tail in found) < TAIL_LIMIT


def test_tails_of_short_and_silent_runs() -> None:
    assert tails([1.0] * 2999) == []
    assert [tail.ratio for tail in tails([0.0] * 3000)] == [0.0]


def test_the_report_says_so() -> None:
    steps = tuple(range(0, 1000 * N, 1000))
    grown = {CI_GRADIENTS: Series(steps, tuple(published().tolist()))}
    steady = {CI_GRADIENTS: Series(steps, tuple(NOISE.tolist()))}

    def config(**minimality: Any) -> dict[str, Any]:
        return {"torch": {"pd": {"loss_metrics": [{"type": "ImportanceMinimalityLoss", "pnorm": 2.0, **minimality}]}}}

    (card,) = verdict(grown, config(p_anneal_start_frac=0.0, p_anneal_final_p=0.4), None)
    assert (card.label, card.good) == ("CI gradients", False)
    assert card.value.startswith("× 1")
    assert verdict(steady, config(p_anneal_start_frac=0.0, p_anneal_final_p=0.4), None) == []
    for harmless in (config(), config(p_anneal_start_frac=0.0, p_anneal_final_p=0.4, penalty="smooth_l0"), {}):
        assert verdict(grown, harmless, None) == []


@pytest.mark.parametrize(
    ("minimality", "may"),
    [
        ({"p_anneal_start_frac": 0.0, "p_anneal_final_p": 0.4}, True),
        ({"pnorm": 0.9, "eps": 1e-6}, True),
        ({"p_anneal_start_frac": 0.0, "p_anneal_final_p": 1.0}, False),
        ({"p_anneal_final_p": 0.4}, False),  # never annealed
        ({"pnorm": {"start_val": 2.0, "fn_type": "linear", "final_val_frac": 0.4}}, True),
        ({"pnorm": {"max_val": 2.0, "points": [{"at": 0, "frac": 1}, {"at": 1, "frac": 0.4}]}}, True),
        ({"pnorm": {"max_val": 2.0, "points": [{"at": 0, "frac": 1}, {"at": 1, "frac": 0.5}]}}, False),
        (
            {"p_anneal_start_frac": 0.0, "p_anneal_final_p": 0.4, "penalty": "smooth_l0", "gamma": {"start_val": 0.1}},
            False,
        ),
    ],
)
def test_which_penalties_may_collapse(minimality: dict[str, Any], may: bool) -> None:
    """For the run and for its report."""
    term = {"type": "ImportanceMinimalityLoss", "coeff": 1.0, "pnorm": 2.0, "beta": 0.0, **minimality}
    others = [{"type": "FaithfulnessLoss", "coeff": 1.0}]
    assert may_collapse([ImportanceMinimalityLoss.model_validate(term)]) is may
    assert (least_p({"torch": {"pd": {"loss_metrics": [*others, term]}}}) < 1) is may


def test_either_sign_is_given_once() -> None:
    """To a run that may collapse. Its rows before a restart count, its steps begin anew."""
    said: list[str] = []
    losses = [ImportanceMinimalityLoss(type="ImportanceMinimalityLoss", coeff=1.0, pnorm=0.4, beta=0.0)]
    for terms in (losses, []):
        watch = CollapseWatch(terms, 4 * N, 4, said.append)
        for n, norm in enumerate(published()):
            watch.row({"step": 4 * n, CI_GRADIENTS: norm})
            watch.row({"step": 4 * n})
        for step in range(10 * LEAST_STEPS):
            watch.step(step, {"grad_norms/summary/ci_fns": 100.0 if step % 10 == 0 else 1.0})
    assert [text.split()[1] for text in said] == ["step", "steps"]
