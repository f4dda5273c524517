"""Labels from a language model: a real server of the wire format, in every kind of trouble; nothing lost, nothing asked
twice, nothing spent beyond the cap, and no key anywhere."""

import json
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from param_decomp_lab.harvest.files import Harvest, find_harvests
from param_decomp_lab.harvest.files.labels import Labels
from param_decomp_lab.label import asking
from param_decomp_lab.label.choose import Selection, choose_components
from param_decomp_lab.label.endpoint import Endpoint, Reply
from param_decomp_lab.label.ledger import open_ledger
from param_decomp_lab.label.money import Prices
from param_decomp_lab.label.naming import label_question, parse_label
from param_decomp_lab.label.texts import Texts
from param_decomp_lab.ui.console import PlainConsole
from tests.cases import slow_but
from tests.lab.openai_server import KEY, MODEL, Messages, Server, Trouble, openai_server
from tests.lab.tiny_run import PD, ROOT, Outcome, pd_here

RUN = "p-00000001"
SITE = "layers.1.mlp.down_proj"
PRICE_IN, PRICE_OUT = 1000.0, 3000.0
"""Dollars per million tokens: so much that small requests show."""
MAX_TOKENS = 50


def named(messages: Messages) -> str:
    """A label that says which component was asked about."""
    found = re.search(r"Component (\d+) of (\S+?)\.\s", messages[1]["content"])
    assert found is not None
    return json.dumps({"label": f"what {found[2]} {found[1]} does"})


@pytest.fixture
def run(harvested: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of a harvested run. Waits are short."""
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setattr(asking, "FIRST_WAIT_S", 0.01)
    monkeypatch.setattr(asking, "POLL_S", 0.01)
    return Path(shutil.copytree(harvested / RUN, tmp_path / RUN, ignore=shutil.ignore_patterns("ckpts")))


@pytest.fixture
def server() -> Iterator[Server]:
    with openai_server(named) as found:
        yield found
        assert not found.wrong


def command(run: Path, server: Server, *more: str, max_cost: float = 1e5) -> list[str]:
    return [
        "label", str(run), "--base-url", server.address, "--model", MODEL, "--price-in", str(PRICE_IN),
        "--price-out", str(PRICE_OUT), "--max-tokens", str(MAX_TOKENS), "--max-cost", str(max_cost), *more,
    ]  # fmt: skip


def label(run: Path, server: Server, *more: str, **options: Any) -> Outcome:
    outcome = pd_here(*command(run, server, *more, **options))
    assert KEY not in outcome.out + outcome.err
    assert KEY.encode() not in b"".join(file.read_bytes() for file in run.rglob("*") if file.is_file())
    return outcome


def labels_of(run: Path) -> dict[tuple[str, int], str]:
    [folder] = find_harvests(run)
    harvest = Harvest(folder)
    labels = Labels(run, harvest.plan.step)
    return {(site, n): text for site in harvest.sites for n, text in labels.of_site(site).items()}


def requests(run: Path) -> list[dict[str, Any]]:
    with closing(sqlite3.connect(run / "harvests" / "labelling" / "requests.sqlite")) as database:
        database.row_factory = sqlite3.Row
        return [dict(row) for row in database.execute("SELECT * FROM requests ORDER BY id")]


def cost(row: dict[str, Any]) -> int:
    """Of a request, as the server says."""
    return round((row["prompt_tokens"] * PRICE_IN + row["completion_tokens"] * PRICE_OUT) * 1e3)


def most(row: dict[str, Any]) -> int:
    """What a request may cost."""
    prices = Prices(PRICE_IN, PRICE_OUT)
    return Endpoint("http://x/v1", MODEL, prices, MAX_TOKENS).largest_cost(json.loads(row["prompt"]))


def spent(run: Path) -> float:
    return sum(row["nanodollars"] for row in requests(run)) / 1e9


def paid(server: Server) -> float:
    prompt, answer = server.tokens()
    return (prompt * PRICE_IN + answer * PRICE_OUT) / 1e6


# ---- when all goes well ----


def test_labels_are_given_and_shown(run: Path, server: Server) -> None:
    server.delay, server.together = 0.03, 3
    outcome = label(run, server, "--limit", "12", "--parallel", "3")
    assert outcome.status == 0, outcome.err
    [folder] = find_harvests(run)
    chosen = choose_components(Harvest(folder), Selection(limit=12))
    assert labels_of(run) == {(site, n): f"what {site} {n} does" for site, n in chosen}
    density = [Harvest(folder).component(*one)["density"] for one in chosen]
    assert density == sorted(density, reverse=True)
    history = Labels(run, Harvest(folder).plan.step).history(*chosen[0])
    assert [edit.author for edit in history] == [f"{MODEL} (pd label)"]
    assert server.busiest == 3
    assert "12 of 12 components" in outcome.out
    for row in requests(run):
        assert (row["status"], row["model"], row["purpose"]) == ("answered", MODEL, "label")
        assert json.loads(row["prompt"]) in [seen.messages for seen in server.seen]
        assert json.loads(row["answer"])["label"].endswith("does")
        assert row["seconds"] >= 0
        assert row["nanodollars"] == round(
            (row["prompt_tokens"] * PRICE_IN + row["completion_tokens"] * PRICE_OUT) * 1e3
        )
    assert spent(run) == pytest.approx(paid(server))
    # The same command again has nothing to do; a larger limit asks for the rest.
    assert label(run, server, "--limit", "12").status == 0
    assert len(server.seen) == 12
    assert label(run, server, "--limit", "13").status == 0
    assert len(server.seen) == len(set(server.prompts)) == 13


def test_a_prompt_has_what_the_harvest_knows(run: Path) -> None:
    [folder] = find_harvests(run)
    harvest = Harvest(folder)
    site, n = choose_components(harvest, Selection((SITE,), limit=1))[0]
    text = label_question(Texts(harvest), (site, n)).messages[1]["content"]
    words = Texts(harvest).words
    shown = [e for e in harvest.examples(site, n) if e.kind == "top"]
    for example in shown:
        marked = text.replace("«", "").replace("»", "")
        assert "".join(words(example.tokens)) in marked
        here = example.position - example.first
        assert f"«{words(example.tokens)[here]}»" in text
    assert f"Component {n} of {site}" in text
    assert "predicts next" in text
    assert "By itself it raises" in text
    assert len(re.findall(r"^\d+\. ", text, re.MULTILINE)) == len(shown) + 2  # half of the uniform sample


def test_which_components(run: Path) -> None:
    [folder] = find_harvests(run)
    harvest = Harvest(folder)
    densities = {(site, n): d for site in harvest.sites for n, d in enumerate(harvest.densities(site)) if d > 0}
    assert set(choose_components(harvest, Selection())) == set(densities)
    some = choose_components(harvest, Selection(("*.down_proj",), min_density=0.3))
    assert set(some) == {one for one, d in densities.items() if d >= 0.3 and "down" in one[0]}
    assert set(choose_components(harvest, Selection(max_density=0.5))) == {
        one for one, d in densities.items() if d <= 0.5
    }
    by_importance = choose_components(harvest, Selection(by="importance", limit=5))
    means = [harvest.component(*one)["importance_mean"] for one in by_importance]
    every = [harvest.component(*one)["importance_mean"] for one in densities]
    assert means == sorted(every, reverse=True)[:5]


def test_people_keep_their_labels(run: Path, server: Server) -> None:
    [folder] = find_harvests(run)
    first, second, third, fourth = choose_components(Harvest(folder), Selection(limit=4))
    labels = Labels(run, Harvest(folder).plan.step)
    labels.set(*first, "mine", "Ada")
    labels.set(*second, "no good", "Ada")
    labels.set(*second, "", "Ada")  # taken away
    assert label(run, server, "--limit", "3").status == 0
    assert labels_of(run) == {first: "mine", third: f"what {third[0]} {third[1]} does"}
    assert label(run, server, "--limit", "3", "--replace", "models").status == 0
    assert labels_of(run)[first] == "mine"
    assert len(server.seen) == 1  # the model has said already what it says to this question

    def meanwhile(messages: Messages) -> str:
        labels.set(*fourth, "faster", "Ada")
        return named(messages)

    server.answer = meanwhile
    assert label(run, server, "--limit", "4").status == 0
    assert labels_of(run)[fourth] == "faster"
    server.answer = named
    assert label(run, server, "--limit", "4", "--replace", "all").status == 0
    assert all(text.endswith("does") for text in labels_of(run).values())
    assert labels.history(*first)[1].text == "mine"


def test_dry_run(run: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY")
    outcome = pd_here(*command(run, server, "--limit", "5", "--dry-run"))
    assert outcome.status == 0, outcome.err
    assert not server.arrived
    assert not (run / "harvests" / "labelling").exists()
    assert outcome.out.count("Clearest cases") == 1
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    [(expected, largest)] = re.findall(r"5 requests to judge-1: about \$([\d.]+), at most \$([\d.]+)", outcome.out)
    assert label(run, server, "--limit", "5").status == 0
    assert float(expected) / 2 < spent(run) < min(2 * float(expected), float(largest))


# ---- a server in trouble ----


def test_busy_and_broken(run: Path, server: Server) -> None:
    """Each kind of trouble is overcome, and costs what it may have cost."""
    charged = []
    for limit, troubles in (
        (1, {Trouble(500): True, Trouble(503): False, Trouble(breaks=True): True}),
        (2, {Trouble(408): False, Trouble(wait=3.0): True, Trouble(drips=6): True, Trouble(429): False}),
    ):
        server.troubles = list(troubles)
        charged += [*troubles.values(), None]
        outcome = label(run, server, "--limit", str(limit), "--parallel", "1", "--timeout", "1.5")
        assert outcome.status == 0, outcome.err
        assert len(labels_of(run)) == limit
    assert max(row["seconds"] for row in requests(run)) < 4.5
    for row, at_most in zip(requests(run), charged, strict=True):
        assert row["status"] == ("answered" if at_most is None else "again")
        assert row["nanodollars"] == (cost(row) if at_most is None else at_most * most(row))
    assert paid(server) <= spent(run)


def test_retry_after_is_heeded_by_all(run: Path, server: Server) -> None:
    """The two that are on their way are answered a second later, when the client has long read that it should wait."""
    server.troubles = [Trouble(429, "2"), Trouble(wait=1), Trouble(wait=1)]
    assert label(run, server, "--limit", "9", "--parallel", "3").status == 0
    refused = next(seen for seen in server.seen if seen.status == 429)
    later = [seen.time - refused.time for seen in server.seen if seen.time > refused.time]
    assert sum(seconds < 1.99 for seconds in later) <= 2
    assert len(server.prompts) == 9


@pytest.mark.parametrize(
    ("body", "kept"),
    [
        ("{", "not valid JSON"),
        ("[" * 100_000, "nested"),
        pytest.param("[]", "should be an object", marks=pytest.mark.slow),
        pytest.param('{"choices": []}', "without content", marks=pytest.mark.slow),
        (
            '{"choices": [{"message": {"content": null}}], "usage": {"prompt_tokens": -5, "completion_tokens": 1}}',
            "without content",
        ),
        pytest.param('{"choices": [{"message": {"content": "I think so"}}]}', "I think so", marks=pytest.mark.slow),
        ('{"choices": [{"message": {"content": "{\\"label\\": 7}"}}]}', '{"label": 7}'),
        ("x" * 2_000_000, "more than 1,048,576 bytes"),
    ],
    ids=lambda text: text[:40],
)
def test_malformed_answers_are_asked_once_more(run: Path, server: Server, body: str, kept: str) -> None:
    server.troubles = [Trouble(body=body), Trouble(body=body), Trouble(body=body)]
    outcome = label(run, server, "--limit", "2", "--parallel", "1")
    assert outcome.status == 0, outcome.err
    rows = requests(run)
    assert [row["status"] for row in rows] == ["malformed", "failed", "malformed", "answered"]
    assert all(kept in row["answer"] for row in rows[:3])
    assert [row["nanodollars"] for row in rows] == [*map(most, rows[:3]), cost(rows[3])]  # nobody said what it cost
    assert len(labels_of(run)) == 1
    assert "1 without a usable answer" in outcome.out
    assert label(run, server, "--limit", "2").status == 0
    assert len(requests(run)) == 4  # a failed question stays failed
    assert label(run, server, "--limit", "2", "--retry-failed").status == 0
    assert len(labels_of(run)) == 2


@pytest.mark.parametrize("status", [401, 404, 400])
def test_refused(run: Path, server: Server, status: int) -> None:
    server.troubles = [Trouble(status)] * 20
    outcome = label(run, server, "--limit", "20", "--parallel", "2")
    assert outcome.status == 2
    assert "in trouble; you sent Bearer [key]" in outcome.err
    assert len(server.seen) <= 2
    assert spent(run) == 0


def test_a_server_that_stays_away(run: Path, server: Server) -> None:
    server.troubles = [Trouble(502)] * 50
    outcome = label(run, server, "--limit", "8", "--parallel", "2")
    assert outcome.status == 1
    assert "has not answered in 6 tries" in outcome.err
    assert "Traceback" not in outcome.err
    server.troubles = []
    assert label(run, server, "--limit", "8").status == 0
    assert len(labels_of(run)) == 8
    server.server_close()  # nobody there
    outcome = label(run, server, "--limit", "9")
    assert outcome.status == 1
    assert "no connection" in outcome.err


# ---- the cap ----


@pytest.mark.parametrize("parallel", slow_but(["8"], ["1", "8"]))
def test_the_cap_holds(run: Path, server: Server, parallel: str) -> None:
    server.delay = 0.02
    cap = 16.0  # a request can cost some 5 dollars, and costs 1
    outcome = label(run, server, "--limit", "24", "--parallel", parallel, max_cost=cap)
    assert outcome.status == 1
    assert "--max-cost" in outcome.out
    assert paid(server) <= spent(run) <= cap
    largest = max(row["nanodollars"] for row in requests(run)) / 1e9
    n = len(labels_of(run))
    assert 0 < n < 24
    assert spent(run) > cap - 4 * largest  # what was reserved and not needed was spent on others
    assert label(run, server, "--limit", "24", max_cost=cap).status == 1
    assert spent(run) <= cap
    assert label(run, server, "--limit", "24").status == 0
    assert len(labels_of(run)) == 24
    assert len(server.prompts) == len(set(server.prompts)) == 24


def test_nothing_is_sent_that_the_cap_does_not_cover(run: Path, server: Server) -> None:
    assert label(run, server, max_cost=0.5).status == 1
    assert not server.arrived


def test_what_was_in_flight_counts_at_the_most_it_can_have_cost(run: Path, server: Server) -> None:
    harvest = Harvest(find_harvests(run)[0])
    [component] = choose_components(harvest, Selection(limit=1))
    question = label_question(Texts(harvest), component)
    endpoint = Endpoint(server.address, MODEL, Prices(PRICE_IN, PRICE_OUT), MAX_TOKENS)
    with open_ledger(run, 10**15, PlainConsole(quiet=True)) as ledger:  # the process is killed after this
        assert ledger.reserve(question, question.key(MODEL), endpoint) == 1
    largest = endpoint.largest_cost(question.messages) / 1e9
    outcome = label(run, server, "--limit", "1", max_cost=1.9 * largest)
    assert (outcome.status, server.arrived) == (1, 0)
    assert "1 earlier requests" in outcome.out
    assert label(run, server, "--limit", "1", max_cost=2.1 * largest).status == 0
    assert largest + paid(server) == pytest.approx(spent(run))


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_killed_and_resumed(run: Path, server: Server, rounds: int) -> None:
    """kill -9 at any moment: nothing is lost, and only what was in flight is asked again, and paid for twice."""
    server.delay = 0.1
    cap, parallel = 4000.0, 4
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    for _ in range(rounds):
        answered = len(server.seen)
        arguments = command(run, server, "--limit", "60", "--parallel", str(parallel), max_cost=cap)
        with (run.parent / "output").open("ab") as output:
            process = subprocess.Popen([*PD, *arguments], cwd=ROOT, env=environment, stdout=output, stderr=output)
            deadline = time.monotonic() + 60
            while len(server.seen) < answered + 6:
                assert process.poll() is None, (run.parent / "output").read_text()
                assert time.monotonic() < deadline
                time.sleep(0.01)
            process.send_signal(signal.SIGKILL)
            process.wait()
    time.sleep(0.3)  # what was in flight is answered, to nobody
    rows = requests(run)
    in_flight = [row for row in rows if row["status"] == "sent"]
    assert 0 < len(in_flight) <= rounds * parallel
    server.delay = 0.0
    outcome = label(run, server, "--limit", "60", max_cost=cap)
    assert outcome.status == 0, outcome.err
    assert f"{len(in_flight)} earlier requests were sent" in outcome.out
    assert len(labels_of(run)) == 60
    twice = len(server.prompts) - len(set(server.prompts))
    assert len(set(server.prompts)) == 60
    assert twice <= len(in_flight)
    assert paid(server) <= spent(run) <= cap
    assert KEY not in (run.parent / "output").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_stopped_in_order(run: Path, server: Server, number: signal.Signals) -> None:
    """Answers that are on their way are waited for; nothing is asked twice at all."""
    server.delay = 0.2
    process = subprocess.Popen(
        [*PD, *command(run, server, "--parallel", "3")], cwd=ROOT, env=os.environ | {"JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while server.arrived < 5:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 75, output
    assert "run the same command again" in output
    assert KEY not in output
    assert {row["status"] for row in requests(run)} == {"answered"}
    assert len(labels_of(run)) == server.arrived == len(server.seen)


# ---- mistakes ----


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--base-url", "ftp://x/v1"), "--base-url should be"),
        (("--base-url", "http://me:secret-word@x/v1"), "--base-url should be"),
        (("--base-url", "https://x/v1?api-key=secret-word"), "--base-url should be"),
        (("--base-url", "http://[::1/v1"), "--base-url should be"),
        (("--key-env", "NOT_THERE"), "NOT_THERE holds no key"),
        (("--sites", "layers.7.*"), "matches no site"),
        (("--min-density", "2"), "--min-density"),
        (("--max-density", "nan"), "--max-density"),
        (("--max-cost", "nan"), "--max-cost"),
        (("--price-in", "inf"), "--price-in"),
        (("--timeout", "nan"), "--timeout"),
        (("--model", "\x1b[2J"), "--model"),
        (("--score",), "has a label; label them first"),
    ],
)
def test_mistakes(run: Path, server: Server, more: tuple[str, ...], message: str) -> None:
    outcome = label(run, server, *more)
    assert outcome.status == 2
    assert message in outcome.err
    assert "secret-word" not in outcome.err
    assert not server.arrived


def test_a_key_that_is_none_is_not_shown(run: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", f"{KEY}\nX-Other: 1")
    outcome = label(run, server)
    assert outcome.status == 2
    assert "holds no key" in outcome.err


def test_two_at_a_time_are_refused(run: Path, server: Server) -> None:
    with open_ledger(run, 10**12, PlainConsole(quiet=True)):
        outcome = label(run, server)
    assert (outcome.status, server.arrived) == (2, 0)
    assert "another job is in" in outcome.err


def test_what_is_no_run_of_text(run: Path, server: Server, harvested: Path, tmp_path: Path) -> None:
    for folder, message in (
        (harvested / "p-00000002", "its inputs are features"),
        (tmp_path / "nowhere", "is not a folder"),
        (tmp_path, "has no harvest"),
    ):
        outcome = pd_here(*command(folder, server))
        assert outcome.status == 2
        assert message in outcome.err
    (run / "harvests" / "labelling").mkdir()
    (run / "harvests" / "labelling" / "requests.sqlite").write_bytes(b"garbage" * 1000)
    outcome = label(run, server)
    assert (outcome.status, server.arrived) == (2, 0)
    assert "so what was spent is unknown" in outcome.err


# ---- the parts ----


def test_costs_are_exact_and_rounded_up() -> None:
    prices = Prices(0.15, 0.6)
    assert prices.cost(1, 0) == 150
    assert prices.cost(7, 3) == 7 * 150 + 3 * 600
    assert Prices(0.0001, 0).cost(1, 0) == 1
    endpoint = Endpoint("http://x/v1", "m", prices, 100)
    for text in ("plain", "näh — 東京 🎉"):
        messages = ({"role": "user", "content": text},)
        assert endpoint.largest_cost(messages) >= prices.cost(len(text.encode()), 100)
    assert endpoint.cost(Reply("again", ""), 17) == 17
    assert endpoint.cost(Reply("again", "", free=True), 17) == 0
    assert endpoint.cost(Reply("malformed", "", usage=(1, 1)), 17) == 750


@pytest.mark.parametrize(
    ("answer", "label"),
    [
        ('{"label": " vowels\\n before n "}', "vowels before n"),
        ('```json\n{"label": "x"}\n```', "x"),
        ("vowels", None), ('{"label": ""}', None), ('{"label": "' + "x" * 301 + '"}', None), ("{}", None),
        ('{"label": "a\\u202eb"}', None), ("} {", None), ('{"label": "\\ud800"}', None),
    ],
)  # fmt: skip
def test_labels_in_answers(answer: str, label: str | None) -> None:
    if label is None:
        with pytest.raises(ValueError, match=r"."):
            parse_label(answer)
    else:
        assert parse_label(answer) == label
