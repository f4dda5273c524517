"""Edited targets: what the folder's network computes, against masks; what cannot be edited."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from param_decomp_lab.errors import UserError
from param_decomp_lab.export.edit import edited_weights, export_edited
from param_decomp_lab.opening import Run, load_run
from param_decomp_lab.runs.forward import clean
from param_decomp_lab.weights.target_folder import load_target
from tests.lab.tiny_run import pd_here

TEXT = "def f(x):"
CHOSEN = {"layers.1.mlp.up_proj": [3, 7], "layers.0.mlp.down_proj": [5]}


@pytest.fixture(scope="module")
def run(finished: Path) -> Run:
    return load_run(finished)


def by_masks(run: Run, scale: float) -> np.ndarray:
    """The same components scaled, everything else on, the delta too."""
    masks = {name: np.ones(run.sites[name].C) for name in CHOSEN}
    for name, numbers in CHOSEN.items():
        masks[name][numbers] = scale
    return np.asarray(run.logits(TEXT, masks, delta=1))


@pytest.mark.parametrize("scale", [0.0, -1.5])
def test_the_folder_computes_what_masks_do(run: Run, tmp_path: Path, scale: float) -> None:
    edit = export_edited(run, CHOSEN, scale, tmp_path / "edited", dtype="float32", rows=4, prompts=(TEXT,))
    architecture, weights = load_target(tmp_path / "edited")
    assert architecture == run.architecture
    assert run.text is not None
    tokens = jnp.asarray([run.text.ids(TEXT)], jnp.int32)
    logits = np.asarray(jax.jit(clean, static_argnums=0)(run.problem, weights, tokens))[0]
    np.testing.assert_allclose(logits, by_masks(run, scale), atol=2e-5)
    assert abs(logits - np.asarray(run.logits(TEXT))).max() > 1e-3
    assert edit.kl is not None
    assert edit.kl > 0
    [told] = edit.prompts
    shown = {name: after for name, _, after in told.tokens}
    p = np.exp(logits[-1].astype(np.float64) - logits[-1].max())
    for name, share in zip(run.text.tokens(np.argsort(-p)[:2].tolist()), np.sort(p / p.sum())[::-1][:2], strict=True):
        assert shown[name] == pytest.approx(share, rel=1e-3)
    assert json.loads((tmp_path / "edited" / "edit.json").read_text())["components"] == CHOSEN
    other = [name for name in run.sites if name not in CHOSEN]
    changed = edited_weights(run, CHOSEN, scale)
    for (path, new), old in zip(
        jax.tree_util.tree_leaves_with_path(changed), jax.tree.leaves(run.weights), strict=True
    ):
        kind = path[-1].key
        assert (np.asarray(new) != np.asarray(old, np.float32)).any() == (kind in ("up_proj", "down_proj")), (
            kind,
            other,
        )


def test_the_command(run: Run, finished: Path, tmp_path: Path) -> None:
    out = tmp_path / "edited"
    arguments = ("export", finished, "--out", out, "--edit", "layers.1.mlp.up_proj:3", "--rows", "2", "--prompt", TEXT)
    told = pd_here(*arguments)
    assert told.status == 0, told
    assert "1 component times 0; KL from the original" in told.out
    again = pd_here(*arguments)
    assert again.status == 2
    assert "exists and is not empty" in again.err


@pytest.mark.slow
def test_a_toy(toy: Path, tmp_path: Path) -> None:
    run = load_run(toy / "p-00000001")
    site = next(iter(run.sites))
    edit = export_edited(run, f"{site}:1", 0.0, tmp_path / "toy", prompts=("1=0.5",))
    assert edit.kl is None
    _, weights = load_target(tmp_path / "toy")
    V, U = run.factors(site)
    np.testing.assert_allclose(weights["linear1"], run.matrix(site) - np.outer(V[:, 1], U[1]), atol=1e-6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--edit", "layers.1.mlp.up_proj"), "should be SITE:NUMBER"),
        (("--edit", "layers.1.mlp.up_proj:99"), "no component 99"),
        (("--edit", "layers.1.mlp.up_proj:1", "--dtype", "int8"), "--dtype int8 should be one of"),
        (("--prompt", "x"), "go with --edit"),
    ],
)
def test_what_cannot_be_edited(finished: Path, tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    told = pd_here("export", finished, "--out", tmp_path / "edited", *arguments)
    assert told.status == 2
    assert message in told.err
    assert not (tmp_path / "edited").exists()


def test_a_position_is_no_part_of_an_edit(run: Run, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="leave out @0"):
        export_edited(run, "layers.1.mlp.up_proj:1@0", 0.0, tmp_path / "edited")
