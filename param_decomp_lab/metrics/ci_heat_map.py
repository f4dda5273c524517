"""The figure `ci_heat_map`: which components of each site are important at which token."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from param_decomp_lab.metrics.base import METRICS, Metric
from param_decomp_lab.metrics.rows_shown import RowsShown
from param_decomp_lab.schema.kinds import registered
from param_decomp_lab.schema.strict import Count

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from param_decomp_lab.metrics.snapshot import Snapshot


@registered(METRICS)
class CIHeatMap(Metric):
    type: Literal["CIHeatMap"]
    n_components: Count = 128
    n_rows: Count = 2
    n_positions: Count = 32

    needs = "text"
    titles: ClassVar = {"ci_heat_map": "Causal importances at the first positions"}

    def describe(self) -> str:
        rows = f"{self.n_rows} row{'s' * (self.n_rows > 1)}"
        return f"figure, {self.n_components} components, {self.n_positions} positions of {rows}"

    @property
    def rows_shown(self) -> RowsShown:
        return RowsShown(self.n_rows, self.n_positions, self.n_components)

    def figures(self, means: Any, snapshot: Snapshot) -> dict[str, Figure]:
        from param_decomp_lab.metrics.figures import ci_heat_map

        found = snapshot.rows
        sites = {name: (own.components, own.importances) for name, own in found.sites.items()}
        return {"ci_heat_map": ci_heat_map(sites, snapshot.token_names(found.tokens))}
