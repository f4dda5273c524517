"""Reads the arrays of a checkpoint in the chunks of its files, so that the host holds at most one chunk.

They are verified like whole arrays in `Checkpoints`: by file sizes and fingerprints.
"""

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import tensorstore

from param_decomp_lab.errors import UserError
from param_decomp_lab.runs.checkpoints.damage import Damaged, find_file_damage, read_description
from param_decomp_lab.runs.checkpoints.fingerprints import PartwiseFingerprint

Part = tuple[slice, ...]


class CheckpointArrays:
    """The arrays of one item of a checkpoint, such as ``ckpts/<step>/learned``.

    Raises UserError for a file that cannot be read, and `Damaged` for content that differs from what was saved.
    """

    def __init__(self, item: Path) -> None:
        self._item = item.resolve()
        checkpoint = self._item.parent
        wrong = find_file_damage(checkpoint, [item.name])
        if wrong:
            raise Damaged(f"{checkpoint}: {wrong}")
        self._prints: dict[str, str] = read_description(checkpoint)["fingerprints"].get(item.name, {})
        try:
            found: Any = ocp.StandardCheckpointHandler().metadata(self._item)
            self.shapes: dict[str, tuple[int, ...]] = {name: tuple(array.shape) for name, array in found.items()}
            self.dtypes: dict[str, np.dtype[Any]] = {name: np.dtype(array.dtype) for name, array in found.items()}
        except Exception as error:  # orbax and its storage raise many kinds
            raise UserError(f"the checkpoint {self._item} cannot be read: {error}") from error

    def chunks(self, name: str) -> Iterator[tuple[Part, np.ndarray]]:
        """Yields every part of an array once: its place and its values. `Damaged` is raised after the last."""
        seen = PartwiseFingerprint(self.shapes[name])
        try:
            base = f"file://{self._item}/"
            store = tensorstore.open(
                {"driver": "zarr", "kvstore": {"driver": "ocdbt", "base": base, "path": f"{name}/"}},
                open=True,
                read=True,
            ).result()
            chunk: Any = store.chunk_layout.read_chunk.shape
            for part in _grid(self.shapes[name], chunk):
                values = np.asarray(store[part].read().result())
                seen.add(part, values)
                yield part, values
        except (ValueError, OSError, RuntimeError) as error:
            raise UserError(f"the checkpoint {self._item} cannot be read: {name}: {error}") from error
        if self._prints.get(name, str(seen)) != str(seen):
            raise Damaged(f"{self._item}: {name} does not hold what was saved")


def _grid(shape: tuple[int, ...], chunk: tuple[int, ...]) -> Iterator[Part]:
    axes = [
        [slice(start, min(start + width, size)) for start in range(0, size, width)]
        for size, width in zip(shape, chunk, strict=True)
    ]
    return product(*axes)
