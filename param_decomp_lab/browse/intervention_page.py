"""The page of an intervention: a prompt with some components out, scaled, set to an activation, or on alone."""

import math
import re
from collections.abc import Mapping
from typing import Any

from param_decomp_lab.browse.catalog import Opened
from param_decomp_lab.browse.pages import Pages, as_asked, clean, unit, unseen
from param_decomp_lab.browse.text_page import PATIENCE_S, WAITING, Workers
from param_decomp_lab.browse.text_worker import LONGEST, InterventionQuestion
from param_decomp_lab.data.token_names import PICTURES, visible
from param_decomp_lab.errors import UserError
from param_decomp_lab.harvest.files.groups import GROUP

MOST = 500
"""Components of a selection."""
HOWS = ("off", "alone", "scale", "set")
LARGEST_NUMBER = 1e30
"""The largest scale, or activation that is set."""
LINKED = 12
"""Components of a selection that are linked."""
_MARKERS = re.compile(r"<\|\w+\|>|</?s>|<[be]os>")
"""Names of tokens that stand between documents."""
_ESCAPES = re.compile(r"\\u[0-9a-f]{4}|\\U[0-9a-f]{8}")
_PLAIN = str.maketrans({picture: character for character, picture in PICTURES.items()})


class InterventionPages:
    """Renders interventions."""

    def __init__(self, pages: Pages, workers: Workers) -> None:
        self._pages, self._workers = pages, workers

    def page(self, opened: Opened, given: Mapping[str, str]) -> str:
        """``given``: the fields of the form."""
        prompt, selection = given.get("prompt", ""), tuple(given.get("select", "").replace(",", " ").split())
        how, scale = given.get("how", "off"), given.get("scale", "") or "0"
        values: dict[str, Any] = {"waiting": "", "wrong": "", "outcomes": [], "continuations": ("", "")}
        goes_on = bool(given.get("on"))
        chosen, example = _components(opened, selection), ""
        if "prompt" not in given and len(selection) == 1 and chosen:
            prompt = example = _example_text(opened, *chosen[0])
        elif prompt and selection:
            values |= self._ask(opened, prompt, selection, how, scale, goes_on)
        return self._pages.render(
            "intervene.html", opened=opened, prompt=as_asked(prompt[:LONGEST]), select=clean("\n".join(selection)),
            how=how if how in HOWS else "off", scale=clean(scale, 12), goes_on=goes_on,
            unseen=unseen(prompt[:LONGEST]), unit=unit(opened), chosen=chosen[:LINKED], example=example,
            usual=_numbers(opened, *chosen[0]) if len(chosen) == len(selection) == 1 else None, **values,
        )  # fmt: skip

    def _ask(
        self, opened: Opened, prompt: str, selection: tuple[str, ...], how: str, scale: str, goes_on: bool
    ) -> dict[str, Any]:
        if len(prompt) > LONGEST or len(selection) > MOST:
            return {"wrong": f"a prompt may have {LONGEST:,} characters, and a selection {MOST} components"}
        try:
            value = float(scale) if how in ("scale", "set") else 0.0
        except ValueError:
            value = math.nan
        if how not in HOWS or not abs(value) <= LARGEST_NUMBER:
            return {"wrong": f"'{clean(scale, 40)}' should be a number from -{LARGEST_NUMBER:g} to {LARGEST_NUMBER:g}"}
        try:
            selection = _without_groups(opened, selection)
        except UserError as error:
            return {"wrong": clean(error, 2000)}
        factor, set_to = (0.0, value) if how == "set" else (value, None)
        question = InterventionQuestion(prompt, selection, how == "alone", factor, goes_on, set_to)
        answer = self._workers.of(opened).intervention(question, PATIENCE_S)
        if answer is None:
            return {"waiting": WAITING}
        if answer.wrong:
            return {"wrong": clean(answer.wrong, 2000)}
        return {"outcomes": answer.outcomes, "continuations": answer.continuations}


def _without_groups(opened: Opened, selection: tuple[str, ...]) -> tuple[str, ...]:
    """The selection with the members of this harvest's groups in the groups' place."""
    found: list[str] = []
    for entry in selection:
        parts = re.fullmatch(rf"{GROUP}:(\d{{1,12}})((?:@-?\d+)?)", entry, re.ASCII)
        if parts is None:
            found.append(entry)
            continue
        groups = opened.groups
        if groups is None or int(parts[1]) >= len(groups):
            raise UserError(f"this harvest has no group {parts[1]}")
        found += [f"{site}:{number}{parts[2]}" for site, number in groups.members(int(parts[1]))]
    return tuple(found)


def _components(opened: Opened, selection: tuple[str, ...]) -> list[tuple[str, int]]:
    """Site and number of the components that are named in a selection, each once; nothing that is not there."""
    found: dict[tuple[str, int], None] = {}
    for entry in selection[:MOST]:
        parts = re.fullmatch(r"(.+?):(\d{1,12})(?:@-?\d+)?", entry, re.ASCII)
        if parts is not None and parts[1] in opened.harvest.sites:
            site, number = parts[1], int(parts[2])
            if number < opened.harvest.site(site).C:
                found[site, number] = None
    return list(found)


def _numbers(opened: Opened, site: str, number: int) -> dict[str, Any] | None:
    """`Harvest.component`; None if the file is damaged, without which the intervention can still be asked for."""
    try:
        return opened.harvest.component(site, number)
    except UserError:
        return None


def _example_text(opened: Opened, site: str, number: int) -> str:
    """The first example of a component as one may type it: of a text, the document up to where it fires; "" for one
    without examples."""
    examples = opened.harvest.examples(site, number, 1)
    if not examples:
        return ""
    [example] = examples
    if not example.of_text:
        values = opened.harvest.row(example.row)
        return " ".join(f"{feature}={values[feature]:.6g}" for feature in example.tokens)
    # One by one: an escape that only several names together make is the text's own.
    names = example.names[: example.position - example.first + 1]
    text = "".join(_ESCAPES.sub(_unescaped, name.translate(_PLAIN)) for name in names)
    return (_MARKERS.split(text)[-1] or text)[-LONGEST:]


def _unescaped(found: re.Match[str]) -> str:
    """The character that the name of a token shows as this escape."""
    code = int(found[0][2:], 16)
    return chr(code) if code < 0x110000 and not 0xD800 <= code < 0xE000 and visible(chr(code)) == found[0] else found[0]
