"""Rotary position embedding (Su et al. 2021), and the ways in which published models scale its frequencies.

Frequencies are NumPy constants, not leaves of any tree: nothing can train them.
"""

import math
from dataclasses import dataclass
from typing import Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from param_decomp_jax.nn.numerics import wide

Pairs = Literal["half", "adjacent"]
"""Which dimensions of a head turn together: i and i + d/2 (``half``), or 2i and 2i + 1 (``adjacent``)."""


def frequencies(head_dim: int, base: float) -> np.ndarray:
    """``base^(−2i/d)`` for i = 0 … d/2 − 1, in float64, in radians per position."""
    return base ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)


def rotate(
    x: Float[Array, "B T heads d"], per_position: np.ndarray, pairs: Pairs = "half", factor: float = 1.0
) -> Float[Array, "B T heads d"]:
    """Rotates positions 0 … T − 1 by ``position · per_position``. Computed in fp32, returned in the dtype of x.

    ``per_position``: ``[r/2]`` angles for the first r dimensions of a head; the other dimensions stay as they are.
    ``factor``: multiplies the rotated dimensions.
    """
    r = 2 * len(per_position)
    angles = np.arange(x.shape[1])[:, None] * per_position[None, :]
    cos = jnp.asarray(factor * np.cos(angles), wide(x).dtype)[:, None, :]
    sin = jnp.asarray(factor * np.sin(angles), wide(x).dtype)[:, None, :]
    turning = wide(x) if r == x.shape[-1] else wide(x[..., :r])
    if pairs == "half":
        a, b = jnp.split(turning, 2, axis=-1)
        turned = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    else:
        a, b = turning[..., 0::2], turning[..., 1::2]
        turned = jnp.stack([a * cos - b * sin, b * cos + a * sin], axis=-1).reshape(turning.shape)
    turned = turned.astype(x.dtype)
    return turned if r == x.shape[-1] else jnp.concatenate([turned, x[..., r:]], axis=-1)


# ---- scaled frequencies, for sequences longer than those of the first training ----


@dataclass(frozen=True)
class Llama3Scaling:
    """The frequency scaling of Llama 3.1 (Hugging Face's ``rope_type: llama3``)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int
    rope_type: Literal["llama3"] = "llama3"

    def scaled(self, plain: np.ndarray, base: float) -> np.ndarray:
        # Frequencies with many turns over the original context stay, those with few are divided by `factor`, and those
        # between are interpolated.
        turns = self.original_max_position_embeddings * plain / (2 * np.pi)
        keep = np.clip((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor), 0.0, 1.0)
        return keep * plain + (1 - keep) * plain / self.factor

    @property
    def attention_factor(self) -> float:
        return 1.0


@dataclass(frozen=True)
class LinearScaling:
    """Every frequency divided by ``factor`` (position interpolation; Chen et al. 2023)."""

    factor: float
    rope_type: Literal["linear"] = "linear"

    def scaled(self, plain: np.ndarray, base: float) -> np.ndarray:
        return plain / self.factor

    @property
    def attention_factor(self) -> float:
        return 1.0


@dataclass(frozen=True)
class YarnScaling:
    """YaRN (Peng et al. 2023): slow frequencies are divided by ``factor``, fast ones stay, with a ramp between them.

    ``beta_fast``, ``beta_slow``: turns over the original context at which the ramp begins and ends. ``truncate``:
    whether the ends are rounded to whole dimensions. ``attention_factor``: multiplies queries and keys.
    """

    factor: float
    original_max_position_embeddings: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    rope_type: Literal["yarn"] = "yarn"

    def scaled(self, plain: np.ndarray, base: float) -> np.ndarray:
        n = len(plain)

        def dimension_of(turns: float) -> float:
            return (
                2 * n * math.log(self.original_max_position_embeddings / (turns * 2 * math.pi)) / (2 * math.log(base))
            )

        low, high = dimension_of(self.beta_fast), dimension_of(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, 2 * n - 1)
        # With a small base the end can lie before the beginning. The ramp then has the opposite slope, as in
        # transformers.
        ramp = np.clip((np.arange(n) - low) / ((high - low) or 0.001), 0.0, 1.0)
        return ramp * plain / self.factor + (1 - ramp) * plain


RopeScaling = Llama3Scaling | LinearScaling | YarnScaling
