"""The figure `ci_histograms`: how the causal importances of every site are distributed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from param_decomp_lab.metrics.base import METRICS, Metric
from param_decomp_lab.schema.kinds import registered
from param_decomp_lab.schema.strict import Count

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from param_decomp_lab.metrics.snapshot import Snapshot


@registered(METRICS)
class CIHistograms(Metric):
    type: Literal["CIHistograms"]
    n_batches_accum: Count | None

    usual: ClassVar = {"n_batches_accum": None}
    titles: ClassVar = {"ci_histograms": "Causal importances"}

    def describe(self) -> str:
        n = self.n_batches_accum
        return f"figure, over {'all batches' if n is None else f'{n} batch' + 'es' * (n > 1)}"

    @property
    def histogram_batches(self) -> int | None:
        return self.n_batches_accum

    def figures(self, means: Any, snapshot: Snapshot) -> dict[str, Figure]:
        import numpy as np

        from param_decomp_lab.metrics.figures import ci_histograms

        counts = snapshot.statistics.counts
        n_bins = next(iter(counts.values())).shape[0]
        return {"ci_histograms": ci_histograms(counts, np.linspace(0, 1, n_bins + 1))}
