"""Reads a Llama from a GGUF: its architecture, and the source of each tensor of the Hugging Face layout.

llama.cpp's rotary embedding turns neighbouring rows of a head together, Hugging Face's row i with row i + head_dim / 2.
Converters to GGUF therefore interleave the two halves of every head of q and k (of k's own heads, if they are fewer).
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Float

from param_decomp_jax.nn.rotary import Llama3Scaling
from param_decomp_jax.targets.architecture import UnsupportedConfig, check_sizes
from param_decomp_jax.targets.llama import LlamaConfig, module_name
from param_decomp_jax.targets.rope_json import DEFAULT_THETA
from param_decomp_jax.targets.transformer import rotary_frequencies
from param_decomp_jax.targets.transformer_config import KINDS
from param_decomp_lab.errors import UserError
from param_decomp_lab.weights.gguf_file import GgufFile

ARCHITECTURE = "llama"
# All keys that define the network. Any other key under `llama.` would change it in an unknown way.
UNDERSTOOD = frozenset({
    "vocab_size", "context_length", "embedding_length", "block_count", "feed_forward_length",
    "attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length",
    "attention.layer_norm_rms_epsilon", "rope.freq_base", "rope.dimension_count", "rope.scaling.type",
})  # fmt: skip
# The parameters of Llama 3.1 and 3.2 besides their factor, which is all that a GGUF contains (as the largest divisor).
LOW_FREQ_FACTOR, HIGH_FREQ_FACTOR, ORIGINAL_CONTEXT = 1.0, 4.0, 8192
ROPE_DIVISORS = "rope_freqs.weight"
EMBEDDING, HEAD = "token_embd.weight", "output.weight"
_IN_GGUF = dict(
    zip(KINDS, ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"), strict=True)
)


@dataclass(frozen=True)
class Stored:
    """A tensor of the Hugging Face layout. ``stored``: its name in the GGUF. ``interleaved_heads``: the number of heads
    whose two halves of rows are interleaved there; 0 if none.
    """

    name: str
    stored: str
    shape: tuple[int, ...]
    interleaved_heads: int = 0

    def read(self, file: GgufFile) -> Float[np.ndarray, "..."]:
        """Returns its values in fp32, with rows in the order of Hugging Face."""
        values = file.read(self.stored)
        if not self.interleaved_heads:
            return values
        pairs = values.reshape(self.interleaved_heads, -1, 2, values.shape[-1])
        return pairs.swapaxes(1, 2).reshape(values.shape)


def read_architecture(file: GgufFile) -> LlamaConfig:
    """Returns the architecture of ``file``. Raises UserError for another architecture than Llama, for anything unknown
    about it, by name, and for tensors that are missing, superfluous or of the wrong shape.
    """
    architecture = file.metadata.get("general.architecture")
    if architecture != ARCHITECTURE:
        raise UserError(f"{file.source}: its architecture is {architecture!r}; only {ARCHITECTURE!r} can be imported")
    _refuse_what_is_not_understood(file)
    heads, width = file.count("llama.attention.head_count"), file.count("llama.embedding_length")
    kv_heads = file.count("llama.attention.head_count_kv", heads)
    if heads % kv_heads:
        raise UserError(f"{file.source}: {heads} heads cannot share {kv_heads} heads of keys and values evenly")
    head_dim = file.count("llama.attention.key_length", width // heads)
    for key in ("llama.attention.value_length", "llama.rope.dimension_count"):
        if (found := file.count(key, head_dim)) != head_dim:
            raise UserError(f"{file.source}: {key} is {found}; only the width of a head, {head_dim}, is supported")
    try:
        config = _config(file, heads, kv_heads, head_dim)
        check_sizes(config)  # before a name is made for every tensor of every layer
        _expect_tensors(file, config)
        return replace(config, rope_scaling=_rope_scaling(file, config))
    except UnsupportedConfig as error:
        raise UserError(f"{file.source}: {error}") from error


def _config(file: GgufFile, heads: int, kv_heads: int, head_dim: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=file.shapes.get(EMBEDDING, (0,))[0],
        d_model=file.count("llama.embedding_length"),
        n_layers=file.count("llama.block_count"),
        n_heads=heads,
        n_kv_heads=kv_heads,
        head_dim=head_dim,
        d_mlp=file.count("llama.feed_forward_length"),
        norm_eps=file.number("llama.attention.layer_norm_rms_epsilon"),
        rope_theta=file.number("llama.rope.freq_base", DEFAULT_THETA),
        tied=HEAD not in file.shapes,
    )


def stored_tensors(config: LlamaConfig) -> Iterator[Stored]:
    """Yields every tensor of the Hugging Face layout, with its place in a GGUF."""
    d = config.d_model
    yield Stored("model.embed_tokens.weight", EMBEDDING, (config.vocab_size, d))
    heads = {"q_proj": config.n_heads, "k_proj": config.n_kv_heads}
    for layer in range(config.n_layers):
        yield Stored(f"model.layers.{layer}.input_layernorm.weight", f"blk.{layer}.attn_norm.weight", (d,))
        yield Stored(f"model.layers.{layer}.post_attention_layernorm.weight", f"blk.{layer}.ffn_norm.weight", (d,))
        for kind in KINDS:
            name, stored = f"model.{module_name(layer, kind)}.weight", f"blk.{layer}.{_IN_GGUF[kind]}.weight"
            yield Stored(name, stored, config.matrix_shape(kind)[::-1], heads.get(kind, 0))
    yield Stored("model.norm.weight", "output_norm.weight", (d,))
    if not config.tied:
        yield Stored("lm_head.weight", HEAD, (config.vocab_size, d))


def _refuse_what_is_not_understood(file: GgufFile) -> None:
    prefix = f"{ARCHITECTURE}."
    said = {key.removeprefix(prefix): value for key, value in file.metadata.items() if key.startswith(prefix)}
    scaling = said.get("rope.scaling.type", "none")
    if scaling != "none":
        raise UserError(
            f"{file.source}: the rotary scaling {scaling!r} is not supported; only none, and Llama 3's, are"
        )
    if unknown := sorted(said.keys() - UNDERSTOOD):
        raise UserError(
            f"{file.source}: {prefix}{unknown[0]} is {said[unknown[0]]!r}, a variant of Llama that cannot be imported"
        )


def _expect_tensors(file: GgufFile, config: LlamaConfig) -> None:
    expected = {tensor.stored: tensor.shape for tensor in stored_tensors(config)}
    for name, shape in expected.items():
        if name not in file.shapes:
            raise UserError(f"{file.source} has no tensor {name}, which its metadata implies (shape {list(shape)})")
        if file.shapes[name] != shape:
            raise UserError(
                f"{file.source}: {name} has shape {list(file.shapes[name])}, its metadata implies {list(shape)}"
            )
    said = file.count("llama.vocab_size", config.vocab_size)
    if said != config.vocab_size:
        raise UserError(f"{file.source}: llama.vocab_size is {said}, but {EMBEDDING} has {config.vocab_size} rows")
    if unknown := sorted(file.shapes.keys() - expected.keys() - {ROPE_DIVISORS}):
        raise UserError(
            f"{file.source}: the tensor {unknown[0]} ({len(unknown)} such) has no place in a Llama; "
            "variants with biases, experts or adapters cannot be imported"
        )


def _rope_scaling(file: GgufFile, config: LlamaConfig) -> Llama3Scaling | None:
    """Returns Llama 3's frequency scaling, which a GGUF stores as the divisors of the frequencies,
    ``[head_dim / 2]``.
    """
    if ROPE_DIVISORS not in file.shapes:
        return None
    divisors = file.read(ROPE_DIVISORS)
    scaling = Llama3Scaling(max(float(divisors.max()), 1.0), LOW_FREQ_FACTOR, HIGH_FREQ_FACTOR, ORIGINAL_CONTEXT)
    plain, scaled = (rotary_frequencies(replace(config, rope_scaling=s)) for s in (None, scaling))
    if divisors.shape != plain.shape or not np.allclose(plain / scaled, divisors, rtol=1e-4, atol=0):
        raise UserError(
            f"{file.source}: the frequency divisors in {ROPE_DIVISORS} are not those of Llama 3 "
            f"(low_freq_factor {LOW_FREQ_FACTOR:g}, high_freq_factor {HIGH_FREQ_FACTOR:g}, original context "
            f"{ORIGINAL_CONTEXT}); other rotary scalings are not supported"
        )
    return scaling
