"""A folder or a file that is whole or not there: filled under a hidden name beside its place, renamed at the end."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from param_decomp_lab.errors import UserError


def write_whole(file: Path, text: str) -> None:
    """Writes ``text`` in place of whatever ``file`` holds; a reader finds the old or the new, never a part."""
    unfinished = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    try:
        unfinished.write_text(text, encoding="utf-8")
        os.replace(unfinished, file)
    finally:
        unfinished.unlink(missing_ok=True)


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
