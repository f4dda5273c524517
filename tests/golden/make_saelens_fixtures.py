"""Writes `tests/golden/saelens/`: tiny random SAEs and transcoders as SAELens saves them, and what it computes.

Needs torch and sae-lens, in an environment of its own (6.54.12, with torch 2.13.0, made what is there):

    python tests/golden/make_saelens_fixtures.py tests/golden/saelens
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sae_lens.registry import get_sae_class, get_sae_training_class

D_MODEL, D_SAE, POSITIONS = 16, 12, 4
MODEL = {"model_name": "tiny-llama", "prepend_bos": False, "model_from_pretrained_kwargs": {}}
RESIDUAL = {**MODEL, "hook_name": "blocks.0.hook_resid_post"}
MLP = {**MODEL, "hook_name": "blocks.1.mlp.hook_in", "hook_name_out": "blocks.1.hook_mlp_out"}
FOLDERS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "standard": ("standard", RESIDUAL, {}),
    "standard_layer_norm": ("standard", RESIDUAL, {"normalize_activations": "layer_norm"}),
    "standard_rescaled": (
        "standard", RESIDUAL, {"normalize_activations": "constant_norm_rescale", "apply_b_dec_to_input": False},
    ),
    "jumprelu": ("jumprelu", {**MODEL, "hook_name": "blocks.1.hook_resid_pre"}, {}),
    "topk": ("topk", {**MODEL, "hook_name": "blocks.1.hook_mlp_out"}, {"k": 3}),
    "topk_rescaled": ("topk", RESIDUAL, {"k": 3, "rescale_acts_by_decoder_norm": True}),
    "gated": ("gated", RESIDUAL, {}),
    "transcoder": ("transcoder", MLP, {"apply_b_dec_to_input": False, "d_out": D_MODEL}),
    "transcoder_layer_norm": (
        "transcoder", MLP, {"apply_b_dec_to_input": False, "d_out": D_MODEL, "normalize_activations": "layer_norm"},
    ),
    "jumprelu_skip_transcoder": (
        "jumprelu_skip_transcoder", {**MLP, "hook_name": "blocks.1.ln2.hook_normalized"},
        {"apply_b_dec_to_input": False, "d_out": D_MODEL},
    ),
}  # fmt: skip
TRAINED = {"trained_batchtopk": ("batchtopk", {"k": 3})}
"""Saved by the class for training, for inference: it becomes a JumpReLU SAE."""


def randomise(sae: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in sae.parameters():
            parameter.copy_(0.4 * torch.randn(parameter.shape, generator=generator))


def main(out: Path) -> None:
    x = torch.randn(POSITIONS, D_MODEL, generator=torch.Generator().manual_seed(0)) + 0.2
    expected = {"x": x.numpy()}
    for seed, (name, (architecture, metadata, changes)) in enumerate(FOLDERS.items(), start=1):
        made, config = get_sae_class(architecture)
        settings = {"d_in": D_MODEL, "d_sae": D_SAE, "metadata": metadata, "architecture": architecture, **changes}
        sae = made(config.from_dict(settings))
        randomise(sae, seed)
        sae.save_model(out / name)
        expected |= of(name, sae, x)
    for seed, (name, (architecture, changes)) in enumerate(TRAINED.items(), start=50):
        trained, training_config = get_sae_training_class(architecture)
        settings = {"d_in": D_MODEL, "d_sae": D_SAE, "metadata": RESIDUAL, "architecture": architecture, **changes}
        sae = trained(training_config.from_dict(settings))
        randomise(sae, seed)
        sae.topk_threshold.fill_(0.7)
        sae.save_inference_model(out / name)
        expected |= of(name, get_sae_class("jumprelu")[0].load_from_disk(out / name), x)
    np.savez_compressed(out / "expected.npz", **expected)


def of(name: str, sae: Any, x: torch.Tensor) -> dict[str, np.ndarray]:
    """Latents and output; `forward` adds the skip connection, `decode` does not."""
    with torch.no_grad():
        given = sae.forward_with_activations(x)[0] if hasattr(sae, "W_skip") else sae(x)
        return {f"{name}.latents": sae.encode(x).numpy(), f"{name}.output": given.numpy()}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
