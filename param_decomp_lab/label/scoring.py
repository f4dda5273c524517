"""Computes scores of components, and overall, from a judge's answers."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from param_decomp_lab.harvest.files.scores import Score
from param_decomp_lab.label.judging import Answer, Truth


@dataclass
class Tally:
    """Right answers and all answers for one component, by class: whether yes is right. Intruders are one class."""

    right: dict[bool, int] = field(default_factory=dict)
    judged: dict[bool, int] = field(default_factory=dict)
    unanswered: int = 0

    @property
    def asked(self) -> int:
        return sum(self.judged.values()) + self.unanswered

    def add(self, truth: Truth, answer: Answer | None) -> None:
        """Adds an answer; None if there is no usable one."""
        if answer is None:
            self.unanswered += len(truth) if isinstance(truth, tuple) else 1
        elif isinstance(truth, tuple):
            assert isinstance(answer, tuple)
            for wanted, given in zip(truth, answer, strict=True):
                self._count(wanted, wanted == given)
        else:
            self._count(True, truth == answer)

    def _count(self, kind: bool, right: bool) -> None:
        self.judged[kind] = self.judged.get(kind, 0) + 1
        self.right[kind] = self.right.get(kind, 0) + right

    def score(self, classes: int) -> tuple[float | None, float | None]:
        """Returns the balanced accuracy (the share of right answers, averaged over classes) and its standard error;
        None unless every class has answers.
        """
        if len(self.judged) < classes:
            return None, None
        pairs = [(self.right[kind], n) for kind, n in self.judged.items()]
        # If a few answers are all right, the plain estimate of the error would be 0.
        smoothed = [((k + 1) / (n + 2), n) for k, n in pairs]
        variance = sum(p * (1 - p) / n for p, n in smoothed) / len(pairs) ** 2
        return sum(k / n for k, n in pairs) / len(pairs), math.sqrt(variance)


@dataclass(frozen=True)
class Overall:
    """A kind of score over all components. ``mean``: of their scores; None without scores. ``standard_error``: from
    their spread; for one component, its own.
    """

    components: int
    mean: float | None
    standard_error: float | None
    asked: int
    unanswered: int


def overall(scores: Iterable[Score]) -> Overall:
    every: Sequence[Score] = list(scores)
    values = [score.score for score in every if score.score is not None]
    errors = [score.standard_error for score in every if score.standard_error is not None]
    error = float(np.std(values, ddof=1) / math.sqrt(len(values))) if len(values) > 1 else next(iter(errors), None)
    return Overall(
        len(values),
        float(np.mean(values)) if values else None,
        error,
        sum(score.asked for score in every),
        sum(score.unanswered for score in every),
    )
