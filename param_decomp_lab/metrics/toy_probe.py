"""Measures what a toy's components do with one feature at a time (section 11)."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
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
from param_decomp_lab.metrics.figures import tms_geometry
from param_decomp_lab.metrics.ground_truth import mmcs_and_ml2r
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
    """The programs that probe a toy, compiled once for all evaluations."""

    def __init__(self, problem: Problem, target: Target, mesh: Mesh) -> None:
        self.target = target

        def importances(state: State, weights: Weights) -> Any:
            inputs = LEVEL * jnp.eye(target.architecture.n_features)
            return lower_importances(problem, state.learned, weights, inputs)

        def matrices(state: State, weights: Weights) -> Any:
            return target.site_weights(weights), with_views(state.components, target.sites)

        # Whole on every device, so that every process can fetch them.
        self.importances: Callable[[State, Weights], Any] = jax.jit(importances, out_shardings=whole(mesh))
        self.matrices: Callable[[State, Weights], Any] = jax.jit(matrices, out_shardings=whole(mesh))


class Probed:
    """A toy's state under the probe. Each part is computed on first access, by every process."""

    def __init__(self, probe: Probe, state: State, weights: Weights) -> None:
        self._probe, self._state, self._weights = probe, state, weights

    @cached_property
    def importances(self) -> dict[str, Float[np.ndarray, "features C"]]:
        """λ while one feature at a time is on, by site."""
        found = self._probe.importances(self._state, self._weights)
        return self._probe.target.sites.unstack(jax.device_get(found))

    @cached_property
    def factors(self) -> dict[str, Factored]:
        """The matrices of each site."""
        sites = self._probe.target.sites
        matrices, factors = jax.device_get(self._probe.matrices(self._state, self._weights))
        W = sites.unstack(matrices)
        V = sites.unstack({name: f.V for name, f in factors.items()})
        U = sites.unstack({name: f.U for name, f in factors.items()})
        return {site: Factored(W[site], V[site], U[site]) for site in W}

    def matching(self, pattern: str) -> list[str]:
        """Returns the sites that a pattern matches."""
        return [site.name for site in self._probe.target.sites.all if matches_module(pattern, site.name)]

    @property
    def tms_numbers(self) -> dict[str, float]:
        """Returns `eval/tms/*` for a TMS whose `linear1` is a site; empty for others."""
        first = self._first
        if first is None:
            return {}
        mmcs, ml2r = mmcs_and_ml2r(first.W, first.V, first.U)
        return {"eval/tms/mmcs": mmcs, "eval/tms/ml2r": ml2r}

    @cached_property
    def geometry(self) -> dict[str, Figure]:
        """Returns the figure `tms_geometry` for a TMS whose `linear1` is a site; empty for others."""
        first = self._first
        return {} if first is None else {"tms_geometry": tms_geometry(first.W, first.V, first.U)}

    @property
    def _first(self) -> Factored | None:
        return self.factors.get("linear1") if isinstance(self._probe.target, TMS) else None
