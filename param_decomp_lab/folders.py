"""A folder or a file that is whole or not there: filled under a hidden name beside its place, renamed at the end."""

import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from param_decomp_lab.errors import UserError


def write_whole(file: Path, text: str) -> None:
    """Writes ``text`` in place of whatever ``file`` holds; a reader finds the old or the new, never a part.

    A link is followed. What is no regular file (a device, a pipe, this process's own output) is written into.
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
        unfinished.unlink(missing_ok=True)


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
        raise UserError(
            f"{option}: cannot write to {folder}: {error.strerror or error}; choose another place"
        ) from error


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

    An older ``out`` stays as it is until the new one is complete. Raises UserError as ``refuse_existing`` does, and
    when the place cannot be written.
    """
    out = out.absolute()
    refuse_existing(out, marker=marker, overwrite=overwrite)
    partial, old = (out.with_name(f".{out.name}.{what}-{os.getpid()}") for what in ("partial", "old"))
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    except OSError as error:
        raise UserError(f"cannot write to {out}: {error.strerror} ({error.filename})") from error
    try:
        yield partial
        if out.exists():
            shutil.rmtree(old, ignore_errors=True)
            out.rename(old)
        partial.rename(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)
