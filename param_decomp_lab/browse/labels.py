"""What people call components: one SQLite file beside a run's harvests. Every edit is kept."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from param_decomp_lab.errors import CannotWrite, UserError
from param_decomp_lab.harvest_files.plan import HARVESTS

LABELS_FILE = "labels.sqlite"
LONGEST = 10_000
"""Characters of a label."""
LONGEST_NAME = 100
BUSY_S = 5.0
"""How long another process's edit is waited for."""
_TABLE = """
CREATE TABLE IF NOT EXISTS labels (
    id INTEGER PRIMARY KEY, step INTEGER NOT NULL, site TEXT NOT NULL, component INTEGER NOT NULL,
    text TEXT NOT NULL, author TEXT NOT NULL, time TEXT NOT NULL
);
CREATE INDEX IF NOT EXISTS by_component ON labels (step, site, component, id);
"""
_CURRENT = "(SELECT *, max(id) FROM labels WHERE step = ? GROUP BY site, component)"


class Label(NamedTuple):
    """An edit. ``text`` is empty where the label was taken away. ``time``: ISO 8601, UTC."""

    text: str
    author: str
    time: str


class Labels:
    """The labels of a run's components at one step. They belong to the components, so that all harvests of the step
    share them."""

    def __init__(self, run_folder: Path, step: int) -> None:
        self.file, self._step = run_folder / HARVESTS / LABELS_FILE, step

    def of_site(self, site: str) -> dict[int, str]:
        """The current labels, by component."""
        return dict(self._read(f"SELECT component, text FROM {_CURRENT} WHERE site = ? AND text != ''", site))

    def count(self) -> dict[str, int]:
        """Labelled components, by site."""
        return dict(self._read(f"SELECT site, count(*) FROM {_CURRENT} WHERE text != '' GROUP BY site"))

    def history(self, site: str, component: int) -> list[Label]:
        """All edits, the newest first."""
        rows = self._read(
            "SELECT text, author, time FROM labels WHERE step = ? AND site = ? AND component = ? ORDER BY id DESC",
            site, component,
        )  # fmt: skip
        return [Label(*map(str, row)) for row in rows]

    def find(self, text: str, most: int = 50) -> list[tuple[str, int, str]]:
        """Site, component and label of those whose label contains ``text``, in any case."""
        words = "%" + text.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_") + "%"
        return self._read(
            f"SELECT site, component, text FROM {_CURRENT} WHERE text LIKE ? ESCAPE '\\' "
            "ORDER BY site, component LIMIT ?",
            words, most,
        )  # fmt: skip

    def set(self, site: str, component: int, text: str, author: str) -> None:
        """Raises UserError for a label that is too long, CannotWrite where it cannot be kept."""
        text, author = text.strip(), author.strip()
        if len(text) > LONGEST:
            raise UserError(f"a label may have {LONGEST:,} characters; this one has {len(text):,}")
        if len(author) > LONGEST_NAME:
            raise UserError(f"a name may have {LONGEST_NAME} characters; this one has {len(author):,}")
        now = datetime.now(UTC).isoformat(timespec="seconds")
        row = (self._step, site, component, text, author, now)
        try:
            with closing(sqlite3.connect(self.file, timeout=BUSY_S)) as database, database:
                database.executescript(_TABLE)
                database.execute(
                    "INSERT INTO labels (step, site, component, text, author, time) VALUES (?, ?, ?, ?, ?, ?)", row
                )
        except UnicodeEncodeError as error:  # half of a surrogate pair
            raise UserError("a label should be text") from error
        except sqlite3.Error as error:
            raise CannotWrite(f"the label was not kept: {self.file}: {error}") from error

    def _read(self, query: str, *values: str | int) -> list[Any]:
        with self._reading() as database:
            return [] if database is None else database.execute(query, (self._step, *values)).fetchall()

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection | None]:
        """None where nobody has labelled anything. Raises UserError for a file that is no such database."""
        if not self.file.is_file():
            yield None
            return
        try:
            # Read only: a folder that may not be written shows its labels, too.
            address = f"{self.file.absolute().as_uri()}?mode=ro"
            with closing(sqlite3.connect(address, uri=True, timeout=BUSY_S)) as database:
                yield database
        except sqlite3.Error as error:
            raise UserError(
                f"{self.file} cannot be read ({error}); move it away to go on without its labels"
            ) from error
