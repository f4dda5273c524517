"""Checks whether a run's folder and its open file are still in place: each may be renamed, removed or replaced."""

import errno
import os
from pathlib import Path

from param_decomp_lab.errors import CannotWrite
from param_decomp_lab.runs.folder import resume_command

_MISSING = (errno.ENOENT, errno.ENOTDIR, errno.ESTALE, errno.ELOOP)


class Displaced(CannotWrite):
    """Raised if what the run writes to is no longer at its path. The message says what to do. Exit status 1."""


def what_became_of(path: Path, descriptor: int) -> str | None:
    """Says what happened to the file or folder that ``descriptor`` has open since it was at ``path``; None if it is
    still there.

    The path is compared with the open file, not with an inode number noted earlier. While a file is open, a file system
    does not reuse its number, and one that invents numbers (sshfs) does not change it.
    """
    try:
        there = path.stat()
    except OSError as error:
        if error.errno not in _MISSING:
            return None  # unknown; the next write will report it
        now = _path_now(descriptor)
        return f"was renamed to {now}" if now is not None else "was removed or renamed"
    try:
        if os.path.samestat(there, os.fstat(descriptor)):
            return None
    except OSError as error:
        if error.errno not in _MISSING:
            return None
    now = _path_now(descriptor)
    return f"was replaced by another{f', and is now {now}' if now is not None else ''}"


def _path_now(descriptor: int) -> Path | None:
    """Returns the current path of the open file or folder; None if the system does not tell it, or it was removed."""
    try:
        now = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        return now if os.path.samestat(now.stat(), os.fstat(descriptor)) else None
    except OSError:
        return None


class FolderIdentity:
    """Keeps the run folder, or one in it, open, to notice if it is replaced or removed. For process 0."""

    def __init__(self, folder: Path, run: Path | None = None) -> None:
        """``run``: the run folder, if ``folder`` is one in it. Raises CannotWrite if there is no such folder."""
        self._folder, self._run = folder, run
        try:
            self._descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            raise CannotWrite(f"{folder} cannot be opened: {error.strerror}") from error

    def check(self) -> None:
        """Raises Displaced if the folder is no longer at its path."""
        became = what_became_of(self._folder, self._descriptor)
        if became is None:
            return
        if self._run is not None:
            raise Displaced(
                f"{self._folder} {became} during the run, which stops without saving. Put it back, and resume "
                f"with `{resume_command(self._run)}`"
            )
        now = _path_now(self._descriptor)
        then = (
            f"Resume with `{resume_command(now)}`, there or renamed back"
            if now is not None
            else f"If it still exists, move it back and resume with `{resume_command(self._folder)}`"
        )
        raise Displaced(f"the run folder {self._folder} {became} during the run, which stops without saving. {then}")

    def is_in_place(self) -> bool:
        """Whether the folder is still at its path."""
        return what_became_of(self._folder, self._descriptor) is None

    def close(self) -> None:
        os.close(self._descriptor)
