"""SAEs and transcoders (B6) against the reference: latents, outputs, networks with one in place of an activation."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from param_decomp_jax.analysis.dictionaries import Dictionary, fewer, read_and_encode, replaced_errors
from param_decomp_jax.analysis.hooks import Hook, activation, output_with
from param_decomp_jax.decomposition.sites import Sites
from param_decomp_jax.targets.gpt import GPT, GPTConfig
from param_decomp_jax.targets.plain_linears import UNTOUCHED
from tests import reference as ref
from tests.cases import slow_but
from tests.core import tiny

D_IN, D_OUT, C = 8, 5, 12
TOKENS = jnp.asarray(tiny.TOKENS)
HOOK, OTHER = Hook(1, "hook_resid_post"), Hook(1, "hook_mlp_out")
SAES = ("standard", "jumprelu", "topk", "gated")
TRANSCODERS = ("transcoder", "skip_transcoder", "jumprelu_transcoder", "jumprelu_skip_transcoder")


def tensors_of(architecture: str, d_in: int = D_IN, d_out: int = D_OUT) -> dict[str, np.ndarray]:
    """``d_out``: of a transcoder."""
    rng = np.random.default_rng(0)
    d_out = d_out if "transcoder" in architecture else d_in
    shapes = {"W_enc": (d_in, C), "W_dec": (C, d_out), "b_dec": (d_out,)}
    shapes |= dict.fromkeys(("b_gate", "b_mag", "r_mag") if architecture == "gated" else ("b_enc",), (C,))
    if "jumprelu" in architecture:
        shapes["threshold"] = (C,)
    if "skip" in architecture:
        shapes["W_skip"] = (d_out, d_in)
    return {name: 0.5 * rng.standard_normal(shape) for name, shape in shapes.items()}


def config_of(architecture: str, **changes: Any) -> dict[str, Any]:
    config = {"architecture": architecture, "normalize_activations": "none", "apply_b_dec_to_input": False}
    return config | ({"k": 3} if architecture == "topk" else {}) | changes


def dictionary_of(config: dict[str, Any], reads: Hook = HOOK, writes: Hook | None = None) -> Dictionary:
    name = config["architecture"]
    encoder: Any = "jumprelu" if "jumprelu" in name else "standard" if "transcoder" in name else name
    return Dictionary(
        encoder,
        reads,
        writes or (OTHER if "transcoder" in name else reads),
        config["normalize_activations"],
        config["apply_b_dec_to_input"],
        config.get("k"),
    )


CASES = [
    *(config_of(name, apply_b_dec_to_input=subtracts) for name in SAES for subtracts in (False, True)),
    *(config_of(name) for name in TRANSCODERS),
    *(config_of(name, normalize_activations=how, apply_b_dec_to_input="transcoder" not in name)
      for name in ("standard", "gated", "skip_transcoder") for how in ("constant_norm_rescale", "layer_norm")),
]  # fmt: skip


@pytest.mark.parametrize("config", CASES, ids=lambda c: "-".join(map(str, c.values())))
def test_latents_and_what_they_give(config: dict[str, Any]) -> None:
    x, tensors = np.random.default_rng(1).normal(0.3, 2, (4, 6, D_IN)), tensors_of(config["architecture"])
    f = ref.dictionary_latents(config, tensors, x)
    assert 0 < (f > 0).mean() < 1
    with jax.enable_x64():
        dictionary, own = dictionary_of(config), tiny.to_float64(tensors)
        latents = dictionary.latents(own, jnp.asarray(x))
        np.testing.assert_allclose(latents, f, rtol=0, atol=1e-12)
        y = ref.dictionary_output(config, tensors, x, f)
        np.testing.assert_allclose(dictionary.output(own, jnp.asarray(x), latents), y, rtol=0, atol=1e-12)
        for k in (1, 2, C):
            np.testing.assert_allclose(fewer(own, latents, k), ref.fewer_latents(config, tensors, f, k), atol=1e-12)


def test_of_equal_pre_activations_top_k_takes_the_lower_number() -> None:
    tensors = {"W_enc": jnp.zeros((D_IN, 4)), "b_enc": jnp.asarray([1.0, 2, 1, 1]), "b_dec": jnp.zeros(D_IN)}
    f = Dictionary("topk", HOOK, HOOK, k=2).latents(tensors, jnp.ones((1, D_IN)))
    np.testing.assert_array_equal(f, [[1, 2, 0, 0]])


def identity(d: int) -> dict[str, jax.Array]:
    """An SAE whose latents are the coordinates, those above 0 and those below: what it gives is what it reads."""
    both = jnp.concatenate([jnp.eye(d), -jnp.eye(d)])
    return {"W_enc": both.T, "W_dec": both, "b_enc": jnp.zeros(2 * d), "b_dec": jnp.zeros(d)}


BETWEEN = ("hook_resid_pre", "hook_resid_post")
WITHIN = ("hook_resid_mid", "hook_attn_out", "hook_mlp_in", "mlp.hook_in", "mlp.hook_out", "hook_mlp_out")
HOOKS = [Hook(n, name) for n in range(tiny.CONFIG.n_layers) for name in (*BETWEEN, *WITHIN)]
FAST = (Hook(0, "hook_resid_pre"), Hook(2, "hook_resid_post"), Hook(1, "hook_mlp_out"), Hook(1, "hook_resid_mid"))


@pytest.mark.parametrize("at", slow_but(FAST, HOOKS), ids=str)
def test_what_is_read_and_replaced(at: Hook) -> None:
    """Activation, KL and cross-entropy as the reference's network has them with a standard SAE; 0 with an exact one."""
    weights, config = tiny.weights(), config_of("standard", apply_b_dec_to_input=True)
    tensors = tensors_of("standard")
    read: list[np.ndarray] = []

    def hooked(layer: int, name: str, x: np.ndarray) -> np.ndarray:
        if Hook(layer, name) != at:
            return x
        read.append(x)
        return ref.dictionary_output(config, tensors, x, ref.dictionary_latents(config, tensors, x))

    target = tiny.target()
    logits, plain = (
        tiny.ref_llama(target, weights, tiny.TOKENS, **own)(lambda module, x, W: x @ W)
        for own in ({"hooked": hooked}, {})
    )
    with jax.enable_x64():
        problem = tiny.in_float64(tiny.problem((), target))
        own, given = tiny.to_float64(weights), tiny.to_float64(tensors)
        dictionary = dictionary_of(config, at)
        x, f = read_and_encode(problem, dictionary, given, own, TOKENS)
        np.testing.assert_allclose(x, read[0], rtol=0, atol=1e-9)
        found = replaced_errors(problem, dictionary, given, own, TOKENS, x, f)
        assert float(found.error) == pytest.approx(float(ref.kl_error(plain, logits)), rel=1e-9)
        assert float(found.error) > 1e-3
        assert float(found.cross_entropy) == pytest.approx(ref.cross_entropy(logits, tiny.TOKENS), rel=1e-9)
        exact = Dictionary("standard", at, at), tiny.to_float64(identity(tiny.CONFIG.d_model))
        kept = replaced_errors(problem, *exact, own, TOKENS, *read_and_encode(problem, *exact, own, TOKENS))
        assert abs(float(kept.error)) < 1e-12
        assert float(kept.cross_entropy) == pytest.approx(ref.cross_entropy(plain, tiny.TOKENS), rel=1e-9)


@pytest.mark.parametrize("reads", ["hook_mlp_in", "ln2.hook_normalized", "mlp.hook_in"])
def test_a_transcoder(reads: str) -> None:
    weights, config = tiny.weights(), config_of("jumprelu_skip_transcoder")
    tensors = tensors_of("jumprelu_skip_transcoder", d_out=tiny.CONFIG.d_model)
    read: list[np.ndarray] = []

    def hooked(layer: int, name: str, x: np.ndarray) -> np.ndarray:
        if (layer, name) == (1, reads):
            read.append(x)
        if (layer, name) != (1, "hook_mlp_out"):
            return x
        return ref.dictionary_output(config, tensors, read[0], ref.dictionary_latents(config, tensors, read[0]))

    target = tiny.target()
    logits = tiny.ref_llama(target, weights, tiny.TOKENS, hooked=hooked)(lambda module, x, W: x @ W)
    with jax.enable_x64():
        problem = tiny.in_float64(tiny.problem((), target))
        own, given = tiny.to_float64(weights), tiny.to_float64(tensors)
        dictionary = dictionary_of(config, Hook(1, reads))
        x, f = read_and_encode(problem, dictionary, given, own, TOKENS)
        np.testing.assert_allclose(x, read[0], rtol=0, atol=1e-9)
        found = replaced_errors(problem, dictionary, given, own, TOKENS, x, f)
        assert float(found.cross_entropy) == pytest.approx(ref.cross_entropy(logits, tiny.TOKENS), rel=1e-9)


def test_fewer_latents_of_an_exact_sae() -> None:
    """With k of its latents, what is left of a position are its k largest coordinates."""
    problem, weights, at = tiny.problem((), tiny.target()), tiny.weights(), Hook(2, "hook_resid_post")
    dictionary, tensors = Dictionary("standard", at, at), identity(tiny.CONFIG.d_model)
    x, f = read_and_encode(problem, dictionary, tensors, weights, TOKENS)
    largest = np.argsort(-np.abs(x), axis=-1)[..., :2]
    left = np.zeros_like(x)
    np.put_along_axis(left, largest, np.take_along_axis(np.asarray(x), largest, axis=-1), axis=-1)
    kept = fewer(tensors, f, 2)
    assert float((kept > 0).sum(axis=-1).max()) == 2
    found = replaced_errors(problem, dictionary, tensors, weights, TOKENS, x, kept)
    plain, logits = (tiny.array(problem.target.logits(weights, jnp.asarray(y))) for y in (x, left))
    assert float(found.error) == pytest.approx(float(ref.kl_error(plain, logits)), rel=1e-4)


def test_centred() -> None:
    found = Dictionary("standard", HOOK, HOOK, centered=True).read(jnp.asarray([[1.0, 2.0, 6.0]]))
    np.testing.assert_allclose(found, [[-2, -1, 3]])


def test_a_decoder_without_hooks_in_its_layers() -> None:
    """The residual stream between layers can be read and replaced in any decoder."""
    config = GPTConfig(vocab_size=11, n_positions=8, d_model=8, n_layers=2, n_heads=2, d_mlp=6)
    target = GPT(config, Sites(()))
    rng = np.random.default_rng(0)
    shapes = config.weight_shapes()
    weights = jax.tree.map(
        lambda shape: jnp.asarray(rng.normal(size=shape), jnp.float32), shapes, is_leaf=lambda x: isinstance(x, tuple)
    )
    assert target.hooks == {"hook_resid_pre", "hook_resid_post"}
    x = activation(target, weights, TOKENS, Hook(0, "hook_resid_post"))
    np.testing.assert_array_equal(x, activation(target, weights, TOKENS, Hook(1, "hook_resid_pre")))
    plain = target.forward(weights, TOKENS, UNTOUCHED).output
    np.testing.assert_allclose(output_with(target, weights, TOKENS, Hook(1, "hook_resid_pre"), x), plain, 1e-5, 1e-4)
    assert not np.allclose(output_with(target, weights, TOKENS, Hook(0, "hook_resid_post"), 2 * x), plain, atol=0.1)
