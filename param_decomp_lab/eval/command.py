"""`pd eval`: evaluates a run, prints what came out and writes it as JSON."""

import json
import secrets
import time
from pathlib import Path

from rich.console import Console

from param_decomp_lab.display.numbers import number
from param_decomp_lab.display.tables import plain_table
from param_decomp_lab.errors import UserError
from param_decomp_lab.eval.request import EvaluationRequest
from param_decomp_lab.eval.run_evaluation import Evaluated, as_json, evaluate_run
from param_decomp_lab.folders import write_whole

FOLDER = "evals"
"""Subfolder of a run folder with the results of `pd eval`."""


def evaluate(
    run: Path,
    request: EvaluationRequest,
    step: int | None,
    out: Path | None,
    devices: int | None,
    target: Path | None,
    console: Console,
) -> None:
    """Evaluates a run and writes ``out``, a JSON file (None: a new file in the run folder); figures go next to it."""
    file = out or run / FOLDER / f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}.json"
    if file.is_dir():
        raise UserError(f"--out {file} is a folder; give the JSON file to write")
    _refuse_unwritable(file.parent)
    found = evaluate_run(run, request, step=step, figures=file.with_suffix(""), devices=devices, target=target)
    try:
        write_whole(file, json.dumps(as_json(found, run), indent=2) + "\n")
    except OSError as error:
        raise UserError(f"cannot write {file}: {error.strerror or error}; choose another place with --out") from error
    _show(found, console)
    for path in (file, *found.figures.values()):
        console.print(str(path), soft_wrap=True)


def _refuse_unwritable(folder: Path) -> None:
    """Raises UserError if ``folder`` cannot be written, before the evaluation rather than after it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UserError(f"cannot write to {folder}: {error.strerror}; choose another place with --out") from error


def _show(found: Evaluated, console: Console) -> None:
    settings = found.settings
    title = f"Step {found.step:,}, {settings.n_steps} batches of {settings.batch_size} from {found.data}"
    table = plain_table(title, ("metric", "left"), ("value", "right"))
    for name, value in found.row.items():
        table.add_row(name.removeprefix("eval/"), number(value))
    console.print(table if found.row else title)
