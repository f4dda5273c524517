"""Bytes and text of files from outside: regular files of bounded size, opened without waiting."""

import os
import stat
from pathlib import Path

from param_decomp_lab.errors import UserError

SMALL = 1 << 20
"""Bytes that a file for people may have: a configuration, a description, a list of checkpoints."""
LARGE = 1 << 28
"""Bytes that a list may have which grows with a model or a run: an index of tensors, a vocabulary, metrics."""


def read_bytes(path: Path, what: str, limit: int = SMALL) -> bytes:
    """The content of a regular file. ``what``: description of the file, for errors.

    Raises UserError: it cannot be read, is a pipe or another thing that one could wait for, or has over ``limit``
    bytes.
    """
    try:
        # A pipe that nobody writes to would block the opening.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise UserError(f"{path}: cannot read {what}: {error.strerror}") from error
    except ValueError as error:  # a zero byte in the name
        raise UserError(f"{str(path)!r}: cannot read {what}: {error}") from error
    try:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            found = "a folder" if stat.S_ISDIR(mode) else "not a regular file"
            raise UserError(f"{path}: cannot read {what}: it is {found}")
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            data = file.read(limit + 1)
    except OSError as error:
        raise UserError(f"{path}: cannot read {what}: {error.strerror}") from error
    finally:
        os.close(descriptor)
    if len(data) > limit:
        raise UserError(f"{path}: cannot read {what}: it has more than {limit:,} bytes")
    return data


def read_text(path: Path, what: str, limit: int = SMALL) -> str:
    r"""The content of a UTF-8 file, with ends of lines as ``\n``; otherwise as `read_bytes`."""
    data = read_bytes(path, what, limit)
    try:
        return data.decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: cannot read {what}: not UTF-8 text ({error.reason} at byte {error.start})") from error
