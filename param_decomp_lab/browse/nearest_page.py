"""The page of the components nearest to one: by what they write, by what they read, and by where they fire."""

from collections.abc import Iterable
from typing import Any

from param_decomp_lab.browse.catalog import Opened
from param_decomp_lab.browse.pages import Pages, checked_number, clean, shown_tokens
from param_decomp_lab.browse.text_page import PATIENCE_S, Workers
from param_decomp_lab.browse.text_worker import NearestQuestion

SHOWN = 12
"""Components of each list."""
WAITING = (
    "Reading the weights: a few seconds the first time, and more with a large model. This page asks again by itself."
)
COMPANIONS = 512
"""Co-firing components among which those of largest Jaccard index are shown."""


class NearestPages:
    """Renders the nearest components. Those by U and V take the weights, which a process of the run reads."""

    def __init__(self, pages: Pages, workers: Workers) -> None:
        self._pages, self._workers = pages, workers

    def page(self, opened: Opened, site: str, number: int) -> str:
        checked_number(opened, site, number)
        companions = opened.harvest.companions(site, number, COMPANIONS).to_pylist()
        together = sorted(companions, key=lambda row: -row["jaccard"])[:SHOWN]
        # Estimated from a sample, it may be above 1.
        lists = {"by_firing": [(row["site"], row["component"], min(row["jaccard"], 1.0)) for row in together]}
        values: dict[str, Any] = {"waiting": "", "wrong": "", "of": companions[0]["of"] if companions else 0}
        answer = self._workers.of(opened).nearest(NearestQuestion(site, number, SHOWN), PATIENCE_S)
        if answer is None:
            values["waiting"] = WAITING
        elif answer.wrong:
            values["wrong"] = clean(answer.wrong, 2000)
        else:
            lists |= {"by_U": answer.by_U, "by_V": answer.by_V}
        shown = {name: _rows(opened, rows) for name, rows in lists.items()}
        return self._pages.render("nearest.html", opened=opened, site=site, n=number, lists=shown, **values)


def _rows(opened: Opened, found: Iterable[tuple[str, int, float]]) -> list[dict[str, Any]]:
    """Components with what a list says of them."""
    rows = []
    for site, number, value in found:
        summary = opened.summary(site)
        rows.append(
            {
                "site": site, "number": number, "value": value, "density": float(summary.density[number]),
                "label": opened.labels.of_site(site).get(number, ""),
                "tokens": shown_tokens(opened, summary.tokens[number].tolist()),
            }
        )  # fmt: skip
    return rows
