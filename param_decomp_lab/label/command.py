"""`pd label`: chooses components, has a model name them or judge their labels, and says what came of it."""

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from rich.console import Console

from param_decomp_lab.config.strict import nearest
from param_decomp_lab.display.numbers import number
from param_decomp_lab.display.tables import plain_table
from param_decomp_lab.errors import UserError
from param_decomp_lab.harvest_files.labels import LONGEST_NAME, Label
from param_decomp_lab.harvest_files.scores import CHANCE, Kind, Score
from param_decomp_lab.label.asking import Asker, Ended
from param_decomp_lab.label.choose import Component, Selection, choose_components
from param_decomp_lab.label.draws import Draws
from param_decomp_lab.label.endpoint import Endpoint
from param_decomp_lab.label.judging import Truth, score_questions
from param_decomp_lab.label.ledger import Ledger, Question, open_ledger, spent_so_far
from param_decomp_lab.label.money import NANO, dollars, expected_tokens
from param_decomp_lab.label.naming import label_question
from param_decomp_lab.label.place import LabelledRun
from param_decomp_lab.label.scoring import Tally, overall

BY_MODEL = " (pd label)"
"""At the end of the author's name where a model has labelled."""
REPORT_EVERY_S = 10.0
ESTIMATED_FROM = 20
"""Components whose questions an estimate of all is made from."""
Replace = Literal["none", "models", "all"]


@dataclass(frozen=True)
class Request:
    """``max_cost``: dollars, of all that was ever asked for this run. ``replace``: labels that may be replaced: none,
    those by models, or people's too. ``retry_failed``: ask again what got no usable answer."""

    selection: Selection
    max_cost: float
    parallel: int = 8
    replace: Replace = "none"
    retry_failed: bool = False


@dataclass(frozen=True)
class ScoreRequest:
    """``kinds``: of scores. ``texts``: of each class, or groups of texts, for each component."""

    kinds: tuple[Kind, ...]
    texts: int
    seed: int


Stop = Callable[[], bool]


def author(model: str) -> str:
    return model[: LONGEST_NAME - len(BY_MODEL)] + BY_MODEL


def kinds_named(names: Sequence[str]) -> tuple[Kind, ...]:
    """All kinds of scores for no names. UserError for a name that is none."""
    for name in names:
        if name not in CHANCE:
            raise UserError(f"--kind {name} is no kind of score; {nearest(name, CHANCE)}")
    return tuple(kind for kind in CHANCE if kind in names or not names)


# ---- labels ----


def label(run: LabelledRun, endpoint: Endpoint, request: Request, console: Console, stop: Stop) -> Ended:
    """Labels the chosen components. Raises as `Asker.ask` does."""
    chosen = _unlabelled(run, request)
    questions = (label_question(run.texts, component) for component in chosen)
    may_replace = _may_replace(request.replace)
    with _asking(run, endpoint, request, console, stop) as asking:
        progress = _Progress(console, asking.ledger, len(chosen), "components")

        def take(question: Question, text: str | None) -> None:
            if text is not None:
                name = author(endpoint.model)
                run.labels.set(question.site, question.component, text, name, may_replace=may_replace)
            progress.advance()

        ended = asking.asker.ask(questions, take)
        _say_end(console, asking, ended, f"{progress.done:,} of {len(chosen):,} components")
    return ended


def _unlabelled(run: LabelledRun, request: Request) -> list[Component]:
    """The chosen components but those whose last edit stands: a label that was taken away stays away, too."""
    may_replace, edits = _may_replace(request.replace), dict[str, dict[int, Label]]()
    kept = []
    for site, n in choose_components(run.harvest, request.selection):
        if site not in edits:
            edits[site] = run.labels.last_edits(site)
        if n not in edits[site] or may_replace(edits[site][n]):
            kept.append((site, n))
    return kept


def _may_replace(replace: Replace) -> Callable[[Label], bool]:
    match replace:
        case "none":
            return lambda last: False
        case "models":
            return lambda last: last.author.endswith(BY_MODEL)
        case "all":
            return lambda last: True


# ---- scores ----


def score(
    run: LabelledRun, endpoint: Endpoint, request: Request, wanted: ScoreRequest, console: Console, stop: Stop
) -> Ended:
    """Scores labels, and prints a table of all that this judge has scored. Raises as `Asker.ask` does."""
    draws = Draws(run.texts, wanted.seed, wanted.texts)
    jobs = list(_jobs(run, endpoint, request, wanted, draws))
    todo = [job for job in jobs if not job.is_known]
    truths: dict[int, tuple[_Job, Truth]] = {}
    tallies: dict[_Job, Tally] = {}
    missing: dict[_Job, int] = {}

    def questions(progress: "_Progress") -> Iterator[Question]:
        for job in todo:
            made = list(score_questions(run.texts, draws, job.kind, job.component, job.label))
            tallies[job], missing[job] = Tally(), len(made)
            if not made:
                keep(job, progress)
            for question, truth in made:
                truths[id(question)] = job, truth
                yield question

    def keep(job: _Job, progress: "_Progress") -> None:
        tally = tallies.pop(job)
        value, error = tally.score(1 if job.kind == "intruder" else 2)
        run.scores.keep(
            *job.component,
            Score(job.kind, endpoint.model, draws.name, job.label, value, error, tally.asked, tally.unanswered),
        )
        progress.advance()

    with _asking(run, endpoint, request, console, stop) as asking:
        progress = _Progress(console, asking.ledger, len(todo), "scores")

        def take(question: Question, answer: Any) -> None:
            job, truth = truths.pop(id(question))
            tallies[job].add(truth, answer)
            missing[job] -= 1
            if not missing[job]:
                keep(job, progress)

        ended = asking.asker.ask(questions(progress), take)
        _say_end(console, asking, ended, f"{progress.done:,} of {len(todo):,} scores")
    _print_scores(run, endpoint, wanted, draws, jobs, console)
    return ended


@dataclass(frozen=True)
class _Job:
    """A score that is asked for. ``is_known``: it is there already."""

    kind: Kind
    component: Component
    label: str
    is_known: bool


def _jobs(run: LabelledRun, endpoint: Endpoint, request: Request, wanted: ScoreRequest, draws: Draws) -> Iterator[_Job]:
    labels = {site: run.labels.of_site(site) for site in run.harvest.sites}
    known = {kind: run.scores.by_judge(kind, endpoint.model, draws.name) for kind in wanted.kinds}
    needs_label = set(wanted.kinds) != {"intruder"}
    n = 0
    for component in choose_components(run.harvest, request.selection):
        text = labels[component[0]].get(component[1], "")
        if needs_label and not text:
            continue
        n += 1
        for kind in wanted.kinds:
            judged = "" if kind == "intruder" else text
            before = known[kind].get(component)
            same = before is not None and before.label == judged
            is_known = same and not (before is not None and before.unanswered and request.retry_failed)
            yield _Job(kind, component, judged, is_known)
    if needs_label and n == 0:
        raise UserError(
            f"none of the chosen components of {run.harvest.folder} has a label; label them first (pd label RUN), or "
            "score them without one: --kind intruder"
        )


def _print_scores(
    run: LabelledRun,
    endpoint: Endpoint,
    wanted: ScoreRequest,
    draws: Draws,
    jobs: Sequence[_Job],
    console: Console,
) -> None:
    table = plain_table(
        f"Scores by {endpoint.model}",
        ("", "left"), ("score", "right"), ("standard error", "right"), ("chance", "right"),
        ("components", "right"), ("asked", "right"), ("unanswered", "right"),
    )  # fmt: skip
    for kind in wanted.kinds:
        kept = run.scores.by_judge(kind, endpoint.model, draws.name)
        scores = [kept.get(job.component) for job in jobs if job.kind == kind]
        total = overall(score for score in scores if score is not None)
        table.add_row(
            kind, _share(total.mean), _share(total.standard_error), _share(CHANCE[kind]),
            f"{total.components:,}", f"{total.asked:,}", f"{total.unanswered:,}",
        )  # fmt: skip
    console.print(table)


def _share(value: float | None) -> str:
    return number(None) if value is None else f"{value:.3f}"


# ---- both ----


@dataclass
class _Asking:
    ledger: Ledger
    asker: Asker
    spent_before: int


@contextmanager
def _asking(run: LabelledRun, endpoint: Endpoint, request: Request, console: Console, stop: Stop) -> Iterator[_Asking]:
    """A block in which this process alone asks for a run."""
    with open_ledger(run.folder, round(request.max_cost * NANO), console) as ledger:
        if ledger.unanswered:
            console.print(
                f"{ledger.unanswered:,} earlier requests were sent and their answers are not known; they count as "
                "spent at the most that they can have cost",
                highlight=False, soft_wrap=True,
            )  # fmt: skip
        asker = Asker(endpoint, ledger, request.parallel, stop, request.retry_failed)
        yield _Asking(ledger, asker, ledger.spent)


class _Progress:
    """Prints a line now and then."""

    def __init__(self, console: Console, ledger: Ledger, total: int, unit: str) -> None:
        self._console, self._ledger, self._total, self._unit = console, ledger, total, unit
        self._last = time.monotonic()
        self.done = 0

    def advance(self) -> None:
        self.done += 1
        if time.monotonic() - self._last >= REPORT_EVERY_S:
            self._last = time.monotonic()
            self._console.print(
                f"{self.done:,} of {self._total:,} {self._unit}, {dollars(self._ledger.spent)} of "
                f"{dollars(self._ledger.cap)}",
                highlight=False,
            )


def _say_end(console: Console, asking: _Asking, ended: Ended, what: str) -> None:
    counts, ledger = asking.asker.counts, asking.ledger
    console.print(
        f"{what}: {counts.asked:,} questions answered, {counts.failed:,} without a usable answer, {counts.known:,} "
        f"known before; {counts.requests:,} requests, {dollars(ledger.spent - asking.spent_before)}. "
        f"Spent on this run so far: {dollars(ledger.spent)} of {dollars(ledger.cap)}",
        highlight=False, soft_wrap=True,
    )  # fmt: skip
    if ended == "cap":
        console.print(
            "the next request could cost more than is left; to go on, give the same command a higher --max-cost",
            highlight=False, soft_wrap=True,
        )  # fmt: skip


def dry_run(
    run: LabelledRun, endpoint: Endpoint, request: Request, wanted: ScoreRequest | None, console: Console
) -> None:
    """Prints one prompt, and what all of them would cost. Asks nobody, and writes nothing."""
    if wanted is None:
        chosen = _unlabelled(run, request)
        sample: Iterable[Question] = (label_question(run.texts, component) for component in chosen[:ESTIMATED_FROM])
        count, what = len(chosen), f"{len(chosen):,} components to label"
    else:
        draws = Draws(run.texts, wanted.seed, wanted.texts)
        todo = [job for job in _jobs(run, endpoint, request, wanted, draws) if not job.is_known]
        some = todo[: ESTIMATED_FROM * len(wanted.kinds)]
        by_job = [list(score_questions(run.texts, draws, job.kind, job.component, job.label)) for job in some]
        sample = [question for question, _ in itertools.chain.from_iterable(by_job)]
        count = round(len(sample) * len(todo) / max(1, len(some)))
        what = f"{len(todo):,} scores to find"
    questions = list(sample)
    if questions:
        for message in questions[0].messages:
            console.print(f"--- {message['role']}\n{message['content']}", highlight=False, soft_wrap=True)
        console.print("---", highlight=False)
    expected = [endpoint.prices.cost(expected_tokens(q.messages), endpoint.max_tokens // 4) for q in questions]
    largest = [endpoint.largest_cost(q.messages) for q in questions]
    scale = count / max(1, len(questions))
    console.print(
        f"{what}, {count:,} requests to {endpoint.model}: about {dollars(round(sum(expected) * scale))}, at most "
        f"{dollars(round(sum(largest) * scale))} if each is answered at once. Spent on this run so far: "
        f"{dollars(spent_so_far(run.folder))} of {dollars(round(request.max_cost * NANO))}",
        highlight=False, soft_wrap=True,
    )  # fmt: skip
