"""Muon (T7): the update is the momentum of a matrix with all its singular values moved close to 1."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from param_decomp_jax.decomposition.schedules import AnySchedule
from param_decomp_jax.nn.numerics import wide
from param_decomp_jax.sharding.mesh import RULES, Axes, constrain, is_axes, n_devices

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""The coefficients of Newton-Schulz, chosen for a steep start (Jordan et al. 2024): singular values end between 0.7 and
1.2."""
EPS = 1e-8
LARGE = 1 << 22
"""The number of entries above which a matrix fills a device by itself. Smaller matrices of one shape are computed as a
batch."""


@dataclass(frozen=True)
class Muon:
    """The settings of T7. ``consistent_rms``: the root mean square of an update before the learning rate; None scales
    by √max(1, columns / rows) instead. ``n_iterations``, ``dtype``: those of Newton-Schulz (N5)."""

    schedule: AnySchedule
    beta: float = 0.95
    consistent_rms: float | None = 0.2
    weight_decay: float = 0.0
    clip_norm: float | None = None
    n_iterations: int = 5
    dtype: Literal["float32", "bfloat16"] = "float32"

    def scale(self, rows: int, columns: int) -> float:
        """Returns the factor for an orthogonalised matrix of this shape."""
        if self.consistent_rms is None:
            return max(1.0, columns / rows) ** 0.5
        return self.consistent_rms * max(rows, columns) ** 0.5


class MuonState(NamedTuple):
    """The state of Muon. ``momentum``: that of the matrices, in the parameters' structure, with None for other arrays.
    ``others``: Adam's state for the other arrays, with None for the matrices. Its count is the number of updates of
    both."""

    momentum: Any
    others: optax.ScaleByAdamState


def muon(spec: Muon, rate: Callable[[Any], Any], axes: Any) -> optax.GradientTransformation:
    """Returns the optax transformation of T7, without the clip.

    ``rate``: the learning rate as a function of the number of updates. ``axes``: descriptions of the parameters, in
    their structure. Parameters that enter products are matrices in their last two axes, or arrays of such matrices;
    Adam updates the others.
    """
    adam = optax.scale_by_adam(0.9, 0.999, eps=EPS)

    def matrices(tree: Any) -> Any:
        return jax.tree.map(lambda a, x: x if a.product else None, axes, tree, is_leaf=is_axes)

    def others(tree: Any) -> Any:
        return jax.tree.map(lambda a, x: None if a.product else x, axes, tree, is_leaf=is_axes)

    def init(parameters: Any) -> MuonState:
        momentum = jax.tree.map(jnp.zeros_like, matrices(parameters))
        return MuonState(momentum, adam.init(others(parameters)))

    def update(gradient: Any, state: Any, parameters: Any = None) -> tuple[Any, MuonState]:
        earlier = state.others.count
        beta, lr, n = spec.beta, rate(earlier), jnp.asarray(earlier, float)
        own = matrices(gradient)
        momentum = jax.tree.map(lambda m, g: beta * m + (1 - beta) * g, state.momentum, own)
        of_momentum, of_gradient = beta / (1 - beta ** (n + 2)), (1 - beta) / (1 - beta ** (n + 1))
        nesterov = jax.tree.map(lambda m, g: of_momentum * m + of_gradient * g, momentum, own)

        structure: Any
        leaves, structure = jax.tree.flatten(nesterov)
        described = jax.tree.leaves(matrices(axes), is_leaf=is_axes)
        orthogonal = structure.unflatten(orthogonalize(leaves, described, spec))

        def step(x: Array, W: Array) -> Array:
            return -lr * (spec.scale(*W.shape[-2:]) * x + spec.weight_decay * W)

        of_matrices = jax.tree.map(step, orthogonal, matrices(parameters))
        adams, others_state = adam.update(others(gradient), state.others)
        of_others = jax.tree.map(lambda x: -lr * x, adams)
        return either(of_matrices, of_others), MuonState(momentum, others_state)

    return optax.GradientTransformation(init, update)


def either(first: Any, second: Any) -> Any:
    """Merges two trees, one of which has None where the other has an array."""
    return jax.tree.map(lambda x, y: y if x is None else x, first, second, is_leaf=lambda x: x is None)


def orthogonalize(arrays: Sequence[Float[Array, "..."]], axes: Sequence[Axes], spec: Muon) -> list[Float[Array, "..."]]:
    """Applies `newton_schulz` to the matrices in the last two axes of each array (N5); the results have the arrays'
    dtypes.

    Matrices of one shape are computed together. On several devices, each device gets some of the matrices whole, and
    the results are split again. With split matrices, all devices would have to add up a Gram matrix in every iteration.
    """
    narrow = (lambda x: x.astype(jnp.bfloat16)) if spec.dtype == "bfloat16" else wide
    found = list(arrays)
    together: dict[Any, list[int]] = {}
    for i, (x, a) in enumerate(zip(arrays, axes, strict=True)):
        lead, names = a.names[:-2], a.names[-2:]
        if any(name in RULES for name in lead):  # matrices of single components lie whole where the component is
            found[i] = newton_schulz(narrow(x), spec.n_iterations).astype(x.dtype)
            continue
        rows, columns = x.shape[-2:]
        alone = i if n_devices() == 1 and rows * columns > LARGE else None
        key = (columns, rows, names[::-1], alone) if rows > columns else (rows, columns, names, alone)
        together.setdefault(key, []).append(i)
    for (rows, columns, names, _), members in together.items():
        stacks = [_lying(narrow(arrays[i])).reshape(-1, rows, columns) for i in members]
        results = _by_device(jnp.concatenate(stacks), names, spec.n_iterations)
        ends = list(accumulate(map(len, stacks)))[:-1]
        for i, own in zip(members, jnp.split(results, ends), strict=True):
            x = arrays[i]
            lying = own.reshape(_lying(x).shape)
            found[i] = (lying if lying.shape == x.shape else lying.mT).astype(x.dtype)
    return found


def _lying(x: Float[Array, "*lead rows columns"]) -> Float[Array, "*lead less more"]:
    return x.mT if x.shape[-2] > x.shape[-1] else x


def _by_device(
    stack: Float[Array, "n rows columns"], names: tuple[str | None, ...], n_iterations: int
) -> Float[Array, "n rows columns"]:
    """Applies `newton_schulz` to matrices that are split at rest as ``names`` say. Every device computes the same
    number of them."""
    n, rows, columns = stack.shape
    if n_devices() == 1:
        if n > 1 and rows * columns > LARGE:
            return jax.lax.map(lambda x: newton_schulz(x, n_iterations), stack)
        return newton_schulz(stack, n_iterations)
    x = jnp.pad(stack, ((0, -n % n_devices()), (0, 0), (0, 0)))
    # Matrices are collected and split again one axis of the mesh at a time; otherwise XLA lets every device collect all
    # of them.
    way = ((None, *names), ("matrix_of_replica",), ("matrix",))
    for place in way:
        x = constrain(x, *place)
    x = newton_schulz(x, n_iterations)
    for place in reversed(way):
        x = constrain(x, *place)
    return x[:n]


def newton_schulz(x: Float[Array, "*lead rows columns"], n_iterations: int) -> Float[Array, "*lead rows columns"]:
    """Returns matrices with the same singular vectors, and singular values near 1 (T7), in the dtype of ``x``."""
    if x.shape[-2] > x.shape[-1]:
        return newton_schulz(x.mT, n_iterations).mT
    dtype, (a, b, c) = x.dtype, COEFFICIENTS
    norm = jnp.sqrt(jnp.sum(wide(x) ** 2, axis=(-2, -1), keepdims=True))
    x = (wide(x) / (norm + EPS)).astype(dtype)

    def product(x: Array, y: Array) -> Array:
        # For fp32, the default on GPUs is TF32.
        return wide(jnp.matmul(x.astype(dtype), y.astype(dtype), precision="highest"))

    for _ in range(n_iterations):
        gram = product(x, x.mT)
        # Summed in fp32, because bfloat16 would also round the coefficients.
        x = (a * wide(x) + product(b * gram + c * product(gram, gram), x)).astype(dtype)
    return x
