"""Measures whether two runs found the same components."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import numpy as np
from jaxtyping import Float

from param_decomp_lab.compare.records import Record
from param_decomp_lab.errors import UserError
from param_decomp_lab.eval.request import EvaluationRequest, evaluation_config
from param_decomp_lab.eval.run_evaluation import evaluation_batches
from param_decomp_lab.matching.pairs import Fired, all_cosines, assignment, random_like
from param_decomp_lab.opening import Run, load_run
from param_decomp_lab.opening.matched import DecomposedTarget, decomposed_target

MOST = 2048
"""The most components of a site that are matched, those of largest mean λ, because an assignment takes n³ operations.
"""

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Cosines:
    """Means over matched pairs (P4): of ``V``, of ``U``, and of the rank-one matrices V ⊗ U."""

    V: float
    U: float
    matrix: float


@dataclass(frozen=True)
class SiteAgreement:
    """The agreement of two runs at a site. ``counts``: numbers of components that fire in each, of which the smaller is
    matched. ``cosines``, and ``by_chance`` for as many random directions: None if no component of a run fires.
    """

    site: str
    counts: tuple[int, int]
    cosines: Cosines | None
    by_chance: Cosines | None


@dataclass(frozen=True)
class RunAgreement:
    """The agreement of two runs, given by their index among the records. ``why``: the reason if it could not be
    measured.
    """

    one: int
    other: int
    sites: tuple[SiteAgreement, ...] = ()
    why: str = ""

    @property
    def cosines(self) -> Cosines | None:
        """Means over the sites."""
        return _mean([site.cosines for site in self.sites if site.cosines is not None])

    @property
    def by_chance(self) -> Cosines | None:
        return _mean([site.by_chance for site in self.sites if site.by_chance is not None])


def agreements(
    records: Sequence[Record], groups: Sequence[Sequence[int]], progress: Progress = lambda what: None
) -> list[RunAgreement]:
    """Returns the agreement of all pairs of finished runs that differ only in their seeds or, without such pairs, of
    all pairs of finished runs. Pairs with a run that cannot be read give the reason.
    """
    done = [[number for number in group if records[number].finished] for group in groups]
    pairs = [pair for group in done for pair in combinations(group, 2)]
    if not pairs:
        pairs = list(combinations(sorted(number for group in done for number in group), 2))
    read: dict[int, tuple[DecomposedTarget, dict[str, Fired]] | str] = {}
    for number in sorted({number for pair in pairs for number in pair}):
        progress(f"reading {records[number].status.folder}")
        try:
            read[number] = _fired(Path(records[number].status.folder))
        except UserError as error:
            read[number] = str(error)
    found = []
    for n, (one, other) in enumerate(pairs, 1):
        progress(f"matching components, pair {n} of {len(pairs)}")
        a, b = read[one], read[other]
        if isinstance(a, str) or isinstance(b, str):
            found.append(RunAgreement(one, other, why=a if isinstance(a, str) else str(b)))
            continue
        (target, mine), (other_target, theirs) = a, b
        if difference := target.difference(other_target):
            found.append(RunAgreement(one, other, why=difference))
        elif {name: (x.V.shape[0], x.U.shape[1]) for name, x in mine.items()} != {
            name: (x.V.shape[0], x.U.shape[1]) for name, x in theirs.items()
        }:
            found.append(RunAgreement(one, other, why="they decompose different matrices"))
        else:
            found.append(RunAgreement(one, other, tuple(of_site(name, x, theirs[name]) for name, x in mine.items())))
    return found


def of_site(name: str, one: Fired, other: Fired, seed: int = 0) -> SiteAgreement:
    """Computes P4 for two runs at a site. ``seed``: of the random directions."""
    counts = one.V.shape[1], other.V.shape[1]
    if not all(counts):
        return SiteAgreement(name, counts, None, None)
    return SiteAgreement(name, counts, matched(one, other), matched(*random_like(one, other, seed)))


def matched(one: Fired, other: Fired) -> Cosines:
    """Returns the mean cosines of pairs that are matched one to one so that their sum is largest, separately for V, U
    and the matrices.
    """
    V, U = all_cosines(one, other)
    return Cosines(*(float(x[assignment(x)].mean()) for x in (np.abs(V), np.abs(U), V * U)))


def _fired(folder: Path) -> tuple[DecomposedTarget, dict[str, Fired]]:
    """Returns a run's target, and by site its components that fire in its evaluation's batches: at most `MOST`, those
    of largest mean λ.
    """
    run = load_run(folder)
    means = _mean_importances(run)
    found = {}
    for site in run.sites:
        V, U = run.factors(site)
        firing = np.flatnonzero(means[site] > 0)
        chosen = np.sort(firing[np.argsort(-means[site][firing], kind="stable")[:MOST]])
        found[site] = Fired(V[:, chosen], U[chosen])
    return decomposed_target(run), found


def _mean_importances(run: Run) -> dict[str, Float[np.ndarray, " C"]]:
    """Returns the mean λ of every component over the batches of the run's own evaluation, or over a single batch if it
    has none.
    """
    request = EvaluationRequest(["CI_L0"])
    config = evaluation_config(run.config, request, str(run.folder))
    assert config.method.eval is not None
    source, _ = evaluation_batches(run, config, request)
    n = config.method.eval.n_steps
    totals: dict[str, Float[np.ndarray, " C"]] = {}
    for number in range(n):
        for name, importance in run.causal_importances(np.asarray(source(number))).items():
            mean = np.asarray(importance, np.float64).reshape(-1, importance.shape[-1]).mean(0)
            totals[name] = totals.get(name, np.zeros_like(mean)) + mean / n
    return totals


def _mean(of_sites: Sequence[Cosines]) -> Cosines | None:
    if not of_sites:
        return None
    parts: Mapping[str, float] = {
        name: float(np.mean([getattr(x, name) for x in of_sites])) for name in ("V", "U", "matrix")
    }
    return Cosines(**parts)
