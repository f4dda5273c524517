"""Fingerprints of arrays: those of a definition of their own, wherever and however the array lies."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from param_decomp_aot.compile import compile_for
from param_decomp_jax.sharding.mesh import MeshShape, make_mesh, sharding
from param_decomp_lab.probe.cards import find_card
from param_decomp_lab.runs.checkpoints.fingerprints import (
    PartwiseFingerprint,
    combine_fingerprints,
    fingerprint,
    fingerprint_program,
)
from tests.plugin import needs_plugin

SHAPE = (3, 16, 40)
MASK = (1 << 32) - 1


def mixed(h: int) -> int:
    h = (h ^ (h >> 16)) * 0x85EBCA6B & MASK
    h = (h ^ (h >> 13)) * 0xC2B2AE35 & MASK
    return h ^ (h >> 16)


def defined(array: np.ndarray) -> str:
    """Entry by entry in Python's integers."""
    size = array.dtype.itemsize
    words = array.reshape(-1).view({1: np.uint8, 2: np.uint16}.get(size, np.uint32))
    return f"{sum(mixed(int(w) ^ mixed(0x9E3779B9 + i & MASK)) for i, w in enumerate(words)) & MASK:08x}"


def values(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=SHAPE).astype(np.float32)


def test_is_what_it_is_said_to_be() -> None:
    x = values()
    for array in (x, x[0], x.ravel(), (100 * x).astype(np.int32), (100 * x).astype(np.int8), x > 0, x[0, 0, 0]):
        assert fingerprint(jnp.asarray(array)) == defined(np.asarray(array))
    half = jnp.asarray(x, jnp.bfloat16)
    assert fingerprint(half) == defined(np.asarray(half).view(np.uint16))
    with jax.enable_x64(True):
        assert fingerprint(jnp.asarray(x, jnp.float64)) == defined(x.astype(np.float64))


@pytest.mark.parametrize("kind", ["device", "pinned_host"])
@pytest.mark.parametrize(
    ("mesh", "axes"),
    [
        (MeshShape(fsdp=8), (None, "batch", None)),
        (MeshShape(2, 2, 2), (None, "batch", None)),
        (MeshShape(fsdp=8), (None, None, "batch")),
        (MeshShape(fsdp=4), ()),
    ],
)
def test_does_not_depend_on_where_it_lies(mesh: MeshShape, axes: tuple[str | None, ...], kind: str) -> None:
    x = values()
    place = sharding(make_mesh(mesh), SHAPE, axes).with_memory_kind(kind)
    assert fingerprint(jax.device_put(x, place)) == defined(x)


@pytest.mark.parametrize("dtype", [np.float32, np.int8])
def test_of_parts_is_that_of_the_whole(dtype: type) -> None:
    """In any order, of unequal sizes."""
    x = (100 * values()).astype(dtype)
    seen = PartwiseFingerprint(SHAPE)
    for rows, columns in ((slice(1, 3), slice(0, 40)), (slice(0, 1), slice(25, 40)), (slice(0, 1), slice(0, 25))):
        part = (rows, slice(0, 16), columns)
        seen.add(part, x[part])
    assert str(seen) == defined(x)
    scalar = PartwiseFingerprint(())
    scalar.add((), x[0, 0, 0])
    assert str(scalar) == defined(x[0, 0, 0])


def test_shows_every_kind_of_damage() -> None:
    x = values()
    seen = {fingerprint(jnp.asarray(x))}
    damaged: list[np.ndarray] = []
    for bit in (0, 13, 31):
        y = x.copy()
        y.reshape(-1).view(np.uint32)[777] ^= 1 << bit
        damaged.append(y)
    swapped, zeroed, moved = x.copy(), x.copy(), np.roll(x, 1)
    swapped[1, 2], swapped[1, 3] = x[1, 3], x[1, 2]
    zeroed[2] = 0
    signs = np.where(x == x[0, 0, 0], -x, x)
    for y in (*damaged, swapped, zeroed, moved, signs, x.astype(jnp.bfloat16).astype(np.float32)):
        seen.add(fingerprint(jnp.asarray(y)))
    assert len(seen) == 9


def test_zeros_of_other_sizes_differ() -> None:
    assert len({fingerprint(jnp.zeros(n)) for n in (1, 2, 3, 1000)}) == 4


def test_many_as_one() -> None:
    one = combine_fingerprints({"a": "00000001", "b": "00000002"})
    assert one == combine_fingerprints({"b": "00000002", "a": "00000001"})
    assert one != combine_fingerprints({"a": "00000002", "b": "00000001"})
    assert len(one) == 16


@needs_plugin
@pytest.mark.parametrize("axes", [(None, "batch", None), ()])
def test_a_gpu_makes_nothing_of_the_arrays_size(axes: tuple[str | None, ...]) -> None:
    shape = (3, 4096, 24576)

    def program(mesh: Any) -> tuple[Any, tuple[Any, ...]]:
        array = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding(mesh, shape, axes))
        return fingerprint_program(array), (array,)

    memory = compile_for(program, MeshShape(fsdp=8), find_card("h100").description, per_node=8).memory
    assert memory.temp < 1 << 20 < memory.arguments
