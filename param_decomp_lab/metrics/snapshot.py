"""Gives metrics a state of the run after the batches."""

from collections.abc import Callable
from functools import cached_property

import numpy as np
from jaxtyping import Int

from param_decomp_jax.decomposition.sites import Sites
from param_decomp_lab.metrics.importance_rows import ImportanceRows
from param_decomp_lab.metrics.statistics import Statistics
from param_decomp_lab.metrics.toy_probe import Probed


class Snapshot:
    """A state of the run. Properties are computed on the devices, once, so every process must access the same ones.

    ``compute_statistics``, ``site_notes``, ``read_rows``: compute `statistics`, `notes` and `rows`, the last from the
    statistics of every site. ``probed``: None if the target reads text. ``token_names``: of tokens ``[rows, T]``; None
    without a tokenizer.
    """

    def __init__(
        self,
        sites: Sites,
        probed: Probed | None,
        compute_statistics: Callable[[], Statistics],
        site_notes: Callable[["Snapshot"], dict[str, str]],
        read_rows: Callable[[Statistics], ImportanceRows] | None = None,
        token_names: Callable[[Int[np.ndarray, "rows T"]], list[list[str]] | None] = lambda _: None,
    ) -> None:
        self.sites, self._probed = sites, probed
        self._compute_statistics, self._site_notes = compute_statistics, site_notes
        self._read_rows, self.token_names = read_rows, token_names

    @cached_property
    def _of_every_site(self) -> Statistics:
        return self._compute_statistics()

    @cached_property
    def statistics(self) -> Statistics:
        """Returns histograms, means and densities of λ over the batches of the evaluation, as figures show them."""
        return self._of_every_site.pooled()

    @cached_property
    def rows(self) -> ImportanceRows:
        """λ at the first positions of the first batch; only for a metric that says how many (`Metric.rows_shown`)."""
        assert self._read_rows is not None, "no metric says how many rows it shows"
        return self._read_rows(self._of_every_site)

    @property
    def probed(self) -> Probed:
        """A toy with one feature on at a time; only for a metric that `needs` features."""
        assert self._probed is not None, "the target has no features"
        return self._probed

    @cached_property
    def notes(self) -> dict[str, str]:
        """What the configured metrics say about single sites, by site."""
        return self._site_notes(self)
