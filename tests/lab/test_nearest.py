"""Nearest components against cosines of all pairs."""

from pathlib import Path

import numpy as np
import pytest

from param_decomp_lab import load_run
from param_decomp_lab.errors import UserError
from param_decomp_lab.opening import Run


def layer_of(site: str) -> str:
    return site.split(".")[1]


def same_space(side: str, one: str, other: str) -> bool:
    """Whether two sites of a Llama share a space, written down by hand."""
    if one == other:
        return True
    kinds = {site.rpartition(".")[2] for site in (one, other)}
    if side == "V":
        return kinds <= {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"}
    return kinds <= {"o_proj", "down_proj"} or (layer_of(one) == layer_of(other) and kinds == {"gate_proj", "up_proj"})


@pytest.fixture(scope="module")
def run(finished: Path) -> Run:
    return load_run(finished, devices=1)


@pytest.mark.parametrize("side", ["U", "V"])
@pytest.mark.parametrize("at_once", [7, 1 << 14])
def test_nearest_are_those_of_largest_cosine(
    run: Run, side: str, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("param_decomp_lab.opening.nearest.AT_ONCE", at_once)
    several = 0
    for site in run.sites:
        for number in (0, 7):
            everything = []
            for other in filter(lambda name: same_space(side, site, name), run.sites):
                rows = [V.T if side == "V" else U for V, U in (run.factors(site), run.factors(other))]
                mine, theirs = (x.astype(np.float64) for x in rows)
                for n, row in enumerate(theirs):
                    if (other, n) != (site, number):
                        cosine = row @ mine[number] / np.sqrt((row @ row) * (mine[number] @ mine[number]))
                        everything.append((other, n, cosine))
            everything.sort(key=lambda found: -abs(found[2]))
            found = run.nearest(site, number, side, most=9)
            assert [f[:2] for f in found] == [f[:2] for f in everything[:9]]
            assert [f.cosine for f in found] == pytest.approx([f[2] for f in everything[:9]], abs=1e-12)
            several += len({f.site for f in found}) > 1
            here = [f for f in everything if f[0] == site]
            assert [f[1] for f in run.nearest(site, number, side, most=10**6, sites=site)] == [f[1] for f in here]
    assert several


def test_a_direction_of_zeros_is_near_to_nothing(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    site = next(iter(run.sites))
    U = run.directions(site, "U").copy()
    U[3] = 0
    monkeypatch.setattr(run, "directions", lambda name, side: U)
    assert 3 not in [f.number for f in run.nearest(site, 0, sites=site, most=100)]
    assert len(run.nearest(site, 0, sites=site, most=100)) == len(U) - 2


def test_a_toy_has_them(toy: Path) -> None:
    run = load_run(toy / "p-00000001", devices=1)
    for site in run.sites:
        assert {f.site for side in ("U", "V") for f in run.nearest(site, 0, side)} == {site}


def test_wrong_questions(run: Run) -> None:
    site = next(iter(run.sites))
    for arguments, message in (
        (("nowhere", 0), "unknown site 'nowhere'"),
        ((site, 10**6), "and no component"), ((site, 0, "W"), "should be U, V or both"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=message):
            run.nearest(*arguments)
