"""Stores how well labels describe their components, as judged by a language model, in a table of the label file."""

import math
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, NamedTuple

from param_decomp_lab.harvest.files.databases import changing, read_rows
from param_decomp_lab.harvest.files.labels import LABELS_FILE
from param_decomp_lab.harvest.files.plan import HARVESTS

Kind = Literal["detection", "fuzzing", "intruder"]
CHANCE: dict[Kind, float] = {"detection": 0.5, "fuzzing": 0.5, "intruder": 0.2}
"""The expected score of a judge that guesses."""
_TABLE = """
CREATE TABLE IF NOT EXISTS scores (
    id INTEGER PRIMARY KEY, step INTEGER NOT NULL, site TEXT NOT NULL, component INTEGER NOT NULL,
    kind TEXT NOT NULL, judge TEXT NOT NULL, draws TEXT NOT NULL, label TEXT NOT NULL,
    score REAL, standard_error REAL, asked INTEGER NOT NULL, unanswered INTEGER NOT NULL, time TEXT NOT NULL
);
CREATE INDEX IF NOT EXISTS scores_by_component ON scores (step, site, component);
"""
_NEWEST = "SELECT *, max(id) FROM scores WHERE step = ?"
_COLUMNS = "kind, judge, draws, label, score, standard_error, asked, unanswered"


class Score(NamedTuple):
    """A score of one component. ``draws``: from what, and how, the texts were drawn. ``label``: the judged label; empty
    for ``intruder``, which needs none. ``score``, ``standard_error``: None if the harvest has too few texts, or if no
    answer was usable. ``asked``: the number of texts or groups of texts that were judged; ``unanswered``: how many of
    these got no usable answer.
    """

    kind: Kind
    judge: str
    draws: str
    label: str
    score: float | None
    standard_error: float | None
    asked: int
    unanswered: int


class Scores:
    """The scores of a run's components at one step."""

    def __init__(self, run_folder: Path, step: int) -> None:
        self.file, self._step = run_folder / HARVESTS / LABELS_FILE, step

    def of_component(self, site: str, component: int) -> list[Score]:
        """Returns the newest scores by kind, judge and label."""
        query = (
            f"SELECT {_COLUMNS} FROM ({_NEWEST} AND site = ? AND component = ? GROUP BY kind, judge, label) "
            "ORDER BY kind, judge"
        )
        return [_score(row) for row in read_rows(self.file, "scores", query, self._step, site, component)]

    def by_judge(self, kind: Kind, judge: str, draws: str) -> dict[tuple[str, int], Score]:
        """Returns, by site and component, the newest score that this judge gave for the same draws."""
        query = (
            f"SELECT site, component, {_COLUMNS} FROM ({_NEWEST} AND kind = ? AND judge = ? AND draws = ? "
            "GROUP BY site, component)"
        )
        rows = read_rows(self.file, "scores", query, self._step, kind, judge, draws)
        return {(site, component): _score(row) for site, component, *row in rows}

    def keep(self, site: str, component: int, score: Score) -> None:
        """Saves a score. Raises CannotWrite."""
        now = datetime.now(UTC).isoformat(timespec="seconds")
        with changing(self.file, _TABLE, "the score") as database:
            database.execute(
                f"INSERT INTO scores (step, site, component, {_COLUMNS}, time) VALUES ({', '.join('?' * 12)})",
                (self._step, site, component, *score, now),
            )


def _score(row: Sequence[Any]) -> Score:
    """Makes a score from an untrusted row: SQLite does not enforce the types of columns."""
    kind, *texts, score, error, asked, unanswered = row
    judge, draws, label = map(str, texts)
    share, standard_error = (
        float(x) if isinstance(x, float | int) and math.isfinite(x) else None for x in (score, error)
    )
    n, n_unanswered = (x if isinstance(x, int) else 0 for x in (asked, unanswered))
    return Score(kind, judge, draws, label, share, standard_error, n, n_unanswered)
