"""Computes rank-one parts of a matrix without training (B1)."""

from typing import Literal

import numpy as np
from jaxtyping import Float

Baseline = Literal["neurons", "singular vectors", "weighted singular vectors", "random rotation"]
BASELINES: tuple[Baseline, ...] = ("neurons", "singular vectors", "weighted singular vectors", "random rotation")
Choice = Literal["activation", "gradient"]
"""How the parts that are on are chosen (B2)."""
SMALLEST = 1e-6
"""The least share of the largest second moment with which directions of the inputs count, so that none is lost."""


READS_NEURONS = frozenset({"down_proj", "o_proj", "c_proj", "mlp_out", "linear2"})
"""Kinds of matrices whose inputs are neurons; what other matrices write are neurons."""


def parts_of(
    kind: Baseline,
    matrix: str,
    W: Float[np.ndarray, "d_in d_out"],
    second_moment: Float[np.ndarray, "d_in d_in"],
    rng: np.random.Generator,
) -> tuple[Float[np.ndarray, "d_in C"], Float[np.ndarray, "C d_out"]]:
    """Returns V and U with ``V U = W``, in float64. ``matrix``: its kind. ``second_moment``: the mean of ``x xᵀ`` over
    inputs.
    """
    W, reads = np.asarray(W, np.float64), matrix in READS_NEURONS
    n = W.shape[0] if reads else W.shape[1]
    match kind:
        case "neurons":
            return (np.eye(n), W) if reads else (W, np.eye(n))
        case "random rotation":
            Q, R = np.linalg.qr(rng.standard_normal((n, n)))
            Q *= np.sign(np.diag(R))
            return (Q, Q.T @ W) if reads else (W @ Q, Q.T)
        case "singular vectors":
            A, s, B = np.linalg.svd(W, full_matrices=False)
            return A * s, B
        case "weighted singular vectors":
            root, inverse = _roots(second_moment)
            A, s, B = np.linalg.svd(root @ W, full_matrices=False)
            return inverse @ (A * s), B


def _roots(
    second_moment: Float[np.ndarray, "d d"],
) -> tuple[Float[np.ndarray, "d d"], Float[np.ndarray, "d d"]]:
    """Returns the square root, and its inverse."""
    values, vectors = np.linalg.eigh(np.asarray(second_moment, np.float64))
    root = np.sqrt(np.maximum(values, SMALLEST * values.max()))
    return (vectors * root) @ vectors.T, (vectors / root) @ vectors.T
