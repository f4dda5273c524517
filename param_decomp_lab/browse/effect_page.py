"""The page of a component's effect: what its network loses without it at the places where it fires."""

from typing import Any

from param_decomp_lab.browse.catalog import Opened
from param_decomp_lab.browse.pages import Pages, checked_number, clean, unit
from param_decomp_lab.browse.text_page import PATIENCE_S, WAITING, Workers
from param_decomp_lab.browse.text_worker import PLACES, EffectQuestion


class EffectPages:
    """Renders effects. They take the run itself, which a process of it opens."""

    def __init__(self, pages: Pages, workers: Workers) -> None:
        self._pages, self._workers = pages, workers

    def page(self, opened: Opened, site: str, number: int, by_probability: bool) -> str:
        checked_number(opened, site, number)
        values: dict[str, Any] = {"waiting": "", "wrong": "", "effect": None}
        if not opened.harvest.component(site, number)["firings"]:
            values["wrong"] = "It fires nowhere in this harvest."
        else:
            question = EffectQuestion(site, number, opened.harvest.folder.resolve(), PLACES)
            answer = self._workers.of(opened).effect(question, PATIENCE_S)
            if answer is None:
                values["waiting"] = WAITING
            elif answer.wrong:
                values["wrong"] = clean(answer.wrong, 2000)
            else:
                values["effect"] = answer
        return self._pages.render(
            "effect.html",
            opened=opened,
            site=site,
            n=number,
            unit=unit(opened),
            by_probability=by_probability and unit(opened) == "tokens",
            **values,
        )
