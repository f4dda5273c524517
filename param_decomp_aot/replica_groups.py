"""Which devices talk to each other in a collective operation, from its attributes in a program's text."""

import re
from typing import Any

import numpy as np

_GROUPS = re.compile(r"\breplica_groups=(.*)")
_LISTED = re.compile(r"\{((?:\{[\d,]*\},?)*)\}")
_IOTA = re.compile(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_IDS = re.compile(r"\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(r"mesh\[((?:'[^']*'=\d+,?)*)\](?:, ?device_ids=\(((?:[^()]|\([\d,]*\))*)\))? ?\{([^}]*)\}")
_AXIS = re.compile(r"'([^']*)'=(\d+)")
_PART = re.compile(r"'([^']*)'(?::\((\d+)\)(\d+))?")
_PAIRS = re.compile(r"\bsource_target_pairs=(\{(?:\{[\d,]*\},?)*\})")

_Ids = np.ndarray[tuple[Any, ...], np.dtype[Any]]
Groups = tuple[tuple[int, ...], ...]


def replica_groups(attributes: str, n_devices: int) -> Groups:
    """Returns the devices of each group, in the order of the program's devices. If no group is named, all devices are
    one group.

    XLA has three notations. ``{{0,1},{2,3}}`` lists the groups. ``[2,2]<=[4]`` or ``[2,2]<=[2,2]T(1,0)`` arranges the
    numbers from 0 in an array, transposes it, and cuts it into rows. ``mesh['a'=2,'b'=2] {'b'}`` names axes of a mesh
    or parts of axes (``'b':(2)4`` is the factor 4 that comes after a factor 2), the last of them innermost. The devices
    of such a mesh, if they are not in order, are given as ``device_ids=([4,2]T(1,0))``, the numbers from 0 in an array,
    transposed. Raises ValueError for any other notation.
    """
    found = _GROUPS.search(attributes)
    if found is None:
        return (tuple(range(n_devices)),)
    written = found[1]
    if iota := _IOTA.match(written):
        return _rows(_iota(iota[2], iota[3]).reshape(_numbers(iota[1])))
    if listed := _LISTED.match(written):
        return _listed(listed[0]) or (tuple(range(n_devices)),)
    if mesh := _MESH.match(written):
        return _along(mesh)
    raise ValueError(f"not groups of devices: {written[:100]}")


def source_target_pairs(attributes: str) -> Groups:
    """Returns who sends to whom in a permutation; empty if not given."""
    found = _PAIRS.search(attributes)
    return _listed(found[1]) if found else ()


def _listed(written: str) -> Groups:
    return tuple(_numbers(group) for group in re.findall(r"\{([\d,]+)\}", written))


def _along(mesh: re.Match[str]) -> Groups:
    sizes = {name: int(size) for name, size in _AXIS.findall(mesh[1])}
    ids = _ids(mesh[2] or "", int(np.prod(list(sizes.values()))))
    parts = [(name, int(before or 1), int(part or sizes[name])) for name, before, part in _PART.findall(mesh[3])]
    # Splits every axis into factors: the named ones, and those before, between and after them.
    shape: list[int] = []
    position: dict[tuple[str, int], int] = {}
    for name, size in sizes.items():
        done = 1
        for before, part in sorted((before, part) for axis, before, part in parts if axis == name):
            position[name, before] = len(shape) + 1
            shape += [before // done, part]
            done = before * part
        shape.append(size // done)
    inside = [position[name, before] for name, before, _ in parts]
    ids = np.moveaxis(ids.reshape(shape), inside, range(-len(inside), 0))
    return _rows(ids.reshape(-1, int(np.prod([shape[i] for i in inside]))))


def _ids(written: str, n: int) -> _Ids:
    """Returns a mesh's devices, in order if it does not name them."""
    if not written:
        return np.arange(n)
    if iota := _IDS.fullmatch(written):
        return _iota(iota[1], iota[2])
    if re.fullmatch(r"[\d,]+", written):
        return np.array(_numbers(written), int)
    raise ValueError(f"not devices of a mesh: {written[:100]}")


def _iota(shape: str, order: str | None) -> _Ids:
    """Returns the numbers from 0 in an array of this shape, with its axes put into this order, flattened."""
    sizes = _numbers(shape)
    numbers = np.arange(int(np.prod(sizes))).reshape(sizes)
    return (numbers.transpose(_numbers(order)) if order else numbers).ravel()


def _numbers(written: str) -> tuple[int, ...]:
    return tuple(int(n) for n in written.split(",") if n)


def _rows(ids: _Ids) -> Groups:
    return tuple(tuple(int(i) for i in row) for row in ids)
