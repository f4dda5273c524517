"""Computes fingerprints of a run's inputs, the target's weights and the data, to check on resuming that they are
unchanged.

The contents are compared, not the paths: a folder's contents may change, and paths differ between machines.
"""

import hashlib
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from param_decomp_jax.sharding.by_layer import is_by_layer
from param_decomp_lab.data.row_range import TokenRows
from param_decomp_lab.data.sources import TokenSource
from param_decomp_lab.processes.group import ALONE, Processes
from param_decomp_lab.runs.checkpoints.fingerprints import combine_fingerprints, fingerprints
from param_decomp_lab.runs.checkpoints.store import flatten
from param_decomp_lab.setup import Setup


def fingerprint_inputs(setup: Setup, processes: Processes = ALONE) -> dict[str, str]:
    """Returns fingerprints of the target's weights (bit by bit) and of the token data. A toy's data need none, since
    they are drawn from the seed.

    Must be called in all processes.
    """
    found = {"target": combine_fingerprints(fingerprints(flatten(setup.weights, is_leaf=is_by_layer)))}
    for what, source in (("data.train", setup.train), ("data.eval", setup.eval)):
        if isinstance(source, TokenSource):
            with processes.sharing_errors():
                value = _fingerprint_tokens(source.batches.data) if processes.first else ""
            found[what] = processes.from_first(value)
    return found


def _fingerprint_tokens(data: TokenRows) -> str:
    """Hashes the number of rows, their length, and three rows; not more rows, since reading one decodes a whole row
    group.
    """
    some = data.rows([0, len(data) // 2, len(data) - 1])
    return hashlib.sha256(f"{len(data)} {data.seq_len} ".encode() + some.tobytes()).hexdigest()[:16]


def not_finite(weights: Any, mesh: Mesh) -> list[str]:
    """Returns the names of the weight arrays of a target that contain NaN or an infinity. Must be called in all
    processes.
    """

    @partial(jax.jit, out_shardings=NamedSharding(mesh, PartitionSpec()))
    def finite(leaves: dict[str, jax.Array]) -> dict[str, jax.Array]:
        return {name: jnp.isfinite(leaf).all() for name, leaf in leaves.items()}

    return [name for name, is_finite in finite(flatten(weights)).items() if not bool(is_finite)]


def changed_inputs(saved: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Returns the names of the inputs whose fingerprints differ between ``saved`` and ``now``."""
    return [what for what, value in saved.items() if now.get(what) != value]
