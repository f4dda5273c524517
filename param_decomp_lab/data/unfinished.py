"""Manages the folder of a data set in the making: its contents survive a kill, and several jobs may fill it together.

The folder ``.out.unfinished`` beside ``out`` has the plan, a record of each finished unit, and the shards. A record
appears after the shards of its unit, so a unit with a record is not done again. The shards become ``out`` by one
rename, when every needed unit has a record.
"""

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from param_decomp_lab.data.meta import META_FILE, SPLITS
from param_decomp_lab.data.plan import TokenizePlan
from param_decomp_lab.data.tokenize_unit import UnitRecord
from param_decomp_lab.errors import UserError
from param_decomp_lab.folders import explain_writing, not_written, put_in_place, refuse_existing
from param_decomp_lab.safe_io.files import LISTING_BYTES
from param_decomp_lab.safe_io.json_text import read_json
from param_decomp_lab.safe_io.printable import first_few, printable

PLAN_FILE, LOCK_FILE, PUBLISH_FILE = "plan.json", "lock", "publishing"


class Busy(UserError):
    """Raised if another job does the same work, or took the folder first."""


class Unfinished:
    """A data set in the making. ``folder``: where the work is. ``data``: the subfolder that becomes ``out``."""

    def __init__(self, folder: Path, out: Path) -> None:
        self.folder, self.out = folder, out
        self.data = folder / "data"
        self._records = folder / "units"

    def lay_out(self) -> None:
        for place in (self._records, *(self.data / split for split in SPLITS)):
            place.mkdir(parents=True, exist_ok=True)

    def record_file(self, number: int) -> Path:
        return self._records / f"{number:05d}.npz"

    def done(self) -> set[int]:
        """Returns the units with a record."""
        return {int(file.stem) for file in self._records.glob("*.npz") if file.stem.isdecimal()}

    def record(self, number: int) -> UnitRecord:
        return UnitRecord.load(self.record_file(number))

    @contextmanager
    def publishing(self) -> Iterator[bool]:
        """A block that only one job is in at a time. Yields whether there is still something to put in place."""
        with open(self.folder / PUBLISH_FILE, "a") as lock:
            _flock(lock.fileno(), fcntl.LOCK_EX)
            yield self.data.is_dir()

    def put_in_place(self, *, overwrite: bool) -> None:
        """Makes ``out`` from the shards, and removes everything else."""
        put_in_place(self.data, self.out, marker=META_FILE, overwrite=overwrite)
        shutil.rmtree(self.folder, ignore_errors=True)


@contextmanager
def unfinished(out: Path, plan: TokenizePlan, part: tuple[int, int] | None, *, overwrite: bool) -> Iterator[Unfinished]:
    """Starts or continues the work on ``out``. ``part``: number and count of the job, if several share the work.

    The work done so far stays if the block fails, unless there is nothing worth keeping. Raises UserError if another
    job does the same work, if the folder was begun with another plan, or if ``out`` may not be replaced (``overwrite``
    replaces it, and discards work of another plan).
    """
    out = Path(os.path.realpath(out))  # a link to a folder stays one
    refuse_existing(out, marker=META_FILE, overwrite=overwrite)
    found = Unfinished(out.with_name(f".{out.name}.unfinished"), out)
    with _locked(found, plan, part, overwrite=overwrite), explain_writing(out, found.folder):
        try:
            yield found
        except BaseException:
            if part is None and (len(plan.units) == 1 or not found.done()):
                shutil.rmtree(found.folder, ignore_errors=True)
            raise


@contextmanager
def _locked(found: Unfinished, plan: TokenizePlan, part: tuple[int, int] | None, *, overwrite: bool) -> Iterator[None]:
    """Excludes jobs that do the same units, and ensures that the plan is in the folder."""
    while True:
        try:
            found.folder.mkdir(parents=True, exist_ok=True)
            (found.folder / LOCK_FILE).touch()
        except OSError as error:
            with suppress(OSError):
                found.folder.rmdir()  # if it is empty
            raise not_written(found.out, error, "choose another place") from error
        with open(found.folder / LOCK_FILE) as lock:
            if not _flock(lock.fileno(), (fcntl.LOCK_EX if part is None else fcntl.LOCK_SH) | fcntl.LOCK_NB):
                raise Busy(f"another job is making {found.out}; wait for it, or choose another folder")
            if not _is_same(lock.fileno(), found.folder / LOCK_FILE):
                continue  # the job that had the lock has finished and removed the folder
            try:
                has_plan = _has_plan(found, plan, overwrite=overwrite)
            except OSError as error:
                if part is None and not (found.folder / PLAN_FILE).exists():  # nothing was begun
                    shutil.rmtree(found.folder, ignore_errors=True)
                raise not_written(found.out, error, "choose another place") from error
            if not has_plan:
                if not _flock(lock.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB):
                    raise Busy(f"another job is making {found.out} with another plan; wait for it")
                _discard(found)
                continue
            if part is None:
                yield
                return
            with open(found.folder / f"{LOCK_FILE}-{part[0]}", "a") as own:
                if not _flock(own.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB):
                    raise Busy(f"another job is making part {part[0]}/{part[1]} of {found.out}; wait for it")
                yield
                return


def _has_plan(found: Unfinished, plan: TokenizePlan, *, overwrite: bool) -> bool:
    """Whether the folder has this plan, which is written if there is none yet. False if the folder must be discarded:
    it has another plan's work, or leftovers after the shards were put in place. Raises UserError for another plan with
    work done, unless ``overwrite``.
    """
    file = found.folder / PLAN_FILE
    ours = json.dumps({"options": plan.options, "inputs": plan.inputs_hash, "units": len(plan.units)})
    if not file.exists():
        found.lay_out()
        prepared = file.with_name(f".{file.name}.{os.getpid()}.tmp")
        prepared.write_text(ours)
        with suppress(FileExistsError):
            os.link(prepared, file)  # fails if another part was faster, perhaps with another plan
        prepared.unlink()
    theirs = read_json(file, "the plan of an unfinished data set", dict, LISTING_BYTES)
    changes = _changes(theirs, json.loads(ours))
    if changes and found.done() and not overwrite:
        raise UserError(
            f"{found.out} was begun with another plan ({'; '.join(first_few(changes))}); continue with that one, or "
            "discard its work with --overwrite"
        )
    return not changes and found.data.is_dir()


def _discard(found: Unfinished) -> None:
    """Removes everything of an earlier plan except the lock."""
    for path in found.folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        elif path.name != LOCK_FILE:
            path.unlink(missing_ok=True)


def _changes(theirs: dict[str, Any], ours: dict[str, Any]) -> list[str]:
    before = {**theirs.pop("options", {}), **theirs} if isinstance(theirs.get("options"), dict) else theirs
    after = {**ours.pop("options"), **ours}
    shown = {"inputs": "the text", "tokenizer": "the tokenizer", "units": "", "format": "the format"}
    # An option that a plan omits is off.
    changed = [key for key in dict.fromkeys([*after, *before]) if before.get(key) != after.get(key)]
    words = [
        shown.get(key, f"{printable(key, 80)}: {printable(str(before.get(key)), 80)}, now {after.get(key)}")
        for key in changed
    ]
    return [word for word in words if word] or (["the text"] if changed else [])


def _flock(descriptor: int, how: int) -> bool:
    """Whether the lock was obtained. A file system without locks gives every lock: jobs then do work twice, and write
    the same bytes."""
    try:
        fcntl.flock(descriptor, how)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _is_same(descriptor: int, file: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), file.stat())
    except OSError:
        return False
