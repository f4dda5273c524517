"""What a metric looks at after the batches: a state of the run."""

from collections.abc import Callable
from functools import cached_property

from param_decomp_jax.decomposition.sites import Sites
from param_decomp_lab.metrics.statistics import Statistics
from param_decomp_lab.metrics.toy_probe import Probed


class Snapshot:
    """A state of the run. What is asked for is computed on the devices, once, so every process must ask for the same.

    ``compute_statistics``, ``site_notes``: make `statistics` and `notes`. ``probed``: None if the target reads text.
    """

    def __init__(
        self,
        sites: Sites,
        probed: Probed | None,
        compute_statistics: Callable[[], Statistics],
        site_notes: Callable[["Snapshot"], dict[str, str]],
    ) -> None:
        self.sites, self._probed = sites, probed
        self._compute_statistics, self._site_notes = compute_statistics, site_notes

    @cached_property
    def statistics(self) -> Statistics:
        """Histograms, means and densities of λ over the batches of the evaluation, as figures show them."""
        return self._compute_statistics().pooled()

    @property
    def probed(self) -> Probed:
        """A toy with one feature on at a time; of a metric that `needs` features."""
        assert self._probed is not None, "the target has no features"
        return self._probed

    @cached_property
    def notes(self) -> dict[str, str]:
        """What the configured metrics say of single sites, by site."""
        return self._site_notes(self)
