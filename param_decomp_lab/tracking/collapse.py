"""Detects signs of a late collapse of the importances in the gradient norms of the CI function.

With p below 1 and a tiny eps, the gradients of a few importances near 0 are orders of magnitude larger than all others.
At first, isolated steps have large gradient norms, and they become more frequent (`GradientTail`;
docs/measurements/collapse.md). In the published run, the norms of all steps were large in the end (`GradientGrowth`).
"""

import statistics
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

import numpy as np

from param_decomp_lab.config.loss_schema import ImportanceMinimalityLoss

CI_GRADIENTS = "train/grad_norms/summary/ci_fns"
LIMIT = 10.0
"""Growth of the gradient norm that gives a warning. It grew 350-fold in the published run before that collapsed, and at
most 8-fold in healthy runs here (docs/measurements/collapse.md).
"""
WINDOW = 0.02
SETTLED = 0.05
"""Fractions of training: the length of a window whose median is taken, and the start before which nothing is compared.
"""
LEAST_ROWS = 10
"""The smallest number of rows in a window."""

ADVICE = (
    "Runs with p below 1 have lost their importances after this: keep a checkpoint from before; a smaller learning "
    "rate or penalty: smooth_l0 avoids it"
)


@dataclass(frozen=True)
class Growth:
    """Medians of the gradient norm: ``now``, at ``step``, and the ``lowest`` of an earlier window, at ``since``."""

    step: int
    now: float
    since: int
    lowest: float

    @property
    def factor(self) -> float:
        return self.now / self.lowest

    @property
    def is_large(self) -> bool:
        return self.factor > LIMIT

    def __str__(self) -> str:
        return (
            f"at step {self.step} the CI function's gradients are {self.factor:.0f} times what they were at step "
            f"{self.since} ({self.lowest:.2g}, now {self.now:.2g}, medians over {100 * WINDOW:.0f} % of the steps). "
            + ADVICE
        )


class GradientGrowth:
    """Watches the gradient norm of the CI function as rows are logged. ``n_rows``: rows of a complete run.

    Medians over windows of rows are compared, so that a single spike does not count as growth.
    """

    def __init__(self, n_rows: int) -> None:
        self._unsettled = round(SETTLED * n_rows)
        self._size = max(LEAST_ROWS, round(WINDOW * n_rows))
        self._window: deque[float] = deque(maxlen=self._size)
        self._medians: deque[tuple[float, int]] = deque(maxlen=self._size)
        """Medians of the windows that share rows with the current one."""
        self._lowest: tuple[float, int] | None = None

    def add(self, step: int, norm: float) -> Growth | None:
        """Returns the growth of the window that ends with this row; None while there is no earlier window to compare
        with.
        """
        if self._unsettled > 0:
            self._unsettled -= 1
            return None
        self._window.append(norm)
        if len(self._window) < self._size:
            return None
        median = statistics.median(self._window)
        if len(self._medians) == self._size:
            self._lowest = min(self._medians[0], self._lowest or self._medians[0])
        self._medians.append((median, step))
        if self._lowest is None or self._lowest[0] <= 0:
            return None
        return Growth(step, median, self._lowest[1], self._lowest[0])


def growths(norms: Sequence[tuple[int, float]]) -> Iterator[Growth]:
    """Applies `GradientGrowth` to all rows of a finished run, given as steps and norms."""
    watch = GradientGrowth(len(norms))
    return filter(None, (watch.add(step, norm) for step, norm in norms))


TAIL_LIMIT = 4.2
"""Limit of `Tail` that gives a warning. In the runs of docs/measurements/collapse.md that collapse, the tail exceeds it
at least 8,000 of 80,000 steps before. In the runs that do not collapse, it never exceeds it.
"""
LEAST_STEPS = 1000
"""The smallest number of steps in a window whose 95th percentile is taken."""
N_WINDOWS = 3


@dataclass(frozen=True)
class Tail:
    """The ratio of the 95th percentile of the gradient norms to their median, in the steps from ``first`` to ``last``:
    the median over three windows.
    """

    first: int
    last: int
    ratio: float

    @property
    def is_large(self) -> bool:
        return self.ratio > TAIL_LIMIT

    def __str__(self) -> str:
        return (
            f"in steps {self.first} to {self.last} one in twenty of the CI function's gradients was over "
            f"{self.ratio:.1f} times their median (at most about 3 in a run that goes well). {ADVICE}"
        )


class GradientTail:
    """Watches the gradient norm of the CI function in each of ``total`` steps, window by window."""

    def __init__(self, total: int) -> None:
        self._size = max(LEAST_STEPS, round(WINDOW * total))
        self._norms: list[float] = []
        self._ratios: deque[float] = deque(maxlen=N_WINDOWS)

    def add(self, step: int, norm: float) -> Tail | None:
        """Returns a new `Tail` at the end of every window from the third on; None at other steps."""
        self._norms.append(norm)
        if len(self._norms) < self._size:
            return None
        median, percentile = np.quantile(self._norms, [0.5, 0.95]).tolist()
        self._norms.clear()
        self._ratios.append(percentile / median if median > 0 else 0.0)
        if len(self._ratios) < N_WINDOWS:
            return None
        return Tail(step - N_WINDOWS * self._size + 1, step, statistics.median(self._ratios))


def may_collapse(losses: Iterable[object]) -> bool:
    """Whether these loss terms include an L_p importance minimality whose p is ever below 1."""
    return any(isinstance(loss, ImportanceMinimalityLoss) and loss.least_p < 1 for loss in losses)


class CollapseWatch:
    """Passes each of the two signs to ``warn``, once, and only if the losses can lead to a collapse. Used by `pd
    train`.

    ``losses``: the terms of the configuration.
    """

    def __init__(self, losses: Iterable[object], total: int, log_every: int, warn: Callable[[str], None]) -> None:
        self._is_on, self._warn = may_collapse(losses), warn
        self._growth, self._tail = GradientGrowth(ceil(total / log_every)), GradientTail(total)
        self._known: set[type] = set()

    def row(self, row: Mapping[str, Any]) -> None:
        """Takes a row of `metrics.jsonl`."""
        if self._is_on and CI_GRADIENTS in row:
            self._look_at(self._growth.add(row["step"], row[CI_GRADIENTS]))

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Takes the metrics of a step, whether they are logged or not."""
        if self._is_on:
            self._look_at(self._tail.add(step, metrics[CI_GRADIENTS.removeprefix("train/")]))

    def _look_at(self, sign: Growth | Tail | None) -> None:
        if sign is not None and sign.is_large and type(sign) not in self._known:
            self._known.add(type(sign))
            self._warn(str(sign))
