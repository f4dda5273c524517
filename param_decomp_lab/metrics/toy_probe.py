"""What a toy's components do with one feature at a time (section 11): errors of the expected pattern, MMCS and ML2R."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Float
from matplotlib.figure import Figure

from param_decomp_jax.analysis.importances import lower_importances
from param_decomp_jax.decomposition.components import with_views
from param_decomp_jax.method.state import State
from param_decomp_jax.method.step import Problem
from param_decomp_jax.sharding.mesh import whole
from param_decomp_jax.targets.base import Target, Weights
from param_decomp_jax.targets.tms import TMS
from param_decomp_lab.config.metric_schema import IdentityCIError, PermutedCIPlots, UVPlots
from param_decomp_lab.metrics.figures import n_shown, permuted_ci, tms_geometry, uv_matrices
from param_decomp_lab.metrics.ground_truth import (
    dense_ci_error,
    dense_columns,
    identity_ci_error,
    match_components,
    mmcs_and_ml2r,
)
from param_decomp_lab.schema.site_names import matches_module

LEVEL = 0.75
"""Value of the one feature that is on."""


@dataclass(frozen=True)
class Factored:
    """Host copies of one site's matrices."""

    W: Float[np.ndarray, "d_in d_out"]
    V: Float[np.ndarray, "d_in C"]
    U: Float[np.ndarray, "C d_out"]


class Probe:
    """``metrics``: those of the configuration; what is none of the probe's is passed over."""

    def __init__(self, problem: Problem, target: Target, metrics: Sequence[Any], mesh: Mesh) -> None:
        self._problem, self._target = problem, target
        self._errors = [m for m in metrics if isinstance(m, IdentityCIError)]
        self._heat_maps = next((m for m in metrics if isinstance(m, PermutedCIPlots)), None)
        self._matrices = next((m for m in metrics if isinstance(m, UVPlots)), None)

        def importances(state: State, weights: Weights) -> Any:
            inputs = LEVEL * jnp.eye(target.architecture.n_features)
            return lower_importances(problem, state.learned, weights, inputs)

        def matrices(state: State, weights: Weights) -> Any:
            return target.site_weights(weights), with_views(state.components, target.sites)

        # Whole on every device, so that every process can fetch them.
        self._importances = jax.jit(importances, out_shardings=whole(mesh))
        self._matrices_of = jax.jit(matrices, out_shardings=whole(mesh))

    def numbers(self, state: State, weights: Weights) -> dict[str, float]:
        """`eval/identity_ci_error/<site>` as configured; of a TMS whose `linear1` is a site, `eval/tms/*` too."""
        row: dict[str, float] = {}
        if self._errors:
            importances = self._site_importances(state, weights)
            for site, value in self._count_errors(importances).items():
                row[f"eval/identity_ci_error/{site}"] = value
        first = self._first(state, weights)
        if first is not None:
            row["eval/tms/mmcs"], row["eval/tms/ml2r"] = mmcs_and_ml2r(first.W, first.V, first.U)
        return row

    def figures(self, state: State, weights: Weights) -> dict[str, Figure]:
        """Permuted heat maps of λ, V and U in the same order, and the geometry of a TMS, as configured."""
        drawn: dict[str, Figure] = {}
        if self._heat_maps is None and self._matrices is None:
            return drawn
        importances = self._site_importances(state, weights)
        if self._heat_maps is not None:
            errors = self._count_errors(importances)
            details = {site: f"{errors[site]} errors" for site in errors}
            drawn["permuted_ci"] = permuted_ci(importances, self._orders(importances, self._heat_maps), details)
        if self._matrices is not None:
            factors = self._factored(state, weights)
            orders = self._orders(importances, self._matrices)
            shown = {site: order[: n_shown(importances[site], order)] for site, order in orders.items()}
            drawn["uv_matrices"] = uv_matrices({site: (f.V, f.U) for site, f in factors.items()}, shown)
        first = self._first(state, weights)
        if first is not None:
            drawn["tms_geometry"] = tms_geometry(first.W, first.V, first.U)
        return drawn

    def _site_importances(self, state: State, weights: Weights) -> dict[str, Float[np.ndarray, "features C"]]:
        return self._target.sites.unstack(jax.device_get(self._importances(state, weights)))

    def _count_errors(self, importances: dict[str, np.ndarray]) -> dict[str, int]:
        errors: dict[str, int] = {}
        for metric in self._errors:
            for identity in metric.identity_ci or ():
                for site in self._matching(identity.layer_pattern):
                    errors[site] = identity_ci_error(importances[site], identity.n_features)
            for dense in metric.dense_ci or ():
                for site in self._matching(dense.layer_pattern):
                    errors[site] = dense_ci_error(importances[site], dense.k)
        return errors

    def _orders(self, importances: dict[str, np.ndarray], plots: PermutedCIPlots | UVPlots) -> dict[str, np.ndarray]:
        """Matched to features where an identity pattern says so and, without any pattern, everywhere; else dense."""
        dense = {site for pattern in plots.dense_patterns or () for site in self._matching(pattern)}
        identity = {site for pattern in plots.identity_patterns or () for site in self._matching(pattern)}
        if not dense and not identity:
            identity = set(importances)
        return {
            site: match_components(x).columns if site in identity else dense_columns(x)
            for site, x in importances.items()
        }

    def _matching(self, pattern: str) -> list[str]:
        return [site.name for site in self._target.sites.all if matches_module(pattern, site.name)]

    def _factored(self, state: State, weights: Weights) -> dict[str, Factored]:
        sites = self._target.sites
        matrices, factors = jax.device_get(self._matrices_of(state, weights))
        W = sites.unstack(matrices)
        V = sites.unstack({name: f.V for name, f in factors.items()})
        U = sites.unstack({name: f.U for name, f in factors.items()})
        return {site: Factored(W[site], V[site], U[site]) for site in W}

    def _first(self, state: State, weights: Weights) -> Factored | None:
        return self._factored(state, weights).get("linear1") if isinstance(self._target, TMS) else None
