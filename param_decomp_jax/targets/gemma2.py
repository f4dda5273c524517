"""Gemma 2: norms before and after each block, windows in every other layer, caps on scores and logits, scaled
embeddings."""

from collections.abc import Mapping
from typing import Any

from param_decomp_jax.targets.config_json import ConfigJson, activation_name, layer_types
from param_decomp_jax.targets.llama import NAMES, Defaults, llama_fields, llama_keys
from param_decomp_jax.targets.transformer import Family
from param_decomp_jax.targets.transformer_config import ATTENTION

DEFAULT_WINDOW = 4096
# transformers reads only hidden_activation, whatever hidden_act says.
DEFAULTS = Defaults(
    positions=8192,
    kv_heads=4,
    null_kv_heads=False,
    tied=True,
    activation=("hidden_activation", "gelu_pytorch_tanh"),
)


class Gemma2Config(Family):
    """Hugging Face's ``Gemma2ForCausalLM``. Refused: quantized weights, attention in both directions."""

    name = "gemma2"
    title = "Gemma 2"
    model_classes = ("Gemma2ForCausalLM",)
    published_dtype = "float32"
    prefix = "model."
    unread_tensors = ("*rotary_emb.inv_freq",)
    names = NAMES | {
        "attention_out_norm": "model.layers.{}.post_attention_layernorm",
        "post_norm": "model.layers.{}.pre_feedforward_layernorm",
        "mlp_out_norm": "model.layers.{}.post_feedforward_layernorm",
    }

    @classmethod
    def from_config(cls, raw: Mapping[str, Any]) -> "Gemma2Config":
        c = ConfigJson(raw, cls.title)
        c.only("use_bidirectional_attention", None, False)
        c.head_width("hidden_size", "num_attention_heads")  # transformers requires this, whatever head_dim is
        own = llama_fields(c, DEFAULTS, head_dim=c.whole("head_dim", 256))
        return cls(
            **own,
            **c.sliding(own["n_layers"], c.window(DEFAULT_WINDOW), range(0, own["n_layers"], 2)),
            norm="rms_plus_one",
            norms="around",
            query_scale=c.positive("query_pre_attn_scalar", 256.0) ** -0.5,
            attention_cap=c.optional("attn_logit_softcapping", 50.0),
            logit_cap=c.optional("final_logit_softcapping", 30.0),
            embed_scale=own["d_model"] ** 0.5,
            biases=ATTENTION if c.flag("attention_bias", False) else (),
        )

    def to_config(self, dtype: str, eos_token_id: int | None) -> dict[str, Any]:
        assert self.query_scale is not None
        activation = activation_name(self.activation)
        return llama_keys(self, "Gemma2ForCausalLM", dtype, eos_token_id) | {
            "hidden_act": activation,
            "hidden_activation": activation,
            # transformers makes a sliding mask even if no layer uses it, and needs a window for it.
            "sliding_window": DEFAULT_WINDOW if self.window is None else self.window,
            "layer_types": layer_types(self),
            "query_pre_attn_scalar": _whole_if_it_is(self.query_scale**-2),
            "attn_logit_softcapping": self.attention_cap,
            "final_logit_softcapping": self.logit_cap,
            "attention_bias": bool(self.biases),
        }


def _whole_if_it_is(x: float) -> float | int:
    """Returns the whole number that was read from the file, if ``x`` is one up to the rounding of its root."""
    return round(x) if abs(x - round(x)) < 1e-9 * x else x


Gemma2Config.published = {
    f"google/gemma-2-{size}": Gemma2Config.from_config(
        {
            "vocab_size": 256_000,
            "hidden_size": d_model,
            "num_hidden_layers": n_layers,
            "num_attention_heads": n_heads,
            "num_key_value_heads": n_kv_heads,
            "head_dim": 256,
            "intermediate_size": d_mlp,
            "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10_000.0,
            "sliding_window": 4096,
            "query_pre_attn_scalar": 256,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        }
    )
    for size, d_model, n_layers, n_heads, n_kv_heads, d_mlp in (
        ("2b", 2304, 26, 8, 4, 9216), ("9b", 3584, 42, 16, 8, 14_336),
    )
}  # fmt: skip
"""From their public ``config.json``."""
