"""Folders as SAELens writes them, made on the fly."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

D = 16
"""Width of the tiny run's target."""


def identity(at: str, d: int = D) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """`cfg.json` and tensors of an SAE that gives what it reads: its latents are the coordinates, those above 0 and
    those below."""
    both = np.concatenate([np.eye(d), -np.eye(d)]).astype(np.float32)
    config = {
        "d_in": d,
        "d_sae": 2 * d,
        "dtype": "float32",
        "device": "cpu",
        "apply_b_dec_to_input": True,
        "normalize_activations": "none",
        "reshape_activations": "none",
        "metadata": {"sae_lens_version": "6.54.12", "sae_lens_training_version": "6.54.12", "hook_name": at},
        "architecture": "standard",
    }
    biases = {"b_enc": np.zeros(2 * d, np.float32), "b_dec": np.zeros(d, np.float32)}
    return config, {"W_enc": np.ascontiguousarray(both.T), "W_dec": both, **biases}


def save(folder: Path, config: dict[str, Any], tensors: dict[str, np.ndarray]) -> Path:
    folder.mkdir(parents=True)
    save_file(tensors, folder / "sae_weights.safetensors")
    (folder / "cfg.json").write_text(json.dumps(config))
    return folder
