"""What the programs of `memory_habits_programs.py` are made of: sizes, arguments, layers scanned and differentiated."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from param_decomp_jax.nn.numerics import matmul, rms_norm, wide
from param_decomp_jax.sharding.memory import PLAIN
from param_decomp_jax.sharding.mesh import constrain, gather
from param_decomp_jax.targets.plain_linears import frozen_axes

bf16, f32 = jnp.bfloat16, jnp.float32
Layer = Callable[[Array, dict[str, Array]], Array]


@dataclass(frozen=True)
class Size:
    """``rows``: 8 on every GPU, ``few``: one. ``long``: positions where attention is at issue."""

    rows: int = 64
    few: int = 8
    T: int = 2048
    long: int = 8192
    d: int = 4096
    d_mlp: int = 14336
    layers: int = 16
    heads: int = 32
    sites: int = 9
    C: int = 49152
    vocabulary: int = 128256


@dataclass(frozen=True)
class Given:
    """An argument: shape, dtype, and how it is split over the mesh."""

    shape: tuple[int, ...]
    dtype: Any = bf16
    spec: P = field(default_factory=P)


class Program(NamedTuple):
    """``arguments``: trees of `Given`. ``donated``: numbers of those whose memory the results may take."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    donated: tuple[int, ...] = ()


class Habit(NamedTuple):
    """``line``: the one that costs; ``instead``: what to write. ``program``: with the habit (True) or without."""

    name: str
    line: str
    instead: str
    program: Callable[[Size, bool], Program]


def batch(size: Size, rows: int | None = None) -> Given:
    return Given((rows or size.rows, size.T, size.d), spec=P("fsdp"))


def mlps(size: Size, dtype: Any = bf16) -> dict[str, Given]:
    """The matrices of all layers, the layers in front."""
    n, d, m = size.layers, size.d, size.d_mlp
    return {
        "scale": Given((n, d), f32),
        "up": Given((n, d, m), dtype, P(None, None, "fsdp")),
        "down": Given((n, m, d), dtype, P(None, None, "fsdp")),
    }


def whole(W: Array) -> Array:
    """A layer's matrix as it is multiplied."""
    return gather(W, frozen_axes(PLAIN), bf16)


def normed(x: Array, W: dict[str, Array]) -> Array:
    return rms_norm(x, 1e-6, W["scale"])


def mlp(x: Array, W: dict[str, Array]) -> Array:
    h = jax.nn.silu(matmul(normed(x, W), whole(W["up"])))
    return constrain(x + matmul(h, whole(W["down"])), "batch")


def run(layer: Layer, x: Array, W: dict[str, Array], policy: Any = None) -> Array:
    """Through all layers. ``policy``: what is kept of one beside its input."""
    body = jax.checkpoint(lambda x, W: (layer(x, W), None), prevent_cse=False, policy=policy)
    return lax.scan(body, x, W)[0]


def error(y: Array) -> Array:
    return jnp.mean(wide(y) ** 2)


def gradients(layer: Layer, policy: Any = None, by: tuple[str, ...] = ("scale",)) -> Callable[..., Any]:
    """By the input and by ``by``; the other matrices are frozen."""

    def of(x: Array, W: dict[str, Array]) -> Any:
        frozen = {name: w for name, w in W.items() if name not in by}

        def loss(x: Array, learned: dict[str, Array]) -> Array:
            return error(run(layer, x, frozen | learned, policy))

        return jax.grad(loss, argnums=(0, 1))(x, {name: W[name] for name in by})

    return of
