"""Runs texts through a run, in a process of its own: JAX takes seconds to start and more memory than all pages do."""

import multiprocessing
import os
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float32, Int32

from param_decomp_lab.errors import UserError

KEPT = 32
"""Answers that are kept, since every click on a token asks for the text again."""


@dataclass(frozen=True)
class SiteFirings:
    """What fires at a site, in order of positions."""

    position: Int32[np.ndarray, " n"]
    component: Int32[np.ndarray, " n"]
    importance: Float32[np.ndarray, " n"]
    activation: Float32[np.ndarray, " n"]


@dataclass(frozen=True)
class Answer:
    """``tokens``: the ids of the text; of a toy's input, which is one position, the active features. ``wrong``: why
    there is no answer, "" if there is one."""

    tokens: list[int] = field(default_factory=list)
    positions: int = 0
    sites: dict[str, SiteFirings] = field(default_factory=dict)
    wrong: str = ""


class TextWorker:
    """Asks a process that has opened the run; it starts with the first question, and again if it has ended."""

    def __init__(self, run: Path, step: int, sites: tuple[str, ...], threshold: float) -> None:
        self._about = (run, step, sites, threshold)
        self._answers: OrderedDict[str, Future[Answer]] = OrderedDict()
        self._one_at_a_time = ThreadPoolExecutor(1)
        self._process: Any = None
        self._pipe: Connection | None = None

    def ask(self, text: str, patience_s: float) -> Answer | None:
        """The answer, or None if it takes longer than ``patience_s``: then it is being worked on, and asking again
        gets it."""
        if text not in self._answers:
            self._answers[text] = self._one_at_a_time.submit(self._question, text)
            while len(self._answers) > KEPT:
                self._answers.popitem(last=False)
        try:
            return self._answers[text].result(patience_s)
        except TimeoutError:
            return None
        except (EOFError, OSError) as error:
            self._answers.pop(text, None)
            return Answer(wrong=f"the process that runs texts has ended ({error or 'without a word'}); ask again")

    def _question(self, text: str) -> Answer:
        if self._process is None or not self._process.is_alive():
            context = multiprocessing.get_context("spawn")
            self._pipe, theirs = context.Pipe()
            self._process = context.Process(target=serve, args=(theirs, *self._about), daemon=True)
            self._process.start()
            theirs.close()
        assert self._pipe is not None
        self._pipe.send(text)
        answer = self._pipe.recv()
        assert isinstance(answer, Answer)
        return answer

    def close(self) -> None:
        """Ends the process."""
        self._one_at_a_time.shutdown(wait=False, cancel_futures=True)
        if self._process is not None:
            self._process.kill()
            self._process.join()


def serve(pipe: Connection, run: Path, step: int, sites: tuple[str, ...], threshold: float) -> None:
    """Answers texts until the other end is closed."""
    # A run that trains on these devices needs their memory more.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    opened: Any = None
    while True:
        try:
            text = pipe.recv()
        except EOFError:
            return
        try:
            if opened is None:
                from param_decomp_lab.opening import load_run

                opened = load_run(run, step, devices=1)
            pipe.send(_answer(opened, text, sites, threshold))
        except UserError as error:
            pipe.send(Answer(wrong=str(error)))
        except Exception as error:  # a bug, or a machine without memory: said on the page, and asked again
            pipe.send(Answer(wrong=f"{type(error).__name__}: {error}"[:2000]))


def _answer(run: Any, text: str, sites: tuple[str, ...], threshold: float) -> Answer:
    from param_decomp_lab.opening.prompt import read_prompt

    inputs, tokens = read_prompt(run, text)
    importances, activations = run.causal_importances(inputs, sites), run.activations(inputs, sites)
    found = {}
    for name in sites:
        importance = np.asarray(importances[name]).reshape(-1, run.sites[name].C)
        position, component = np.nonzero(importance > threshold)
        activation = np.asarray(activations[name]).reshape(importance.shape)[position, component]
        values = importance[position, component].astype(np.float32), activation.astype(np.float32)
        found[name] = SiteFirings(position.astype(np.int32), component.astype(np.int32), *values)
    return Answer(tokens, len(importance), found)
