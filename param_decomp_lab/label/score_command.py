"""`pd label --score`: has a model judge labels, and reports the scores."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from param_decomp_lab.errors import UserError
from param_decomp_lab.harvest.files.scores import CHANCE, Kind, Score
from param_decomp_lab.label.asking import Ended
from param_decomp_lab.label.choose import Component, choose_components
from param_decomp_lab.label.draws import Draws
from param_decomp_lab.label.endpoint import Endpoint
from param_decomp_lab.label.judging import Truth, score_questions
from param_decomp_lab.label.ledger import Question
from param_decomp_lab.label.place import LabelledRun
from param_decomp_lab.label.scoring import Tally, overall
from param_decomp_lab.label.session import Progress, Request, Stop, open_session, say_end
from param_decomp_lab.schema.spelling import nearest
from param_decomp_lab.ui.numbers import number
from param_decomp_lab.ui.tables import plain_table


@dataclass(frozen=True)
class ScoreRequest:
    """The options of scoring. ``kinds``: of scores. ``texts``: the number of texts of each class, or of groups of
    texts, for each component.
    """

    kinds: tuple[Kind, ...]
    texts: int
    seed: int


def kinds_named(names: Sequence[str]) -> tuple[Kind, ...]:
    """Returns the named kinds of scores; all of them without names. Raises UserError for an unknown name."""
    for name in names:
        if name not in CHANCE:
            raise UserError(f"--kind {name} is not a kind of score; {nearest(name, CHANCE)}")
    return tuple(kind for kind in CHANCE if kind in names or not names)


@dataclass(frozen=True)
class ScoreJob:
    """A requested score. ``is_known``: whether it already exists."""

    kind: Kind
    component: Component
    label: str
    is_known: bool


def find_jobs(
    run: LabelledRun, endpoint: Endpoint, request: Request, wanted: ScoreRequest, draws: Draws
) -> Iterator[ScoreJob]:
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
            yield ScoreJob(kind, component, judged, is_known)
    if needs_label and n == 0:
        raise UserError(
            f"none of the chosen components of {run.harvest.folder} has a label; label them first (pd label RUN), or "
            "score them without one: --kind intruder"
        )


def score(
    run: LabelledRun, endpoint: Endpoint, request: Request, wanted: ScoreRequest, console: Console, stop: Stop
) -> Ended:
    """Scores labels, and prints a table of everything that this judge has scored. Raises as `Asker.ask` does."""
    draws = Draws(run.texts, wanted.seed, wanted.texts)
    jobs = list(find_jobs(run, endpoint, request, wanted, draws))
    todo = [job for job in jobs if not job.is_known]
    truths: dict[int, tuple[ScoreJob, Truth]] = {}
    tallies: dict[ScoreJob, Tally] = {}
    missing: dict[ScoreJob, int] = {}

    def questions(progress: "Progress") -> Iterator[Question]:
        for job in todo:
            made = list(score_questions(run.texts, draws, job.kind, job.component, job.label))
            tallies[job], missing[job] = Tally(), len(made)
            if not made:
                keep(job, progress)
            for question, truth in made:
                truths[id(question)] = job, truth
                yield question

    def keep(job: ScoreJob, progress: "Progress") -> None:
        tally = tallies.pop(job)
        value, error = tally.score(1 if job.kind == "intruder" else 2)
        run.scores.keep(
            *job.component,
            Score(job.kind, endpoint.model, draws.name, job.label, value, error, tally.asked, tally.unanswered),
        )
        progress.advance()

    with open_session(run, endpoint, request, console, stop) as asking:
        progress = Progress(console, asking.ledger, len(todo), "scores")

        def take(question: Question, answer: Any) -> None:
            job, truth = truths.pop(id(question))
            tallies[job].add(truth, answer)
            missing[job] -= 1
            if not missing[job]:
                keep(job, progress)

        ended = asking.asker.ask(questions(progress), take)
        say_end(console, asking, ended, f"{progress.done:,} of {len(todo):,} scores")
    print_scores(run, endpoint, wanted, draws, jobs, console)
    return ended


def print_scores(
    run: LabelledRun,
    endpoint: Endpoint,
    wanted: ScoreRequest,
    draws: Draws,
    jobs: Sequence[ScoreJob],
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
