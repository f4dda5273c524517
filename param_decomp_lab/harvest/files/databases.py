"""SQLite files beside a run's harvests: read by anybody, changed in whole transactions."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from param_decomp_lab.errors import CannotWrite, UserError

BUSY_S = 5.0
"""How long another process's change is waited for."""


@contextmanager
def changing(file: Path, tables: str, what: str) -> Iterator[sqlite3.Connection]:
    """A transaction in which nobody else changes the file. ``tables``: statements that make what is missing. ``what``:
    is kept, for errors. Raises CannotWrite."""
    try:
        with closing(sqlite3.connect(file, timeout=BUSY_S)) as database, database:
            database.executescript(tables)
            database.execute("BEGIN IMMEDIATE")
            yield database
    except sqlite3.Error as error:
        raise CannotWrite(f"{what} was not kept: {file}: {error}") from error


def read_rows(file: Path, table: str, query: str, *values: str | int) -> list[Any]:
    """What a query finds; nothing where the file or ``table`` is not there yet. UserError for a file that is not
    such a database."""
    if not file.is_file():
        return []
    try:
        # Read only: a folder that may not be written shows its labels, too.
        with closing(sqlite3.connect(f"{file.absolute().as_uri()}?mode=ro", uri=True, timeout=BUSY_S)) as database:
            if not database.execute("SELECT 1 FROM sqlite_master WHERE name = ?", (table,)).fetchall():
                return []
            return database.execute(query, values).fetchall()
    except sqlite3.Error as error:
        raise UserError(f"{file} cannot be read ({error}); move it away to go on without it") from error
