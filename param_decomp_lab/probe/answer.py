"""Compiles the parts of a run in sequence and decides whether all of them fit."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any, Literal

from param_decomp_aot.buffers import Buffer, find_peak, ledger
from param_decomp_aot.compile import limit_bound
from param_decomp_aot.roofline import Latency, Precision, Roofline, Work, latencies, roofline
from param_decomp_aot.scopes import from_package
from param_decomp_aot.traffic import Sum, traffic
from param_decomp_lab.probe.cache import cached
from param_decomp_lab.probe.cards import LATENCIES, Card, MemoryPool
from param_decomp_lab.probe.measure import MeasuredProgram, Where, measure
from param_decomp_lab.probe.subject import STEP, Subject

GIB = 2**30
Verdict = Literal["fits", "does_not_fit"]
OnProgress = Callable[[str], None]

N_BUFFERS = 400
"""Number of buffers at the peak that are kept; the rest are summed."""


@dataclass(frozen=True)
class Step:
    """Properties of the training step besides its size.

    ``buffers``: the buffers alive at its peak, largest first; ``smaller``: bytes in further, smaller buffers;
    ``unused``: bytes between buffers. ``flops``: FLOPs of the matrix products of all devices, by precision;
    ``unknown``: parts that were counted once, because it is unknown how often they run. ``hbm``, ``within``,
    ``across``: bytes that one device moves in its memory, sends within its node, and sends to other nodes;
    ``products``: the part of ``hbm`` due to matrix products. ``collectives``: as executed, by kind.
    """

    buffers: tuple[Buffer, ...]
    smaller: int
    unused: int
    explained: float
    planned: int
    flops: Mapping[Precision, int]
    hbm: int
    products: int
    within: int
    across: int
    collectives: Mapping[str, Sum]
    unknown: tuple[str, ...]

    @property
    def matmul_flops(self) -> int:
        """FLOPs of a step's matrix products on all devices, in all precisions."""
        return sum(self.flops.values())


@dataclass(frozen=True)
class ProbeAnswer:
    """The results of a probe. ``parts``: the compiled programs, by name, in the order of a run, for the card as it is.
    ``unlimited``: the step compiled with unlimited memory; None if it was not requested. All bytes are those of one
    device.
    """

    subject: Subject
    card: Card
    per_node: int
    pool: MemoryPool
    parts: Mapping[str, MeasuredProgram]
    unlimited: MeasuredProgram | None
    step: Step

    @property
    def largest(self) -> str:
        """The part of the run that needs most memory."""
        return max(self.parts, key=lambda name: self.parts[name].peak)

    @property
    def peak(self) -> int:
        """Bytes that the run needs."""
        return self.parts[self.largest].peak

    @property
    def limit_bound(self) -> bool | None:
        """Whether XLA reduced the step's size because of the memory limit; None if unknown."""
        return None if self.unlimited is None else limit_bound(self.parts[STEP].peak, self.unlimited.peak)

    @property
    def verdict(self) -> Verdict:
        return "fits" if self.peak <= self.pool.usable else "does_not_fit"

    @property
    def roofline(self) -> Roofline:
        """Predicted times of the step's parts, and of the whole step."""
        step, n = self.step, self.subject.mesh.n_devices
        each = {precision: flops / n for precision, flops in step.flops.items()}
        waiting = sum(_latency(kind, total) for kind, total in step.collectives.items())
        return roofline(Work(each, step.hbm, step.within, step.across, waiting, step.products), self.card.rates)

    def collective_seconds(self, kind: str, total: Sum) -> float:
        """Returns how long the collectives of a kind take in sequence."""
        work = Work({}, 0, total.within, total.across, _latency(kind, total))
        return roofline(work, self.card.rates).one_by_one

    def as_json(self) -> dict[str, Any]:
        """Returns the answer as JSON, starting with the keys that scripts rely on. Sizes are in GiB for one device;
        ``compile_s`` is that of the step; ``step_s`` is its predicted time.
        """
        step, unlimited = self.parts[STEP], self.unlimited
        times = self.roofline
        return {
            "verdict": self.verdict,
            "peak_gib": self.peak / GIB,
            "peak_gib_unlimited": None if unlimited is None else max(unlimited.peak, *self._others()) / GIB,
            "limit_bound": self.limit_bound,
            "capacity_gib": self.pool.capacity / GIB,
            "temp_gib": step.memory.temp / GIB,
            "arguments_gib": step.memory.arguments / GIB,
            "host_gib": step.memory.host / GIB,
            "compile_s": step.compile_s,
            "step_s": times.one_by_one,
            "matmul_flops": self.step.matmul_flops,
            "flops": dict(self.step.flops),
            "pool_gib": self.pool.usable / GIB,
            "gpu": self.card.name,
            "n_gpus": self.subject.mesh.n_devices,
            "run": self.subject.title,
            "notes": list(self.subject.notes),
            "tokens_per_step": self.subject.tokens,
            "largest_part": self.largest,
            "parts": {name: _part(measured) for name, measured in self.parts.items()},
            "arguments": {name: size / GIB for name, size in step.groups.items()},
            "buffers": [
                {"gib": b.n_bytes / GIB, "role": b.role, "shape": b.shape, "scope": b.scope, "source": b.source}
                for b in self.step.buffers[:40]
            ],
            "ledger_gib": self.step.planned / GIB,
            "bytes_moved": {
                "memory": self.step.hbm,
                "memory_by_products": self.step.products,
                "within_node": self.step.within,
                "between_nodes": self.step.across,
            },
            "collectives": {
                kind: {**asdict(total), "seconds": self.collective_seconds(kind, total)}
                for kind, total in self.step.collectives.items()
            },
            "roofline_s": {**times.terms, "latency": times.latency, "overlapping": times.least},
            "rates": self.card.rates.source,
            "counted_once": list(self.step.unknown),
        }

    def _others(self) -> list[int]:
        return [part.peak for name, part in self.parts.items() if name != STEP] or [0]


def _latency(kind: str, total: Sum) -> float:
    """Returns the latency in seconds; ``kind`` as in `Step.collectives`."""
    return _latencies()[kind.partition(",")[0]].of(total.count, total.node_hops, total.network_hops)


@cache
def _latencies() -> Mapping[str, Latency]:
    return latencies(LATENCIES.read_text())


def _part(measured: MeasuredProgram) -> dict[str, Any]:
    memory = measured.memory
    sizes = {
        "peak_gib": measured.peak,
        "temp_gib": memory.temp,
        "arguments_gib": memory.arguments,
        "output_gib": memory.output,
        "alias_gib": memory.alias,
        "elsewhere_gib": measured.elsewhere,
        "host_gib": memory.host,
    }
    return {
        **{name: size / GIB for name, size in sizes.items()},
        "lower_s": measured.lower_s,
        "compile_s": measured.compile_s,
    }


def compile_parts(
    subject: Subject, card: Card, where: Where, pool: MemoryPool, on_progress: OnProgress, quick: bool = False
) -> ProbeAnswer:
    """Compiles what is not in the cache. ``quick``: only the step, for the card as it is. ``on_progress``: receives
    what is being done.
    """
    on_progress(f"compiling the {STEP}")
    step = measure(subject, STEP, where, dump=True)
    on_progress("counting what the step does")
    found = read_step(subject, step, where)
    parts: dict[str, MeasuredProgram] = {}
    unlimited = None
    for name in subject.phases:
        if name == STEP:
            parts[name] = step
        elif not quick:
            on_progress(f"compiling: {name}")
            parts[name] = measure(subject, name, where)
    if not quick:
        on_progress(f"compiling the {STEP} for a card without limit")
        unlimited = measure(subject, STEP, where, limited=False)
    return ProbeAnswer(subject, card, where.per_node, pool, parts, unlimited, found)


def read_step(subject: Subject, step: MeasuredProgram, where: Where) -> Step:
    """Reads buffers and traffic from the dump of a measured step, and counts its FLOPs."""

    def answer() -> dict[str, Any]:
        kept = ledger(*step.dump)
        peak, moved, counted = find_peak(kept), traffic(step.dump[-1], where.per_node), subject.flops()
        return {
            "buffers": [{**vars(b), "source": from_package(b.source)} for b in peak.buffers[:N_BUFFERS]],
            "smaller": sum(b.n_bytes for b in peak.buffers[N_BUFFERS:] if b.role != "host"),
            "unused": peak.unused,
            "explained": peak.explained,
            "planned": kept.planned,
            "flops": dict(counted.by_precision),
            "hbm": moved.hbm,
            "products": moved.products,
            "within": moved.within,
            "across": moved.across,
            "collectives": {
                f"{kind}, {'between' if crosses else 'within'} nodes": asdict(total)
                for (kind, crosses), total in moved.by_kind().items()
            },
            "unknown": [*moved.unknown, *counted.unknown],
        }

    of = (str(subject.mesh), str(where.per_node), where.card, str(step.memory))
    question = "\n".join(("what the step does", subject.identity, *of))
    kept, _ = cached(where.cache, question, answer)
    return Step(
        **{
            **kept,
            "buffers": tuple(Buffer(**b) for b in kept["buffers"]),
            "collectives": {name: Sum(**total) for name, total in kept["collectives"].items()},
            "unknown": tuple(kept["unknown"]),
        }
    )
