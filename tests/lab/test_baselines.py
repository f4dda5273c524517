"""`pd eval --baselines`: the run's own point is its evaluation, and what is written, printed and refused."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from param_decomp_jax.targets.plain_linears import UNTOUCHED
from param_decomp_lab.baselines import measure
from param_decomp_lab.baselines.figure import comparison_figure, plain
from param_decomp_lab.baselines.kept import find_comparison
from param_decomp_lab.baselines.matching import shares
from param_decomp_lab.baselines.parts import BASELINES
from param_decomp_lab.baselines.result import LAMBDA, ON_OFF, OWN, BaselinePoint, Comparison
from param_decomp_lab.compilation import jitted
from param_decomp_lab.opening import load_run
from param_decomp_lab.setup.rows import evaluation_source
from param_decomp_lab.ui.numbers import number
from tests.lab.sae_folders import identity, save
from tests.lab.tiny_run import BATCH, STEPS, Outcome, pd_here

GOLDEN = Path(__file__).parent.parent / "golden" / "saelens"


@pytest.fixture(scope="module")
def run(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(shutil.copytree(finished, tmp_path_factory.mktemp("baselines") / finished.name))


EXACT, DOLLARS = "exact", "[red]$_$"
"""Folders of SAEs: of the first layer's output, and of the last's."""


@pytest.fixture(scope="module")
def saes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saes")
    for name, at in ((EXACT, "blocks.0.hook_resid_post"), (DOLLARS, "blocks.1.hook_resid_post")):
        config, tensors = identity(at)
        config["metadata"] |= {"model_name": "a [bold]model\x1b", "prepend_bos": True}
        save(folder / name, config, tensors)
    return folder


@pytest.fixture(scope="module")
def outcome(run: Path, saes: Path) -> Outcome:
    folders = (saes / EXACT, saes / DOLLARS, GOLDEN / "transcoder")
    beside = (word for folder in folders for word in ("--sae", folder))
    return pd_here("eval", run, "--baselines", "--batches", 1, "--attack", "5,10", *beside)


@pytest.fixture(scope="module")
def found(run: Path, outcome: Outcome) -> Comparison:
    assert outcome.status == 0, outcome
    kept = find_comparison(run, STEPS)
    assert kept is not None
    return kept.comparison


def held_out_batch(run: Any) -> Any:
    """The first batch of an opened run's evaluation."""
    method = run.config.method
    return evaluation_source(run.resolved.held_out_rows, method.eval, method.pd.seed, run.mesh)(0)


def test_the_run_s_own_point_is_its_evaluation(run: Path, found: Comparison) -> None:
    """KL and cross-entropy of `run.logits` with λ as masks, and L0, on the same batch."""
    opened = load_run(run)
    batch = np.asarray(held_out_batch(opened))
    assert batch.shape[0] == BATCH
    plain, masked = (jax.nn.log_softmax(opened.logits(batch, masks)) for masks in (None, "ci"))
    kl = float((np.exp(plain) * (plain - masked)).sum(axis=-1).mean())
    assert found.own.error == pytest.approx(kl, rel=1e-3)
    of_next = (np.take_along_axis(np.asarray(x[:, :-1]), batch[:, 1:, None], axis=-1) for x in (plain, masked))
    before, after = (-float(x.mean()) for x in of_next)
    assert found.own.cross_entropy == pytest.approx(after - before, rel=1e-3, abs=1e-5)
    l0 = [float((np.asarray(x) > 0).sum(axis=-1).mean()) for x in opened.causal_importances(batch).values()]
    assert found.own.l0 == pytest.approx(np.mean(l0), rel=1e-4)
    assert found.own.l0 == pytest.approx(found.own_on_off.l0, rel=1e-4)


def test_every_curve(found: Comparison) -> None:
    assert set(found.matched) == set(BASELINES)
    numbers = sorted(shares(found.own.l0))
    assert len(numbers) == 2
    for name in BASELINES:
        points = sorted((p for p in found.points if p.parts == name), key=lambda p: p.number)
        assert points[-1].error < points[0].error / 10
        assert [bool(p.attacked) for p in points] == [p.number in numbers for p in points]
        fewer, more = (next(p for p in points if p.number == k) for k in numbers)
        matched = found.matched[name]
        assert matched.number == pytest.approx(found.own.l0)
        assert matched.l0 == pytest.approx(found.own.l0, rel=1e-3)
        line = np.interp(found.own.l0, numbers, [fewer.attacked[-1], more.attacked[-1]])
        assert matched.attacked[-1] == pytest.approx(line)
    for point in (found.own, found.own_on_off, *found.matched.values()):
        assert len(point.attacked) == 2
        assert point.attacked[0] <= point.attacked[1] * 1.05 + 1e-7
    assert found.best.error == min(p.error for p in found.matched.values())
    kinds = [(p.chosen, p.number) for p in found.points if p.parts == OWN]
    assert (LAMBDA, 0.0) in kinds
    assert (ON_OFF, 0.5) in kinds
    assert len(set(kinds)) == len(kinds)


def test_what_is_printed_and_written(run: Path, outcome: Outcome, found: Comparison) -> None:
    at = number(found.own.l0)
    for words in (f"({at} parts, chosen by", "attack 10", f"At L0 {at} the", "times that of the best"):
        assert words in outcome.out.replace("\n", " ")
    assert (run / "figures" / f"baselines_{STEPS}.png").read_bytes().startswith(b"\x89PNG")
    assert found.positions == BATCH * 16


def test_the_figure_of_one_number_of_parts(found: Comparison) -> None:
    """A bar for the decomposition and each baseline, with its error; of many numbers of parts, curves by L0."""
    measured = (p for of_baseline in found.to_mix.values() for p in of_baseline.values())
    matched = replace(found, points=(found.own, found.own_on_off, *measured))
    assert (matched.matched_only, found.matched_only) == (True, False)
    left, right = comparison_figure(matched).axes
    shown = (found.own, *found.matched.values(), *(p for r in found.replacements for p in r.points))
    assert [bar.get_width() for bar in left.patches] == [max(p.error, 0) for p in shown]
    assert left.texts[0].get_text() == number(found.own.error)
    assert f"neurons, {number(found.own.l0)} parts" in [label.get_text() for label in left.get_yticklabels()]
    assert list(right.get_xticks()) == [0, *found.lengths]
    assert not comparison_figure(found).axes[0].patches


GRADIENT = ("--choose", "gradient", "--matched", "--batches", 2, "--attack", "")


@pytest.fixture(scope="module")
def with_gradient(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Comparison, Outcome]:
    """Of a copy of the run, so that what `found` has kept stays."""
    run = Path(shutil.copytree(finished, tmp_path_factory.mktemp("gradient") / finished.name))
    outcome = pd_here("eval", run, "--baselines", *GRADIENT)
    assert outcome.status == 0, outcome
    kept = find_comparison(run, STEPS)
    assert kept is not None
    return kept.comparison, outcome


def test_by_gradient(found: Comparison, with_gradient: tuple[Comparison, Outcome]) -> None:
    """Baselines that have parts off come nearer to the output, and the decomposition is chosen from in the same way."""
    by_gradient, outcome = with_gradient
    assert (found.choice, by_gradient.choice) == ("activation", "gradient")
    assert found.own_by_gradient is None
    own = by_gradient.own_by_gradient
    assert own is not None
    assert own in by_gradient.at_own_l0
    l0 = by_gradient.own.l0
    assert shares(l0).keys() == shares(found.own.l0).keys()
    assert own.number == pytest.approx(l0)
    assert own.l0 <= l0  # a site has fewer components than that
    for name in ("neurons", "random rotation"):
        assert by_gradient.matched[name].l0 == pytest.approx(l0)
        assert by_gradient.matched[name].error < found.matched[name].error / 2, name
    said = " ".join(outcome.out.split())
    at = number(l0)
    for words in (f"{at} parts, chosen by gradient", f"decomposition, {at} by gradient", "in the same way, it is"):
        assert words in said
    assert "with k parts on" not in said  # --matched


def test_on_eight_devices(
    finished: Path, with_gradient: tuple[Comparison, Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D3: the numbers of one device, of the decomposition and of neurons."""
    monkeypatch.setattr(measure, "BASELINES", ("neurons",))  # others would compile the same again
    out = tmp_path / "eight.json"
    outcome = pd_here("eval", finished, "--baselines", *GRADIENT, "--devices", 8, "--out", out)
    assert outcome.status == 0, outcome
    points = [BaselinePoint(**raw) for raw in json.loads(out.read_text())["points"]]
    of_one_device = [p for p in with_gradient[0].points if p.parts in (OWN, "neurons")]
    for point, of_one in zip(points, of_one_device, strict=True):
        assert (point.parts, point.chosen, point.number) == (of_one.parts, of_one.chosen, of_one.number)
        assert point.l0 == pytest.approx(of_one.l0, rel=1e-4)
        # Where two parts have nearly the same score, a rounding chooses between them: the error, which the score is of,
        # hardly moves. At such a position the logarithm of the next token's probability moves by √(2 KL) or so.
        is_choice = point.chosen not in (LAMBDA, ON_OFF)
        for found, expected in ((point.error, of_one.error), (point.random, of_one.random)):
            assert found == pytest.approx(expected, rel=1e-2 if is_choice else 1e-4, abs=1e-5), (
                point.parts,
                point.chosen,
            )
        in_few_positions = 0.05 * (2 * of_one.error) ** 0.5
        tolerance = in_few_positions if is_choice else 1e-5
        assert point.cross_entropy == pytest.approx(of_one.cross_entropy, rel=1e-4, abs=tolerance)


def test_programs_are_waited_for() -> None:
    """Two at once, with collectives, have waited for each other on the devices of a CPU."""

    def slow(x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, 100, lambda _, y: jnp.tanh(y @ y), x)

    assert jitted(slow, ())(jnp.eye(256)).is_ready()


def test_saes_and_transcoders(run: Path, found: Comparison) -> None:
    """An exact SAE changes nothing; with k of its latents a position keeps its k largest coordinates; a transcoder as
    the core has it."""
    exact, last, transcoder = found.replacements
    assert exact.active.l0 == pytest.approx(16, abs=0.01)
    assert abs(exact.active.error) < 1e-6
    assert abs(exact.active.cross_entropy) < 1e-5
    assert exact.sites == last.sites == ()
    opened = load_run(run)
    batch = held_out_batch(opened)
    for k in (1, 2, 8):
        point = last.ladder[k]
        assert (point.l0, point.number) == (k, k)
        x = np.asarray(opened.target.forward(opened.weights, batch, UNTOUCHED).output)
        left = np.where(np.argsort(np.argsort(-np.abs(x), axis=-1), axis=-1) < k, x, 0)
        clean, masked = (jax.nn.log_softmax(opened.target.logits(opened.weights, jnp.asarray(y))) for y in (x, left))
        assert point.error == pytest.approx(float((jnp.exp(clean) * (clean - masked)).sum(axis=-1).mean()), rel=1e-3)
    assert last.ladder[1].error > last.ladder[8].error > 0
    assert set(last.ladder) == {k for k in (1, 2, 4, 8, 16, *shares(found.own.l0)) if k <= 16}
    assert [p.l0 for p in last.at(found.own.l0)] == pytest.approx([last.active.l0, found.own.l0])
    assert last.at(16.5) == [last.active]
    assert (transcoder.reads, transcoder.writes) == ("blocks.1.mlp.hook_in", "blocks.1.hook_mlp_out")
    assert transcoder.sites == ("layers.1.mlp.up_proj", "layers.1.mlp.down_proj")
    assert transcoder.active.error > 1e-4
    assert 0 < transcoder.active.l0 < 12


def test_what_is_said_of_saes(outcome: Outcome, found: Comparison) -> None:
    said = " ".join(outcome.out.split())
    for r in found.replacements:
        assert r.name in said
    together = f"{found.own.l0:.1f} components on at each, {4 * found.own.l0:.1f} together"
    for words in (
        "SAE exact (standard, 32 latents, trained on a [bold]model\\x1b with a BOS token before each row): its "
        "reconstruction replaces blocks.0.hook_resid_post, and every matrix stays as it is.",
        "it reads blocks.1.mlp.hook_in and replaces blocks.1.hook_mlp_out, thus this MLP's matrices (sites of the run "
        "in this MLP: layers.1.mlp.up_proj, layers.1.mlp.down_proj)",
        f"The decomposition replaces 4 matrices at once, with {together}",
    ):
        assert words in said
    figure = comparison_figure(found)
    below = figure.get_supxlabel().replace("\n", " ")
    assert "replaces blocks.1.hook_mlp_out" in below
    assert together in below
    labels = figure.axes[0].get_legend_handles_labels()[1]
    assert labels[-3:] == [*(plain(r.name) for r in found.replacements)]


@pytest.mark.slow
def test_a_toy(toy: Path, tmp_path: Path) -> None:
    outcome = pd_here(
        "eval", toy / "p-00000001", "--baselines", "--batches", 1, "--attack", "", "--out", tmp_path / "toy.json"
    )
    assert outcome.status == 0, outcome
    assert "At L0" in outcome.out
    assert json.loads((tmp_path / "toy.json").read_text())["points"][0]["cross_entropy"] is None
    assert (tmp_path / "toy.png").is_file()
    fewer = ("--matched", "--out", tmp_path / "matched.json")
    outcome = pd_here("eval", toy / "p-00000001", "--baselines", "--batches", 1, "--attack", "", *fewer)
    assert "At L0" in outcome.out
    all_points, matched = (json.loads((tmp_path / name).read_text())["points"] for name in ("toy.json", "matched.json"))
    assert len(matched) == 2 + len(BASELINES) * len(shares(matched[0]["l0"]))
    assert all(point in all_points for point in matched)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--metric", "CI_L0"), "takes no metrics"),
        (("--attack", "x"), "numbers of steps"),
        (("--batches", "0"), "batches"),
        (("--choose", "size"), "not one of"),
        (("--sae", "nowhere"), "nowhere: no such folder"),
        (("--sae", "\udcff"), "not UTF-8"),
        (("--sae", GOLDEN / "gated", "--sae", GOLDEN), "cfg.json"),
    ],
)
def test_what_is_refused(run: Path, words: tuple[str, ...], says: str) -> None:
    outcome = pd_here("eval", run, "--baselines", *words)
    assert outcome.status != 0
    assert says in outcome.err.replace("\n", " ")


def test_saes_that_do_not_fit_are_refused_at_once(run: Path, toy: Path, tmp_path: Path) -> None:
    deep = save(tmp_path / "deep", *identity("blocks.2.hook_resid_post"))
    wide = save(tmp_path / "wide", *identity("blocks.1.hook_resid_post", d=32))
    out = ("--out", tmp_path / "none.json")
    for run_folder, folder, says in (
        (run, deep, "metadata.hook_name: blocks.2.hook_resid_post: the run's target has layers 0 to 1"),
        (run, wide, "d_in: is 32, but the run's target has width 16"),
        (toy / "p-00000001", deep, "decomposes a toy"),
    ):
        outcome = pd_here("eval", run_folder, "--baselines", "--sae", folder, *out)
        assert outcome.status == 2, outcome
        assert says in " ".join(outcome.err.split())
        assert "measuring" not in outcome.out
    assert list(tmp_path.glob("none*")) == []
    for option in (("--sae", deep), ("--choose", "gradient")):
        assert f"{option[0]}: is for --baselines" in pd_here("eval", run, *option).err
