"""The figures of an opened run as matplotlib figures: `Run.plot`."""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from param_decomp_lab.config.site_patterns import chosen_sites
from param_decomp_lab.errors import UserError
from param_decomp_lab.runs.inputs import Inputs, read_inputs

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Sites = str | Sequence[str] | None
MOST_POSITIONS = 256
"""Positions of a heat map."""
COMPONENTS_SHOWN = 64
"""Components of a site in a heat map: those of largest mean λ."""


class Plots:
    """Figures of a run. Each gives a `matplotlib.figure.Figure`, which a notebook shows after ``%matplotlib inline``,
    and which ``.savefig("name.png")`` keeps.

    ``l0``, ``importances``, ``mean_importance`` and ``density`` show what the run's harvest counted (UserError if there
    is none), ``heat_map`` and ``active`` one prompt. ``sites``: names or patterns; None for all.
    """

    def __init__(self, run: Any) -> None:
        self._run = run

    @property
    def names(self) -> list[str]:
        """Names of the figures."""
        return [name for name in vars(type(self)) if not name.startswith("_") and name != "names"]

    def l0(self, sites: Sites = None) -> "Figure":
        """How many components fire at a position, at each site."""
        from param_decomp_lab.metrics.figures import l0_by_site

        harvest = self._run.harvest
        names = chosen_sites(harvest.sites, sites)
        means = {name: float(harvest.densities(name).sum()) for name in names}
        where = f"Over {harvest.plan.n_positions:,} positions; λ above {harvest.plan.threshold:g}."
        return l0_by_site(means, {name: harvest.site(name).C for name in names}, where)

    def importances(self, sites: Sites = None) -> "Figure":
        """How λ is distributed over components and positions, at each site."""
        from param_decomp_lab.metrics.figures import ci_histograms

        harvest, counts = self._run.harvest, {}
        for name in chosen_sites(harvest.sites, sites):
            fires = np.stack(harvest.components(name, ["importance_histogram"])["importance_histogram"].to_numpy())
            total = fires.sum(axis=0, dtype=np.int64)
            total[0] += fires.shape[0] * harvest.plan.n_positions - int(total.sum())  # where it does not fire
            counts[name] = total
        edges = np.linspace(0, 1, len(next(iter(counts.values()))) + 1)
        return ci_histograms(counts, edges, of_experts="Of experts, too, over all positions.")

    def mean_importance(self, sites: Sites = None) -> "Figure":
        """Mean λ of every component, in order, at each site."""
        from param_decomp_lab.metrics.figures import mean_ci_per_component

        harvest = self._run.harvest
        found = chosen_sites(harvest.sites, sites)
        return mean_ci_per_component({name: harvest.summary(name).importance_mean for name in found})

    def density(self, sites: Sites = None) -> "Figure":
        """How often components fire, and how many never do, at each site."""
        from param_decomp_lab.metrics.figures import activation_density

        harvest = self._run.harvest
        return activation_density({name: harvest.densities(name) for name in chosen_sites(harvest.sites, sites)})

    def heat_map(self, prompt: Inputs, sites: Sites = None) -> "Figure":
        """λ at each token of a prompt, of the components of each site with the largest mean λ there.

        ``prompt``: a text or token ids ``[T]`` of up to `MOST_POSITIONS` tokens. Raises UserError for a toy, and if the
        prompt does not fit.
        """
        from param_decomp_lab.metrics.figures import ci_heat_map

        tokens, importances = self._importances(prompt, sites)
        shown = {}
        for name, values in importances.items():
            order = np.argsort(-values.mean(axis=0), kind="stable")[:COMPONENTS_SHOWN]
            shown[name] = (order, values[None, :, order])
        return ci_heat_map(shown, [self._run.names(tokens.tolist())])

    def active(self, prompt: Inputs, sites: Sites = None, thresholds: Sequence[float] = (0.0, 0.1, 0.5)) -> "Figure":
        """How many components of all sites have λ above each of up to three thresholds, at each position of a prompt.
        Arguments and errors: as of `heat_map`."""
        from param_decomp_lab.metrics.figures import active_per_position
        from param_decomp_lab.metrics.figures.active_per_position import COLORS

        if not 0 < len(thresholds) <= len(COLORS):
            raise UserError(f"thresholds: one to {len(COLORS)} of them")
        _, importances = self._importances(prompt, sites)
        above = partial(_count_above, list(importances.values()))
        return active_per_position(np.stack([above(t) for t in thresholds], axis=1), thresholds)

    def _importances(self, prompt: Inputs, sites: Sites) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        run = self._run
        if not run.is_language_model:
            raise UserError("a toy has no positions to draw; plot.importances and plot.mean_importance have its λ")
        tokens = read_inputs(run, prompt)
        if tokens.ndim != 1 or len(tokens) > MOST_POSITIONS:
            raise UserError(f"a figure shows one row of up to {MOST_POSITIONS} tokens, not {list(tokens.shape)}")
        found = run.causal_importances(tokens, sites)
        return tokens, {name: np.asarray(x) for name, x in found.items()}


def _count_above(importances: Sequence[np.ndarray], threshold: float) -> np.ndarray:
    counts: np.ndarray = sum(((x > threshold).sum(axis=1) for x in importances), np.zeros(len(importances[0]), int))
    return counts.astype(float)
