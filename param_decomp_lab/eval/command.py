"""`pd eval`: evaluates a run, prints the results and writes them as JSON."""

import json
import secrets
import time
from pathlib import Path

from rich.console import Console

from param_decomp_lab.errors import CannotWrite, UserError
from param_decomp_lab.eval.request import EvaluationRequest
from param_decomp_lab.eval.run_evaluation import Evaluated, as_json, evaluate_run
from param_decomp_lab.folders import is_irregular, write_whole
from param_decomp_lab.runs.folder import EVALUATIONS
from param_decomp_lab.runs.output_file import check_output_file, run_around
from param_decomp_lab.ui.numbers import number
from param_decomp_lab.ui.tables import plain_table


def evaluate(
    run: Path,
    request: EvaluationRequest,
    step: int | None,
    out: Path | None,
    devices: int | None,
    target: Path | None,
    console: Console,
) -> None:
    """Evaluates a run and writes ``out``, a JSON file (None: a new file in the run folder); figures go next to it.

    Raises UserError before evaluating if ``out`` cannot be written or belongs to a run, and CannotWrite if writing
    fails afterwards.
    """
    file = out or run / EVALUATIONS / f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}.json"
    check_output_file(file, "--out")
    figures = _figures_beside(file)
    if figures is not None and run_around(figures / "figure.png"):
        raise UserError(f"--out {file}: its figures would go into {figures}, a run's folder; choose another name")
    found = evaluate_run(run, request, step=step, figures=figures, devices=devices, target=target)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, json.dumps(as_json(found, run), indent=2) + "\n")
    except OSError as error:
        _show(found, console)  # so that the results are not lost
        raise CannotWrite(f"cannot write {file}: {error.strerror or error}; choose another place with --out") from error
    _show(found, console)
    for path in (file, *found.figures.values()):
        console.print(str(path), soft_wrap=True)


def _figures_beside(file: Path) -> Path | None:
    """The folder for the figures; None, which omits them, if the results go into a device or a pipe."""
    if is_irregular(file):
        return None
    return file.with_suffix("") if file.suffix else file.with_name(f"{file.name}-figures")


def _show(found: Evaluated, console: Console) -> None:
    settings = found.settings
    title = f"Step {found.step:,}, {settings.n_steps} batches of {settings.batch_size} from {found.data}"
    table = plain_table(title, ("metric", "left"), ("value", "right"))
    for name, value in found.row.items():
        table.add_row(name.removeprefix("eval/"), number(value))
    console.print(table if found.row else title)
