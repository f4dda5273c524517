"""Figures of an evaluation: plain functions from NumPy arrays to a matplotlib ``Figure``.

They are logged under ``slow_eval/figures/<name>`` and saved as ``figures/<name>_<step>.png``.
"""

from param_decomp_lab.metrics.figures.activation_density import activation_density
from param_decomp_lab.metrics.figures.active_per_position import active_per_position
from param_decomp_lab.metrics.figures.ci_heat_map import ci_heat_map
from param_decomp_lab.metrics.figures.ci_histograms import ci_histograms
from param_decomp_lab.metrics.figures.front import front_of_runs
from param_decomp_lab.metrics.figures.l0_by_site import l0_by_site
from param_decomp_lab.metrics.figures.mean_ci import mean_ci_per_component
from param_decomp_lab.metrics.figures.permuted_ci import n_shown, permuted_ci
from param_decomp_lab.metrics.figures.save import figure_path, save_figure
from param_decomp_lab.metrics.figures.uv_matrices import tms_geometry, uv_matrices

__all__ = [
    "activation_density",
    "active_per_position",
    "ci_heat_map",
    "ci_histograms",
    "figure_path",
    "front_of_runs",
    "l0_by_site",
    "mean_ci_per_component",
    "n_shown",
    "permuted_ci",
    "save_figure",
    "tms_geometry",
    "uv_matrices",
]
