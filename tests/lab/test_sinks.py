"""Where metrics go: `metrics.jsonl` (T5), the terminal."""

import io
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from param_decomp_lab.errors import CannotWrite, UserError
from param_decomp_lab.runs.identity import Displaced
from param_decomp_lab.runs.listing import rows_at_the_end
from param_decomp_lab.runs.metrics_file import METRICS_FILE, read_metrics
from param_decomp_lab.tracking.sinks import MetricsFile, brief
from param_decomp_lab.tracking.wandb_mirror import read_rows
from param_decomp_lab.ui.progress import StepsBar


def steps(folder: Path) -> list[int]:
    return [row["step"] for row in read_metrics(folder)]


def written(folder: Path, first: int, last: int) -> MetricsFile:
    metrics = MetricsFile(folder, first)
    for step in range(first, last):
        metrics.write({"step": step, "train/loss/total": step / 3})
    metrics.close()
    return metrics


def test_rows_of_the_step_and_later_are_cut_off(tmp_path: Path) -> None:
    assert read_metrics(tmp_path) == []
    written(tmp_path, 0, 9)
    before = (tmp_path / METRICS_FILE).read_text().splitlines()
    MetricsFile(tmp_path, 4).close()
    assert (tmp_path / METRICS_FILE).read_text().splitlines() == before[:4]
    written(tmp_path, 4, 9)
    assert (tmp_path / METRICS_FILE).read_text().splitlines() == before  # to the last digit
    written(tmp_path, 0, 2)
    assert steps(tmp_path) == [0, 1]
    assert [path.name for path in tmp_path.iterdir()] == [METRICS_FILE]


def test_a_cut_last_line_is_left_out(tmp_path: Path) -> None:
    written(tmp_path, 0, 5)
    path = tmp_path / METRICS_FILE
    path.write_text(path.read_text()[:-9])
    assert steps(tmp_path) == [0, 1, 2, 3]
    written(tmp_path, 4, 6)
    assert steps(tmp_path) == [0, 1, 2, 3, 4, 5]
    path.write_text('{"step": 0}\nnot json\n{"step": 2}\n')
    with pytest.raises(UserError, match=rf"{METRICS_FILE}:2: not a JSON object"):
        read_metrics(tmp_path)


def test_a_broken_line_with_its_end_is_an_error_even_at_the_end(tmp_path: Path) -> None:
    """What follows the last line end may be whole, where an editor has taken the line end away."""
    path = tmp_path / METRICS_FILE
    path.write_text('{"step": 0}\n{"step": 1}')
    assert steps(tmp_path) == [0, 1]
    path.write_bytes(b'{"step": 0}\n{"x": "\xc3')  # half of a character
    assert steps(tmp_path) == [0]
    path.write_text('{"step": 0}\n{"step": \n')
    with pytest.raises(UserError, match=rf"{METRICS_FILE}:2: not a JSON object"):
        read_metrics(tmp_path)


GROW = """
import json, os, sys
folder = sys.argv[1]
text = "".join(json.dumps({"step": n, "train/loss/total": n / 3}) + "\\n" for n in range(40)).encode()
while os.getppid() == int(sys.argv[2]):
    file = os.open(f"{folder}/next", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.replace(f"{folder}/next", f"{folder}/metrics.jsonl")
    for n in range(len(text)):
        os.write(file, text[n : n + 1])
    os.close(file)
"""
"""Writes rows byte by byte, again and again, until its parent has gone."""


@pytest.fixture
def growing(tmp_path: Path) -> Iterator[Path]:
    writer = subprocess.Popen([sys.executable, "-c", GROW, str(tmp_path), str(os.getpid())])
    while not (tmp_path / METRICS_FILE).exists():
        time.sleep(0.01)
    yield tmp_path / METRICS_FILE
    writer.kill()
    writer.wait()


def test_rows_are_read_while_they_are_written(growing: Path) -> None:
    """Whole rows only, all from the first on: by the report, by `pd runs`, and by what is sent to wandb."""
    ended = SimpleNamespace(outcome="finished")
    readers: dict[int, Callable[[], Iterable[dict[str, Any]]]] = {
        8_000: lambda: read_metrics(growing.parent),
        1_500: lambda: rows_at_the_end(growing),
        500: lambda: read_rows(growing, ended),
    }
    numbers = set[int]()
    for reads, read in readers.items():
        for _ in range(reads):
            rows = list(read())
            assert rows == [{"step": n, "train/loss/total": n / 3} for n in range(len(rows))]
            numbers.add(len(rows))
    assert len(numbers) > 10


@contextmanager
def files_end_at(size: int) -> Iterator[None]:
    """No file may grow beyond this: the system's own refusal, as of a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_rows_wait_until_they_can_be_written(tmp_path: Path) -> None:
    console = Console(record=True, file=io.StringIO(), width=300)
    metrics = MetricsFile(tmp_path, 0, console)
    metrics.write({"step": 0})
    path = tmp_path / METRICS_FILE
    with files_end_at(path.stat().st_size + 5):
        for step in (1, 2, 3):
            metrics.write({"step": step})
        with pytest.raises(CannotWrite, match=r"3 rows of metrics\.jsonl cannot be written: File too large: "):
            metrics.settle()
        assert console.export_text().count("rows of metrics cannot be written and wait until they can") == 1
    metrics.write({"step": 4})
    metrics.settle()
    assert path.read_text() == "".join(f'{{"step": {step}}}\n' for step in range(5))  # no half of a row before
    metrics.close()


def test_what_could_not_be_written_at_the_end_is_not_half_there(tmp_path: Path) -> None:
    console = Console(record=True, file=io.StringIO(), width=300)
    metrics = MetricsFile(tmp_path, 0, console)
    metrics.write({"step": 0})
    before = (tmp_path / METRICS_FILE).read_text()
    with files_end_at(len(before) + 5):
        metrics.write({"step": 1})
        metrics.close()
    assert (tmp_path / METRICS_FILE).read_text() == before
    assert "1 rows of metrics.jsonl could not be written and are lost" in console.export_text()


@pytest.mark.parametrize("how", ["removed", "renamed", "replaced"])
def test_rows_whose_file_is_elsewhere(tmp_path: Path, how: str) -> None:
    """Nothing is made anew, and nothing is added to another's file."""
    metrics = MetricsFile(tmp_path, 0)
    metrics.write({"step": 0})
    metrics.settle()
    if how == "removed":
        metrics.path.unlink()
    else:
        metrics.path.rename(tmp_path / "moved")
    if how == "replaced":
        metrics.path.write_text('{"step": 7}\n')
    before = {path.name: path.read_text() for path in tmp_path.iterdir()}
    for act in (lambda: metrics.write({"step": 1}), metrics.settle):
        with pytest.raises(Displaced, match=rf"metrics\.jsonl was {how}.* during the run.* Put it back"):
            act()
    metrics.close()
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == before


def test_a_row_is_there_at_once(tmp_path: Path) -> None:
    """A killed process loses no row that it has written."""
    metrics = MetricsFile(tmp_path, 0)
    metrics.write({"step": 0, "x": float("nan")})
    assert len((tmp_path / METRICS_FILE).read_text().splitlines()) == 1
    metrics.close()


def test_what_is_synced_is_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a checkpoint is written, so that no machine that dies leaves a checkpoint and not the rows before it."""
    synced: list[str] = []
    fsync = os.fsync

    def noted(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    metrics = MetricsFile(tmp_path, 0)
    metrics.write({"step": 0})
    metrics.settle()
    metrics.close()
    assert synced == [str(tmp_path / METRICS_FILE)]


# ---- the terminal ----


def console() -> tuple[Console, io.StringIO]:
    text = io.StringIO()
    return Console(file=text, width=200), text


def test_lines_where_there_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr("param_decomp_lab.ui.progress.time.monotonic", lambda: clock.now)
    terminal, text = console()
    with StepsBar(terminal, "demo", 100, done=20) as bar:
        for step in range(21, 51):
            clock.now += 1.0
            bar.advance(step)
            bar.show(brief({"train/loss/total": 0.125, "step": step, "train/loss/A": float("inf")}))
    lines = text.getvalue().splitlines()
    assert lines[0] == "demo 21/100  total 0.125  A inf"  # nothing is known of the rate yet
    assert lines[1] == "demo 31/100, 69 s left  total 0.125  A inf"  # of this process's own steps after the first
    assert [line.split()[1] for line in lines] == ["21/100", "31/100,", "41/100,"]


def test_wandb_is_sent_rows_and_nothing_else(tmp_path: Path) -> None:
    """NaN is a number of a row; what is no row is named, and what is cut off at the end is left out."""
    ending = SimpleNamespace(outcome="finished")
    (tmp_path / METRICS_FILE).write_text('{"step": 0, "x": NaN}\n{"step": 1}\n{"step": ')
    assert [row["step"] for row in read_rows(tmp_path / METRICS_FILE, ending)] == [0, 1]
    for text in ("[" * 100_000, '{"step": "2"}', "[]", '{"step": 1' + "0" * 5000 + "}"):
        (tmp_path / METRICS_FILE).write_text(f'{{"step": 0}}\n{text}\n')
        with pytest.raises(ValueError, match=r"metrics\.jsonl:2: "):
            list(read_rows(tmp_path / METRICS_FILE, ending))
