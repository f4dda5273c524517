"""Records every request that was sent, with its prompt, answer and cost, so that asking can be resumed and the cap
holds.

A request is recorded at its largest possible cost before it is sent, and corrected when its answer is known. If the
process is killed in between, the largest cost counts as spent.
"""

import hashlib
import json
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from param_decomp_lab.errors import CannotWrite, UserError
from param_decomp_lab.harvest.files.databases import BUSY_S, read_rows
from param_decomp_lab.harvest.files.plan import HARVESTS
from param_decomp_lab.label.endpoint import Endpoint, Reply, now
from param_decomp_lab.label.money import Message
from param_decomp_lab.runs.lock import only_job

FOLDER = "labelling"
FILE = "requests.sqlite"
Status = Literal["sent", "answered", "malformed", "again", "failed"]
"""The state of a request. ``sent``: no answer is known (yet). ``malformed``, ``again``: the question was or will be
asked again. ``failed``: it will not.
"""
_TABLE = """
CREATE TABLE IF NOT EXISTS requests (
    id INTEGER PRIMARY KEY, question TEXT NOT NULL, purpose TEXT NOT NULL, step INTEGER NOT NULL, site TEXT NOT NULL,
    component INTEGER NOT NULL, address TEXT NOT NULL, model TEXT NOT NULL, prompt TEXT NOT NULL, truth TEXT NOT NULL,
    status TEXT NOT NULL, answer TEXT, prompt_tokens INTEGER, completion_tokens INTEGER, nanodollars INTEGER NOT NULL,
    sent TEXT NOT NULL, seconds REAL
);
CREATE INDEX IF NOT EXISTS by_question ON requests (question, id);
"""
_SPENT = "SELECT coalesce(sum(max(nanodollars, 0)), 0) FROM requests"


@dataclass(frozen=True)
class Question:
    """A question. ``purpose``: ``label`` or a kind of score. ``truth``: the right answer, kept for readers. ``parse``:
    converts the text of an answer; raises ValueError for an unusable one.
    """

    purpose: str
    step: int
    site: str
    component: int
    messages: tuple[Message, ...]
    parse: Callable[[str], Any]
    truth: str = ""

    def key(self, model: str) -> str:
        """Returns a key that is the same for the same question to the same model."""
        asked = [self.purpose, self.step, self.site, self.component, model, *self.messages]
        return hashlib.sha256(json.dumps(asked).encode()).hexdigest()


@dataclass(frozen=True)
class Asked:
    """What is known about a question. ``answer``: None unless there is a usable one. ``malformed``: the number of
    unusable answers.
    """

    answer: str | None
    failed: bool
    malformed: int


class Ledger:
    """The requests of one run, used by one process at a time (see `open_ledger`). ``cap``, ``spent``: billionths of a
    dollar; ``spent`` is since the file was created, with requests in flight at their largest cost.
    """

    def __init__(self, database: sqlite3.Connection, file: Path, cap: int) -> None:
        self._database, self._file, self.cap = database, file, cap
        [[self.spent]] = self._execute(_SPENT)
        [[self.unanswered]] = self._execute("SELECT count(*) FROM requests WHERE status = 'sent'")

    def asked(self, key: str) -> Asked:
        rows = self._execute("SELECT status, answer FROM requests WHERE question = ? ORDER BY id", key)
        answers = [answer for status, answer in rows if status == "answered"]
        states = [status for status, _ in rows]
        return Asked(answers[-1] if answers else None, "failed" in states, states.count("malformed"))

    def reserve(self, question: Question, key: str, endpoint: Endpoint) -> int | None:
        """Records a request before it is sent; returns its number, or None if it could cost more than is left."""
        largest = endpoint.largest_cost(question.messages)
        if self.spent + largest > self.cap:
            return None
        prompt = json.dumps(question.messages, ensure_ascii=False)
        self._execute(
            "INSERT INTO requests (question, purpose, step, site, component, address, model, prompt, truth, status, "
            "nanodollars, sent) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, 'sent', ?, ?)",
            key, question.purpose, question.step, question.site, question.component, endpoint.address, endpoint.model,
            prompt, question.truth, largest, now(),
        )  # fmt: skip
        self.spent += largest
        [[number]] = self._execute("SELECT last_insert_rowid()")
        return int(number)

    def settle(self, number: int, status: Status, reply: Reply, endpoint: Endpoint, largest: int, took: float) -> None:
        """Records the result of a request, and its actual cost instead of ``largest``."""
        cost = endpoint.cost(reply, largest)
        self._execute(
            "UPDATE requests SET status = ?, answer = ?, prompt_tokens = ?, completion_tokens = ?, nanodollars = ?, "
            "seconds = ? WHERE id = ?",
            status, reply.text, *(reply.usage or (None, None)), cost, took, number,
        )  # fmt: skip
        self.spent += cost - largest

    def _execute(self, query: str, *values: Any) -> list[Any]:
        try:
            return self._database.execute(query, values).fetchall()
        except sqlite3.Error as error:
            raise CannotWrite(f"{self._file}: {error}; nothing more is asked") from error


@contextmanager
def open_ledger(run_folder: Path, cap: int, console: Console) -> Iterator[Ledger]:
    """Opens the requests of a run for this process alone. Raises UserError if another process is asking or the file is
    damaged, and CannotWrite.
    """
    folder = run_folder / HARVESTS / FOLDER
    file = folder / FILE
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise CannotWrite(f"{folder} cannot be written: {error.strerror}") from error
    with only_job(folder, console):
        try:
            # Each statement is a transaction that is on the disk when it returns.
            database = sqlite3.connect(file, timeout=BUSY_S, isolation_level=None)
        except sqlite3.Error as error:
            raise CannotWrite(f"{file} cannot be written: {error}") from error
        try:
            try:
                database.executescript("PRAGMA synchronous = FULL;" + _TABLE)
            except sqlite3.DatabaseError as error:
                raise UserError(f"{file} cannot be read ({error}), so what was spent is unknown") from error
            yield Ledger(database, file, cap)
        finally:
            database.close()


def spent_so_far(run_folder: Path) -> int:
    """Returns what was spent so far, in billionths of a dollar."""
    rows: Sequence[Any] = read_rows(run_folder / HARVESTS / FOLDER / FILE, "requests", _SPENT)
    return int(rows[0][0]) if rows else 0
