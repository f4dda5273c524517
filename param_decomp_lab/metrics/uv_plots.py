"""The figure `uv_matrices`: a toy's V and U, with the components in the order of `permuted_ci`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from param_decomp_lab.metrics.base import METRICS
from param_decomp_lab.metrics.sorted_components import SortedComponents
from param_decomp_lab.schema.kinds import registered

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from param_decomp_lab.metrics.snapshot import Snapshot


@registered(METRICS)
class UVPlots(SortedComponents):
    type: Literal["UVPlots"]

    titles: ClassVar = {"uv_matrices": "Vectors of the components"} | SortedComponents.titles

    def figures(self, means: Any, snapshot: Snapshot) -> dict[str, Figure]:
        from param_decomp_lab.metrics.figures import n_shown, uv_matrices

        probed = snapshot.probed
        orders = self._orders(snapshot)
        shown = {site: order[: n_shown(probed.importances[site], order)] for site, order in orders.items()}
        figure = uv_matrices({site: (f.V, f.U) for site, f in probed.factors.items()}, shown)
        return {"uv_matrices": figure} | probed.geometry
