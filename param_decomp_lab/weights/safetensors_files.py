"""Reads requested slices of tensors from one safetensors file, or from many with an index, and writes tensors."""

import errno
import math
import os
import re
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from param_decomp_lab.errors import UserError
from param_decomp_lab.safe_io.files import LISTING_BYTES, regular_file
from param_decomp_lab.safe_io.json_text import read_json
from param_decomp_lab.safe_io.paths import path_within
from param_decomp_lab.safe_io.printable import first_few

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
"""Types of numbers that can be read."""
BLOCK_ELEMENTS = 1 << 23
"""The number of elements that are read at once, so that a cast, a transposition or a comparison needs no second copy of
a whole slice.
"""


class SafetensorsFolder:
    """The tensors of ``folder/model.safetensors`` or of the files that ``model.safetensors.index.json`` lists.

    A context manager: files are opened on entry and closed on exit. Raises UserError on entry if files are missing,
    truncated or not safetensors files.
    """

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        self._stack = ExitStack()
        self._handles: dict[str, tuple[Path, Any]] = {}

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            for file in self._files():
                handle = stack.enter_context(open_safetensors(file))
                self._handles |= dict.fromkeys(handle.keys(), (file, handle))
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._handles.clear()
        self._stack.close()

    @property
    def names(self) -> frozenset[str]:
        """Names of all tensors."""
        return frozenset(self._handles)

    @property
    def paths(self) -> list[Path]:
        """The files that are open."""
        return sorted({file for file, _ in self._handles.values()})

    def expect(self, name: str, shape: tuple[int, ...]) -> None:
        """Raises UserError unless there is a tensor ``name`` of this shape, of floating-point numbers."""
        if name not in self._handles:
            raise UserError(
                f"{self._folder}: no tensor {name}, which config.json implies (shape {list(shape)}); "
                "the weights and config.json do not belong together, or a file is missing"
            )
        file, _ = self._handles[name]
        found, stored = self.shape(name), self._stored_as(name)
        if found != shape:
            raise UserError(
                f"{file}: {name} has shape {list(found)}, config.json implies {list(shape)}; "
                "the weights and config.json do not belong together"
            )
        # Quantised weights are integers that mean other numbers.
        if stored not in FLOATS:
            raise UserError(f"{file}: {name} is stored as {stored}; weights must be floating-point numbers")

    def dtype(self, name: str) -> np.dtype[Any]:
        """The stored dtype of ``name``."""
        _, handle = self._handles[name]
        rank = len(handle.get_slice(name).get_shape())
        return handle.get_slice(name)[(slice(0, 0),) * rank].dtype

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """Returns the part ``index`` of tensor ``name``, as stored."""
        file, handle = self._handles[name]
        try:
            return handle.get_slice(name)[index]
        except (SafetensorError, OSError) as error:
            raise UserError(f"{file}: cannot read {name} ({error}): copy or download the file again") from error

    def _stored_as(self, name: str) -> str:
        return str(self._handles[name][1].get_slice(name).get_dtype())

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of tensor ``name``, as stored."""
        return tuple(self._handles[name][1].get_slice(name).get_shape())

    def same(self, first: str, second: str) -> bool:
        """Whether two tensors have the same floating-point numbers, whatever their stored dtypes. They are read in
        blocks of rows, up to the first difference.
        """
        shape = self.shape(first)
        if shape != self.shape(second) or not {self._stored_as(first), self._stored_as(second)} <= FLOATS:
            return False
        if not shape:
            return bool(np.array_equal(self.read(first, ()), self.read(second, ())))
        step = max(1, BLOCK_ELEMENTS // max(1, math.prod(shape[1:])))
        for start in range(0, shape[0], step):
            rows = slice(start, min(start + step, shape[0]))
            a, b = (self.read(name, (rows, *(slice(0, n) for n in shape[1:]))) for name in (first, second))
            # NaN equals NaN here, and bfloat16 is compared with others as fp32, which represents it exactly.
            if a.dtype != b.dtype:
                a, b = (x.astype(np.float32) if x.dtype.itemsize < 4 else x for x in (a, b))
            if a.tobytes() != b.tobytes() and not np.array_equal(a, b):
                return False
        return True

    def _files(self) -> list[Path]:
        if (self._folder / SINGLE_FILE).is_file():
            return [self._folder / SINGLE_FILE]
        if not (self._folder / INDEX_FILE).is_file():
            raise UserError(
                f"{self._folder} has no {SINGLE_FILE} and no {INDEX_FILE}: give a local Hugging Face folder"
            )
        missing = missing_files(self._folder)
        if missing:
            names = ", ".join(first_few(missing))
            raise UserError(f"{self._folder} lacks {names}, which {INDEX_FILE} lists: download the rest")
        return [self._folder / name for name in listed_files(self._folder)]


def listed_files(folder: Path) -> list[str]:
    """Returns the files that ``folder/model.safetensors.index.json`` lists. Raises UserError for a file that is not
    such an index, or leads out of the folder.
    """
    index = folder / INDEX_FILE
    places = read_json(index, "the index of safetensors files", dict, LISTING_BYTES).get("weight_map")
    if not isinstance(places, dict):
        raise UserError(f"{index} is not an index of safetensors files (no weight_map): download it again")
    # Links may lead out of the folder: the cache of Hugging Face consists of them.
    files = {path_within(folder, name, f"{index}: weight_map.{key}") for key, name in places.items()}
    return sorted(str(file.relative_to(folder)) for file in files)


def missing_files(folder: Path) -> list[str]:
    """Returns the safetensors that a folder lacks; [] if the weights are complete."""
    if (folder / SINGLE_FILE).is_file():
        return []
    if not (folder / INDEX_FILE).is_file():
        return [SINGLE_FILE]
    return [name for name in listed_files(folder) if not (folder / name).is_file()]


def open_safetensors(file: Path) -> Any:
    """Returns the library's handle of one file, a context manager. Raises UserError for a file that is missing,
    truncated or not a safetensors file.
    """
    try:
        return safe_open(regular_file(file, "weights"), framework="numpy")
    except SafetensorError as error:
        raise UserError(
            f"{file} is not a whole safetensors file ({error}): its {file.stat().st_size:,} bytes were "
            "probably cut short in a copy; copy or download it again"
        ) from error
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror or error}") from error


def save_tensors(tensors: Mapping[str, np.ndarray], path: Path, metadata: dict[str, str] | None = None) -> None:
    """Writes a safetensors file with the permissions of any new file; the library's own files are readable only by the
    user.

    Raises OSError if it cannot be written.
    """
    path.touch()
    mode = path.stat().st_mode
    try:
        save_file(dict(tensors), path, metadata)
    except SafetensorError as error:
        # The library reports a full disk only as text: "I/O error: No space left on device (os error 28)".
        found = re.search(r"\(os error (\d+)\)", str(error))
        code = int(found[1]) if found else errno.EIO
        raise OSError(code, os.strerror(code), str(path)) from error
    path.chmod(mode)
