"""The pages of two runs side by side: what is matched at each site, the pairs of one, and a pair."""

import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from threading import Lock
from typing import Any

import numpy as np
from jaxtyping import Int

from param_decomp_lab.browse.catalog import Catalog, Opened
from param_decomp_lab.browse.pages import NotThere, Pages, address, by_sign, checked_number, clean, shown_tokens, unit
from param_decomp_lab.browse.plots import similarity_histogram
from param_decomp_lab.browse.text_page import PATIENCE_S, Workers
from param_decomp_lab.browse.text_worker import MatchQuestion, OtherRun
from param_decomp_lab.errors import UserError
from param_decomp_lab.harvest.files import Example
from param_decomp_lab.matching.result import ASSIGNED, HALF, NEAR, MatchedSite
from param_decomp_lab.safe_io.printable import few_names, printable

KEPT = 4
"""Pairs of harvests whose sites are kept: all of a large run have some 30 MB."""
PAGE, SITES, RUNS = 50, 200, 200
TOKENS, OUTPUTS, EXAMPLES = 12, 6, 6
WAITING = (
    "Matching components. The first site takes a few seconds, because the weights of both runs are read, and more with "
    "many components. This page reloads by itself."
)


@dataclass(frozen=True)
class PairQuery:
    """Which pairs of a site are listed; in addresses as ``min=0.5&max=0.9&order=up``."""

    least: float | None = None
    most: float | None = None
    ascending: bool = False

    @classmethod
    def parse(cls, given: Mapping[str, str]) -> "PairQuery":
        """Raises UserError for what is not a similarity."""
        return cls(_similarity(given, "min"), _similarity(given, "max"), given.get("order") == "up")

    @property
    def address(self) -> dict[str, str]:
        """As parameters of an address; what is as usual is left out."""
        ends = {name: "" if x is None else f"{x:.6g}" for name, x in (("min", self.least), ("max", self.most))}
        return {name: x for name, x in {**ends, "order": "up" if self.ascending else ""}.items() if x}

    @property
    def turned(self) -> "PairQuery":
        """The same pairs the other way round."""
        return replace(self, ascending=not self.ascending)

    def chosen(self, found: MatchedSite) -> Int[np.ndarray, " n"]:
        """Places of the pairs that fit, in order."""
        similarity = found.similarity
        kept = np.ones(len(similarity), bool)
        if self.least is not None:
            kept &= similarity >= self.least
        if self.most is not None:
            kept &= similarity <= self.most
        places = np.flatnonzero(kept)
        return places[::-1] if self.ascending else places


class MatchedPages:
    """Renders what is matched. A process of the first run reads the weights of both, a site at a time."""

    def __init__(self, pages: Pages, workers: Workers, catalog: Catalog) -> None:
        self._pages, self._workers, self._catalog = pages, workers, catalog
        self._found: OrderedDict[tuple[Opened, Opened], dict[str, MatchedSite]] = OrderedDict()
        self._lock = Lock()

    def choose(self, opened: Opened, site: str = "", number: int | None = None) -> str:
        """The harvests with which one can be matched. ``site``, ``number``: whose pages the links lead to."""
        self._catalog.refresh()
        others = [
            {"run": run, "harvest": name, "address": _base(opened, run, name, site, number)}
            for run, name in self._catalog.others(opened)[:RUNS]
        ]
        return self._pages.render("matched_choose.html", opened=opened, others=others, site=site, n=number)

    def overview(self, opened: Opened, other: Opened, page: int) -> str:
        """Every site that both have, with what is matched there."""
        values: dict[str, Any] = {"waiting": "", "wrong": self._refusal(opened, other), "total": None}
        mine, theirs = opened.harvest.sites, other.harvest.sites
        common = [name for name in mine if name in theirs]
        pages = max(1, -(-len(common) // SITES))
        page = min(page, pages)
        shown = common[(page - 1) * SITES : page * SITES]
        found: dict[str, MatchedSite] = {}
        wrong: dict[str, str] = {}
        until = time.monotonic() + PATIENCE_S
        for name in shown if not values["wrong"] else ():
            answer = self._site(opened, other, name, max(0.0, until - time.monotonic()))
            if isinstance(answer, str):
                wrong[name] = answer
                continue
            if answer is None:
                values["waiting"] = f"{WAITING} {len(found):,} of {len(shown):,} sites are done."
                break
            found[name] = answer
        if found and len(found) == len(shown):
            values["total"] = _total(list(found.values()))
        rows = [
            {"site": name, "wrong": wrong.get(name, ""), **(_row(found[name]) if name in found else {})}
            for name in shown
        ]
        only = [
            (opened.run, [name for name in mine if name not in theirs]),
            (other.run, [name for name in theirs if name not in mine]),
        ]
        return self._pages.render(
            "matched.html", opened=opened, other=other, rows=rows, only=[(who, names) for who, names in only if names],
            base=_base(opened, other.run, other.name), back=_base(other, opened.run, opened.name), page=page,
            pages=pages, near=NEAR, half=HALF, **values,
        )  # fmt: skip

    def site(self, opened: Opened, other: Opened, site: str, query: PairQuery, page: int) -> str:
        """The pairs of a site."""
        values: dict[str, Any] = {"waiting": "", "wrong": "", "found": None, "rows": [], "total": 0, "pages": 1}
        answer = self._checked_site(opened, other, site)
        if isinstance(answer, str):
            values["wrong"] = answer
        elif answer is None:
            values["waiting"] = WAITING
        else:
            places = query.chosen(answer)
            values["pages"] = max(1, -(-len(places) // PAGE))
            page = min(page, values["pages"])
            sides = [_Side.of(opened, site), _Side.of(other, site)]
            values |= {
                "found": _row(answer), "total": len(places), "all": len(answer.one),
                "rows": [_pair(answer, int(k), sides) for k in places[(page - 1) * PAGE : page * PAGE]],
                "histogram": similarity_histogram(answer.similarity, answer.random),
                "same_rows": answer.jaccard is not None,
            }  # fmt: skip
        return self._pages.render(
            "matched_site.html", opened=opened, other=other, site=site, query=query, page=page, near=NEAR, half=HALF,
            base=_base(opened, other.run, other.name, site), up=_base(opened, other.run, other.name),
            back=_base(other, opened.run, opened.name, site), most_assigned=ASSIGNED, **values,
        )  # fmt: skip

    def pair(self, opened: Opened, other: Opened, site: str, number: int) -> str:
        """A component beside the one that it is matched with."""
        checked_number(opened, site, number)
        values: dict[str, Any] = {"waiting": "", "wrong": "", "pair": None, "unmatched": ""}
        base = _base(opened, other.run, other.name, site)
        answer = self._checked_site(opened, other, site)
        if isinstance(answer, str):
            values["wrong"] = answer
        elif answer is None:
            values["waiting"] = WAITING
        elif (place := answer.pair_of(number)) is None:
            values["unmatched"] = _why_unmatched(opened, other, answer, number)
        else:
            pair = _pair(answer, place, [_Side.of(opened, site), _Side.of(other, site)])
            near = {
                name: None if not 0 <= k < len(answer.one) else int(answer.one[k])
                for name, k in (("previous", place - 1), ("following", place + 1))
            }
            values |= {"pair": pair, "place": f"{place + 1:,} of {len(answer.one):,}", **near}
            values |= self._beside(opened, other, site, pair)
        return self._pages.render(
            "matched_pair.html", opened=opened, other=other, site=site, n=number, base=base, unit=unit(opened),
            nearest=address(
                opened.run, opened.name, "nearest", site=site, component=number, other=other.run, at=other.name
            ), **values,
        )  # fmt: skip

    def _beside(self, opened: Opened, other: Opened, site: str, pair: dict[str, Any]) -> dict[str, Any]:
        """Both components of a pair: their numbers, tokens, outputs, and their examples, those at which the two do the
        same beside each other."""
        sides = []
        for of, n in ((opened, pair["one"]["number"]), (other, pair["other"]["number"])):
            row = of.harvest.component(site, n)
            history = of.labels.history(site, n)
            sides.append(
                {
                    "opened": of, "n": n, "row": row, "label": history[0].text if history else "",
                    "tokens": of.harvest.tokens(site, n).slice(0, TOKENS).to_pylist(),
                    "outputs": of.harvest.outputs(site, n, OUTPUTS).to_pylist(),
                    "signs": dict(by_sign(of.harvest.examples(site, n))),
                }
            )  # fmt: skip
        signs = ["a > 0", "a < 0"]
        examples = []
        for mine, theirs in zip(signs, signs[::-1] if pair["flipped"] else signs, strict=True):
            lists = [self._examples(side, sign) for side, sign in zip(sides, (mine, theirs), strict=True)]
            if any(found["examples"] for found in lists):
                examples.append(lists)
        return {"sides": sides, "examples": examples}

    def _examples(self, side: dict[str, Any], sign: str) -> dict[str, Any]:
        found: Sequence[Example] = side["signs"].get(sign, [])[:EXAMPLES]
        shown = self._pages.lists(side["opened"], [(sign, found)], side["row"]["activation_max"]) if found else []
        return {"sign": sign, "examples": shown[0]["examples"] if shown else []}

    def _checked_site(self, opened: Opened, other: Opened, site: str) -> MatchedSite | str | None:
        """As `_site`, of a site that one of the two may lack."""
        if wrong := self._refusal(opened, other):
            return wrong
        if site not in other.harvest.sites:
            return f"{other.run} has no {site} in its harvest {other.name}."
        return self._site(opened, other, site, PATIENCE_S)

    def _refusal(self, opened: Opened, other: Opened) -> str:
        """Why two harvests cannot be matched; empty if they can, as far as is known without opening the runs."""
        if not self._catalog.may_be_alike(opened, other):
            return f"{opened.run} and {other.run} decompose different targets: their components cannot be compared."
        if not opened.harvest.sites.keys() & other.harvest.sites.keys():
            one, two = (few_names(list(of.harvest.sites)) for of in (opened, other))
            return f"No site is in both harvests: {opened.run} has {one}, {other.run} has {two}."
        return ""

    def _site(self, opened: Opened, other: Opened, site: str, patience_s: float) -> MatchedSite | str | None:
        """The pairs of a site, or what is wrong; None as of `TextWorker.wait`. What was found once is kept, for
        both sides."""
        with self._lock:
            kept = self._found.setdefault((opened, other), {})
            self._found.move_to_end((opened, other))
            while len(self._found) > KEPT:
                self._found.popitem(last=False)
            turned = self._found.get((other, opened), {}).get(site)
        if site not in kept and turned is not None:
            kept[site] = turned.turned
        if site not in kept:
            folders = opened.harvest.folder.resolve(), other.harvest.folder.resolve()
            question = MatchQuestion(site, folders[0], other_run(other), folders[1], (opened.version, other.version))
            answer = self._workers.of(opened).match(question, patience_s)
            if answer is None:
                return None
            if answer.found is None:
                return clean(answer.wrong, 2000)
            kept[site] = answer.found
        return kept[site]


@dataclass(frozen=True)
class _Side:
    """What a list says of the components of one of the two runs."""

    opened: Opened
    labels: Mapping[int, str]
    tokens: np.ndarray

    @classmethod
    def of(cls, opened: Opened, site: str) -> "_Side":
        return cls(opened, opened.labels.of_site(site), opened.summary(site).tokens)

    def row(self, number: int) -> dict[str, Any]:
        tokens = shown_tokens(self.opened, self.tokens[number].tolist())
        return {"number": number, "label": self.labels.get(number, ""), "tokens": tokens}


def other_run(other: Opened) -> OtherRun:
    """What a process of another run needs to open this one."""
    return OtherRun(other.run_folder, other.harvest.plan.step, tuple(other.harvest.sites))


def _base(opened: Opened, run: str, harvest: str, site: str = "", number: int | None = None) -> str:
    parts = (opened.run, opened.name, "matched", run, harvest)
    return address(*parts, *((site,) if site else ()), *(() if number is None else (number,)))


def _row(found: MatchedSite) -> dict[str, Any]:
    """What the table of the sites says of one."""
    return {
        "firing": found.firing, "pairs": len(found.one), "assigned": found.assigned, "any": found.most > 0,
        "near": found.share(NEAR), "half": found.share(HALF), "mean": found.mean,
        "random_near": found.random_share(NEAR), "random_half": found.random_share(HALF),
        "random_mean": found.random_mean, "flipped": int(found.flipped.sum()),
        "jaccard": None if found.jaccard is None or not len(found.jaccard) else float(found.jaccard.mean()),
    }  # fmt: skip


def _total(found: Sequence[MatchedSite]) -> dict[str, Any]:
    """Over all sites that are shown."""
    most = sum(site.most for site in found)
    near = sum(int((site.similarity > NEAR).sum()) for site in found)
    random = np.concatenate([site.random for site in found])
    return {"most": most, "near": near, "random": float((random > NEAR).mean()) if len(random) else 0.0}


def _pair(found: MatchedSite, place: int, sides: Sequence[_Side]) -> dict[str, Any]:
    return {
        "one": sides[0].row(int(found.one[place])), "other": sides[1].row(int(found.other[place])),
        "similarity": float(found.similarity[place]), "cos_V": float(found.cos_V[place]),
        "cos_U": float(found.cos_U[place]), "flipped": bool(found.flipped[place]),
        "jaccard": None if found.jaccard is None else float(found.jaccard[place]),
    }  # fmt: skip


def _why_unmatched(opened: Opened, other: Opened, found: MatchedSite, number: int) -> str:
    if not opened.harvest.component(found.site, number)["firings"]:
        return "It fires nowhere in this harvest, and only components that fire are matched."
    if not found.assigned:
        return f"It has no mutual nearest neighbour in {other.run}."
    return (
        f"{found.firing[0]:,} components of {opened.run} fire at this site, and {found.firing[1]:,} of {other.run}: "
        "those that would add the least to the sum of similarities have no partner."
    )


def _similarity(given: Mapping[str, str], name: str) -> float | None:
    text = given.get(name, "").strip()
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = 2.0
    if not -1 <= value <= 1:
        raise UserError(f"{name}: '{printable(text, 40)}' should be a number from -1 to 1")
    return value


def known_harvest(catalog: Catalog, run: str, name: str) -> Opened:
    """The other harvest of an address. Raises NotThere."""
    try:
        return catalog.harvest(run, name)
    except UserError as error:
        raise NotThere(str(error)) from error
