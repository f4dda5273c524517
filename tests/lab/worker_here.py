"""The pages of `pd browse` that ask the run itself, without a process of the run."""

import pytest

from param_decomp_lab.browse.text_worker import AnyAnswer, Question, TextWorker, _answer
from param_decomp_lab.opening import Run

LONG_S = 120.0


def answer_here(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a page asks is answered here, by ``run``, and a page waits for it however slow the machine is: it never says
    that it will ask again."""
    wait = TextWorker.wait

    def patient(worker: TextWorker, question: Question, patience_s: float) -> AnyAnswer | None:
        return wait(worker, question, LONG_S)

    monkeypatch.setattr(TextWorker, "_question", lambda worker, question: _answer(run, question, *worker._about[2:]))
    monkeypatch.setattr(TextWorker, "wait", patient)
