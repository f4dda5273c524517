"""`pd check`: what it says is what a run would do, it fits the terminal, and its status can be relied on."""

import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from param_decomp_jax.decomposition.schedules import Schedule
from param_decomp_jax.method import recon
from param_decomp_jax.method.adversary import FreshAttack, PersistentAttack, SignAscent, SingleSource
from param_decomp_jax.method.masks import Stochastic
from param_decomp_jax.method.recon import AllSites, Beside, EachSite, Reconstruction, n_attack_passes, n_forwards
from param_decomp_jax.method.routing import Everywhere
from param_decomp_jax.method.step import training_step
from param_decomp_jax.targets.llama import LlamaConfig
from param_decomp_lab.check.plots import curve
from param_decomp_lab.ui.descriptions import describe_live_sets
from param_decomp_lab.ui.numbers import byte_size
from param_decomp_lab.weights.target_folder import read_architecture, save_target
from tests.core import tiny as core
from tests.core import toys
from tests.lab.tiny_run import EVAL_EVERY, ROOT, SECOND_ON, SITES, STEPS, WARM_UP, Tiny, pd_here

TOYS = sorted((ROOT / "configs" / "toys").glob("*.yaml"))
EXAMPLE = ROOT / "configs" / "llama8b_l18_example.yaml"


@pytest.fixture(autouse=True)
def nothing_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """No weights, no rows, no training of a target."""
    for name in ("setup.read_weights", "data.token_data.TokenData.rows", "pretrain.toys.make_toy"):
        monkeypatch.setattr(f"param_decomp_lab.{name}", mock.Mock(side_effect=AssertionError))


def check(path: Path, *assignments: str, width: int = 120) -> str:
    """What it prints, with single spaces."""
    with mock.patch.dict("os.environ", {"COLUMNS": str(width)}):
        outcome = pd_here("check", path, *(word for assignment in assignments for word in ("--set", assignment)))
    assert outcome.status == 0, outcome
    assert max(map(len, outcome.out.splitlines())) <= width
    assert "…" not in outcome.out.replace("p-…", ""), "something was cut off"
    return " ".join(outcome.out.split())


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("path", [*TOYS, EXAMPLE], ids=lambda path: path.stem)
def test_shipped_configurations(path: Path, width: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where nothing has been trained or downloaded, and without leaving anything behind."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    said = check(path, width=width)
    for heading in ("Sites:", "Loss terms", "Parameters and training state", "Schedules over", "Evaluation:"):
        assert heading in said
    assert list(tmp_path.iterdir()) == []


def test_long_paths_are_shown_whole(tmp_path: Path) -> None:
    folder = tmp_path / ("long-" * 16)
    shutil.copytree(ROOT / "configs", folder)
    said = check(folder / "toys" / "resid_mlp1.yaml", width=80).replace(" ", "")
    assert str(folder) in said


def test_toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    knots = "{max_val: 2, points: [{at: 0, frac: 1}, {at: 1, frac: 0.5}]}"
    said = check(ROOT / "configs" / "toys" / "tms_5-2-id.yaml", f"pd.loss_metrics.1.coeff={knots}")
    assert "StochasticReconLoss scheduled 1 0" in said
    assert "coefficient 2 to 1 by 2 knots, 2 at most" in said
    assert "StochasticReconLoss coeff 2 ⠉" in said
    assert "TMS, 5 features in 2, 1 hidden layer" in said
    assert "to be trained first (10,000 steps)" in said
    assert "linear1 5 × 2 20 140" in said
    assert "linear2 2 × 5 20 – tied to linear1" in said
    assert "linear1 and linear2: updated once a step; the PyTorch project updates a pair twice" in said
    assert "StochasticReconLayerwiseLoss 1 3 0" in said
    assert "total 4 0" in said
    assert "components lr 0.001" in said
    assert "accepted, without effect here: runtime.device" in said


def test_language_model(tiny: Tiny) -> None:
    said = check(tiny.config, "pd.loss_metrics.2.sites_per_chunk=2")
    for site in ("layers.0-1.mlp.up_proj 2 × 16 × 24 20", "layers.0-1.mlp.down_proj 2 × 24 × 16 12"):
        assert site in said
    assert f"Sites: {len(SITES)}" in said
    assert "ChunkwiseSubsetReconLoss 1 2 0" in said
    assert "2 chunks of 2 sites live; routed to a uniform k-subset; stochastic continuous sources" in said
    assert "PersistentPGDReconLoss 0.5 1 1" in said
    assert f"on from step {SECOND_ON}" in said
    assert "total 4 1" in said
    assert f"{STEPS} steps of 8 rows × 16 = 128 tokens, after {WARM_UP} on faithfulness alone" in said
    assert f"PGDReconLoss {EVAL_EVERY} 4" in said  # three ascents and the error itself
    assert "ImportanceMinimalityLoss p" in said
    assert "not on this machine" not in said


def test_counts_are_those_of_the_state(tiny: Tiny) -> None:
    """Against arrays of a state that was built."""
    spec = "pd.ci_config={mode: layerwise, fn_type: shared_mlp, hidden_dims: [8]}"
    said = check(tiny.config, spec)
    components = sum((16 + 24) * C for C in SITES.values())
    ci = sum(d_in * 8 + 8 + 8 * C + C for d_in, C in ((16, 20), (24, 12))) * 2
    assert f"components V, U {components:,} " in said
    assert f"CI function {ci:,} " in said
    kept = sum(C + 1 for C in SITES.values())
    assert f"sources of PersistentPGDReconLoss {16 * kept:,}" in said
    assert f"sources of PersistentPGDReconSubsetLoss {8 * 16 * kept:,}" in said
    n_weights = sum(leaf.size for leaf in jax.tree.leaves(core.weights(read_architecture(tiny.folder / "target"))))
    assert f"target, frozen {n_weights:,} {byte_size(4 * n_weights)}".replace("\u00a0", " ") in said


def test_many_sites_stay_readable() -> None:
    every = "pd.decomposition_targets=[{module_pattern: 'layers.*.mlp.*_proj', C: 49152}]"
    said = check(EXAMPLE, every, "eval=null")
    assert "Sites: 96" in said
    assert "layers.0-31.mlp.gate_proj 32 × 4096 × 14336 49,152 29.0 B" in said


def test_what_the_architecture_does_not_take(tiny: Tiny) -> None:
    """A class that the folder does not hold, and rows longer than it has positions for."""
    outcome = pd_here("check", tiny.config, "--set", "target.spec.model_class=transformers.GPT2LMHeadModel")
    assert outcome.status == 2
    assert "target.spec.model_class: is transformers.GPT2LMHeadModel, but" in outcome.err
    assert "holds a Llama; say LlamaForCausalLM" in outcome.err
    long = "pd.ci_config={mode: layerwise, fn_type: shared_mlp, hidden_dims: [8]}", "data.max_seq_len=4096"
    outcome = pd_here("check", tiny.config, *(word for assignment in long for word in ("--set", assignment)))
    assert outcome.status == 2
    assert "data.max_seq_len: is 4096, but the target takes at most 2048 tokens" in outcome.err


def test_a_target_that_nobody_knows(tiny: Tiny, tmp_path: Path) -> None:
    """Everything else is said, and the status tells."""
    outcome = pd_here("check", tiny.config, "--set", f"target.folder={tmp_path / 'nowhere'}")
    assert outcome.status == 2
    assert "nowhere is not there; give the folder of a model" in outcome.err
    for text in ("model.layers.*.mlp.up_proj", "1 per chunk", f"Schedules over {STEPS} steps", "CEandKLLosses"):
        assert text in outcome.out


def test_an_architecture_is_enough(tiny: Tiny, tmp_path: Path) -> None:
    shutil.copy(tiny.folder / "target" / "config.json", tmp_path)
    assert "the target's weights: no model.safetensors in" in check(tiny.config, f"target.folder={tmp_path}")


def test_published_architectures() -> None:
    llama = LlamaConfig.published["meta-llama/Llama-3.1-8B"]
    assert (llama.n_layers, llama.d_model, llama.rope_theta, llama.tied) == (32, 4096, 500_000.0, False)
    said = check(EXAMPLE, "target.folder=/nowhere/at/all")
    assert "meta-llama/Llama-3.1-8B is not in the wrapper's target.folder" in said


def test_data_that_is_missing_or_does_not_fit(tiny: Tiny) -> None:
    assert "not on this machine: data:" in check(tiny.config, "data.train=nowhere")
    for assignment, reason in (
        ("data.max_seq_len=8", "rows have 16 tokens, but data.max_seq_len is 8"),
        ("pd.batch_size=100000", "rows; one batch takes 100000"),
        ("eval.n_steps=100000", "an evaluation takes 800000"),
        ("data.eval=data/train", "are the same folder"),
    ):
        outcome = pd_here("check", tiny.config, "--set", assignment)
        assert outcome.status == 2
        assert reason in outcome.err


def test_a_run_that_is_there_already(tiny: Tiny, tmp_path: Path) -> None:
    (tmp_path / "p-00000001").mkdir()
    sets = (f"out_dir={tmp_path}", "run_id=p-00000001")
    outcome = pd_here("check", tiny.config, *(word for assignment in sets for word in ("--set", assignment)))
    assert outcome.status == 2
    assert "exists already" in outcome.err


def test_a_recipe_that_made_something_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    taken = tmp_path / "runs" / "targets" / "tms_5-2"
    taken.mkdir(parents=True)
    (taken / "something").write_text("else")
    outcome = pd_here("check", ROOT / "configs" / "toys" / "tms_5-2.yaml")
    assert outcome.status == 2
    assert "exists and is not empty" in outcome.err


# ---- its parts ----


def test_passes_are_those_that_are_made() -> None:
    """Against a step whose loops are written out, where every pass can be counted."""

    def written_out(first: int, stop: int, body: Any, carry: Any) -> Any:
        for n in range(first, stop):
            carry = body(jnp.asarray(n), carry)
        return carry

    kept = PersistentAttack(SignAscent(Schedule(0.1)), SingleSource(), n_warmup_steps=3)
    terms = (
        Reconstruction("a", 1.0, EachSite(), Everywhere(), Stochastic(), 2),
        Reconstruction("b", 1.0, EachSite(), Everywhere(), FreshAttack("ones", 0.1, 2, "unique_per_datapoint")),
        Reconstruction("c", 1.0, AllSites(), Everywhere(), kept),
        Reconstruction("d", 1.0, AllSites(), Everywhere(), kept, beside=Beside(1.0, ("resid_post.*",))),
        Reconstruction("e", 1.0, AllSites(), Everywhere(), kept, beside=Beside(1.0, ("resid_post.*",), "term")),
    )
    config = toys.residual()
    problem = core.problem(terms, toys.target(config, {"layers.0.mlp_in": 3, "layers.2.mlp_in": 2}))
    state = core.ruffled_state(problem, leading=(toys.ROWS,))
    inputs = jnp.asarray(toys.features(config))
    with (
        mock.patch.object(recon, "run_masked", wraps=recon.run_masked) as made,
        mock.patch.object(jax.lax, "fori_loop", written_out),
    ):
        jax.eval_shape(lambda: training_step(problem, state, toys.weights(config), inputs))
    passes = sum(len(call.args[1]) for call in made.call_args_list)
    assert passes == sum(n_forwards(t, 2) + n_attack_passes(t, 2) for t in terms) == 4 + (2 + 4) + 4 + (4 + 1) + 4


def test_curves() -> None:
    assert curve([0, 0, 1, 1], 1) == ["⣀⠏"]
    assert curve([1.0] * 4, 1) == ["⠉⠉"]
    assert curve([0.0] * 4, 1) == ["⣀⣀"]
    assert curve([None, None, 2.0, 2.0], 2) == ["⠀⠉", "⠀⠀"]
    rising = curve(list(np.linspace(0, 1, 20)), 2)
    assert [len(line) for line in rising] == [10, 10]


def test_words_of_chunks() -> None:
    assert describe_live_sets(recon.Chunks(4), 6) == "2 chunks of 4 sites live, the last of 2"
    assert describe_live_sets(recon.Chunks(9), 3) == "1 chunk of 3 sites live"
    assert describe_live_sets(AllSites(), None) == "all sites live"


def test_a_llama_without_a_table_entry(tmp_path: Path, tiny: Tiny) -> None:
    config = LlamaConfig(vocab_size=256, d_model=8, n_layers=2, n_heads=2, n_kv_heads=1, head_dim=4, d_mlp=12)
    save_target(tmp_path / "other", config, core.weights(config))
    assert "8 × 12" in check(tiny.config, f"target.folder={tmp_path / 'other'}")
