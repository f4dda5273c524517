"""Writes a configuration as two files that `pd train` takes as they are."""

import fcntl
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from param_decomp_lab.config.overrides import apply_overrides, parse_overrides
from param_decomp_lab.config.resolve import load_config, read_raw
from param_decomp_lab.errors import UserError
from param_decomp_lab.folders import not_written, write_whole
from param_decomp_lab.safe_io.yaml_text import dump_yaml

_PATHS = (("data", "train"), ("data", "eval"), ("target", "folder"), ("target", "pretrain"))


def schema_path(out: Path) -> Path:
    """Returns the path of the schema file of the wrapper ``out``."""
    return out.parent / "torch" / out.name


def refuse_taken(out: Path, by: str) -> None:
    """Raises UserError if a file would be replaced that the command ``by`` has not written."""
    for file in (out, schema_path(out)):
        # Devices and pipes are not read, since they might never end.
        if file.exists() and not (file.is_file() and file.read_text(errors="replace").startswith(_written_by(by))):
            raise UserError(f"--out {out}: {file} is there, and {by} has not written it; give another name")


def _written_by(command: str) -> str:
    return f"# Written by {command}"


def write_config(source: Path, sets: Sequence[str], out: Path, header: Sequence[str], by: str) -> None:
    """Writes the configuration ``source``, with the assignments ``sets`` applied, as the wrapper ``out`` and its
    `schema_path`.

    ``source``: anything that `load_config` takes; both files are written in the current form. Paths keep their meaning.
    ``header``: comment lines. ``by``: the command that writes. Raises UserError if they cannot be written.
    """
    refuse_taken(out, by)
    assignments = parse_overrides(sets)
    raw = read_raw(source)
    wrapper = apply_overrides(raw.wrapper, [a for a in assignments if a.is_for_wrapper])
    method = apply_overrides(raw.method, [a for a in assignments if not a.is_for_wrapper])
    wrapper["torch_config"] = str(schema_path(out).relative_to(out.parent))
    wrapper.pop("run_id", None)
    for section, key in _PATHS:
        if isinstance(wrapper.get(section), dict) and isinstance(wrapper[section].get(key), str):
            wrapper[section] = {**wrapper[section], key: _moved(wrapper[section][key], source.parent, out.parent)}
    first = f"{_written_by(by)} from {source.name}."
    comment = "\n".join([first, *(f"# {line}".rstrip() for line in header)])
    try:
        schema_path(out).parent.mkdir(parents=True, exist_ok=True)
        with _one_at_a_time(out.parent):  # else the two files could come from different searches
            write_whole(schema_path(out), f"{first}\n{dump_yaml(method)}")
            write_whole(out, f"{comment}\n{dump_yaml(wrapper)}")  # last: it names the schema file
    except OSError as error:
        raise not_written(out, error, "choose another place with --out") from error
    load_config(out)


@contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    """A block that only one process of this machine at a time enters for ``folder``."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _moved(path: Any, old: Path, new: Path) -> str:
    """Rewrites a path that is relative to ``old`` so that it is relative to ``new``."""
    given = Path(str(path)).expanduser()
    return str(given) if given.is_absolute() else os.path.relpath(old / given, new)
