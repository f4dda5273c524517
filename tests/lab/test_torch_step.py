"""`experiments/benchmarks/torch_step.py`: both sides compute the same step, the bound's counts by hand, the tables."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from experiments.benchmarks.scalar_mlp_bound import Counts, Rates, counts
from experiments.benchmarks.torch_step import TOLERANCE, TOYS, Figures, disagreement, main, tables
from param_decomp_jax.decomposition.schedules import Schedule
from param_decomp_jax.method.step import Problem
from param_decomp_lab.config import load_config
from param_decomp_lab.setup.known_target import KnownTarget, find_target
from param_decomp_lab.setup.resolved import ResolvedConfig
from tests.lab.tiny_run import ROOT


def problem_of(path: Path) -> Problem:
    target = find_target(ResolvedConfig(load_config(path)))
    assert isinstance(target, KnownTarget)
    return target.problem


# ---- with torch ----


@pytest.mark.parametrize("path", TOYS, ids=lambda path: path.stem)
def test_the_sides_compute_the_same(path: Path) -> None:
    pytest.importorskip("torch")
    assert max(disagreement(path, rows=24).values()) <= TOLERANCE / 10


def test_a_difference_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the squashings' leak, which is in the gradients alone."""
    pytest.importorskip("torch")
    from experiments.benchmarks import torch_decomposition

    monkeypatch.setattr(torch_decomposition, "LEAK", 0.02)
    apart = disagreement(TOYS[0], rows=24)
    assert apart["gradients"] > TOLERANCE


def test_learning_rates() -> None:
    pytest.importorskip("torch")
    from experiments.benchmarks.torch_decomposition import scheduled

    for schedule in (Schedule(0.1), Schedule(0.2, "linear", 0.2, 0.1), Schedule(0.3, "cosine", 0.1, 0.0)):
        for step in (0, 1, 3, 9):
            assert scheduled(schedule, step, 10) == pytest.approx(float(schedule(step, 10)), rel=1e-6, abs=1e-9)


def test_what_is_not_written_is_refused() -> None:
    pytest.importorskip("torch")
    from experiments.benchmarks.torch_decomposition import unsupported

    problem = problem_of(TOYS[0])
    assert list(unsupported(problem)) == []
    other = replace(problem, decomposition=replace(problem.decomposition, squashing="normal"))
    assert list(unsupported(other)) == ["sigmoid_type: normal"]
    with pytest.raises(SystemExit, match="is not the configuration of a toy"):
        main([str(ROOT / "configs" / "demo" / "transformer.yaml")])


# ---- without ----


def test_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(SystemExit, match=r"PyTorch, which is not installed here: pip install 'torch>=2\.4'"):
        main([])


def test_counts_of_tms() -> None:
    """5 features, 2 dimensions, 2 sites of 20 components, MLPs 1 → 16 → 1, 4096 rows."""
    clean = 2 * 5 * 2
    acts = 2 * (5 + 2) * 20
    first_alone = 3 * 20 * 2 + 2 * 2 * 5
    last_alone = 3 * 20 * 5
    both = 3 * 20 * 2 + 3 * 2 * 20 + 3 * 20 * 5 + 2 * 2 * 5
    a_row = clean + acts + first_alone + last_alone + both
    ci = 4096 * 40 * 3 * (16 + 16)
    assert counts(problem_of(TOYS[0])) == Counts(4096 * 40 * 16, ci, ci + 4096 * a_row)


def test_tables() -> None:
    figures = Figures(
        name="toy",
        rows=8,
        steps=2,
        disagreement={"losses": 1e-7, "gradients": 2e-6},
        ours=(0.010, 0.020, 0.010),
        torch=(0.040, 0.100, 0.060),
        losses=(0.5, 0.25),
        counts=Counts(4_000_000, 10_000_000, 30_000_000),
        rates=Rates(2e9, 1e10),
    )
    assert figures.bound == pytest.approx(0.005)
    times, arithmetic, apart = (table.splitlines()[-1] for table in tables([figures]).split("\n\n"))
    assert times == "| `toy` | 8 | 2 | 60.0 ms | 10.00 ms | 5.00 | 4.00 to 6.00 | 0.25, 0.5 |"
    assert arithmetic == "| `toy` | 4.00 M | 2.00 G | 30.0 M (10.0 M) | 10.0 G | 5.00 ms | 2.00 |"
    assert apart == "| `toy` | 1.0e-07 | 2.0e-06 |"
