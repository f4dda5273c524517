"""Experiment files in the style of the PyTorch project's, as its users have them: `pd check` takes each as it is.

They are in `schema_files/experiments/`: four of TMS, four of residual MLPs, GPT-2 and GPT-2 XL, Llama 3.1 8B, and
LlamaSimpleMLP with 2, 4 and 12 layers. A wrapper names a small target of that kind and token data.
"""

import json
from collections.abc import Callable
from math import prod
from pathlib import Path

import jax
import numpy as np
import pytest
import yaml

from param_decomp_jax.targets.architecture import Architecture, is_shape
from param_decomp_jax.targets.gpt2 import GPT2Config
from param_decomp_jax.targets.llama import LlamaConfig
from param_decomp_jax.targets.llama_simple_mlp import LlamaSimpleMLPConfig
from param_decomp_jax.targets.registry import ARCHITECTURES, find_published
from param_decomp_jax.targets.resid_mlp import ResidMLPConfig
from param_decomp_jax.targets.tms import TMSConfig
from param_decomp_lab.data.tokenize import tokenize_files
from param_decomp_lab.ui.descriptions import shown_path
from param_decomp_lab.weights.target_folder import save_target
from tests.lab.tiny_run import Outcome, pd_here

FILES = Path(__file__).parent / "schema_files" / "experiments"
SEQ_LEN, ROWS = 512, 64


def gpt2(n_layers: int) -> GPT2Config:
    small = {"vocab_size": 256, "n_embd": 8, "n_head": 2, "n_layer": n_layers, "n_positions": SEQ_LEN}
    return GPT2Config.from_config(small)


def llama() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=256, d_model=8, n_layers=32, n_heads=2, n_kv_heads=1, head_dim=4, d_mlp=12, max_positions=SEQ_LEN
    )


def llama_simple_mlp(n_layers: int) -> LlamaSimpleMLPConfig:
    small = {"vocab_size": 256, "n_embd": 8, "n_head": 2, "n_key_value_heads": 1, "n_intermediate": 12}
    return LlamaSimpleMLPConfig.from_config({**small, "n_layer": n_layers, "block_size": SEQ_LEN, "n_ctx": SEQ_LEN})


TARGETS: dict[str, tuple[Callable[[], Architecture], int]] = {
    "tms_5-2": (lambda: TMSConfig(n_features=5, n_hidden=2), 2),
    "tms_5-2-id": (lambda: TMSConfig(n_features=5, n_hidden=2, n_hidden_layers=1), 3),
    "tms_40-10": (lambda: TMSConfig(n_features=40, n_hidden=10), 2),
    "tms_40-10-id": (lambda: TMSConfig(n_features=40, n_hidden=10, n_hidden_layers=1), 3),
    "resid_mlp1": (lambda: ResidMLPConfig(100, 200, 50, 1), 2),
    "resid_mlp2": (lambda: ResidMLPConfig(100, 200, 25, 2), 4),
    "resid_mlp3": (lambda: ResidMLPConfig(102, 200, 17, 3), 6),
    "resid_mlp2_global": (lambda: ResidMLPConfig(100, 200, 25, 2), 4),
    "gpt2": (lambda: gpt2(12), 24),
    "gpt2-xl": (lambda: gpt2(48), 21),
    "llama-3.1-8b": (llama, 3),
    "llama_simple_mlp-2l": (lambda: llama_simple_mlp(2), 12),
    "llama_simple_mlp-4l": (lambda: llama_simple_mlp(4), 24),
    "llama_simple_mlp-12l": (lambda: llama_simple_mlp(12), 72),
}
"""By file: what it decomposes, and how many sites its patterns choose there."""
LANGUAGE_MODELS = [name for name in TARGETS if name.startswith(("gpt2", "llama"))]


def test_every_file_is_tried() -> None:
    assert {path.stem for path in FILES.glob("*.yaml")} == set(TARGETS)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("data")
    (folder / "text.txt").write_text("All happy files are alike. " * (6 * ROWS * SEQ_LEN // 27))
    for n in range(8):
        (folder / f"text{n}.txt").write_text(f"File {n} is like all the others. " * (ROWS * SEQ_LEN // 32))
    tokenize_files(sorted(folder.glob("*.txt")), folder / "tokens", seq_len=SEQ_LEN, eval_fraction=0.3)
    return {"train": str(folder / "tokens" / "train"), "eval": str(folder / "tokens" / "eval")}


def check(folder: Path, name: str, **wrapper: object) -> Outcome:
    given = {"torch_config": str(FILES / f"{name}.yaml"), "run_name": "as-it-is", **wrapper}
    (folder / "wrapper.yaml").write_text(yaml.safe_dump(given))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "200")
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("HF_HUB_CACHE", str(folder / "cache"))
        return pd_here("check", folder / "wrapper.yaml")


@pytest.mark.parametrize("name", TARGETS)
def test_with_target_and_data_named(name: str, tmp_path: Path, data: dict[str, str]) -> None:
    make, n_sites = TARGETS[name]
    architecture = make()
    zeros = jax.tree.map(lambda s: np.zeros(s, np.float32), architecture.weight_shapes(), is_leaf=is_shape)
    save_target(tmp_path / "target", architecture, zeros)
    wrapper: dict[str, object] = {"target": {"folder": str(tmp_path / "target")}}
    outcome = check(tmp_path, name, **wrapper, **({"data": data} if name in LANGUAGE_MODELS else {}))
    assert outcome.status == 0, outcome
    assert f"Sites: {n_sites}" in outcome.out
    assert "not on this machine" not in outcome.out + outcome.err


@pytest.mark.parametrize("name", ["gpt2", "gpt2-xl", "llama-3.1-8b"])
def test_without_the_internet(name: str, tmp_path: Path) -> None:
    """Published sizes are known: everything is checked, and what a run would lack is said."""
    outcome = check(tmp_path, name, data={"train": "no/train", "eval": "no/eval"})
    assert outcome.status == 0, outcome
    assert f"Sites: {TARGETS[name][1]}" in outcome.out
    said = " ".join((outcome.out + outcome.err).split())
    model = "meta-llama/Llama-3.1-8B" if name.startswith("llama") else f"openai-community/{name}"
    assert f"not on this machine: the target's weights: {model} is not in" in said
    assert f"not on this machine: data: {shown_path(tmp_path / 'no' / 'train')}" in said


PARAMETERS = {
    "openai-community/gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "EleutherAI/pythia-70m": 70_426_624,
    "EleutherAI/pythia-160m": 162_322_944,
    "EleutherAI/pythia-410m": 405_334_016,
    "EleutherAI/pythia-1b": 1_011_781_632,
    "EleutherAI/pythia-1.4b": 1_414_647_808,
    "EleutherAI/pythia-2.8b": 2_775_208_960,
    "EleutherAI/pythia-6.9b": 6_857_302_016,
    "Qwen/Qwen2.5-0.5B": 494_032_768,
    "Qwen/Qwen2.5-1.5B": 1_543_714_304,
    "Qwen/Qwen2.5-7B": 7_615_616_512,
    "Qwen/Qwen3-0.6B": 596_049_920,
    "Qwen/Qwen3-1.7B": 1_720_574_976,
    "Qwen/Qwen3-4B": 4_022_468_096,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "Qwen/Qwen3-30B-A3B": 30_532_122_624,
    "mistralai/Mistral-7B-v0.1": 7_241_732_096,
    "google/gemma-2-2b": 2_614_341_888,
    "google/gemma-2-9b": 9_241_705_984,
    "allenai/OLMo-2-1124-7B": 7_298_617_344,
    "allenai/OLMoE-1B-7B-0924": 6_919_161_856,
    "wandb:goodfire/spd/t-9d2b8f02": 66_931_200,
}
"""As their authors count them, a tied head once."""


@pytest.mark.parametrize("hub_id", PARAMETERS)
def test_published_sizes(hub_id: str) -> None:
    architecture = find_published(hub_id)
    assert architecture is not None
    shapes = jax.tree.leaves(architecture.weight_shapes(), is_leaf=is_shape)
    assert sum(map(prod, shapes)) == PARAMETERS[hub_id]
    raw = architecture.to_config(architecture.published_dtype, None)
    assert ARCHITECTURES[architecture.name].from_config(raw) == architecture


def with_embedding(folder: Path, name: str, pattern: str, **changes: object) -> Path:
    """An experiment file with its model's embedding as one more site."""
    raw = yaml.safe_load((FILES / f"{name}.yaml").read_text())
    raw["pd"]["decomposition_targets"].append({"module_pattern": pattern, "C": 100})
    raw["pd"] |= changes
    (folder / "torch.yaml").write_text(yaml.safe_dump(raw))
    return folder / "torch.yaml"


@pytest.mark.parametrize(
    ("name", "pattern", "site", "shape"),
    [
        ("gpt2", "transformer.wte", "wte", "50257 × 768"),
        ("llama-3.1-8b", "model.embed_tokens", "embed_tokens", "128256 × 4096"),
        ("llama_simple_mlp-2l", "wte", "wte", "256 × 8"),
    ],
)
def test_the_embedding_is_a_site(name: str, pattern: str, site: str, shape: str, tmp_path: Path) -> None:
    """F7."""
    make, n_sites = TARGETS[name]
    wrapper: dict[str, object] = {"data": {"train": "no/train", "eval": "no/eval"}}
    if name.startswith("llama_simple"):
        (tmp_path / "config.json").write_text(json.dumps(make().to_config("float32", None)))
        wrapper["target"] = {"folder": str(tmp_path)}
    outcome = check(tmp_path, name, torch_config=str(with_embedding(tmp_path, name, pattern)), **wrapper)
    assert outcome.status == 0, outcome
    assert f"Sites: {n_sites + 1}" in outcome.out
    assert f"{site} {shape} 100" in " ".join(outcome.out.split())


def test_what_cannot_be_done_with_an_embedding(tmp_path: Path) -> None:
    data = {"train": "no/train", "eval": "no/eval"}
    scalar = {"mode": "layerwise", "fn_type": "mlp", "hidden_dims": [4]}
    file = with_embedding(tmp_path, "gpt2", "wte", ci_config=scalar)
    outcome = check(tmp_path, "gpt2", torch_config=str(file), data=data)
    assert outcome.status == 2
    assert "pd.ci_config.fn_type: mlp cannot read wte, whose rows are looked up" in " ".join(outcome.err.split())
    identity = [{"module_pattern": "*wte", "C": 10}]
    file = with_embedding(tmp_path, "gpt2", "wte", identity_decomposition_targets=identity)
    outcome = check(tmp_path, "gpt2", torch_config=str(file), data=data)
    assert outcome.status == 2
    assert "identity_decomposition_targets.0.module_pattern: '*wte' matches no module" in " ".join(outcome.err.split())
