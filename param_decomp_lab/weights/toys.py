"""The weights of a toy target in a folder of our own: ``config.json`` and ``model.safetensors``.

``config.json`` holds ``architecture`` (``tms`` or ``resid_mlp``) and the fields of `TMSConfig` or `ResidMLPConfig`.
Every tensor is stored as it is used, ``x @ W`` with W ``[in, out]`` (PyTorch's ``nn.Linear`` keeps the transpose), and
one tensor per layer where the weights in memory are stacked:

- TMS: ``linear1 [n, h]``, ``hidden_layers.i [h, h]``, ``linear2 [h, n]``, ``bias [n]``. ``linear2`` is stored also if
  it was tied to ``linear1`` in training;
- ResidMLP: ``W_E [n, d]`` (its transpose is the unembedding), ``layers.i.mlp_in [d, m]``, ``layers.i.mlp_out [m, d]``
  and, where the configuration has them, ``layers.i.in_bias [m]`` and ``layers.i.out_bias [d]``.
"""

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

from param_decomp_jax.targets import resid_mlp, tms
from param_decomp_jax.targets.resid_mlp import ResidMLPConfig
from param_decomp_jax.targets.tms import TMSConfig
from param_decomp_lab.config.strict import Count, Natural, Place, Strict, validate
from param_decomp_lab.errors import UserError
from param_decomp_lab.weights.safetensors_files import SINGLE_FILE, SafetensorsFolder, save_tensors

CONFIG_FILE = "config.json"

ToyConfig = TMSConfig | ResidMLPConfig
Weights = dict[str, Any]


class TMSFields(Strict):
    """The keys of `TMSConfig`, in ``config.json`` and in recipes."""

    architecture: Literal["tms"]
    n_features: Count
    n_hidden: Count
    n_hidden_layers: Natural = 0

    def config(self) -> TMSConfig:
        return TMSConfig(self.n_features, self.n_hidden, self.n_hidden_layers)


class ResidMLPFields(Strict):
    """The keys of `ResidMLPConfig`, in ``config.json`` and in recipes."""

    architecture: Literal["resid_mlp"]
    n_features: Count
    d_embed: Count
    d_mlp: Count
    n_layers: Count
    activation: Literal["relu", "gelu"] = "relu"
    in_bias: bool = False
    out_bias: bool = False

    def config(self) -> ResidMLPConfig:
        return ResidMLPConfig(
            self.n_features, self.d_embed, self.d_mlp, self.n_layers, self.activation, self.in_bias, self.out_bias
        )


FIELDS: dict[str, type[TMSFields] | type[ResidMLPFields]] = {"tms": TMSFields, "resid_mlp": ResidMLPFields}


def save_toy(folder: str | Path, config: ToyConfig, weights: Weights) -> None:
    """Write ``config.json`` and ``model.safetensors`` for ``load_toy``.

    ``weights``: arrays in the structure of ``weight_shapes(config)``; stored in fp32. Each file appears only when it is
    complete; others in ``folder`` are left alone. Raises UserError where nothing can be written.
    """
    folder = Path(folder)
    architecture = "tms" if isinstance(config, TMSConfig) else "resid_mlp"
    settings = {"architecture": architecture, **asdict(config)}
    tensors = {
        name: np.ascontiguousarray(_at(weights, path)[... if layer is None else layer], np.float32)
        for name, path, layer, _ in _tensors(config)
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        partial = folder / f".{SINGLE_FILE}.partial"
        save_tensors(tensors, partial)
        os.replace(partial, folder / SINGLE_FILE)
        partial = folder / f".{CONFIG_FILE}.partial"
        partial.write_text(json.dumps(settings, indent=2) + "\n")
        os.replace(partial, folder / CONFIG_FILE)
    except OSError as error:
        raise UserError(f"cannot write the weights to {folder}: {error.strerror or error}") from error


def load_toy(folder: str | Path) -> tuple[ToyConfig, Weights]:
    """Configuration and fp32 weights of the toy in ``folder``, in the structure of ``weight_shapes(config)``.

    Raises UserError: a file is missing or broken, the architecture is none of the toys, a key of ``config.json`` is
    wrong, a tensor is missing, of the wrong shape, or unknown.
    """
    folder = Path(folder)
    config = read_toy_config(folder)
    if not (folder / SINGLE_FILE).is_file():
        raise UserError(f"no {SINGLE_FILE} in {folder}: give the folder of a toy, as `pd pretrain` writes it")
    layers: dict[tuple[str, ...], list[np.ndarray]] = {}
    with SafetensorsFolder(folder) as file:
        expected = list(_tensors(config))
        for name, _, _, shape in expected:
            file.expect(name, shape)
        unknown = sorted(file.names - {name for name, *_ in expected})
        if unknown:
            raise UserError(
                f"{folder}: the tensor {unknown[0]} ({len(unknown)} such) has no place in the toy of its "
                f"{CONFIG_FILE}; the weights and {CONFIG_FILE} do not belong together"
            )
        weights: Weights = {}
        for name, path, layer, shape in expected:
            tensor = file.read(name, (slice(None),) * len(shape)).astype(np.float32)
            if layer is None:
                _put(weights, path, jnp.asarray(tensor))
            else:
                layers.setdefault(path, []).append(tensor)
    for path, rows in layers.items():
        _put(weights, path, jnp.asarray(np.stack(rows)))
    return config, weights


def read_toy_config(folder: str | Path) -> ToyConfig:
    """The architecture in ``folder/config.json``. Raises UserError: no such file, or not a toy's."""
    file = Path(folder) / CONFIG_FILE
    if not file.is_file():
        raise UserError(f"no {CONFIG_FILE} in {folder}: give the folder of a toy, as `pd pretrain` writes it")
    try:
        raw = json.loads(file.read_text())
    except ValueError as error:
        raise UserError(f"{file} is not JSON ({error}): copy it again") from error
    if not isinstance(raw, dict):
        raise UserError(f"{file} should be a mapping, as `pd pretrain` writes it; it is a {type(raw).__name__}")
    architecture = str(raw.get("architecture"))
    if architecture not in FIELDS:
        raise UserError(
            f"{file}: architecture: should be one of {', '.join(FIELDS)}, not {architecture}; is this a toy's folder?"
        )
    return validate(FIELDS[architecture], raw, Place(str(file))).config()


def _tensors(config: ToyConfig) -> Iterator[tuple[str, tuple[str, ...], int | None, tuple[int, ...]]]:
    """Of every tensor: its name in the file, where its array lies in the weights, its layer if that array is stacked
    over layers, and its shape."""
    match config:
        case TMSConfig():
            for key, shape in tms.weight_shapes(config).items():
                if key == "hidden_layers":
                    yield from ((f"{key}.{i}", (key,), i, shape[1:]) for i in range(shape[0]))
                else:
                    yield key, (key,), None, shape
        case ResidMLPConfig():
            shapes = resid_mlp.weight_shapes(config)
            yield "W_E", ("embed",), None, shapes["embed"]
            for key, shape in shapes["layers"].items():
                yield from ((f"layers.{i}.{key}", ("layers", key), i, shape[1:]) for i in range(shape[0]))


def _at(weights: Mapping[str, Any], path: tuple[str, ...]) -> np.ndarray:
    value: Any = weights
    for key in path:
        value = value[key]
    return np.asarray(value)


def _put(weights: Weights, path: tuple[str, ...], value: Any) -> None:
    *above, last = path
    for key in above:
        weights = weights.setdefault(key, {})
    weights[last] = value
