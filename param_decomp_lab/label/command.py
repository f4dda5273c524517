"""`pd label`: chooses components, and has a model name them."""

from collections.abc import Callable

from rich.console import Console

from param_decomp_lab.harvest.files.labels import BY_MODEL, LONGEST_NAME, Label
from param_decomp_lab.label.asking import Ended
from param_decomp_lab.label.choose import Component, choose_components
from param_decomp_lab.label.endpoint import Endpoint
from param_decomp_lab.label.ledger import Question
from param_decomp_lab.label.naming import label_question
from param_decomp_lab.label.place import LabelledRun
from param_decomp_lab.label.session import Progress, Replace, Request, Stop, open_session, say_end


def author(model: str) -> str:
    return model[: LONGEST_NAME - len(BY_MODEL)] + BY_MODEL


def label(run: LabelledRun, endpoint: Endpoint, request: Request, console: Console, stop: Stop) -> Ended:
    """Labels the chosen components. Raises as `Asker.ask` does."""
    chosen = unlabelled(run, request)
    questions = (label_question(run.texts, component) for component in chosen)
    may_replace = _may_replace(request.replace)
    with open_session(run, endpoint, request, console, stop) as asking:
        progress = Progress(console, asking.ledger, len(chosen), "components")

        def take(question: Question, text: str | None) -> None:
            if text is not None:
                name = author(endpoint.model)
                run.labels.set(question.site, question.component, text, name, may_replace=may_replace)
            progress.advance()

        ended = asking.asker.ask(questions, take)
        say_end(console, asking, ended, f"{progress.done:,} of {len(chosen):,} components")
    return ended


def unlabelled(run: LabelledRun, request: Request) -> list[Component]:
    """Returns the chosen components except those whose last edit is kept; a removed label is also kept removed."""
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
