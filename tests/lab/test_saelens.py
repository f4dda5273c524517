"""Reading SAELens folders: those that the library wrote, older ones, and what is refused, by the key's name."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from param_decomp_jax.analysis.hooks import Hook, activation
from param_decomp_jax.decomposition.sites import Sites
from param_decomp_jax.targets.gpt2 import GPT2Config
from param_decomp_jax.targets.olmo2 import Olmo2Config
from param_decomp_lab.baselines.replacements import names_of
from param_decomp_lab.baselines.saelens import DictionaryFolder, read_dictionary
from param_decomp_lab.errors import UserError
from param_decomp_lab.weights.target_folder import load_target
from tests.cases import slow_but
from tests.lab.sae_folders import identity, save
from tests.lab.tiny_run import ARCHITECTURE

GOLDEN = Path(__file__).parent.parent / "golden" / "saelens"
NAMES = sorted(folder.name for folder in GOLDEN.iterdir() if folder.is_dir())
TARGET = ARCHITECTURE.target(Sites(()))
SIZES = {"vocab_size": 11, "d_model": 16, "n_layers": 2, "n_heads": 2, "n_kv_heads": 2, "head_dim": 8, "d_mlp": 24}
GPT2 = GPT2Config(**SIZES, norm="layer", rope_theta=None, learned_positions=8).target(Sites(()))
RESID_POST = "blocks.0.hook_resid_post"
Change = Callable[[dict[str, Any]], Any]


@pytest.mark.parametrize("name", NAMES)
def test_what_the_library_wrote(name: str) -> None:
    """Latents and outputs that SAELens 6.54.12 computed (tests/golden/make_saelens_fixtures.py)."""
    folder, expected = read_dictionary(GOLDEN / name), np.load(GOLDEN / "expected.npz")
    dictionary = folder.fitted(TARGET)
    tensors = {key: jnp.asarray(x) for key, x in folder.tensors.items()}
    x = jnp.asarray(expected["x"])
    f = dictionary.latents(tensors, x)
    assert 0 < float((f > 0).mean()) < 1
    np.testing.assert_allclose(f, expected[f"{name}.latents"], rtol=0, atol=1e-5)
    np.testing.assert_allclose(dictionary.output(tensors, x, f), expected[f"{name}.output"], rtol=0, atol=1e-5)
    metadata = json.loads((GOLDEN / name / "cfg.json").read_text())["metadata"]
    assert str(dictionary.reads) == metadata["hook_name"]
    assert str(dictionary.writes) == metadata.get("hook_name_out", metadata["hook_name"])
    assert folder.model == "tiny-llama"


def test_every_architecture_is_among_them() -> None:
    found = {json.loads((GOLDEN / name / "cfg.json").read_text())["architecture"] for name in NAMES}
    assert {"standard", "jumprelu", "topk", "gated", "transcoder", "jumprelu_skip_transcoder"} <= found


MODELS = ("gpt2", "gemma2", "gpt_neox", "olmo2", "qwen3_moe")


@pytest.mark.parametrize("name", slow_but(("gemma2", "gpt_neox"), MODELS))
def test_hooks_are_where_transformer_lens_has_them(name: str) -> None:
    """Activations that TransformerLens 3.9.0 found at them (tests/golden/make_hook_fixtures.py)."""
    expected = {
        key.removeprefix(f"{name}."): x
        for key, x in np.load(GOLDEN.parent / "hooks.npz").items()
        if key.startswith(f"{name}.")
    }
    architecture, weights = load_target(GOLDEN.parent / "families" / name)
    target = architecture.target(Sites(()))
    tokens = jnp.asarray(np.load(GOLDEN.parent / "families" / name / "expected.npz")["tokens"][:1, :6])
    has = {f"blocks.1.{hook}" for hook in target.hooks}
    assert has == expected.keys() - ({"blocks.1.ln2.hook_normalized"} if name == "olmo2" else set())
    for key in has:
        found = activation(target, weights, tokens, Hook(1, key.removeprefix("blocks.1.")))
        np.testing.assert_allclose(found, expected[key], rtol=0, atol=1e-4 * np.abs(expected[key]).max(), err_msg=key)


def copied(name: str, folder: Path, change: Change = lambda config: None, **tensors: np.ndarray | None) -> Path:
    """A golden folder with another `cfg.json` and other tensors; None takes one away."""
    shutil.copytree(GOLDEN / name, folder)
    config = json.loads((folder / "cfg.json").read_text())
    change(config)
    (folder / "cfg.json").write_text(json.dumps(config))
    if tensors:
        stored = load_file(folder / "sae_weights.safetensors") | tensors
        save_file({k: x for k, x in stored.items() if x is not None}, folder / "sae_weights.safetensors")
    return folder


def same(a: DictionaryFolder, b: DictionaryFolder) -> bool:
    return a.fitted(TARGET) == b.fitted(TARGET) and all(
        np.array_equal(x, b.tensors[name]) for name, x in a.tensors.items()
    )


def test_older_forms(tmp_path: Path) -> None:
    """Before version 6: everything at the top, other names, a factor of one for every latent."""

    def at_the_top(config: dict[str, Any]) -> None:
        config |= {"hook_point": config.pop("metadata")["hook_name"], "hook_point_layer": 1, "model_name": "tiny-llama"}
        config |= {"hook_point_head_index": None, "normalize_activations": False, "finetuning_scaling_factor": False}

    def older_topk(config: dict[str, Any]) -> None:
        at_the_top(config)
        config |= {"activation_fn_str": "topk", "activation_fn_kwargs": {"k": config.pop("k")}}
        del config["architecture"]

    def older_standard(config: dict[str, Any]) -> None:
        at_the_top(config)
        config |= {"activation_fn_str": "relu", "activation_fn_kwargs": {}, "seqpos_slice": [None]}
        del config["architecture"], config["apply_b_dec_to_input"], config["reshape_activations"]

    for name, change in (("topk", older_topk), ("standard", older_standard), ("gated", at_the_top)):
        older = copied(name, tmp_path / name, change, scaling_factor=np.ones(12, np.float32))
        assert same(read_dictionary(older), read_dictionary(GOLDEN / name)), name


def test_bfloat16(tmp_path: Path) -> None:
    W = load_file(GOLDEN / "gated" / "sae_weights.safetensors")["W_enc"].astype(ml_dtypes.bfloat16)
    found = read_dictionary(copied("gated", tmp_path / "half", W_enc=W)).tensors["W_enc"]
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, W.astype(np.float32))


def setting(key: str, value: Any) -> Change:
    def change(config: dict[str, Any]) -> None:
        *path, last = key.split(".")
        for part in path:
            config = config[part]
        config[last] = value

    return change


def without(key: str) -> Change:
    def change(config: dict[str, Any]) -> None:
        *path, last = key.split(".")
        for part in path:
            config = config[part]
        del config[last]

    return change


KEYS: dict[str, tuple[str, Change, tuple[str, ...]]] = {
    "architecture": ("standard", setting("architecture", "matching_pursuit"), ("architecture", "'standard'")),
    "architecture of another type": ("standard", setting("architecture", ["standard"]), ("architecture",)),
    "no width": ("standard", without("d_in"), ("d_in",)),
    "width in words": ("standard", setting("d_in", "16"), ("d_in",)),
    "width below 1": ("standard", setting("d_sae", 0), ("d_sae",)),
    "huge width": ("standard", setting("d_sae", 1 << 40), ("d_sae",)),
    "no k": ("topk", without("k"), ("k: ", "1 to d_sae, 12")),
    "k above the latents": ("topk", setting("k", 13), ("k: ", "not 13")),
    "factor outside": (
        "standard", setting("normalize_activations", "expected_average_only_in"),
        ("normalize_activations", "fold_activation_norm_scaling_factor"),
    ),
    "older factor outside": ("standard", setting("normalize_activations", True), ("normalize_activations",)),
    "whitening": (
        "gated", setting("normalize_activations", "covariance_whitening"), ("normalize_activations", "fold_activation"),
    ),
    "normalisation": ("gated", setting("normalize_activations", "unit"), ("normalize_activations",)),
    "heads": ("standard", setting("reshape_activations", "hook_z"), ("reshape_activations",)),
    "one head": ("standard", setting("metadata.hook_head_index", 3), ("metadata.hook_head_index",)),
    "some positions": ("standard", setting("metadata.seqpos_slice", [1, None]), ("metadata.seqpos_slice",)),
    "activation": ("standard", setting("activation_fn", "tanh-relu"), ("activation_fn",)),
    "metadata": ("standard", setting("metadata", 3), ("metadata", "an object")),
    "no hook": ("standard", without("metadata.hook_name"), ("metadata.hook_name",)),
    "hook of another type": ("standard", setting("metadata.hook_name", 3), ("metadata.hook_name",)),
    "hook of an attention head": (
        "standard", setting("metadata.hook_name", "blocks.0.attn.hook_z"),
        ("metadata.hook_name", "blocks.0.attn.hook_z", "blocks.N.hook_resid_post"),
    ),
    "hook of torch": ("standard", setting("metadata.hook_name", "model.layers.0"), ("metadata.hook_name",)),
    "escapes": ("standard", setting("metadata.hook_name", "\x1b[31m"), ("metadata.hook_name", "\\x1b")),
    "layer": (
        "standard", setting("metadata.hook_name", "blocks.2.hook_resid_post"), ("metadata.hook_name", "layers 0 to 1"),
    ),
    "no layer below 0": ("standard", setting("metadata.hook_name", "blocks.-1.hook_resid_post"), ("hook_name",)),
    "output of an SAE": (
        "standard", setting("metadata.hook_name_out", "blocks.1.hook_mlp_out"), ("metadata.hook_name_out", "SAE"),
    ),
    "no output": ("transcoder", without("metadata.hook_name_out"), ("metadata.hook_name_out", "transcoder")),
    "no output width": ("transcoder", without("d_out"), ("d_out", "transcoder")),
    "bias of a transcoder": ("transcoder", setting("apply_b_dec_to_input", True), ("apply_b_dec_to_input",)),
    "output in another layer": (
        "transcoder", setting("metadata.hook_name_out", "blocks.0.hook_mlp_out"),
        ("metadata.hook_name_out", "another layer"),
    ),
    "output elsewhere": (
        "transcoder", setting("metadata.hook_name_out", "blocks.1.hook_resid_post"), ("metadata.hook_name_out",),
    ),
    "preparation of the model": (
        "standard", setting("metadata.model_from_pretrained_kwargs", {"revision": "step100"}),
        ("metadata.model_from_pretrained_kwargs.revision",),
    ),
    "preparation in words": (
        "standard", setting("metadata.model_from_pretrained_kwargs", {"fold_ln": "yes"}),
        ("metadata.model_from_pretrained_kwargs.fold_ln", "true or false"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("mistake", KEYS)
def test_keys_that_are_refused(mistake: str, tmp_path: Path) -> None:
    name, change, says = KEYS[mistake]
    folder = copied(name, tmp_path / "sae", change)
    with pytest.raises(UserError) as error:
        read_dictionary(folder).fitted(TARGET)
    assert str(folder / "cfg.json") in str(error.value)
    for text in says:
        assert text in str(error.value)


HALF = np.zeros((16, 6), np.float32)
TENSORS: dict[str, tuple[dict[str, np.ndarray | None], str]] = {
    "missing": ({"b_gate": None}, "no tensor b_gate"),
    "shape": ({"W_enc": HALF}, "W_enc has shape [16, 6], cfg.json implies [16, 12]"),
    "integers": ({"b_mag": np.zeros(12, np.int64)}, "b_mag is stored as I64"),
    "NaN": ({"b_dec": np.full(16, np.nan, np.float32)}, "b_dec has entries that are not finite"),
    "more than there should be": ({"W_skip": np.zeros((16, 16), np.float32)}, "holds W_skip"),
    "factors": ({"scaling_factor": np.full(12, 2, np.float32)}, "scaling_factor"),
}


@pytest.mark.parametrize("mistake", TENSORS)
def test_tensors_that_are_refused(mistake: str, tmp_path: Path) -> None:
    tensors, says = TENSORS[mistake]
    with pytest.raises(UserError, match=r"sae_weights\.safetensors") as error:
        read_dictionary(copied("gated", tmp_path / "sae", **tensors))
    assert says in str(error.value)


def test_damaged_files(tmp_path: Path) -> None:
    def refused(says: str) -> None:
        with pytest.raises(UserError) as error:
            read_dictionary(tmp_path / "sae")
        assert says in str(error.value)
        assert len(str(error.value)) < 2000

    refused("no such folder")
    folder = copied("gated", tmp_path / "sae")
    weights, config = folder / "sae_weights.safetensors", folder / "cfg.json"
    whole = weights.read_bytes()
    for size in (0, 4, 100, len(whole) - 4):
        weights.write_bytes(whole[:size])
        refused("not a whole safetensors file")
    weights.write_bytes((1 << 62).to_bytes(8, "little") + whole[8:])
    refused("not a whole safetensors file")
    weights.unlink()
    refused("sae_weights.safetensors: no such file")
    os.mkfifo(weights)
    refused("sae_weights.safetensors: no such file, or not a regular one")
    hostile = {
        "{": "not valid JSON", "[]": "should be an object", "[" * 100_000: "nested more than",
        '{"d_in": 1' + "0" * 10_000 + "}": "too large", '{"d_in": NaN}': "not finite", '{"d_in": 1e999}': "not finite",
        '{"architecture": "\\ud800"}': "surrogate", "{}": "metadata.hook_name",
        json.dumps({"metadata": {"hook_name": "x" * 500_000}}): "d_in",
    }  # fmt: skip
    for text, says in hostile.items():
        config.write_text(text)
        refused(says)
    config.write_bytes(b"\xff\xfe")
    refused("not UTF-8")
    config.write_text(" " * (1 << 21))
    refused("larger than")
    config.unlink()
    refused("cfg.json")


def test_width_of_another_target(tmp_path: Path) -> None:
    folder = save(tmp_path / "narrow", *identity(RESID_POST, d=8))
    with pytest.raises(UserError, match=r"cfg.json: d_in: is 8, but the run's target has width 16"):
        read_dictionary(folder).fitted(TARGET)
    shape = {"W_dec": np.zeros((12, 8), np.float32), "b_dec": np.zeros(8, np.float32)}
    of_mlp = copied("transcoder", tmp_path / "thin", setting("d_out", 8), **shape)
    with pytest.raises(UserError, match=r"cfg.json: d_out: is 8, but"):
        read_dictionary(of_mlp).fitted(TARGET)


def test_a_model_that_was_centred(tmp_path: Path) -> None:
    """`center_writing_weights` has an effect on models with LayerNorm, where something reads the residual stream."""
    centred = setting("metadata.model_from_pretrained_kwargs", {"center_writing_weights": True, "fold_ln": True})
    for name, target, expected in (("standard", GPT2, True), ("standard", TARGET, False), ("transcoder", GPT2, False)):
        folder = tmp_path / f"{name}{expected}"
        found = read_dictionary(copied(name, folder, centred)) if not folder.exists() else read_dictionary(folder)
        assert found.fitted(target).centered is expected
    plain = copied("standard", tmp_path / "plain", setting("metadata.model_from_pretrained_kwargs", None))
    assert not read_dictionary(plain).fitted(GPT2).centered


def test_hooks_of_a_family(tmp_path: Path) -> None:
    """A parallel layer has no residual stream between attention and MLP; norms may come after the MLP alone."""
    middle = read_dictionary(save(tmp_path / "middle", *identity("blocks.0.hook_resid_mid")))
    assert middle.fitted(TARGET).reads == Hook(0, "hook_resid_mid")
    parallel = GPT2Config(**SIZES, parallel=True).target(Sites(()))
    with pytest.raises(UserError, match=r"metadata.hook_name: 'blocks.0.hook_resid_mid'"):
        middle.fitted(parallel)
    after = Olmo2Config(**SIZES, norms="after").target(Sites(()))
    assert middle.fitted(after).reads == Hook(0, "hook_resid_mid")
    with pytest.raises(UserError, match="hook_normalized"):
        read_dictionary(GOLDEN / "jumprelu_skip_transcoder").fitted(after)


def test_names() -> None:
    folders = [read_dictionary(GOLDEN / name) for name in ("gated", "transcoder", "gated", "gated")]
    assert names_of(folders) == ["SAE gated", "transcoder transcoder", "SAE gated (2)", "SAE gated (3)"]
