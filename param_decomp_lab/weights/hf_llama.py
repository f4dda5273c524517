"""A Llama's weights from a local Hugging Face folder, and into one.

Hugging Face keeps a matrix ``[out, in]`` per layer; here it is ``[in, out]``, stacked over layers.
"""

import functools
import json
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import NamedSharding

from param_decomp_jax.placement import from_slices
from param_decomp_jax.targets.llama import KINDS, LlamaConfig, module_name, weight_shapes
from param_decomp_lab.errors import UserError
from param_decomp_lab.weights.hf_config import CONFIG_FILE, config_json, read_config
from param_decomp_lab.weights.safetensors_files import SINGLE_FILE, SafetensorsFolder, save_tensors

Weights = dict[str, Any]
Dtype = Literal["float32", "bfloat16"]
BLOCK_ELEMENTS = 1 << 23
"""Read from a file at once, so that a cast or a transposition needs no second copy of a whole slice."""
DTYPES: dict[Dtype, np.dtype[Any]] = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


@dataclass(frozen=True)
class Leaf:
    """Where an array of the weights lies in the file: a tensor, or with ``stacked`` one tensor per layer."""

    tensors: tuple[str, ...]
    stacked: bool
    transposed: bool


def leaf_sources(config: LlamaConfig) -> dict[str, Any]:
    """The ``Leaf`` of every array, in the structure of the weights."""

    def per_layer(name: Callable[[int], str], transposed: bool) -> Leaf:
        return Leaf(tuple(f"model.{name(n)}.weight" for n in range(config.n_layers)), True, transposed)

    layers = {kind: per_layer(functools.partial(module_name, kind=kind), True) for kind in KINDS}
    layers["input_norm"] = per_layer(lambda n: f"layers.{n}.input_layernorm", False)
    layers["post_norm"] = per_layer(lambda n: f"layers.{n}.post_attention_layernorm", False)
    sources: dict[str, Any] = {
        "embed": Leaf(("model.embed_tokens.weight",), False, False),
        "layers": layers,
        "norm": Leaf(("model.norm.weight",), False, False),
    }
    if not config.tied:
        sources["head"] = Leaf(("lm_head.weight",), False, True)
    return sources


def load_llama(
    folder: str | Path, dtype: Dtype | None = None, shardings: Weights | None = None
) -> tuple[LlamaConfig, Weights]:
    """Configuration and weights of the Llama in ``folder``, in the layout of ``param_decomp_jax.targets.llama``.

    ``dtype``: cast to it; None keeps each tensor's own. ``shardings``: a ``NamedSharding`` for every array, in the
    structure of the weights: each process then reads only the slices of its devices, one at a time, each straight into
    the array that goes to the device (the host holds the largest of them and a block of some 32 MiB). None: whole
    arrays on the default device.

    Raises UserError: what ``read_config`` refuses, a missing or truncated file, a tensor that is missing, of the
    wrong shape, or that no Llama has.
    """
    config = read_config(folder)
    sources, shapes = leaf_sources(config), weight_shapes(config)
    with SafetensorsFolder(folder) as files:
        jax.tree.map(lambda leaf, shape: _expect(files, leaf, shape), sources, shapes, is_leaf=_is_leaf)
        _refuse_unknown(Path(folder), files.names, sources)

        def load(leaf: Leaf, shape: tuple[int, ...], sharding: NamedSharding | None) -> jax.Array:
            to = DTYPES[dtype] if dtype is not None else files.dtype(leaf.tensors[0])
            read = functools.partial(_read, files, leaf, to)
            if sharding is None:
                return jnp.asarray(read(tuple(slice(0, size) for size in shape)))
            return from_slices(shape, sharding, read)

        if shardings is None:
            shardings = jax.tree.map(lambda _: None, sources, is_leaf=_is_leaf)
        return config, jax.tree.map(load, sources, shapes, shardings, is_leaf=_is_leaf)


def stored_dtype(folder: Path) -> np.dtype[Any]:
    """What the weights in ``folder`` are stored in; what their config.json says where the weights are not there."""
    try:
        with SafetensorsFolder(folder) as files:
            return files.dtype(next(iter(leaf_sources(read_config(folder))["embed"].tensors)))
    except (UserError, KeyError):
        raw = json.loads((folder / CONFIG_FILE).read_text())
        return np.dtype(raw.get("dtype") or raw.get("torch_dtype") or "float32")


def save_llama(
    folder: str | Path,
    config: LlamaConfig,
    weights: Weights,
    dtype: Dtype = "float32",
    *,
    max_position_embeddings: int = 2048,
    eos_token_id: int | None = None,
) -> None:
    """Write ``config.json`` and ``model.safetensors`` so that ``load_llama`` and transformers read them.

    Each file appears only when it is complete; others in ``folder`` are left alone.
    """
    folder = Path(folder)
    settings = config_json(
        config, dtype=dtype, max_position_embeddings=max_position_embeddings, eos_token_id=eos_token_id
    )
    tensors = dict(_tensors(config, weights, DTYPES[dtype]))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        partial = folder / f".{SINGLE_FILE}.partial"
        save_tensors(tensors, partial, metadata={"format": "pt"})
        os.replace(partial, folder / SINGLE_FILE)
        partial = folder / f".{CONFIG_FILE}.partial"
        partial.write_text(json.dumps(settings, indent=2) + "\n")
        os.replace(partial, folder / CONFIG_FILE)
    except OSError as error:
        raise UserError(f"cannot write the weights to {folder}: {error.strerror or error}") from error


def _tensors(config: LlamaConfig, weights: Weights, dtype: np.dtype[Any]) -> Iterator[tuple[str, np.ndarray]]:
    pairs: list[tuple[Leaf, jax.Array]] = []
    jax.tree.map(lambda leaf, array: pairs.append((leaf, array)), leaf_sources(config), weights, is_leaf=_is_leaf)
    for leaf, array in pairs:
        rows = np.asarray(array).astype(dtype)
        for name, row in zip(leaf.tensors, rows if leaf.stacked else [rows], strict=True):
            yield name, np.ascontiguousarray(row.T if leaf.transposed else row)


def _read(files: SafetensorsFolder, leaf: Leaf, dtype: np.dtype[Any], index: tuple[slice, ...]) -> np.ndarray:
    """The part ``index`` of a leaf: the only array of that size that is made, filled block by block of the file."""
    names = leaf.tensors[index[0]] if leaf.stacked else leaf.tensors
    inner = index[1:] if leaf.stacked else index
    out = np.empty((len(names), *(part.stop - part.start for part in inner)), dtype)
    for row, name in zip(out, names, strict=True):
        to = row.T if leaf.transposed else row  # as stored
        first, *rest = reversed(inner) if leaf.transposed else inner
        step = max(1, BLOCK_ELEMENTS // max(1, math.prod(to.shape[1:])))
        for start in range(first.start, first.stop, step):
            stop = min(start + step, first.stop)
            to[start - first.start : stop - first.start] = files.read(name, (slice(start, stop), *rest))
    return out if leaf.stacked else out[0]


def _expect(files: SafetensorsFolder, leaf: Leaf, shape: tuple[int, ...]) -> None:
    inner = shape[1:] if leaf.stacked else shape
    for name in leaf.tensors:
        files.expect(name, inner[::-1] if leaf.transposed else inner)


def _refuse_unknown(folder: Path, names: frozenset[str], sources: dict[str, Any]) -> None:
    known = {name for leaf in jax.tree.leaves(sources, is_leaf=_is_leaf) for name in leaf.tensors}
    # A tied head is often stored too, and old files hold the rotary frequencies.
    unknown = sorted(n for n in names - known if n != "lm_head.weight" and not n.endswith("rotary_emb.inv_freq"))
    if unknown:
        raise UserError(
            f"{folder}: the tensor {unknown[0]} ({len(unknown)} such) has no place in the Llama of its config.json; "
            "the weights and config.json do not belong together"
        )


def _is_leaf(x: object) -> bool:
    return isinstance(x, Leaf)
