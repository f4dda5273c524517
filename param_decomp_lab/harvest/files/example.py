"""A firing in its context."""

from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Float32
from markupsafe import Markup

from param_decomp_lab.ui.cards import card, context


@dataclass(frozen=True)
class Example:
    """A firing in its context.

    ``row``, ``position``: the place in the harvest. ``first``: the position of the first of ``tokens``; the firing is
    at ``tokens[position - first]``. A toy has one position, and ``tokens`` are its active features. ``importances``,
    ``activations``: of the component at each position of the context. ``names``: of ``tokens``. ``of_text``: whether
    they are tokens.
    """

    kind: str
    row: int
    position: int
    importance: float
    activation: float
    first: int
    tokens: tuple[int, ...]
    importances: Float32[np.ndarray, " n"]
    activations: Float32[np.ndarray, " n"]
    names: tuple[str, ...] = ()
    of_text: bool = True

    @property
    def text(self) -> str:
        """The context, with the token where the component fires in ⟦brackets⟧; for a toy, its active features."""
        here = self.position - self.first
        if not self.of_text:
            return ", ".join(self.names)
        return "".join(f"⟦{name}⟧" if k == here else name for k, name in enumerate(self.names))

    def near(self, n: int) -> "Example":
        """The example with at most ``n`` tokens of its context: two thirds of them before the firing, if there are
        enough. A toy's example stays unchanged.
        """
        if not self.of_text:
            return self
        here = self.position - self.first
        start = max(0, min(here - 2 * n // 3, len(self.tokens) - n))
        kept = slice(start, start + n)
        return replace(
            self, first=self.first + start, tokens=self.tokens[kept], importances=self.importances[kept],
            activations=self.activations[kept], names=self.names[kept],
        )  # fmt: skip

    def __repr__(self) -> str:
        return (
            f"Example({self.kind}, row {self.row}, position {self.position}, λ {self.importance:.2f}, "
            f"a {self.activation:.3g}: {self.text!r})"
        )

    def marked(self, largest: float = 0.0) -> Markup:
        """Returns the context as HTML, shaded by λ and by a as a share of ``largest``; for a toy,
        its active features.
        """
        if not self.of_text:
            return Markup(", ").join(self.names)
        values = self.importances.tolist(), self.activations.tolist()
        return context(self.names, *values, self.position - self.first, largest)

    def _repr_html_(self) -> str:
        return card(
            "example", importance=self.importance, activation=self.activation, row=self.row, position=self.position,
            uniform=self.kind == "uniform", context=self.marked(),
        )  # fmt: skip
