"""Shows the progress of any download by watching the files that grow."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from param_decomp_lab.ui.numbers import byte_size

LARGE_BYTES = 1 << 24
"""The size from which a file gets a progress bar."""
LINE_S = 30.0
"""Seconds between two lines of progress without a terminal."""


@contextmanager
def download_progress(what: str, folder: Path, total: int, console: Console, there: int = 0) -> Iterator[None]:
    """A block in which ``total`` bytes arrive in ``folder``, which already has ``there`` of them. Shows a bar on a
    terminal, and otherwise a line from time to time; nothing for 0 bytes.
    """
    if not total:
        yield
        return
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(True), TransferSpeedColumn()
    start, others, done = time.monotonic(), folder_bytes(folder) - there, threading.Event()
    with Progress(*columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=total, completed=there)

        def watch() -> None:
            line = time.monotonic()
            while not done.wait(0.5):
                arrived = max(0, min(folder_bytes(folder) - others, total))
                bar.update(task, completed=arrived)
                if not console.is_terminal and time.monotonic() - line >= LINE_S:
                    line = time.monotonic()
                    console.print(f"{what}: {byte_size(arrived)} of {byte_size(total)}", highlight=False)

        if not console.is_terminal:
            already = f", of which {byte_size(there)} are there" if there else ""
            console.print(f"{what}: {byte_size(total)}{already}", highlight=False)
        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()
        bar.update(task, completed=total)
    if not console.is_terminal:
        console.print(f"{what}: done in {time.monotonic() - start:.0f} s", highlight=False)


def folder_bytes(folder: Path, pattern: str = "*") -> int:
    """Returns the bytes of the files below a folder, including those that are being written."""
    total = 0
    for path in folder.rglob(pattern):
        with suppress(OSError):  # renamed meanwhile
            total += path.stat().st_size if path.is_file() else 0
    return total
