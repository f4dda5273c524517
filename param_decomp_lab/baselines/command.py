"""`pd eval --baselines`: measures, prints, and writes a table and a figure."""

import math
from collections.abc import Sequence
from pathlib import Path

from jaxtyping import Array
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from param_decomp_lab.baselines.figure import comparison_figure
from param_decomp_lab.baselines.kept import Kept, keep
from param_decomp_lab.baselines.measure import compare
from param_decomp_lab.baselines.parts import Choice
from param_decomp_lab.baselines.replacements import read_dictionaries
from param_decomp_lab.baselines.result import Comparison, caption
from param_decomp_lab.baselines.verdict import title, verdict, with_k_on
from param_decomp_lab.data.batches import epoch_order
from param_decomp_lab.data.sources import BatchSource
from param_decomp_lab.errors import CannotWrite, UserError
from param_decomp_lab.eval.request import EvaluationRequest, evaluation_config
from param_decomp_lab.eval.run_evaluation import evaluation_batches
from param_decomp_lab.metrics.figures.save import figure_path, save_figure
from param_decomp_lab.opening import Run, load_run
from param_decomp_lab.runs.output_file import check_output_file
from param_decomp_lab.runs.position_attack import BASELINES_NAME, comparison_file
from param_decomp_lab.ui.numbers import number
from param_decomp_lab.ui.tables import plain_table

POSITIONS = 1 << 14
"""The least number of positions at which second moments are measured: many more than a matrix has inputs."""
MOST_DRAWS = 64
"""The most batches of a toy at which second moments are measured."""


def compare_with_baselines(
    folder: Path,
    request: EvaluationRequest,
    lengths: tuple[int, ...],
    step: int | None,
    out: Path | None,
    devices: int | None,
    target: Path | None,
    console: Console,
    matched_only: bool = False,
    saes: Sequence[Path] = (),
    choice: Choice = "activation",
) -> Comparison:
    """Compares a run with baselines. Writes ``out``, a JSON file, and a figure beside it; None writes into the run's
    folders of evaluations and figures, which the report reads. ``saes``: folders of SAEs and transcoders to include.
    ``choice``: how parts are chosen. Raises UserError and CannotWrite.
    """
    if out is not None:
        check_output_file(out, "--out")
    dictionaries = read_dictionaries(saes)
    run = load_run(folder, step, devices=devices, target=target)
    config = evaluation_config(run.config, request, f"{folder}: the evaluation")
    settings = config.method.eval
    assert settings is not None
    source, data = evaluation_batches(run, config, request)
    batches = [source(n) for n in range(settings.n_steps)]
    others = other_batches(run, source, settings.n_steps, settings.batch_size)
    found = compare(
        run,
        batches,
        others,
        lengths,
        progress=lambda what: console.print(f"measuring {what} …", highlight=False),
        matched_only=matched_only,
        dictionaries=dictionaries,
        choice=choice,
    )
    file = out or comparison_file(run.folder, run.step)
    picture = figure_path(run.folder, BASELINES_NAME, run.step) if out is None else out.with_suffix(".png")
    show(found, data, console)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        keep(file, Kept(found, data))
        save_figure(comparison_figure(found), picture)
    except OSError as error:
        raise CannotWrite(f"cannot write {file}: {error.strerror or error}; choose another place with --out") from error
    for path in (file, picture):
        console.print(str(path), highlight=False, soft_wrap=True)
    return found


def other_batches(run: Run, source: BatchSource, n_measured: int, batch_size: int) -> list[Array]:
    """Returns batches that are not used for measuring, with `POSITIONS` positions in total: rows of the training data,
    or a toy's next draws.
    """
    if not run.is_language_model:
        return [source(n_measured + n) for n in range(min(MOST_DRAWS, math.ceil(POSITIONS / batch_size)))]
    data = run.resolved.train_rows
    n = math.ceil(POSITIONS / (batch_size * data.seq_len))
    chosen = epoch_order(0, 0, len(data))[: n * batch_size]
    whole = len(chosen) - len(chosen) % batch_size
    if not whole:
        raise UserError(f"--batch-size {batch_size}: the training data have {len(data)} rows only")
    rows = data.rows(chosen[:whole])
    return [run.as_batch(rows[start : start + batch_size])[0] for start in range(0, whole, batch_size)]


def show(found: Comparison, data: str, console: Console) -> None:
    """Prints a table at the decomposition's L0, one by L0, and the verdict."""
    what = "KL" if found.of_text else "error"
    shown = sorted({0, len(found.lengths) - 1}) if found.lengths else []  # the file has all of them
    table = plain_table(
        f"At the decomposition's L0 ({number(found.best.number)} parts, chosen by {found.choice}), {found.positions:,} "
        f"positions from {data}",
        ("parts", "wrap"), ("L0", "right"), (what, "right"), ("random", "right"),
        *((f"attack {found.lengths[n]}", "right") for n in shown),
    )  # fmt: skip
    for point in found.at_own_l0:
        cells = (point.l0, point.error, point.random, *(point.attacked[n] for n in shown))
        table.add_row(title(point), *map(_number, cells))
    for beside in found.replacements:
        for row in beside.at(found.own.l0):
            named = beside.name if row is beside.active else f"{beside.name}, its {number(row.number)} largest"
            table.add_row(Text(named), _number(row.l0), _number(row.error), *("–" for _ in range(1 + len(shown))))
    console.print(table)
    if not found.matched_only:
        console.print(_ladder(found, what))
    console.print(verdict(found), highlight=False)
    for line in caption(found.replacements, found.n_sites, found.own.l0):
        console.print(line, highlight=False, markup=False)


def _ladder(found: Comparison, what: str) -> Table:
    """Returns a table of the error by the number of parts that are on."""
    columns = ((escape(name), "wrap") for name in found.names)
    ladder = plain_table(f"{what} {with_k_on(found.choice)}", ("k", "right"), *columns)
    for k, errors in found.ladder.items():
        ladder.add_row(f"{k:g}", *(_number(errors[name]) if name in errors else "–" for name in found.names))
    return ladder


def _number(x: float) -> str:
    """Formats a number. An error of 0 may be slightly negative by rounding."""
    return number(max(x, 0.0))
