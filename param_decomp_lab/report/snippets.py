"""``examples.json``: the text on which the most important components of each site are most active, shaded by λ."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from markupsafe import Markup, escape

from param_decomp_lab.data.token_names import visible
from param_decomp_lab.errors import UserError
from param_decomp_lab.safe_io.files import read_text
from param_decomp_lab.safe_io.printable import printable

VISIBLE = 0.0005
"""A λ below this would read 0.000 and is not marked."""
EXAMPLES_BYTES = 1 << 30
"""Largest `examples.json`."""
MAX_TOKENS = 400_000
"""Tokens of all snippets on one page; with many sites every component shows fewer of its snippets."""
PREVIEW_BEFORE, PREVIEW_AFTER = 28, 60
"""Characters around the peak in the one-line preview."""


@dataclass(frozen=True)
class Snippet:
    """A piece of a row of the evaluation data: tokens as text, λ per token, index of the token with the largest."""

    tokens: tuple[str, ...]
    ci: tuple[float, ...]
    peak: int
    row: int | None


@dataclass(frozen=True)
class ComponentSnippets:
    number: int
    mean_ci: float
    snippets: tuple[Snippet, ...]


@dataclass(frozen=True)
class SiteExamples:
    """The shown components of a site, the most important first; ``C`` of how many there are."""

    site: str
    C: int
    components: tuple[ComponentSnippets, ...]


def read_examples(path: Path) -> list[SiteExamples]:
    """The sites of an ``examples.json``, none if there is no such file. Errors: ``UserError`` if it is malformed."""
    if not path.is_file():
        return []
    try:
        # Not `read_json`: a λ may be NaN, and a token half of a surrogate pair.
        content = json.loads(read_text(path, "the examples", EXAMPLES_BYTES))
        return [
            SiteExamples(site, int(entry["C"]), tuple(_component(path, site, c) for c in entry["components"]))
            for site, entry in content["sites"].items()
        ]
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        why = printable(f"{type(error).__name__}: {error}", 1000)
        raise UserError(f"{path}: not in the format of examples.json ({why})") from error


def snippets_per_component(sites: list[SiteExamples]) -> int:
    """How many snippets of every component fit on a page of ``MAX_TOKENS``; at least one."""
    longest = max((len(c.snippets) for site in sites for c in site.components), default=0)
    for n in range(longest, 1, -1):
        if sum(len(s.tokens) for site in sites for c in site.components for s in c.snippets[:n]) <= MAX_TOKENS:
            return n
    return 1


def snippet_html(snippet: Snippet) -> Markup:
    """The whole snippet: tokens with a visible λ in a ``<b>`` shaded by it (class ``p`` at the peak), the rest bare."""
    return Markup("").join(
        _token_html(token, ci, i == snippet.peak)
        for i, (token, ci) in enumerate(zip(snippet.tokens, snippet.ci, strict=True))
    )


def preview_html(snippet: Snippet) -> Markup:
    """As ``snippet_html``, but only as many tokens around the peak as fit on one line."""
    start = stop = min(max(snippet.peak, 0), max(len(snippet.tokens) - 1, 0))
    room = PREVIEW_BEFORE
    while start > 0 and len(snippet.tokens[start - 1]) <= room:
        start -= 1
        room -= len(snippet.tokens[start])
    room = PREVIEW_AFTER
    while stop < len(snippet.tokens) and len(snippet.tokens[stop]) <= room:
        room -= len(snippet.tokens[stop])
        stop += 1
    return snippet_html(Snippet(snippet.tokens[start:stop], snippet.ci[start:stop], snippet.peak - start, snippet.row))


def _token_html(token: str, ci: float, is_peak: bool) -> Markup:
    text = escape(visible(token))
    ci = ci if isfinite(ci) else 0.0
    if not is_peak and ci < VISIBLE:
        return text
    peak = Markup(' class="p"') if is_peak else Markup("")
    return Markup('<b{} style="--a:{}" title="λ {}">{}</b>').format(
        peak, f"{min(max(ci, 0), 1):.2g}", f"{ci:.3f}", text
    )


def _component(path: Path, site: str, entry: Mapping[str, Any]) -> ComponentSnippets:
    number = int(entry["component"])
    snippets = []
    for example in entry["examples"]:
        tokens, ci = tuple(str(t) for t in example["tokens"]), tuple(float(v or 0.0) for v in example["ci"])
        if len(tokens) != len(ci):
            raise UserError(f"{path}: {site}, component {number}: {len(tokens)} tokens but {len(ci)} values of ci")
        row = example.get("row")
        snippets.append(Snippet(tokens, ci, int(example.get("peak", -1)), int(row) if row is not None else None))
    return ComponentSnippets(number, float(entry["mean_ci"]), tuple(snippets))
