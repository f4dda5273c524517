"""A folder or a file that is whole or not there: filled under a hidden name beside its place, renamed at the end."""

import errno
import os
import re
import shutil
import socket
import stat
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from param_decomp_lab.errors import CannotWrite, UserError

FULL_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
DISK_ERRORS = (*FULL_ERRORS, errno.EROFS, errno.EIO)
"""What a full, failing or read-only disk answers: a failure of the machine, not the user's mistake."""


def is_of_the_disk(error: OSError) -> bool:
    """Whether a full, failing or read-only disk is to blame. NumPy has no number for that: it says "9 requested and 3
    written"."""
    return error.errno in DISK_ERRORS or (error.errno is None and str(error).endswith("written"))


def not_written(path: Path, error: OSError, advice: str) -> CannotWrite | UserError:
    """What to raise where ``path`` could not be written. ``advice``: what to do unless the disk is full."""
    kind = CannotWrite if is_of_the_disk(error) else UserError
    then = "free some space" if error.errno in (*FULL_ERRORS, None) else advice
    return kind(f"cannot write {path}: {error.strerror or error}; {then}")


def write_whole(file: Path, text: str) -> None:
    """Writes ``text`` in place of whatever ``file`` holds; a reader finds the old or the new, never a part.

    A link is followed. What is not a regular file (a device, a pipe, this process's own output) is written into.
    """
    stream = _own_stream(file)
    if stream is not None:
        stream.write(text)
        stream.flush()
        return
    if is_irregular(file):
        file.write_text(text, encoding="utf-8")
        return
    file = Path(os.path.realpath(file))
    unfinished = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    try:
        unfinished.write_text(text, encoding="utf-8")
        os.replace(unfinished, file)
    finally:
        with suppress(OSError):  # of the folder, which may be gone; that of the writing is the one to raise
            unfinished.unlink()


def _explained(error: OSError, folder: Path) -> Exception:
    """``error``, or CannotWrite if ``folder``, which was there when writing to it began, is not any more."""
    return error if folder.is_dir() else _taken_away(folder)


def _refuse_another(folder: Path, made: int, marker: str) -> None:
    """Raises CannotWrite if ``folder`` is not the one that is open as ``made``, or has been emptied meanwhile: what
    unpacks an archive makes a folder anew that is gone, and would leave the second half of a result there."""
    try:
        same = os.path.samestat(folder.stat(), os.fstat(made)) and (folder / marker).exists()
    except OSError:
        same = False
    if not same:
        raise _taken_away(folder)


def _taken_away(folder: Path) -> CannotWrite:
    return CannotWrite(f"{folder.parent} was renamed, removed, emptied or replaced while something was written there")


def is_irregular(file: Path) -> bool:
    """Whether ``file`` exists and is to be written into: neither a regular file nor a folder, or this process's own
    standard output or error, whatever that is redirected to."""
    try:
        mode = file.stat().st_mode
    except OSError:
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)) or _own_stream(file) is not None


def _own_stream(file: Path) -> TextIO | None:
    """The stream of this process that is ``file``. Opened anew, a file that output is redirected to would be written
    from its beginning, over what is printed."""
    for descriptor, stream in ((1, sys.stdout), (2, sys.stderr)):
        try:
            if os.path.samestat(file.stat(), os.fstat(descriptor)):
                return stream
        except OSError:
            continue
    return None


def refuse_unwritable(folder: Path, option: str) -> None:
    """Raises UserError, which names the option, if no file can be made in ``folder``, or it cannot be made itself.
    Leaves nothing behind."""
    there = next((path for path in (folder, *folder.parents) if os.path.lexists(path)), folder)
    try:
        # Without a name where the system can do that, else with one that nothing has.
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise not_written(folder, error, f"choose another place with {option}") from error


def refuse_existing(out: Path, *, marker: str, overwrite: bool) -> None:
    """Raise UserError when ``out`` may not be replaced: it holds something, and ``overwrite`` was not given or ``out``
    lacks the file ``marker`` that tells a folder of ours from somebody's home directory."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not out.is_dir():
        raise UserError(f"{out} is a file; the output must be a folder that does not exist yet")
    if not overwrite:
        raise UserError(f"{out} exists and is not empty; choose another folder, or replace it with --overwrite")
    if not (out / marker).exists():
        raise UserError(f"{out} holds no {marker}, so this command did not make it; to replace it, remove it by hand")


@contextmanager
def new_folder(out: Path, *, marker: str, overwrite: bool) -> Iterator[Path]:
    """A temporary folder that becomes ``out`` if the block ends without an exception, and vanishes otherwise.

    An older ``out`` stays as it is until the new one is complete. What appears there while the block runs stays, unless
    ``overwrite``. What processes that were killed have left is removed; an older ``out`` that such a process had moved
    away is put back. Raises UserError as ``refuse_existing`` does, and when the place cannot be written.
    """
    out = Path(os.path.realpath(out))  # a link to a folder stays one
    _sweep(out, marker)
    refuse_existing(out, marker=marker, overwrite=overwrite)
    maker = _Maker.here()
    partial, old = maker.name(out, "partial"), maker.name(out, "old")
    try:
        partial.mkdir(parents=True)
        made = os.open(partial, os.O_RDONLY)  # while it is open, no other folder gets its number
    except OSError as error:
        raise not_written(out, error, "choose another place") from error
    try:
        with explain_writing(out, partial):
            yield partial
        _refuse_another(partial, made, marker)
        _put_in_place(partial, out, old, marker=marker, overwrite=overwrite)
    finally:
        os.close(made)
        shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def explain_writing(out: Path, unfinished: Path) -> Iterator[None]:
    """A block that fills the folder ``unfinished``, which is to become ``out``: raises CannotWrite for what a disk does
    to it, and where that folder is gone."""
    try:
        with _cannot_write(out):
            yield
    except OSError as error:
        raise _explained(error, unfinished) from error


def put_in_place(folder: Path, out: Path, *, marker: str, overwrite: bool) -> None:
    """Renames ``folder``, which lies on the same disk, to ``out``. Raises UserError, and leaves ``out`` as it is, if
    something is there that may not be replaced (`refuse_existing`)."""
    _put_in_place(folder, out, _Maker.here().name(out, "old"), marker=marker, overwrite=overwrite)


@contextmanager
def _cannot_write(out: Path) -> Iterator[None]:
    """Raises CannotWrite for what a full or failing disk does to the block. Its other errors do not concern disks."""
    try:
        yield
    except OSError as error:
        if not is_of_the_disk(error):
            raise
        raise not_written(out, error, "nothing was made; choose another place") from error


def _put_in_place(partial: Path, out: Path, old: Path, *, marker: str, overwrite: bool) -> None:
    """Renames ``partial`` to ``out``, by way of ``old`` for what is there. Raises UserError, and leaves ``out`` as it
    is, if something appeared there that may not be replaced."""
    appeared = f"{out} appeared meanwhile; it stays as it is, and what this command made is discarded"
    try:
        refuse_existing(out, marker=marker, overwrite=overwrite)
    except UserError as error:
        raise UserError(f"{appeared}: {error}") from error
    try:
        if overwrite and out.exists():
            out.rename(old)
        partial.rename(out)  # fails unless there is nothing, or an empty folder
    except OSError as error:
        if error.errno in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
            raise UserError(f"{appeared}. Choose another folder, or replace it with --overwrite") from error
        raise UserError(f"cannot write to {out}: {error.strerror}") from error
    finally:
        _settle_old(old, out, marker)


def _settle_old(old: Path, out: Path, marker: str) -> None:
    """Puts back what was moved from ``out`` to ``old`` if nothing took its place, and removes it if the new one did.

    It stays where it is if what lies at ``out`` lacks the ``marker``: then it is nothing that was to replace it.
    """
    if not old.exists():
        return
    if not os.path.lexists(out):
        with suppress(OSError):
            old.rename(out)
    elif (out / marker).exists():
        shutil.rmtree(old, ignore_errors=True)


@dataclass(frozen=True)
class _Maker:
    """The process that a temporary folder belongs to, as its name tells.

    ``host``: its machine. ``boot``: since when that runs. ``space``: its process numbers, which containers have their
    own of. ``began``: when the process ``pid`` began. All are empty or 0 where the system does not tell.
    """

    host: str
    boot: str
    space: int
    pid: int
    began: int

    @classmethod
    def here(cls) -> "_Maker":
        host = re.sub(r"[^0-9A-Za-z-]", "_", socket.gethostname().partition(".")[0])[:32]
        space = 0
        with suppress(OSError):
            space = os.stat("/proc/self/ns/pid").st_ino
        return cls(host, boot_id().partition("-")[0], space, os.getpid(), int(process_start(os.getpid()) or 0))

    def name(self, out: Path, what: str) -> Path:
        """Beside ``out``: the hidden folder ``what`` of this process."""
        return out.with_name(f".{out.name}.{what}-{self.host}-{self.boot}-{self.space}-{self.pid}-{self.began}")

    @classmethod
    def read(cls, text: str) -> "_Maker | None":
        """From the part of a name that follows ``what``; None if that is none of ours."""
        found = re.fullmatch(r"([\w-]*)-([0-9a-f]*)-(\d+)-(\d+)-(\d+)", text)
        return None if found is None else cls(found[1], found[2], *(int(number) for number in found.groups()[2:]))

    def is_gone(self, now: "_Maker") -> bool:
        """Whether the process has surely ended, as seen from the process ``now``."""
        if self.host != now.host or not (self.boot and now.boot):
            return False
        if self.boot != now.boot:
            return True  # the machine has been started anew since
        return self.space == now.space != 0 and process_start(self.pid) != str(self.began)


def _sweep(out: Path, marker: str) -> None:
    """Deals with what killed processes of this machine have left of their work on ``out``."""
    now, places = _Maker.here(), []
    with suppress(OSError):
        places = list(out.parent.iterdir())
    for path in places:
        for what in ("partial", "old"):
            prefix = f".{out.name}.{what}-"
            maker = _Maker.read(path.name.removeprefix(prefix)) if path.name.startswith(prefix) else None
            if maker is None or not maker.is_gone(now):
                continue
            if what == "old":
                _settle_old(path, out, marker)
            else:
                shutil.rmtree(path, ignore_errors=True)


def cache_folder(name: str) -> Path:
    """``$XDG_CACHE_HOME/param-decomp/NAME``, by default under ``~/.cache``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "param-decomp" / name


def boot_id() -> str:
    """The id of the machine's last start; "" if unknown."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def process_start(pid: int) -> str:
    """Start time of a process of this machine, in clock ticks; "" if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""
