"""Answers what takes the run itself, in a process of its own: JAX takes seconds to start and more memory than all pages
do."""

import multiprocessing
import os
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from jaxtyping import Float32, Int32

from param_decomp_lab.errors import UserError
from param_decomp_lab.graph.graph import Graph

OUTPUTS, SAMPLES, CONTINUED = 10, 8, 8
"""Of an intervention: outputs shown, draws of the random reading, tokens of the continuation."""
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


@dataclass(frozen=True)
class GraphQuestion:
    """The attribution graph of a prompt. ``target``: the token or feature to follow, "" for the most likely.
    ``optimize``: with importances that are lowered for this prompt first."""

    prompt: str
    target: str = ""
    optimize: bool = False


@dataclass(frozen=True)
class InterventionQuestion:
    """A prompt with some components at a scale, or on alone, at their positions. ``goes_on``: how the text goes on,
    too, which takes a program for every token more."""

    prompt: str
    selection: tuple[str, ...]
    alone: bool
    scale: float
    goes_on: bool = False


@dataclass(frozen=True)
class GraphAnswer:
    """A graph, or why there is none."""

    graph: Graph | None = None
    wrong: str = ""


@dataclass(frozen=True)
class Outcome:
    """What an intervention does in one reading. ``kl``: at the last position; ``kl_mean``: over all. ``outputs``: the
    most likely ones, with their name and their probability without and with it (of a toy: their value)."""

    reading: str
    kl: float
    kl_mean: float
    outputs: list[tuple[str, float, float]]


@dataclass(frozen=True)
class InterventionAnswer:
    """``continuations``: the text that follows, without and with the intervention; empty if not asked for."""

    outcomes: list[Outcome] = field(default_factory=list)
    continuations: tuple[str, str] = ("", "")
    wrong: str = ""


@dataclass(frozen=True)
class NearestQuestion:
    """The ``most`` components of nearest direction, by U and by V."""

    site: str
    number: int
    most: int


@dataclass(frozen=True)
class NearestAnswer:
    """Site, number and cosine of components, by U and by V."""

    by_U: list[tuple[str, int, float]] = field(default_factory=list)
    by_V: list[tuple[str, int, float]] = field(default_factory=list)
    wrong: str = ""


Question = str | GraphQuestion | InterventionQuestion | NearestQuestion
"""A text asks what fires in it."""
AnyAnswer = Answer | GraphAnswer | InterventionAnswer | NearestAnswer
Kind = TypeVar("Kind", GraphAnswer, InterventionAnswer, NearestAnswer)


class TextWorker:
    """Asks a process that has opened the run; it starts with the first question, and again if it has ended."""

    def __init__(self, run: Path, step: int, sites: tuple[str, ...], threshold: float) -> None:
        self._about = (run, step, sites, threshold)
        self._answers: OrderedDict[Question, Future[AnyAnswer]] = OrderedDict()
        self._one_at_a_time = ThreadPoolExecutor(1)
        self._process: Any = None
        self._pipe: Connection | None = None

    def ask(self, text: str, patience_s: float) -> Answer | None:
        """What fires in a text; None as of `wait`."""
        found = self.wait(text, patience_s)
        assert found is None or isinstance(found, Answer)
        return found

    def graph(self, question: GraphQuestion, patience_s: float) -> GraphAnswer | None:
        """A graph; None as of `wait`."""
        return self._answer_of(GraphAnswer, question, patience_s)

    def intervention(self, question: InterventionQuestion, patience_s: float) -> InterventionAnswer | None:
        """What an intervention does; None as of `wait`."""
        return self._answer_of(InterventionAnswer, question, patience_s)

    def nearest(self, question: NearestQuestion, patience_s: float) -> NearestAnswer | None:
        """The nearest components; None as of `wait`."""
        return self._answer_of(NearestAnswer, question, patience_s)

    def _answer_of(self, kind: type[Kind], question: Question, patience_s: float) -> Kind | None:
        """An answer of this kind; None as of `wait`. What fails in the process comes as an `Answer`."""
        found = self.wait(question, patience_s)
        if isinstance(found, Answer):
            return kind(wrong=found.wrong)
        assert found is None or isinstance(found, kind)
        return found

    def wait(self, question: Question, patience_s: float) -> AnyAnswer | None:
        """The answer, or None if it takes longer than ``patience_s``: then it is being worked on, and asking again
        gets it."""
        if question not in self._answers:
            self._answers[question] = self._one_at_a_time.submit(self._question, question)
            while len(self._answers) > KEPT:
                self._answers.popitem(last=False)
        try:
            return self._answers[question].result(patience_s)
        except TimeoutError:
            return None
        except (EOFError, OSError) as error:
            self._answers.pop(question, None)
            return Answer(wrong=f"the process that runs texts has ended ({error or 'without a word'}); ask again")

    def _question(self, question: Question) -> AnyAnswer:
        if self._process is None or not self._process.is_alive():
            context = multiprocessing.get_context("spawn")
            self._pipe, theirs = context.Pipe()
            self._process = context.Process(target=serve, args=(theirs, *self._about), daemon=True)
            self._process.start()
            theirs.close()
        assert self._pipe is not None
        self._pipe.send(question)
        answer = self._pipe.recv()
        assert isinstance(answer, AnyAnswer)
        return answer

    def close(self) -> None:
        """Ends the process."""
        self._one_at_a_time.shutdown(wait=False, cancel_futures=True)
        if self._process is not None:
            self._process.kill()
            self._process.join()


def serve(pipe: Connection, run: Path, step: int, sites: tuple[str, ...], threshold: float) -> None:
    """Answers questions until the other end is closed."""
    # A run that trains on these devices needs their memory more.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    opened: Any = None
    while True:
        try:
            question = pipe.recv()
        except EOFError:
            return
        try:
            if opened is None:
                from param_decomp_lab.opening import load_run

                opened = load_run(run, step, devices=1)
            pipe.send(_answer(opened, question, sites, threshold))
        except UserError as error:
            pipe.send(Answer(wrong=str(error)))
        except Exception as error:  # a bug, or a machine without memory: said on the page, and asked again
            pipe.send(Answer(wrong=f"{type(error).__name__}: {error}"[:2000]))


def _answer(run: Any, question: Question, sites: tuple[str, ...], threshold: float) -> AnyAnswer:
    match question:
        case str():
            return _what_fires(run, question, sites, threshold)
        case GraphQuestion(prompt, target, optimize):
            return GraphAnswer(run.graph(prompt, target=target or None, optimize=optimize, threshold=threshold))
        case InterventionQuestion():
            return _intervene(run, question)
        case NearestQuestion(site, number, most):
            by_U, by_V = ([tuple(n) for n in run.nearest(site, number, side, most=most, sites=sites)] for side in "UV")
            return NearestAnswer(by_U, by_V)


def _intervene(run: Any, question: InterventionQuestion) -> InterventionAnswer:
    of_text = run.text is not None
    options = {"alone": True} if question.alone else {"scale": question.scale}
    found = run.intervene(
        question.prompt,
        question.selection,
        continue_tokens=CONTINUED if of_text and question.goes_on else 0,
        samples=SAMPLES,
        **options,
    )
    outcomes = []
    for name, reading in found.readings.items():
        if of_text:
            before, after = reading.probabilities()
            kl, kl_mean = reading.kl(), reading.kl(position=None)
        else:
            before, after = (x[:, -1].mean(axis=0) for x in (reading.before, reading.after))
            kl = kl_mean = float(((reading.after - reading.before) ** 2).mean())
        largest = np.argsort(-np.maximum(np.abs(before), np.abs(after)), kind="stable")[:OUTPUTS]
        values = zip(run.names(largest.tolist()), before[largest].tolist(), after[largest].tolist(), strict=True)
        outcomes.append(Outcome(name, kl, kl_mean, list(values)))
    without, with_it = (run.text.text(tokens) if of_text else "" for tokens in found.continuation)
    return InterventionAnswer(outcomes, (without, with_it))


def _what_fires(run: Any, text: str, sites: tuple[str, ...], threshold: float) -> Answer:
    from param_decomp_lab.runs.prompt import read_prompt

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
