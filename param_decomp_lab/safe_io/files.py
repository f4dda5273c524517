"""Reads files from outside: regular files only, of limited size."""

import itertools
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from param_decomp_lab.errors import UserError

SETTINGS_BYTES = 1 << 20
"""Limit for files that people write or could have written: configurations, recipes, descriptions."""
LISTING_BYTES = 1 << 26
"""Limit for files that grow with the size of a model: an index of tensors, the files of a checkpoint."""


def read_bytes(path: Path, what: str, limit: int = SETTINGS_BYTES) -> bytes:
    """The content of a regular file. ``what``: description of the file, for errors. ``limit``: in bytes.

    Raises UserError for a file that is missing, unreadable, too large, or not a regular file.
    """
    with _opened(path, what) as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise UserError(f"{path}: cannot read {what}: larger than {limit:,} bytes, the most that such a file may have")
    return content


def read_lines(path: Path, what: str, limit: int) -> Iterator[bytes]:
    """Yields the lines of a regular file with their line ends; the last may lack one.

    A line without an end is always the last one: another process may still be writing it, and its remainder must not be
    yielded as a separate line.

    Raises UserError as `read_bytes` does; ``limit`` is the size of a line, in bytes.
    """
    with _opened(path, what) as file:
        for number in itertools.count(1):
            line = file.readline(limit + 1)
            if not line:
                return
            if len(line) > limit:
                raise UserError(f"{path}:{number}: cannot read {what}: a line of more than {limit:,} bytes")
            yield line
            if not line.endswith(b"\n"):
                return


def regular_file(path: Path, what: str) -> Path:
    """Returns ``path`` for a library that opens the file itself: reading a pipe would block, and a device may never
    end.

    Raises UserError for a file that is missing, unreachable, or not regular. ``what``: as for `read_bytes`.
    """
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError) as error:
        raise _unreadable(path, what, error) from error
    _require_regular(path, what, mode)
    return path


@contextmanager
def _opened(path: Path, what: str) -> Iterator[BinaryIO]:
    """Opens a regular file only: reading a pipe would block, and a device may never end. Raises UserError."""
    try:
        # Without O_NONBLOCK, opening a pipe waits until somebody writes to it.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:  # ValueError: a null character in the path
        raise _unreadable(path, what, error) from error
    try:
        _require_regular(path, what, os.fstat(descriptor).st_mode)
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            yield file
    except OSError as error:
        raise _unreadable(path, what, error) from error
    finally:
        os.close(descriptor)


def _require_regular(path: Path, what: str, mode: int) -> None:
    if not stat.S_ISREG(mode):
        found = "it is a folder" if stat.S_ISDIR(mode) else "not a regular file"
        raise UserError(f"{path}: cannot read {what}: {found}")


def _unreadable(path: Path, what: str, error: OSError | ValueError) -> UserError:
    return UserError(f"{path}: cannot read {what}: {getattr(error, 'strerror', None) or error}")


def read_text(path: Path, what: str, limit: int = SETTINGS_BYTES) -> str:
    """The UTF-8 text of a regular file, with line ends as `\\n`. Raises UserError as `read_bytes` does, and for text
    that is not UTF-8.
    """
    content = read_bytes(path, what, limit)
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: cannot read {what}: not UTF-8 text ({error.reason} at byte {error.start})") from error
    return text.replace("\r\n", "\n").replace("\r", "\n")
