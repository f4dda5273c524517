"""Detects damage to a checkpoint without reading its arrays, and renames damaged checkpoints."""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from param_decomp_lab.errors import UserError
from param_decomp_lab.folders import write_whole
from param_decomp_lab.safe_io.files import LISTING_BYTES
from param_decomp_lab.safe_io.json_text import read_json
from param_decomp_lab.safe_io.paths import path_within

FILES = "files.json"
"""In a checkpoint's folder: the size of every file in it, written after all of them."""
DESCRIPTION = "_CHECKPOINT_METADATA"
"""orbax's file next to the items; our description is under `custom_metadata`."""
ARRAYS = "_METADATA"
"""orbax's file in an item: its arrays with their shapes."""

DAMAGED_PREFIX = "damaged-"
"""Prefix of the step in the folder name of a checkpoint that was found damaged."""


class Damaged(UserError):
    """Raised for a checkpoint that differs from what was saved. The message names it and what is wrong with it."""


def record_files(checkpoint: Path, items: Iterable[str]) -> None:
    """Records the file sizes of a checkpoint just saved. Raises OSError, or `Damaged` if a file is missing."""
    found = {str(path.relative_to(checkpoint)): path.stat().st_size for path in _files(checkpoint)}
    needed = [DESCRIPTION, *(f"{item}/{name}" for item in items for name in (ARRAYS, "manifest.ocdbt"))]
    lost = [name for name in needed if not found.get(name)]
    if lost:
        raise Damaged(f"{checkpoint}: {lost[0]} is missing after saving")
    write_whole(checkpoint / FILES, json.dumps(found, indent=1) + "\n")


def find_file_damage(checkpoint: Path, items: Iterable[str]) -> str:
    """Says what is wrong with the files of these items of a checkpoint; "" if nothing is.

    A checkpoint without recorded sizes (the save was killed just before) is checked only on restoring.
    """
    if not os.path.lexists(checkpoint / FILES):
        odd = next((path for path in checkpoint.rglob("*") if not (path.is_file() or path.is_dir())), None)
        # Reading a pipe would block forever.
        return "" if odd is None else f"{odd.relative_to(checkpoint)} is not a regular file"
    try:
        sizes = read_json(checkpoint / FILES, "the sizes of the files", dict, LISTING_BYTES)
    except UserError as error:
        return f"{FILES} cannot be read ({error})"
    prefixes = tuple(f"{item}/" for item in items)
    for name, size in sizes.items():
        if "/" in name and not name.startswith(prefixes):
            continue
        try:
            now = os.stat(path_within(checkpoint, name, FILES)).st_size
        except (OSError, UserError) as error:
            return f"{name}: {getattr(error, 'strerror', error)}"
        if type(size) is not int:
            return f"{FILES} cannot be read (the size of {name} is {size!r})"
        if now != size:
            return f"{name} has {now:,} bytes, {size:,} were saved"
    return ""


def make_description(
    configuration: str, prints: Mapping[str, Mapping[str, str]], inputs: Mapping[str, str]
) -> dict[str, Any]:
    """Returns the description to save with a checkpoint, with its own digest."""
    description = {"configuration": configuration, "fingerprints": prints, "inputs": dict(inputs)}
    return {**description, "digest": _digest(description)}


def read_description(checkpoint: Path) -> dict[str, Any]:
    """Returns the description of a checkpoint: its `configuration`, `fingerprints` of its arrays by item, and those of
    the run's `inputs` (both empty in old checkpoints). Raises `Damaged` if it cannot be read.
    """
    try:
        file = checkpoint / DESCRIPTION
        found: dict[str, Any] = read_json(file, "the description", dict, LISTING_BYTES)["custom_metadata"]
        digest = found.pop("digest", None)
        if digest not in (None, _digest(found)):
            raise ValueError("its digest does not match")
        about = {"configuration": found["configuration"], "fingerprints": {}, "inputs": {}, **found}
        if not (isinstance(about["configuration"], str) and _is_table(about["inputs"])):
            raise ValueError("its configuration or its inputs are not text")
        if not isinstance(about["fingerprints"], dict) or not all(map(_is_table, about["fingerprints"].values())):
            raise ValueError("its fingerprints are not a table of texts")
        return about
    except (UserError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise Damaged(f"{checkpoint}: {DESCRIPTION} cannot be read ({error!r})") from error


def array_shapes(item: Path) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the arrays of an item of a checkpoint, by name, from orbax's metadata. Raises `Damaged` if
    unreadable.
    """
    try:
        tree = read_json(item / ARRAYS, "the list of arrays", dict, LISTING_BYTES)["tree_metadata"].values()
        return {
            "/".join(part["key"] for part in entry["key_metadata"]): _shape(entry["value_metadata"]["write_shape"])
            for entry in tree
        }
    except (UserError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise Damaged(f"{item}: {ARRAYS} cannot be read ({error!r})") from error


def set_aside(checkpoint: Path) -> Path:
    """Renames a checkpoint to `damaged-<step>`, so that the step can be saved again; nothing is deleted."""
    name = f"{DAMAGED_PREFIX}{checkpoint.name}"
    taken = sum(1 for path in checkpoint.parent.glob(f"{name}*"))
    renamed = checkpoint.with_name(f"{name}-{taken + 1}" if taken else name)
    try:
        checkpoint.rename(renamed)
    except OSError as error:
        raise UserError(f"{checkpoint} is damaged and cannot be renamed to {renamed.name}: {error.strerror}") from error
    return renamed


def _is_table(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(entry, str) for entry in value.values())


def _shape(value: Any) -> tuple[int, ...]:
    if not all(type(size) is int and size >= 0 for size in value):
        raise ValueError(f"{value!r} is not a shape")
    return tuple(value)


def _digest(description: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()[:16]


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())
