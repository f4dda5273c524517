"""GPT: against a reference in NumPy, the same numbers however it is computed, the step compiled with no weight there,
and its folder."""

import json
import math
from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.extend.core import jaxprs_in_params
from safetensors.numpy import load_file, save_file

from param_decomp_jax.targets import gpt
from param_decomp_jax.targets.gpt import GPTComputation, GPTConfig, gpt_logits
from param_decomp_lab.errors import UserError
from param_decomp_lab.pretrain import pretrain
from param_decomp_lab.pretrain.models import language_model
from param_decomp_lab.pretrain.program import cross_entropy, make_step, step_program
from param_decomp_lab.pretrain.recipe import PretrainRecipe, read_recipe
from param_decomp_lab.weights.target_folder import load_target, save_target
from tests.lab.test_pretrain import console, data  # noqa: F401

ROOT = Path(__file__).parents[2]
LADDER = sorted((ROOT / "configs" / "ladder").glob("*.yaml"))
CONFIG = GPTConfig(vocab_size=11, n_positions=7, d_model=8, n_layers=2, n_heads=2, d_mlp=12, dropout=0.25)
TOKENS = jnp.asarray(np.random.default_rng(1).integers(0, 11, (4, 7)).astype(np.int32))
RECIPE = {
    "model": {"architecture": "gpt", "d_model": 16, "n_layers": 2, "n_heads": 2, "d_mlp": 32, "dropout": 0.1},
    "data": "DATA", "out": "OUT", "steps": 30, "batch_size": 8, "micro_batches": 2,
    "optimizer": {"lr": 3e-2, "warmup_pct": 0.1}, "eval": {"every": 10, "batches": 2}, "log_every": 7,
}  # fmt: skip
NO_DROPOUT = RECIPE["model"] | {"dropout": 0.0}
LLAMA = {"architecture": "llama", "d_model": 16, "n_layers": 2, "n_heads": 2, "n_kv_heads": 1, "d_mlp": 32}


def weights_of(config):
    """Not those of the initialisation, whose biases are 0."""
    rng = np.random.default_rng(0)

    def draw(shape):
        return jnp.asarray(rng.normal(0, 0.5, shape), jnp.float32)

    return jax.tree.map(draw, config.weight_shapes(), is_leaf=lambda x: isinstance(x, tuple))


def recipe_of(**changes) -> PretrainRecipe:
    return PretrainRecipe.model_validate(RECIPE | changes)


def reference(w, config, tokens):
    """One sequence at a time, in float64, as the architecture is described."""

    def norm(x, scale, bias):
        return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + config.norm_eps) * scale + bias

    def gelu(x):
        return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))

    w = jax.tree.map(lambda a: np.asarray(a, np.float64), w)
    found, head_dim = [], config.d_model // config.n_heads
    for sequence in tokens:
        x = w["embed"][sequence] + w["positions"][: len(sequence)]
        for n in range(config.n_layers):
            of = {name: array[n] for name, array in w["layers"].items()}
            h = norm(x, of["mlp_norm"], of["mlp_norm_bias"])
            x = x + gelu(h @ of["mlp_in"] + of["mlp_in_bias"]) @ of["mlp_out"] + of["mlp_out_bias"]
            h = norm(x, of["attention_norm"], of["attention_norm_bias"])
            q, k, v = (h @ of[f"{name}_proj"] + of[f"{name}_proj_bias"] for name in "qkv")
            read = np.zeros_like(x)
            for head in range(config.n_heads):
                part = slice(head * head_dim, (head + 1) * head_dim)
                for t in range(len(sequence)):
                    scores = np.exp(k[: t + 1, part] @ q[t, part] / math.sqrt(head_dim))
                    read[t, part] = scores / scores.sum() @ v[: t + 1, part]
            x = x + read @ of["o_proj"] + of["o_proj_bias"]
        found.append(norm(x, w["norm"], w["norm_bias"]) @ w["head"] + w["head_bias"])
    return np.stack(found)


@pytest.mark.parametrize("layers", ["scan", "unroll"])
def test_logits_are_those_of_the_reference(layers):
    weights = weights_of(CONFIG)
    for tokens in (TOKENS, TOKENS[:, :5]):
        found = gpt_logits(weights, CONFIG, tokens, GPTComputation(layers=layers))
        np.testing.assert_allclose(found, reference(weights, CONFIG, tokens), rtol=2e-4, atol=2e-5)


def test_the_ladder_has_155_877_376_parameters():
    assert len(LADDER) == 7
    for path in LADDER:
        recipe = read_recipe(path)
        assert isinstance(recipe, PretrainRecipe)
        (weights, moments, tokens, _) = step_program(recipe, 512)[1]
        assert sum(x.size for x in jax.tree.leaves(weights)) == 155_877_376
        assert sum(x.size for x in jax.tree.leaves(moments)) == pytest.approx(2 * 155_877_376, abs=8)
        assert {x.dtype for x in jax.tree.leaves(weights)} == {jnp.dtype("float32")}
        assert tokens.shape == (recipe.batch_size, 512)
        assert recipe.out == f"runs/ladder/{path.stem}"


# ---- the same numbers however it is computed ----


def loss_of(how, key):
    def loss(weights):
        logits = gpt_logits(weights, CONFIG, jnp.asarray(TOKENS), how, key)
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], TOKENS[:, 1:]))

    return loss


@cache
def gradients(how):
    """With dropout, the same each time."""
    return jax.jit(jax.value_and_grad(loss_of(how, jax.random.key(3))))(weights_of(CONFIG))


def assert_close(found, wanted):
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), found, wanted)


@pytest.mark.parametrize(
    ("remat", "layers"),
    [
        pytest.param(("mlp", "attention"), "scan", marks=pytest.mark.slow),
        pytest.param(("block",), "unroll", marks=pytest.mark.slow),
        pytest.param(("mlp", "attention"), "unroll", marks=pytest.mark.slow),
        pytest.param(("block",), "scan", marks=pytest.mark.slow),
    ],
)
def test_what_is_recomputed_changes_no_number(remat, layers):
    """Dropout is drawn again, and is the same."""
    assert_close(gradients(GPTComputation(layers=layers, remat=frozenset(remat))), gradients(GPTComputation()))


@pytest.mark.slow
def test_what_is_recomputed_is_not_kept():
    """Block keeps less than MLP and attention, these less than one of them, that less than nothing recomputed."""

    def kept(how):
        pullback = jax.eval_shape(lambda w: jax.vjp(loss_of(how, jax.random.key(0)), w)[1], weights_of(CONFIG))
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(pullback))

    sets = [{"block"}, {"mlp", "attention"}, {"attention"}, set()]
    for layers in ("scan", "unroll"):
        found = [kept(GPTComputation(layers=layers, remat=frozenset(remat))) for remat in sets]
        assert found == sorted(found)
        assert len(set(found)) == 4


def sgd_steps(recipe, *batches):
    """After one step of plain descent on each (tokens, number of the step), always from the same weights: the loss, and
    the gradient as the difference that it made."""
    model, descent = language_model(recipe, 7, 11), optax.sgd(1.0)
    weights = jax.jit(model.init)(jax.random.key(5))
    step = make_step(recipe, model, descent)
    for tokens, k in batches:
        before = jax.tree.map(jnp.copy, weights)
        after, _, loss = step(before, descent.init(before), tokens, np.int32(k))
        yield float(loss), jax.tree.map(lambda a, b: a - b, weights, after)


@pytest.mark.parametrize(
    ("model", "layers"),
    [
        pytest.param(NO_DROPOUT, "scan", id="gpt-scan", marks=pytest.mark.slow),
        pytest.param(LLAMA, "unroll", id="llama-unroll", marks=pytest.mark.slow),
        pytest.param(NO_DROPOUT, "unroll", id="gpt-unroll", marks=pytest.mark.slow),
        pytest.param(LLAMA, "scan", id="llama-scan", marks=pytest.mark.slow),
    ],
)
def test_micro_batches_give_the_gradient_of_the_batch(model, layers):
    remat = "block" if layers == "scan" else "none"
    parts = recipe_of(model=model, layers=layers, remat=remat, batch_size=4, micro_batches=2)
    whole = recipe_of(model=model, layers=layers, batch_size=4, micro_batches=1)
    (found,), (wanted,) = (sgd_steps(recipe, (TOKENS, 0)) for recipe in (parts, whole))
    assert_close(found, wanted)


@pytest.mark.slow
def test_dropout_depends_on_seed_step_and_micro_batch():
    recipe = recipe_of(batch_size=4, micro_batches=1)
    (loss, _), (again, _), (next_step, _) = sgd_steps(recipe, (TOKENS, 0), (TOKENS, 0), (TOKENS, 1))
    assert again == loss != next_step
    ((other_seed, _),) = sgd_steps(recipe_of(batch_size=4, micro_batches=1, seed=1), (TOKENS, 0))
    assert other_seed != loss
    # The same rows twice, one half after the other, which are the same batch but for what is dropped.
    ((halves, _),) = sgd_steps(recipe_of(batch_size=8, micro_batches=2), (np.tile(TOKENS, (2, 1)), 0))
    assert abs(halves - loss) > 1e-5


def test_dropped():
    x = gpt._dropped(jnp.full((100, 100), 3.0), 0.25, jax.random.key(0))
    assert set(np.unique(x)) == {0.0, 4.0}
    assert float(x.mean()) == pytest.approx(3.0, rel=0.03)
    np.testing.assert_array_equal(gpt._dropped(x, 0.25, None), x)


def equations(jaxpr):
    for equation in jaxpr.eqns:
        yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from equations(inner)


@pytest.mark.parametrize("softmax_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_precision(dtype, softmax_dtype):
    """Products have inputs in ``dtype``, exponentials of scores are in ``softmax_dtype``, logits come out in fp32."""

    def forward(weights):
        how = GPTComputation(jnp.dtype(dtype), jnp.dtype(softmax_dtype), layers="unroll")
        return gpt_logits(weights, CONFIG, jnp.asarray(TOKENS), how)

    weights = weights_of(CONFIG)
    found = forward(weights)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, reference(weights, CONFIG, TOKENS), atol=0.3)
    steps = list(equations(jax.make_jaxpr(forward)(weights).jaxpr))
    products = [e.invars for e in steps if e.primitive.name == "dot_general"]
    assert len(products) == 8 * CONFIG.n_layers + 1
    assert {x.aval.dtype for inputs in products for x in inputs} == {jnp.dtype(dtype)}
    exponentials = [e.outvars[0].aval.dtype for e in steps if e.primitive.name == "exp"]
    assert exponentials == [jnp.dtype(softmax_dtype)] * CONFIG.n_layers


@pytest.mark.slow
def test_a_llama_in_bfloat16_keeps_its_weights_in_fp32():
    recipe = recipe_of(model=LLAMA, dtype="bfloat16", batch_size=4)
    ((_, gradient),) = sgd_steps(recipe, (TOKENS, 0))
    ((_, wanted),) = sgd_steps(recipe_of(model=LLAMA, batch_size=4), (TOKENS, 0))
    assert {x.dtype for x in jax.tree.leaves(gradient)} == {jnp.dtype("float32")}
    of, wanted_of = gradient["layers"]["up_proj"], wanted["layers"]["up_proj"]
    assert 0 < np.abs(of - wanted_of).max() < 0.05 * np.abs(wanted_of).max()


# ---- the program ----


@pytest.mark.slow
def test_the_pretrainer_runs_the_step_that_is_compiled_without_weights(data, tmp_path, monkeypatch):  # noqa: F811
    """The same text, lowered from shapes and from what `pd pretrain` calls it with."""

    class Seen(Exception):
        pass

    def watched(*of):
        step = make_step(*of)

        def run(*arguments):
            raise Seen(step.lower(*arguments).as_text())

        return run

    monkeypatch.setattr(pretrain, "make_step", watched)
    for model in (RECIPE["model"], LLAMA):
        recipe = recipe_of(model=model, data=str(data), out=str(tmp_path / "model"))
        with pytest.raises(Seen) as seen:
            pretrain.run_pretrain(recipe, console=console())
        step, arguments = step_program(recipe, 32, 256)
        assert step.lower(*arguments).as_text() == seen.value.args[0]


def test_no_vocabulary(tmp_path):
    with pytest.raises(UserError, match=r"model\.vocab_size: is required"):
        step_program(recipe_of(), 32)


# ---- folders ----


def test_it_learns_and_its_folder_gives_the_same_logits(data, tmp_path):  # noqa: F811
    recipe = recipe_of(data=str(data), out=str(tmp_path / "model"))
    result = pretrain.run_pretrain(recipe, console=console())
    assert result.held_out < result.unigram_entropy - 0.5
    names = {"config.json", "model.safetensors", "meta.json", "metrics.jsonl", "recipe.yaml", "summary.json"}
    assert {p.name for p in result.folder.iterdir()} == names
    assert pretrain.run_pretrain(recipe, console=console()).cached

    config, weights = load_target(result.folder)
    model = language_model(recipe, 32, 256)
    assert config == model.config
    held_out = pretrain.Batches(pretrain.TokenData(data / "eval"), 8, 0)
    losses = [cross_entropy(model, weights, jnp.asarray(held_out[n])) for n in range(2)]
    assert np.mean(losses) == pytest.approx(result.held_out, rel=1e-5)

    with pytest.raises(UserError, match=r"(?s)another recipe.*micro_batches: 2 there, \(absent\) here"):
        pretrain.run_pretrain(recipe.model_copy(update={"micro_batches": 1}), console=console())


def test_what_is_saved_is_loaded(tmp_path):
    weights = weights_of(CONFIG)
    save_target(tmp_path, CONFIG, weights)
    config, found = load_target(tmp_path)
    assert config == CONFIG
    jax.tree.map(np.testing.assert_array_equal, found, weights)
    np.testing.assert_array_equal(*(gpt_logits(w, CONFIG, TOKENS, GPTComputation()) for w in (found, weights)))


def test_bad_folders(tmp_path):
    with pytest.raises(UserError, match=r"no config\.json in .*`pd pretrain` made"):
        load_target(tmp_path)
    save_target(tmp_path, CONFIG, weights_of(CONFIG))
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {"layers.2.q_proj": tensors["layers.1.q_proj"]}, file)
    with pytest.raises(UserError, match=r"layers\.2\.q_proj \(1 such\) has no place"):
        load_target(tmp_path)
    save_file({name: tensor for name, tensor in tensors.items() if name != "layers.1.q_proj"}, file)
    with pytest.raises(UserError, match=r"no tensor layers\.1\.q_proj"):
        load_target(tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(settings | {"model_type": "gpt2"}))
    with pytest.raises(UserError, match=r"lacks the key 'n_head', which a GPT-2 configuration has"):
        load_target(tmp_path)


def test_a_vocabulary_smaller_than_the_datas(data, tmp_path):  # noqa: F811
    recipe = recipe_of(data=str(data), out=str(tmp_path / "m"), model=RECIPE["model"] | {"vocab_size": 255}, steps=1)
    with pytest.raises(UserError, match=r"model\.vocab_size: is 255, but the data has token ids up to 255"):
        pretrain.run_pretrain(recipe, console=console())


def test_heads_must_divide(tmp_path):
    with pytest.raises(ValueError, match="must divide d_model"):
        recipe_of(model=RECIPE["model"] | {"n_heads": 3})
