"""`load_run`: what an opened run says is what the reference says of the arrays in its checkpoint."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import param_decomp_lab
from param_decomp_jax.targets.tms import TMSConfig
from param_decomp_jax.targets.transformer import language_logits
from param_decomp_lab import load_run
from param_decomp_lab.errors import UserError
from param_decomp_lab.opening import Run
from param_decomp_lab.runs.target_file import read_target
from param_decomp_lab.weights.recorded_target import describe
from param_decomp_lab.weights.target_folder import load_target, save_target
from tests import reference as ref
from tests.core import tiny as core
from tests.lab.tiny_run import (
    ARCHITECTURE,
    BATCH,
    EARLY,
    LATE,
    SAVE_EVERY,
    SEQ_LEN,
    SITES,
    STEPS,
    Tiny,
    saved_arrays,
)

UP, DOWN = "layers.0.mlp.up_proj", "layers.1.mlp.down_proj"
TOKENS = np.random.default_rng(3).integers(0, 256, (3, SEQ_LEN))


@pytest.fixture(scope="module")
def run(finished: Path) -> Run:
    return load_run(finished)


class Reference:
    """The same run in NumPy float64, on some inputs, from the arrays of its checkpoint."""

    def __init__(self, run: Run, inputs: np.ndarray) -> None:
        sites = run.problem.target.sites
        self.target = core.ref_target(run.problem.target, run.weights, inputs)
        self.components = ref.tie(core.ref_components(run.learned.components, sites), sites.tied)
        self.clean = ref.clean_pass(self.target, list(run.sites))
        ci = core.ref_ci(run.ci, sites)
        config = core.schema(run.problem)
        self.lower, self.upper = ref.causal_importance(config, ci, self.clean.inputs, self.components)
        self.logits = ref.ci_logits(config["ci_config"], ci, self.clean.inputs, self.components)

    def output(self, masks: dict[str, Any], delta: float = 0.0) -> np.ndarray:
        lead = next(iter(self.lower.values())).shape[:-1]
        wide = {s: np.broadcast_to(np.asarray(m, float), self.lower[s].shape) for s, m in masks.items()}
        return ref.masked_pass(self.target, self.components, wide, dict.fromkeys(masks, np.full(lead, delta)), {})[0]


@pytest.fixture(scope="module")
def expected(run: Run) -> Reference:
    return Reference(run, TOKENS)


def assert_close(got: Any, want: Any) -> None:
    np.testing.assert_allclose(np.asarray(got), want, rtol=1e-4, atol=1e-4)


# ---- what it holds ----


def test_what_it_is(run: Run, finished: Path) -> None:
    assert (run.id, run.name, run.step) == (finished.name, "tiny", STEPS)
    assert {name: site.C for name, site in run.sites.items()} == SITES
    assert run.mesh.size == 1
    assert [row["step"] for row in run.metrics][-1] == STEPS
    text = repr(run)
    assert f"Run p-00000001 (tiny), step {STEPS} of {STEPS}: 4 sites, 64 components" in text
    assert "layers.0-1.mlp.up_proj    16 × 24  C 20" in text


def test_arrays_are_those_of_the_checkpoint(run: Run, finished: Path) -> None:
    saved = saved_arrays(finished, STEPS)
    for name, site in run.sites.items():
        stack, row = f"learned/components/layers.0-1.mlp.{site.kind}", site.layer
        V, U = run.factors(name)
        np.testing.assert_array_equal(V, saved[f"{stack}/V"][row])
        np.testing.assert_array_equal(U, saved[f"{stack}/U"][row])
        component = run.component(name, 7)
        np.testing.assert_array_equal(component.V, V[:, 7])
        np.testing.assert_array_equal(component.U, U[7])
        np.testing.assert_array_equal(component.matrix, np.outer(V[:, 7], U[7]))
        assert component.norm == pytest.approx(np.linalg.norm(component.matrix), rel=1e-6)
    assert run.component("model.layers.0.mlp.up_proj.weight", 1).site == UP


def test_matrices_are_the_target_s(run: Run, tiny: Tiny) -> None:
    _, weights = load_target(tiny.folder / "target")
    for name, site in run.sites.items():
        np.testing.assert_array_equal(run.matrix(name), weights["layers"][site.kind][site.layer])


# ---- what it says of inputs ----


def test_causal_importances(run: Run, expected: Reference) -> None:
    for kind, of_kind in (("lower", expected.lower), ("upper", expected.upper), ("logits", expected.logits)):
        got = run.causal_importances(TOKENS, kind=kind)  # type: ignore[arg-type]
        assert list(got) == list(SITES)
        for name, C in SITES.items():
            assert got[name].shape == (3, SEQ_LEN, C)
            assert_close(got[name], of_kind[name])
    # There is something to compare, also where the two squashings differ.
    assert max(np.abs(expected.upper[name] - expected.lower[name]).max() for name in SITES) > 1e-3


def test_causal_importances_of_some_sites_and_one_row(run: Run) -> None:
    of_all = run.causal_importances(TOKENS)
    some = run.causal_importances(TOKENS[0], sites=["layers.1.*", f"model.{UP}"])
    assert list(some) == [UP, "layers.1.mlp.up_proj", DOWN]
    for name, values in some.items():
        assert_close(values, of_all[name][0])


def test_logits_of_the_target_itself(run: Run, expected: Reference) -> None:
    assert_close(run.logits(TOKENS), expected.clean.output)
    plain = language_logits(run.weights, ARCHITECTURE, jax.numpy.asarray(TOKENS, jax.numpy.int32))
    assert_close(run.logits(TOKENS), plain)
    np.testing.assert_array_equal(run.logits(TOKENS, masks={}), run.logits(TOKENS))


ONE, TWO = [3, 0, 11], {5}
FLOATS = np.random.default_rng(4).uniform(-0.5, 1.5, (3, SEQ_LEN, 12))


def on(C: int, *numbers: int) -> np.ndarray:
    return np.isin(np.arange(C), numbers).astype(float)


@pytest.mark.parametrize(
    ("masks", "delta", "equivalent"),
    [
        pytest.param("ci", 0.0, lambda of: of, id="ci"),
        pytest.param("ci", 1.0, lambda of: of, id="ci and delta", marks=pytest.mark.slow),
        pytest.param(
            *({"layers.0.*": "ci"}, 0.0, lambda of: {s: of[s] for s in of if ".0." in s}),
            id="ci of some",
            marks=pytest.mark.slow,
        ),
        pytest.param({UP: ONE, DOWN: TWO}, 0.0, lambda of: {UP: on(20, 0, 3, 11), DOWN: on(12, 5)}, id="components"),
        pytest.param({UP: []}, 0.0, lambda of: {UP: np.zeros(20)}, id="no component"),
        pytest.param({UP: [2], DOWN: "ci"}, 0.5, lambda of: {UP: on(20, 2), DOWN: of[DOWN]}, id="mixed"),
        pytest.param({DOWN: FLOATS, UP: "ci"}, 0.0, lambda of: {DOWN: FLOATS, UP: of[UP]}, id="floats and ci"),
        pytest.param({DOWN: FLOATS[:1, :1] > 0.5}, 1.0, lambda of: {DOWN: FLOATS[:1, :1] > 0.5}, id="booleans"),
        pytest.param({"*": 0.25}, 0.0, lambda of: dict.fromkeys(SITES, 0.25), id="one number"),
    ],
)
def test_masked(run: Run, expected: Reference, masks: Any, delta: float, equivalent: Callable[..., Any]) -> None:
    """F1, F3: sites that are not named stay as the target has them."""
    got = run.logits(TOKENS, masks=masks, delta=delta)
    assert_close(got, expected.output(equivalent(expected.lower), delta))
    assert np.abs(np.asarray(got) - expected.clean.output).max() > 0.1  # there is something to compare


def test_importances_given_as_masks(run: Run) -> None:
    given = run.logits(TOKENS, masks=run.causal_importances(TOKENS))
    assert_close(given, np.asarray(run.logits(TOKENS, masks="ci")))


def test_all_of_the_components_and_the_delta_are_the_target(run: Run) -> None:
    assert_close(run.logits(TOKENS, masks={"*": 1.0}, delta=1.0), np.asarray(run.logits(TOKENS)))


def test_text(run: Run) -> None:
    text = "7 times 8 makes"
    ids = np.frombuffer(text.encode(), np.uint8).astype(int)
    assert_close(run.logits(text, masks="ci"), np.asarray(run.logits(ids, masks="ci")))
    assert run.causal_importances(text)[UP].shape == (len(text), 20)


@pytest.mark.slow
def test_on_eight_devices(run: Run, finished: Path) -> None:
    """D3: what one device saved and eight open, components split over them."""
    spread = load_run(finished, devices=8)
    assert {len(x.sharding.device_set) for x in jax.tree.leaves(spread.learned)} == {8}
    mine, theirs = run.causal_importances(TOKENS), spread.causal_importances(TOKENS)
    for name in SITES:
        np.testing.assert_allclose(theirs[name], mine[name], atol=1e-5)
    rows = np.tile(TOKENS, (3, 1))[:BATCH]  # so many that they are split, too
    assert_close(spread.logits(rows, masks="ci"), np.asarray(run.logits(rows, masks="ci")))
    np.testing.assert_array_equal(spread.component(DOWN, 3).U, run.component(DOWN, 3).U)


def test_an_earlier_checkpoint(finished: Path) -> None:
    early = load_run(finished, EARLY)
    assert early.step == EARLY
    saved = saved_arrays(finished, EARLY)["learned/components/layers.0-1.mlp.up_proj/V"]
    np.testing.assert_array_equal(early.factors(UP)[0], saved[0])


# ---- toys ----


def test_a_toy(toy: Path) -> None:
    """Whose two matrices are tied (T4)."""
    run = load_run(toy / "p-00000001")
    features = np.random.default_rng(5).uniform(size=(4, 5)).astype(np.float32)
    want = Reference(run, features)
    for name, values in run.causal_importances(features).items():
        assert values.shape == (4, run.sites[name].C)
        assert_close(values, want.lower[name])
    assert_close(run.output(features), want.clean.output)
    assert_close(run.output(features, masks="ci"), want.output(want.lower))
    assert_close(run.output(features[0], masks={"linear2": [1, 4]}), want.output({"linear2": on(20, 1, 4)})[0])
    V, U = run.factors("linear1")
    W, X = run.factors("linear2")
    np.testing.assert_array_equal(W, U.T)
    np.testing.assert_array_equal(X, V.T)
    np.testing.assert_array_equal(run.component("linear2", 2).V, U[2])
    with pytest.raises(UserError, match="a toy has no logits; use run"):
        run.logits(features)
    for wrong in (features[:, :3], ["a"], features[None]):
        with pytest.raises(UserError, match=r"inputs should be features \[B, 5\]"):
            run.output(wrong)


# ---- without the target, and with another ----


@pytest.fixture
def moved(finished: Path, tiny: Tiny, tmp_path: Path) -> Path:
    """The run on a machine that has neither its target nor its data."""
    folder = tmp_path / "elsewhere" / finished.name
    shutil.copytree(finished, folder)
    config = folder / "config.yaml"
    config.write_text(config.read_text().replace(str(tiny.folder), str(tmp_path / "gone")))
    return folder


def test_without_the_target(moved: Path, run: Run, tiny: Tiny) -> None:
    alone = load_run(moved)
    np.testing.assert_array_equal(alone.component(UP, 3).V, run.component(UP, 3).V)
    assert alone.metrics == run.metrics
    assert repr(alone) == repr(run)
    for asked in (lambda: alone.causal_importances(TOKENS), lambda: alone.logits("text"), lambda: alone.matrix(UP)):
        with pytest.raises(UserError, match=r"gone.target does not exist; give another \(load_run\(…, target=FOLDER"):
            asked()
    found = load_run(moved, target=tiny.folder / "target")
    np.testing.assert_array_equal(found.logits(TOKENS, masks="ci"), run.logits(TOKENS, masks="ci"))


def test_with_another_target(moved: Path, tmp_path: Path) -> None:
    other = replace(ARCHITECTURE, n_heads=4, head_dim=4)
    save_target(tmp_path / "other", other, core.weights(other))
    with pytest.raises(UserError, match="target than the one the run decomposed: n_heads 2 -> 4, head_dim 8 -> 4"):
        load_run(moved, target=tmp_path / "other").logits(TOKENS)


def test_an_older_run_asks_its_target(finished: Path, moved: Path, tmp_path: Path) -> None:
    (moved / "target.json").unlink()
    with pytest.raises(UserError, match="does not record its target's architecture, and the target was not found"):
        load_run(moved)
    older = tmp_path / finished.name
    shutil.copytree(finished, older)
    (older / "target.json").unlink()
    assert load_run(older).architecture == ARCHITECTURE
    (older / "target.json").write_text('{"architecture": "llama", "n_hea')
    with pytest.raises(UserError, match=r"target\.json is damaged or of another version"):
        load_run(older)


# ---- mistakes ----


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (
            lambda run: run.component("layers.0.mlp.upproj", 1),
            "unknown site 'layers.0.mlp.upproj'; did you mean 'layers.0.mlp.up_proj'",
        ),
        (lambda run: run.component(UP, 20), "has components 0 to 19, and no component 20"),
        (lambda run: run.component(UP, -1), "has components 0 to 19, and no component -1"),
        (lambda run: run.causal_importances(TOKENS, sites="layers.7.*"), "'layers.7.*' matches no site"),
        (lambda run: run.causal_importances(TOKENS, kind="both"), "should be lower, upper or logits"),
        (lambda run: run.causal_importances(TOKENS[None]), r"token ids \[B, T\] or \[T\], not int64 \[1, 3, 16\]"),
        (lambda run: run.causal_importances(TOKENS / 2), "not float64"),
        (lambda run: run.logits([1, 256]), "token ids go from 0 to 255; the inputs have 1 to 256"),
        (lambda run: run.logits(list(range(17))), "the CI function takes up to 16 tokens; the inputs have 17"),
        (lambda run: run.logits(""), r"token ids \[B, T\] or \[T\], not int32 \[0\]"),
        (lambda run: run.logits(TOKENS, masks="importance"), "'importance' is not a mask"),
        (lambda run: run.logits(TOKENS, masks=FLOATS), "should be 'ci', or masks by site, not ndarray"),
        (lambda run: run.logits(TOKENS, masks={"layers.0.up": "ci"}), "'layers.0.up' matches no site; did you mean"),
        (lambda run: run.logits(TOKENS, masks={"*": "ci", UP: [1]}), f"{UP} is named twice"),
        (lambda run: run.logits(TOKENS, masks={UP: [1, 20]}), "has components 0 to 19, and no component 20"),
        (lambda run: run.logits(TOKENS, masks={UP: [0, 1, 1]}), "integers are numbers of components, and one is given"),
        (lambda run: run.logits(TOKENS, masks={UP: FLOATS}), r"\[3, 16, 12\] does not broadcast to \[3, 16, 20\]"),
    ],
)
def test_wrong_questions(run: Run, asked: Callable[[Run], Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        asked(run)


def test_what_cannot_be_opened(finished: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not a run folder"):
        load_run(tmp_path)
    with pytest.raises(UserError, match=f"has no checkpoint of step 41; it has those of {EARLY}, {LATE}, {STEPS}"):
        load_run(finished, 41)
    with pytest.raises(UserError, match="devices: 9, but this machine has 8"):
        load_run(finished, devices=9)
    run = tmp_path / finished.name
    shutil.copytree(finished, run, ignore=shutil.ignore_patterns("ckpts"))
    with pytest.raises(UserError, match="has no checkpoint yet"):
        load_run(run)
    shutil.copytree(finished / "ckpts", run / "ckpts")
    config = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(config.replace("sigmoid_type: leaky_hard", "sigmoid_type: normal"))
    with pytest.raises(UserError, match=r'pd.sigmoid_type: "leaky_hard" -> "normal"'):
        load_run(run)
    (run / "config.yaml").write_text(config)
    (run / "ckpts" / str(STEPS) / "learned" / "manifest.ocdbt").unlink()
    with pytest.raises(
        UserError, match=rf"manifest.ocdbt: No such file.*open another one, give its step \({EARLY}, {LATE}\)"
    ):
        load_run(run)
    assert load_run(run, LATE).step == LATE


# ---- the run may be going on ----


def test_opening_changes_nothing(finished: Path, tmp_path: Path) -> None:
    """A save that is under way lies in a folder that orbax's own manager would sweep away."""
    run = tmp_path / finished.name
    shutil.copytree(finished, run)
    (run / "ckpts" / f"{STEPS + SAVE_EVERY}.orbax-checkpoint-tmp" / "learned").mkdir(parents=True)
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    load_run(run).causal_importances(TOKENS)
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before


def test_target_file(finished: Path) -> None:
    said = json.loads((finished / "target.json").read_text())
    assert said["architecture"] == "llama"
    assert {key: said[key] for key in ("vocab_size", "d_model", "n_layers", "tied")} == {
        "vocab_size": 256, "d_model": 16, "n_layers": 2, "tied": True,
    }  # fmt: skip


def test_the_package_gives_the_function() -> None:
    """Whatever has been imported before."""
    import param_decomp_lab.opening.run as module

    assert param_decomp_lab.load_run is module.load_run
    with pytest.raises(AttributeError, match="load_rum"):
        _ = param_decomp_lab.load_rum


@pytest.mark.parametrize("size", [1.5, 1e308, 0, "2", None, True])
def test_sizes_that_no_architecture_has(tmp_path: Path, size: object) -> None:
    fields = {**describe(TMSConfig(n_features=5, n_hidden=2)), "n_hidden": size}
    (tmp_path / "target.json").write_text(json.dumps(fields))
    with pytest.raises(UserError, match=r"target\.json is damaged .*n_hidden: should be a whole number of at least 1"):
        read_target(tmp_path)
