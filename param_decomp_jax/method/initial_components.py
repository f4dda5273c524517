"""Initial components that are not drawn at random: weighted singular vectors of every matrix (T6), or its neurons and
the channels of its heads (T9)."""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray, Shaped

from param_decomp_jax.decomposition.components import U_AXES, V_AXES, Components, Factors, init_components
from param_decomp_jax.decomposition.draws import positions, uniform
from param_decomp_jax.decomposition.sites import PRE_IDENTITY, Sites, Stack
from param_decomp_jax.method.state import init_keys
from param_decomp_jax.method.step import Problem
from param_decomp_jax.nn.numerics import wide
from param_decomp_jax.sharding.mesh import Axes, constrain
from param_decomp_jax.targets.base import Weights
from param_decomp_jax.targets.plain_linears import PlainLayer, PlainLinears, frozen_axes

POSITIONS_PER_DIMENSION = 16
"""The number of positions per dimension over which second moments are summed (T6)."""
NOTHING = 1e-6
"""Columns of ``W Uᵀ`` shorter than this share of the longest are rounding errors: W has a lower rank."""

Moments = dict[str, Float[Array, "layers r r"]]
"""Second moments by trained stack, with ``r`` the smaller of d_in and d_out: moments of the inputs (r = d_in) or of the
outputs; for a table, of the rows that were looked up."""


def n_batches(sites: Sites, positions: int) -> int:
    """Returns how many batches, of ``positions`` positions each, T6 takes."""
    largest = max(min(stack.d_in, stack.d_out) for stack in _trained(sites))
    return math.ceil(POSITIONS_PER_DIMENSION * largest / positions)


def no_moments(sites: Sites) -> Moments:
    """Returns second moments of zero, to which those of batches are added."""
    return {stack.name: jnp.zeros((stack.n_layers, _width(stack), _width(stack))) for stack in _trained(sites)}


def moments_axes(sites: Sites) -> dict[str, Axes]:
    """Returns the logical axes of every array."""
    return {stack.name: Axes((None, "split")) for stack in _trained(sites)}


def output_moments(problem: Problem, weights: Weights, inputs: Array) -> Moments:
    """Returns sums over a batch's positions, from which the second moments of the sites' outputs follow.

    Sites must not be experts' matrices.
    """
    target, sites = problem.target, problem.target.sites
    assert all(stack.experts is None for stack in sites.stacks), "experts' matrices have no moments here"
    records = target.forward(weights, inputs, _MomentsLinears(sites, memory=target.memory)).records
    found: Moments = {}
    for segment in sites.segments:
        found |= {stack.name: records[segment.first][stack.kind] for stack in segment.stacks}
    return {stack.name: found[stack.name] for stack in _trained(sites)}


def weighted_singular_vectors(problem: Problem, weights: Weights, moments: Moments) -> Components:
    """Returns the components that training starts from, given `output_moments` summed over batches."""
    sites = problem.target.sites
    matrices = problem.target.site_weights(weights)
    drawn = init_components(init_keys(problem.decomposition).components, sites)

    def of_stack(stack: Stack) -> Factors:
        def of_layer(layer: tuple[Array, Array, Array]) -> tuple[Array, Array]:
            W, moment, drawn = layer
            V, U = _of_site(wide(W), moment, drawn, stack.lookup)
            return constrain(V, *V_AXES.names), constrain(U, *U_AXES.names)

        # Matrices run in sequence, because eigenvectors need the whole matrix on one device.
        return Factors(*jax.lax.map(of_layer, (matrices[stack.name], moments[stack.name], drawn[stack.name].V)))

    return {stack.name: of_stack(stack) for stack in _trained(sites)}


def nonlinearity_aligned(problem: Problem, weights: Weights) -> Components:
    """Returns the components that training starts from, one for each coordinate of the side that faces a nonlinearity
    (T9).

    Every site must face units and must not be an expert's matrix.
    """
    sites = problem.target.sites
    matrices = problem.target.site_weights(weights)
    key = init_keys(problem.decomposition).components

    def of_stack(stack: Stack) -> Factors:
        assert stack.faces is not None, f"{stack.name} faces no nonlinearity"
        assert stack.experts is None, f"{stack.name} are experts' matrices"
        outwards = stack.faces.side == "output"

        def of_layer(layer: tuple[Array, Array]) -> tuple[Array, Array]:
            W, number = wide(layer[0]), layer[1]
            chosen, others = aligned(W.T if outwards else W, stack.C, jax.random.fold_in(key, number))
            V, U = (others.T, chosen) if outwards else (chosen.T, others)
            return constrain(V, *V_AXES.names), constrain(U, *U_AXES.names)

        numbers = jnp.asarray(stack.sites, jnp.uint32)
        return Factors(*jax.lax.map(of_layer, (matrices[stack.name], numbers)))

    return {stack.name: of_stack(stack) for stack in _trained(sites)}


def aligned(
    by_coordinate: Float[Array, "n o"], C: int, key: PRNGKeyArray
) -> tuple[Float[Array, "C n"], Float[Array, "C o"]]:
    """Returns the unit vector of each component's coordinate, and the component's share of the matrix's vector there
    (T9).

    ``by_coordinate``: the matrix's vectors, C at most n · o. The random orders come from `uniform`, with the two keys
    that ``key`` is split into: the order of the coordinates at position 0, and the order of each coordinate's o entries
    at its own number.
    """
    n, o = by_coordinate.shape
    if n == C:
        return jnp.eye(n, dtype=by_coordinate.dtype), by_coordinate
    order_key, shares_key = jax.random.split(key)
    order = jnp.argsort(uniform(order_key, positions((1,)), n)[0])
    if n > C:
        coordinates = order[:C]
        others = by_coordinate[coordinates]
    else:
        counts = C // n + (jnp.arange(n) < C % n)
        ends = jnp.cumsum(counts)
        turn = jnp.searchsorted(ends, jnp.arange(C), side="right")  # the coordinate, by its place in the order
        coordinates, count = order[turn], counts[turn]
        number = jnp.arange(C) - (ends - counts)[turn]
        places = jnp.argsort(jnp.argsort(uniform(shares_key, positions((n,)), o)))
        in_share = places[coordinates] * count[:, None] // o == number[:, None]
        others = jnp.where(in_share, by_coordinate[coordinates], 0)
    return (coordinates[:, None] == jnp.arange(n)).astype(by_coordinate.dtype), others


def _trained(sites: Sites) -> list[Stack]:
    return [stack for stack in sites.stacks if stack.name not in sites.views]


def _width(stack: Stack) -> int:
    """Returns the width of a stack's second moments."""
    return stack.d_out if stack.lookup else min(stack.d_in, stack.d_out)


def _of_site(
    W: Float[Array, "d_in d_out"], moment: Float[Array, "r r"], drawn: Float[Array, "d_in C"], lookup: bool
) -> tuple[Float[Array, "d_in C"], Float[Array, "C d_out"]]:
    (d_in, d_out), C = W.shape, drawn.shape[1]
    n = min(C, d_in, d_out)
    if lookup or d_out <= d_in:
        directions = _eigenvectors(moment)[:, :n]
    else:
        # The outputs lie in the row space of W. With its orthonormal basis Q, W = Rᵀ Qᵀ, and their coordinates there
        # are x Rᵀ.
        Q, R = jnp.linalg.qr(W.T)
        directions = _product(Q, _eigenvectors(_product(_product(R, moment), R.T))[:, :n])
    largest = jnp.take_along_axis(directions, jnp.argmax(jnp.abs(directions), axis=0, keepdims=True), axis=0)
    directions = directions * jnp.sign(largest)
    V = _product(W, directions)
    length = jnp.linalg.norm(V, axis=0)
    is_part = length > NOTHING * jnp.max(length)
    share = jnp.sqrt(jnp.where(is_part, length, 1))
    V, U = jnp.where(is_part, V / share, drawn[:, :n]), jnp.where(is_part, directions * share, 0).T
    return jnp.concatenate([V, drawn[:, n:]], axis=1), jnp.concatenate([U, jnp.zeros((C - n, d_out), U.dtype)])


def _eigenvectors(moment: Float[Array, "r r"]) -> Float[Array, "r r"]:
    """Returns the eigenvectors as columns, those of the largest eigenvalues first."""
    return jnp.linalg.eigh(moment)[1][:, ::-1]


def _product(a: Array, b: Array) -> Array:
    """Returns the product in true fp32 (the default on GPUs is TF32)."""
    return jnp.matmul(a, b, precision="highest")


def _second_moment(x: Float[Array, "*n d"]) -> Float[Array, "d d"]:
    rows = wide(x).reshape(-1, x.shape[-1])
    return constrain(_product(rows.T, rows), "split")


@dataclass
class _MomentsLayer(PlainLayer):
    """Records the second moment of each site's input or output, whichever is narrower, by the kind of the site."""

    def enter(self, x: Shaped[Array, "*n"]) -> None:
        pass

    def look_up(self, kind: str, rows: Int[Array, "*n"], table: Float[Array, "n d"], dtype: Any) -> Array:
        y = super().look_up(kind, rows, table, dtype)
        if kind in self.reads:
            self.records[kind] = _second_moment(y)
        return y

    def __call__(self, kind: str, x: Float[Array, "*n d_in"], W: Float[Array, "d_in d_out"]) -> Array:
        y = super().__call__(kind, x, W)
        if kind in self.reads:
            self.records[kind] = _second_moment(x if W.shape[0] < W.shape[1] else y)
        if kind + PRE_IDENTITY in self.reads:
            self.records[kind + PRE_IDENTITY] = _second_moment(x)
        return y


@dataclass(frozen=True)
class _MomentsLinears(PlainLinears):
    """A clean pass that keeps second moments and no activations."""

    def layer(self, first: int, stop: int, slice_: Any) -> _MomentsLayer:
        plain = super().layer(first, stop, slice_)
        return _MomentsLayer(frozen_axes(self.memory), plain.reads, inputs=False)
