"""Paths from outside: those that users give, and names in files that must not lead out of a folder."""

import os
import stat
from pathlib import Path, PurePosixPath

from param_decomp_lab.errors import UserError


def user_path(text: str | Path) -> Path:
    """A path that a user gave, with `~` and `~name` expanded. Raises UserError: a user who is unknown here, a zero
    byte, a name that is longer than file systems take."""
    try:
        path = Path(text).expanduser()
    except RuntimeError as error:
        raise UserError(f"{text}: {str(error).rstrip('.').lower()}; give the path in full") from error
    if "\0" in str(path):
        raise UserError(f"{str(path)!r}: a path cannot have a zero byte")
    check_length(path)
    return path


def check_length(path: Path) -> None:
    """Raises UserError for a name of more than 255 bytes, which no file system takes, or a path of over 4,095."""
    longest = max((len(os.fsencode(part)) for part in path.parts), default=0)
    if longest > 255:
        raise UserError(f"{path}: a name in it has {longest} bytes; file systems take 255")
    if len(os.fsencode(path)) > 4095:
        raise UserError(f"{path}: has {len(os.fsencode(path))} bytes; a path may have 4,095")


def file_within(folder: Path, name: object, source: str, *, links: bool = False) -> Path:
    """The file that ``name``, read from the file ``source``, names in ``folder``. ``links``: allow links that lead out
    of the folder; the local cache of Hugging Face is made of such.

    Raises UserError: it is no text, is absolute, leads out of the folder, or is there but no regular file. The file
    need not exist.
    """
    if not isinstance(name, str) or not name or "\0" in name:
        raise UserError(f"{source}: {name!r} is no file name")
    relative = PurePosixPath(name)
    if relative.is_absolute() or ".." in relative.parts:
        raise UserError(f"{source}: names the file {name!r}, which is not in {folder}")
    path = folder / relative
    check_length(path)
    if not links and not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder)):
        raise UserError(f"{source}: names the file {name!r}, a link that leads out of {folder}")
    if os.path.lexists(path) and not is_regular(path):
        raise UserError(f"{source}: names {name!r}, which is not a regular file")
    return path


def is_regular(path: Path) -> bool:
    """Whether ``path`` is a regular file, or a link to one."""
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except (OSError, ValueError):
        return False
