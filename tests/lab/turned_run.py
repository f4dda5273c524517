"""A run with the components of another, numbered anew, some with both signs turned, and a little noise: whose partners
are known."""

from dataclasses import dataclass

import numpy as np
import pytest

from param_decomp_lab.opening import Run


@dataclass(frozen=True)
class Turned:
    """``partner``: by site, the number here of each component there. ``sign``: -1 where V and U are turned."""

    run: Run
    partner: dict[str, np.ndarray]
    sign: dict[str, np.ndarray]


def turned(run: Run, monkeypatch: pytest.MonkeyPatch, seed: int = 0) -> Turned:
    """Changes an opened run so. Components that fire in its harvest change places among themselves."""
    rng = np.random.default_rng(seed)
    factors: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    partner, sign = {}, {}
    for site in run.sites:
        V, U = run.factors(site)
        fires = np.flatnonzero(run.harvest.components(site)["firings"].to_numpy() > 0)
        place = np.arange(V.shape[1])
        place[fires] = rng.permutation(fires)
        signs, sizes = rng.choice([-1.0, 1.0], len(place)), rng.uniform(0.5, 2, len(place))
        noisy = [x + 0.02 * np.linalg.norm(x, axis=0) * rng.standard_normal(x.shape) for x in (V, U.T)]
        new_V, new_U = np.zeros_like(V), np.zeros_like(U)
        new_V[:, place], new_U[place] = noisy[0] * signs * sizes, (noisy[1] * signs).T
        factors[site], partner[site], sign[site] = (new_V, new_U), place, signs
    monkeypatch.setattr(run, "factors", lambda site: factors[site])
    return Turned(run, partner, sign)
