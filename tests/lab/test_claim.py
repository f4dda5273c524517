"""`pd claim`: its numbers against a direct computation, its controls, intervals, and what it refuses."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from tokenizers import Tokenizer as HfTokenizer
from tokenizers.models import WordLevel

from param_decomp_lab import load_run
from param_decomp_lab.data.meta import META_FILE
from param_decomp_lab.data.text import TokenText
from param_decomp_lab.data.token_data import TokenData
from param_decomp_lab.errors import UserError
from param_decomp_lab.opening import Run
from param_decomp_lab.opening import claim as claims
from param_decomp_lab.opening.claim import (
    MOST_ROWS,
    Change,
    Claim,
    ClaimRequest,
    ClaimRows,
    bootstrap,
    draw_others,
    firings_at,
    measure_claim,
)
from param_decomp_lab.setup.other_data import refuse_other_tokens, trained_on
from param_decomp_lab.setup.resolved import ResolvedConfig
from tests.lab.tiny_run import pd_here

DOWN, UP = "layers.0.mlp.down_proj", "layers.1.mlp.up_proj"
REQUEST = ClaimRequest((f"{DOWN}:3", f"{UP}:5"), ("ti", "es "), "m", (0.0, 2.0), rows=11)
"""Rows that fill no whole number of batches."""


@pytest.fixture(scope="module")
def run(harvested: Path) -> Run:
    return load_run(harvested / "p-00000001", devices=1)


@pytest.fixture(scope="module")
def claim(run: Run) -> Claim:
    return measure_claim(run, replace(REQUEST, controls=2))


def log_probabilities(run: Run, rows: np.ndarray, names: Sequence[str], scale: float, token: int) -> np.ndarray:
    """With everything else on. Eight rows together, as the program takes them, so that there is one compilation."""
    masks = {site: np.ones(run.sites[site].C) for site, _ in (name.split(":") for name in names)}
    for name in names:
        site, number = name.split(":")
        masks[site][int(number)] = scale
    padded = np.concatenate([rows, rows[: -len(rows) % 8]])
    found = []
    for eight in padded.reshape(-1, 8, rows.shape[1]):
        x = np.asarray(run.logits(eight, masks or None, delta=1.0 if masks else 0.0), np.float64)
        found.append(x[..., token] - np.log(np.exp(x).sum(axis=-1)))
    return np.concatenate(found)[: len(rows)]


def ends(rows: np.ndarray, *texts: str) -> np.ndarray:
    """The tiny run's tokens are bytes."""
    return np.array([[bytes(row[: t + 1]).decode().endswith(texts) for t in range(len(row))] for row in rows.tolist()])


def test_numbers_are_those_of_a_direct_computation(run: Run, claim: Claim) -> None:
    rows = run.held_out_rows(11)
    here, token = ends(rows, *REQUEST.after), ord("m")
    assert claim.rows == 11
    assert 0 < here.sum() < here.size
    sets = [(f"{DOWN}:3",), (f"{UP}:5",), (f"{DOWN}:3", f"{UP}:5")]
    assert [(line.components, line.scale) for line in claim.lines] == [(s, x) for s in sets for x in (0.0, 2.0)]
    before = log_probabilities(run, rows, (), 1, token)
    for line in claim.lines:
        after = log_probabilities(run, rows, line.components, line.scale, token)
        controls = [log_probabilities(run, rows, names, line.scale, token) for names in line.controls]
        assert len(controls) == 2
        for found, control, at in (
            (line.here, line.control_here, here),
            (line.elsewhere, line.control_elsewhere, ~here),
        ):
            least = claim.rounding.here if at is here else claim.rounding.elsewhere
            assert_change(found, at, before, [after], least)
            assert_change(control, at, before, controls, least)
    assert claim.lines[0].here.log_change != pytest.approx(claim.lines[1].here.log_change, abs=1e-7)


def assert_change(
    found: Change | None, at: np.ndarray, before: np.ndarray, afters: list[np.ndarray], least: float
) -> None:
    assert found is not None
    assert found.places == at.sum()
    assert found.before == pytest.approx(np.exp(before[at]).mean(), rel=1e-5)
    assert found.after == pytest.approx(np.mean([np.exp(x[at]).mean() for x in afters]), rel=1e-5)
    unsure = np.mean([(np.abs(x - before + least)[at] < 1e-6).mean() for x in afters])
    assert found.falls == pytest.approx(np.mean([(x - before < -least)[at].mean() for x in afters]), abs=unsure + 1e-9)
    changes = np.mean(afters, axis=0) - before
    assert found.log_change == pytest.approx(changes[at].mean(), abs=2e-6)
    assert found.interval is not None
    assert found.interval[0] <= found.log_change <= found.interval[1]
    expected = bootstrap(np.where(at, changes, 0).sum(axis=1), at.sum(axis=1), REQUEST.seed)
    assert found.interval == pytest.approx(expected, abs=2e-6)


def test_exceptions_are_where_the_token_does_not_move_as_claimed(run: Run) -> None:
    rows = run.held_out_rows(11)
    here, token = ends(rows, *REQUEST.after), ord("m")
    before = log_probabilities(run, rows, (), 1, token)
    for scale, sign in ((0.0, 1), (2.0, -1)):
        tested = measure_claim(run, replace(REQUEST, scales=(scale,)))
        moved = sign * (log_probabilities(run, rows, REQUEST.components, scale, token) - before)
        places, least = {(place.row, place.position) for place in tested.exceptions}, -tested.rounding.here
        assert tested.n_exceptions == len(places) == len(tested.exceptions)
        assert {*map(tuple, np.argwhere(here & (moved > least + 1e-6)).tolist())} <= places
        assert places <= {*map(tuple, np.argwhere(here & (moved > least - 1e-6)).tolist())}
        for place in tested.exceptions:
            assert place.before == pytest.approx(np.exp(before[place.row, place.position]), rel=1e-5)
            assert place.text == run.text.text(rows[place.row, max(0, place.position - 14) : place.position + 6])  # type: ignore[union-attr]


def test_a_change_by_rounding_is_none(run: Run) -> None:
    """A component that is off by one unit in the last place: the token moves by rounding, up and down."""
    scale = float(np.nextafter(np.float32(1), np.float32(2)))
    found = measure_claim(run, replace(REQUEST, components=(f"{DOWN}:3",), scales=(scale,)))
    rows = run.held_out_rows(11)
    before, after = (log_probabilities(run, rows, names, scale, ord("m")) for names in ((), (f"{DOWN}:3",)))
    assert (after < before).any()
    [line] = found.lines
    assert line.elsewhere is not None
    assert line.here.falls == line.elsewhere.falls == 0
    assert 1e-8 < found.rounding.here < 1e-4
    assert found.n_exceptions == line.here.places  # it does not rise either


def test_rounding_is_that_of_the_numbers_that_are_subtracted(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A token that is nearly certain has a log-probability near 0, the difference of two numbers near 20. Here nothing
    moves, whatever the masks."""

    def logits(self: Run, tokens: np.ndarray, *_: Any, **__: Any) -> np.ndarray:
        return np.where(np.arange(self.n_outputs) == ord("m"), np.float32(20), 0) * np.ones(
            (*tokens.shape, 1), np.float32
        )

    monkeypatch.setattr(Run, "logits", logits)
    found = measure_claim(run, REQUEST).rounding
    assert found.here == found.elsewhere == 2 * float(np.spacing(np.float32(20)))


def test_rounding_is_measured_several_times_where_places_are_few(
    run: Run, claim: Claim, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert measure_claim(run, REQUEST).rounding == claim.rounding  # whatever controls draw
    real, given = Run.logits, []

    def logits(self: Run, tokens: Any, masks: Any = None, **options: Any) -> Any:
        given.append({} if masks is None else {site: mask.tobytes() for site, mask in masks.items()})
        return real(self, tokens, masks, **options)

    monkeypatch.setattr(Run, "logits", logits)
    done = []
    measure_claim(run, replace(REQUEST, rows=8, scales=(0.0,)), lambda what, n, of: done.append((what, n, of)))
    several = {masks[DOWN] for masks in given if len(masks) == 2} - {given[-1][DOWN]}
    assert len(several) == claims.ROUNDING_BATCHES
    assert done[-1][1:] == (done[-1][2],) * 2


def test_a_few_rows_are_in_memory_at_once(run: Run, claim: Claim, monkeypatch: pytest.MonkeyPatch) -> None:
    data, read = run.resolved.held_out_rows, []

    class Watched:
        source = data.source

        def __len__(self) -> int:
            return len(data)

        def rows(self, ids: np.ndarray) -> np.ndarray:
            read.append(len(ids))
            return data.rows(ids)

    monkeypatch.setitem(run.resolved.__dict__, "held_out_rows", Watched())
    monkeypatch.setattr(claims, "READ_AT_ONCE", 8)
    assert measure_claim(run, replace(REQUEST, controls=2)) == claim
    assert max(read) == 8
    monkeypatch.setattr(claims, "MOST_LISTED", 2)
    few = measure_claim(run, REQUEST)
    assert (few.exceptions, few.n_exceptions) == (claim.exceptions[:2], claim.n_exceptions)
    assert claim.n_exceptions > 2


def test_how_many_rows(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    one = replace(REQUEST, components=(f"{DOWN}:3",), scales=(0,), rows=None)
    all_of_them = len(run.resolved.held_out_rows)
    found = measure_claim(run, one)
    assert (found.rows, found.rows_available) == (all_of_them, all_of_them)
    assert next(found.notes()) == f"all {all_of_them} held-out rows of {run.resolved.held_out_rows.source}"
    monkeypatch.setattr(claims, "MOST_ROWS", 11)
    found = measure_claim(run, one)
    assert (found.rows, found.rows_available) == (11, all_of_them)
    assert next(found.notes()).startswith(f"the first 11 of {all_of_them} held-out rows of ")
    assert f"up to {MOST_ROWS:,}" in " ".join(pd_here("claim", "--help").out.split())
    with pytest.raises(UserError, match=rf"of the 11 held-out rows .*; --rows reads more of the {all_of_them}"):
        measure_claim(run, replace(one, after=("zebra",)))


def test_other_rows_than_those_held_out(run: Run, claim: Claim, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run.resolved.data is not None
    of_training, held_out = run.resolved.data.train, run.resolved.data.eval
    other = measure_claim(run, replace(REQUEST, data=of_training))
    assert other.data == str(of_training)
    assert other.rows_available != claim.rows_available
    assert other.lines != claim.lines
    assert next(other.notes()) == f"the first 11 of {other.rows_available:,} rows of {of_training}"
    assert (other.held_out, other.trained_on, claim.held_out, claim.trained_on) == (False, True, True, False)
    assert [note for note in other.notes() if "trained" in note]
    assert not [note for note in claim.notes() if "trained" in note]
    monkeypatch.setattr(type(run.resolved), "holds_rows_out", False)
    assert measure_claim(run, replace(REQUEST, controls=2, data=held_out)) == replace(claim, held_out=False)
    with pytest.raises(UserError, match="trained on all of its rows; give others: --data FOLDER"):
        measure_claim(run, REQUEST)
    with pytest.raises(UserError, match="no shards of tokens at nowhere"):
        measure_claim(run, replace(REQUEST, data=Path("nowhere")))


def test_rows_of_another_tokenizer_are_refused(run: Run, claim: Claim, tmp_path: Path) -> None:
    """Ids that stand for other text, and rows that begin with BOS, where the run's do not."""
    assert run.resolved.data is not None
    made = run.resolved.data.eval.parent
    shutil.copytree(made / "eval", tmp_path / "eval")
    described = json.loads((made / META_FILE).read_text())

    def tested(**changes: Any) -> Claim:
        (tmp_path / META_FILE).write_text(json.dumps(described | changes))
        return measure_claim(run, replace(REQUEST, controls=2, data=tmp_path / "eval"))

    assert tested() == replace(claim, held_out=False, data=str(tmp_path / "eval"))
    with pytest.raises(UserError, match=r"eval: rows begin with 'q' and those of the run without BOS; .*--no-bos"):
        tested(bos=ord("q"))
    words = HfTokenizer(WordLevel({"a": 300, "zebra": ord("m")}, "a"))
    words.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UserError, match=r"eval: token 109 is ' ?zebra' there and 'm' in the run"):
        tested(tokenizer="tokenizer.json")
    [shard, *_] = sorted((tmp_path / "eval").iterdir())
    with pytest.raises(UserError, match=r"token 109 is ' ?zebra'"):
        measure_claim(run, replace(REQUEST, data=shard))
    assert tested(tokenizer="none").lines == claim.lines  # nobody knows what their ids are


def test_rows_for_a_run_whose_own_are_elsewhere(run: Run, tmp_path: Path) -> None:
    """How its rows begin, and whether it trained on these, is not known then: nothing is refused for it."""

    class Elsewhere:
        @property
        def train_rows(self) -> Any:
            raise UserError("not here")

    assert run.resolved.data is not None
    assert run.text is not None
    made, elsewhere = run.resolved.data.eval.parent, cast(ResolvedConfig, Elsewhere())
    shutil.copytree(made / "eval", tmp_path / "eval")
    described = json.loads((made / META_FILE).read_text())
    (tmp_path / META_FILE).write_text(json.dumps(described | {"bos": ord("q")}))
    rows = TokenData(tmp_path / "eval")
    refuse_other_tokens(tmp_path / "eval", rows, run.text, elsewhere)
    with pytest.raises(UserError, match="rows begin with 'q'"):
        refuse_other_tokens(tmp_path / "eval", rows, run.text, run.resolved)
    assert trained_on(tmp_path / "eval", elsewhere) is None
    assert trained_on(tmp_path / "eval", run.resolved) is False


def test_an_interval_covers_what_rows_differ_by() -> None:
    rng = np.random.default_rng(0)
    rows, places = 400, 5
    row_means = rng.normal(1, 2, rows)
    found = bootstrap(row_means * places, np.full(rows, places), 0)
    assert found is not None
    error = row_means.std() / rows**0.5  # rows are drawn, not places
    assert found == pytest.approx((row_means.mean() - 1.96 * error, row_means.mean() + 1.96 * error), abs=0.1 * error)
    assert bootstrap(row_means, np.full(rows, places), 0) == bootstrap(row_means, np.full(rows, places), 0)
    padded = bootstrap(np.append(row_means * places, 0), np.append(np.full(rows, places), 0), 0)
    assert padded == found  # a row without places changes nothing
    assert bootstrap(np.array([3.0, 0]), np.array([2, 0]), 0) is None


def test_controls_fire_at_the_places(run: Run) -> None:
    """The likelier, the more often they do so there; no named component, and none twice."""
    rows = run.held_out_rows(11)
    here = ends(rows, *REQUEST.after)
    fires = [np.asarray(run.causal_importances(row, DOWN)[DOWN]) > 0 for row in rows]
    firings = np.stack(fires)[here].sum(axis=0)
    batches = ClaimRows(run, REQUEST).batches(np.arange(11))
    np.testing.assert_array_equal(firings_at(run, batches, [DOWN])[DOWN], firings)
    others = [int(c) for c in np.argsort(-firings) if firings[c]]
    assert len(others) > 2, "too few fire: choose other texts"
    [line] = measure_claim(run, replace(REQUEST, components=(f"{DOWN}:{others[0]}",), scales=(0,), controls=40)).lines
    drawn = [int(name.split(":")[1]) for names in line.controls for name in names]
    assert len(drawn) == 40
    assert set(drawn) <= set(others[1:])
    two = tuple(f"{DOWN}:{c}" for c in others[:2])
    lines = measure_claim(run, replace(REQUEST, components=two, scales=(0,), controls=6)).lines
    for line in lines:
        for names in line.controls:
            assert len({*names}) == len(names) == min(len(line.components), len(others) - 2)
            assert not {*names} & {*two}


def test_those_that_fire_more_often_are_drawn_more_often() -> None:
    firings, rng = {"s": np.array([0, 1, 9, 90, 500, 700])}, np.random.default_rng(0)
    named, claimed = ({"s": np.isin(np.arange(6), numbers)} for numbers in ([4], [4, 5]))
    drawn = [int(name.split(":")[1]) for [name] in draw_others(named, claimed, firings, 4000, rng)]
    np.testing.assert_allclose(np.bincount(drawn, minlength=6) / 4000, [0, 0.01, 0.09, 0.9, 0, 0], atol=0.02)
    every = draw_others({"s": np.isin(np.arange(6), [0, 3, 4, 5])}, claimed, firings, 2, rng)
    assert every == (("s:1", "s:2", "s:3"),) * 2  # fewer than were named fire
    assert draw_others(named, {"s": np.ones(6, bool)}, firings, 2, rng) == ()


def test_a_group_is_all_its_members(run: Run) -> None:
    sizes = {n: sum(map(len, members(run, n).values())) for n in range(len(run.groups))}
    number = min((n for n in sizes if sizes[n] > 1), key=lambda n: sizes[n])
    names = [f"{site}:{c}" for site, own in members(run, number).items() for c in own]
    rows = run.held_out_rows(8)
    here = ends(rows, *REQUEST.after)
    request = replace(REQUEST, components=(f"group:{number}",), scales=(0,), rows=8)
    [line] = measure_claim(run, request).lines
    before, after = (log_probabilities(run, rows, chosen, 0, ord("m")) for chosen in ((), names))
    assert line.here.log_change == pytest.approx((after - before)[here].mean(), abs=2e-6)


def members(run: Run, number: int) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for member in run.groups.members(number):
        found.setdefault(member[0], []).append(int(member[1]))
    return found


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"components": (f"{DOWN}:12",)}, "has components 0 to 11, and no component 12"),
        ({"components": (f"{UP}:5", "layers.0.mlp.dwn_proj:1")}, "unknown site 'layers.0.mlp.dwn_proj'"),
        ({"components": (f"{DOWN}:1@3",)}, "leave out @3"),
        ({"components": ("group:99999",)}, "group:99999"),
        ({"components": (DOWN,)}, "should be SITE:NUMBER"),
        ({"after": ("ti", "zebra")}, r"--after: no token of the 11 held-out rows ends with 'zebra'"),
        ({"after": ("",)}, "--after: give the text"),
        ({"token": "by"}, r"--token 'by' should be one token of the vocabulary, not 2 \('b', 'y'\)"),
        ({"token": ""}, "--token: give the token"),
        ({"scales": (0.0, 1.0)}, "--scale 1: should be a finite number other than 1"),
        ({"scales": (float("nan"),)}, "--scale nan"),
        ({"after": ("\udcff",)}, "should be text in UTF-8"),
        ({"rows": 0}, "--rows 0: should be at least 1"),
    ],
)
def test_mistakes_are_found_before_anything_runs(
    run: Run, changes: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def runs(*_: Any, **__: Any) -> None:
        raise AssertionError("computed something")

    monkeypatch.setattr(Run, "logits", runs)
    monkeypatch.setattr(Run, "causal_importances", runs)
    with pytest.raises(UserError, match=message) as caught:
        measure_claim(run, replace(REQUEST, controls=1, **changes))
    assert "\n" not in str(caught.value)


def test_a_toy_is_refused(harvested: Path) -> None:
    toy = load_run(harvested / "p-00000002", devices=1)
    with pytest.raises(UserError, match="toy"):
        measure_claim(toy, REQUEST)
    with pytest.raises(UserError, match="toy"):
        toy.held_out_rows()


def test_held_out_rows(run: Run) -> None:
    rows = run.held_out_rows()
    assert rows.shape == (len(run.resolved.held_out_rows), 16)
    assert len(rows) > 20
    np.testing.assert_array_equal(run.held_out_rows(3), rows[:3])
    np.testing.assert_array_equal(run.held_out_rows(10**9), rows)
    np.testing.assert_array_equal(rows[5], run.resolved.held_out_rows.rows([5])[0])
    with pytest.raises(UserError, match="at least 1"):
        run.held_out_rows(0)


def test_a_text_ends_with_another_whatever_its_tokens() -> None:
    text = TokenText.__new__(TokenText)
    text._pieces = {
        0: "<s>",
        1: " ra",
        2: "is",
        3: "ed",
        4: "rais",
        5: "ated",
        6: " ",
        7: b"\xe2\x82",
        8: b"\xac",
        9: "d",
    }
    rows = np.random.default_rng(0).integers(0, 11, (40, 30))  # 10 has no piece
    for end in ("ed", " rais", "raised", "rais", "d", "€", "€ed", "<s>", "s", "ra", " rated", "eded", "[10]", "0]d"):
        found = text.ends_with(rows, end)
        expected = [[text.decode(row[: t + 1]).endswith(end) for t in range(30)] for row in rows]
        np.testing.assert_array_equal(found, expected, end)
    assert text.ends_with(rows, "ed").any()
    assert text.ends_with(rows, "€").any()
    assert not text.ends_with(rows, "zebra").any()
    long = np.full((2, 3000), 9)
    np.testing.assert_array_equal(text.ends_with(long, "d" * 2999)[0].nonzero()[0], [2998, 2999])
    assert not text.ends_with(long, "d" * 20_000).any()


def test_the_command(run: Run, claim: Claim) -> None:
    words = [
        "claim",
        run.folder,
        *REQUEST.components,
        "--after",
        "ti",
        "--after",
        "es ",
        "--token",
        "m",
        "--rows",
        "11",
    ]
    words += ["--scale", "0", "--scale", "2", "--controls", "2", "--devices", "1"]
    printed = pd_here(*words, "--exceptions")
    assert printed.status == 0, printed.err
    head, rule, *lines = printed.out.splitlines()
    places = claim.lines[0].here.places
    assert head.startswith(
        f"| multiplied | P('m') after 'ti', 'es ' ({places} places) | falls | log P, 95 % | elsewhere |"
    )
    assert rule == "|---" * 7 + "|"
    assert lines[0].startswith(f"| {DOWN}:3 × 0 | {claim.lines[0].here.before:.3f} → ")
    assert lines[1].startswith("| as many others × 0 | ")
    assert [line.count("|") for line in lines[:12]] == [8] * 12
    assert lines[10].startswith(f"| {DOWN}:3, {UP}:5 × 2 | ")
    n = claim.n_exceptions
    assert lines[12:15] == ["", *claim.notes()]
    assert lines[14].startswith(f"a change of log P below {claim.rounding.here:.2g} nats after the text and ")
    assert lines[15:17] == ["", f"{n} of {places} places at which it does not fall{':' if n else ''}"]
    assert len(lines) == 17 + n
    begun = ["looking for the text …", "what fires after the text …", "what rounding does …"]
    begun.append("with and without the components …")
    assert printed.err.splitlines()[-4:] == begun  # no terminal: a line for each thing that begins

    written = pd_here(*words, "--json")
    assert written.status == 0, written.err
    found = json.loads(written.out)
    assert found == json.loads(claim.as_json())
    assert found["lines"][0]["here"]["log_change"] == claim.lines[0].here.log_change

    wrong = pd_here("claim", run.folder, f"{DOWN}:12", "--after", "ti", "--token", "m")
    assert (wrong.status, wrong.out) == (2, "")
    assert wrong.err.strip().splitlines() == [f"error: {DOWN} has components 0 to 11, and no component 12"]
