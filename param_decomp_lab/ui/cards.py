"""Cards: what a notebook shows of an object. HTML that needs nothing else, without scripts; all values are escaped."""

import re
from collections.abc import Iterable, Sequence
from functools import cache
from math import ceil
from pathlib import Path
from typing import Any, Literal

from markupsafe import Markup, escape

from param_decomp_lab.safe_io.printable import printable
from param_decomp_lab.ui.numbers import amount, number, percent, signed

Card = Literal["run", "harvest", "matrix", "component", "example", "graph", "comparison", "intervention", "matched"]
SHADES = 10
LONGEST = 300
"""Characters of a text that a card shows: of a label, a prompt."""


def card(kind: Card, **values: Any) -> str:
    """The card of a ``kind`` (a template in `cards.html`), from the values that this template shows."""
    light, dark = _colors()
    values |= {"light": Markup(light), "dark": Markup(dark), "kind": kind}
    return str(_templates().get_template("cards.html").render(**values))


def context(
    names: Sequence[str],
    importances: Iterable[float],
    activations: Iterable[float],
    here: int,
    largest: float = 0.0,
) -> Markup:
    """The tokens around a firing, each with its shades: ``l1`` to ``l10`` by λ, ``p1`` or ``n1`` and so on by a, as a
    share of ``largest`` (0: by λ alone). ``here``: where the component fires. Not a template: there are a thousand
    tokens on a page."""
    spans = []
    for k, (name, importance, activation) in enumerate(zip(names, importances, activations, strict=True)):
        classes = [f"l{shade(importance)}"] if importance > 0 else []
        if largest > 0 and (depth := shade(abs(activation) / largest)):
            classes.append(f"{'p' if activation > 0 else 'n'}{depth}")
        if k == here:
            classes.append("at")
        marked = f' class="{" ".join(classes)}"' if classes else ""
        said = f"λ {importance:.2f}, a {activation:.3g}" if importance > 0 else f"a {activation:.3g}"
        spans.append(f'<span{marked} title="{said}">{escape(name)}</span>')
    return Markup("".join(spans))


def shade(value: float) -> int:
    """0 to `SHADES` for 0 to 1; what is above 0 is visible."""
    if not value > 0:
        return 0
    return SHADES if value >= 1 else ceil(value * SHADES)


def clean(text: object, limit: int = LONGEST) -> str:
    """Text from outside, without what reverses or hides text."""
    return printable(str(text), limit)


@cache
def _templates() -> Any:
    from param_decomp_lab.ui.templates import templates_beside  # a notebook needs Jinja, other readers do not

    environment = templates_beside(__file__)
    environment.filters.update(
        number=number, percent=percent, amount=amount, signed=signed, clean=clean, shade=shade
    )  # fmt: skip
    environment.globals.update(shades=range(1, SHADES + 1))
    return environment


@cache
def _colors() -> tuple[str, str]:
    """The declarations of the pages' colours, light and dark."""
    light, dark = re.findall(r":root \{(.*?)\}", (Path(__file__).parent / "base.css").read_text(), re.DOTALL)
    return " ".join(light.split()), " ".join(dark.split())
