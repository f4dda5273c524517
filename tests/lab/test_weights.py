"""Hugging Face folders in and out: round trips, slices, layouts of config.json, and bad folders."""

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformers
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from param_decomp_jax.nn.rotary import Llama3Scaling
from param_decomp_jax.targets.llama import LlamaConfig
from param_decomp_lab.errors import UserError
from param_decomp_lab.weights.safetensors_files import SafetensorsFolder
from param_decomp_lab.weights.target_folder import load_target, read_architecture, save_target

GOLDEN = Path(__file__).parent.parent / "golden" / "llama"
SCALING = Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16)
UNTIED = LlamaConfig(20, 12, 2, 4, 2, 6, 16, rope_theta=500.0, rope_scaling=SCALING)
TIED = LlamaConfig(20, 12, 3, 2, 2, 6, 16, norm_eps=1e-6, tied=True)


def weights_of(config):
    rng = np.random.default_rng(0)
    shapes = config.weight_shapes()
    return jax.tree.map(lambda s: rng.normal(size=s).astype(np.float32), shapes, is_leaf=lambda s: isinstance(s, tuple))


@pytest.fixture
def golden(tmp_path):
    """A copy of the sharded fixture, to break."""
    return Path(shutil.copytree(GOLDEN / "sharded_tied", tmp_path / "copy"))


@pytest.mark.parametrize("config", [UNTIED, TIED])
def test_what_is_saved_is_loaded(tmp_path, config):
    weights = weights_of(config)
    save_target(tmp_path, config, weights)
    found_config, found = load_target(tmp_path)
    assert found_config == config
    jax.tree.map(np.testing.assert_array_equal, found, weights)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    assert len({p.stat().st_mode for p in tmp_path.iterdir()}) == 1, "others may read one file and not the other"


@pytest.mark.slow
def test_layout_is_the_one_of_transformers(tmp_path):
    """The same tensor names and shapes as transformers itself writes, and a config.json that it reads."""
    for name in ("scaled", "sharded_tied"):
        config, weights = load_target(GOLDEN / name)
        save_target(tmp_path, dataclasses.replace(config, max_positions=99), weights, eos_token_id=0)
        ours = load_file(tmp_path / "model.safetensors")
        theirs = {k: v for file in (GOLDEN / name).glob("*.safetensors") for k, v in load_file(file).items()}
        assert ours.keys() == theirs.keys()
        for key, tensor in ours.items():
            np.testing.assert_array_equal(tensor, theirs[key])
        with safe_open(tmp_path / "model.safetensors", framework="numpy") as file:
            assert file.metadata() == {"format": "pt"}  # transformers refuses others
        read, written = (transformers.AutoConfig.from_pretrained(folder) for folder in (tmp_path, GOLDEN / name))
        assert isinstance(read, transformers.LlamaConfig)
        assert read.max_position_embeddings == 99
        assert read.eos_token_id == 0
        ours, theirs = read.to_dict(), written.to_dict()
        free = {"max_position_embeddings", "bos_token_id", "eos_token_id", "_name_or_path", "transformers_version"}
        # transformers keeps keys of its version 4, which we write for it, as they are.
        for key in theirs.keys() - free:
            assert ours[key] == theirs[key], key


def test_bfloat16_in_the_file_and_on_request(tmp_path):
    weights = weights_of(UNTIED)
    save_target(tmp_path, UNTIED, weights, "bfloat16")
    as_stored, as_float = load_target(tmp_path)[1], load_target(tmp_path, "float32")[1]
    rounded = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), weights)
    jax.tree.map(np.testing.assert_array_equal, as_stored, rounded)
    assert {x.dtype for x in jax.tree.leaves(as_stored)} == {jnp.dtype(jnp.bfloat16)}
    assert {x.dtype for x in jax.tree.leaves(as_float)} == {jnp.dtype(jnp.float32)}
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"


def test_each_device_reads_its_slice_and_replicas_share_one_read(tmp_path, monkeypatch):
    """Eight devices, four replicas of two halves: every element is read once, no tensor as a whole."""
    save_target(tmp_path, UNTIED, weights_of(UNTIED))
    whole = load_target(tmp_path)[1]
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("replica", "fsdp"))
    shardings = jax.tree.map(lambda x: NamedSharding(mesh, PartitionSpec(*([None] * (x.ndim - 1)), "fsdp")), whole)
    read = []
    original = SafetensorsFolder.read
    monkeypatch.setattr(SafetensorsFolder, "read", lambda *a: read.append(out := original(*a)) or out)
    placed = load_target(tmp_path, shardings=shardings)[1]
    jax.tree.map(np.testing.assert_array_equal, placed, whole)
    assert jax.tree.map(lambda x: x.sharding, placed) == shardings
    assert sum(part.size for part in read) == sum(x.size for x in jax.tree.leaves(whole))
    assert max(part.size for part in read) == 12 * 24 / 2  # half of q_proj, the largest


def edit_config(folder, **changes):
    file = folder / "config.json"
    raw = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in raw.items() if value is not ...}))


def test_both_layouts_of_the_rotary_embedding(golden):
    scaling = {"factor": 8, "low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 16}
    plain, scaled = read_architecture(golden), {"rope_type": "llama3", **scaling}
    assert (plain.rope_theta, plain.rope_scaling) == (1000.0, None)
    for changes, theta, expected in (
        ({"rope_parameters": ..., "rope_theta": 500, "rope_scaling": None}, 500.0, None),
        ({"rope_parameters": ..., "rope_theta": 500, "rope_scaling": scaled}, 500.0, SCALING),
        ({"rope_parameters": {**scaled, "rope_theta": 700.0}, "rope_theta": ..., "rope_scaling": ...}, 700.0, SCALING),
        ({"rope_parameters": ...}, 10_000.0, None),
    ):
        edit_config(golden, **changes)
        config = read_architecture(golden)
        assert (config.rope_theta, config.rope_scaling) == (theta, expected)


def test_defaults_of_config_json(golden):
    edit_config(golden, head_dim=..., num_key_value_heads=..., rms_norm_eps=..., tie_word_embeddings=...)
    config = read_architecture(golden)
    assert (config.head_dim, config.n_kv_heads, config.norm_eps, config.tied) == (8, 3, 1e-6, False)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mamba"}, "model_type is 'mamba'; what can be loaded is llama, "),
        ({"attention_bias": True}, r"no tensor model\.layers\.0\.self_attn\.k_proj\.bias"),
        ({"hidden_act": "tanh"}, "hidden_act is 'tanh'"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rotary scaling 'dynamic'"),
        ({"rope_parameters": ..., "rope_scaling": {"type": "longrope", "factor": 2.0}}, "rotary scaling 'longrope'"),
        ({"hidden_size": ...}, "lacks the key 'hidden_size'"),
        ({"hidden_size": "wide"}, "hidden_size: should be a whole number, not 'wide'"),
        ({"quantization_config": {"bits": 4}}, "quantized"),
    ],
)
def test_unsupported_configurations_are_refused_by_name(golden, changes, message):
    edit_config(golden, **changes)
    with pytest.raises(UserError, match=message):
        load_target(golden)


def test_missing_and_broken_files(golden, tmp_path):
    with pytest.raises(UserError, match=r"no config\.json in"):
        load_target(tmp_path / "nowhere")
    shard = sorted(golden.glob("*.safetensors"))[1]
    whole = shard.read_bytes()
    for cut in (4, 100, len(whole) - 1):
        shard.write_bytes(whole[:cut])
        with pytest.raises(UserError, match=rf"{shard.name} is not a whole safetensors file.*download it again"):
            load_target(golden)
    shard.unlink()
    with pytest.raises(UserError, match=rf"lacks {shard.name}, which model\.safetensors\.index\.json lists"):
        load_target(golden)
    (golden / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(UserError, match="is not an index"):
        load_target(golden)
    (golden / "model.safetensors.index.json").unlink()
    with pytest.raises(UserError, match=r"has no model\.safetensors and no"):
        load_target(golden)
    (golden / "config.json").write_text("{")
    with pytest.raises(UserError, match="not valid JSON"):
        load_target(golden)


def test_tensors_that_do_not_fit_the_configuration(tmp_path):
    save_target(tmp_path, UNTIED, weights_of(UNTIED))
    file, up = tmp_path / "model.safetensors", "model.layers.1.mlp.up_proj.weight"
    tensors = load_file(file)
    for changed, message in (
        ({k: v for k, v in tensors.items() if k != up}, rf"no tensor {up}.*\[16, 12\]"),
        (tensors | {up: tensors[up].T.copy()}, rf"{up} has shape \[12, 16\].*\[16, 12\]"),
        (tensors | {"model.layers.0.self_attn.q_proj.bias": tensors[up]}, r"q_proj\.bias .*has no place"),
    ):
        save_file(changed, file, metadata={"format": "pt"})
        with pytest.raises(UserError, match=message):
            load_target(tmp_path)
    harmless = {
        "lm_head.weight": tensors["lm_head.weight"],
        "model.layers.0.self_attn.rotary_emb.inv_freq": tensors[up],
    }
    save_file(tensors | harmless, file)
    load_target(tmp_path)


def test_files_without_the_prefix(tmp_path):
    """As transformers saves the bare model: no `model.`, and no head."""
    weights = weights_of(TIED)
    save_target(tmp_path, TIED, weights)
    file = tmp_path / "model.safetensors"
    save_file({name.removeprefix("model."): tensor for name, tensor in load_file(file).items()}, file)
    jax.tree.map(np.testing.assert_array_equal, load_target(tmp_path)[1], weights)


def test_a_place_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write the weights to"):
        save_target(tmp_path / "file" / "out", UNTIED, weights_of(UNTIED))
