"""Roofline estimate of a step on a given card: its time at full rates, and the limiting resource.

The cards' rates are figures of the vendor's data sheets: products of dense matrices (without sparsity) at boost clock,
NVLink in one direction. Between nodes each GPU is taken to have a network card of its own, of 400 Gb/s (NDR) beside
B200, H200 and H100, of 200 Gb/s beside the others. No program reaches these rates.

A collective operation takes its latency and its bytes at the link's rate, so small messages are slow. Hops are those of
NCCL's own cost model for a ring under its `Simple` protocol (3.4 µs over NVLink, 14 µs over the network; NCCL 2.2x,
src/graph/tuning.cc). The start is chosen so that 8 GPUs of a node come to what others measured on B200s under NCCL:
1 MB going at 23 GB/s, 64 MB at 580 GB/s, which is 40 µs on top of the link's 900 GB/s. For messages of a few KB, NCCL
has faster protocols: for those it is a guess from above. `experiments/gpu_day` measures all of it where there are
several cards; nobody has yet.
"""

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Precision = Literal["bf16", "tf32", "fp32"]
"""In which matrices are multiplied: ``tf32`` of float32 arrays at JAX's default precision, ``fp32`` at the highest."""

Bound = Literal["arithmetic", "memory", "node links", "network"]


@dataclass(frozen=True)
class Rates:
    """Of one GPU. ``…_flops``: FLOP/s of matrix products; ``memory``: bytes/s; ``node_link``: bytes/s to the other GPUs
    of its node, in one direction (NVLink, or the PCIe bus where there is none); ``network``: bytes/s to other nodes, in
    one direction."""

    bf16_flops: float
    tf32_flops: float
    fp32_flops: float
    memory: float
    node_link: float
    network: float

    def flops(self, precision: Precision) -> float:
        """FLOP/s of matrix products."""
        return {"bf16": self.bf16_flops, "tf32": self.tf32_flops, "fp32": self.fp32_flops}[precision]


@dataclass(frozen=True)
class Work:
    """What one GPU does in a step. ``flops``: of its matrix products, by precision. The rest in bytes: ``memory`` read
    and written, ``within`` sent to GPUs of its node, ``across`` sent to other nodes (see `traffic.py`).
    ``latency``: seconds that its collective operations take beside their bytes."""

    flops: Mapping[Precision, float | int]
    memory: float | int
    within: float | int
    across: float | int
    latency: float = 0.0


@dataclass(frozen=True)
class Latency:
    """Seconds that a collective operation takes beside its bytes. ``start``: once; ``node_hop`` and ``network_hop``:
    for each device that a message passes on its way round the ring, within a node and between nodes."""

    start: float
    node_hop: float
    network_hop: float

    def of(self, count: int, node_hops: int, network_hops: int) -> float:
        """Of ``count`` operations with so many hops altogether."""
        return count * self.start + node_hops * self.node_hop + network_hops * self.network_hop


@dataclass(frozen=True)
class Roofline:
    """Seconds that each resource is busy. ``latency``: of all collective operations together."""

    arithmetic: float
    memory: float
    node_links: float
    network: float
    latency: float = 0.0

    @property
    def terms(self) -> Mapping[Bound, float]:
        """By name."""
        return {
            "arithmetic": self.arithmetic,
            "memory": self.memory,
            "node links": self.node_links,
            "network": self.network,
        }

    @property
    def least(self) -> float:
        """Seconds if all resources are busy at the same time."""
        return max(self.terms.values())

    @property
    def one_by_one(self) -> float:
        """Seconds if nothing overlaps: a guess from above, for resources used at their full rates."""
        return sum(self.terms.values()) + self.latency

    @property
    def bound_by(self) -> Bound:
        """The resource that is busy longest."""
        return max(self.terms, key=lambda name: self.terms[name])


def roofline(work: Work, rates: Rates) -> Roofline:
    """The times of one GPU's work."""
    return Roofline(
        arithmetic=sum((flops / rates.flops(precision) for precision, flops in work.flops.items()), 0.0),
        memory=work.memory / rates.memory,
        node_links=work.within / rates.node_link,
        network=work.across / rates.network,
        latency=work.latency,
    )


def card_rates(table: str) -> Mapping[str, Rates]:
    """The rates of every card of a table like ``gpus/cards.csv``, by name."""
    return {
        card["name"]: Rates(
            bf16_flops=float(card["bf16_flops"]),
            tf32_flops=float(card["tf32_flops"]),
            fp32_flops=float(card["fp32_flops"]),
            memory=float(card["memory_bandwidth_Bps"]),
            node_link=float(card["node_link_Bps"]),
            network=float(card["network_Bps"]),
        )
        for card in csv.DictReader(table.splitlines())
    }


def latencies(table: str) -> Mapping[str, Latency]:
    """The latencies of a table like ``gpus/collectives.csv``, by kind of operation."""
    return {
        row["kind"]: Latency(float(row["start_s"]), float(row["node_hop_s"]), float(row["network_hop_s"]))
        for row in csv.DictReader(table.splitlines())
    }
