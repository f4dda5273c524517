"""Attention heads (section 19): the Llama against the reference; patterns and scores of all families by what they must
reproduce."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from param_decomp_jax.analysis.heads import SCORES, attention_pattern, head_scores, query_key
from param_decomp_jax.nn.attention import attend, pattern
from param_decomp_jax.sharding.memory import PLAIN, MemoryPolicy
from param_decomp_jax.targets.base import choose_sites
from param_decomp_jax.targets.gpt import GPTConfig
from param_decomp_jax.targets.plain_linears import PlainLinears, output_record
from param_decomp_lab.weights.target_folder import load_target
from tests import reference as ref
from tests.cases import slow_but
from tests.core import tiny
from tests.core.test_attention import drawn

FAMILIES = Path(__file__).parents[1] / "golden" / "families"
C = tiny.CONFIG
FREQUENCIES = ref.rope_frequencies(C.head_dim, C.rope_theta)


@pytest.fixture(scope="module")
def patterns() -> np.ndarray:
    """Of the tiny Llama in every layer ``[layers, B, heads, T, T]``, as the reference has them."""
    kinds = [(layer, kind) for layer in range(C.n_layers) for kind in ("q_proj", "k_proj")]
    target = tiny.target(chosen={ref.llama_site(layer, kind[0]).removeprefix("model."): 1 for layer, kind in kinds})
    sites = [site.name for site in target.sites.all]
    clean = ref.clean_pass(tiny.ref_target(target, tiny.weights(), tiny.TOKENS), sites)
    weights = tiny.weights()["layers"]
    found = []
    for layer in range(C.n_layers):
        x = clean.inputs[next(name for name in sites if f".{layer}." in name and "q_proj" in name)]
        q, k = (x @ np.asarray(weights[kind][layer], np.float64) for kind in ("q_proj", "k_proj"))
        pairs = zip(q, k, strict=True)
        found.append([ref.attention_pattern(*rows, C.n_heads, C.n_kv_heads, FREQUENCIES) for rows in pairs])
    return np.array(found)


@pytest.mark.parametrize("layers", ["scan", "unroll"])
def test_patterns_of_a_llama(patterns: np.ndarray, layers: Any) -> None:
    target, weights = tiny.target(memory=MemoryPolicy(layers=layers)), tiny.weights()
    for layer, own in enumerate(patterns):
        found = jax.jit(attention_pattern, static_argnums=(0, 3))(target, weights, tiny.TOKENS, layer)
        np.testing.assert_allclose(found, own, atol=1e-5)


def test_scores(patterns: np.ndarray) -> None:
    """On the tokens themselves, where repeats are planted, and where there are none."""
    target, weights = tiny.target(), tiny.weights()
    sums = jax.jit(head_scores, static_argnums=0)(target, weights, tiny.TOKENS)
    alike = np.tril(np.ones((1, 5, 5))) / np.arange(1, 6)[:, None]
    chance = ref.head_scores(np.stack([alike] * len(tiny.TOKENS)), tiny.TOKENS)
    for n, name in enumerate(SCORES):
        for layer, own in enumerate(patterns):
            expected = ref.head_scores(own, tiny.TOKENS)[name]
            np.testing.assert_allclose(sums.sums[layer, n] / sums.counts[n], expected, atol=1e-5)
        np.testing.assert_allclose(sums.chance[n] / sums.counts[n], chance[name][0], atol=1e-6)
    assert min(sums.counts) > 1
    assert head_scores(target, weights, jnp.arange(5)[None]).counts.tolist() == [4, 0, 0, 4]
    assert head_scores(target, weights, jnp.array([[1, 2, 1, 1, 2]])).counts.tolist() == [4, 3, 3, 4]
    assert head_scores(target, weights, jnp.array([[1, 1]])).counts.tolist() == [1, 1, 0, 1]


def test_a_pattern_is_what_values_are_read_by() -> None:
    q, k, v, _ = map(jnp.asarray, drawn(2, 5, 6, 2, 3, np.float32))
    found = np.asarray(pattern(q, k, True))
    np.testing.assert_allclose(found.sum(-1), 1, rtol=1e-5)
    read = np.einsum("bhts,bshd->bthd", found, np.repeat(v, 3, axis=2))
    np.testing.assert_allclose(read, attend(q, k, v, True), atol=1e-5)


def test_query_key_of_a_llama() -> None:
    target, weights = tiny.target(), tiny.weights()
    rng = np.random.default_rng(0)
    q = rng.normal(size=(3, C.n_heads * C.head_dim))
    k = rng.normal(size=(4, C.n_kv_heads * C.head_dim))
    q, k = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in (q, k))
    found = np.asarray(query_key(target, weights, 1, jnp.float32(q), jnp.float32(k), 6))
    assert found.shape == (6, C.n_heads, 3, 4)
    for (distance, n, m), _ in np.ndenumerate(found[:, 0]):
        expected = ref.kappa(q[n], k[m], C.n_heads, C.n_kv_heads, distance, FREQUENCIES)
        np.testing.assert_allclose(found[distance, :, n, m], expected, atol=1e-5)


@pytest.mark.parametrize(
    "name",
    slow_but(
        ["gpt2_variant", "gemma2", "qwen3", "olmoe", "gpt"],
        ["gpt2", "gpt2_variant", "gemma2", "qwen3", "olmo2", "olmoe", "gpt_neox", "llama_yarn_mscale", "gpt"],
    ),
)
def test_scores_of_whole_queries_and_keys_give_the_pattern(name: str) -> None:
    """Of every family: what its sites of queries and keys give, by hand through biases, norms and clips, then through
    `query_key` and the cap, is the logarithm of the pattern up to a number for each reading position."""
    architecture: Any
    if name == "gpt":
        architecture = GPTConfig(vocab_size=48, n_positions=24, d_model=16, n_layers=2, n_heads=4, d_mlp=8)
        rng = np.random.default_rng(0)
        weights = jax.tree.map(
            lambda shape: jnp.asarray(rng.normal(size=shape) / 3, jnp.float32),
            architecture.weight_shapes(),
            is_leaf=lambda x: isinstance(x, tuple),
        )
    else:
        architecture, weights = load_target(FAMILIES / name)
    chosen = {m.name: 1 for m in architecture.attention_matrices()}
    target = architecture.target(choose_sites(architecture.matrices(), chosen), PLAIN, jnp.float32)
    layer, tokens = architecture.n_layers - 1, jnp.arange(14)[None] * 7 % 48
    own = np.asarray(attention_pattern(target, weights, tokens, layer))[0]
    records = target.forward(weights, tokens, PlainLinears(target.sites, outputs=True)).records
    [kept] = [x for first, x in records.items() if first <= layer < first + len(next(iter(x.values())))]
    stored = {name: np.asarray(x[layer], np.float64) for name, x in weights["layers"].items()}
    q, k = (np.asarray(kept[output_record(kind)][-1, 0], np.float64) for kind in ("q_proj", "k_proj"))
    q, k = (x + bias(architecture, stored, kind) for x, kind in ((q, "q_proj"), (k, "k_proj")))
    c = architecture
    if getattr(c, "qk_norm", None) is not None:
        width = c.head_dim if c.qk_norm == "head" else None
        q, k = (divided(x, width, c.norm_eps) for x in (q, k))
    if getattr(c, "clip", None) is not None:
        assert c.qk_norm == "all"  # clipping follows the norm's weight, which `query_key` multiplies by
        q, k = (np.clip(x * w, -c.clip, c.clip) / w for x, w in ((q, stored["q_norm"]), (k, stored["k_norm"])))
    T = len(q)
    by_distance = np.asarray(query_key(target, weights, layer, jnp.float32(q), jnp.float32(k), T), np.float64)
    cap = getattr(c, "attention_cap", None)
    read = 0
    for t in range(T):
        scores = np.stack([by_distance[t - s, :, t, s] for s in range(t + 1)], axis=1)
        scores = scores if cap is None else cap * np.tanh(scores / cap)
        in_window = own[:, t, : t + 1] > 0
        scores = np.where(in_window, scores, -np.inf)
        expected = np.exp(scores - scores.max(axis=1, keepdims=True))
        np.testing.assert_allclose(own[:, t, : t + 1], expected / expected.sum(axis=1, keepdims=True), atol=2e-5)
        read += int(in_window.sum())
    assert np.ptp(own[:, -1], axis=1).max() > 0.02
    assert read > len(own) * T


def bias(architecture: Any, stored: dict[str, np.ndarray], kind: str) -> Any:
    if f"{kind}_bias" in stored:
        return stored[f"{kind}_bias"]
    if "qkv_proj_bias" not in stored:
        return 0.0
    fused = stored["qkv_proj_bias"]
    number = ("q_proj", "k_proj").index(kind)
    if architecture.fused == "blocks":
        return np.split(fused, 3)[number]
    return fused.reshape(architecture.n_heads, 3, -1)[:, number].ravel()


def divided(x: np.ndarray, width: int | None, eps: float) -> np.ndarray:
    """By the root mean square of each row, or of each head in it."""
    parts = x.reshape(len(x), -1, width or x.shape[1])
    return (parts / np.sqrt((parts**2).mean(axis=-1, keepdims=True) + eps)).reshape(x.shape)
