"""Writes the golden models of the decoder families, each with the logits that an implementation other than ours gives.
Needs torch, which nothing else does; in an environment of its own:

    pip install torch==2.13.0 transformers==5.23.0 safetensors numpy pyyaml
    python tests/golden/make_family_fixtures.py tests/golden/families              # all
    python tests/golden/make_family_fixtures.py tests/golden/families qwen2 gpt2   # these

``families/README.md`` says what is in a folder. The script ends with an error unless in each model every special thing
changes the logits where it is switched off, float32 and float64 agree, and transformers reads the written folder back,
with either form of the configuration, to the same logits.
"""

import argparse
import json
import shutil
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
import yaml
from family_models import COMMON, FAMILIES, Family, Without
from safetensors.torch import load_file, save_file
from torch.overrides import TorchFunctionMode
from torch_family_models import TORCH_MODELS, TorchModel

CONFIG, PUBLISHED, WEIGHTS, EXPECTED = "config.json", "config_published.json", "model.safetensors", "expected.npz"
CHECKPOINT, CHECKPOINT_CONFIG = "checkpoint.pt", "model_config.yaml"
BATCH, LENGTH = 2, 24
EAGER = {"attn_implementation": "eager", "experts_implementation": "eager"}
# What a special thing must change in a logit at least. Two kinds of GELU differ by less than 5e-4 themselves.
MATTERS, GELU_MATTERS = 1e-2, 5e-4
# What float32 may cost, a fifth of what our tests allow; what must lie between the probabilities of two experts that
# are chosen or the next to be.
FLOAT32_ERROR, ROUTER_GAP = 2e-5, 5e-4
# Above this error of float32 the logits of float64 are stored too.
STORED_ERROR = 5e-6


class InFloat64(TorchFunctionMode):
    """float64 wherever the code of a model asks for float32: transformers computes norms, softmax and rotary
    frequencies in float32 whatever the type of the model."""

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float:
            return args[0].double()
        wider = {torch.float32: torch.float64}
        args = [wider.get(a, a) if isinstance(a, torch.dtype) else a for a in args]
        kwargs = {k: wider.get(a, a) if isinstance(a, torch.dtype) else a for k, a in (kwargs or {}).items()}
        return func(*args, **kwargs)


def empty_model(family: Family, **changes: Any) -> torch.nn.Module:
    config = family.config(**COMMON | dict(family.settings) | changes)
    config.architectures = None
    return transformers.AutoModelForCausalLM.from_config(config, **EAGER).eval()


def randomize(model: torch.nn.Module) -> None:
    for name, parameter in model.named_parameters():
        is_norm_weight = name.endswith("weight") and parameter.ndim == 1
        mean = 1.0 if is_norm_weight and parameter.detach().mean() == 1.0 else 0.0  # 0: Gemma, whose norms add the 1
        parameter.data.normal_(mean, 0.3)


def logits(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(tokens, use_cache=False).logits


def changed(family: Family, model: torch.nn.Module, without: Without, tokens: torch.Tensor) -> float:
    """The largest change of a logit when a special thing is switched off."""
    other = empty_model(family, **({} if callable(without) else without))
    left_out = other.load_state_dict(model.state_dict(), strict=False)
    assert not left_out.missing_keys, left_out
    if callable(without):
        without(other)
    return float((logits(other, tokens) - logits(model, tokens)).abs().max())


def float64_logits(family: Family, model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    torch.set_default_dtype(torch.float64)
    try:
        with InFloat64():
            exact = empty_model(family, dtype=torch.float64)
            exact.load_state_dict({name: tensor.double() for name, tensor in model.state_dict().items()})
            result = logits(exact, tokens)
    finally:
        torch.set_default_dtype(torch.float32)
    assert result.dtype == torch.float64
    return result


def routing(model: torch.nn.Module, tokens: torch.Tensor) -> dict[str, np.ndarray]:
    """Of each layer with experts: probabilities of all experts, indices of the chosen ones and their weights."""
    found: dict[str, np.ndarray] = {}

    def record(number: str) -> Callable[..., None]:
        def hook(module: torch.nn.Module, inputs: Any, outputs: tuple[torch.Tensor, ...]) -> None:
            scores, weights, indices = (output.unflatten(0, tokens.shape) for output in outputs)
            probabilities = scores.softmax(-1)
            best = probabilities.topk(indices.shape[-1] + 1).values
            gap = (best[..., :-1] - best[..., 1:]).min()
            assert gap > ROUTER_GAP, f"layer {number}: two experts are as good to {gap:.1e}; take another seed"
            found[f"router_probabilities.{number}"] = probabilities.numpy()
            found[f"router_indices.{number}"] = indices.numpy().astype(np.int32)
            found[f"router_weights.{number}"] = weights.numpy()

        return hook

    hooks = [
        module.register_forward_hook(record(name.split(".")[2]))
        for name, module in model.named_modules()
        if type(module).__name__.endswith("TopKRouter")
    ]
    logits(model, tokens)
    for hook in hooks:
        hook.remove()
    return found


def expected(tokens: torch.Tensor, float32: torch.Tensor, float64: torch.Tensor) -> dict[str, np.ndarray]:
    error = float((float32.double() - float64).abs().max())
    assert 0 < error < FLOAT32_ERROR, f"float32 and float64 differ by {error:.1e}"
    assert float((float32[:, 1:] - float32[:, :-1]).abs().amax(-1).min()) > MATTERS, (
        "two positions have the same logits"
    )
    arrays = {"tokens": tokens.numpy().astype(np.int32), "logits": float32.numpy()}
    return arrays | ({"logits64": float64.float().numpy()} if error > STORED_ERROR else {})


def report(name: str, arrays: dict[str, np.ndarray], changes: dict[str, float]) -> None:
    print(f"{name}: largest logit {abs(arrays['logits']).max():.2f}, changes of a logit without")
    for thing, change in changes.items():
        print(f"    {thing}: {change:.3g}")
        assert change > (GELU_MATTERS if thing.startswith("gelu") else MATTERS), thing


def write(out: Path, name: str, family: Family) -> None:
    """A family of which transformers has a class."""
    folder = out / name
    shutil.rmtree(folder, ignore_errors=True)
    torch.manual_seed(zlib.crc32(name.encode()) + family.seed)
    model = empty_model(family)
    randomize(model)
    tokens = torch.randint(COMMON["vocab_size"], (BATCH, LENGTH))
    arrays = expected(tokens, logits(model, tokens), float64_logits(family, model, tokens)) | routing(model, tokens)
    report(name, arrays, {thing: changed(family, model, w, tokens) for thing, w in family.without.items()})

    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    save_file(family.tensors(load_file(folder / WEIGHTS)), folder / WEIGHTS, metadata={"format": "pt"})
    np.savez_compressed(folder / EXPECTED, **arrays)
    published = family.published(json.loads((folder / CONFIG).read_text()))
    (folder / PUBLISHED).write_text(json.dumps(published, indent=2, sort_keys=True) + "\n")
    read_back(folder, CONFIG, arrays["logits"], tokens)
    read_back(folder, PUBLISHED, arrays["logits"], tokens)


def read_back(folder: Path, config: str, stored: np.ndarray, tokens: torch.Tensor) -> None:
    """transformers reads the folder, with this file as its configuration, to the same logits."""
    with tempfile.TemporaryDirectory() as copy:
        shutil.copy(folder / WEIGHTS, copy)
        shutil.copy(folder / config, Path(copy) / CONFIG)
        model = transformers.AutoModelForCausalLM.from_pretrained(copy, **EAGER).eval()
        assert model.dtype == torch.float32
        difference = abs(logits(model, tokens).numpy() - stored).max()
    assert difference <= 1e-6, f"{folder / config}: {difference:.1e} after writing and reading"


def write_torch(out: Path, name: str, model: TorchModel) -> None:
    """A model of the PyTorch project, with the form of that project's own training beside, if it is to have one."""
    torch.manual_seed(zlib.crc32(name.encode()))
    state = {
        parameter: torch.randn(shape) * 0.3 + (len(shape) == 1 and parameter.endswith("weight"))
        for parameter, shape in model.shapes(model.config).items()
    }
    tokens = torch.randint(model.config["vocab_size"], (BATCH, LENGTH))

    def change(without: Any) -> float:
        weights, config = (without(state), {}) if callable(without) else (state, without)
        other = model.forward(dict(model.config) | config, weights, tokens)
        return float((other - torch.from_numpy(arrays["logits"])).abs().max())

    exact = model.forward(model.config, {key: tensor.double() for key, tensor in state.items()}, tokens)
    arrays = expected(tokens, model.forward(model.config, state, tokens), exact)
    report(name, arrays, {thing: change(without) for thing, without in model.without.items()})

    for folder in {out / name, out / (model.checkpoint or name)}:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        np.savez_compressed(folder / EXPECTED, **arrays)
    if model.safetensors:
        (out / name / CONFIG).write_text(json.dumps(model.config, indent=2) + "\n")
        head = {"lm_head.weight": state["wte.weight"].clone()} if model.head else {}
        save_file(state | head, out / name / WEIGHTS, metadata={"format": "pt"})
    if model.checkpoint:
        torch.save(state | {"lm_head.weight": state["wte.weight"]}, out / model.checkpoint / CHECKPOINT)
        (out / model.checkpoint / CHECKPOINT_CONFIG).write_text(yaml.safe_dump(dict(model.config), sort_keys=False))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("names", nargs="*", help=f"of {', '.join([*FAMILIES, *TORCH_MODELS])}; all without")
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    for model_name in arguments.names or [*FAMILIES, *TORCH_MODELS]:
        if model_name in FAMILIES:
            write(arguments.out, model_name, FAMILIES[model_name])
        else:
            write_torch(arguments.out, model_name, TORCH_MODELS[model_name])
