"""Finds the configurations that come with the package: runs and pretrainings to try, or to start from.

`param_decomp_lab/configs` is a link to `configs/` in a checkout, and has copies of its files in a wheel.
"""

import difflib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from param_decomp_lab.errors import UserError
from param_decomp_lab.folders import not_written, write_whole
from param_decomp_lab.safe_io.yaml_text import read_mapping

FOLDER = Path(str(files("param_decomp_lab"))) / "configs"


@dataclass(frozen=True)
class Shipped:
    """A configuration of the package. ``name``: path of ``file`` below `FOLDER`, without `.yaml`. ``about``: the first
    sentence of its header comment. ``command``: the subcommand of `pd` that takes it, `train` or `pretrain`.
    """

    name: str
    file: Path
    about: str
    command: str


def shipped() -> list[Shipped]:
    """Returns all configurations, ordered by name. Schema files are left out, since they come with the wrappers that
    name them.
    """
    found = []
    for file in sorted(_folder().rglob("*.yaml")):
        keys = read_mapping(file, "the configuration")
        command = "train" if "torch_config" in keys else "pretrain" if "model" in keys else None
        if command is not None:
            found.append(Shipped(_below(file).with_suffix("").as_posix(), file, _about(file.read_text()), command))
    return found


def find(names: Sequence[str]) -> list[Shipped]:
    """Returns the configurations with these names, or in folders with these names. Raises a UserError with the nearest
    names for an unknown one.
    """
    every = shipped()
    found: dict[str, Shipped] = {}
    for given in names:
        name = given.removeprefix("configs/").removesuffix(".yaml").strip("/")
        chosen = [one for one in every if one.name == name or one.name.startswith(f"{name}/")]
        if not chosen:
            raise UserError(f"no configuration '{given}' comes with the package; {_nearest(name, every)}")
        found.update((one.name, one) for one in chosen)
    return list(found.values())


def write_copies(chosen: Sequence[Shipped], out: Path, *, overwrite: bool = False) -> dict[Path, bool]:
    """Copies ``chosen``, and the files that they refer to, into ``out``; returns for each path whether the file was
    written.

    The folder structure of `FOLDER` is kept, so relative paths between files stay valid. An existing file with the same
    contents is left as it is. Raises UserError, before anything is written, for a file with other contents, unless
    ``overwrite``.
    """
    sources = sorted({file for one in chosen for file in _with_references(one.file)})
    texts = {out / _below(file): file.read_text() for file in sources}
    new = {path: not (path.is_file() and path.read_text() == text) for path, text in texts.items()}
    taken = [str(path) for path, is_new in new.items() if is_new and path.exists()]
    if taken and not overwrite:
        raise UserError(f"there already, with other contents: {', '.join(taken)}; pass --overwrite, or another --out")
    for path, is_new in new.items():
        if is_new:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                write_whole(path, texts[path])
            except OSError as error:
                raise not_written(path, error, "choose another folder with --out") from error
    return new


def _folder() -> Path:
    """Returns the folder with links resolved, since files are compared by their paths below it."""
    if not FOLDER.is_dir():
        raise UserError(f"{FOLDER} is missing: this copy of the package comes without configurations")
    return FOLDER.resolve()


def _below(file: Path) -> Path:
    return file.relative_to(_folder())


def _about(text: str) -> str:
    header = re.match(r"(?:#.*\n)*", text)
    assert header is not None
    words = " ".join(line.lstrip("#").strip() for line in header[0].split("\n#\n")[0].splitlines())
    return re.split(r"(?<=\.) ", words)[0]


def _with_references(file: Path) -> Iterator[Path]:
    """Yields the file, and all shipped files that it names as values, relative to itself, and so on recursively."""
    yield file
    for value in _strings(read_mapping(file, "the configuration")):
        named = (file.parent / value).resolve()
        if value.endswith(".yaml") and named.is_file() and named.is_relative_to(_folder()):
            yield from _with_references(named)


def _strings(value: Any) -> Iterator[str]:
    match value:
        case str():
            yield value
        case dict():
            for inner in value.values():
                yield from _strings(inner)
        case list():
            for inner in value:
                yield from _strings(inner)


def _nearest(name: str, every: Sequence[Shipped]) -> str:
    near = difflib.get_close_matches(name, [one.name for one in every], n=3, cutoff=0.0)
    return f"the nearest are {', '.join(near)} (`pd configs` lists all)"
