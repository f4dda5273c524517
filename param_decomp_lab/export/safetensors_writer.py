"""Writes safetensors files part by part, so that the host never has to hold a whole tensor.

The library can only write tensors that are in memory. The format is 8 bytes with the length of a JSON header, the
header, and the tensors in sequence (https://huggingface.co/docs/safetensors).
"""

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
from jaxtyping import Float32

NAME = "decomposition"
SINGLE_FILE = f"{NAME}.safetensors"
INDEX_FILE = f"{NAME}.safetensors.index.json"
ITEM_BYTES = 4
"""Bytes per entry: everything learned is float32 (N1)."""


@dataclass(frozen=True)
class Slot:
    """Where a tensor is stored: its file, and the offset of its first byte."""

    file: str
    start: int
    shape: tuple[int, ...]


def lay_out(folder: Path, shapes: Mapping[str, tuple[int, ...]], largest: int) -> dict[str, Slot]:
    """Creates the files with empty tensors: one file, or several with an index, each of at most ``largest`` bytes or
    one tensor.

    The space is reserved first, so that a full disk is an OSError here and not a signal in the middle of writing.
    """
    groups = _groups(shapes, largest)
    slots: dict[str, Slot] = {}
    for number, names in enumerate(groups, start=1):
        file = SINGLE_FILE if len(groups) == 1 else f"{NAME}-{number:05}-of-{len(groups):05}.safetensors"
        slots |= _make_file(folder / file, {name: shapes[name] for name in names})
    if len(groups) > 1:
        total = sum(map(_bytes, shapes.values()))
        index = {"metadata": {"total_size": total}, "weight_map": {name: slots[name].file for name in shapes}}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")
    return slots


def map_tensor(folder: Path, slot: Slot) -> Float32[np.memmap, "..."]:
    """Maps the tensor in its file, for writing."""
    return np.memmap(folder / slot.file, np.float32, "r+", slot.start, slot.shape)


def _groups(shapes: Mapping[str, tuple[int, ...]], largest: int) -> list[list[str]]:
    def walk() -> Iterator[list[str]]:
        group: list[str] = []
        size = 0
        for name, shape in shapes.items():
            if group and size + _bytes(shape) > largest:
                yield group
                group, size = [], 0
            group.append(name)
            size += _bytes(shape)
        yield group

    return list(walk())


def _make_file(file: Path, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Slot]:
    header: dict[str, object] = {"__metadata__": {"format": "np"}}
    ends: dict[str, tuple[int, int]] = {}
    at = 0
    for name, shape in shapes.items():
        ends[name] = at, at + _bytes(shape)
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": list(ends[name])}
        at = ends[name][1]
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        out.flush()
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(out.fileno(), 0, 8 + len(text) + at)
        else:
            out.truncate(8 + len(text) + at)
    return {name: Slot(file.name, 8 + len(text) + ends[name][0], shape) for name, shape in shapes.items()}


def _bytes(shape: tuple[int, ...]) -> int:
    return ITEM_BYTES * prod(shape)
