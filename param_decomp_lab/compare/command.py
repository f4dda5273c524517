"""`pd compare`: reads runs, prints a table, writes a page."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from rich.console import Console
from rich.text import Text

from param_decomp_lab.compare.page import Compared, compared, render
from param_decomp_lab.compare.records import Record, read_records
from param_decomp_lab.errors import CannotWrite
from param_decomp_lab.folders import write_whole
from param_decomp_lab.runs.listing import STYLES
from param_decomp_lab.runs.output_file import check_output_file
from param_decomp_lab.safe_io.printable import printable
from param_decomp_lab.ui.numbers import number
from param_decomp_lab.ui.tables import plain_table


def compare_runs(
    folders: Sequence[Path], agreement: bool, out: Path, progress: Callable[[str], None] = lambda what: None
) -> Compared:
    """Reads the runs in or below ``folders`` and writes the page ``out``. ``agreement``: whether to match their
    components, for which checkpoints are opened. Raises UserError and CannotWrite."""
    check_output_file(out, "--out")
    found = compared(read_records(folders))
    if agreement:
        from param_decomp_lab.compare.agreement import agreements  # opens runs, which starts JAX

        found = replace(found, agreements=agreements(found.records, found.groups, progress))
    try:
        write_whole(out, render(found))
    except OSError as error:
        raise CannotWrite(f"cannot write {out}: {error.strerror or error}; choose another place with --out") from error
    return found


def show(found: Compared, console: Console) -> None:
    """Prints the runs with their points, and their agreement."""
    names = [front.name for front in found.fronts]
    table = plain_table(
        "Last evaluations (*: on the front of L0 and this error)",
        ("run", "wrap"), ("state", "left"), ("L0", "right"), *((name, "right") for name in names), ("", "wrap"),
    )  # fmt: skip
    for run, (record, label) in enumerate(zip(found.records, found.labels, strict=True)):
        cells = [
            f"{number(record.error(front.name))}{'*' if run in front.front else ' ' if front.front else ''}"
            for front in found.fronts
        ]
        table.add_row(
            Text(printable(label, 200)), Text(record.status.state, style=STYLES[record.status.state]), _l0(record),
            *cells, Text(printable(record.status.why, 2000).splitlines()[0] if record.status.why else ""),
        )  # fmt: skip
    console.print(table)
    if found.differences:
        keys = ", ".join(found.differences)
        console.print(f"They differ in {printable(keys, 1000)}.", highlight=False)
    if not found.agreements:
        return
    agreements = plain_table(
        "Mean cosine of matched components (by chance)",
        ("runs", "wrap"),
        ("V", "right"),
        ("U", "right"),
        ("V ⊗ U", "right"),
    )
    for pair in found.agreements:
        pair_label = Text(printable(f"{found.labels[pair.one]} | {found.labels[pair.other]}", 400))
        own, chance = pair.cosines, pair.by_chance
        if own is None or chance is None:
            agreements.add_row(pair_label, Text(printable(pair.why or "nothing fires", 300)), "", "")
        else:
            agreements.add_row(
                pair_label,
                *(f"{getattr(own, part):.3f} ({getattr(chance, part):.3f})" for part in ("V", "U", "matrix")),
            )
    console.print(agreements)


def as_json(found: Compared) -> str:
    """Returns everything that the page shows except the curves."""
    runs = [
        {
            "folder": record.status.folder, "id": record.id, "label": label, "state": record.status.state,
            "why": record.status.why, "step": record.status.step, "l0": record.l0.last if record.l0 else None,
            "errors": {name: record.error(name) for name in record.errors},
            "differences": {key: values[run] for key, values in found.differences.items()},
        }
        for run, (record, label) in enumerate(zip(found.records, found.labels, strict=True))
    ]  # fmt: skip
    fronts = [{"error": front.name, "runs": [found.records[run].id for run in front.front]} for front in found.fronts]
    seeds = [[found.records[run].id for run in group] for group in found.groups if len(group) > 1]
    pairs = [
        {
            "runs": [found.records[pair.one].id, found.records[pair.other].id], "why": pair.why,
            "cosines": asdict(pair.cosines) if pair.cosines else None,
            "by_chance": asdict(pair.by_chance) if pair.by_chance else None,
            "sites": [asdict(site) for site in pair.sites],
        }
        for pair in found.agreements
    ]  # fmt: skip
    return json.dumps(
        {"runs": runs, "fronts": fronts, "seeds": seeds, "agreement": pairs}, indent=2, ensure_ascii=False
    )


def _l0(record: Record) -> str:
    return number(record.l0.last if record.l0 is not None else None)
