"""Runs that begin with weighted singular vectors (T6) or aligned components (T9): what these are, resuming, what is
refused and said."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from param_decomp_lab.config import load_config
from param_decomp_lab.errors import UserError
from param_decomp_lab.probe.subject import run_subject
from param_decomp_lab.runs.folder import saved_config
from param_decomp_lab.setup import set_up
from param_decomp_lab.setup.problem import make_problem
from param_decomp_lab.setup.resolved import ResolvedConfig
from tests import reference as ref
from tests.core import tiny as core
from tests.core.test_experts import CONFIG as WITH_EXPERTS
from tests.lab.tiny_run import ARCHITECTURE, BATCH, LIGHT, SEQ_LEN, Tiny, pd_here, rows, saved_arrays, saved_steps

FROM_DATA = "init_components=weighted_singular_vectors"
ALIGNED = "init_components=nonlinearity_aligned"
SETTINGS = (*LIGHT, FROM_DATA, "milestones=[0]", "cadence.save_every=6")


@pytest.fixture(scope="module")
def run(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("initial")
    outcome = pd_here(*tiny.train(folder, 1, *SETTINGS))
    assert outcome.status == 0, outcome
    return folder / "p-00000001"


def test_of_the_first_batches(run: Path) -> None:
    """Of two of them, as many as have 16 positions for each of 16 dimensions; then they are trained."""
    setup = set_up(ResolvedConfig(saved_config(run)), Console(quiet=True))
    sites = setup.problem.target.sites
    assert 16 * ARCHITECTURE.d_model == 2 * BATCH * SEQ_LEN
    first = np.concatenate([np.asarray(setup.train(n)) for n in range(2)])
    target = core.ref_target(setup.problem.target, setup.weights, first)
    reads = ref.clean_pass(target, [site.name for site in sites.all]).reads
    begun, ended = (saved_arrays(run, step) for step in (0, saved_steps(run)[-1]))
    for site, (stack, row) in zip(sites.all, sites.stack_rows, strict=True):
        V, U = (begun[f"learned/components/{stack.name}/{name}"][row].astype(np.float64) for name in "VU")
        W = np.asarray(setup.problem.target.site_weights(setup.weights)[stack.name][row], np.float64)
        y = (reads[site.name] @ W).reshape(-1, site.d_out)
        rank = min(site.d_in, site.d_out, site.C)
        # Of all matrices of this rank none is nearer to W on these batches.
        least = np.sum(np.linalg.svd(y, compute_uv=False)[rank:] ** 2)
        assert np.sum((y - reads[site.name].reshape(-1, site.d_in) @ V @ U) ** 2) <= least * (1 + 1e-4) + 1e-6
        np.testing.assert_allclose(np.linalg.norm(V[:, :rank], axis=0), np.linalg.norm(U[:rank], axis=1), rtol=1e-4)
        assert not U[rank:].any()
        assert V[:, rank:].any(axis=0).all()
        assert not np.array_equal(U, ended[f"learned/components/{stack.name}/U"][row])


@pytest.mark.slow
def test_a_run_that_was_stopped_before_its_first_checkpoint(run: Path, tmp_path: Path) -> None:
    """It is begun anew, with the same components; resumed from a checkpoint, it goes on with the trained ones."""
    for name, lost in (("ckpts", "ckpts"), ("last", f"ckpts/{saved_steps(run)[-1]}")):
        killed = tmp_path / name / run.name
        shutil.copytree(run, killed)
        shutil.rmtree(killed / lost)
        outcome = pd_here("train", "--resume", str(killed))
        assert outcome.status == 0, outcome
        assert rows(killed) == rows(run)


@pytest.mark.slow
def test_eight_devices(tiny: Tiny, run: Path, tmp_path: Path) -> None:
    """Every pair of a column of V and a row of U, whichever device it lies on; and the losses (D3), but for one that is
    all rounding: with C at least the rank V U is W."""
    outcome = pd_here(*tiny.train(tmp_path, 2, *SETTINGS, "mesh={replica: 2, fsdp: 2, tensor: 2}"))
    assert outcome.status == 0, outcome
    for row, on_one in zip(rows(tmp_path / "p-00000002"), rows(run), strict=True):
        for name, x in on_one.items():
            if name.startswith("train/loss/"):
                assert row[name] == pytest.approx(x, rel=1e-5), (name, row["step"])
    whole = "pd.decomposition_targets=[{module_pattern: layers.*.mlp.*, C: 48}]"
    found = []
    for number, mesh in ((3, "{}"), (4, "{fsdp: 8}")):
        outcome = pd_here(*tiny.train(tmp_path, number, *SETTINGS, whole, "pd.steps=1", f"mesh={mesh}"))
        assert outcome.status == 0, outcome
        found.append(rows(tmp_path / f"p-0000000{number}")[0]["train/loss/FaithfulnessLoss"])
    assert max(found) < 1e-12
    one, eight = saved_arrays(run, 0), saved_arrays(tmp_path / "p-00000002", 0)
    for name, x in one.items():
        if "/components/" in name:
            np.testing.assert_allclose(eight[name], x, rtol=1e-3, atol=1e-4, err_msg=name)


@pytest.mark.slow
def test_a_parent_comes_first(tiny: Tiny, run: Path, tmp_path: Path) -> None:
    outcome = pd_here(*tiny.train(tmp_path, 3, *SETTINGS, f"init_from={run}", "pd.steps=1"))
    assert outcome.status == 0, outcome
    assert "init_components: has no effect with init_from" in " ".join(outcome.out.split())
    begun, theirs = saved_arrays(tmp_path / "p-00000003", 0), saved_arrays(run, saved_steps(run)[-1])
    for name, x in begun.items():
        if "/components/" in name:
            np.testing.assert_array_equal(x, theirs[name])


def test_aligned_with_the_neurons(tiny: Tiny, tmp_path: Path) -> None:
    """As many components as neurons at one site, fewer at the others."""
    up, down = "{module_pattern: layers.0.mlp.up_proj, C: 24}", "{module_pattern: layers.*.mlp.down_proj, C: 9}"
    settings = (f"pd.decomposition_targets=[{up}, {down}]", "pd.faithfulness_warmup_steps=0", "milestones=[0]")
    outcome = pd_here(*tiny.train(tmp_path, 1, *LIGHT, ALIGNED, *settings, "pd.steps=1"))
    assert outcome.status == 0, outcome
    folder = tmp_path / "p-00000001"
    setup, begun = set_up(ResolvedConfig(saved_config(folder)), Console(quiet=True)), saved_arrays(folder, 0)
    sites, matrices = setup.problem.target.sites, setup.problem.target.site_weights(setup.weights)
    for site, (stack, row) in zip(sites.all, sites.stack_rows, strict=True):
        V, U = (begun[f"learned/components/{stack.name}/{name}"][row] for name in "VU")
        W = np.asarray(matrices[stack.name][row])
        of_neurons, others, by_neuron = (U, V.T, W.T) if site.kind == "up_proj" else (V.T, U, W)
        neurons = of_neurons.argmax(axis=1)
        np.testing.assert_array_equal(of_neurons, np.eye(ARCHITECTURE.d_mlp)[neurons])
        np.testing.assert_array_equal(others, by_neuron[neurons])
        assert len(set(neurons)) == site.C


def test_refused(tiny: Tiny, run: Path) -> None:
    resumed = pd_here("train", "--resume", str(run), "--set", "init_components=random")
    assert resumed.status == 2
    assert 'init_components: "weighted_singular_vectors" -> "random"' in resumed.err
    with_experts = (
        "pd.decomposition_targets=[{module_pattern: layers.*.mlp.experts.*.up_proj, C: 4}]",
        "target.spec.model_class=transformers.Qwen3MoeForCausalLM",
    )
    experts = replace(WITH_EXPERTS, vocab_size=ARCHITECTURE.vocab_size)
    with pytest.raises(UserError, match=r"init_components: .* experts' matrices \(layers\.\d+\.mlp\.experts\.0\."):
        make_problem(ResolvedConfig(load_config(tiny.config, [*SETTINGS, *with_experts])), experts, "here")
    embedding, up = "{module_pattern: embed_tokens, C: 4}", "{module_pattern: layers.*.mlp.up_proj, C: 385}"
    with_embedding = f"pd.decomposition_targets=[{embedding}, {up}]"
    with pytest.raises(UserError) as refused:
        make_problem(ResolvedConfig(load_config(tiny.config, [*LIGHT, ALIGNED, with_embedding])), ARCHITECTURE, "here")
    other, *too_many = str(refused.value).splitlines()
    assert "embed_tokens faces no nonlinearity" in other
    assert ["has 384 and C 385" in line for line in too_many] == [True, True]


def test_what_is_said_of_it(tiny: Tiny) -> None:
    """`pd check`, and the parts that `pd probe` compiles."""
    checked = pd_here("check", tiny.config, "--set", FROM_DATA)
    assert checked.status == 0, checked
    assert "pd.faithfulness_warmup_steps: weighted singular vectors add up" in " ".join(checked.out.split())
    phases = list(run_subject(load_config(tiny.config, [FROM_DATA])).phases)
    assert phases[:4] == ["making the state", "second moments", "singular vectors", "faithfulness warm-up"]
    assert "second moments" not in run_subject(load_config(tiny.config)).phases
    assert list(run_subject(load_config(tiny.config, [ALIGNED])).phases)[:2] == [
        "making the state",
        "aligned components",
    ]
