"""Checkpoints of torch as folders that can be decomposed.

What turns names and layouts into ours is tested with arrays, and reading with files that torch wrote
(`tests/golden/families`); the rest where torch is installed.
"""

import dataclasses
import json
import pickle
import re
import shutil
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from rich.console import Console
from safetensors.numpy import load_file

from param_decomp_jax.decomposition.sites import Sites
from param_decomp_jax.sharding.memory import PLAIN
from param_decomp_jax.targets.architecture import Architecture
from param_decomp_jax.targets.plain_linears import UNTOUCHED
from param_decomp_jax.targets.registry import read_config
from param_decomp_jax.targets.resid_mlp import ResidMLPConfig
from param_decomp_jax.targets.tms import TMSConfig
from param_decomp_lab.errors import UserError
from param_decomp_lab.weights import torch_checkpoint
from param_decomp_lab.weights.import_torch import checked_tensors, import_torch, refuse_missing
from param_decomp_lab.weights.safetensors_files import save_tensors
from param_decomp_lab.weights.target_folder import load_target, read_architecture, save_target
from param_decomp_lab.weights.torch_checkpoint import read_checkpoint
from param_decomp_lab.weights.torch_files import newest_checkpoint, settings_files
from param_decomp_lab.weights.torch_models import TorchSettings, convert, find_settings, strip_wrappers
from tests.core.tiny import weights
from tests.lab.tiny_run import ARCHITECTURE, pd_here

QUIET = Console(quiet=True)
GOLDEN = Path(__file__).parent.parent / "golden" / "families"
RNG = np.random.default_rng(0)
TMS = {"n_features": 5, "n_hidden": 2, "n_hidden_layers": 1, "tied_weights": True, "init_bias_to_zero": False}
RESID = {"n_features": 6, "d_embed": 8, "d_mlp": 3, "n_layers": 2, "act_fn_name": "relu", "in_bias": True,
         "out_bias": True}  # fmt: skip
SIMPLE = {
    "model_type": "LlamaSimpleMLP", "block_size": 32, "vocab_size": 48, "n_layer": 2, "n_head": 4, "n_embd": 16,
    "n_intermediate": 28, "mlp_bias": False, "attn_bias": False, "rotary_adjacent_pairs": True, "rotary_dim": 4,
    "rotary_base": 10000, "n_ctx": 32, "n_key_value_heads": 2, "use_grouped_query_attention": True,
    "flash_attention": True,
}  # fmt: skip
GPT2 = {"block_size": 24, "vocab_size": 48, "n_layer": 2, "n_head": 4, "n_embd": 16, "flash_attention": False}


def normal(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype(np.float32)


def tms_state() -> dict[str, np.ndarray]:
    first = normal(2, 5)
    return {"linear1.weight": first, "linear2.weight": first.T, "linear2.bias": normal(5),
            "hidden_layers.0.weight": normal(2, 2)}  # fmt: skip


def resid_state() -> dict[str, np.ndarray]:
    embed = normal(6, 8)
    layers = {f"layers.{n}.{name}": array for n in range(2) for name, array in {
        "mlp_in.weight": normal(3, 8), "mlp_in.bias": normal(3), "mlp_out.weight": normal(8, 3),
        "mlp_out.bias": normal(8)}.items()}  # fmt: skip
    return {"W_E": embed, "W_U": embed.T, **layers}


def simple_state() -> dict[str, np.ndarray]:
    state = {"wte.weight": normal(48, 16), "ln_f.weight": normal(16)}
    for n in range(2):
        layer = {
            "rms_1": (16,), "rms_2": (16,), "attn.q_proj": (16, 16), "attn.k_proj": (8, 16), "attn.v_proj": (8, 16),
            "attn.o_proj": (16, 16), "mlp.c_fc": (28, 16), "mlp.down_proj": (16, 28),
        }  # fmt: skip
        state |= {f"h.{n}.{name}.weight": normal(*shape) for name, shape in layer.items()}
        state |= {f"h.{n}.attn.{name}": normal(32, 4) for name in ("rotary_sin", "rotary_cos")}
        state[f"h.{n}.attn.bias"] = np.ones((1, 1, 32, 32), bool)
    return state | {"lm_head.weight": state["wte.weight"]}


def gpt2_state() -> dict[str, np.ndarray]:
    state = {"wte.weight": normal(48, 16), "wpe.weight": normal(24, 16)}
    norms = [*(f"h.{n}.{name}" for n in range(2) for name in ("ln_1", "ln_2")), "ln_f"]
    state |= {f"{name}.{part}": normal(16) for name in norms for part in ("weight", "bias")}
    for n in range(2):
        for name, shape in {"attn.c_attn": (48, 16), "attn.c_proj": (16, 16), "mlp.c_fc": (64, 16),
                            "mlp.c_proj": (16, 64)}.items():  # fmt: skip
            state |= {f"h.{n}.{name}.weight": normal(*shape), f"h.{n}.{name}.bias": normal(shape[0])}
    return state | {"lm_head.weight": state["wte.weight"]}


def settings(raw: Mapping[str, Any]) -> TorchSettings:
    found = find_settings(raw, "s.yaml")
    assert found is not None
    return found


def load(folder: Path, raw: Mapping[str, Any], state: Mapping[str, np.ndarray]) -> Any:
    """What a run reads of the folder made of a state dict."""
    config, tensors = convert(settings(raw), state)
    architecture = read_config(config)
    refuse_missing(architecture, checked_tensors(architecture, tensors, "c.pt"), "c.pt")
    save_tensors(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return load_target(folder)


def outputs(architecture: Architecture, loaded: Any, x: np.ndarray) -> np.ndarray:
    target: Any = architecture.target(Sites(()), PLAIN, jnp.float32)
    return np.asarray(target.forward(loaded, jnp.asarray(x), UNTOUCHED).output)


# ---- names and layouts ----


def test_tms(tmp_path: Path) -> None:
    """Against x W₁ᵀ H₁ᵀ W₂ᵀ + b, as nn.Linear computes it."""
    state, x = tms_state(), normal(4, 5)
    architecture, loaded = load(tmp_path, {"tms_model_config": TMS, "steps": 1}, state)
    assert architecture == TMSConfig(5, 2, 1)
    hidden = x @ state["linear1.weight"].T @ state["hidden_layers.0.weight"].T
    expected = np.maximum(hidden @ state["linear2.weight"].T + state["linear2.bias"], 0)
    assert np.allclose(outputs(architecture, loaded, x), expected, atol=1e-5)
    del state["linear2.weight"]  # where only one of two tied matrices is stored
    assert np.allclose(outputs(architecture, load(tmp_path, TMS, state)[1], x), expected, atol=1e-5)


def test_resid_mlp(tmp_path: Path) -> None:
    state, x = resid_state(), normal(4, 6)
    architecture, loaded = load(tmp_path, {"resid_mlp_model_config": RESID}, state)
    assert architecture == ResidMLPConfig(6, 8, 3, 2, "relu", True, True)
    stream = x @ state["W_E"]
    for n in range(2):
        of = {name.removeprefix(f"layers.{n}."): array for name, array in state.items()}
        hidden = np.maximum(stream @ of["mlp_in.weight"].T + of["mlp_in.bias"], 0)
        stream = stream + hidden @ of["mlp_out.weight"].T + of["mlp_out.bias"]
    assert np.allclose(outputs(architecture, loaded, x), stream @ state["W_U"], atol=1e-4)
    with pytest.raises(UserError, match=r"s\.yaml: W_U is not the transpose of W_E"):
        convert(settings(RESID), {**state, "W_U": normal(8, 6)})


def test_llama_simple_mlp() -> None:
    state = simple_state()
    config, tensors = convert(settings({"model": SIMPLE, "steps": 5}), state)
    assert config["model_type"] == "llama_simple_mlp"
    assert config["rotary_adjacent_pairs"]
    assert "flash_attention" not in config
    assert tensors.keys() == {
        name for name in state if not name.endswith(("rotary_sin", "rotary_cos", "attn.bias"))
    } - {"lm_head.weight"}
    assert all(np.array_equal(tensors[name], state[name]) for name in tensors)
    with pytest.raises(UserError, match=r"lm_head\.weight is not wte\.weight"):
        convert(settings(SIMPLE), {**state, "lm_head.weight": normal(48, 16)})


def test_gpt2() -> None:
    """As Hugging Face keeps it: matrices [d_in, d_out]."""
    state = gpt2_state()
    config, tensors = convert(settings(GPT2), state)
    assert config["tie_word_embeddings"]
    assert config["n_positions"] == 24
    assert "lm_head.weight" not in tensors
    assert tensors["transformer.h.1.attn.c_attn.weight"].shape == (16, 48)
    assert np.array_equal(tensors["transformer.h.1.mlp.c_proj.weight"], state["h.1.mlp.c_proj.weight"].T)
    assert np.array_equal(tensors["transformer.wpe.weight"], state["wpe.weight"])
    own = normal(48, 16)
    config, tensors = convert(settings(GPT2), {**state, "lm_head.weight": own})
    assert not config["tie_word_embeddings"]
    assert np.array_equal(tensors["lm_head.weight"], own)


def gpt2_logits(w: Mapping[str, np.ndarray], tokens: np.ndarray, n_heads: int = 4) -> np.ndarray:
    """Of the class GPT2, with `nn.Linear`, GELU by tanh and a tied head; tokens [T]."""

    def norm(name: str, x: np.ndarray) -> np.ndarray:
        scaled = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
        return scaled * w[f"{name}.weight"] + w[f"{name}.bias"]

    def linear(name: str, x: np.ndarray) -> np.ndarray:
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    x = w["wte.weight"][tokens] + w["wpe.weight"][: len(tokens)]
    later = np.triu(np.ones((len(tokens), len(tokens)), bool), 1)
    for n in range(2):
        qkv = linear(f"h.{n}.attn.c_attn", norm(f"h.{n}.ln_1", x)).reshape(len(tokens), 3, n_heads, -1)
        q, k, v = qkv.transpose(1, 2, 0, 3)
        scores = np.exp(np.where(later, -np.inf, q @ k.swapaxes(1, 2) / np.sqrt(q.shape[-1])))
        read = scores / scores.sum(-1, keepdims=True) @ v
        x = x + linear(f"h.{n}.attn.c_proj", read.swapaxes(0, 1).reshape(len(tokens), -1))
        h = linear(f"h.{n}.mlp.c_fc", norm(f"h.{n}.ln_2", x))
        gelu = h * (1 + np.tanh(np.sqrt(2 / np.pi) * (h + 0.044715 * h**3))) / 2
        x = x + linear(f"h.{n}.mlp.c_proj", gelu)
    return norm("ln_f", x) @ w["wte.weight"].T


def logits(architecture: Architecture, loaded: Any, tokens: np.ndarray) -> np.ndarray:
    target: Any = architecture.target(Sites(()), PLAIN, jnp.float32)
    with jax.default_matmul_precision("highest"):
        return np.asarray(target.logits(loaded, target.forward(loaded, jnp.asarray(tokens), UNTOUCHED).output))


def close(ours: np.ndarray, theirs: np.ndarray) -> None:
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4 * np.abs(theirs).max())


def test_gpt2_computes_what_the_class_does(tmp_path: Path) -> None:
    state, tokens = {name: 0.3 * array for name, array in gpt2_state().items()}, np.arange(20) * 7 % 48
    architecture, loaded = load(tmp_path, GPT2, state)
    close(logits(architecture, loaded, tokens[None])[0], gpt2_logits(state, tokens))


def test_llama_simple_mlp_computes_what_the_class_does(tmp_path: Path) -> None:
    """The golden model as a checkpoint in safetensors, with the YAML that its training leaves."""
    folder = tmp_path / "left"
    model = yaml.safe_load((GOLDEN / "llama_simple_mlp_torch" / "model_config.yaml").read_text())
    put(folder, "final_config.yaml", {"model": model, "steps": 3})
    shutil.copyfile(GOLDEN / "llama_simple_mlp_adjacent" / "model.safetensors", folder / "step_3.safetensors")
    import_torch(folder, tmp_path / "out", QUIET)
    expected = np.load(GOLDEN / "llama_simple_mlp_adjacent" / "expected.npz")
    close(logits(*load_target(tmp_path / "out"), expected["tokens"]), expected["logits"])


@pytest.mark.parametrize("name", ["llama_simple_mlp_torch", "torch_gpt2"])
@pytest.mark.usefixtures("no_torch")
def test_golden_checkpoints(tmp_path: Path, name: str) -> None:
    """Written by torch, from definitions that somebody wrote who had not read this code."""
    import_torch(GOLDEN / name, tmp_path / "out", QUIET)
    expected = np.load(GOLDEN / name / "expected.npz")
    close(logits(*load_target(tmp_path / "out"), expected["tokens"]), expected["logits"])


def test_wrappers_of_a_model() -> None:
    state = {"a": normal(1), "h.0.module.b": normal(1)}
    assert strip_wrappers({f"_orig_mod.module.{name}": array for name, array in state.items()}).keys() == state.keys()
    assert strip_wrappers({f"module._orig_mod.{name}": array for name, array in state.items()}).keys() == state.keys()
    assert strip_wrappers({"h._orig_mod.x": state["a"], "module.y": state["a"]}).keys() == {"h.x", "module.y"}


def test_settings() -> None:
    as_wandb_has_them = {"model": {"value": SIMPLE}, "lr": {"value": 1}}
    assert settings(as_wandb_has_them).kind == "llama_simple_mlp"
    assert settings({**GPT2, "model_type": "GPT2"}).kind == "gpt2"
    assert find_settings({"lr": 1, "model": {"n_embd": 3}}, "s") is None
    with pytest.raises(UserError, match=r"model_type: is 'LlamaSimple'; of the PyTorch project's models TMS, ResidMLP"):
        find_settings({**SIMPLE, "model_type": "LlamaSimple"}, "s")


def test_what_does_not_fit() -> None:
    architecture = TMSConfig(5, 2, 1)
    _, tensors = convert(settings(TMS), tms_state())

    def refused(state: Mapping[str, np.ndarray]) -> str:
        with pytest.raises(UserError) as error:
            refuse_missing(architecture, checked_tensors(architecture, state, "c.pt"), "c.pt")
        return str(error.value)

    assert refused({**tensors, "x": normal(1)}).startswith("c.pt: x has no place in the TMS of its settings")
    assert "linear1 has shape [2, 5], the settings imply [5, 2]" in refused({**tensors, "linear1": normal(2, 5)})
    assert "bias holds int64; weights must be floating" in refused({**tensors, "bias": np.zeros(5, int)})
    assert "has no bias (1 such)" in refused({name: array for name, array in tensors.items() if name != "bias"})


def test_tensors_of_every_family() -> None:
    """Golden models hold what is needed, with these shapes, and some tensors that nothing reads."""
    folders = [path.parent for path in sorted(GOLDEN.glob("*/model.safetensors"))]
    assert len(folders) > 15
    for folder in folders:
        architecture, arrays = read_architecture(folder), load_file(folder / "model.safetensors")
        found = checked_tensors(architecture, arrays, folder.name)
        refuse_missing(architecture, found, folder.name)
        left_out = max(found)
        with pytest.raises(UserError, match=f"has no .*{re.escape(left_out.removeprefix(architecture.prefix))}"):
            refuse_missing(architecture, found.keys() - {left_out}, folder.name)


def test_the_newest_checkpoint() -> None:
    names = ["model_step_900.pt", "model_step_1000.pt", "optimizer_step_2000.pt", "config.yaml", "final_config.yaml"]
    assert newest_checkpoint(names, "w") == "model_step_1000.pt"
    assert newest_checkpoint([*names, "checkpoints/model_step_1001.pt"], "w") == "checkpoints/model_step_1001.pt"
    assert newest_checkpoint([*names, "a/b/model_step_2000.pt"], "w") == "model_step_1000.pt"
    assert newest_checkpoint([*names, "model_final.pth"], "w") == "model_final.pth"
    assert newest_checkpoint(["model.pt", "model.safetensors"], "w") == "model.safetensors"
    assert newest_checkpoint(["tms.pth", "tms_train_config.yaml"], "w") == "tms.pth"
    assert settings_files([*names, "a/model_config.yaml", "model_config.yaml"]) == [
        "model_config.yaml", "final_config.yaml", "config.yaml"
    ]  # fmt: skip
    with pytest.raises(UserError, match=r"w: has no checkpoint \(\.pt, \.pth, \.safetensors\)"):
        newest_checkpoint(["config.yaml"], "w")
    with pytest.raises(UserError, match=r"several checkpoints.*\(a\.pt, b\.pt\); name one of them"):
        newest_checkpoint(["a.pt", "b.pt"], "w")


# ---- without torch ----


@pytest.fixture
def no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)


def put(folder: Path, name: str, raw: Mapping[str, Any]) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(yaml.safe_dump(dict(raw)))


@pytest.mark.usefixtures("no_torch")
def test_without_torch(tmp_path: Path) -> None:
    put(tmp_path / "tms", "tms_train_config.yaml", {"tms_model_config": TMS})
    (tmp_path / "tms" / "tms.pth").write_bytes(pickle.dumps(1, protocol=2))  # the format before torch 1.6
    made = pd_here("weights", "import-torch", tmp_path / "tms", "--out", tmp_path / "out")
    assert (made.status, made.err.count("\n")) == (2, 1)
    assert "tms.pth: reading it needs torch, which is not installed here: pip install 'torch>=2.4'" in made.err
    assert not (tmp_path / "out").exists()
    # A checkpoint in safetensors needs no torch.
    state = {name: np.ascontiguousarray(array) for name, array in tms_state().items()}
    (tmp_path / "tms" / "tms.pth").unlink()
    save_tensors(state, tmp_path / "tms" / "tms.safetensors")
    made = pd_here("weights", "import-torch", tmp_path / "tms", "--out", tmp_path / "out")
    assert made.status == 0, made
    assert "out: TMS, 5 features in 2, 1 hidden layer" in made.out
    assert load_target(tmp_path / "out")[0] == TMSConfig(5, 2, 1)
    cast = (tmp_path / "tms", "--out", tmp_path / "cast", "--dtype", "bfloat16")
    assert pd_here("weights", "import-torch", *cast).status == 0
    assert load_target(tmp_path / "cast")[1]["bias"].dtype == jnp.bfloat16


def test_nothing_else_imports_torch() -> None:
    root = Path(torch_checkpoint.__file__).parents[2]
    packages = ("param_decomp_jax", "param_decomp_aot", "param_decomp_lab")
    paths = [path for package in packages for path in (root / package).rglob("*.py")]
    sources = {path.name: path.read_text() for path in paths}
    with_torch = [name for name, text in sources.items() if "import torch\n" in text or "pickle.load" in text]
    assert with_torch == ["torch_checkpoint.py"]


class Evil:
    """Runs a command where it is unpickled."""

    def __reduce__(self) -> Any:
        return (print, ("this must not be printed",))


def zipped(path: Path, data: bytes, **files: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in {"data.pkl": data, **files}.items():
            archive.writestr(f"c/{name.replace('data_', 'data/')}", content)
    return path


@pytest.mark.usefixtures("no_torch")
def test_damaged_and_hostile_pickles(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """`{"a": a tensor of shape (size,) with this stride}`, written by hand, and what can be wrong with it."""

    def tensor(size: int = 2, stride: int = 1, key: bytes = b"0", kind: bytes = b"FloatStorage") -> bytes:
        storage = b"(X\x07\0\0\0storagectorch\n" + kind + b"\nX\x01\0\0\0" + key + b"X\x03\0\0\0cpuK\x02tQ"
        sizes = (b"J" + n.to_bytes(4, "little", signed=True) + b"\x85" for n in (size, stride))
        arguments = b"(" + storage + b"K\0" + b"".join(sizes) + b"\x89Nt"
        return b"\x80\x02}X\x01\0\0\0actorch._utils\n_rebuild_tensor_v2\n" + arguments + b"Rs."

    def refused(data: bytes, **files: bytes) -> str:
        with pytest.raises(UserError) as error:
            read_checkpoint(zipped(tmp_path / "c.pt", data, **files))
        return str(error.value)

    numbers = np.arange(2, dtype=np.float32).tobytes()
    assert read_checkpoint(zipped(tmp_path / "c.pt", tensor(), data_0=numbers))["a"].tolist() == [0, 1]
    assert "holds more than plain values and dense tensors of the usual types (__builtin__.print)" in refused(
        pickle.dumps({"a": Evil()}, protocol=2)
    )
    assert "must not be printed" not in "".join(capfd.readouterr())
    assert "(torch.QInt8Storage)" in refused(tensor(kind=b"QInt8Storage"), data_0=numbers)
    assert "has no state dict" in refused(pickle.dumps({"a": 1}, protocol=2))
    for data in (tensor(3), tensor(2, 2), tensor(-1), tensor(2, -1), tensor(key=b"1"), tensor()[:-9], b""):
        assert "c.pt: cannot be read as a checkpoint of torch" in refused(data, data_0=numbers)
    assert "needs 2 numbers, and 1 are there" in refused(tensor(), data_0=numbers[:4])
    damaged = zipped(tmp_path / "c.pt", tensor(), data_0=numbers)
    damaged.write_bytes(damaged.read_bytes().replace(numbers, numbers[::-1]))
    with pytest.raises(UserError, match="c/data/0 is not what was written"):
        read_checkpoint(damaged)
    assert "b'big'-endian" in refused(tensor(), data_0=numbers, byteorder=b"big")
    assert "keeps a value under the number 2147483647" in refused(b"\x80\x02}r\xff\xff\xff\x7f.")


# ---- with torch ----


def save(state: Any, path: Path) -> None:
    torch = pytest.importorskip("torch")

    def tensors(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: tensors(entry) for name, entry in value.items()}
        return torch.from_numpy(np.array(value)) if isinstance(value, np.ndarray) else value

    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(tensors(state), path)


def refusal(source: Path, out: Path, config: Path | None = None) -> str:
    with pytest.raises(UserError) as error:
        import_torch(source, out, QUIET, settings=config)
    assert not out.exists()
    return str(error.value)


@pytest.mark.parametrize("within", [None, "model", "state_dict"])
def test_a_folder_that_training_left(tmp_path: Path, within: str | None) -> None:
    state = resid_state()
    folder = tmp_path / "run"
    put(folder, "resid_mlp_train_config.yaml", {"resid_mlp_model_config": RESID, "steps": 1})
    (folder / "label_coeffs.json").write_text("[1]")
    whole = {f"_orig_mod.{name}": array for name, array in state.items()}
    save(whole if within is None else {within: whole, "step": 7}, folder / "resid_mlp.pth")
    import_torch(folder, tmp_path / "out", QUIET)
    architecture, loaded = load_target(tmp_path / "out")
    assert architecture == ResidMLPConfig(6, 8, 3, 2, "relu", True, True)
    assert np.array_equal(loaded["layers"]["mlp_in"][1], state["layers.1.mlp_in.weight"].T)
    assert json.loads((tmp_path / "out" / "torch.json").read_text())["checkpoints"].keys() == {"resid_mlp.pth"}
    with pytest.raises(UserError, match="exists and is not empty"):
        import_torch(folder, tmp_path / "out", QUIET)
    import_torch(folder / "resid_mlp.pth", tmp_path / "out", QUIET, overwrite=True)


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_a_folder_of_hugging_face(tmp_path: Path, parts: int, dtype: Any) -> None:
    """The tiny Llama, tied, whose head is stored too, as `pytorch_model.bin` keeps it."""
    save_target(tmp_path / "target", ARCHITECTURE, weights(ARCHITECTURE))
    arrays = load_file(tmp_path / "target" / "model.safetensors")
    arrays["lm_head.weight"] = arrays["model.embed_tokens.weight"]
    arrays["model.layers.0.self_attn.rotary_emb.inv_freq"] = normal(4)
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "config.json").write_bytes((tmp_path / "target" / "config.json").read_bytes())
    (folder / "tokenizer.json").write_text("{}")
    names = sorted(arrays)
    files = ["pytorch_model.bin"] if parts == 1 else [f"pytorch_model-{n}.bin" for n in range(parts)]
    for n, file in enumerate(files):
        save({name: arrays[name] for name in names[n::parts]}, folder / file)
    if parts > 1:
        places = {name: files[n % parts] for n, name in enumerate(names)}
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": places}))
    import_torch(folder, tmp_path / "out", QUIET, dtype=dtype)
    here, there = load_target(tmp_path / "out"), load_target(tmp_path / "target", dtype)
    assert here[0] == there[0]
    assert jax.tree.all(jax.tree.map(lambda a, b: a.dtype == b.dtype and bool((a == b).all()), here[1], there[1]))
    assert (tmp_path / "out" / "tokenizer.json").is_file()


def test_what_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    torch = pytest.importorskip("torch")
    folder, out = tmp_path / "run", tmp_path / "out"
    put(folder, "tms_train_config.yaml", {"tms_model_config": TMS})
    assert "there is no such checkpoint" in refusal(tmp_path / "nowhere", out)
    assert "has no checkpoint" in refusal(folder, out)
    checkpoint = folder / "tms.pth"
    save({"state_dict": Evil()}, checkpoint)
    assert "tms.pth: holds more than plain values and dense tensors of the usual types (__builtin__.print)" in refusal(
        folder, out
    )
    checkpoint.write_bytes(pickle.dumps(Evil(), protocol=2))
    assert "is not read" in refusal(folder, out)
    assert "must not be printed" not in "".join(capfd.readouterr())
    checkpoint.write_bytes(b"PK\x03\x04 and not much more")
    assert "cannot be read as a checkpoint of torch" in refusal(folder, out)
    checkpoint.write_bytes(b"")
    assert "cannot be read as a checkpoint of torch" in refusal(folder, out)
    save({"step": 3, "model": {"a": 1}}, checkpoint)
    assert "has no state dict" in refusal(folder, out)
    torch.save({"W": torch.eye(3).to(torch.float8_e4m3fn)}, checkpoint)
    assert "dense tensors of the usual types (torch._utils._rebuild_tensor_v3)" in refusal(folder, out)
    save({**tms_state(), "x": normal(1)}, checkpoint)
    assert "tms.pth: x has no place in the TMS of its settings" in refusal(folder, out)
    (folder / "tms_train_config.yaml").unlink()
    assert "(looked at no file of settings)" in refusal(folder, out)
    put(tmp_path, "other.yaml", {"lr": 1})
    assert "(looked at other.yaml)" in refusal(folder, out, tmp_path / "other.yaml")
    put(tmp_path, "other.yaml", {"model": dataclasses.asdict(TMSConfig(5, 2, 0))})
    assert "hidden_layers.0 has no place in the TMS" in refusal(folder, out, tmp_path / "other.yaml")
