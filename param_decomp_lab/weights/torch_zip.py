"""Reads a checkpoint of torch 1.6 or later, a zip, without torch and without running anything that it names.

The zip holds a pickle, `data.pkl`, whose tensors refer to storages; each storage is an uncompressed file in the zip.
The pickle may only name what a state dict of tensors needs; for each such name, there is a stand-in here (`_KNOWN`).
"""

import io
import pickle
import pickletools
import sys
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import Any

import ml_dtypes
import numpy as np

from param_decomp_lab.errors import UserError
from param_decomp_lab.safe_io.printable import printable, shortened

MAGIC = b"PK\x03\x04"
LARGEST_PICKLE = 1 << 28
"""The most bytes of a pickle. A state dict's has about 200 for each tensor."""
_LOCAL_HEADER = 30
"""Bytes of a zip's header before a file, without the file's name and the extra field."""

_DTYPES: dict[str, Any] = {
    "DoubleStorage": np.float64, "FloatStorage": np.float32, "HalfStorage": np.float16,
    "BFloat16Storage": ml_dtypes.bfloat16, "LongStorage": np.int64, "IntStorage": np.int32, "ShortStorage": np.int16,
    "CharStorage": np.int8, "ByteStorage": np.uint8, "BoolStorage": np.bool_,
}  # fmt: skip


class NotPlain(Exception):
    """Raised if the pickle names something that only code could make. Its text is that name."""


@dataclass(frozen=True)
class _Storage:
    """A flat array of numbers, which several tensors may share."""

    values: np.ndarray


def is_torch_zip(path: Path) -> bool:
    """Whether a file has torch's current format."""
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def read_torch_zip(path: Path) -> Any:
    """Returns what was saved, with NumPy arrays instead of tensors. The arrays are mapped from the file, which must not
    change.

    Raises NotPlain for a pickle with other objects, and UserError for a damaged file.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            return _read(path, archive)
    except NotPlain:
        raise
    except Exception as error:  # whatever damage does to a zip or a pickle
        first = shortened(printable(str(error), 1000).partition("\n")[0], 200) or type(error).__name__
        raise UserError(f"{path}: cannot be read as a checkpoint of torch ({first}); copy it again") from error


def _read(path: Path, archive: zipfile.ZipFile) -> Any:
    entries = {info.filename: info for info in archive.infolist()}
    main = next((name for name in entries if name.rpartition("/")[2] == "data.pkl"), None)
    if main is None:
        raise ValueError("no data.pkl in it")
    if entries[main].file_size > LARGEST_PICKLE:
        raise ValueError(f"its data.pkl has {entries[main].file_size:,} bytes")
    root, stored = main.removesuffix("data.pkl"), np.memmap(path, np.uint8, mode="r")
    order = _bytes(stored, entries[f"{root}byteorder"]).tobytes() if f"{root}byteorder" in entries else b"little"
    if order != sys.byteorder.encode():
        raise ValueError(f"its numbers are {shortened(repr(order), 20)}-endian")

    def storage(identifier: Any) -> _Storage:
        kind, dtype, key, _, count = identifier
        if kind != "storage" or dtype not in _DTYPES:
            raise ValueError("a storage is described in another way")
        dtype = np.dtype(_DTYPES[dtype])
        return _Storage(_bytes(stored, entries[f"{root}data/{key}"])[: count * dtype.itemsize].view(dtype))

    text = _bytes(stored, entries[main]).tobytes()
    _refuse_large_numbers(text)
    return _Unpickler(io.BytesIO(text), storage).load()


def _bytes(stored: np.ndarray, entry: zipfile.ZipInfo) -> np.ndarray:
    """Returns the bytes of a file in the zip, mapped and checked by their CRC; torch can omit that,
    and then writes 0.
    """
    if entry.compress_type != zipfile.ZIP_STORED:
        raise ValueError(f"{entry.filename} is compressed")
    header = stored[entry.header_offset : entry.header_offset + _LOCAL_HEADER].tobytes()
    if header[: len(MAGIC)] != MAGIC:
        raise ValueError(f"{entry.filename} is not where the zip says")
    name, extra = int.from_bytes(header[26:28], "little"), int.from_bytes(header[28:30], "little")
    start = entry.header_offset + _LOCAL_HEADER + name + extra
    found: np.ndarray = stored[start : start + entry.file_size]
    if found.size != entry.file_size:
        raise ValueError(f"{entry.filename} is cut off")
    if entry.CRC not in (0, zlib.crc32(found.data)):
        raise ValueError(f"{entry.filename} is not what was written")
    return found


def _refuse_large_numbers(text: bytes) -> None:
    """Raises ValueError for a value kept under a large number: unpickling would allocate that many entries."""
    for code, value, _ in pickletools.genops(text):
        if code.name in ("PUT", "BINPUT", "LONG_BINPUT"):
            assert value is not None
            if not 0 <= value <= len(text):
                raise ValueError(f"it keeps a value under the number {value}")


def _tensor(storage: _Storage, offset: int, size: Sequence[int], stride: Sequence[int], *_: Any) -> np.ndarray:
    """Stands in for `torch._utils._rebuild_tensor_v2`; arguments after the strides are about gradients."""
    if not isinstance(storage, _Storage) or len(size) != len(stride) or min((offset, *size, *stride), default=0) < 0:
        raise ValueError("a tensor has no storage, or sizes that none can have")
    values, last = storage.values, offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    if 0 not in size and last >= values.size:
        raise ValueError(f"a tensor of shape {list(size)} needs {last + 1:,} numbers, and {values.size:,} are there")
    steps = tuple(step * values.itemsize for step in stride)
    return np.lib.stride_tricks.as_strided(values[offset:], tuple(size), steps, writeable=False)


def _parameter(tensor: np.ndarray, *_: Any) -> np.ndarray:
    """Stands in for `torch._utils._rebuild_parameter`."""
    return tensor


_KNOWN: dict[tuple[str, str], Callable[..., Any] | str] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch._utils", "_rebuild_parameter"): _parameter,
    **{("torch", name): name for name in _DTYPES},
}


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, storage: Callable[[Any], _Storage]) -> None:
        super().__init__(file)
        self._storage = storage

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _KNOWN:
            raise NotPlain(printable(f"{module}.{name}", 200))
        found = _KNOWN[module, name]
        # Made anew each time, since a pickle can also set an object's attributes.
        return partial(found) if isinstance(found, FunctionType) else found

    def persistent_load(self, identifier: Any) -> _Storage:
        return self._storage(identifier)
