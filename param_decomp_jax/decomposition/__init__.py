"""Sites, their components, and what training draws and schedules."""

from param_decomp_jax.decomposition.components import Components, Factors, components_axes, init_components
from param_decomp_jax.decomposition.schedules import Anneal, Knot, Knots, Schedule
from param_decomp_jax.decomposition.sites import Matrix, Site, Sites, Stack, Units

__all__ = [
    "Anneal", "Components", "Factors", "Knot", "Knots", "Matrix", "Schedule", "Site", "Sites", "Stack", "Units",
    "components_axes", "init_components",
]  # fmt: skip
