"""Average attributions of a run, over rows of its harvest."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float64, Int

from param_decomp_jax.analysis.attribution import Targets, for_attribution
from param_decomp_jax.analysis.average_attribution import Normalizers, edge_sums, normalizers
from param_decomp_jax.analysis.importances import lower_importances
from param_decomp_jax.decomposition.sites import Sites
from param_decomp_jax.method.inspection import unstack_sites
from param_decomp_jax.method.state import Learned
from param_decomp_jax.method.step import Problem
from param_decomp_jax.targets.base import Weights
from param_decomp_lab.compilation import jitted
from param_decomp_lab.errors import UserError
from param_decomp_lab.harvest.files import Averages, Harvest
from param_decomp_lab.harvest.files.averages import AVERAGES, AVERAGES_FILE, AverageOptions, write_averages
from param_decomp_lab.runs.opened import OpenedRun

GRADIENT_BYTES = 1 << 28
"""Bytes of the gradients with respect to what the sites give, for all targets that are computed at once."""
MOST_AT_ONCE = 32
POSITIONS = 512
"""Positions of a batch, at least one row."""

Progress = Callable[[int, int, str], None]
"""Told how many targets are done, how many there are, and the site."""


@dataclass(frozen=True)
class AverageRequest:
    """``rows``: of the harvest, that are read. ``largest``: edges kept of each target. ``least_firings``: of a target,
    in the harvest."""

    rows: int = 64
    largest: int = 20
    least_firings: int = 10

    def __post_init__(self) -> None:
        for name in ("rows", "largest", "least_firings"):
            if getattr(self, name) < 1:
                raise UserError(f"{name}: {getattr(self, name)} should be at least 1")


def average_attributions(
    run: OpenedRun, harvest: Harvest, request: AverageRequest | None = None, progress: Progress | None = None
) -> Averages:
    """How the components of a harvest lead to each other on average (E8), in its folder; what is there already with the
    same options is returned. Raises UserError for a harvest of another step, and CannotWrite."""
    request = request or AverageRequest()
    if harvest.plan.step != run.step:
        raise UserError(
            f"{harvest.folder} is of step {harvest.plan.step}, but the open checkpoint is of step {run.step}"
        )
    rows = min(request.rows, harvest.plan.rows)
    options = AverageOptions(rows, request.largest, request.least_firings)
    out = harvest.folder / AVERAGES / options.name
    if (out / AVERAGES_FILE).is_file():
        return Averages(out, harvest.index)
    work = _Averager(run, harvest, rows)
    targets, n_targets, done = [], 0, 0
    wanted = {site.name: _often(harvest, site.name, request.least_firings) for site in harvest.plan.sites}
    total = sum(map(len, wanted.values()))
    for site, numbers in wanted.items():
        for edges in work.into(site, numbers, request.largest):
            targets.append(edges)
            n_targets += edges.done
            if progress is not None:
                progress(done + edges.so_far, total, site)
        done += len(numbers)
    if not targets:
        raise UserError(
            f"no component of {harvest.folder} has edges to average: too few fire {request.least_firings} times, or "
            "nothing leads to those that do"
        )
    columns = [np.concatenate(parts) for parts in zip(*((t.target, t.source, t.weight) for t in targets), strict=True)]
    order = np.lexsort((-np.abs(columns[2]), columns[0]))
    write_averages(out, options, n_targets, [column[order] for column in columns])
    return Averages(out, harvest.index)


def _often(harvest: Harvest, site: str, least: int) -> Int[np.ndarray, " n"]:
    return np.flatnonzero(np.asarray(harvest.components(site, ["firings"])["firings"]) >= least)


class _Edges(NamedTuple):
    """Kept edges of some targets. ``done``: targets; ``so_far``: of the site, those before included."""

    target: Int[np.ndarray, " e"]
    source: Int[np.ndarray, " e"]
    weight: Float[np.ndarray, " e"]
    done: int
    so_far: int


class _Averager:
    """Averages over the first rows of a harvest, in batches."""

    def __init__(self, run: OpenedRun, harvest: Harvest, rows: int) -> None:
        self._run, self._harvest = run, harvest
        self._problem = for_attribution(run.problem)
        self._sites: Sites = self._problem.target.sites
        self._names = [site.name for site in harvest.plan.sites]
        values = [harvest.row(n) for n in range(rows)]
        size = max(1, POSITIONS // harvest.plan.length)
        batches = [np.stack(values[start : start + size]) for start in range(0, rows, size)]
        self._batches = [run.as_batch(batch)[0] for batch in batches]
        found = [self._normalizers(batch) for batch in self._batches]
        self._importance, square, positions = (np.sum([x[k] for x in found], axis=0) for k in range(3))
        self._rms = np.sqrt(square / np.maximum(positions, 1))

    def into(self, site: str, numbers: Int[np.ndarray, " n"], largest: int) -> Iterator[_Edges]:
        """Edges into components of a site; none where nothing leads to it."""
        at_once = self._at_once()
        for start in range(0, len(numbers), at_once):
            own = numbers[start : start + at_once]
            sums = self._sums(site, own, at_once, first=start == 0)
            if sums is None:
                return
            target = np.asarray([self._harvest.index.number_of(site, int(n)) for n in own])
            weights = _divide(sums, self._importance) / np.maximum(self._rms[target], np.finfo(np.float64).tiny)
            weights[:, self._rms[target] == 0] = 0
            yield _largest(weights, target, largest, min(start + at_once, len(numbers)))

    def _sums(
        self, site: str, numbers: Int[np.ndarray, " n"], at_once: int, first: bool
    ) -> Float64[np.ndarray, "n K"] | None:
        """E8's numerators, of every source for each target; None if ``first`` finds that nothing leads to the site."""
        padded = np.concatenate([numbers, np.full(at_once - len(numbers), numbers[-1])])
        targets = self._targets(site, padded)
        total = np.zeros((len(self._importance), at_once))
        for batch in self._batches:
            total += self._by_source(jitted(_sums_of_batch), batch, targets)
        if first and not np.any(total):  # of all batches: an expert may be taken in the last alone
            return None
        return total[:, : len(numbers)]

    def _targets(self, site: str, numbers: Int[np.ndarray, " K"]) -> Targets:
        names = [s.name for s in self._sites.all]
        stack, row = self._sites.stack_rows[names.index(site)]
        layer, expert = (row, 0) if stack.experts is None else row
        place = [s.name for s in self._sites.stacks].index(stack.name)
        columns = (place, layer, 0, numbers, expert)
        return Targets(*(jnp.asarray(np.broadcast_to(x, numbers.shape), jnp.int32) for x in columns))

    def _by_source(self, program: Any, *arguments: Any) -> np.ndarray:
        """What a program gives by stack, ``[layers, *experts, C, …]``, of the harvest's components."""
        run = self._run
        with jax.set_mesh(run.mesh):
            found = program(self._problem, run.learned, run.weights, *arguments)
        return self._flat(jax.device_get(found))

    def _flat(self, by_stack: dict[str, np.ndarray]) -> np.ndarray:
        by_site = unstack_sites(self._sites, by_stack)
        return np.concatenate([by_site[name] for name in self._names])

    def _normalizers(self, batch: Array) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Sums of λ and of a² for every component of the harvest, and the number of positions."""
        run = self._run
        with jax.set_mesh(run.mesh):
            found: Normalizers = jitted(_normalizers_of_batch)(self._problem, run.learned, run.weights, batch)
        importance, square, positions = jax.device_get(found)
        of_components = {name: np.broadcast_to(x[..., None], square[name].shape) for name, x in positions.items()}
        wide = (self._flat(x).astype(np.float64) for x in (importance, square, of_components))
        a, b, c = wide
        return a, b, c

    def _at_once(self) -> int:
        positions = self._batches[0].shape[0] * self._harvest.plan.length
        width = 4 * positions * sum(site.d_out + 2 * site.C for site in self._sites.all)
        return int(np.clip(GRADIENT_BYTES // max(width, 1), 1, MOST_AT_ONCE))


def _divide(x: Float64[np.ndarray, "n K"], by: Float64[np.ndarray, " n"]) -> Float64[np.ndarray, "n K"]:
    return np.divide(x, by[:, None], out=np.zeros_like(x), where=by[:, None] > 0)


def _largest(weights: Float64[np.ndarray, "n K"], target: np.ndarray, most: int, so_far: int) -> _Edges:
    """The largest weights of each target, without those that are 0."""
    most = min(most, len(weights))
    source = np.argpartition(-np.abs(weights), most - 1, axis=0)[:most]
    kept = np.take_along_axis(weights, source, axis=0)
    good = kept != 0
    targets = np.broadcast_to(target, source.shape)
    return _Edges(
        targets[good].astype(np.int32), source[good].astype(np.int32), kept[good].astype(np.float32),
        len(target), so_far,
    )  # fmt: skip


def _sums_of_batch(
    problem: Problem, learned: Learned, weights: Weights, inputs: Array, targets: Targets
) -> dict[str, Array]:
    importances = lower_importances(problem, learned, weights, inputs)
    found = edge_sums(problem, learned.components, weights, inputs, importances, targets)
    return {name: jnp.moveaxis(x, 0, -1) for name, x in found.items()}


def _normalizers_of_batch(problem: Problem, learned: Learned, weights: Weights, inputs: Array) -> Normalizers:
    importances = lower_importances(problem, learned, weights, inputs)
    return normalizers(problem, learned.components, weights, inputs, importances)
