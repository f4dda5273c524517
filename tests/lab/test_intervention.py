"""Interventions: what masks they run with, against `run.logits`; readings; selections."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from param_decomp_lab.errors import UserError
from param_decomp_lab.opening import Run, load_run
from param_decomp_lab.opening.intervention import Intervention, Masking
from param_decomp_lab.opening.selection import selected
from param_decomp_lab.runs.masks import bundle
from tests import reference as ref
from tests.core import tiny
from tests.lab.tiny_run import SITES

TEXT = "def f(x):"
UP, DOWN = "layers.1.mlp.up_proj", "layers.0.mlp.down_proj"
EVERY = [f"{site}:{n}" for site, C in SITES.items() for n in range(C)]
CHOSEN = [f"{UP}:3", f"{DOWN}:5@2", f"{DOWN}:1@-1"]


@pytest.fixture(scope="module")
def run(finished: Path) -> Run:
    return load_run(finished)


@pytest.fixture(scope="module")
def found(run: Run) -> Intervention:
    return run.intervene(TEXT, CHOSEN, scale=0.25, samples=2, attack_steps=5, continue_tokens=2)


def masks_of(masking: Masking) -> dict[str, np.ndarray]:
    return masking.masks


@pytest.fixture(scope="module")
def steered(run: Run) -> Intervention:
    return run.intervene(TEXT, CHOSEN, set_to=-1.5, samples=2, attack_steps=5, continue_tokens=2)


@pytest.mark.parametrize("fixture", ["found", "steered"])
def test_readings_are_run_logits_with_their_masks_to_the_bit(
    run: Run, fixture: str, request: pytest.FixtureRequest
) -> None:
    for reading in request.getfixturevalue(fixture).readings.values():
        pairs = [*zip(reading.before, reading.before_masking, strict=True)]
        pairs += [*zip(reading.after, reading.after_masking, strict=True)]
        for logits, masking in pairs:
            np.testing.assert_array_equal(logits, run.logits(TEXT, masking.masks, masking.delta, masking.added))


def test_components_set_to_an_activation(run: Run, steered: Intervention) -> None:
    """I1, F8: masks of 0, and what the reference adds; only with the intervention."""
    chosen = selected(CHOSEN, run.sites, len(TEXT))
    tokens = np.asarray([ord(letter) for letter in TEXT], np.int32)
    target = tiny.ref_target(run.target, run.weights, tokens[None])
    factors = {site: dict(zip("VU", map(tiny.array, run.factors(site)), strict=True)) for site in SITES}
    for reading in steered.readings.values():
        for masking in reading.before_masking:
            assert not masking.added
        for masking, logits in zip(reading.after_masking, reading.after, strict=True):
            for site, own in chosen.items():
                assert (masking.masks[site][own] == 0).all()
            norms = {site: np.linalg.norm(factors[site]["U"], axis=-1) for site in chosen}
            added = {site: np.where(own, -1.5 / norms[site], 0)[None] for site, own in chosen.items()}
            deltas = {site: np.zeros((1, len(TEXT))) for site in SITES}
            deltas |= {site: x[None] for site, x in masking.delta.items()} if isinstance(masking.delta, dict) else {}
            masks = {site: tiny.array(mask)[None] for site, mask in masking.masks.items()}
            expected, _ = ref.masked_pass(target, factors, masks, deltas, {}, added=added)
            np.testing.assert_allclose(logits, ref.value(expected)[0], atol=1e-4)
    off = run.intervene(TEXT, CHOSEN, readings=("ci",)).readings["ci"].after
    assert np.abs(off - steered.readings["ci"].after).max() > 0.01
    assert steered.what == "3 components set to -1.5, at some positions"


def test_an_activation_set_to_what_it_is_changes_nothing(run: Run) -> None:
    a = np.asarray(run.activations(TEXT, UP)[UP])
    mask = np.ones(a.shape)
    mask[4, 3] = 0
    without = run.logits(TEXT, {UP: mask}, delta=1)
    again = run.logits(TEXT, {UP: mask}, delta=1, added={UP: np.where(mask == 0, a, 0)})
    np.testing.assert_allclose(again, run.logits(TEXT), atol=2e-5)
    assert np.abs(np.asarray(without) - run.logits(TEXT)).max() > 1e-3
    with pytest.raises(UserError, match="is not among the masked sites"):
        run.logits(TEXT, {UP: mask}, added={DOWN: 1.0})
    with pytest.raises(UserError, match=r"\[7\] does not broadcast to \[1, 9, 20\]"):
        run.logits(TEXT, {UP: mask}, added={UP: np.ones(7)})
    for wrong in (np.nan, 1e300):
        with pytest.raises(UserError, match=r"added: .*up_proj: should be finite numbers of float32"):
            run.logits(TEXT, {UP: mask}, added={UP: wrong})
    with pytest.raises(UserError, match=r"added: .*: should be numbers"):
        run.logits(TEXT, {UP: mask}, added={UP: "five"})
    with pytest.raises(UserError, match="added: should be numbers by site, not float"):
        run.logits(TEXT, {UP: mask}, added=5.0)  # type: ignore[arg-type]


def test_numbers_for_all_positions_take_no_room_for_each(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def recorded(*arguments: Any) -> Any:
        made.append(bundle(*arguments))
        return made[-1]

    monkeypatch.setattr("param_decomp_lab.runs.opened.bundle", recorded)
    C = run.sites[UP].C
    run.logits(TEXT, {UP: np.ones(C)}, added={UP: np.ones(C)})
    run.logits(TEXT, {UP: np.ones(C)})
    (_, with_numbers), (_, without) = made
    [sources], [plain] = with_numbers.values(), without.values()
    assert sources.added.shape == sources.components.shape
    assert sources.added.size == sources.components.size <= 2 * C  # of both layers
    assert plain.added is None


def test_masks(run: Run, found: Intervention) -> None:
    """I1 to I3: the selected are at the scale, the others between λ and 1; at λ in the first reading."""
    importances = {name: np.asarray(x) for name, x in run.causal_importances(TEXT).items()}
    chosen = selected(CHOSEN, run.sites, len(TEXT))
    for name, reading in found.readings.items():
        for masking in reading.after_masking:
            for site, mask in masking.masks.items():
                own = chosen.get(site, np.zeros(mask.shape, bool))
                assert (mask[own] == 0.25).all()
                least = importances[site][~own]
                assert (mask[~own] >= least).all()
                assert (mask[~own] <= 1).all()
                if name == "ci":
                    np.testing.assert_array_equal(mask[~own], least)
                elif (least < 1).any():
                    assert (mask[~own] > least).any()
    assert found.readings["ci"].after_masking[0].delta == 0.0
    before = found.readings["ci"].before
    np.testing.assert_allclose(before[0], run.logits(TEXT, masks="ci"), atol=1e-5)


@pytest.mark.slow
def test_the_attack_hurts_more_than_its_start(run: Run) -> None:
    """It raises the divergence from the intervention at the importances."""

    def divergence(steps: int) -> float:
        reading = run.intervene(TEXT, CHOSEN, readings=("ci", "attack"), attack_steps=steps, attack_step_size=1e-9)
        strong = run.intervene(TEXT, CHOSEN, readings=("attack",), attack_steps=steps)
        at_importances = reading.readings["ci"].after[0]
        pair = (kl(at_importances, r.readings["attack"].after[0]) for r in (reading, strong))
        start, end = pair
        return end / start

    assert divergence(10) > 1.2


def test_an_attack_does_not_see_what_is_selected(run: Run) -> None:
    """Masks that are set do not depend on sources, so nothing moves these; the others move."""
    lam = {name: np.asarray(x) * 0.5 for name, x in run.causal_importances(TEXT).items()}
    fixed = {name: np.broadcast_to(np.arange(x.shape[1]) < 6, x.shape) for name, x in lam.items()}
    rng = np.random.default_rng(0)
    start = {name: rng.uniform(0.3, 0.7, x.shape).astype(np.float32) for name, x in lam.items()}
    row = np.asarray([ord(letter) for letter in TEXT], np.int32)
    found, deltas = run.attack_masks(row, lam, fixed, 0.5, (start, None), 2, 0.1)
    assert deltas is None
    for name, sources in found.items():
        np.testing.assert_array_equal(sources[fixed[name]], start[name][fixed[name]])
        assert (sources[~fixed[name]] != start[name][~fixed[name]]).any()


def kl(p: np.ndarray, q: np.ndarray) -> float:
    log_p, log_q = (x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in (p.astype(np.float64), q.astype(np.float64)))
    return float((np.exp(log_p) * (log_p - log_q)).sum(-1).mean())


def test_numbers_of_a_reading(found: Intervention) -> None:
    reading = found.readings["random"]
    assert reading.before.shape == (2, len(TEXT), 256)
    each = [kl(p, q) for p, q in zip(reading.before, reading.after, strict=True)]
    assert reading.kl(position=None) == pytest.approx(np.mean(each), rel=1e-6)
    before, after = reading.probabilities()
    assert before.sum() == pytest.approx(1)
    assert after.sum() == pytest.approx(1)
    logits = [x[:, -1].astype(np.float64) for x in (reading.before, reading.after)]
    centred = [x[:, 7] - x.mean(-1) for x in logits]
    assert reading.change(7) == pytest.approx((centred[1] - centred[0]).mean(), rel=1e-4, abs=1e-6)
    assert [len(tokens) for tokens in found.continuation] == [2, 2]


def test_alone(run: Run) -> None:
    """The others count as unimportant: off, anything, or what an attacker makes of them."""
    numbers = {site: list(range(C)) for site, C in SITES.items()}
    everything = run.intervene(TEXT, numbers, alone=True, samples=1, attack_steps=2)
    on = {site: np.ones(C) for site, C in SITES.items()}
    for name in ("ci", "random", "attack"):
        masking = everything.readings[name].after_masking[0]
        assert all((mask == 1).all() for mask in masking.masks.values())
    np.testing.assert_allclose(everything.readings["ci"].after[0], run.logits(TEXT, on), atol=1e-5)
    one = run.intervene(TEXT, f"{UP}:3", alone=True, readings=("ci",))
    masks = one.readings["ci"].after_masking[0].masks
    assert {site: int(mask.sum()) for site, mask in masks.items() if mask.any()} == {UP: len(TEXT)}


def test_at_some_positions(run: Run) -> None:
    chosen = selected({UP: [3, 4]}, run.sites, 5, positions=(0, -1))
    assert {tuple(x) for x in np.argwhere(chosen[UP])} == {(0, 3), (0, 4), (4, 3), (4, 4)}


@pytest.mark.slow
def test_a_toy(toy: Path) -> None:
    run = load_run(toy / "p-00000001")
    site = next(iter(run.sites))
    found = run.intervene("1=0.75", f"{site}:0", samples=2, attack_steps=3)
    for reading in found.readings.values():
        assert reading.after.shape[1:] == (1, run.n_outputs)


@pytest.mark.parametrize(
    ("selection", "options", "message"),
    [
        ("layers.1.mlp.up:3", {}, "unknown site"),
        (f"{UP}:99", {}, "has components 0 to 19, and no component 99"),
        (f"{UP}:3@12", {}, "position 12: the inputs have 9 positions"),
        (f"{UP}", {}, "should be SITE:NUMBER"),
        ([], {}, "nothing is selected"),
        (f"{UP}:1", {"readings": ("ci", "worst")}, "'worst' should be one of"),
        (f"{UP}:1", {"scale": float("nan")}, "finite"),
        (f"{UP}:1", {"alone": True, "scale": 0.5}, "leave out scale"),
        (f"{UP}:1", {"set_to": float("inf")}, "set_to should be a finite number"),
        (f"{UP}:1", {"set_to": -1e300}, "set_to should be a finite number that float32 holds"),
        (f"{UP}:1", {"scale": 1e300}, "scale should be a finite number that float32 holds"),
        (f"{DOWN}:1", {"set_to": 3e38, "readings": ("ci",)}, "3e\\+38 is too large for its components"),
        (EVERY, {"scale": 3e38, "readings": ("ci",)}, "outputs are not finite; try smaller numbers"),
        (f"{UP}:1", {"set_to": 2.0, "alone": True}, "leave out scale and alone"),
    ],
)
def test_wrong_requests(run: Run, selection: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        run.intervene(TEXT, selection, **options)
