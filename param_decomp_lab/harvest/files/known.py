"""Reads everything that a harvest knows about one component."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pyarrow as pa

from param_decomp_lab.harvest.files.example import Example
from param_decomp_lab.safe_io.printable import printable
from param_decomp_lab.ui.cards import card
from param_decomp_lab.ui.numbers import number, percent

EXAMPLES_SHOWN = 5
"""The number of examples of each kind on a card."""
TOKENS_SHOWN = 8


class OfSign(NamedTuple):
    """What is known of the firings where a has one sign (``a ≥ 0``, ``a < 0``). ``n``: the sampled firings that are
    counted. ``tokens``: the most frequent there: ``token``, ``text``, ``n``, ``precision`` (their share of the
    firings), ``pmi``; none for a toy. ``outputs``: as of `Harvest.outputs`."""

    sign: str
    n: int
    tokens: pa.Table
    outputs: pa.Table


@dataclass(frozen=True)
class KnownComponent:
    """Component ``number`` of ``site``: its ``numbers`` (`Harvest.component`), its newest ``label`` (empty without
    one), ``examples``, and the tables ``tokens`` and ``outputs``. ``n_positions``: of the harvest. ``of_text``: whether
    inputs are tokens. ``signs``: `Harvest.by_sign`."""

    site: str
    number: int
    numbers: dict[str, Any]
    label: str
    examples: list[Example]
    tokens: pa.Table
    outputs: pa.Table
    n_positions: int
    of_text: bool
    signs: list[OfSign] = field(default_factory=list)

    def __repr__(self) -> str:
        names = " ".join(map(repr, self.tokens["text"].to_pylist()[:TOKENS_SHOWN]))
        fires, mean = percent(self.numbers["density"]), number(self.numbers["importance_mean"])
        lines = [
            f"{self.site}:{self.number}" + (f" {self.label[:200]!r}" if self.label else ""),
            f"  fires at {fires} of the positions, mean λ {mean}, on {names}",
            *(f"  {example!r}" for example in self.examples[:EXAMPLES_SHOWN]),
        ]
        return printable("\n".join(lines))

    def _repr_html_(self) -> str:
        def shown(kind: str) -> list[dict[str, Any]]:
            found = [example for example in self.examples if example.kind == kind][:EXAMPLES_SHOWN]
            return [{"context": e.marked(), "importance": e.importance, "activation": e.activation} for e in found]

        return card(
            "component", site=self.site, n=self.number, label=self.label, row=self.numbers,
            n_positions=self.n_positions, top=shown("top"), uniform=shown("uniform"),
            inputs=self.tokens.slice(0, TOKENS_SHOWN).to_pylist(),
            outputs=self.outputs.slice(0, TOKENS_SHOWN).to_pylist(),
            signs=[
                (of.sign, of.n, *(table.slice(0, TOKENS_SHOWN).to_pylist() for table in (of.tokens, of.outputs)))
                for of in self.signs
            ],
            unit="Tokens" if self.of_text else "Features", of_text=self.of_text,
        )  # fmt: skip
