"""Answers what takes the run itself, in a process of its own: JAX takes seconds to start and more memory than all pages
do."""

import multiprocessing
import os
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from jaxtyping import Float32, Int32

from param_decomp_lab.errors import UserError
from param_decomp_lab.graph.graph import Graph
from param_decomp_lab.matching.result import MatchedSite

OUTPUTS, SAMPLES, CONTINUED = 10, 8, 8
"""Numbers of an intervention: outputs shown, draws of the random reading, tokens of the continuation."""
LONGEST = 5_000
"""Characters of a text that is asked about."""
PLACES = 64
"""Firings at which an effect is measured."""
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
class TextAnswer:
    """``tokens``: the ids of the text; of a toy's input, which is one position, the active features. ``wrong``: why
    there is no answer, "" if there is one. ``has_bos``: whether the first position is a BOS that others follow."""

    tokens: list[int] = field(default_factory=list)
    positions: int = 0
    has_bos: bool = False
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
    """A prompt with some components at a scale, set to an activation, or on alone, at their positions. ``goes_on``: how
    the text goes on, too, which takes a program for every token more."""

    prompt: str
    selection: tuple[str, ...]
    alone: bool
    scale: float
    goes_on: bool = False
    set_to: float | None = None


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
class OtherRun:
    """Another run, opened at a step, and the sites of it that are searched."""

    folder: Path
    step: int
    sites: tuple[str, ...]


@dataclass(frozen=True)
class NearestQuestion:
    """The ``most`` components of nearest direction, by U and by V; in ``other`` also by both. ``also``: components of
    ``other`` whose cosines are asked for, too."""

    site: str
    number: int
    most: int
    other: OtherRun | None = None
    also: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class NearestAnswer:
    """Site, number and cosine of components, by U, by V and by both. ``cosines``: of each component of another run, by
    side, where the sides can be compared."""

    by_U: list[tuple[str, int, float]] = field(default_factory=list)
    by_V: list[tuple[str, int, float]] = field(default_factory=list)
    by_both: list[tuple[str, int, float]] = field(default_factory=list)
    cosines: dict[tuple[str, int], dict[str, float]] = field(default_factory=dict)
    wrong: str = ""


@dataclass(frozen=True)
class MatchQuestion:
    """The components of a site that fire in ``harvest``, matched with those of another run that fire in
    ``other_harvest``. ``versions``: of the two; a harvest that is made again has another."""

    site: str
    harvest: Path
    other: OtherRun
    other_harvest: Path
    versions: tuple[tuple[int, int], tuple[int, int]]


@dataclass(frozen=True)
class MatchAnswer:
    """What was found, or why nothing was."""

    found: MatchedSite | None = None
    wrong: str = ""


@dataclass(frozen=True)
class HeadsQuestion:
    """The heads of a component, what they read in a text, and the ``most`` partners of the component at each of the
    ``heads`` in which it has the largest shares."""

    site: str
    number: int
    text: str
    most: int
    heads: int


@dataclass(frozen=True)
class PartnerOnText:
    """A component of the other site, with its contribution by the weights at the distances 0 and 1, and, if there is a
    text, the largest in it: how much, and from which position to which."""

    number: int
    at_0: float
    at_1: float
    on_text: tuple[float, int, int] | None


@dataclass(frozen=True)
class HeadsAnswer:
    """``shares``: of each head of the site; ``served``: the query heads of each. ``scores``: by name, of each head,
    None where nothing counts; ``chance`` and ``of_component``: by name, to compare. ``tokens``: ids of the text.
    ``partners``: by query head, components of ``partner_site``. ``text_wrong``: why there are no scores."""

    shares: list[float] = field(default_factory=list)
    side: str = "U"
    served: int = 1
    scores: dict[str, list[float | None]] = field(default_factory=dict)
    chance: dict[str, float | None] = field(default_factory=dict)
    of_component: dict[str, float | None] = field(default_factory=dict)
    tokens: list[int] = field(default_factory=list)
    partner_site: str = ""
    partners: dict[int, list[PartnerOnText]] = field(default_factory=dict)
    text_wrong: str = ""
    wrong: str = ""


@dataclass(frozen=True)
class EffectQuestion:
    """The effect of a component at up to ``places`` of its firings in the harvest in this folder."""

    site: str
    number: int
    harvest: Path
    places: int


@dataclass(frozen=True)
class SignEffect:
    """``up``, ``down``: name of an output, mean change (of its log-probability; a toy's: of its value), and its mean
    with and without the component, at the ``places`` where the activation has this sign. ``up_by_probability``,
    ``down_by_probability``: those whose mean probability moves most."""

    sign: str
    places: int
    up: list[tuple[str, float, float, float]]
    down: list[tuple[str, float, float, float]]
    up_by_probability: list[tuple[str, float, float, float]]
    down_by_probability: list[tuple[str, float, float, float]]


@dataclass(frozen=True)
class EffectAnswer:
    """``signs``: the effect where the activation is positive, and where it is negative. ``error``: the mean KL, or
    squared difference, and its standard error, None with one place. ``places``: how many there were."""

    signs: list[SignEffect] = field(default_factory=list)
    error: tuple[float, float | None] = (0.0, None)
    places: int = 0
    wrong: str = ""


@dataclass(frozen=True)
class ComponentQuestion:
    """What one component does in a text."""

    text: str
    site: str
    number: int


@dataclass(frozen=True)
class ComponentAnswer:
    """λ and a of a component at every position. ``tokens``: as of `TextAnswer`."""

    tokens: list[int] = field(default_factory=list)
    importance: list[float] = field(default_factory=list)
    activation: list[float] = field(default_factory=list)
    wrong: str = ""


Question = (
    str
    | GraphQuestion
    | InterventionQuestion
    | NearestQuestion
    | MatchQuestion
    | HeadsQuestion
    | EffectQuestion
    | ComponentQuestion
)
"""A text asks what fires in it."""
AnyAnswer = (
    TextAnswer
    | GraphAnswer
    | InterventionAnswer
    | NearestAnswer
    | MatchAnswer
    | HeadsAnswer
    | EffectAnswer
    | ComponentAnswer
)
Kind = TypeVar(
    "Kind", GraphAnswer, InterventionAnswer, NearestAnswer, MatchAnswer, HeadsAnswer, EffectAnswer, ComponentAnswer
)


class TextWorker:
    """Asks a process that has opened the run; it starts with the first question, and again if it has ended."""

    def __init__(self, run: Path, step: int, sites: tuple[str, ...], threshold: float) -> None:
        self._about = (run, step, sites, threshold)
        self._answers: OrderedDict[Question, Future[AnyAnswer]] = OrderedDict()
        self._one_at_a_time = ThreadPoolExecutor(1)
        self._process: Any = None
        self._pipe: Connection | None = None

    def ask(self, text: str, patience_s: float) -> TextAnswer | None:
        """What fires in a text; None as of `wait`."""
        found = self.wait(text, patience_s)
        assert found is None or isinstance(found, TextAnswer)
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

    def match(self, question: MatchQuestion, patience_s: float) -> MatchAnswer | None:
        """A site matched with that of another run; None as of `wait`."""
        return self._answer_of(MatchAnswer, question, patience_s)

    def heads(self, question: HeadsQuestion, patience_s: float) -> HeadsAnswer | None:
        """The heads of a component; None as of `wait`."""
        return self._answer_of(HeadsAnswer, question, patience_s)

    def effect(self, question: EffectQuestion, patience_s: float) -> EffectAnswer | None:
        """The effect of a component; None as of `wait`."""
        return self._answer_of(EffectAnswer, question, patience_s)

    def component(self, question: ComponentQuestion, patience_s: float) -> ComponentAnswer | None:
        """What one component does in a text; None as of `wait`."""
        return self._answer_of(ComponentAnswer, question, patience_s)

    def _answer_of(self, kind: type[Kind], question: Question, patience_s: float) -> Kind | None:
        """An answer of this kind; None as of `wait`. What fails in the process comes as an `TextAnswer`."""
        found = self.wait(question, patience_s)
        if isinstance(found, TextAnswer):
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
            return TextAnswer(wrong=f"the process that runs texts ended ({error or 'without a message'}); try again")

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
            pipe.send(TextAnswer(wrong=str(error)))
        except Exception as error:  # a bug, or a machine without memory: said on the page, and asked again
            pipe.send(TextAnswer(wrong=f"{type(error).__name__}: {error}"[:2000]))


def _answer(run: Any, question: Question, sites: tuple[str, ...], threshold: float) -> AnyAnswer:
    match question:
        case str():
            return _what_fires(run, question, sites, threshold)
        case GraphQuestion(prompt, target, optimize):
            return GraphAnswer(run.graph(prompt, target=target or None, optimize=optimize, threshold=threshold))
        case InterventionQuestion():
            return _intervene(run, question)
        case NearestQuestion():
            return _nearest(run, question, sites)
        case MatchQuestion():
            return _match(run, question)
        case HeadsQuestion():
            return _heads(run, question)
        case EffectQuestion():
            return _effect(run, question)
        case ComponentQuestion():
            return _of_component(run, question)


_other_runs: dict[tuple[Path, int], Any] = {}
"""The last other run, which stays open: its pages come one after the other."""


def _other_run(folder: Path, step: int) -> Any:
    from param_decomp_lab.opening import load_run

    if (folder, step) not in _other_runs:
        _other_runs.clear()  # before the next one is loaded: each may fill the memory
        _other_runs[folder, step] = load_run(folder, step, devices=1)
    return _other_runs[folder, step]


def _nearest(run: Any, question: NearestQuestion, sites: tuple[str, ...]) -> NearestAnswer:
    from param_decomp_lab.opening.nearest import cosines_between

    site, number = question.site, question.number
    other = None if question.other is None else _other_run(question.other.folder, question.other.step)
    searched = sites if question.other is None else question.other.sites
    lists = {
        side: [tuple(n) for n in run.nearest(site, number, side, most=question.most, sites=searched, other=other)]
        for side in ("U", "V", *(() if other is None else ("both",)))
    }
    named = {(name, n) for found in lists.values() for name, n, _ in found} | set(question.also)
    cosines = (
        {}
        if other is None
        else {(name, n): cosines_between(run, site, number, other, name, n) for name, n in sorted(named)}
    )
    return NearestAnswer(lists["U"], lists["V"], lists.get("both", []), cosines)


@lru_cache(maxsize=2)
def _harvest(folder: Path, version: tuple[int, int]) -> Any:
    del version
    from param_decomp_lab.harvest.files import Harvest

    return Harvest(folder)


def _match(run: Any, question: MatchQuestion) -> MatchAnswer:
    from param_decomp_lab.harvest.files.overlap import same_rows
    from param_decomp_lab.opening.matched import match_site, refuse_other_target

    other = _other_run(question.other.folder, question.other.step)
    refuse_other_target(run, other)
    folders = question.harvest, question.other_harvest
    mine, theirs = (_harvest(*known) for known in zip(folders, question.versions, strict=True))
    return MatchAnswer(match_site(run, mine, other, theirs, question.site, same_rows(mine, theirs)))


def _heads(run: Any, question: HeadsQuestion) -> HeadsAnswer:
    from param_decomp_lab.opening.heads import partner_site
    from param_decomp_lab.runs.prompt import read_prompt

    site, number = question.site, question.number
    heads = run.heads(site, number)
    values: dict[str, Any] = {"shares": heads.share.tolist(), "side": heads.side, "served": heads.served}
    inputs = None
    try:
        inputs, values["tokens"] = read_prompt(run, question.text)
    except UserError as error:
        values["text_wrong"] = str(error)
    if inputs is not None:
        scores = run.head_scores(inputs)
        values["scores"] = {name: [_known(x) for x in own] for name, own in scores.by_head(heads).items()}
        values["chance"] = {name: _known(x) for name, x in scores.chance.items()}
        values["of_component"] = {name: _known(x) for name, x in scores.of(heads).items()}
    other = partner_site(run, site)
    if other is not None:
        values["partner_site"] = other.name
        largest = np.argsort(-heads.share.repeat(heads.served), kind="stable")[: question.heads].tolist()
        listed = run.partners(site, number, most=question.most)
        values["partners"] = {head: _partners(run, question, inputs, listed[head]) for head in largest}
    return HeadsAnswer(**values)


def _partners(run: Any, question: HeadsQuestion, inputs: Any, listed: Any) -> list[PartnerOnText]:
    on_text: list[tuple[float, int, int] | None] = [None] * len(listed)
    if inputs is not None:
        numbers = [partner.number for partner in listed]
        found = run.contributions(inputs, question.site, question.number, numbers)[:, listed[0].head]
        for k, own in enumerate(found):
            t, s = np.unravel_index(np.abs(own).argmax(), own.shape)
            on_text[k] = float(own[t, s]), int(t), int(s)
    return [
        PartnerOnText(partner.number, partner.contributions[0], partner.contributions[1], own)
        for partner, own in zip(listed, on_text, strict=True)
    ]


def _known(value: float) -> float | None:
    return None if np.isnan(value) else float(value)


def _effect(run: Any, question: EffectQuestion) -> EffectAnswer:
    from param_decomp_lab.harvest.files import Harvest

    found = run.effect(question.site, question.number, places=question.places, harvest=Harvest(question.harvest))
    signs = []
    for sign, part in found.by_sign().items():
        kinds = part.up, part.down, part.up_by_probability, part.down_by_probability
        rows = ([(o.name, o.change, o.before, o.after) for o in outputs] for outputs in kinds)
        signs.append(SignEffect(sign, part.n, *rows))
    return EffectAnswer(signs, (found.error, found.standard_error), found.n)


def _of_component(run: Any, question: ComponentQuestion) -> ComponentAnswer:
    from param_decomp_lab.runs.prompt import read_prompt

    inputs, tokens = read_prompt(run, question.text)
    site = question.site
    by_site = run.causal_importances(inputs, site), run.activations(inputs, site)
    lam, a = (np.asarray(x[site]).reshape(-1, run.sites[site].C)[:, question.number].tolist() for x in by_site)
    return ComponentAnswer(tokens, lam, a)


def _intervene(run: Any, question: InterventionQuestion) -> InterventionAnswer:
    of_text = run.text is not None
    options: dict[str, Any] = {"alone": True} if question.alone else {"scale": question.scale}
    if question.set_to is not None:
        options = {"set_to": question.set_to}
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


def _what_fires(run: Any, text: str, sites: tuple[str, ...], threshold: float) -> TextAnswer:
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
    has_bos = len(importance) > 1 and run.text is not None and run.text.bos == tokens[0]
    return TextAnswer(tokens, len(importance), has_bos, found)
