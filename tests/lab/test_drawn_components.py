"""`experiments.evidence.drawn_components`: which components are drawn, on a harvest whose firings are known."""

from pathlib import Path

import numpy as np

from experiments.evidence.drawn_components import candidates, draw
from tests.lab.planted_harvest import SITES, THRESHOLD, C, plant


def test_those_that_fire_as_often_as_asked_for(tmp_path: Path) -> None:
    planted = plant(tmp_path)
    found = candidates(planted.harvest, 0.01, 0.1)
    share = {site: (planted.importances[site] > THRESHOLD).mean((0, 1)) for site in SITES}
    assert found == [(site, c) for site in SITES for c in range(C) if 0.01 <= share[site][c] <= 0.1]
    assert {site for site, _ in found} == set(SITES)


def test_draws_are_those_of_the_seed_and_differ() -> None:
    found = [(site, c) for site in SITES for c in range(C)]
    drawn = draw(found, 10, 0)
    assert drawn == draw(found, 10, 0) == sorted(set(drawn))
    assert len(drawn) == 10
    assert drawn != draw(found, 10, 1)
    assert draw(found, 100, 0) == found
    counts = np.zeros(len(found))
    for seed in range(400):
        counts[[found.index(one) for one in draw(found, 12, seed)]] += 1
    assert abs(counts / 400 - 12 / len(found)).max() < 0.1  # each as often as the others
