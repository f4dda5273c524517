"""The metrics of an evaluation that are not losses: a file for each, and the files that they share.

`METRICS` has all of them. Their numbers and figures come in the order of these imports.
"""

# isort: off
from param_decomp_lab.metrics.ce_kl import CEandKLLosses
from param_decomp_lab.metrics.l0 import CI_L0
from param_decomp_lab.metrics.identity_ci import IdentityCIError
from param_decomp_lab.metrics.permuted_ci import PermutedCIPlots
from param_decomp_lab.metrics.uv_plots import UVPlots
from param_decomp_lab.metrics.ci_histograms import CIHistograms
from param_decomp_lab.metrics.mean_ci import CIMeanPerComponent
from param_decomp_lab.metrics.activation_density import ComponentActivationDensity
from param_decomp_lab.metrics.hidden_acts import CIHiddenActsReconLoss
from param_decomp_lab.metrics.active_per_position import CIActiveCountsPerPosition
from param_decomp_lab.metrics.ci_heat_map import CIHeatMap

# isort: on
from param_decomp_lab.metrics.base import METRICS, Metric

__all__ = [
    "CI_L0",
    "METRICS",
    "CEandKLLosses",
    "CIActiveCountsPerPosition",
    "CIHeatMap",
    "CIHiddenActsReconLoss",
    "CIHistograms",
    "CIMeanPerComponent",
    "ComponentActivationDensity",
    "IdentityCIError",
    "Metric",
    "PermutedCIPlots",
    "UVPlots",
]
