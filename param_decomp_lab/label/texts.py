"""Formats texts of a harvest for a language model: tokens as text, some of them between marks."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from param_decomp_lab.errors import UserError
from param_decomp_lab.harvest.files import Example, Harvest

MARKS = str.maketrans({"«": "\\u00ab", "»": "\\u00bb"})
"""Escapes the marks where they occur within a token."""
LEAST_SHOWN = 0.5 / 255
"""λ in an example is stored in 255ths, so values that round to 0 are not shown as firing."""


@dataclass(frozen=True)
class Text:
    """A text to show. ``tokens``: ids. ``marks``: indices of the marked tokens."""

    tokens: tuple[int, ...]
    marks: frozenset[int]


class Texts:
    """Formats texts of a harvest. Raises UserError for a harvest that is not of text."""

    def __init__(self, harvest: Harvest) -> None:
        if harvest.plan.inputs != "tokens" or harvest.vocabulary is None:
            why = "its run has no tokenizer" if harvest.plan.inputs == "tokens" else "its inputs are features"
            raise UserError(f"{harvest.folder} has no text to show to a model: {why}")
        self.harvest = harvest

    def words(self, ids: Sequence[int]) -> list[str]:
        """Returns the name of each token, with our own marks escaped."""
        return [name.translate(MARKS) for name in self.harvest.names(ids)]

    def show(self, text: Text) -> str:
        words = self.words(text.tokens)
        return "".join(f"«{word}»" if place in text.marks else word for place, word in enumerate(words))

    def window(self, row: int, position: int) -> Text:
        """Returns a position of the harvest, marked, with its context."""
        plan = self.harvest.plan
        first, stop = max(0, position - plan.around), min(plan.length, position + plan.around + 1)
        tokens = self.harvest.row(row)[first:stop].tolist()
        return Text(tuple(tokens), frozenset([position - first]))


def firing_places(example: Example, threshold: float) -> list[int]:
    """Returns the indices of the example's tokens at which its component is known to fire: that of the example itself,
    and those with λ above the threshold.
    """
    least = max(threshold, LEAST_SHOWN)
    here = example.position - example.first
    return [place for place, value in enumerate(example.importances.tolist()) if value > least or place == here]


def as_text(example: Example, marks: Collection[int]) -> Text:
    return Text(example.tokens, frozenset(marks))
