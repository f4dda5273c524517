"""Reads λ of each site's most important components at the first positions of the evaluation's rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from param_decomp_jax.analysis.importances import chosen_logits, squash_existing
from param_decomp_jax.ci import squashings
from param_decomp_jax.decomposition.sites import Sites
from param_decomp_jax.method.state import Learned
from param_decomp_jax.method.step import Problem
from param_decomp_jax.sharding.mesh import whole
from param_decomp_jax.targets.base import Weights
from param_decomp_lab.metrics.rows_shown import RowsShown
from param_decomp_lab.metrics.statistics import MANY_SITES
from param_decomp_lab.schema.site_names import of_all_experts


class SiteRows(NamedTuple):
    """The rows of one site. ``components``: their numbers, by decreasing mean λ. ``importances``: their λ."""

    components: Int[np.ndarray, "n"]
    importances: Float[np.ndarray, "rows T n"]


@dataclass(frozen=True)
class ImportanceRows:
    """The rows of all sites. ``tokens``: the input at each position. ``sites``: by name."""

    tokens: Int[np.ndarray, "rows T"]
    sites: dict[str, SiteRows]


def most_important(
    sites: Sites, means: Mapping[str, Float[np.ndarray, "C"]], n: int
) -> tuple[dict[str, Int[np.ndarray, "n"]], dict[str, Int[np.ndarray, "layers n"]]]:
    """Returns at most ``n`` components of each site with the largest mean λ, in that order: by site, and by stack."""
    chosen = {name: np.argsort(-mean, kind="stable")[:n].astype(np.int32) for name, mean in means.items()}
    return chosen, {s.name: s.lay_out(np.stack([chosen[sites.all[i].name] for i in s.sites])) for s in sites.stacks}


class RowReader:
    """The program that reads λ of a batch's first rows, compiled once for all evaluations."""

    def __init__(self, problem: Problem, shown: RowsShown, mesh: Mesh) -> None:
        self._sites, self._shown, self._whole = problem.target.sites, shown, whole(mesh)
        self.program: Any = jax.jit(
            partial(_read, problem, (shown.n_rows, shown.n_positions)), out_shardings=self._whole
        )

    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns the shapes of the component numbers that the program takes, by stack."""
        none = {site.name: np.zeros(site.C) for site in self._sites.all}
        _, by_stack = most_important(self._sites, none, self._shown.n_components)
        return {k: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self._whole) for k, x in by_stack.items()}

    def compile(self, learned: Learned, weights: Weights, inputs: Array) -> None:
        """Compiles the program; JAX caches it."""
        numbers = {name: np.zeros(shape.shape, shape.dtype) for name, shape in self.shapes().items()}
        self.program.lower(learned, weights, inputs, numbers).compile()

    def read(
        self, learned: Learned, weights: Weights, inputs: Array, means: Mapping[str, Float[np.ndarray, "C"]]
    ) -> ImportanceRows:
        """Reads the rows. ``means``: mean λ of every component, by site."""
        chosen, by_stack = most_important(self._sites, means, self._shown.n_components)
        tokens, found = jax.device_get(self.program(learned, weights, inputs, by_stack))
        importances = self._sites.unstack(found)
        rows = {name: SiteRows(numbers, importances[name]) for name, numbers in chosen.items()}
        return ImportanceRows(tokens, rows if len(rows) <= MANY_SITES else _pooled(rows, self._shown.n_components))


def _read(
    problem: Problem,
    first: tuple[int, int],
    learned: Learned,
    weights: Weights,
    inputs: Int[Array, "B T"],
    chosen: dict[str, Int[Array, "layers n"]],
) -> tuple[Int[Array, "rows T"], dict[str, Float[Array, "layers rows T n"]]]:
    lower, _ = squashings(problem.decomposition.squashing)
    logits = chosen_logits(problem, learned, weights, inputs, chosen, first)
    importances = jax.tree.map(lambda z: squash_existing(lower, z).astype(jnp.float32), logits)
    return inputs[: first[0], : first[1]], importances


def _pooled(rows: dict[str, SiteRows], n: int) -> dict[str, SiteRows]:
    """Pools the experts of a layer by kind, each pool with the components of largest λ in these rows."""
    members: dict[str, list[SiteRows]] = {}
    for name, own in rows.items():
        members.setdefault(of_all_experts(name), []).append(own)
    pooled = {}
    for name, several in members.items():
        importances = np.concatenate([own.importances for own in several], axis=-1)
        order = np.argsort(-importances.mean(axis=(0, 1)), kind="stable")[:n]
        numbers = np.concatenate([own.components for own in several])
        pooled[name] = SiteRows(numbers[order], importances[..., order])
    return pooled
