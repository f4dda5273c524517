"""Rotary position embedding (Su et al. 2021) in the rotate-half layout: dimension i pairs with i + d/2.

Frequencies are NumPy constants, not leaves of any tree: nothing can train them.
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from param_decomp_jax.numerics import wide


def frequencies(head_dim: int, base: float) -> np.ndarray:
    """``base^(−2i/d)`` for i = 0 … d/2 − 1, float64, in radians per position."""
    return base ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)


def rotate(x: Float[Array, "B T heads d"], per_position: np.ndarray) -> Float[Array, "B T heads d"]:
    """Turns positions 0 … T − 1 by ``position · per_position`` (``[d/2]``), computed in fp32, given in x's dtype."""
    angles = np.arange(x.shape[1])[:, None] * per_position[None, :]
    cos = jnp.asarray(np.cos(angles), wide(x).dtype)[:, None, :]
    sin = jnp.asarray(np.sin(angles), wide(x).dtype)[:, None, :]
    a, b = jnp.split(wide(x), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)
