"""The figure `permuted_ci`: the causal importance of each component for each feature of a toy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from param_decomp_lab.metrics.base import METRICS
from param_decomp_lab.metrics.sorted_components import SortedComponents
from param_decomp_lab.schema.kinds import registered

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from param_decomp_lab.metrics.snapshot import Snapshot


@registered(METRICS)
class PermutedCIPlots(SortedComponents):
    type: Literal["PermutedCIPlots"]

    titles: ClassVar = {"permuted_ci": "Causal importance of each component for each feature"} | SortedComponents.titles

    def figures(self, means: Any, snapshot: Snapshot) -> dict[str, Figure]:
        from param_decomp_lab.metrics.figures import permuted_ci

        figure = permuted_ci(snapshot.probed.importances, self._orders(snapshot), snapshot.notes)
        return {"permuted_ci": figure} | snapshot.probed.geometry
