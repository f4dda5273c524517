"""The figure `mean_ci_per_component`: the mean causal importance of every component."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from param_decomp_lab.metrics.base import METRICS, Metric
from param_decomp_lab.schema.kinds import registered

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from param_decomp_lab.metrics.snapshot import Snapshot


@registered(METRICS)
class CIMeanPerComponent(Metric):
    type: Literal["CIMeanPerComponent"]

    titles: ClassVar = {"mean_ci_per_component": "Mean causal importance per component"}

    def describe(self) -> str:
        return "figure"

    def figures(self, means: Any, snapshot: Snapshot) -> dict[str, Figure]:
        from param_decomp_lab.metrics.figures import mean_ci_per_component

        return {"mean_ci_per_component": mean_ci_per_component(snapshot.statistics.means)}
