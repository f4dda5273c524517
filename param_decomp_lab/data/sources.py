"""The sources of a run's batches: rows of token data on this host, or features drawn inside the program."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Float, Int

from param_decomp_jax.sharding.mesh import sharding
from param_decomp_jax.sharding.placement import batch_sharding, from_process_rows
from param_decomp_jax.targets.features import SparseFeatures
from param_decomp_lab.data.batches import Batches
from param_decomp_lab.data.read_ahead import ReadAhead


@runtime_checkable
class BatchShapes(Protocol):
    """The shapes of batches, for compiling programs."""

    def batch(self) -> jax.ShapeDtypeStruct:
        """Returns the shape and sharding of one batch."""
        ...

    def input_shapes(self, size: int) -> Any:
        """Returns the shapes and shardings of the inputs of a program for ``size`` steps."""
        ...

    def batch_of(self, inputs: Any, row: Int[Array, ""], step: Int[Array, ""]) -> Array:
        """Computes the batch of a step inside the program (`param_decomp_jax.method.multi_step.BatchFunction`)."""
        ...


@runtime_checkable
class BatchSource(BatchShapes, Protocol):
    """Batches by number, each a pure function of (seed, number)."""

    def __call__(self, number: int) -> Array:
        """Returns one batch on the mesh."""
        ...

    def inputs(self, first: int, n: int, size: int) -> Any:
        """Returns the inputs of a program for ``size`` steps, for the ``n`` batches from ``first`` on."""
        ...


@dataclass(frozen=True)
class TokenShapes:
    """Token ids ``[B, T]``: ``rows`` of ``length`` tokens."""

    rows: int
    length: int
    mesh: Mesh

    def batch(self) -> jax.ShapeDtypeStruct:
        shape = (self.rows, self.length)
        return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=batch_sharding(self.mesh, shape))

    def input_shapes(self, size: int) -> jax.ShapeDtypeStruct:
        where = _rows_sharding(self.mesh, self.rows, 1)
        return jax.ShapeDtypeStruct((size, self.rows, self.length), jnp.int32, sharding=where)

    def batch_of(self, inputs: Any, row: Int[Array, ""], step: Int[Array, ""]) -> Array:
        return jax.lax.dynamic_index_in_dim(inputs, row, keepdims=False)


def _rows_sharding(mesh: Mesh, n_rows: int, axis: int) -> NamedSharding:
    """Returns the sharding of an array whose ``axis`` runs over the rows of a batch."""
    return sharding(mesh, (1,) * axis + (n_rows,), (None,) * axis + ("batch",))


@dataclass(frozen=True)
class TokenSource(TokenShapes):
    """Batches of token data, of which each process reads the rows of its devices (``lo`` to ``hi`` of ``batches``).

    ``ahead``: the same batches, read before a program needs its `inputs`.
    """

    batches: Batches

    @cached_property
    def ahead(self) -> ReadAhead:
        return ReadAhead(self.batches)

    def __call__(self, number: int) -> Int[Array, "B T"]:
        return self._placed(self.batches[number], 0)

    def inputs(self, first: int, n: int, size: int) -> Int[Array, "size B T"]:
        rows = self.ahead.take(first, n)
        return self._placed(np.concatenate([rows, np.zeros((size - n, *rows.shape[1:]), np.int32)]), 1)

    def _placed(self, rows: np.ndarray, axis: int) -> Array:
        """Places the ``rows`` of this process in the global array whose batch axis is ``axis``."""
        where = _rows_sharding(self.mesh, self.rows, axis)
        return from_process_rows(rows, where, axis, self.batches.lo, self.rows)


@dataclass(frozen=True)
class FeatureSource:
    """Feature vectors ``[size, n_features]``. ``seed`` and ``purpose`` choose the draws."""

    features: SparseFeatures
    size: int
    seed: int
    purpose: int
    mesh: Mesh

    def __call__(self, number: int) -> Float[Array, "B n"]:
        drawn: Array = jax.jit(self._draw, out_shardings=self._placed)(number)
        return drawn

    def inputs(self, first: int, n: int, size: int) -> tuple[()]:
        return ()

    def batch_of(self, inputs: Any, row: Int[Array, ""], step: Int[Array, ""]) -> Array:
        return jax.lax.with_sharding_constraint(self._draw(step), self._placed)

    def batch(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((self.size, self.features.n_features), jnp.float32, sharding=self._placed)

    def input_shapes(self, size: int) -> tuple[()]:
        return ()

    @property
    def _placed(self) -> NamedSharding:
        return batch_sharding(self.mesh, (self.size, self.features.n_features))

    def _draw(self, number: int | Int[Array, ""]) -> Array:
        key = jax.random.fold_in(jax.random.key(self.seed, impl="threefry2x32"), self.purpose)
        return self.features.batch(key, jnp.asarray(number, jnp.uint32), self.size)
