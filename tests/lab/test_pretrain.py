"""Pretraining: it learns, it repeats itself exactly, it leaves whole folders or none, and it says what is wrong."""

import io
import json
from dataclasses import replace

import jax
import numpy as np
import pytest
from rich.console import Console

from param_decomp_lab.data.pieces import Document
from param_decomp_lab.data.text import TokenText
from param_decomp_lab.data.tokenize import tokenize_documents
from param_decomp_lab.errors import NonFiniteLoss, UserError
from param_decomp_lab.pretrain import pretrain
from param_decomp_lab.pretrain.models import TransformerModel, language_model
from param_decomp_lab.pretrain.optimizer import make_optimizer
from param_decomp_lab.pretrain.pretrain import run_pretrain
from param_decomp_lab.pretrain.program import cross_entropy, make_step
from param_decomp_lab.pretrain.recipe import PretrainRecipe, read_recipe
from param_decomp_lab.weights.target_folder import load_target

RECIPE = """
model: {architecture: llama, d_model: 16, n_layers: 2, n_heads: 2, n_kv_heads: 1, d_mlp: 32}
data: DATA
out: OUT
steps: 30
batch_size: 8
optimizer: {lr: 3e-2, warmup_pct: 0.1}
eval: {every: 10, batches: 2}
log_every: 7
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "tokens"
    documents = [
        Document(f"d{i}", f"the cat {i} sat on the mat and the dog {i} sat on the log. " * 4) for i in range(99)
    ]
    tokenize_documents(documents, folder, seq_len=32, eval_fraction=0.1, sources=("test",))
    return folder


@pytest.fixture
def recipe(data, tmp_path):
    (tmp_path / "r.yaml").write_text(RECIPE.replace("DATA", str(data)).replace("OUT", str(tmp_path / "model")))
    return read_recipe(tmp_path / "r.yaml")


def changed(recipe, **changes) -> PretrainRecipe:
    return PretrainRecipe.model_validate(recipe.model_dump() | changes)


def console():
    return Console(file=io.StringIO(), width=200)


def test_it_learns_saves_repeats_itself_and_is_cached(recipe, tmp_path):
    said = console()
    result = run_pretrain(recipe, console=said)
    assert f"held-out cross-entropy {result.held_out:.3f}" in said.file.getvalue()
    assert f"unigram entropy {result.unigram_entropy:.3f}" in said.file.getvalue()
    assert result.held_out < result.unigram_entropy

    folder = tmp_path / "model"
    names = {"config.json", "model.safetensors", "meta.json", "metrics.jsonl", "recipe.yaml", "summary.json"}
    assert {p.name for p in folder.iterdir()} == names
    assert {p.name for p in tmp_path.iterdir()} == {"model", "r.yaml"}
    assert TokenText(folder).tokens([104, 105]) == ["h", "i"]

    logged = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = {line["step"]: line["train/loss/total"] for line in logged if "train/loss/total" in line}
    assert list(losses) == [0, 7, 14, 21, 28, 29]
    assert losses[29] < losses[0] - 1
    assert [line["step"] for line in logged if "eval/ce" in line] == [9, 19, 29]

    said = console()
    again = run_pretrain(recipe, console=said)
    assert again == replace(result, cached=True)
    assert said.file.getvalue().startswith("cached")

    other = run_pretrain(changed(recipe, out=str(tmp_path / "other")), console=console())
    assert not other.cached
    jax.tree.map(np.testing.assert_array_equal, load_target(other.folder)[1], load_target(folder)[1])

    with pytest.raises(UserError, match=r"(?s)another recipe.*steps: 30 there, 31 here.*--overwrite"):
        run_pretrain(changed(recipe, steps=31), console=console())
    # Folders made before there was this key are those of recipes that do not give it.
    assert "dtype" not in (folder / "recipe.yaml").read_text()
    with pytest.raises(UserError, match=r"(?s)another recipe.*dtype: \(absent\) there, bfloat16 here"):
        run_pretrain(changed(recipe, dtype="bfloat16"), console=console())
    assert not run_pretrain(changed(recipe, steps=3), overwrite=True, console=console()).cached
    assert {p.name for p in tmp_path.iterdir()} == {"model", "other", "r.yaml"}


@pytest.mark.slow
def test_the_saved_model_is_the_one_evaluated(recipe):
    result = run_pretrain(changed(recipe, steps=5, layers="unroll"), console=console())
    config, weights = load_target(result.folder)
    model = language_model(recipe, 32, 256)
    assert isinstance(model, TransformerModel)
    assert config == model.config
    batches = pretrain.Batches(pretrain.TokenData(f"{recipe.data}/eval"), recipe.batch_size, recipe.seed)
    losses = [cross_entropy(model, weights, jax.numpy.asarray(batches[n])) for n in range(2)]
    assert np.mean(losses) == pytest.approx(result.held_out, rel=1e-5)


def test_the_step_reuses_its_buffers(recipe):
    model, optimizer = language_model(recipe, 32, 256), make_optimizer(recipe.optimizer, 30)
    weights = model.init(jax.random.key(0))
    state = optimizer.init(weights)
    make_step(recipe, model, optimizer)(weights, state, np.zeros((8, 32), np.int32), np.int32(0))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves((weights, state)))


@pytest.mark.slow
def test_norms_are_not_decayed(recipe):
    weights = language_model(recipe, 32, 256).init(jax.random.key(0))
    optimizer = make_optimizer(recipe.optimizer, 30)
    zeros = jax.tree.map(np.zeros_like, weights)
    _, state = optimizer.update(zeros, optimizer.init(weights), weights)  # the first learning rate is 0
    updates, _ = optimizer.update(zeros, state, weights)
    moved = {jax.tree_util.keystr(path) for path, u in jax.tree_util.tree_leaves_with_path(updates) if np.any(u)}
    assert not any("norm" in name for name in moved)
    assert len(moved) == 9


def test_a_loss_that_is_not_finite_leaves_nothing(recipe, tmp_path):
    wild = changed(recipe, optimizer={"lr": 1e30, "clip_norm": None})
    with pytest.raises(NonFiniteLoss, match=r"the loss is .* at step \d+; a smaller optimizer\.lr"):
        run_pretrain(wild, console=console())
    assert {p.name for p in tmp_path.iterdir()} == {"r.yaml"}


def test_an_interruption_leaves_nothing(recipe, tmp_path, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(TransformerModel, "save", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run_pretrain(changed(recipe, steps=1), console=console())
    assert {p.name for p in tmp_path.iterdir()} == {"r.yaml"}


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("d_model: 16", "d_modle: 16", r"model: unknown key 'd_modle'|d_modle.*did you mean 'd_model'"),
        ("steps: 30", "steps: many", "steps"),
        ("steps: 30", "", "steps: is required"),
        ("n_kv_heads: 1", "n_kv_heads: 3", "n_kv_heads: must divide n_heads"),
        ("architecture: llama", "architecture: gtp", "did you mean 'gpt'"),
        ("steps: 30", "steps: 30\nsoftmax_dtype: bfloat16", "softmax_dtype: should be float32; others are for"),
        ("steps: 30", "steps: 30\nremat: [mlp]", "remat: should be none or block; parts of a layer are for"),
        ("steps: 30", "steps: 30\nremat: [mpl]", r"remat: should be none, block, or a list of mlp and attention, not"),
        ("steps: 30", "steps: 30\nmicro_batches: 3", r"micro_batches: must divide batch_size \(8\), not 3"),
        ("steps: 30", "steps: 30\ndtype: float16", "dtype: should be 'float32' or 'bfloat16'"),
        ("lr: 3e-2", "lr: 3e-2, schedule: constant", r"final_val_frac: must be 1\.0"),
    ],
)
def test_bad_recipes(tmp_path, old, new, message):
    (tmp_path / "r.yaml").write_text(RECIPE.replace(old, new))
    with pytest.raises(UserError, match=message) as caught:
        read_recipe(tmp_path / "r.yaml")
    assert "r.yaml" in str(caught.value)


def test_bad_data(recipe, tmp_path):
    with pytest.raises(UserError, match=r"no meta\.json"):
        run_pretrain(changed(recipe, data=str(tmp_path)), console=console())
    with pytest.raises(UserError, match="less than one batch"):
        run_pretrain(changed(recipe, batch_size=10_000), console=console())
    with pytest.raises(UserError, match=r"eval\.batches: 500 batches.*at most"):
        run_pretrain(changed(recipe, eval={"every": 1, "batches": 500}), console=console())
