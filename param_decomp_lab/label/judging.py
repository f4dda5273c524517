"""Asks a model to judge labels, and components without one: detection, fuzzing and intruder.

The first two follow Paulo et al. (2024), the third Paulo and Belrose (2025): see docs/sources.md.
"""

import itertools
import json
import re
from collections.abc import Callable, Iterator, Sequence

from param_decomp_lab.harvest.files.scores import Kind
from param_decomp_lab.label.choose import Component
from param_decomp_lab.label.draws import Draws, Judged
from param_decomp_lab.label.ledger import Question
from param_decomp_lab.label.texts import Text, Texts

AT_ONCE = 5
"""The number of texts in one question, so that the instructions are paid for only once."""
Truth = tuple[bool, ...] | int
"""Whether yes is right, for each text of a question; or the index of the intruder."""
Answer = tuple[bool, ...] | int

_SHORT = "Answer with the JSON list and nothing else."
DETECTION = f"""\
A feature of a language model fires at some tokens of texts. You get a description of when it fires, and \
numbered texts in each of which one token is marked «like this». Judge of each text whether the feature fires at \
the marked token, by the description alone. Any number of them may be right.

Answer with a JSON list that has 1 for each text in which it fires at the mark and 0 for each other, in order, \
such as [1, 0, 0]. {_SHORT}"""
FUZZING = f"""\
A feature of a language model fires at some tokens of texts. You get a description of when it fires, and \
numbered texts with marked tokens, «like this». In some the marks are the tokens at which the feature fires, in \
the others they are wrong. Judge of each text whether its marks are right, by the description alone. Any number \
of them may be right.

Answer with a JSON list that has 1 for each text whose marks are right and 0 for each other, in order, such as \
[1, 0, 0]. {_SHORT}"""
INTRUDER = """\
You get five numbered texts in each of which one token is marked «like this». Four of the marks are where the \
same feature of a language model fires; one is where another feature fires and this one does not. Find out what \
four of the marks have in common, in the token, before it or after it, and which does not belong.

Answer with the number of that text, 1 to 5, and nothing else."""


def score_questions(
    texts: Texts, draws: Draws, kind: Kind, component: Component, label: str
) -> Iterator[tuple[Question, Truth]]:
    """Yields the questions about one component, with the right answers."""
    match kind:
        case "detection" | "fuzzing":
            judged = draws.detection(component) if kind == "detection" else draws.fuzzing(component)
            # One class alone is uninformative.
            if {one.truth for one in judged} == {True, False}:
                instructions = DETECTION if kind == "detection" else FUZZING
                for part in _batches(judged):
                    content = f"Description: {label}\n\n{_numbered(texts, [one.text for one in part])}"
                    truth = tuple(one.truth for one in part)
                    yield _question(texts, kind, component, instructions, content, truth, _yes_or_no(len(part))), truth
        case "intruder":
            for group, where in draws.intruder(component):
                yield _question(texts, kind, component, INTRUDER, _numbered(texts, group), where, _which), where


def _batches(judged: Sequence[Judged]) -> Iterator[list[Judged]]:
    """Yields batches without repeated texts: of two copies that differ in their marks, one would have to be wrong."""
    waiting = list(judged)
    while waiting:
        batch: list[Judged] = []
        for one in list(waiting):
            if len(batch) < AT_ONCE and all(one.text.tokens != other.text.tokens for other in batch):
                batch.append(one)
                waiting.remove(one)
        yield batch


def _question(
    texts: Texts,
    kind: Kind,
    component: Component,
    instructions: str,
    content: str,
    truth: Truth,
    parse: Callable[[str], Answer],
) -> Question:
    messages = ({"role": "system", "content": instructions}, {"role": "user", "content": content})
    return Question(kind, texts.harvest.plan.step, *component, messages, parse, json.dumps(truth))


def _numbered(texts: Texts, shown: Sequence[Text]) -> str:
    return "\n".join(f"{number}. {texts.show(text)}" for number, text in zip(itertools.count(1), shown, strict=False))


def _yes_or_no(n: int) -> Callable[[str], tuple[bool, ...]]:
    def parse(answer: str) -> tuple[bool, ...]:
        found = re.findall(r"\[([^\[\]]*)\]", answer)
        values = [value.strip() for value in found[-1].split(",")] if found else []
        if len(values) != n or not set(values) <= {"0", "1"}:
            raise ValueError(f"not a list of {n} zeros and ones")
        return tuple(value == "1" for value in values)

    return parse


def _which(answer: str) -> int:
    found = re.fullmatch(r"\D*([1-5])\D*", answer.strip(), re.ASCII)
    if found is None:
        raise ValueError("not one number from 1 to 5")
    return int(found[1]) - 1
