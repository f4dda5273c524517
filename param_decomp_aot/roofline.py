"""Roofline estimate of a step on a given card: its time at full rates, and the limiting resource.

The cards' rates are figures of the vendor's data sheets: products of dense matrices (without sparsity) at boost clock,
NVLink in one direction. Between nodes each GPU is taken to have a network card of its own, of 400 Gb/s (NDR) beside
B200, H200 and H100, of 200 Gb/s beside the others. No program reaches these rates.
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
    ``collectives``: operations that send, as often as they are run."""

    flops: Mapping[Precision, float | int]
    memory: float | int
    within: float | int
    across: float | int
    collectives: int = 0


COLLECTIVE_LATENCY = 40e-6
"""Seconds that come on top of each collective operation. Others measured, on B200s under NCCL, 1 MB going at 23 GB/s
and 64 MB at 580 GB/s, the link's own rate; it was not measured here yet."""


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
        latency=work.collectives * COLLECTIVE_LATENCY,
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
