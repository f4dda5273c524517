"""Evaluation (section 11) on the tiny run: its numbers against the reference, its keys, the examples of a report."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from param_decomp_jax.analysis.importances import chosen_logits, importance_logits, site_logits
from param_decomp_jax.ci import ChunkwiseTransformer, GlobalMLP, GlobalTransformer, LayerwiseMLP
from param_decomp_jax.method.masks import Stochastic, StochasticSources
from param_decomp_jax.method.recon import Reconstruction
from param_decomp_jax.method.state import State
from param_decomp_lab.config import RunConfig, load_config
from param_decomp_lab.config.core_specs import measured_terms
from param_decomp_lab.data.batches import Batches
from param_decomp_lab.data.token_data import TokenData
from param_decomp_lab.data.token_names import visible
from param_decomp_lab.eval.evaluation import Evaluation, EvaluationStopped
from param_decomp_lab.runs.checkpoints.store import Checkpoints
from param_decomp_lab.setup import Setup, set_up
from param_decomp_lab.setup.resolved import ResolvedConfig
from tests import reference as ref
from tests.cases import slow_but
from tests.core import tiny as core
from tests.lab.tiny_run import BATCH, EVAL_EVERY, SECOND_ON, SEQ_LEN, SITES, STEPS, Tiny

GROUPS = {"first": ["layers.0.*"], "everything": ["*"]}
MASKINGS = ("unmasked", "ci_masked", "rounded_masked", "stoch_masked", "random_masked", "zero_masked")
STEP = 6
TRANSFORMER = GlobalTransformer(8, 1, (16,), 2)


@dataclass(frozen=True)
class Evaluated:
    config: RunConfig
    setup: Setup
    evaluation: Evaluation
    state: State

    def row(self, step: int = STEP, stop: Callable[[], bool] = lambda: False) -> dict[str, float]:
        return self.evaluation.fast(self.state, self.setup.weights, step, stop).row


@pytest.fixture(scope="module")
def evaluated(tiny: Tiny) -> Evaluated:
    """A state in mid-training; losses in numbers large enough to compare."""
    config = load_config(tiny.config, ["eval.metrics.0.rounding_threshold=0.3"])
    setup = set_up(ResolvedConfig(config), Console(quiet=True))
    assert setup.eval is not None
    state = core.ruffled_state(setup.problem, leading=setup.leading)
    return Evaluated(config, setup, Evaluation(config, setup.problem, setup.eval, setup.mesh), state)


class Reference:
    """The reference on one batch of the evaluation, with the draws of the code."""

    def __init__(self, of: Evaluated, number: int) -> None:
        problem, self.config = of.setup.problem, of.config
        self.spec, self.sites = problem.decomposition, problem.target.sites
        self.names = [site.name for site in self.sites.all]
        self.tokens = held_out(of, number)
        self.target = core.ref_target(problem.target, of.setup.weights, self.tokens)
        self.clean = ref.clean_pass(self.target, self.names)
        self.components = core.ref_components(of.state.components, self.sites)
        ci = core.ref_ci(of.state.ci, self.sites)
        self.lower, _ = ref.causal_importance(core.schema(of.setup.problem), ci, self.clean.inputs, self.components)
        key = jax.random.fold_in(jax.random.fold_in(self.spec.key("eval"), STEP), number)
        self.of_losses, self.of_ce_kl = jax.random.split(key)

    def ce_and_kl(self, threshold: float) -> dict[str, float]:
        stochastic, random = (
            StochasticSources(Stochastic(), key, use_delta)
            for key, use_delta in zip(jax.random.split(self.of_ce_kl), (True, False), strict=True)
        )
        leading = self.tokens.shape
        draws = {s.name: core.drawn_at(stochastic, n, leading, s.C) for n, s in enumerate(self.sites.all)}
        sources = {s: {"components": core.array(u), "delta": core.array(delta)} for s, (u, delta) in draws.items()}
        masks = {s.name: core.array(core.drawn_at(random, n, leading, s.C)[0]) for n, s in enumerate(self.sites.all)}
        return ref.ce_and_kl(self.target, self.tokens, self.components, self.lower, sources, masks, threshold)

    def loss(self, metric: Any, number: int) -> float:
        """A reconstruction loss that is the evaluation's ``number``-th."""
        [spec] = measured_terms([metric], self.config)
        assert isinstance(spec, Reconstruction)
        key = jax.random.fold_in(self.of_losses, number)
        draws = core.ref_term_draws(spec, key, self.sites, self.tokens.shape, True)
        model = ref.Decomposition(self.target, ref.kl_error, self.clean, self.components, self.lower)
        forwards = ref.forwards_of(model, core.schema_term(spec), 1, draws, None)
        hidden_acts = ref.RECONSTRUCTION[metric.type].hidden_acts
        return float(ref.value(ref.reconstruction_term(model, 1.0, forwards, hidden_acts)))


def held_out(of: Evaluated, number: int) -> np.ndarray:
    return Batches(TokenData(of.config.wrapper.data.eval), BATCH, of.config.method.pd.seed)[number]


def test_agrees_with_the_reference(evaluated: Evaluated) -> None:
    """Means over the two batches; a share of lost cross-entropy is that of the means."""
    row = evaluated.row()
    batches = [Reference(evaluated, number) for number in range(2)]
    measured = [batch.ce_and_kl(0.3) for batch in batches]
    means = {name: np.mean([batch[name] for batch in measured]) for name in measured[0]}
    expected = {}
    for masking in MASKINGS:
        expected[f"kl_{masking}"] = means[f"kl_{masking}"]
        expected[f"ce_difference_{masking}"] = means[f"ce_difference_{masking}"]
        share = means[f"ce_difference_{masking}"] / means["ce_difference_zero_masked"]
        expected[f"ce_unrecovered_{masking}"] = share
    expected["ce_target"] = np.mean([ref.cross_entropy(batch.clean.output, batch.tokens) for batch in batches])
    got = {name.removeprefix("eval/ce_kl/"): value for name, value in row.items() if name.startswith("eval/ce_kl/")}
    assert min(means[f"kl_{masking}"] for masking in MASKINGS) > 0.01  # there is something to compare
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        # Cross-entropies are some 5 nats, their differences as exact as those, and the shares are of some tenths.
        tolerance = 1e-4 if name.startswith("ce_unrecovered") else 1e-5
        assert got[name] == pytest.approx(value, rel=tolerance, abs=1e-5), name

    l0 = [(0.0, GROUPS), (0.5, None)]
    for threshold, groups in l0:
        of_batches = [ref.l0(batch.lower, threshold, groups) for batch in batches]
        for name in of_batches[0]:
            value = row[f"eval/l0/{threshold}_{name}"]
            assert value == pytest.approx(np.mean([l0[name] for l0 in of_batches]), rel=1e-6), name
    assert row["eval/l0/0.0_everything"] == pytest.approx(sum(row[f"eval/l0/0.0_{site}"] for site in SITES))

    assert evaluated.config.method.eval is not None
    metrics = {metric.type: metric for metric in evaluated.config.method.eval.metrics}
    for number, name in enumerate(("PGDReconLoss", "CIHiddenActsReconLoss")):
        value = np.mean([batch.loss(metrics[name], number) for batch in batches])
        assert row[f"eval/loss/{name}"] == pytest.approx(value, rel=1e-5), name


def test_same_numbers_every_time(evaluated: Evaluated) -> None:
    assert evaluated.row() == evaluated.row()
    other = evaluated.row(step=STEP + 1)
    same = {name for name, value in evaluated.row().items() if other[name] == value}
    assert {"eval/ce_kl/kl_ci_masked", "eval/ce_kl/ce_target", "eval/loss/CIHiddenActsReconLoss"} <= same
    assert {"eval/ce_kl/kl_stoch_masked", "eval/ce_kl/kl_random_masked", "eval/loss/PGDReconLoss"}.isdisjoint(same)


def test_abandons_between_batches(evaluated: Evaluated) -> None:
    answers = iter([False, True])
    with pytest.raises(EvaluationStopped):
        evaluated.row(stop=lambda: next(answers))


def expected_keys() -> dict[str, set[str]]:
    ce_kl = {f"eval/ce_kl/{kind}_{m}" for m in MASKINGS for kind in ("kl", "ce_difference", "ce_unrecovered")}
    l0 = {f"eval/l0/0.0_{name}" for name in (*SITES, *GROUPS)} | {f"eval/l0/0.5_{name}" for name in SITES}
    losses = (
        "FaithfulnessLoss",
        "ImportanceMinimalityLoss",
        "ChunkwiseSubsetReconLoss",
        "PersistentPGDReconLoss",
        "total",
    )
    train = {f"loss/{name}" for name in losses}
    train |= {f"grad_norms/summary/{name}" for name in ("components", "ci_fns", "total")}
    train |= {"perf/step_time_s", "perf/tok_per_s", "perf/tok_per_s_per_gpu", "mem/peak_gb_per_rank"}
    schedules = ("components", "ci_fns", "PersistentPGDReconLoss", "PersistentPGDReconSubsetLoss")
    train |= {f"schedules/{name}_lr" for name in schedules}
    return {
        "evaluation": ce_kl
        | l0
        | {"eval/ce_kl/ce_target", "eval/loss/PGDReconLoss", "eval/loss/CIHiddenActsReconLoss"},
        "train": {f"train/{name}" for name in train},
        "late": {"train/loss/PersistentPGDReconSubsetLoss"},
    }


def test_keys_of_a_run(finished: Path) -> None:
    """The conventions' keys at their steps: logs every third and at the last, evaluations, the second adversary
    from where it joins (A6)."""
    keys = expected_keys()
    written = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    evaluated = range(0, STEPS + 1, EVAL_EVERY)
    assert [row["step"] for row in written] == sorted({*range(0, STEPS, 3), STEPS - 1, *evaluated})
    for row in written:
        step, expected = row.pop("step"), set[str]()
        if step < STEPS and (step % 3 == 0 or step == STEPS - 1):
            expected |= keys["train"] | (keys["late"] if step >= SECOND_ON else set())
        if step in evaluated:
            expected |= keys["evaluation"]
        assert row.keys() == expected, step
        assert all(np.isfinite(value) for value in row.values())
    assert {path.name for path in (finished / "figures").iterdir()} == {
        f"{name}_{STEPS}.png" for name in ("ci_histograms", "mean_ci_per_component", "activation_density")
    }


def test_examples(tiny: Tiny, finished: Path) -> None:
    """Every window is one of an evaluation row around its peak, with the importances of the saved decomposition."""
    config = RunConfig.from_yaml(finished / "config.yaml")
    sites = json.loads((finished / "examples.json").read_text())["sites"]
    assert {name: site["C"] for name, site in sites.items()} == SITES
    batches = Batches(TokenData(tiny.folder / "data" / "eval"), BATCH, config.method.pd.seed)
    tokens = np.concatenate([batches[number] for number in range(2)])
    seen = 0
    for site in sites.values():
        components = site["components"]
        means = [component["mean_ci"] for component in components]
        assert means == sorted(means, reverse=True)
        assert len({component["component"] for component in components}) == len(components) == min(16, site["C"])
        for component in components:
            examples = component["examples"]
            assert len(examples) <= 6
            assert len({example["row"] for example in examples}) == len(examples)
            peaks = [example["ci"][example["peak"]] for example in examples]
            assert peaks == sorted(peaks, reverse=True)
            for example in examples:
                ci, text = example["ci"], "".join(example["tokens"])
                assert len(ci) == len(example["tokens"]) == SEQ_LEN  # shorter than what is shown on each side
                assert max(ci) == ci[example["peak"]] > 0
                assert all(0 <= value <= 1 for value in ci)
                row = bytes(tokens[example["row"]].astype(np.uint8)).decode()
                assert text == visible(row)
                seen += 1
    assert seen > 50


def test_examples_have_the_importances_of_the_decomposition(finished: Path) -> None:
    """The λ beside the tokens, recomputed by the reference from the arrays of the last checkpoint."""
    setup = set_up(ResolvedConfig(RunConfig.from_yaml(finished / "config.yaml")), Console(quiet=True))
    state = Checkpoints(finished).restore(STEPS, setup.outline.state)
    assert setup.eval is not None
    evaluated = Evaluated(RunConfig.from_yaml(finished / "config.yaml"), setup, None, state)  # type: ignore[arg-type]
    lower = [Reference(evaluated, number).lower for number in range(2)]
    sites = json.loads((finished / "examples.json").read_text())["sites"]
    for name, site in sites.items():
        values = np.concatenate([batch[name] for batch in lower])
        for component in site["components"]:
            of_component = values[..., component["component"]]
            assert component["mean_ci"] == pytest.approx(of_component.mean(), abs=1e-5)
            for example in component["examples"]:
                np.testing.assert_allclose(example["ci"], of_component[example["row"]], atol=1e-4)
            best = sorted(of_component.max(axis=1), reverse=True)[: len(component["examples"])]
            got = [example["ci"][example["peak"]] for example in component["examples"]]
            np.testing.assert_allclose(got, best, atol=1e-4)


@pytest.mark.parametrize(
    "ci",
    [
        core.SHARED,
        *slow_but((), (LayerwiseMLP("mlp", (3,)), LayerwiseMLP("vector_mlp", (3,)), GlobalMLP((5,)), TRANSFORMER)),
        ChunkwiseTransformer(TRANSFORMER, 2),
    ],
)
def test_logits_of_chosen_components_and_sites(ci: Any) -> None:
    """Those that all the logits have in the same places."""
    problem = core.problem((), ci=ci)
    state = core.ruffled_state(problem)
    tokens = jnp.arange(np.prod(core.LEADING), dtype=jnp.int32).reshape(core.LEADING) % 7
    arguments = state.learned, core.weights(), tokens
    of_all = jax.jit(partial(importance_logits, problem))(*arguments)
    chosen = {
        s.name: np.array([[2, 0, 2]] * s.n_layers) + np.arange(s.n_layers)[:, None] for s in problem.target.sites.stacks
    }
    few = jax.jit(lambda *of: chosen_logits(problem, *of, chosen))(*arguments)
    for name, logits in of_all.items():
        expected = np.stack([logits[row][..., numbers] for row, numbers in enumerate(chosen[name])])
        np.testing.assert_allclose(few[name], expected, rtol=1e-5, atol=1e-6)
    by_site = problem.target.sites.unstack(of_all)
    names = [*by_site][1], [*by_site][-1]
    for name, logits in jax.jit(lambda *of: site_logits(problem, *of, names))(*arguments).items():
        np.testing.assert_allclose(logits, by_site[name], rtol=1e-5, atol=1e-6)
