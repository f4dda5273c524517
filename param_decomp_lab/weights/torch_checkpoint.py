"""Reads arrays from a checkpoint of torch. Only tensors and plain values are read; no code of a pickle is run.

Files of torch 1.6 or later are read without torch (`torch_zip.py`), which is not a dependency. Older ones need it, and
are opened with ``weights_only=True``.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from param_decomp_lab.errors import UserError
from param_decomp_lab.safe_io.files import regular_file
from param_decomp_lab.safe_io.printable import first_few, printable, shortened
from param_decomp_lab.weights.torch_zip import NotPlain, is_torch_zip, read_torch_zip

INSTALL = "pip install 'torch>=2.4'"
WITHIN = ("state_dict", "model_state_dict", "model")
"""Keys of the weights in a checkpoint with more than weights."""


def require_torch(what: str) -> Any:
    """Returns torch. Raises a UserError that says how to install it if it is missing. ``what``: what needs it."""
    try:
        import torch
    except ImportError as error:
        raise UserError(f"{what}: reading it needs torch, which is not installed here: {INSTALL}") from error
    return torch


def read_checkpoint(path: Path) -> dict[str, np.ndarray]:
    """Returns the arrays of a state dict by name, each in its own dtype.

    It also reads a safetensors file. Raises UserError without torch for a file from before torch 1.6, and for a file
    that is not a checkpoint, has other objects than tensors and plain values, which only code could make, or has no
    state dict.
    """
    if path.suffix == ".safetensors":
        try:
            return load_file(regular_file(path, "a checkpoint"))
        except (SafetensorError, OSError) as error:
            raise UserError(f"{path}: cannot be read as a safetensors file ({error}); copy it again") from error
    regular_file(path, "a checkpoint")
    if is_torch_zip(path):
        try:
            return dict(_state(read_torch_zip(path), path, np.ndarray))
        except NotPlain as error:
            raise _not_plain(path, str(error)) from error
    torch = require_torch(str(path))
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        text = printable(str(error), 10_000)
        if "eights_only" in text or "Unsupported" in text or "GLOBAL" in text:
            raise _not_plain(path, _refused(text)) from error
        first = shortened(text.partition("\n")[0], 200) or type(error).__name__
        raise UserError(f"{path}: cannot be read as a checkpoint of torch ({first}); copy it again") from error
    return {name: _array(name, tensor, path) for name, tensor in _state(loaded, path, torch.Tensor).items()}


def needs_torch(path: Path) -> bool:
    """Whether `read_checkpoint` needs torch for this file."""
    return path.suffix != ".safetensors" and not is_torch_zip(regular_file(path, "a checkpoint"))


def _not_plain(path: Path, name: str) -> UserError:
    return UserError(
        f"{path}: holds more than plain values and dense tensors of the usual types ({name}); it is not read. Save the "
        "state dict alone: torch.save(model.state_dict(), FILE)"
    )


def _refused(text: str) -> str:
    """Returns the object's name from torch's long message."""
    found = text.partition("GLOBAL ")[2].split()
    return found[0].strip("`'\",.") if found else "an object that is not named"


def _state(loaded: Any, path: Path, tensor: type) -> Mapping[str, Any]:
    def is_state(value: Any) -> bool:
        return (
            isinstance(value, Mapping)
            and bool(value)
            and all(isinstance(name, str) and isinstance(entry, tensor) for name, entry in value.items())
        )

    candidates = [loaded]
    if isinstance(loaded, Mapping):
        candidates += [loaded[key] for key in WITHIN if key in loaded]
    for candidate in candidates:
        if is_state(candidate):
            assert isinstance(candidate, Mapping)
            return candidate
    keys = first_few(map(str, loaded)) if isinstance(loaded, Mapping) else [type(loaded).__name__]
    raise UserError(
        f"{path}: has no state dict, a mapping of names to tensors, at its top or under {', '.join(WITHIN)}; it holds "
        f"{', '.join(keys)}"
    )


def _array(name: str, tensor: Any, path: Path) -> np.ndarray:
    import torch

    tensor = tensor.detach()
    if tensor.dtype == torch.bfloat16:  # NumPy has it only through another library
        return tensor.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    try:
        return tensor.numpy()
    except (TypeError, RuntimeError) as error:  # quantised, sparse
        kind = f"{tensor.dtype}, {tensor.layout}"
        raise UserError(
            f"{path}: {name} is stored as {kind}; weights must be dense, of floating-point numbers"
        ) from error
