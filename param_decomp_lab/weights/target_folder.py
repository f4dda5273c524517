"""Reads the folder of a target, ``config.json`` and safetensors, into the layout of its architecture, and writes it.

The architecture says what is in the files, and where (`param_decomp_jax/targets/architecture.py`).
"""

import functools
import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from param_decomp_jax.sharding.by_layer import ByLayer
from param_decomp_jax.sharding.placement import from_slices, shardings
from param_decomp_jax.targets.architecture import Architecture, Tensors, UnsupportedConfig, is_shape
from param_decomp_jax.targets.base import Target
from param_decomp_jax.targets.registry import read_config
from param_decomp_lab.errors import UserError
from param_decomp_lab.safe_io.json_text import read_json
from param_decomp_lab.safe_io.printable import printable
from param_decomp_lab.weights.dtypes import DTYPES, Dtype
from param_decomp_lab.weights.safetensors_files import (
    BLOCK_ELEMENTS,
    SINGLE_FILE,
    SafetensorsFolder,
    missing_files,
    save_tensors,
)

CONFIG_FILE = "config.json"
Weights = dict[str, Any]


@dataclass(frozen=True)
class TargetFolder:
    """The folder of a target in ``path``. Each property reads what it needs from the files on first access.

    Raises UserError if ``config.json`` is missing or not JSON, and, by name, for an architecture that is not in the
    registry or an unsupported variant.
    """

    path: Path

    @cached_property
    def architecture(self) -> Architecture:
        """The architecture of ``config.json``. If that says that the head is the embedding, but the files have both and
        they differ, the architecture has a separate head, as in transformers 5. If weights are missing or damaged,
        ``config.json`` alone decides.
        """
        return self._configured.untied() if self._holds_another_head else self._configured

    @cached_property
    def dtype(self) -> np.dtype[Any]:
        """The stored dtype of the weights; that of ``config.json`` if the weights are missing."""
        try:
            with SafetensorsFolder(self.path) as files:
                leaves = jax.tree.leaves(_as_stored(self.architecture, files.names), is_leaf=_is_leaf)
                return files.dtype(leaves[0].names[0])
        except (UserError, KeyError):
            name = self._config.get("dtype") or self._config.get("torch_dtype") or "float32"
            try:
                return np.dtype(name)
            except TypeError as error:
                raise UserError(
                    f"{self.path / CONFIG_FILE}: dtype is {printable(repr(name), 80)}, which is not a number type"
                ) from error

    def head_notes(self, used: Architecture) -> tuple[str, ...]:
        """Returns what a user should know about a head that ``config.json`` does not mention. ``used``: the
        architecture with which the weights are read.
        """
        if not self._holds_another_head:
            return ()
        assert self._configured.tied_tensors is not None
        found = (
            f"{self.path / CONFIG_FILE} says that the unembedding is the embedding, but the files hold another matrix, "
            f"{self._configured.tied_tensors[1]}"
        )
        if used.tied_tensors is not None:
            return (f"{found}; the run was made before this was checked, and keeps the embedding",)
        return (f"{found}, which is used, as transformers 5 does",)

    @cached_property
    def _config(self) -> dict[str, Any]:
        file = self.path / CONFIG_FILE
        if not file.is_file():
            raise UserError(
                f"no {file.name} in {file.parent}: give a local folder in the Hugging Face layout, or one that "
                "`pd pretrain` made"
            )
        return read_json(file, "the target's configuration", dict)

    @cached_property
    def _configured(self) -> Architecture:
        """The architecture in ``config.json``."""
        try:
            return read_config(self._config)
        except UnsupportedConfig as error:
            raise UserError(f"{self.path / CONFIG_FILE}: {error}") from error

    @cached_property
    def _holds_another_head(self) -> bool:
        """Whether the files have two different matrices where the architecture has one."""
        tied = self._configured.tied_tensors
        if tied is None:
            return False
        try:
            if missing_files(self.path):
                return False
            with SafetensorsFolder(self.path) as files:
                first, second = (stored_name(self._configured, name, files.names) for name in tied)
                if first not in files.names or second not in files.names:
                    return False
                stats = [(file, file.stat()) for file in files.paths]
                stamp = tuple((str(file), stat.st_size, stat.st_mtime_ns) for file, stat in stats)
                return not _are_same(self.path, first, second, stamp)
        except (UserError, OSError):
            return False  # `read_weights` reports it


def read_architecture(folder: str | Path) -> Architecture:
    """Returns the architecture in ``folder``, with the errors of `TargetFolder`."""
    return TargetFolder(Path(folder)).architecture


@functools.lru_cache(maxsize=32)
def _are_same(folder: Path, first: str, second: str, stamp: tuple[tuple[str, int, int], ...]) -> bool:
    """Computes `SafetensorsFolder.same` once for unchanged files, since a command needs the architecture often."""
    with SafetensorsFolder(folder) as files:
        return files.same(first, second)


def weight_shardings(mesh: Mesh, target: Target) -> Any:
    """Returns the sharding of every array of a target's weights, in their structure."""
    shapes = jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32), target.architecture.weight_shapes(), is_leaf=is_shape
    )
    return shardings(mesh, target.weight_axes(shapes), shapes)


def training_shardings(mesh: Mesh, target: Target) -> Any:
    """Returns `weight_shardings` for a training run: if its layers are unrolled, each has its own arrays."""
    where = weight_shardings(mesh, target)
    if target.memory.layers == "scan":
        return where

    def by_layer(leaf: Tensors, sharding: NamedSharding, shape: tuple[int, ...]) -> Any:
        if not leaf.stacked:
            return sharding
        assert not any(sharding.spec[:1]), "layers are not split over devices"
        own = NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[1:]))
        return ByLayer((own,) * shape[0])

    shapes = target.architecture.weight_shapes()
    return jax.tree.map(by_layer, target.architecture.tensors(), where, shapes, is_leaf=_is_leaf)


def training_shapes(architecture: Architecture, dtype: Any, shardings: Any) -> Any:
    """Returns abstract arrays of the weights, in the layout of `training_shardings`."""

    def shaped(shape: tuple[int, ...], where: NamedSharding | ByLayer) -> Any:
        if isinstance(where, ByLayer):
            return ByLayer(tuple(jax.ShapeDtypeStruct(shape[1:], dtype, sharding=own) for own in where.layers))
        return jax.ShapeDtypeStruct(shape, dtype, sharding=where)

    return jax.tree.map(shaped, architecture.weight_shapes(), shardings, is_leaf=is_shape)


def load_target(
    folder: str | Path,
    dtype: Dtype | None = None,
    shardings: Weights | None = None,
) -> tuple[Architecture, Weights]:
    """Returns the architecture and weights of the network in ``folder``: `read_architecture`, then `read_weights`."""
    architecture = read_architecture(folder)
    return architecture, read_weights(folder, architecture, dtype, shardings)


def read_weights(
    folder: str | Path, architecture: Architecture, dtype: Dtype | None = None, shardings: Weights | None = None
) -> Weights:
    """Returns the weights in ``folder``, in the layout of ``Architecture.weight_shapes``.

    ``architecture``: the folder's, or that of a run made before tied heads were checked (`as_recorded`).

    ``dtype``: to which weights are cast; None keeps each tensor's own. ``shardings``: a ``NamedSharding`` for every
    array, in the structure of the weights (or a `ByLayer` of them, which the array becomes): each process then reads
    only the slices of its devices, one at a time, each directly into the array for the device (the host holds the
    largest slice and a block of about 32 MiB). None puts whole arrays on the default device.

    Raises UserError for a missing or truncated file, and for a tensor that is missing, has the wrong shape, or is not
    in the architecture.
    """
    shapes = architecture.weight_shapes()
    with SafetensorsFolder(folder) as files:
        tensors = _as_stored(architecture, files.names)
        jax.tree.map(lambda leaf, shape: _expect(files, leaf, shape), tensors, shapes, is_leaf=_is_leaf)
        _refuse_unknown(Path(folder), files.names, architecture, tensors)

        def load(leaf: Tensors, shape: tuple[int, ...], sharding: NamedSharding | ByLayer | None) -> Any:
            to = DTYPES[dtype] if dtype is not None else files.dtype(leaf.names[0])
            read = functools.partial(_read, files, leaf, to)
            if sharding is None:
                return jnp.asarray(read(tuple(slice(0, size) for size in shape)))
            if isinstance(sharding, ByLayer):
                of_layer = [lambda index, n=n: read((slice(n, n + 1), *index))[0] for n in range(len(sharding.layers))]
                found = zip(sharding.layers, of_layer, strict=True)
                return ByLayer(tuple(from_slices(shape[1:], where, read_own) for where, read_own in found))
            return from_slices(shape, sharding, read)

        if shardings is None:
            shardings = jax.tree.map(lambda _: None, tensors, is_leaf=_is_leaf)
        return jax.tree.map(load, tensors, shapes, shardings, is_leaf=_is_leaf)


def save_target(
    folder: str | Path,
    architecture: Architecture,
    weights: Weights,
    dtype: Dtype = "float32",
    *,
    eos_token_id: int | None = None,
) -> None:
    """Writes ``config.json`` and ``model.safetensors`` for ``load_target``; a Llama's also for transformers.

    Each file appears only when it is complete; other files in ``folder`` are left alone. Raises UserError if nothing
    can be written.
    """
    folder = Path(folder)
    settings = architecture.to_config(dtype, eos_token_id)
    arrays = dict(_arrays(architecture, weights, DTYPES[dtype]))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        partial = folder / f".{SINGLE_FILE}.partial"
        save_tensors(arrays, partial, metadata={"format": "pt"})
        os.replace(partial, folder / SINGLE_FILE)
        partial = folder / f".{CONFIG_FILE}.partial"
        partial.write_text(json.dumps(settings, indent=2) + "\n")
        os.replace(partial, folder / CONFIG_FILE)
    except OSError as error:
        raise UserError(f"cannot write the weights to {folder}: {error.strerror or error}") from error


def _as_stored(architecture: Architecture, names: frozenset[str]) -> Any:
    """Returns the architecture's tensors under the names in these files."""

    def stored(leaf: Tensors) -> Tensors:
        found = tuple(stored_name(architecture, name, names) for name in leaf.names)
        if architecture.tied_tensors is not None and leaf.names == architecture.tied_tensors[:1]:
            head = stored_name(architecture, architecture.tied_tensors[1], names)
            found = found if found[0] in names or head not in names else (head,)
        return replace(leaf, names=found)

    return jax.tree.map(stored, architecture.tensors(), is_leaf=_is_leaf)


def stored_name(architecture: Architecture, name: str, names: frozenset[str]) -> str:
    """Returns a tensor's name in these files: its own, its own without the prefix, or an alternative name."""
    wanted = (name, architecture.other_names.get(name, name))
    found = [n for own in wanted for n in (own, own.removeprefix(architecture.prefix)) if n in names]
    return found[0] if found else name


def _arrays(architecture: Architecture, weights: Weights, dtype: np.dtype[Any]) -> Iterator[tuple[str, np.ndarray]]:
    pairs: list[tuple[Tensors, jax.Array]] = []
    jax.tree.map(lambda leaf, array: pairs.append((leaf, array)), architecture.tensors(), weights, is_leaf=_is_leaf)
    for leaf, array in pairs:
        rows = np.asarray(array).astype(dtype)
        rows = rows.reshape(len(leaf.names), *rows.shape[_leading(leaf) :])
        for name, row in zip(leaf.names, rows, strict=True):
            yield name, np.ascontiguousarray(row.T if leaf.transposed else row)


def _read(files: SafetensorsFolder, leaf: Tensors, dtype: np.dtype[Any], index: tuple[slice, ...]) -> np.ndarray:
    """Returns the part ``index`` of a leaf. Only one array of that size is made; it is filled from the file block by
    block.
    """
    n = _leading(leaf)
    names = np.array(leaf.names).reshape((-1, leaf.per_layer)[:n] if leaf.per_layer else (-1,) * n)[index[:n]]
    inner = index[n:]
    out = np.empty((names.size, *(part.stop - part.start for part in inner)), dtype)
    for row, name in zip(out, names.ravel().tolist(), strict=True):
        to = row.T if leaf.transposed else row  # as stored
        first, *rest = reversed(inner) if leaf.transposed else inner
        step = max(1, BLOCK_ELEMENTS // max(1, math.prod(to.shape[1:])))
        for start in range(first.start, first.stop, step):
            stop = min(start + step, first.stop)
            to[start - first.start : stop - first.start] = files.read(name, (slice(start, stop), *rest))
    return out.reshape(*names.shape, *out.shape[1:])


def _leading(leaf: Tensors) -> int:
    """Returns the number of the array's axes that tensors lack."""
    return (2 if leaf.per_layer else 1) if leaf.stacked else 0


def _expect(files: SafetensorsFolder, leaf: Tensors, shape: tuple[int, ...]) -> None:
    inner = shape[_leading(leaf) :]
    for name in leaf.names:
        files.expect(name, inner[::-1] if leaf.transposed else inner)


def _refuse_unknown(folder: Path, names: frozenset[str], architecture: Architecture, tensors: Any) -> None:
    known = {name for leaf in jax.tree.leaves(tensors, is_leaf=_is_leaf) for name in leaf.names}
    known |= {stored_name(architecture, name, names) for name in architecture.tied_tensors or ()}
    unread = architecture.unread_tensors
    unknown = sorted(n for n in names - known if not any(fnmatchcase(n, pattern) for pattern in unread))
    if unknown:
        raise UserError(
            f"{folder}: the tensor {unknown[0]} ({len(unknown)} such) has no place in the {architecture.title} of its "
            f"{CONFIG_FILE}; the weights and {CONFIG_FILE} do not belong together"
        )


def tensor_shapes(architecture: Architecture) -> dict[str, tuple[int, ...]]:
    """Returns the shape of every tensor of a file, by its name with the prefix."""
    shapes: dict[str, tuple[int, ...]] = {}

    def add(leaf: Tensors, shape: tuple[int, ...]) -> None:
        leading = int(leaf.stacked)  # axes that tensors lack
        while math.prod(shape[:leading]) < len(leaf.names):
            leading += 1
        inner = shape[leading:]
        shapes.update(dict.fromkeys(leaf.names, inner[::-1] if leaf.transposed else inner))

    jax.tree.map(add, architecture.tensors(), architecture.weight_shapes(), is_leaf=_is_leaf)
    return shapes


def _is_leaf(x: object) -> bool:
    return isinstance(x, Tensors)
