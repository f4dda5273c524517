"""Measures collectives between devices: many in a row inside one compiled program, then latency and rate.

    python -m experiments.gpu_day.links --json links.json                                 # this machine's cards
    srun --nodes=2 --ntasks-per-node=8 python -m experiments.gpu_day.links --nodes 2      # and between two nodes

Each round of a program's loop runs one or two collectives on the result of the round before, and at most one small
kernel that ensures this order (some 3 µs, which are in the latency). The program's text, read as `pd probe` reads it,
shows that nothing else is sent: bytes and hops have the same meaning in both (`param_decomp_aot/traffic.py`).
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from scipy.optimize import nnls

from experiments.gpu_day.items import Links
from param_decomp_aot.traffic import Collective, traffic
from param_decomp_lab.errors import UserError
from param_decomp_lab.processes.joining import joined

KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")
TWICE = ("all-to-all", "collective-permute")
"""Operations of which an iteration has two."""
AXES = ("others", "group")
"""The axes of the mesh: groups lie along the second one, and the groups along the first do the same at the same
time."""


@dataclass(frozen=True)
class Message:
    """One collective. ``link``: what it is sent over. ``group``: the number of devices. ``payload``: the bytes of one
    device's operand, or of its result for an all-gather. ``ring``: the bytes that each device sends to the next.
    ``hops``: how often in sequence. ``seconds``: the median time of one."""

    kind: str
    link: str
    group: int
    payload: int
    ring: int
    hops: int
    seconds: float


@dataclass(frozen=True)
class Fit:
    """The fit ``seconds = start_s + hops · hop_s + ring / rate_Bps`` with the smallest relative deviations.
    ``latency_s``: start and hops in a group of ``group`` devices, the largest group. ``hop_s``: None if all messages
    have the same number of hops, which are then in the start. ``off``: the largest relative deviation of a message."""

    kind: str
    link: str
    group: int
    latency_s: float
    start_s: float
    hop_s: float | None
    rate_Bps: float
    off: float


def fit(messages: Sequence[Message]) -> Fit:
    """Returns start and rate for messages of one kind over one link. Raises ValueError if they do not determine a
    rate."""
    if len({m.ring for m in messages}) < 2:
        raise ValueError("messages of one size tell no rate")
    seconds = np.array([m.seconds for m in messages])
    columns = {"start": np.ones(len(messages)), "byte": np.array([float(m.ring) for m in messages])}
    if len({m.hops for m in messages}) > 1:
        columns["hop"] = np.array([float(m.hops) for m in messages])
    relative = np.stack([column / seconds for column in columns.values()], axis=1)
    scale = np.linalg.norm(relative, axis=0)
    solved, _ = nnls(relative / scale, np.ones(len(messages)))
    found = dict(zip(columns, solved / scale, strict=True))
    if found["byte"] <= 0:
        raise ValueError("the times do not grow with the bytes")
    off = float(np.abs(relative @ (solved / scale) - 1).max())
    largest = max(messages, key=lambda m: (m.group, m.ring))
    hop, start = float(found["hop"]) if "hop" in found else None, float(found["start"])
    latency, rate = start + largest.hops * (hop or 0.0), 1 / float(found["byte"])
    return Fit(largest.kind, largest.link, largest.group, latency, start, hop, rate, off)


def fit_all(messages: Sequence[Message]) -> tuple[list[Fit], list[str]]:
    """Returns a fit for each kind and link, and the reason for those without one."""
    fits, reasons = [], []
    for kind, link in dict.fromkeys((m.kind, m.link) for m in messages):
        theirs = [m for m in messages if (m.kind, m.link) == (kind, link)]
        try:
            fits.append(fit(theirs))
        except ValueError as error:
            reasons.append(f"{kind} over the {link}: {error}")
    return fits, reasons


def measure_links(item: Links) -> dict[str, Any]:
    """Measures every kind over every link, in groups of 2, 4, … devices of a node and in groups with one device of each
    node."""
    messages, failed = [], []
    devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
    for link, group, sizes in plan(len(devices), item.nodes, item.sizes, item.few):
        mesh = group_mesh(devices, link, group, item.nodes)
        for kind in KINDS:
            for size in sizes:
                try:
                    messages.append(time_one(kind, link, mesh, size, len(devices) // item.nodes))
                except ValueError as error:
                    failed.append(str(error))
    fits, reasons = fit_all(messages)
    return {
        "device": devices[0].device_kind,
        "devices": len(devices),
        "nodes": item.nodes,
        "messages": [asdict(message) for message in messages],
        "fits": [asdict(one) for one in fits],
        "not_fitted": failed + reasons,
    }


def plan(devices: int, nodes: int, sizes: Sequence[int], few: int) -> Iterator[tuple[str, int, Sequence[int]]]:
    """Yields link, devices of a group, and sizes: all sizes in the largest group, the ``few`` smallest ones in others,
    where the number of hops shows."""
    per_node = devices // nodes
    groups = [n for n in (2**k for k in range(1, 11)) if n <= per_node and per_node % n == 0]
    if per_node > 1 and per_node not in groups:
        groups.append(per_node)
    for group in groups:
        yield "node", group, sizes if group == groups[-1] else sizes[:few]
    if nodes > 1:
        yield "network", nodes, sizes


def group_mesh(devices: Sequence[Any], link: str, group: int, nodes: int) -> Mesh:
    """Returns a mesh of groups of devices. ``devices``: node by node."""
    if link == "node":
        return Mesh(np.array(devices).reshape(-1, group), AXES)
    return Mesh(np.array(devices).reshape(nodes, -1).T, AXES)


def time_one(kind: str, link: str, mesh: Mesh, size: int, per_node: int, runs: int = 5) -> Message:
    """Measures one kind at one size. Raises ValueError if the compiled program is not what it should be."""
    on_cpu = jax.default_backend() == "cpu"
    repeats = 4 if on_cpu else max(8, min(256, 2**30 // size))
    # CPUs do not sum in bf16: XLA would send twice the bytes.
    program, shape = many(kind, mesh, size, repeats, jnp.float32 if on_cpu else jnp.bfloat16)
    x = jax.jit(lambda: jnp.zeros(shape.shape, shape.dtype), out_shardings=shape.sharding)()
    compiled = program.lower(x).compile()
    found = only_collective(compiled.as_text(), kind, repeats, per_node)
    times = []
    for _ in range(runs + 1):
        started = time.perf_counter()
        x = jax.block_until_ready(compiled(x))
        times.append(time.perf_counter() - started)
    group, seconds = mesh.shape["group"], statistics.median(times[1:]) / repeats
    return Message(kind, link, group, found.payload, found.ring, found.hops, seconds)


def many(kind: str, mesh: Any, size: int, repeats: int, dtype: Any) -> tuple[Any, jax.ShapeDtypeStruct]:
    """Returns a jitted function of ``repeats`` collectives of ``size`` bytes, and the shape of its argument."""
    group = mesh.shape["group"]
    each = max(1, size // group // jnp.dtype(dtype).itemsize)
    local = each if kind == "all-gather" else each * group
    places = NamedSharding(mesh, PartitionSpec(AXES))

    def loop(x: Any) -> Any:
        rounds = repeats // 2 if kind in TWICE else repeats
        return lax.fori_loop(0, rounds, lambda i, x: _next(kind, x, i, each, group), x)

    on_devices = jax.shard_map(loop, mesh=mesh, in_specs=places.spec, out_specs=places.spec, check_vma=False)
    return jax.jit(on_devices, donate_argnums=0), jax.ShapeDtypeStruct((local * mesh.size,), dtype, sharding=places)


def _next(kind: str, x: Any, i: Any, each: int, group: int) -> Any:
    """Returns the argument of the next collective, after one (or two) of ``x``, without a copy of a message's size."""
    match kind:
        case "all-gather":
            gathered = lax.all_gather(x, "group", tiled=True)
            return lax.dynamic_update_slice(x, lax.dynamic_slice(gathered, (i % group * each,), (1,)), (0,))
        case "reduce-scatter":
            part = lax.psum_scatter(x, "group", tiled=True)
            return lax.dynamic_update_slice(x, part[:1], (i % group * each,))
        case "all-reduce":
            # XLA would replace the sum of equal values on all devices by a multiplication.
            own = (lax.axis_index("group") + i).astype(x.dtype)[None]
            return lax.dynamic_update_slice(lax.psum(x, "group"), own, (0,))
        case "all-to-all":
            return _there(lambda x: lax.all_to_all(x, "group", 0, 0, tiled=True), x)
        case _:
            return _there(lambda x: lax.ppermute(x, "group", [(n, (n + 1) % group) for n in range(group)]), x)


def _there(collective: Callable[[Any], Any], x: Any) -> Any:
    """Applies the collective twice, so that the second result can lie where ``x`` was. The result of one would be
    copied there."""
    return collective(lax.optimization_barrier(collective(x)))


def only_collective(text: str, kind: str, repeats: int, per_node: int) -> Collective:
    """Returns the only collective of the program, after checking that it runs as often as it should."""
    found = traffic(text, per_node).collectives
    right = [one for one, times in found.items() if one.kind == kind and times == repeats]
    if len(found) != 1 or not right:
        seen = ", ".join(f"{times} × {one.kind} of {one.payload:,} bytes" for one, times in found.items()) or "nothing"
        raise ValueError(f"{repeats} × {kind}: XLA made {seen} of it")
    return right[0]


def as_table(fits: Sequence[Fit]) -> str:
    """Returns rows to paste next to the cards' rates."""
    rows = ["kind,link,group,latency_s,start_s,hop_s,rate_Bps"]
    for one in fits:
        hop = "" if one.hop_s is None else f"{one.hop_s:.3g}"
        rows.append(f"{one.kind},{one.link},{one.group},{one.latency_s:.3g},{one.start_s:.3g},{hop},{one.rate_Bps:.4g}")
    return "\n".join(rows)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=1, help="nodes that the devices belong to (default: 1)")
    parser.add_argument("--largest", type=int, default=256, help="largest message in MiB (default: 256)")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    parser.add_argument("--coordinator", metavar="HOST:PORT", help="for several processes without Slurm")
    parser.add_argument("--processes", type=int)
    parser.add_argument("--process-id", type=int)
    options = parser.parse_args(arguments)
    sizes = tuple(size for size in (4**n << 16 for n in range(12)) if size <= options.largest << 20)
    try:
        if not sizes:
            raise UserError(f"--largest {options.largest}: should be at least 1 (MiB)")
        with joined(options.coordinator, options.processes, options.process_id) as processes:
            devices = len(jax.devices())
            if devices < 2:
                raise UserError("only one device here: there is nothing to send to")
            if options.nodes < 1 or devices % options.nodes:
                raise UserError(f"--nodes {options.nodes}: should divide the number of devices, {devices}")
            found = measure_links(Links(name="links", parts=(), expected_s=0.0, sizes=sizes, nodes=options.nodes))
            if processes.first:
                print(as_table([Fit(**one) for one in found["fits"]]))
                print("\n".join(found["not_fitted"]), file=sys.stderr)
                if options.json is not None:
                    options.json.write_text(json.dumps(found, indent=1) + "\n")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
