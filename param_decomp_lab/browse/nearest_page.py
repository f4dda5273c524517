"""The page of the components nearest to one: by what they write, by what they read, and by where they fire."""

from collections.abc import Iterable
from typing import Any

from param_decomp_lab.browse.catalog import Opened
from param_decomp_lab.browse.matched_page import RUNS, other_run
from param_decomp_lab.browse.pages import Pages, checked_number, clean, shown_tokens
from param_decomp_lab.browse.text_page import PATIENCE_S, Workers
from param_decomp_lab.browse.text_worker import NearestQuestion
from param_decomp_lab.harvest.files.overlap import nearest_by_firing, overlap, same_rows

SHOWN = 12
"""Components of each list."""
WAITING = "Reading the weights: a few seconds the first time, and more with a large model. This page reloads by itself."
CO_FIRING = 512
"""Co-firing components among which those of largest Jaccard index are shown."""


class NearestPages:
    """Renders the nearest components. Those by U and V take the weights, which a process of the run reads."""

    def __init__(self, pages: Pages, workers: Workers) -> None:
        self._pages, self._workers = pages, workers

    def page(self, opened: Opened, site: str, number: int, other: Opened | None = None) -> str:
        """``other``: a harvest of another run of the same target, in which they are looked for."""
        checked_number(opened, site, number)
        others = self._pages.catalog.others(opened)[:RUNS]
        if other is not None:
            return self._in_other(opened, site, number, other, others)
        co_firing = opened.harvest.co_firing(site, number, CO_FIRING).to_pylist()
        together = sorted(co_firing, key=lambda row: -row["jaccard"])[:SHOWN]
        # Estimated from a sample, it may be above 1.
        lists = {"by_firing": [(row["site"], row["component"], min(row["jaccard"], 1.0)) for row in together]}
        values: dict[str, Any] = {"waiting": "", "wrong": "", "of": co_firing[0]["of"] if co_firing else 0}
        answer = self._workers.of(opened).nearest(NearestQuestion(site, number, SHOWN), PATIENCE_S)
        if answer is None:
            values["waiting"] = WAITING
        elif answer.wrong:
            values["wrong"] = clean(answer.wrong, 2000)
        else:
            lists |= {"by_U": answer.by_U, "by_V": answer.by_V}
        shown = {name: _rows(opened, rows) for name, rows in lists.items()}
        return self._pages.render(
            "nearest.html", opened=opened, site=site, n=number, lists=shown, others=others, **values
        )

    def _in_other(self, opened: Opened, site: str, number: int, other: Opened, others: list[tuple[str, str]]) -> str:
        """The nearest components of another run, each with all similarities that it has."""
        values: dict[str, Any] = {"waiting": "", "wrong": "", "lists": []}
        mine, theirs = opened.harvest, other.harvest
        alike = same_rows(mine, theirs)
        together = nearest_by_firing(mine, site, number, theirs, SHOWN) if alike else []
        also = tuple((found.site, found.number) for found in together)
        question = NearestQuestion(site, number, SHOWN, other_run(other), also)
        answer = self._workers.of(opened).nearest(question, PATIENCE_S)
        if answer is None:
            values["waiting"] = WAITING
        elif answer.wrong:
            values["wrong"] = clean(answer.wrong, 2000)
        else:
            chosen = {
                "both": [(name, n) for name, n, _ in answer.by_both], "U": [(name, n) for name, n, _ in answer.by_U],
                "V": [(name, n) for name, n, _ in answer.by_V], "firing": list(also),
            }  # fmt: skip
            values["lists"] = [
                (by, _rows(other, [(name, n, 0.0) for name, n in found])) for by, found in chosen.items()
            ]
            for _, rows in values["lists"]:
                for row in rows:
                    cosines = answer.cosines[row["site"], row["number"]]
                    row |= {"U": cosines.get("U"), "V": cosines.get("V")}
                    row["both"] = None if len(cosines) < 2 else cosines["U"] * cosines["V"]
                    row["firing"] = overlap(mine, site, number, theirs, row["site"], row["number"]) if alike else None
        return self._pages.render(
            "nearest_other.html", opened=opened, site=site, n=number, other=other, others=others, alike=alike, **values
        )


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
