"""Reads and changes SQLite files beside a run's harvests. Changes are whole transactions."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from param_decomp_lab.errors import CannotWrite, UserError

BUSY_S = 5.0
"""How long to wait for another process's change."""


@contextmanager
def changing(file: Path, tables: str, what: str) -> Iterator[sqlite3.Connection]:
    """A transaction during which no other process changes the file. ``tables``: statements that create missing tables.
    ``what``: what the file keeps, for errors. Raises CannotWrite.
    """
    try:
        with closing(sqlite3.connect(file, timeout=BUSY_S)) as database, database:
            database.executescript(tables)
            database.execute("BEGIN IMMEDIATE")
            yield database
    except sqlite3.Error as error:
        raise CannotWrite(f"{what} was not kept: {file}: {error}") from error


def read_rows(file: Path, table: str, query: str, *values: str | int) -> list[Any]:
    """Returns the results of a query; an empty list if the file or ``table`` does not exist yet. Raises UserError for a
    file that is not such a database.
    """
    if not file.is_file():
        return []
    try:
        # Read-only, so that labels in a folder without write permission are shown, too.
        with closing(sqlite3.connect(f"{file.absolute().as_uri()}?mode=ro", uri=True, timeout=BUSY_S)) as database:
            if not database.execute("SELECT 1 FROM sqlite_master WHERE name = ?", (table,)).fetchall():
                return []
            return database.execute(query, values).fetchall()
    except sqlite3.Error as error:
        raise UserError(f"{file} cannot be read ({error}); move it away to go on without it") from error
