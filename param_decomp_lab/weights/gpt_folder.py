"""The weights of a GPT in a folder of our own: ``config.json`` and ``model.safetensors``.

``config.json`` holds ``model_type: param_decomp_gpt`` and the fields of `GPTConfig`. Every tensor is stored as it is
used, ``x @ W`` with W ``[in, out]``, under its name in ``weight_shapes``; those of layers once per layer:
``layers.3.q_proj``.
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import jax
import jax.numpy as jnp
import numpy as np
from pydantic import Field

from param_decomp_lab.config.strict import Count, Place, Positive, Strict, validate
from param_decomp_lab.errors import UserError
from param_decomp_lab.pretrain.gpt import GPTConfig, Weights, weight_shapes
from param_decomp_lab.weights.hf_config import CONFIG_FILE, GPT_MODEL_TYPE
from param_decomp_lab.weights.safetensors_files import SINGLE_FILE, SafetensorsFolder, save_tensors


class GPTFile(Strict):
    """``config.json``."""

    model_type: Literal["param_decomp_gpt"]
    vocab_size: Count
    n_positions: Count
    d_model: Count
    n_layers: Count
    n_heads: Count
    d_mlp: Count
    dropout: Annotated[float, Field(ge=0, lt=1)]
    norm_eps: Positive


def save_gpt(folder: str | Path, config: GPTConfig, weights: Weights) -> None:
    """Write ``config.json`` and ``model.safetensors``, in fp32, for ``load_gpt``.

    Raises UserError where nothing can be written.
    """
    folder = Path(folder)
    arrays = jax.tree.map(lambda x: np.asarray(x, np.float32), weights)
    tensors = {name: array for name, array in arrays.items() if name != "layers"}
    tensors |= {
        f"layers.{layer}.{name}": row for name, array in arrays["layers"].items() for layer, row in enumerate(array)
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        save_tensors(tensors, folder / SINGLE_FILE)
        (folder / CONFIG_FILE).write_text(json.dumps({"model_type": GPT_MODEL_TYPE, **asdict(config)}, indent=2) + "\n")
    except OSError as error:
        raise UserError(f"cannot write the weights to {folder}: {error.strerror or error}") from error


def load_gpt(folder: str | Path) -> tuple[GPTConfig, Weights]:
    """Configuration and fp32 weights of the GPT in ``folder``, in the structure of ``weight_shapes(config)``.

    Raises UserError: a file is missing or broken, ``config.json`` is not that of such a model, a tensor is missing, of
    the wrong shape, or unknown.
    """
    folder = Path(folder)
    config = _read_config(folder / CONFIG_FILE)
    shapes = weight_shapes(config)
    of_layers = shapes.pop("layers")
    with SafetensorsFolder(folder) as files:

        def read(name: str, shape: tuple[int, ...]) -> np.ndarray:
            files.expect(name, shape)
            return files.read(name, (slice(None),) * len(shape)).astype(np.float32)

        weights: Weights = {name: jnp.asarray(read(name, shape)) for name, shape in shapes.items()}
        weights["layers"] = {
            name: jnp.asarray(np.stack([read(f"layers.{layer}.{name}", shape[1:]) for layer in range(config.n_layers)]))
            for name, shape in of_layers.items()
        }
        names = {*shapes, *(f"layers.{layer}.{name}" for name in of_layers for layer in range(config.n_layers))}
        if unknown := sorted(files.names - names):
            raise UserError(
                f"{folder}: the tensor {unknown[0]} ({len(unknown)} such) has no place in the GPT of its "
                f"{CONFIG_FILE}: the two files do not belong together"
            )
    return config, weights


def _read_config(file: Path) -> GPTConfig:
    if not file.is_file():
        raise UserError(f"no {file.name} in {file.parent}: give the folder of a GPT, as `pd pretrain` writes it")
    try:
        raw = json.loads(file.read_text())
    except ValueError as error:
        raise UserError(f"{file} is not JSON ({error}): copy it again") from error
    fields = validate(GPTFile, raw, Place(str(file))).model_dump(exclude={"model_type"})
    return GPTConfig(**fields)
