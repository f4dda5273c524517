"""The page that shows what fires in a text."""

from functools import lru_cache
from typing import Any

import numpy as np

from param_decomp_lab.browse.catalog import Opened
from param_decomp_lab.browse.pages import Pages, as_asked, checked_number, clean, shown_tokens, unit, unseen
from param_decomp_lab.browse.text_worker import LONGEST, ComponentAnswer, ComponentQuestion, TextAnswer, TextWorker
from param_decomp_lab.ui.cards import context

PATIENCE_S = 0.7
"""How long a request waits; the page then reloads by itself."""
SPAN = 24
"""Tokens of a page."""
COMPONENTS = 12
"""Components shown of a site, those of largest λ."""
SHADED = 10
STRONGEST = 12
"""Tokens in the list of where one component is strongest."""
OF_TEXT = 24
"""Components in the list of the strongest in a text."""
ORDERS = {"both": "λ · |a|", "importance": "λ", "activation": "|a|"}
"""What the strongest components in a text can be sorted by: the value of an address, and its name."""

WAITING = (
    "Working on it; the first prompt starts JAX and compiles, which takes a few seconds and more with a large model. "
    "This page reloads by itself."
)


class Workers:
    """Each run that is asked about gets a process of its own."""

    def __init__(self) -> None:
        self._workers: list[TextWorker] = []
        self.of = lru_cache(maxsize=None)(self._start)

    def _start(self, opened: Opened) -> TextWorker:
        plan = opened.harvest.plan
        worker = TextWorker(opened.run_folder, plan.step, tuple(opened.harvest.sites), plan.threshold)
        self._workers.append(worker)
        return worker

    def close(self) -> None:
        """Ends all processes."""
        for worker in self._workers:
            worker.close()


class TextPages:
    """Renders the text page, and that of one component in a text."""

    def __init__(self, pages: Pages, workers: Workers) -> None:
        self._pages, self._workers = pages, workers

    def page(self, opened: Opened, text: str, at: int | None, order: str) -> str:
        """``at``: as of `_found`. ``order``: one of `ORDERS`; anything else is the first."""
        order = order if order in ORDERS else next(iter(ORDERS))
        values: dict[str, Any] = {"wrong": _too_long(text), "waiting": "", "found": None}
        if text and not values["wrong"]:
            answer = self._workers.of(opened).ask(text, PATIENCE_S)
            if answer is None:
                values["waiting"] = WAITING
            elif answer.wrong:
                values["wrong"] = clean(answer.wrong, 2000)
            else:
                values |= self._found(opened, answer, at) | {
                    "strongest": _strongest_components(opened, answer, order),
                    "has_bos": answer.has_bos,
                }
        return self._pages.render(
            "text.html",
            opened=opened,
            text=as_asked(text[:LONGEST]),
            unseen=unseen(text[:LONGEST]),
            unit=unit(opened),
            longest=LONGEST,
            order=order,
            orders=ORDERS,
            **values,
        )

    def of_component(self, opened: Opened, text: str, site: str, number: int) -> str:
        """λ and a of one component at every token of a text."""
        checked_number(opened, site, number)
        values: dict[str, Any] = {"wrong": _too_long(text), "waiting": "", "strongest": []}
        if text and not values["wrong"]:
            answer = self._workers.of(opened).component(ComponentQuestion(text, site, number), PATIENCE_S)
            if answer is None:
                values["waiting"] = WAITING
            elif answer.wrong:
                values["wrong"] = clean(answer.wrong, 2000)
            else:
                values |= _strongest(opened, answer, float(opened.harvest.component(site, number)["activation_max"]))
        return self._pages.render(
            "component_text.html", opened=opened, text=as_asked(text[:LONGEST]), unit=unit(opened), longest=LONGEST,
            unseen=unseen(text[:LONGEST]),
            site=site, n=number, id=f"{site}:{number}", label=opened.labels.of_site(site).get(number, ""), **values,
        )  # fmt: skip

    def _found(self, opened: Opened, answer: TextAnswer, at: int | None) -> dict[str, Any]:
        """``at``: the number of the token whose components are listed; None for the last."""
        last = answer.positions - 1
        at = last if at is None else min(at, last)
        first = at // SPAN * SPAN
        shown = range(first, min(first + SPAN, answer.positions))
        if opened.harvest.plan.inputs == "tokens":
            names = opened.harvest.names([answer.tokens[k] for k in shown])
        else:
            names = [", ".join(opened.harvest.names(answer.tokens)) or "nothing"]
        sites, most = [], 1
        for name, found in answer.sites.items():
            counts = np.bincount(found.position, minlength=answer.positions)
            most = max(most, int(counts.max()))
            labels, summary = opened.labels.of_site(name), opened.summary(name)
            here = np.flatnonzero(found.position == at)
            largest = here[np.argsort(-found.importance[here], kind="stable")][:COMPONENTS]
            components = [
                {
                    "number": int(found.component[k]), "importance": float(found.importance[k]),
                    "activation": float(found.activation[k]), "label": labels.get(int(found.component[k]), ""),
                    "tokens": shown_tokens(opened, summary.tokens[found.component[k]].tolist()),
                }
                for k in largest
            ]  # fmt: skip
            sites.append(
                {"name": name, "counts": counts[list(shown)].tolist(), "here": len(here), "components": components}
            )
        for site in sites:
            site["counts"] = [(count, -(-SHADED * count // most)) for count in site["counts"]]
        return {
            "found": sites, "at": at, "first": first,
            "tokens": [{"number": k, "text": name} for k, name in zip(shown, names, strict=True)],
            "before": first - 1 if first else None, "after": shown.stop if shown.stop < answer.positions else None,
        }  # fmt: skip


def _too_long(text: str) -> str:
    """The message for a text that is too long, "" for any other."""
    return f"a text may have {LONGEST:,} characters; this one has {len(text):,}" if len(text) > LONGEST else ""


def _strongest_components(opened: Opened, answer: TextAnswer, order: str) -> list[dict[str, Any]]:
    """The components of all sites that are strongest in the text, each at the place where it is, by ``order``; where
    that is the same, by ``λ · |a|``. Only places where λ is above the harvest's threshold count. A BOS does not count:
    what fires there is strongest in every text."""
    best: list[tuple[float, float, str, int, int, float, float, int]] = []
    for name, found in answer.sites.items():
        size = np.abs(found.activation)
        both = found.importance * size
        value = {"both": both, "importance": found.importance, "activation": size}[order]
        by_value = np.lexsort((-both, -value))
        by_value = by_value[found.position[by_value] >= answer.has_bos]
        components, first, count = np.unique(found.component[by_value], return_index=True, return_counts=True)
        for c, k, n in zip(components.tolist(), by_value[first].tolist(), count.tolist(), strict=True):
            lam, a = float(found.importance[k]), float(found.activation[k])
            best.append((-float(value[k]), -float(both[k]), name, c, int(found.position[k]), lam, a, n))
    best = sorted(best)[:OF_TEXT]
    of_text = opened.harvest.plan.inputs == "tokens"
    names = opened.harvest.names([answer.tokens[b[4]] for b in best]) if of_text else [""] * len(best)
    labels = {name: opened.labels.of_site(name) for name in {b[2] for b in best}}
    return [
        {
            "site": site, "number": c, "label": labels[site].get(c, ""), "position": position, "text": text,
            "tokens": shown_tokens(opened, opened.summary(site).tokens[c].tolist()), "importance": lam,
            "activation": a, "places": places,
        }
        for (_, _, site, c, position, lam, a, places), text in zip(best, names, strict=True)
    ]  # fmt: skip


def _strongest(opened: Opened, answer: ComponentAnswer, largest: float) -> dict[str, Any]:
    """The text with its shades, and where the component is strongest: by ``λ · |a|``, then by ``|a|``. ``largest``: the
    largest ``|a|`` of the harvest, so that shades are those of the component's page."""
    of_text, threshold = opened.harvest.plan.inputs == "tokens", opened.harvest.plan.threshold
    names = opened.harvest.names(answer.tokens)
    if not of_text:
        names = [", ".join(names) or "nothing"]
    lam, a = np.asarray(answer.importance), np.asarray(answer.activation)
    order = np.lexsort((-np.abs(a), -lam * np.abs(a)))[:STRONGEST].tolist()
    shaded = context(names, answer.importance, answer.activation, -1, max(largest, 1e-30)) if of_text else names[0]
    return {
        "context": shaded,
        "fires": int((lam > threshold).sum()), "total": len(names), "threshold": threshold, "largest": largest,
        "strongest": [
            {"text": names[k], "position": k, "importance": float(lam[k]), "activation": float(a[k])} for k in order
        ],
    }  # fmt: skip
