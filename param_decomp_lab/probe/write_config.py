"""The configuration of a run that was found, as two files that `pd train` takes as they are."""

import fcntl
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from param_decomp_lab.config import load_config
from param_decomp_lab.config.overrides import apply_overrides, parse_overrides
from param_decomp_lab.errors import UserError
from param_decomp_lab.folders import not_written, write_whole
from param_decomp_lab.safe_io.yaml_text import dump_yaml, read_mapping

WRITTEN_BY = "# Written by pd fit"
_PATHS = (("data", "train"), ("data", "eval"), ("target", "folder"), ("target", "pretrain"))


def schema_path(out: Path) -> Path:
    """Where the schema file of the wrapper ``out`` goes."""
    return out.parent / "torch" / out.name


def refuse_taken(out: Path) -> None:
    """UserError where a file would be replaced that `pd fit` has not written."""
    for file in (out, schema_path(out)):
        # Nothing is read from a device or a pipe: it might never end.
        if file.exists() and not (file.is_file() and file.read_text(errors="replace").startswith(WRITTEN_BY)):
            raise UserError(f"--out {out}: {file} is there, and pd fit has not written it; give another name")


def write_config(source: Path, sets: Sequence[str], out: Path, header: Sequence[str]) -> None:
    """The wrapper ``source`` and its schema file with the assignments ``sets`` made, as ``out`` and `schema_path`.

    Paths keep their meaning. ``header``: lines of comment. UserError where it cannot be written.
    """
    refuse_taken(out)
    assignments = parse_overrides(sets)
    wrapper = apply_overrides(read_mapping(source, "the wrapper"), [a for a in assignments if a.is_for_wrapper])
    schema = source.parent / Path(str(wrapper["torch_config"])).expanduser()
    method = read_mapping(schema, "the schema file")
    method = apply_overrides(method, [a for a in assignments if not a.is_for_wrapper])
    wrapper["torch_config"] = str(schema_path(out).relative_to(out.parent))
    wrapper.pop("run_id", None)
    for section, key in _PATHS:
        if isinstance(wrapper.get(section), dict) and wrapper[section].get(key) is not None:
            wrapper[section] = {**wrapper[section], key: _moved(wrapper[section][key], source.parent, out.parent)}
    first = f"{WRITTEN_BY} from {source.name}."
    comment = "\n".join([first, *(f"# {line}".rstrip() for line in header)])
    try:
        schema_path(out).parent.mkdir(parents=True, exist_ok=True)
        with _one_at_a_time(out.parent):  # else the wrapper of one search, and the schema file of another
            write_whole(schema_path(out), f"{first}\n{dump_yaml(method)}")
            write_whole(out, f"{comment}\n{dump_yaml(wrapper)}")  # last: it names the schema file
    except OSError as error:
        raise not_written(out, error, "choose another place with --out") from error
    load_config(out)


@contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    """Waits until no other process of this machine is in such a block for ``folder``."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _moved(path: Any, old: Path, new: Path) -> str:
    """A path relative to ``old``, from ``new``."""
    given = Path(str(path)).expanduser()
    return str(given) if given.is_absolute() else os.path.relpath(old / given, new)
