"""Asks a model what a component is, showing its examples, numbers and tokens from the harvest."""

import numpy as np

from param_decomp_lab.errors import UserError
from param_decomp_lab.harvest.files import Example
from param_decomp_lab.harvest.files.tables import RARE_TOKEN
from param_decomp_lab.label.choose import Component
from param_decomp_lab.label.ledger import Question
from param_decomp_lab.label.texts import Texts, as_text, firing_places
from param_decomp_lab.safe_io.json_text import parse_json
from param_decomp_lab.safe_io.printable import printable
from param_decomp_lab.ui.numbers import number, percent, signed

TOP_SHOWN = 8
UNIFORM_SHOWN = 8
TOKENS_SHOWN = 12
VALUES_SHOWN = 6
"""The number of λ values that are shown for an example's marked tokens."""
LABEL_CHARACTERS = 300
INSTRUCTIONS = """\
You describe what a component of a language model's weights does. A component matters at some tokens of a text, \
which are marked «like this»; a value between 0 and 1, its importance, says how much the model's output depends \
on it there. You get texts with the marked tokens, the tokens on which it fires most often, and what the model \
predicts next where it fires.

Find what the marked tokens and what is predicted there have in common. It may be the token itself, its place in \
a word or sentence, what comes before it, or what comes next. A description must fit the random sample as well \
as the clearest cases; where it cannot, describe the largest part. Be specific and brief: at most 20 words, no \
introduction, nothing about "tokens" or "components" in general.

Answer with a JSON object and nothing else: {"label": "…"}"""


def shown_examples(examples: list[Example]) -> list[Example]:
    """Returns what the namer sees: the clearest cases, and the first half of the uniform sample, which is in random
    order. The other half is kept for judging the label.
    """
    top = [example for example in examples if example.kind == "top"]
    uniform = [example for example in examples if example.kind == "uniform"]
    return [*top[:TOP_SHOWN], *uniform[: min(UNIFORM_SHOWN, len(uniform) // 2)]]


def label_question(texts: Texts, component: Component) -> Question:
    messages = (
        {"role": "system", "content": INSTRUCTIONS},
        {"role": "user", "content": _description(texts, component)},
    )
    return Question("label", texts.harvest.plan.step, *component, messages, parse_label)


def parse_label(answer: str) -> str:
    """Returns the label in an answer. Raises ValueError for an answer without one."""
    start, stop = answer.find("{"), answer.rfind("}")
    if start < 0:
        raise ValueError("no JSON object")
    try:
        label = parse_json(answer[start : stop + 1], "the answer", dict).get("label")
    except UserError as error:
        raise ValueError(str(error)) from error
    text = " ".join(label.split()) if isinstance(label, str) else ""
    if not text or len(text) > LABEL_CHARACTERS or printable(text) != text:
        raise ValueError("no label of usable length")
    return text


def _description(texts: Texts, component: Component) -> str:
    harvest = texts.harvest
    site, n = component
    row, threshold = harvest.component(site, n), harvest.plan.threshold
    shown = shown_examples(harvest.examples(site, n))
    parts = [
        f"Component {n} of {site}. It fires (importance above {threshold:g}) at {percent(row['density'])} of all "
        f"tokens; its mean importance is {number(row['importance_mean'])}, its largest {number(row['importance_max'])}."
    ]
    for kind, title in (("top", "Clearest cases"), ("uniform", "Random sample of where it fires")):
        lines = [_example(texts, example, threshold) for example in shown if example.kind == kind]
        if lines:
            parts.append("\n".join([f"{title}:", *(f"{i}. {line}" for i, line in enumerate(lines, start=1))]))
    parts += [part for part in (_inputs(texts, component), _outputs(texts, component), _lens(texts, component)) if part]
    return "\n\n".join(parts)


def _example(texts: Texts, example: Example, threshold: float) -> str:
    places = firing_places(example, threshold)
    words = texts.words(example.tokens)
    best = sorted(places, key=lambda place: -float(example.importances[place]))[:VALUES_SHOWN]
    values = ", ".join(f"«{words[place]}» {example.importances[place]:.2f}" for place in sorted(best))
    return f"{texts.show(as_text(example, places))}\n   importance: {values}"


def _inputs(texts: Texts, component: Component) -> str:
    rows = texts.harvest.tokens(*component).to_pylist()
    words = dict(zip((row["token"] for row in rows), texts.words([row["token"] for row in rows]), strict=True))
    frequent = ", ".join(f"«{words[row['token']]}» {percent(row['precision'])}" for row in rows[:TOKENS_SHOWN])
    common = sorted((row for row in rows if row["total"] >= RARE_TOKEN), key=lambda row: (-row["pmi"], -row["n"]))
    raised = ", ".join(
        f"«{words[row['token']]}» {percent(row['recall'])} of its uses, PMI {signed(row['pmi'])}"
        for row in common[:TOKENS_SHOWN]
    )
    lines = [f"Tokens on which it fires, with their share of its firings: {frequent}"] if frequent else []
    return "\n".join([*lines, *([f"Tokens most raised there: {raised}"] if raised else [])])


def _outputs(texts: Texts, component: Component) -> str:
    rows = texts.harvest.outputs(*component, most=TOKENS_SHOWN).to_pylist()
    words = texts.words([row["token"] for row in rows])
    shares = ", ".join(
        f"«{word}» {percent(row['mean'])} ({percent(row['everywhere'])} elsewhere)"
        for word, row in zip(words, rows, strict=True)
    )
    return f"What the model predicts next where it fires: {shares}" if shares else ""


def _lens(texts: Texts, component: Component) -> str:
    weights = texts.harvest.weights(*component)
    lines = []
    for name, title in (("promoted", "raises"), ("suppressed", "lowers")):
        tokens = np.asarray(weights[name], int).tolist()
        if tokens:
            lines.append(f"By itself it {title}: " + ", ".join(f"«{word}»" for word in texts.words(tokens)))
    return "\n".join(lines)
