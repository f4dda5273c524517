"""Scores of labels: what judges are shown is true of the harvest, who knows it scores 1, who guesses 0.5 or 0.2."""

import json
import random
import re
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

from param_decomp_lab.browse.server import make_app
from param_decomp_lab.harvest.files import Harvest, find_harvests
from param_decomp_lab.harvest.files.labels import Labels
from param_decomp_lab.harvest.files.scores import CHANCE, Kind, Score, Scores
from param_decomp_lab.label import asking
from param_decomp_lab.label.choose import Component, Selection, choose_components
from param_decomp_lab.label.draws import Draws
from param_decomp_lab.label.judging import score_questions
from param_decomp_lab.label.naming import shown_examples
from param_decomp_lab.label.scoring import Tally, overall
from param_decomp_lab.label.texts import Text, Texts
from tests.lab.openai_server import KEY, Messages, Server, Trouble, openai_server
from tests.lab.planted_harvest import AROUND, LENGTH, THRESHOLD, C, Planted, plant
from tests.lab.test_label import RUN, command, label, requests, spent
from tests.lab.tiny_run import pd_here

KINDS: tuple[Kind, ...] = ("detection", "fuzzing", "intruder")
SEED, N_TEXTS = 5, 6


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Planted:
    return plant(tmp_path_factory.mktemp("planted") / RUN)


@pytest.fixture(scope="module")
def texts(planted: Planted) -> Texts:
    return Texts(planted.harvest)


@pytest.fixture(scope="module")
def components(planted: Planted) -> list[Component]:
    return choose_components(planted.harvest, Selection())


@pytest.fixture
def run(planted: Planted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the run that was harvested."""
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setattr(asking, "FIRST_WAIT_S", 0.01)
    monkeypatch.setattr(asking, "POLL_S", 0.01)
    return Path(shutil.copytree(planted.folder.parents[1], tmp_path / RUN))


class Truth:
    """λ of a component at every token of a text, found by the tokens alone: no text of the harvest is there twice."""

    def __init__(self, planted: Planted) -> None:
        self._planted = planted
        self._places = {
            tuple(row[first:stop].tolist()): (number, first)
            for number, row in enumerate(planted.rows)
            for first in range(LENGTH)
            for stop in range(first + AROUND + 1, min(LENGTH, first + 2 * AROUND + 1) + 1)
        }

    def importances(self, text: Text, component: Component) -> np.ndarray:
        site, n = component
        row, first = self._places[text.tokens]
        found: np.ndarray = self._planted.importances[site][row, first : first + len(text.tokens), n]
        return found

    def fires(self, text: Text, component: Component) -> bool:
        """At the mark."""
        [mark] = text.marks
        return bool(self.importances(text, component)[mark] > THRESHOLD)

    def place(self, text: Text) -> tuple[int, int]:
        [mark] = text.marks
        row, first = self._places[text.tokens]
        return row, first + mark


@pytest.fixture(scope="module")
def truth(planted: Planted) -> Truth:
    return Truth(planted)


def test_detection_is_true(texts: Texts, components: list[Component], truth: Truth) -> None:
    draws, n_seen = Draws(texts, SEED, N_TEXTS), 0
    assert len(components) == 2 * C
    for component in components:
        judged = draws.detection(component)
        assert all(truth.fires(one.text, component) == one.truth for one in judged)
        classes = Counter(one.truth for one in judged)
        always = texts.harvest.component(*component)["density"] == 1
        assert classes == ({True: N_TEXTS} if always else {True: N_TEXTS, False: N_TEXTS})
        assert len({truth.place(one.text) for one in judged}) == len(judged)
        shown = shown_examples(texts.harvest.examples(*component))
        seen = {(e.row, e.first + k) for e in shown for k in range(len(e.tokens))}
        n_seen += sum(truth.place(one.text) in seen for one in judged)
    assert n_seen == 0


def test_rare_components_are_judged_by_what_there_is(texts: Texts, truth: Truth) -> None:
    """More texts than there are firings: all of them, and none twice."""
    draws = Draws(texts, SEED, 100)
    for component in choose_components(texts.harvest, Selection())[-4:]:
        firing = [one for one in draws.detection(component) if one.truth]
        f = texts.harvest.component(*component)["firings"]
        assert 4 <= len(firing) <= f
        assert len({truth.place(one.text) for one in firing}) == len(firing)


def test_fuzzing_is_true(texts: Texts, components: list[Component], truth: Truth) -> None:
    draws, n = Draws(texts, SEED, N_TEXTS), 0
    for component in components:
        shown = {e.tokens for e in shown_examples(texts.harvest.examples(*component))}
        pairs: dict[tuple[int, ...], dict[bool, Text]] = {}
        for one in draws.fuzzing(component):
            pairs.setdefault(one.text.tokens, {})[one.truth] = one.text
        for tokens, by_truth in pairs.items():
            assert set(by_truth) == {True, False}
            assert tokens not in shown
            right, wrong = by_truth[True].marks, by_truth[False].marks
            lam = truth.importances(by_truth[True], component)
            assert right == set(np.flatnonzero(lam > THRESHOLD).tolist())
            assert len(right) == len(wrong)
            assert all(lam[place] <= 1 / 510 + 1e-6 for place in wrong)
            n += 1
    assert n > 2 * len(components)


def test_intruders_are_true(texts: Texts, components: list[Component], truth: Truth) -> None:
    draws, places = Draws(texts, SEED, N_TEXTS), Counter[int]()
    for component in components:
        groups = draws.intruder(component)
        assert len(groups) == (0 if texts.harvest.component(*component)["density"] == 1 else N_TEXTS)
        for group, where in groups:
            assert [truth.fires(text, component) for text in group] == [place != where for place in range(5)]
            others = [c for c in components if c != component and c[0] == component[0]]
            assert any(truth.fires(group[where], c) for c in others)
            places[where] += 1
    assert all(0.12 < places[where] / places.total() < 0.28 for where in range(5))


def test_intruders_fire_as_often(texts: Texts, components: list[Component]) -> None:
    draws, harvest = Draws(texts, SEED, N_TEXTS), texts.harvest
    for site, number in components[::7]:
        density = harvest.densities(site)
        chosen = draws._neighbours((site, number))
        assert number not in chosen
        distance = abs(density - density[number])
        beyond = [n for n in range(len(density)) if n not in chosen and n != number and density[n] > 0]
        for n in beyond:  # on the nearer side nothing was left out
            closer = [k for k in chosen if (density[k] > density[number]) == (density[n] > density[number])]
            assert all(distance[k] <= distance[n] + 1e-12 for k in closer)


def test_draws_follow_from_the_seed(texts: Texts, components: list[Component]) -> None:
    def drawn(seed: int) -> list[Any]:
        draws = Draws(texts, seed, N_TEXTS)
        return [(draws.detection(c), draws.fuzzing(c), draws.intruder(c)) for c in components[1::9]]

    assert drawn(1) == drawn(1)
    first, second = drawn(1), drawn(2)
    assert all(one != other for one, other in zip(first, second, strict=True))


def test_no_question_has_a_text_twice(texts: Texts, components: list[Component]) -> None:
    """Of two that differ in their marks alone, one must be wrong."""
    draws = Draws(texts, SEED, N_TEXTS)
    for component in components:
        for question, truth in score_questions(texts, draws, "fuzzing", component, "a label"):
            assert isinstance(truth, tuple)
            shown = re.findall(r"^\d\. (.*)$", question.messages[1]["content"], re.MULTILINE)
            assert sum(text.count("«") for text in shown) == sum(text.count("»") for text in shown)
            assert len(shown) == len(truth) <= 5
            assert len({text.replace("«", "").replace("»", "") for text in shown}) == len(shown)
            assert "a label" in question.messages[1]["content"]


# ---- judges ----


def answers(texts: Texts, components: list[Component], n_texts: int, seed: int) -> dict[str, str]:
    """The right answer to every question."""
    draws, found = Draws(texts, seed, n_texts), {}
    for component in components:
        for kind in KINDS:
            for question, truth in score_questions(texts, draws, kind, component, f"what {component} does"):
                right = json.dumps([int(one) for one in truth]) if isinstance(truth, tuple) else str(truth + 1)
                found[json.dumps(question.messages)] = right
    return found


def guess(right: str, rng: random.Random) -> str:
    if right.startswith("["):
        return json.dumps([rng.randrange(2) for _ in json.loads(right)])
    return str(rng.randrange(5) + 1)


def label_all(run: Path, components: list[Component]) -> Labels:
    labels = Labels(run, Harvest(find_harvests(run)[0]).plan.step)
    for component in components:
        labels.set(*component, f"what {component} does", "Ada")
    return labels


def score(run: Path, server: Server, *more: str) -> dict[str, list[str]]:
    """The cells of the table, by kind."""
    outcome = label(run, server, "--score", "--seed", str(SEED), "--texts", str(N_TEXTS), *more)
    assert outcome.status == 0, outcome.err
    return {found[0]: found[1:] for line in outcome.out.splitlines() if (found := line.split()) and found[0] in KINDS}


def test_a_judge_who_knows_scores_one(run: Path, texts: Texts, components: list[Component]) -> None:
    some = components[::6]
    labels = label_all(run, some)
    step = texts.harvest.plan.step
    right = answers(texts, some, N_TEXTS, SEED)
    with openai_server(lambda messages: right[json.dumps(messages)]) as server:
        cells = score(run, server)
        assert not server.wrong
        assert len(server.seen) == len(right) == len(requests(run))
        assert {kind: row[0] for kind, row in cells.items()} == dict.fromkeys(KINDS, "1.000")
        assert {kind: row[2] for kind, row in cells.items()} == {
            "detection": "0.500",
            "fuzzing": "0.500",
            "intruder": "0.200",
        }
        assert score(run, server) == cells
        assert len(server.seen) == len(right)
        # It is shown on the component's page, as long as the label is the same.
        scored = Scores(run, step)
        site, n = next(
            c for c in some if all(s.score == 1 for s in scored.of_component(*c)) and scored.of_component(*c)
        )
        with TestClient(make_app([run.parent]), base_url="http://localhost:8720") as browser:
            address = f"/{RUN}/{texts.harvest.folder.name}/sites/{site}/{n}"
            page = browser.get(address).text
            assert re.search(r"<td>detection</td><td class=\"num\">100\u00a0%</td>", page)
            labels.set(site, n, "something else", "Ada")
            page = browser.get(address).text
            assert "<td>detection</td>" not in page
            assert "<td>intruder</td>" in page
        right |= {question.replace(f"what {(site, n)} does", "something else"): "[2]" for question in right}
        label(run, server, "--score", "--seed", str(SEED), "--texts", str(N_TEXTS), "--kind", "detection")
        found = scored.of_component(site, n)
        again = next(s for s in found if s.label == "something else")
        assert (again.score, again.unanswered) == (None, again.asked)


def test_a_judge_who_guesses_scores_by_chance(texts: Texts, components: list[Component]) -> None:
    rng, draws = random.Random(7), Draws(texts, SEED, 10)
    for kind in KINDS:
        scores = []
        for component in components:
            tally = Tally()
            for question, truth in score_questions(texts, draws, kind, component, "x"):
                right = json.dumps([0] * len(truth)) if isinstance(truth, tuple) else "1"
                tally.add(truth, question.parse(guess(right, rng)))
            value, error = tally.score(1 if kind == "intruder" else 2)
            scores.append(Score(kind, "", "", "", value, error, tally.asked, tally.unanswered))
        total = overall(scores)
        assert total.mean is not None
        assert total.standard_error is not None
        assert total.asked > 100
        assert 0.005 < total.standard_error < 0.05
        assert abs(total.mean - CHANCE[kind]) < 3.5 * total.standard_error
        # The errors of single components agree with how much they differ.
        errors = [s.standard_error for s in scores if s.standard_error is not None]
        expected = (sum(error**2 for error in errors) / len(errors) ** 2) ** 0.5
        assert 0.6 < total.standard_error / expected < 1.6


def test_a_guess_through_the_server(run: Path, components: list[Component]) -> None:
    label_all(run, components[:30])
    rng = random.Random(3)

    def judge(messages: Messages) -> str:
        n = len(re.findall(r"^\d\. ", messages[1]["content"], re.MULTILINE))
        return guess(json.dumps([0] * n), rng)

    with openai_server(judge) as server:
        mean, error, chance, n_components, asked, unanswered = score(run, server, "--kind", "detection")["detection"]
        assert abs(float(mean) - float(chance)) < 3.5 * float(error)
        assert (int(n_components), int(unanswered)) == (28, 0)  # two fire always
        assert int(asked) == sum(len(json.loads(row["truth"])) for row in requests(run))


def test_intruder_needs_no_label_and_failed_answers_are_counted(
    run: Path, components: list[Component], texts: Texts
) -> None:
    some = components[1:4]
    right = answers(texts, some, N_TEXTS, SEED)
    with openai_server(lambda messages: right[json.dumps(messages)]) as server:
        server.troubles = [Trouble(body="{}"), Trouble(body="{}")]  # the first question's only chances
        more = ("--kind", "intruder", "--limit", "4", "--parallel", "1")
        cells = score(run, server, *more)["intruder"]
        n = sum(len(Draws(texts, SEED, N_TEXTS).intruder(component)) for component in some)
        assert cells[0] == "1.000"
        assert cells[-2:] == [str(n), "1"]
        assert score(run, server, *more)["intruder"] == cells
        assert score(run, server, *more, "--retry-failed")["intruder"][-1] == "0"
        assert len(server.prompts) == n + 2


def test_scoring_stops_at_the_cap_and_goes_on(run: Path, components: list[Component], texts: Texts) -> None:
    some = components[:5]
    right = answers(texts, some, N_TEXTS, SEED)
    more = ("--score", "--seed", str(SEED), "--texts", str(N_TEXTS), "--kind", "intruder", "--limit", "5")
    with openai_server(lambda messages: right[json.dumps(messages)]) as server:
        outcome = pd_here(*command(run, server, *more, max_cost=4.0))
        assert outcome.status == 1
        assert "--max-cost" in outcome.out
        assert 0 < spent(run) <= 4
        dry = pd_here(*command(run, server, *more, "--dry-run")).out
        assert "which does not belong" in dry
        assert "scores to find" in dry
        assert pd_here(*command(run, server, *more)).status == 0
        assert len(server.prompts) == len(set(server.prompts))


@pytest.mark.parametrize(
    ("truths", "classes", "score", "variance"),
    [
        # Of one class 1 of 2 are right and of the other 1 of 1, smoothed 2/4 and 2/3.
        ([((True, True, False), (True, False, False))], 2, 0.75, (1 / 4 / 2 + 2 / 9 / 1) / 4),
        ([((True,), (True,)), ((False,), None)], 2, None, None),
        ([(3, 3), (1, 2), (0, None)], 1, 0.5, 1 / 4 / 2),
    ],
)
def test_balanced_accuracy(
    truths: list[tuple[Any, Any]], classes: int, score: float | None, variance: float | None
) -> None:
    tally = Tally()
    for truth, answer in truths:
        tally.add(truth, answer)
    value, error = tally.score(classes)
    assert value == score
    assert error == (None if variance is None else pytest.approx(variance**0.5))


def test_a_wrong_kind(run: Path) -> None:
    with openai_server(lambda messages: "") as server:
        outcome = label(run, server, "--score", "--kind", "detecting")
        assert outcome.status == 2
        assert "did you mean 'detection'" in outcome.err
