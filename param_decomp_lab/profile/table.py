"""A profile as a table for the terminal, and as JSON."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from param_decomp_lab.profile.scopes import PHASES, UNSCOPED, Part, Times

SMALLEST = 0.005
"""Share of the whole below which the rows within a phase are summed up in one."""


@dataclass(frozen=True)
class Profile:
    """What `pd profile` found. Seconds are per step; ``untraced_s`` None where no steps were timed without a trace."""

    steps: int
    first_step: int
    tokens_per_step: int
    traced_s: float
    untraced_s: float | None
    times: Times

    @property
    def total_ns(self) -> int:
        """In operations that are known, summed over everything that ran."""
        return sum(self.times.by_part.values())

    def share(self, ns: float) -> float:
        return ns / max(1, self.total_ns)

    def ms(self, ns: float) -> float:
        """Per step and device."""
        return ns / 1e6 / self.steps / self.times.devices

    @property
    def busy(self) -> float:
        """Share of the traced time in which a device was at work."""
        return self.times.busy_ns / 1e9 / (self.traced_s * self.steps)

    @property
    def step_s(self) -> float:
        """The better of the two: tracing costs time."""
        return self.traced_s if self.untraced_s is None else self.untraced_s

    def phases(self) -> list[tuple[str, int]]:
        """Nanoseconds by phase, in the order of the step."""
        found: Counter[str] = Counter()
        for part, ns in self.times.by_part.items():
            found[part.phase] += ns
        return [(phase, found[phase]) for phase in (*PHASES, UNSCOPED) if found[phase]]

    def within(self, phase: str) -> list[tuple[str, int]]:
        """Rows of a phase, longest first, small ones together; empty where there is only one."""
        parts = {part: ns for part, ns in self.times.by_part.items() if part.phase == phase}
        shown = {part: ns for part, ns in parts.items() if self.share(ns) >= SMALLEST}
        rows = sorted(((label(part), ns) for part, ns in shown.items()), key=lambda row: -row[1])
        rest = sum(parts.values()) - sum(shown.values())
        if len(rows) < 2:
            return []
        return [*rows, ("others, each below 0.5 %", rest)] if rest else rows

    def as_json(self) -> dict[str, Any]:
        return {
            "steps": self.steps,
            "first_step": self.first_step,
            "step_s": self.step_s,
            "step_s_traced": self.traced_s,
            "step_s_untraced": self.untraced_s,
            "tokens_per_s": self.tokens_per_step / self.step_s,
            "busy": self.busy,
            "devices": self.times.devices,
            "unknown_ms": self.ms(self.times.unknown_ns),
            "scopes": [self._row(part, ns) for part, ns in Counter(self.times.by_part).most_common()],
        }

    def kernels(self, most: int) -> list[dict[str, Any]]:
        """The longest ones, of each part of the step."""
        found = Counter(self.times.by_kernel).most_common(most)
        return [{"kernel": name, **self._row(part, ns)} for (name, part), ns in found]

    def _row(self, part: Part, ns: int) -> dict[str, Any]:
        words = {"phase": part.phase, "way": part.way, "inner": list(part.inner)}
        return {**words, "ms_per_step": self.ms(ns), "share": self.share(ns)}


def label(part: Part) -> str:
    """``backward, up_proj · draws``"""
    words = (part.way, " · ".join(part.inner) or "otherwise")
    return ", ".join(word for word in words if word)


def times_table(profile: Profile) -> Table:
    """Share and milliseconds per step by named scope."""
    table = Table(box=None, pad_edge=False, title_justify="left")
    table.add_column("scope of the step")
    table.add_column("share", justify="right")
    table.add_column("ms per step", justify="right")
    for phase, ns in profile.phases():
        table.add_row(phase, f"{profile.share(ns):.1%}", f"{profile.ms(ns):,.2f}", style="bold")
        for text, row_ns in profile.within(phase):
            table.add_row(f"  {text}", f"{profile.share(row_ns):.1%}", f"{profile.ms(row_ns):,.2f}", style="dim")
    table.add_row("all operations", f"{profile.share(profile.total_ns):.1%}", f"{profile.ms(profile.total_ns):,.2f}")
    return table
