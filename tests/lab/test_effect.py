"""The effect of a component at the places where it fires, against `run.logits` place by place."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from param_decomp_lab import load_run
from param_decomp_lab.errors import UserError
from param_decomp_lab.harvest.files import Harvest
from param_decomp_lab.opening import Run

SITE = "layers.0.mlp.down_proj"


@pytest.fixture(scope="module")
def run(harvested: Path) -> Run:
    return load_run(harvested / "p-00000001", devices=1)


@pytest.fixture(scope="module")
def toy_run(harvested: Path) -> Run:
    return load_run(harvested / "p-00000002", devices=1)


def log_probabilities(run: Run, row: np.ndarray, position: int, without: int | None, everywhere: bool = False) -> Any:
    """At one position, with all components and Δ on at `SITE` but for one component at that position."""
    mask = np.ones((len(row), run.sites[SITE].C))
    if without is not None:
        mask[slice(None) if everywhere else position, without] = 0
    x = np.asarray(run.logits(row, {SITE: mask}, delta=1), np.float64)[position]
    return x - np.log(np.exp(x).sum())


def test_an_effect_is_the_mean_over_its_places(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """I5. More places than are run together, and not a multiple of it."""
    least = 1 / 257  # an untrained model makes all 257 tokens almost equally likely
    monkeypatch.setattr("param_decomp_lab.opening.effect.LEAST", least)
    c = int(run.harvest.components(SITE)["firings"].to_numpy().argmax())
    found = run.effect(SITE, c, places=13)
    assert found.n == 13
    assert len({*zip(found.rows.tolist(), found.positions.tolist(), strict=True)}) == 13
    before, after, elsewhere, activations = [], [], [], []
    for number, position in zip(found.rows, found.positions, strict=True):
        row = run.harvest.row(int(number))
        before.append(log_probabilities(run, row, position, None))
        after.append(log_probabilities(run, row, position, c))
        elsewhere.append(log_probabilities(run, row, position, c, everywhere=True))
        activations.append(run.activations(row, SITE)[SITE][position, c])
        clean = np.asarray(run.logits(row), np.float64)[position]
        np.testing.assert_allclose(before[-1], clean - np.log(np.exp(clean).sum()), atol=1e-5)  # the target itself
    p, q = np.asarray(before), np.asarray(after)
    change = (q - p).mean(0)
    np.testing.assert_allclose(found.change, change, atol=2e-5)
    assert np.abs((np.asarray(elsewhere) - p).mean(0) - change).max() > 1e-4  # at that position alone
    errors = (np.exp(p) * (p - q)).sum(1)
    np.testing.assert_allclose(found.errors, errors, rtol=1e-3, atol=2e-6)
    assert found.error == pytest.approx(errors.mean(), rel=1e-3)
    assert found.standard_error == pytest.approx(errors.std(ddof=1) / 13**0.5, rel=1e-3)
    assert found.error > 1e-4
    np.testing.assert_allclose(found.activations, activations, rtol=1e-5)
    np.testing.assert_allclose(found.before, np.exp(p).mean(0), rtol=1e-4)
    np.testing.assert_allclose(found.after, np.exp(q).mean(0), rtol=1e-4)
    likely = np.maximum(found.before, found.after) >= least  # of what was found: many are close to it
    assert likely.any()
    assert not likely.all()
    order = [int(k) for k in np.argsort(found.change) if likely[k]]
    assert [o.number for o in found.down] == [k for k in order if found.change[k] < 0][:10]
    assert [o.number for o in found.up] == [k for k in order[::-1] if found.change[k] > 0][:10]
    moved = found.after - found.before  # of all tokens, however rare
    falling, rising = np.argsort(moved, kind="stable")[:10].tolist(), np.argsort(-moved, kind="stable")[:10].tolist()
    assert [o.number for o in found.down_by_probability] == [k for k in falling if moved[k] < 0]
    assert [o.number for o in found.up_by_probability] == [k for k in rising if moved[k] > 0]
    assert [o.number for o in found.down_by_probability] != [o.number for o in found.down]
    for output in (*found.up, *found.down, *found.up_by_probability):
        k = output.number
        assert output.change == pytest.approx(change[k], abs=2e-5)
        assert output.before == pytest.approx(np.exp(p)[:, k].mean(), rel=1e-4)
        assert output.after == pytest.approx(np.exp(q)[:, k].mean(), rel=1e-4)
        assert output.name == run.names([k])[0]


def test_by_sign(run: Run) -> None:
    """The parts are the whole, and each is the effect at its own places."""
    for c in np.argsort(-run.harvest.components(SITE)["firings"].to_numpy())[:4].tolist():
        found = run.effect(SITE, c, places=13)
        parts = found.by_sign()
        assert sum(part.n for part in parts.values()) == 13
        if len(parts) == 2:
            break
    assert [(part.activations > 0).all() for part in parts.values()] == [True, False]
    for part in parts.values():
        rows = np.stack([run.harvest.row(int(row)) for row in part.rows])
        again = run.effect(SITE, c, rows=rows, positions=part.positions)
        np.testing.assert_allclose(part.change, again.change, atol=2e-5)
        np.testing.assert_allclose(part.errors, again.errors, rtol=1e-4, atol=2e-5)
    assert repr(found).count("where a") == 2


def test_places_are_firings(run: Run, harvested: Path) -> None:
    """A uniform sample: of those at the sampled positions, or the examples where there are more of these."""
    harvest = run.harvest
    for site in harvest.sites:
        lam = {int(r): np.asarray(run.causal_importances(harvest.row(int(r)), site)[site]) for r in range(6)}
        for c, firings in enumerate(harvest.components(site)["firings"].to_numpy()[:6].tolist()):
            rows, positions = harvest.firing_sample(site, c, 5)
            assert len(rows) == min(5, firings)  # in this harvest all positions are sampled
            for row, position in zip(rows.tolist(), positions.tolist(), strict=True):
                if row in lam:
                    assert lam[row][position, c] > harvest.plan.threshold
    few = Harvest(harvest.folder)
    few._firing_places = lambda component, most=None: np.zeros(0, np.int32)  # type: ignore[method-assign]
    c = int(harvest.components(SITE)["firings"].to_numpy().argmax())
    rows, positions = few.firing_sample(SITE, c, 3)
    examples = [(e.row, e.position) for e in harvest.examples(SITE, c) if e.kind == "uniform"]
    assert len(examples) == 4
    assert [*zip(rows.tolist(), positions.tolist(), strict=True)] == examples[:3]


def test_at_given_rows(run: Run) -> None:
    rows = np.arange(20).reshape(2, 10)
    found = run.effect(SITE, 2, rows=rows, positions=np.asarray([9, 4]))
    p, q = (
        np.asarray([log_probabilities(run, row, t, c) for row, t in zip(rows, (9, 4), strict=True)]) for c in (None, 2)
    )
    np.testing.assert_allclose(found.change, (q - p).mean(0), atol=2e-5)
    assert run.effect(SITE, 2, rows=rows[:1], positions=np.asarray([3])).standard_error is None


def test_a_toy(toy_run: Run) -> None:
    """Its outputs are values."""
    site = next(iter(toy_run.sites))
    c = int(toy_run.harvest.components(site)["firings"].to_numpy().argmax())
    found = toy_run.effect(site, c, places=9)
    rows = np.stack([toy_run.harvest.row(int(row)) for row in found.rows])
    mask = np.ones(toy_run.sites[site].C)
    mask[c] = 0
    before = np.asarray(toy_run.output(rows), np.float64)
    after = np.asarray(toy_run.output(rows, {site: mask}, delta=1), np.float64)
    np.testing.assert_allclose(found.change, (after - before).mean(0), atol=1e-5)
    np.testing.assert_allclose(found.errors, ((after - before) ** 2).mean(1), rtol=1e-3, atol=1e-7)
    assert np.abs(found.change).max() > 1e-4
    assert "MSE" in repr(found)


def test_wrong_requests(run: Run) -> None:
    rows = np.zeros((2, 4), np.int32)
    for message, arguments, options in (
        ("unknown site", ("layers.0.mlp.up", 0), {}),
        ("no component 99", (SITE, 99), {}),
        ("rows and positions together", (SITE, 0), {"rows": rows}),
        ("positions go from 0 to 3", (SITE, 0), {"rows": rows, "positions": np.asarray([0, 4])}),
        ("should be \\[n, T\\]", (SITE, 0), {"rows": rows, "positions": np.asarray([0])}),
        ("at least 1", (SITE, 0), {"places": 0}),
    ):
        with pytest.raises(UserError, match=message):
            run.effect(*arguments, **options)  # type: ignore[arg-type]
    silent = Harvest(run.harvest.folder)
    silent.firing_sample = lambda *about: (np.zeros(0, int),) * 2  # type: ignore[method-assign]
    with pytest.raises(UserError, match="fires nowhere"):
        run.effect(SITE, 0, harvest=silent)
