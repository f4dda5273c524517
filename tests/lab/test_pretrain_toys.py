"""Toy targets: they learn, repeat themselves exactly, notice a lost feature, and say what is wrong."""

import io
import json
from dataclasses import asdict, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner

from param_decomp_jax.targets.features import SparseFeatures
from param_decomp_jax.targets.resid_mlp import ResidMLPConfig
from param_decomp_jax.targets.tms import TMSConfig
from param_decomp_lab.cli import app
from param_decomp_lab.errors import NonFiniteLoss, UserError
from param_decomp_lab.pretrain import toys
from param_decomp_lab.pretrain.recipe import read_recipe
from param_decomp_lab.pretrain.toy_models import ResidMLPToy, TMSToy, make_toy
from param_decomp_lab.pretrain.toy_recipe import ResidMLPRecipe, TMSRecipe, ToyRecipe
from param_decomp_lab.pretrain.toys import Try, ensure_target, pretrain_toy
from param_decomp_lab.weights.target_folder import load_target, save_target

ROOT = Path(__file__).parents[2]
RECIPE = """\
model: {architecture: tms, n_features: 5, n_hidden: 2}
data: {feature_probability: 0.05}
out: OUT
steps: 600
batch_size: 256
optimizer: {lr: 1e-2, schedule: constant, warmup_pct: 0.0, final_val_frac: 1.0, weight_decay: 0.01, betas: [0.9, 0.999],
  clip_norm: null}
log_every: 250
"""
RESID_MLP = {"architecture": "resid_mlp", "n_features": 8, "d_embed": 32, "d_mlp": 6, "n_layers": 2}


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text(RECIPE.replace("OUT", str(tmp_path / "model")))
    return path


@pytest.fixture
def recipe(file):
    return read_recipe(file)


def changed(recipe, **changes) -> ToyRecipe:
    return ToyRecipe.model_validate(recipe.model_dump() | changes)


def console():
    return Console(file=io.StringIO(), width=200)


def assert_equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


# ---- training ----


@pytest.mark.slow
def test_it_learns_repeats_itself_and_is_cached(recipe, file, tmp_path):
    said = console()
    result = pretrain_toy(recipe, console=said)
    assert "seed 0 represents every feature" in said.file.getvalue()
    assert result.tried == (Try(0, ()),)
    assert result.loss < 0.004
    assert result.figures["smallest_output"] > 0.5

    folder = tmp_path / "model"
    names = {"config.json", "model.safetensors", "metrics.jsonl", "recipe.yaml", "summary.json"}
    assert {p.name for p in folder.iterdir()} == names
    assert {p.name for p in tmp_path.iterdir()} == {"model", "r.yaml"}
    logged = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in logged] == [0, 250, 500, 599]
    assert logged[-1]["train/loss/total"] < logged[0]["train/loss/total"] / 2
    assert all(line["train/schedules/lr"] == pytest.approx(1e-2) for line in logged)

    said = console()
    assert ensure_target(file, said) == folder
    assert said.file.getvalue().startswith("cached")
    assert pretrain_toy(recipe, console=console()) == replace(result, cached=True)

    # However many steps a dispatch takes, the weights are the same to the last bit.
    other = pretrain_toy(changed(recipe, out=str(tmp_path / "other"), log_every=7), console=console())
    assert not other.cached
    assert_equal(load_target(other.folder)[1], load_target(folder)[1])

    with pytest.raises(UserError, match=r"(?s)another recipe.*steps: 600 there, 3 here.*--overwrite"):
        pretrain_toy(changed(recipe, steps=3), console=console())
    seeded = pretrain_toy(changed(recipe, seed=1), overwrite=True, console=console())
    assert seeded.seed == 1
    assert not np.array_equal(load_target(folder)[1]["bias"], load_target(other.folder)[1]["bias"])


@pytest.mark.slow
def test_a_tms_is_trained_as_its_recipe_says(recipe):
    """AdamW on the mean of (|x| - out)², with linear2 the transpose of linear1, written out for two steps."""
    recipe = changed(recipe, steps=2, tries=1, model={**recipe.model.model_dump(), "n_features": 3})
    toy = make_toy(recipe)
    of_weights, of_data = toys._keys(0)
    start, fixed = toy.init(of_weights)
    optimizer = toys.make_optimizer(recipe.optimizer, 2)
    run = toys.make_run(toy, optimizer, recipe.batch_size)
    trained, _, loss = run(start, optimizer.init(start), fixed, of_data, 0, 2)

    def loss_of(p, x):
        return jnp.mean((jnp.abs(x) - jax.nn.relu(x @ p["linear1"] @ p["linear1"].T + p["bias"])) ** 2)

    p = start
    mean = jax.tree.map(jnp.zeros_like, p)
    square = mean
    for k in range(2):
        x = SparseFeatures(3, 0.05).batch(of_data, k, recipe.batch_size)
        value, g = jax.value_and_grad(loss_of)(p, x)
        mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, mean, g)
        square = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g * g, square, g)
        a, b = 1 - 0.9 ** (k + 1), 1 - 0.999 ** (k + 1)
        p = jax.tree.map(
            lambda p, m, v, a=a, b=b: p - 1e-2 * (m / a / (jnp.sqrt(v / b) + 1e-8) + 0.01 * p), p, mean, square
        )
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6), trained, p)
    assert float(loss) == pytest.approx(float(value), rel=1e-5)
    assert_equal(toy.weights(trained, fixed)["linear2"], trained["linear1"].T)


@pytest.mark.slow
def test_resid_mlp_learns_and_its_embedding_stays(recipe, tmp_path):
    recipe = changed(recipe, model=RESID_MLP, data={"feature_probability": 0.1}, steps=300)
    result = pretrain_toy(recipe, console=console())
    assert result.unexplained < 0.5 * result.figures["unexplained_without_layers"]
    config, weights = load_target(tmp_path / "model")
    assert config == ResidMLPConfig(8, 32, 6, 2)
    np.testing.assert_allclose(np.linalg.norm(weights["embed"], axis=1), 1, rtol=1e-6)
    assert_equal(weights["embed"], make_toy(recipe).init(toys._keys(0)[0])[1]["embed"])


@pytest.mark.slow
@pytest.mark.parametrize("hidden", ["identity", "random"])
def test_hidden_layers_are_not_trained(recipe, tmp_path, hidden):
    model = {**recipe.model.model_dump(), "n_features": 2, "n_hidden_layers": 2, "hidden_init": hidden, "tied": False}
    recipe = changed(recipe, model=model, steps=200)
    result = pretrain_toy(recipe, console=console())
    _, weights = load_target(tmp_path / "model")
    assert_equal(weights["hidden_layers"], make_toy(recipe).init(toys._keys(result.seed)[0])[1]["hidden_layers"])
    assert np.array_equal(weights["hidden_layers"][0], np.eye(2)) == (hidden == "identity")
    assert not np.allclose(weights["linear2"], weights["linear1"].T)


# ---- lost features ----


@pytest.mark.slow
def test_the_next_seed_is_tried(recipe, tmp_path):
    """Two features through one dimension and a random number m: with m < 0 (seed 0) neither can be represented, with
    both rows of one sign at the start (seed 1) one of them, else (seed 2) both."""
    model = {
        **recipe.model.model_dump(),
        "n_features": 2,
        "n_hidden": 1,
        "n_hidden_layers": 1,
        "hidden_init": "random",
    }
    recipe = changed(recipe, model=model, data={"feature_probability": 0.1})
    starts = [make_toy(recipe).init(toys._keys(seed)[0]) for seed in range(3)]
    assert [float(fixed["hidden_layers"][0, 0, 0]) > 0 for _, fixed in starts] == [False, True, True]
    assert [bool(jnp.prod(start["linear1"]) > 0) for start, _ in starts[1:]] == [True, False]

    said = console()
    result = pretrain_toy(recipe, console=said)
    assert [(t.seed, len(t.lost)) for t in result.tried] == [(0, 2), (1, 1), (2, 0)]
    assert result.seed == 2
    assert "seed 0 lost 2 features: 0, 1\n" in said.file.getvalue()
    assert f"seed 1 lost 1 feature: {result.tried[1].lost[0]}\n" in said.file.getvalue()
    summary = json.loads((tmp_path / "model" / "summary.json").read_text())
    assert summary["seed"] == 2
    assert [t["seed"] for t in summary["tried"]] == [0, 1, 2]
    assert summary["tried"][0]["lost"] == [0, 1]
    assert len((tmp_path / "model" / "metrics.jsonl").read_text().splitlines()) == 4  # of the last try alone

    said = console()
    assert pretrain_toy(recipe, console=said) == replace(result, cached=True)
    assert "seed 0 lost 2 features" in said.file.getvalue()


@pytest.mark.slow
def test_no_seed_represents_nine_features_in_two_dimensions(recipe, tmp_path):
    model = {**recipe.model.model_dump(), "n_features": 9}
    message = r"(?s)no model of 2 tries represents every feature:\n  seed 3 lost \d feature.*\n  seed 4 lost .*`tries`"
    with pytest.raises(UserError, match=message):
        pretrain_toy(changed(recipe, model=model, steps=1000, tries=2, seed=3), console=console())
    assert {p.name for p in tmp_path.iterdir()} == {"r.yaml"}


def pentagon():
    angle = 2 * np.pi * np.arange(5) / 5
    W = 1.13 * np.stack([np.cos(angle), np.sin(angle)], axis=1)
    return {"linear1": jnp.asarray(W), "linear2": jnp.asarray(W.T), "bias": jnp.full(5, -0.25)}


def test_what_counts_as_a_lost_feature_of_a_tms():
    toy = TMSToy(TMSRecipe(architecture="tms", n_features=5, n_hidden=2), SparseFeatures(5, 0.05))
    inputs = toy.features.batch(jax.random.key(0), 0, 1024)
    weights = pentagon()
    assert toy.examine(weights, inputs).lost == ()
    weak = {**weights, "linear1": weights["linear1"].at[3].multiply(0.3)}
    assert toy.examine(weak, inputs).lost == (3,)
    # Untied, the same function with other lengths.
    assert toy.examine({**weak, "linear2": weak["linear2"].at[:, 3].divide(0.3)}, inputs).lost == ()
    # Its output is high whatever the input.
    idle = {**weights, "linear1": weights["linear1"].at[1].set(0), "bias": weights["bias"].at[1].set(0.5)}
    assert toy.examine(idle, inputs).lost == (1,)


@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_what_counts_as_a_lost_feature_of_a_resid_mlp(activation):
    """With an orthogonal embedding and a neuron for each, the layers compute every feature; not so without a neuron."""
    model = ResidMLPRecipe.model_validate(
        RESID_MLP | {"d_embed": 8, "d_mlp": 8, "n_layers": 1, "activation": activation}
    )
    toy = ResidMLPToy(model, SparseFeatures(8, 0.3, low=-1.0))
    inputs = toy.features.batch(jax.random.key(0), 0, 1024)
    one = jnp.eye(8)[None]
    seen = toy.examine({"embed": one[0], "layers": {"mlp_in": one, "mlp_out": one}}, inputs)
    assert seen.lost == ()
    assert seen.loss == pytest.approx(0, abs=1e-12)
    without = {"mlp_in": one, "mlp_out": one.at[0, 5, 5].set(0.2)}
    assert toy.examine({"embed": one[0], "layers": without}, inputs).lost == (5,)


# ---- mistakes ----


def test_a_loss_that_is_not_finite_leaves_nothing(recipe, tmp_path):
    wild = {**recipe.optimizer.model_dump(), "lr": 1e30}
    with pytest.raises(NonFiniteLoss, match=r"the loss is .* at step \d+; a smaller optimizer\.lr"):
        pretrain_toy(changed(recipe, optimizer=wild, log_every=1), console=console())
    assert {p.name for p in tmp_path.iterdir()} == {"r.yaml"}


def test_a_folder_of_something_else_is_left_alone(recipe, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "thesis.tex").write_text("")
    with pytest.raises(UserError, match=r"holds no summary\.json"):
        pretrain_toy(recipe, overwrite=True, console=console())


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("n_hidden: 2", "n_hiden: 2", r"model: unknown key 'n_hiden'|n_hiden.*did you mean 'n_hidden'"),
        ("n_hidden: 2", "n_hidden: 2, hidden_init: random", r"model\.hidden_init: has no effect without hidden layers"),
        ("n_hidden: 2", "n_hidden: 2, n_hidden_layers: 1", r"model\.hidden_init: is required with hidden layers"),
        ("n_hidden: 2", "n_hidden: 2, d_mlp: 3", r"model\.d_mlp: unknown key"),
        ("architecture: tms", "architecture: resid_mlp", r"model\.n_hidden: unknown key.*valid: .*d_embed"),
        ("tms, n_features: 5, n_hidden: 2", "resid_mlp, n_features: 5", r"(?s)model\.d_embed: is req.*model\.n_layers"),
        ("architecture: tms", "architecture: tmz", r"model\.architecture: unknown .*'tmz'; did you mean 'tms'"),
        ("architecture: tms, ", "", r"model\.architecture: is required: one of llama, gpt, family, tms, resid_mlp"),
        ("architecture: tms", "architecture: llama", r"data: should be a folder .*; a mapping is for toys"),
        ("data: {feature_probability: 0.05}", "data: data/demo", r"data: a toy draws its data: .*not 'data/demo'"),
        ("0.05", "0.0", r"data\.feature_probability: must be above 0"),
        ("0.05", "0.05, data_generation_type: some", r"data\.data_generation_type"),
        ("steps: 600", "steps: 600\neval: {every: 1, batches: 1}", r"eval: 'eval' is for language models"),
        ("steps: 600", "steps: 600\nlayers: scan", r"layers: 'layers' is for language models"),
        ("steps: 600", "steps: 600\ntrys: 3", r"trys: unknown key 'trys'; did you mean 'tries'"),
    ],
)  # fmt: skip
def test_bad_recipes(file, old, new, message):
    file.write_text(file.read_text().replace(old, new))
    with pytest.raises(UserError, match=message) as caught:
        read_recipe(file)
    assert "r.yaml" in str(caught.value)


def test_tries_are_for_toys(file):
    file.write_text((ROOT / "configs/demo/pretrain.yaml").read_text() + "tries: 3\n")
    with pytest.raises(UserError, match="tries: 'tries' is for toys"):
        read_recipe(file)
    with pytest.raises(UserError, match=r"should be a toy's \(tms, resid_mlp\), not llama"):
        ensure_target(ROOT / "configs/demo/pretrain.yaml", console())


def test_recipes_at_hand():
    recipes = {path.stem: read_recipe(path) for path in (ROOT / "configs/toys/targets").glob("*.yaml")}
    assert len(recipes) == 7
    for name, recipe in recipes.items():
        assert isinstance(recipe, ToyRecipe)
        assert recipe.out == f"runs/targets/{name}"


def test_pd_pretrain(file, tmp_path):
    result = CliRunner().invoke(app, ["pretrain", str(file)])
    assert result.exit_code == 0, result.output
    assert "represents every feature" in result.output
    assert "cached" in CliRunner().invoke(app, ["pretrain", str(file)]).output
    assert load_target(tmp_path / "model")[0] == TMSConfig(5, 2)


# ---- folders ----

CONFIGS = [
    TMSConfig(5, 2),
    TMSConfig(4, 3, 2),
    ResidMLPConfig(6, 4, 3, 2),
    ResidMLPConfig(6, 4, 3, 3, "gelu", in_bias=True, out_bias=True),
]


def random_weights(config):
    shapes = config.weight_shapes()
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda s: rng.normal(size=s).astype(np.float32), shapes, is_leaf=lambda x: isinstance(x, tuple))


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_save_and_load(config, tmp_path):
    weights = random_weights(config)
    save_target(tmp_path / "toy", config, weights)
    loaded_config, loaded = load_target(tmp_path / "toy")
    assert loaded_config == config
    assert jax.tree.structure(loaded) == jax.tree.structure(weights)
    assert_equal(loaded, weights)
    assert {p.name for p in (tmp_path / "toy").iterdir()} == {"config.json", "model.safetensors"}


def test_names_in_the_files(tmp_path):
    save_target(tmp_path, TMSConfig(4, 3, 2), random_weights(TMSConfig(4, 3, 2)))
    shapes = {name: tensor.shape for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    assert shapes == {
        "linear1": (4, 3), "linear2": (3, 4), "bias": (4,), "hidden_layers.0": (3, 3), "hidden_layers.1": (3, 3)
    }  # fmt: skip
    assert json.loads((tmp_path / "config.json").read_text()) == {"architecture": "tms"} | asdict(TMSConfig(4, 3, 2))
    config = ResidMLPConfig(6, 4, 3, 1, in_bias=True, out_bias=True)
    save_target(tmp_path, config, random_weights(config))
    shapes = {name: tensor.shape for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    assert shapes == {
        "W_E": (6, 4), "layers.0.mlp_in": (4, 3), "layers.0.mlp_out": (3, 4), "layers.0.in_bias": (3,),
        "layers.0.out_bias": (4,),
    }  # fmt: skip


def edit_tensors(folder, edit):
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


def edit_config(folder, **changes):
    raw = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({key: value for key, value in raw.items() if value is not None}))


BROKEN = [
    (lambda f: (f / "config.json").unlink(), r"no config\.json in .*pd pretrain"),
    (lambda f: (f / "model.safetensors").unlink(), r"has no model\.safetensors and no"),
    (lambda f: (f / "model.safetensors").write_bytes(b"12"), "not a whole safetensors file"),
    (lambda f: (f / "config.json").write_text("{"), "not valid JSON"),
    (lambda f: (f / "config.json").write_text("[]"), "should be an object"),
    (lambda f: edit_config(f, architecture="gpt"), "model_type is 'gpt'; what can be loaded is .*tms, resid_mlp"),
    (lambda f: edit_config(f, architecture=None), "model_type is None; what can be loaded"),
    (lambda f: edit_config(f, n_hidden=None), "n_hidden: is required"),
    (lambda f: edit_config(f, n_hiden=2), "unknown key 'n_hiden'"),
    (lambda f: edit_config(f, n_hidden=3), r"linear1 has shape \[5, 2\], config.json implies \[5, 3\]"),
    (lambda f: edit_config(f, n_hidden_layers=1), r"no tensor hidden_layers\.0.*shape \[2, 2\]"),
    (lambda f: edit_tensors(f, lambda t: t.pop("bias")), "no tensor bias"),
    (lambda f: edit_tensors(f, lambda t: t.update(bias2=t["bias"])), r"the tensor bias2 \(1 such\) has no place"),
]


@pytest.mark.parametrize(("edit", "message"), BROKEN, ids=[message for _, message in BROKEN])
def test_broken_folders(tmp_path, edit, message):
    save_target(tmp_path, TMSConfig(5, 2), random_weights(TMSConfig(5, 2)))
    edit(tmp_path)
    with pytest.raises(UserError, match=message):
        load_target(tmp_path)
