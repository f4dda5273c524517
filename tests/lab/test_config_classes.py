"""Every family's reading of a `config.json` is that of transformers' config class: defaults, nulls, settings under two
names. `config_classes.py` compares files drawn at random, and prints how many of them agree."""

from random import SystemRandom
from typing import Any

import pytest
import transformers
from hypothesis import settings

from param_decomp_jax.nn.rotary import LinearScaling, YarnScaling
from param_decomp_jax.targets.architecture import UnsupportedConfig
from param_decomp_jax.targets.registry import read_config
from param_decomp_lab.pretrain.recipe import FamilyRecipe
from tests.lab.config_classes import compare, drawn_files
from tests.lab.drawn_configs import FAMILIES, Drawn

transformers.logging.set_verbosity_error()
SIZES: dict[str, Any] = {
    "vocab_size": 50, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 32, "intermediate_size": 24,
}  # fmt: skip
GPT2: dict[str, Any] = {"model_type": "gpt2", "vocab_size": 50, "n_embd": 48, "n_layer": 2, "n_head": 4}
LINEAR = {"rope_type": "linear", "factor": 2.0}


def file(name: str, **keys: Any) -> dict[str, Any]:
    return {"model_type": name, **SIZES, **keys}


def differences(name: str, seed: int, n: int) -> list[str]:
    outcomes = [(drawn, compare(drawn)) for drawn in drawn_files(name, seed, n)]
    assert any(outcome.verdict == "agreed" for _, outcome in outcomes)
    return [f"seed {seed}: {o.about}\n{drawn.raw}" for drawn, o in outcomes if o.verdict == "different"]


@pytest.mark.parametrize("name", FAMILIES)
def test_five_files(name: str) -> None:
    assert not differences(name, 0, 5)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_two_hundred_files(name: str) -> None:
    """The same ones each time, but new ones in `make test-full`."""
    same = settings.default is not None and settings.default.derandomize
    assert not differences(name, 1 if same else SystemRandom().randrange(1 << 32), 200)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_file_of_nothing_but_sizes(name: str) -> None:
    """Every default at once."""
    raw = GPT2 if name == "gpt2" else file(name, num_attention_heads=4 if name == "gpt_neox" else 32)
    outcome = compare(Drawn(raw))
    assert outcome.verdict == "agreed", outcome.about


@pytest.mark.parametrize(
    ("raw", "field", "value"),
    [
        (file("gemma2", hidden_act="gelu"), "activation", "gelu_tanh"),
        (file("gemma2", hidden_act="gelu", hidden_activation="relu"), "activation", "relu"),
        (file("qwen2", hidden_size=128, num_attention_heads=64), "n_kv_heads", 32),
        (file("qwen3_moe"), "head_dim", 2),
        (file("qwen3_moe", use_sliding_window=True, sliding_window=3), "window_layers", (0, 1)),
        (file("mistral", rope_scaling={"type": "yarn", "factor": 4.0}), "max_positions", 131_072),
        (file("llama", rope_scaling=LINEAR, rope_parameters={}), "rope_scaling", LinearScaling(2.0)),
        (file("gpt_neox", num_attention_heads=4, rope_parameters={"partial_rotary_factor": 0.5}), "rotary_dim", 8),
        (GPT2 | {"n_positions": 64, "max_position_embeddings": 64}, "learned_positions", 64),
        ({k: v for k, v in GPT2.items() if k != "n_embd"} | {"hidden_size": 64}, "d_model", 64),
    ],
)  # fmt: skip
def test_read_as_transformers_does(raw: dict[str, Any], field: str, value: Any) -> None:
    assert getattr(read_config(raw), field) == value


@pytest.mark.parametrize("beside", [{"rope_theta": 10000.0}, {}])
@pytest.mark.parametrize("scaling", [LINEAR, {"type": "yarn", "factor": 4.0}])
def test_a_scaling_does_not_vanish_beside_default_parameters(scaling: dict[str, Any], beside: dict[str, Any]) -> None:
    kind = scaling.get("rope_type", "yarn")
    with pytest.raises(UnsupportedConfig, match=f"rope_scaling has rope_type '{kind}' and rope_parameters has rope_t"):
        read_config(file("llama", rope_parameters={"rope_type": "default"}, rope_scaling=scaling, **beside))


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (file("llama", rope_theta=500.0, rope_parameters={"rope_theta": 700.0}), "^rope_theta is 500.0, but .* 700.0"),
        (file("llama", rope_parameters={"rope_type": "default", "type": "linear"}), "rope_parameters.type is 'linear'"),
        (file("llama", rope_theta=None), "rope_theta is null"),
        (file("llama", rope_parameters={"full_attention": LINEAR}), r"rope_parameters\.full_attention holds"),
        (file("gemma2", rope_local_base_freq=5.0), "rope_local_base_freq is given"),
        (file("llama", partial_rotary_factor=0.5), "partial_rotary_factor is 0.5; in a Llama all dimensions"),
        (file("gpt_neox", rotary_pct=0.5, partial_rotary_factor=0.25), "factor is 0.25, but rotary_pct is 0.5"),
        (file("gpt_neox", rotary_pct=0.5, rope_parameters={"partial_rotary_factor": 0.25}), "rotary_pct is 0.5"),
        (file("gpt_neox", rope_theta=500.0), "rope_parameters has no rope_theta, which means 10000.0"),
        (file("olmoe", num_experts=8, num_local_experts=4), "num_experts is 8, but num_local_experts is 4"),
        (file("qwen3_moe", num_experts=8, num_local_experts=4), "num_experts is 8, but num_local_experts is 4"),
        (GPT2 | {"hidden_size": 64}, "n_embd is 48, but hidden_size is 64"),
        (GPT2 | {"n_head": 5}, "n_embd: should be a multiple of n_head, 5, not 48"),
        (file("gemma2", sliding_window=None), "sliding_window is null or off, but layers slide"),
        (file("mistral", sliding_window=0), "sliding_window: should be a positive number, not 0"),
        (file("starcoder2", layer_types=["full_attention"] * 2, sliding_window=3), "all layers of it slide, by 3"),
        (file("llama", tie_word_embeddings=None), "tie_word_embeddings: should be true or false, not null"),
    ],
)  # fmt: skip
def test_refused_by_both_keys(raw: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedConfig, match=message):
        read_config(raw)


def test_positions_beside_the_scaling() -> None:
    """Which transformers takes before those in it, and the model's longest sequence where neither is given."""
    yarn = {"rope_type": "yarn", "factor": 4.0}
    for keys, original in (({"original_max_position_embeddings": 16}, 16), ({}, 64)):
        scaling = read_config(file("llama", max_position_embeddings=64, rope_parameters=yarn, **keys)).rope_scaling  # type: ignore[attr-defined]
        assert isinstance(scaling, YarnScaling)
        assert scaling.original_max_position_embeddings == original


def test_the_ramp_of_yarn_whose_end_comes_before_its_beginning() -> None:
    """As with a small base and many positions."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10.0, "original_max_position_embeddings": 1_000_000}
    outcome = compare(Drawn(file("llama", head_dim=8, rope_parameters=yarn)))
    assert outcome.verdict == "agreed", outcome.about


@pytest.mark.parametrize(
    ("given", "longest"), [({"n_positions": 64}, 64), ({"max_position_embeddings": 64}, 64), ({}, 9)]
)
def test_a_recipe_gives_the_longest_sequence_under_either_name(given: dict[str, Any], longest: int) -> None:
    """The length of the rows stands in for a missing key, and not beside another name of it."""
    recipe = FamilyRecipe(architecture="family", config=GPT2 | given)
    assert recipe.family(vocab_size=50, n_positions=9).learned_positions == longest
