"""The time of a step on a given card, from what it computes and moves, and the resource that limits it.

A card has two sets of rates. Those of the vendor's data sheet are for products of dense matrices (without sparsity) at
boost clock; no program reaches them. Those that a card *reaches* are an H200's, measured on 2026-11-26
(docs/measurements/gpu.md): bf16 with a product of two large matrices, the memory with a copy, and fp32 by solving for
it in three measured steps, which agree to 1 %. TF32 is taken as half the rate of bf16. Other cards are assumed to reach
the same shares of their data sheets; the column ``reached`` says which is which. Links have the data sheet's rate in
both sets, NVLink in one direction. Each GPU is assumed to have its own network card between nodes: 400 Gb/s (NDR) for
B200, H200 and H100, 200 Gb/s for the others.

A step's time is the sum of the times of its parts, with one exception: a matrix product reads and writes while it
multiplies, so all products together take as long as their arithmetic or their memory traffic, whichever is longer.

A collective operation takes its latency and its bytes at the link's rate, so small messages are slow. Hops are those of
NCCL's own cost model for a ring under its `Simple` protocol (3.4 µs over NVLink, 14 µs over the network; NCCL 2.2x,
src/graph/tuning.cc). The start is chosen so that 8 GPUs of a node match what others measured on B200s under NCCL: 23
GB/s for 1 MB and 580 GB/s for 64 MB, which is 40 µs on top of the link's 900 GB/s. NCCL has faster protocols for
messages of a few KB, for which this is an upper guess. `experiments/gpu_day` measures all of it on several cards; this
has not been done yet.
"""

import csv
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

Precision = Literal["bf16", "tf32", "fp32"]
"""The precision in which matrices are multiplied: ``tf32`` for float32 arrays at JAX's default precision, ``fp32`` at
the highest. ``bf16`` includes float16 and narrower dtypes, ``fp32`` includes float64."""

Bound = Literal["arithmetic", "memory", "node links", "network"]


@dataclass(frozen=True)
class Rates:
    """The rates of one GPU. ``…_flops``: FLOP/s of matrix products. ``memory``: bytes/s. ``node_link``: bytes/s to the
    other GPUs of its node, in one direction (NVLink, or the PCIe bus without NVLink). ``network``: bytes/s to other
    nodes, in one direction. ``source``: where the rates come from, in words."""

    bf16_flops: float
    tf32_flops: float
    fp32_flops: float
    memory: float
    node_link: float
    network: float
    source: str = "data sheet"

    def flops(self, precision: Precision) -> float:
        """Returns FLOP/s of matrix products."""
        return {"bf16": self.bf16_flops, "tf32": self.tf32_flops, "fp32": self.fp32_flops}[precision]


@dataclass(frozen=True)
class Work:
    """What one GPU does in a step. ``flops``: those of its matrix products, by precision. In bytes: ``memory``: read
    and written; ``products``: the part of ``memory`` for matrix products; ``within``: sent to GPUs of its node;
    ``across``: sent to other nodes (see `traffic.py`). ``latency``: the seconds that its collective operations take in
    addition to their bytes."""

    flops: Mapping[Precision, float | int]
    memory: float | int
    within: float | int
    across: float | int
    latency: float = 0.0
    products: float | int = 0


@dataclass(frozen=True)
class Latency:
    """The seconds that a collective operation takes in addition to its bytes. ``start``: once per operation.
    ``node_hop``, ``network_hop``: for each device that a message passes on its way round the ring, within a node and
    between nodes."""

    start: float
    node_hop: float
    network_hop: float

    def of(self, count: int, node_hops: int, network_hops: int) -> float:
        """Returns the seconds of ``count`` operations with these total numbers of hops."""
        return count * self.start + node_hops * self.node_hop + network_hops * self.network_hop


@dataclass(frozen=True)
class Roofline:
    """The seconds that each resource is busy. ``multiplying``: by the precision of the products. ``memory``: with
    everything that is read and written. ``products``: the part of ``memory`` for matrix products. ``latency``: that of
    all collectives together."""

    multiplying: Mapping[Precision, float]
    memory: float
    node_links: float
    network: float
    latency: float = 0.0
    products: float = 0.0

    @property
    def arithmetic(self) -> float:
        """The seconds of all matrix products."""
        return sum(self.multiplying.values(), 0.0)

    @property
    def waiting_for_memory(self) -> float:
        """The seconds by which the memory traffic of all matrix products exceeds their arithmetic, if at all."""
        return max(0.0, self.products - self.arithmetic)

    @property
    def terms(self) -> Mapping[Bound, float]:
        """The seconds that each resource adds to `one_by_one`. Matrix products read and write while they multiply."""
        return {
            "arithmetic": self.arithmetic,
            "memory": self.memory - self.products + self.waiting_for_memory,
            "node links": self.node_links,
            "network": self.network,
        }

    @property
    def one_by_one(self) -> float:
        """The seconds if nothing else overlaps: what a step is predicted to take."""
        return sum(self.terms.values()) + self.latency

    @property
    def least(self) -> float:
        """The seconds if all resources are busy at the same time."""
        return max(self._busy.values())

    @property
    def bound_by(self) -> Bound:
        """The resource that is busy longest."""
        return max(self._busy, key=lambda name: self._busy[name])

    @property
    def _busy(self) -> Mapping[Bound, float]:
        return {**self.terms, "memory": self.memory}


def roofline(work: Work, rates: Rates) -> Roofline:
    """Returns the times of one GPU's work."""
    return Roofline(
        multiplying={precision: flops / rates.flops(precision) for precision, flops in work.flops.items()},
        memory=work.memory / rates.memory,
        node_links=work.within / rates.node_link,
        network=work.across / rates.network,
        latency=work.latency,
        products=work.products / rates.memory,
    )


def card_rates(table: str) -> Mapping[str, Rates]:
    """Returns the data sheet's rates of every card in a table like ``gpus/cards.csv``, by name."""
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


def reached_rates(table: str) -> Mapping[str, Rates]:
    """Returns the rates that every card in such a table reaches in products and in its memory, by name."""
    promised = card_rates(table)
    return {
        card["name"]: replace(
            promised[card["name"]],
            bf16_flops=float(card["reached_bf16_flops"]),
            tf32_flops=float(card["reached_tf32_flops"]),
            fp32_flops=float(card["reached_fp32_flops"]),
            memory=float(card["reached_memory_Bps"]),
            source=card["reached"],
        )
        for card in csv.DictReader(table.splitlines())
    }


def latencies(table: str) -> Mapping[str, Latency]:
    """Returns the latencies in a table like ``gpus/collectives.csv``, by kind of operation."""
    return {
        row["kind"]: Latency(float(row["start_s"]), float(row["node_hop_s"]), float(row["network_hop_s"]))
        for row in csv.DictReader(table.splitlines())
    }
