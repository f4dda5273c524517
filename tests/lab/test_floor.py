"""λ beside importances optimised for their batch, and each matrix masked alone (`one_site`)."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from experiments.evidence import floor, one_site
from param_decomp_lab.baselines.result import LAMBDA, OWN


@pytest.fixture(scope="module")
def rows(finished: Path) -> list[floor.Row]:
    return floor.measure(finished, 4, 80, 0.05, 5, against=False)[0]


def test_optimised_importances_are_better_at_the_same_l0(rows: list[floor.Row]) -> None:
    own, same, again, best, weighted = (row.point for row in rows)
    assert [row.chosen for row in rows][:3] == [LAMBDA, floor.FROM_LAMBDA, floor.FROM_GRADIENT]
    assert {row.parts for row in rows[:3]} == {OWN}
    for point in (same, again, weighted):
        assert point.l0 == pytest.approx(own.l0, rel=0.05)
    assert best.l0 == pytest.approx(own.l0, rel=0.2)  # of the two numbers of parts, rows have one each
    assert same.error < own.error
    assert same.random < 1.05 * own.random
    assert again.error < own.error
    assert max(weighted.error, weighted.random) < own.error


def test_optimised_against_an_attack(finished: Path, rows: list[floor.Row]) -> None:
    against = floor.measure(finished, 4, 80, 0.05, 5, against=True)[0]
    assert against[1].point.attacked[-1] < rows[1].point.attacked[-1]
    assert against[0].point == rows[0].point


def test_exactly_so_many_are_kept() -> None:
    rng = np.random.default_rng(0)
    shapes = {"a": (1, 3, 4), "b": (2, 3, 5)}
    masks = {name: jnp.asarray(rng.uniform(0.1, 1, shape), jnp.float32) for name, shape in shapes.items()}
    few = floor.keep_largest(masks, 7, masks)
    assert sum(int((m > 0).sum()) for m in few.values()) == 7
    left = max(float(jnp.where(few[name] > 0, 0, m).max()) for name, m in masks.items())
    assert left < min(float(m[m > 0].min()) for m in few.values() if (m > 0).any())
    filled = floor.keep_largest(few, 9, masks)
    for name, m in floor.keep_largest(masks, 9, masks).items():
        np.testing.assert_array_equal(filled[name] > 0, m > 0)
        assert (filled[name][few[name] == 0] <= np.float32(floor.LEAST)).all()


def test_what_is_printed(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    floor.main([str(finished), "--rows", "4", "--steps", "4", "--attack", "5"])
    printed = capsys.readouterr().out
    assert printed.count("\n| ") == 6
    assert "64 positions from" in printed
    assert "times the error of importances optimised for the batch" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rows", "0"], "--rows 0: should be at least 1"),
        (["--steps", "3"], "--steps 3: should be at least 4"),
        (["--attack", "0"], "--attack 0: should be at least 1"),
        (["--learning-rate", "0"], "--learning-rate 0.0: should be above 0"),
    ],
)
def test_wrong_options(finished: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        floor.main([str(finished), *arguments])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        floor.main([str(tmp_path)])
    assert ended.value.code == 2
    assert str(tmp_path) in capsys.readouterr().err


def test_each_site_alone(finished: Path, rows: list[floor.Row], capsys: pytest.CaptureFixture[str]) -> None:
    one_site.main([str(finished), "--rows", "4", "--k", "1,1000"])
    head, _, own, *baselines = [
        [cell.strip().replace("−", "-") for cell in line.split("|")[1:-1]]
        for line in capsys.readouterr().out.split("\n\n")[1].splitlines()
    ]
    assert head[-1] == "all"
    assert float(own[-1]) == pytest.approx(rows[0].point.error, rel=1e-2)  # as printed; the same four rows
    for one, every in zip(baselines[::2], baselines[1::2], strict=True):
        assert [one[1], every[1]] == ["1", "1,000"]
        assert all(float(x) < 1e-5 for x in every[2:])  # all parts are the matrix
        assert min(float(x) for x in one[2:]) > 1e-4


def test_masks_of_one_site_alone() -> None:
    given = {"a": jnp.zeros((1, 3, 4)), "b": jnp.full((2, 3, 5), 0.5)}
    first, second, every = one_site.alone(given)
    assert every is given
    assert first["a"] is given["a"]
    assert second["b"] is given["b"]
    assert (first["b"] == 1).all()
    assert (second["a"] == 1).all()


def test_how_often_components_are_on() -> None:
    on = np.zeros((2, 4, 3), np.float32)  # two layers of four positions
    on[:, :, 0] = 1  # always
    on[0, :3, 1] = 0.1  # at three of four
    on[1, 0, 2] = 1  # once
    assert list(one_site.frequencies({"a": jnp.asarray(on)})) == [["a", "3", "91.7\xa0%", "1", "0.125"]]
