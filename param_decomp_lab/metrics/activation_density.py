"""The figure `activation_density`: at which share of the positions each component is active."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from param_decomp_lab.metrics.base import METRICS, Metric
from param_decomp_lab.schema.kinds import registered
from param_decomp_lab.schema.strict import NonNegative
from param_decomp_lab.ui.numbers import exact

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from param_decomp_lab.metrics.snapshot import Snapshot


@registered(METRICS)
class ComponentActivationDensity(Metric):
    type: Literal["ComponentActivationDensity"]
    ci_alive_threshold: NonNegative = 0.0

    titles: ClassVar = {"activation_density": "Activation density"}

    def describe(self) -> str:
        return f"figure, λ > {exact(self.ci_alive_threshold)}"

    @property
    def density_threshold(self) -> float:
        return self.ci_alive_threshold

    def figures(self, means: Any, snapshot: Snapshot) -> dict[str, Figure]:
        from param_decomp_lab.metrics.figures import activation_density

        return {"activation_density": activation_density(snapshot.statistics.densities)}
