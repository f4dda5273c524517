"""Sends the rows of a training run to `metrics.jsonl`, to wandb, and to the watch for a collapse."""

from pathlib import Path
from types import TracebackType
from typing import Any

from rich.text import Text

from param_decomp_lab.runs.metrics_file import METRICS_FILE
from param_decomp_lab.tracking.collapse import CollapseWatch
from param_decomp_lab.tracking.sinks import MetricsFile
from param_decomp_lab.tracking.wandb_sink import Wandb
from param_decomp_lab.training.job import Preempted, TrainingJob
from param_decomp_lab.ui.warnings import print_warnings


class Sinks:
    """The sinks of a job from step ``first`` on, open until the end of a `with` block. Only process 0 has them, except
    for the watch, which warns in all processes.
    """

    def __init__(self, job: TrainingJob, first: int) -> None:
        job.check_folder()
        self._job, every = job, job.config.method.cadence.train_log_every
        self.collapse = CollapseWatch(job.config.method.pd.loss_metrics, job.spec.steps, every, self._warn)
        self._metrics = self._wandb = None
        if job.processes.first:
            self._metrics = MetricsFile(job.folder, first, job.console, self.collapse.row)
            expected = (first - 1) // every * every
            if first > 0 and self._metrics.last < expected:
                lost = f"{METRICS_FILE} lacks the rows of steps {self._metrics.last + 1} to {expected}, written before"
                again = f"to get them back, rename {job.checkpoints.path(first)} and resume from an earlier checkpoint"
                job.console.print(Text(f"{lost}; {again}", "yellow"), highlight=False, soft_wrap=True)
            self._wandb = Wandb(job.config, job.folder, job.console)

    def write(self, row: dict[str, Any], figures: dict[str, Path]) -> None:
        """Writes a finished row. Its ``figures`` are already in the run folder, where wandb finds them."""
        self._job.check_folder()
        if self._metrics is not None:
            self._metrics.write(row)
        self.check()
        self.collapse.row(row)

    def check(self) -> None:
        """Reports once if the process that sends to wandb has ended."""
        if self._wandb is not None:
            self._wandb.check()

    def settle(self) -> None:
        """Returns when every row is on the disk, since resuming from a checkpoint relies on the rows before it."""
        if self._metrics is not None:
            self._metrics.settle()

    def _warn(self, what: str) -> None:
        print_warnings([what], self._job.console)

    def __enter__(self) -> "Sinks":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._metrics is not None:
            self._metrics.close()
        if self._wandb is not None:
            preempted = kind is not None and issubclass(kind, Preempted)
            self._wandb.close("finished" if kind is None else "preempted" if preempted else "failed")
        self._job.checkpoints.close()
