"""Stores the labels of components in one SQLite file beside a run's harvests. Every edit is kept."""

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from param_decomp_lab.errors import UserError
from param_decomp_lab.harvest.files.databases import changing, read_rows
from param_decomp_lab.harvest.files.plan import HARVESTS

LABELS_FILE = "labels.sqlite"
LONGEST = 10_000
"""The most characters of a label."""
LONGEST_NAME = 100
BY_MODEL = " (pd label)"
"""The end of the author's name if a model has labelled."""
_TABLE = """
CREATE TABLE IF NOT EXISTS labels (
    id INTEGER PRIMARY KEY, step INTEGER NOT NULL, site TEXT NOT NULL, component INTEGER NOT NULL,
    text TEXT NOT NULL, author TEXT NOT NULL, time TEXT NOT NULL
);
CREATE INDEX IF NOT EXISTS by_component ON labels (step, site, component, id);
"""
_CURRENT = "(SELECT *, max(id) FROM labels WHERE step = ? GROUP BY site, component)"

_EDITS = "SELECT text, author, time FROM labels WHERE step = ? AND site = ? AND component = ? ORDER BY id DESC"


class Label(NamedTuple):
    """An edit. ``text`` is empty if the label was removed. ``time``: ISO 8601, UTC."""

    text: str
    author: str
    time: str


class Labels:
    """The labels of a run's components at one step. All harvests of the step share them."""

    def __init__(self, run_folder: Path, step: int) -> None:
        self.file, self._step = run_folder / HARVESTS / LABELS_FILE, step

    def of_site(self, site: str) -> dict[int, str]:
        """Returns the current labels, by component."""
        return dict(self._read(f"SELECT component, text FROM {_CURRENT} WHERE site = ? AND text != ''", site))

    def of_all(self) -> list[tuple[str, int, str]]:
        """Site, component and text of all current labels."""
        return self._read(f"SELECT site, component, text FROM {_CURRENT} WHERE text != ''")

    def count(self) -> dict[str, int]:
        """Returns the number of labelled components, by site."""
        return dict(self._read(f"SELECT site, count(*) FROM {_CURRENT} WHERE text != '' GROUP BY site"))

    def history(self, site: str, component: int) -> list[Label]:
        """All edits, the newest first."""
        return [Label(*map(str, row)) for row in self._read(_EDITS, site, component)]

    def last_edits(self, site: str) -> dict[int, Label]:
        """Returns the newest edit of every component that has one, including removals."""
        rows = self._read(f"SELECT component, text, author, time FROM {_CURRENT} WHERE site = ?", site)
        return {component: Label(*map(str, row)) for component, *row in rows}

    def set(
        self, site: str, component: int, text: str, author: str, *, may_replace: Callable[[Label], bool] | None = None
    ) -> bool:
        """Sets a label; returns whether it was kept. ``may_replace``: decides from the newest edit, if there is one,
        whether the label may replace it; by default it may. No other edit can come between the decision and the change.

        Raises UserError for a label that is too long, and CannotWrite if it cannot be saved.
        """
        text, author = text.strip(), author.strip()
        if len(text) > LONGEST:
            raise UserError(f"a label may have {LONGEST:,} characters; this one has {len(text):,}")
        if len(author) > LONGEST_NAME:
            raise UserError(f"a name may have {LONGEST_NAME} characters; this one has {len(author):,}")
        now = datetime.now(UTC).isoformat(timespec="seconds")
        row = (self._step, site, component, text, author, now)
        try:
            with changing(self.file, _TABLE, "the label") as database:
                if may_replace is not None:
                    last = database.execute(f"{_EDITS} LIMIT 1", (self._step, site, component)).fetchone()
                    if last is not None and not may_replace(Label(*map(str, last))):
                        return False
                database.execute(
                    "INSERT INTO labels (step, site, component, text, author, time) VALUES (?, ?, ?, ?, ?, ?)", row
                )
                return True
        except UnicodeEncodeError as error:  # half of a surrogate pair
            raise UserError("a label should be text") from error

    def _read(self, query: str, *values: str | int) -> list[Any]:
        return read_rows(self.file, "labels", query, self._step, *values)
