"""Checks paths that come from outside."""

import os
from pathlib import Path, PurePosixPath

from param_decomp_lab.errors import UserError
from param_decomp_lab.safe_io.json_text import has_surrogates
from param_decomp_lab.safe_io.printable import printable

NAME_BYTES = 255
"""Longest name of a file or folder on all common file systems."""
PATH_BYTES = 4096 - 1
"""Longest path that Linux accepts."""


def checked_path(text: str, name: str) -> Path:
    """Returns the path that a user or a file gives, with `~` expanded. ``name``: the option or key it comes from, for
    errors.

    Raises UserError for a null character, the home folder of an unknown user, and names or paths that are too long.
    """
    wrong = path_mistake(text) or home_mistake(text)
    if wrong:
        raise UserError(f"{name}: {printable(text, 200)} {wrong}")
    return Path(text).expanduser()


def path_mistake(text: str) -> str:
    """Says why ``text`` cannot be a path, as the end of a sentence that begins with it; "" if it can."""
    if "\0" in text:
        return "contains a null character, which no path can"
    if has_surrogates(text):  # Python's way of keeping bytes that are not UTF-8
        return "is not UTF-8 text; choose another name"
    if any(len(part.encode()) > NAME_BYTES for part in text.split("/")):
        return f"contains a name of more than {NAME_BYTES} bytes; choose a shorter one"
    return "" if len(text.encode()) <= PATH_BYTES else f"is longer than {PATH_BYTES} bytes; choose a shorter one"


def home_mistake(text: str) -> str:
    """Says, in the form of `path_mistake`, why the `~` at the start of ``text`` cannot be expanded; "" if it can."""
    try:
        Path(text).expanduser()
    except RuntimeError:
        return f"names the home folder of a user who is not known here; write ./{text} for a folder of that name"
    return ""


def path_within(folder: Path, name: object, where: str, *, links: bool = True) -> Path:
    """Returns the path of the file ``name`` in ``folder``, where ``name`` was read from a file. ``where``: that file
    and key, for errors.

    ``links``: whether a symbolic link may lead out of the folder, as in the caches of model hubs. Raises UserError if
    ``name`` is not text, is absolute, contains `..` or cannot be a path, and for such a link unless it is allowed.
    """
    if not isinstance(name, str) or not name:
        raise UserError(f"{where}: should be the name of a file, not {printable(repr(name), 80)}")
    wrong = path_mistake(name)
    if wrong:
        raise UserError(f"{where}: {printable(name, 200)} {wrong}")
    parts = PurePosixPath(name)
    if parts.is_absolute() or ".." in parts.parts or name.startswith("~"):
        raise UserError(f"{where}: {printable(name, 200)} lies outside of {folder}; only files in that folder are read")
    path = folder / parts
    if not links and not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder)):
        raise UserError(f"{where}: {printable(name, 200)} is a link to a file outside of {folder}, which is not read")
    return path
