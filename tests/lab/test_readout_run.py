"""Runs with a component readout (C7, C8): the scales at their start, resuming, `init_from`, what is said of them."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from param_decomp_lab import load_run
from param_decomp_lab.config import load_config
from param_decomp_lab.probe.subject import STEP, run_subject
from param_decomp_lab.runs.folder import saved_config
from param_decomp_lab.setup import set_up
from param_decomp_lab.setup.resolved import ResolvedConfig
from tests import reference as ref
from tests.core import tiny as core
from tests.lab.tiny_run import LIGHT, Tiny, pd_here, rows, saved_arrays, saved_steps

READOUT = "pd.ci_config={mode: layerwise, fn_type: shared_mlp, hidden_dims: [8], component_readout: true}"
SETTINGS = (*LIGHT, READOUT, "pd.faithfulness_warmup_steps=2", "milestones=[0]", "cadence.save_every=5")
ALL_AT_ONCE = "pd.ci_config={mode: global, fn_type: global_shared_mlp, hidden_dims: [8], component_readout: true}"


@pytest.fixture(scope="module")
def run(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("readout")
    outcome = pd_here(*tiny.train(folder, 1, *SETTINGS))
    assert outcome.status == 0, outcome
    return folder / "p-00000001"


def vectors(run: Path, step: int) -> dict[str, np.ndarray]:
    """`a_plus` and so on of a checkpoint, by stack and name."""
    found = saved_arrays(run, step).items()
    inside = "learned/ci/heads/"
    return {name.removeprefix(inside): x for name, x in found if name.startswith(inside) and "/readout/" in name}


@pytest.mark.slow
@pytest.mark.always
def test_scales_are_of_the_batch_of_step_0(run: Path) -> None:
    """After the warm-up, which moves V; and all seven vectors are trained."""
    setup = set_up(ResolvedConfig(saved_config(run)), Console(quiet=True))
    sites = setup.problem.target.sites
    forward = core.ref_target(setup.problem.target, setup.weights, np.asarray(setup.train(0)))
    clean = ref.clean_pass(forward, [site.name for site in sites.all])
    learned, own = saved_arrays(run, 0), vectors(run, 0)
    assert len(own) == 7 * len(sites.stacks)
    for site, (stack, row) in zip(sites.all, sites.stack_rows, strict=True):
        h = clean.reads[site.name] @ learned[f"learned/components/{stack.name}/V"][row].astype(np.float64)
        want = 1 / np.percentile(np.abs(h), 99.9, axis=(0, 1))
        for name in ("a_plus", "a_minus"):
            np.testing.assert_allclose(own[f"{stack.name}/readout/{name}"][row], want, rtol=1e-4)
    assert not any(np.any(x) for name, x in own.items() if "/a_" not in name)
    trained = vectors(run, saved_steps(run)[-1])
    assert all(np.all(x != own[name]) for name, x in trained.items())


@pytest.mark.slow
def test_resumed_run_repeats_the_undisturbed_one(run: Path, tmp_path: Path) -> None:
    """T5, from a checkpoint: its scales are kept, though V, from which they were taken, has moved on."""
    killed = tmp_path / run.name
    shutil.copytree(run, killed)
    for step in saved_steps(run)[-2:]:
        shutil.rmtree(killed / "ckpts" / str(step))
    outcome = pd_here("train", "--resume", str(killed))
    assert outcome.status == 0, outcome
    last = saved_steps(run)[-1]
    for name, x in saved_arrays(run, last).items():
        np.testing.assert_array_equal(saved_arrays(killed, last)[name], x, err_msg=name)
    assert rows(killed) == rows(run)


@pytest.mark.slow
def test_a_run_that_was_stopped_before_its_first_checkpoint(run: Path, tmp_path: Path) -> None:
    """It is begun anew, and takes the same batch again."""
    killed = tmp_path / run.name
    shutil.copytree(run, killed)
    shutil.rmtree(killed / "ckpts")
    outcome = pd_here("train", "--resume", str(killed))
    assert outcome.status == 0, outcome
    assert "has no checkpoint yet" in outcome.out
    assert rows(killed) == rows(run)


@pytest.mark.slow
def test_begins_with_the_vectors_of_its_parent(tiny: Tiny, run: Path, tmp_path: Path) -> None:
    outcome = pd_here(*tiny.train(tmp_path, 2, *SETTINGS, f"init_from={run}", "pd.steps=1"))
    assert outcome.status == 0, outcome
    theirs = vectors(run, saved_steps(run)[-1])
    for name, x in vectors(tmp_path / "p-00000002", 0).items():
        np.testing.assert_array_equal(x, theirs[name])
    without = READOUT.replace(", component_readout: true", "")
    refused = pd_here(*tiny.train(tmp_path, 3, *SETTINGS, f"init_from={run}", without))
    assert refused.status == 2
    assert "pd.ci_config.component_readout: true -> false" in refused.err


@pytest.mark.slow
def test_eight_devices(tiny: Tiny, tmp_path: Path) -> None:
    """The scales, and what is trained from there, of a global function; everything split."""
    settings = (*SETTINGS, ALL_AT_ONCE, "pd.steps=3")
    for number, mesh in enumerate(("{fsdp: 1}", "{replica: 2, fsdp: 2, tensor: 2}")):
        outcome = pd_here(*tiny.train(tmp_path, number, *settings, f"mesh={mesh}"))
        assert outcome.status == 0, outcome
    for step in (0, 3):
        one, eight = (vectors(tmp_path / f"p-0000000{number}", step) for number in (0, 1))
        for name, x in one.items():
            np.testing.assert_allclose(eight[name], x, rtol=1e-3, atol=1e-5, err_msg=name)


@pytest.mark.slow
def test_an_opened_run_reads_it(run: Path) -> None:
    """λ of the run, by the reference from the arrays in its checkpoint."""
    opened = load_run(run)
    tokens = np.random.default_rng(0).integers(0, 256, 16)
    sites = opened.problem.target.sites
    target = core.ref_target(opened.problem.target, opened.weights, tokens[None])
    clean = ref.clean_pass(target, [site.name for site in sites.all])
    params, factors = (
        core.ref_ci(opened.ci, sites),
        {name: dict(zip("VU", opened.factors(name), strict=True)) for name in opened.sites},
    )
    config = {"ci_config": core.schema_ci(opened.problem.decomposition.ci, sites)}
    want, _ = ref.causal_importance(config, params, clean.inputs, factors)
    for name, values in opened.causal_importances(tokens).items():
        np.testing.assert_allclose(values, want[name][0], atol=1e-5)


def test_what_is_said_of_it(tiny: Tiny) -> None:
    """`pd check`, and the parts that `pd probe` compiles."""
    checked = pd_here("check", tiny.config, "--set", READOUT)
    assert checked.status == 0, checked
    assert "layerwise shared_mlp, hidden [8], with a component readout" in " ".join(checked.out.split())
    phases = list(run_subject(load_config(tiny.config, [READOUT])).phases)
    assert phases[phases.index(STEP) - 1] == "calibration"
    assert "calibration" not in run_subject(load_config(tiny.config)).phases
