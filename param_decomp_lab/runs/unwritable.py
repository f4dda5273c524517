"""Explains errors of a run folder that can no longer be written, and what to do then."""

import errno
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from param_decomp_lab.errors import CannotWrite
from param_decomp_lab.runs.folder import resume_command
from param_decomp_lab.runs.identity import Displaced

NUMBERS = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM),
    *(errno.EIO, errno.ESTALE, errno.ENODEV, errno.ENOTCONN, errno.ETIMEDOUT),
)
"""Error numbers of a folder that was writable before."""

UNREADABLE_SAVE = "No ArrayMetadata found"
"""Orbax's message if a file that it has just written is missing; the folder around it may exist."""


def why_not_written(error: BaseException, folder: Path) -> str | None:
    """Returns the file system's reason if ``error`` comes from writing to ``folder``; None if it comes from anything
    else.
    """
    cause: BaseException | None = error
    removed: Path | None = None
    while cause is not None:
        number = cause.errno if isinstance(cause, OSError) else None
        # The storage libraries below orbax pass on only the system's message.
        known = next((n for n in NUMBERS if n == number or os.strerror(n).lower() in str(cause).lower()), None)
        if known is not None:
            return f"{os.strerror(known)}: {folder}{_space(folder) if known in (errno.ENOSPC, errno.EDQUOT) else ''}"
        if isinstance(cause, FileNotFoundError) and isinstance(cause.filename, str | Path):
            removed = Path(cause.filename) if Path(cause.filename).is_relative_to(folder) else removed
        if isinstance(cause, ValueError):  # orbax's, of files that it wrote itself
            named = [Path(path.rstrip(".:,'")) for path in re.findall(re.escape(str(folder)) + r"/\S+", str(cause))]
            lost = UNREADABLE_SAVE in str(cause)
            removed = next((path for path in named if lost or not path.exists()), removed)
        cause = cause.__cause__ or cause.__context__
    if not folder.is_dir():
        return f"{folder} is gone"
    if removed is None:
        return None
    return f"files were removed from {removed} meanwhile" if removed.is_dir() else f"{removed} was removed meanwhile"


@contextmanager
def explain_unwritable(folder: Path) -> Iterator[None]:
    """A block around a run; raises CannotWrite, with what to do, if ``folder`` can no longer be written."""
    then = f"Earlier checkpoints are intact. Once this is fixed, resume with `{resume_command(folder)}`"
    try:
        yield
    except Displaced:
        raise  # its message already says what to do
    except CannotWrite as error:
        raise CannotWrite(f"{error}. {then}") from error
    except OSError as error:
        why = why_not_written(error, folder) if _is_about(error, folder) else None
        if why is None:
            raise
        raise CannotWrite(f"{why}. {then}") from error


def _is_about(error: OSError, folder: Path) -> bool:
    """Whether writing ``folder`` failed, rather than reading some other file."""
    if isinstance(error.filename, str | Path):
        return Path(error.filename).absolute().is_relative_to(folder.absolute())
    return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)


def _space(folder: Path) -> str:
    try:
        usage = shutil.disk_usage(folder)
    except OSError:
        return ""
    return f" ({usage.free / 1e6:,.1f} MB free of {usage.total / 1e6:,.1f})"
