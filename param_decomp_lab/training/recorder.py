"""Turns metrics on the devices into rows: fetches them late, checks for non-finite values, adds timings."""

import resource
import time
from collections.abc import Callable
from math import isfinite
from pathlib import Path
from typing import Any

import jax
import numpy as np

from param_decomp_jax.method.multi_step import MetricRows
from param_decomp_jax.method.state import Decomposition
from param_decomp_lab.errors import NonFiniteLoss


class Recorder:
    """Holds the metrics of dispatched steps on the device and fetches them late, in one go (one host sync per log).

    Every step's losses are checked (N3); those of log steps are written: every ``log_every`` steps and the last one.
    ``first``: the step the run starts at. ``write``: called with each finished row and its figures. ``watch``: called
    with every step's number and metrics, before its row is written.
    """

    def __init__(
        self,
        decomposition: Decomposition,
        log_every: int,
        first: int,
        tokens_per_step: int,
        n_devices: int,
        write: Callable[[dict[str, Any], dict[str, Path]], None],
        watch: Callable[[int, dict[str, float]], None],
    ) -> None:
        self._total, self._log_every = decomposition.steps, log_every
        self._tokens_per_step, self._n_devices, self._hand_over = tokens_per_step, n_devices, write
        self._watch = watch
        self._pending: list[tuple[int, int, MetricRows]] = []
        self._row: dict[str, Any] = {}
        self._figures: dict[str, Path] = {}
        self._clock, self._counted = time.monotonic(), first
        persistent = decomposition.persistent.items()
        self._first_step = {name: attack.first_step(decomposition.steps) for name, (_, attack) in persistent}

    def add(self, first: int, n: int, rows: MetricRows) -> None:
        """Adds the metrics of ``n`` dispatched steps. A log step is written after the next dispatch."""
        if any(self._logged(step) for start, count, _ in self._pending for step in range(start, start + count)):
            self.flush()
        self._pending.append((first, n, rows))

    def evaluated(self, step: int, row: dict[str, float], figures: dict[str, Path]) -> None:
        """Adds the results of an evaluation, which share the row of the training step with the same number."""
        self._row, self._figures = {"step": step, **row}, figures
        if not self._logged(step):
            self._write()
        # Time spent on evaluation is not training time.
        self._clock, self._counted = time.monotonic(), step

    def _logged(self, step: int) -> bool:
        """Whether the metrics of this training step are written: every ``log_every`` steps, and the last one."""
        return step < self._total and (step % self._log_every == 0 or step == self._total - 1)

    def flush(self) -> None:
        if not self._pending:
            return
        steps = [step for first, n, _ in self._pending for step in range(first, first + n)]
        names = self._pending[0][2].names
        fetched = jax.device_get([rows.values for _, _, rows in self._pending])
        rows = np.concatenate([values[:n] for (_, n, _), values in zip(self._pending, fetched, strict=True)])
        self._pending.clear()
        performance = self._performance(steps[-1])
        for step, values in zip(steps, rows.tolist(), strict=True):
            metrics = dict(zip(names, values, strict=True))
            _refuse_non_finite(step, metrics)
            self._watch(step, metrics)
            if self._logged(step):
                self._row |= {"step": step, **self._training_metrics(step, metrics), **performance}
                self._write()

    def _training_metrics(self, step: int, metrics: dict[str, float]) -> dict[str, float]:
        """Training metrics without the terms of adversaries that have not started yet (A6)."""
        off = {f"loss/{name}" for name, first in self._first_step.items() if step < first}
        return {f"train/{name}": x for name, x in metrics.items() if "/".join(name.split("/")[:2]) not in off}

    def _performance(self, newest: int) -> dict[str, float]:
        now, done = time.monotonic(), newest + 1
        seconds = (now - self._clock) / max(1, done - self._counted)
        self._clock, self._counted = now, done
        per_second = self._tokens_per_step / max(seconds, 1e-9)
        return {
            "train/perf/step_time_s": seconds,
            "train/perf/tok_per_s": per_second,
            "train/perf/tok_per_s_per_gpu": per_second / self._n_devices,
            "train/mem/peak_gb_per_rank": _peak_bytes() / 1e9,
        }

    def _write(self) -> None:
        self._hand_over(self._row, self._figures)
        self._row, self._figures = {}, {}


def _refuse_non_finite(step: int, metrics: dict[str, float]) -> None:
    bad = [name for name, value in metrics.items() if not isfinite(value)]
    if bad:
        # The total is the sum of the terms, so it is named only if no term explains it.
        causes = [name for name in bad if name.startswith("loss/") and name != "loss/total"] or bad
        terms = ", ".join(f"{name.removeprefix('loss/')} = {metrics[name]}" for name in causes)
        raise NonFiniteLoss(f"not finite at step {step}: {terms}")


def _peak_bytes() -> float:
    """Returns the peak device memory if the device reports it, else (CPU) the process's peak resident size."""
    statistics = jax.local_devices()[0].memory_stats()
    if statistics and "peak_bytes_in_use" in statistics:
        return float(statistics["peak_bytes_in_use"])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0
