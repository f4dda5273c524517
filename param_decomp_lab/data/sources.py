"""Where a run's batches come from: rows of token data on this host, or features drawn inside the program."""

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Float, Int

from param_decomp_jax.mesh import sharding
from param_decomp_jax.placement import batch_sharding, from_process_rows
from param_decomp_jax.targets.features import SparseFeatures
from param_decomp_lab.data.batches import Batches


@runtime_checkable
class BatchSource(Protocol):
    """Batches by number, each a pure function of (seed, number)."""

    def __call__(self, number: int) -> Array:
        """One batch on the mesh."""
        ...

    def inputs(self, first: int, n: int, size: int) -> Any:
        """What a program for ``size`` steps is handed for the ``n`` batches from ``first`` on."""
        ...

    def batch_of(self, inputs: Any, row: Int[Array, ""], step: Int[Array, ""]) -> Array:
        """The batch of a step inside the program (`param_decomp_jax.program.BatchOf`)."""
        ...


@dataclass(frozen=True)
class TokenSource:
    """Rows of token ids ``[B, T]``, each process reading those of its devices (the ``lo`` to ``hi`` of ``batches``)."""

    batches: Batches
    mesh: Mesh

    def __call__(self, number: int) -> Int[Array, "B T"]:
        return self._placed(self.batches[number], 0)

    def inputs(self, first: int, n: int, size: int) -> Int[Array, "size B T"]:
        rows = [self.batches[number] for number in range(first, first + n)]
        stacked = np.stack(rows + [np.zeros_like(rows[0])] * (size - n))
        return self._placed(stacked, 1)

    def _placed(self, rows: np.ndarray, axis: int) -> Array:
        """``rows`` of this process in the global array whose batch is ``axis``."""
        batch = self.batches
        where = sharding(self.mesh, (*rows.shape[:axis], batch.batch_size), (None,) * axis + ("batch",))
        return from_process_rows(rows, where, axis, batch.lo, batch.batch_size)

    def batch_of(self, inputs: Any, row: Int[Array, ""], step: Int[Array, ""]) -> Array:
        return jax.lax.dynamic_index_in_dim(inputs, row, keepdims=False)


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

    @property
    def _placed(self) -> NamedSharding:
        return batch_sharding(self.mesh, (self.size, self.features.n_features))

    def _draw(self, number: int | Int[Array, ""]) -> Array:
        key = jax.random.fold_in(jax.random.key(self.seed, impl="threefry2x32"), self.purpose)
        return self.features.batch(key, jnp.asarray(number, jnp.uint32), self.size)
