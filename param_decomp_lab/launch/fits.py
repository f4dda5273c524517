"""Whether runs fit on the GPUs that they are to be submitted to, before they wait in a queue for that answer."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from param_decomp_lab.display.notes import print_notes
from param_decomp_lab.errors import CannotTell, UserError
from param_decomp_lab.launch.place import Place
from param_decomp_lab.probe.subprocess import Told, probe_apart

UNASKED = "submit without asking: --no-probe"


@dataclass(frozen=True)
class Question:
    """A run: its wrapper with assignments, and what it is called here."""

    path: Path
    sets: tuple[str, ...]
    name: str


def all_fit(questions: Sequence[Question], place: Place, gpu: str, console: Console, anyway: bool) -> bool:
    """Asks `pd probe` about every run, and says what it answers; False where one does not fit and ``anyway`` is not so.

    UserError where the question cannot be asked, CannotTell where it gets no answer (unless ``anyway``).
    """
    options = ("--gpu", gpu, "--nodes", str(place.nodes), "--gpus-per-node", str(place.per_node))
    good = True
    for question in questions:
        name = escape(question.name)
        console.print(f"asking whether {name} fits on {gpu.upper()}s (minutes the first time) …", highlight=False)
        told = probe_apart(question.path, question.sets, options)
        if told.status == 2:
            raise UserError(f"pd probe: {told.why}\n{UNASKED}")
        if told.answer is None:
            if not anyway:
                raise CannotTell(f"{question.name}: pd probe cannot tell whether it fits: {told.why}\n{UNASKED}")
            print_notes([f"nobody knows whether {question.name} fits; submitted anyway"], console)
            continue
        fits = told.answer["verdict"] == "fits"
        console.print(_said(question, told), highlight=False, soft_wrap=True)
        if not fits and anyway:
            print_notes(["submitted anyway"], console)
        good = good and (fits or anyway)
    return good


def _said(question: Question, told: Told) -> str:
    answer = told.answer
    assert answer is not None
    need = f"needs {answer['peak_gib']:.1f} of {answer['pool_gib']:.1f} GiB of each GPU ({answer['largest_part']})"
    if answer["verdict"] == "fits":
        return f"[green]fits[/]: {escape(question.name)} {need}"
    return f"{escape(told.out.rstrip())}\n[bold red]does not fit[/]: {escape(question.name)} {need}"
