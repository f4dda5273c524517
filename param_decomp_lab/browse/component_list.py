"""The components of a site, or of all, in the order and selection that a reader asked for."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from jaxtyping import Bool, Float, Int

from param_decomp_lab.browse.catalog import Opened
from param_decomp_lab.errors import UserError
from param_decomp_lab.harvest.files import Summary
from param_decomp_lab.harvest.files import search as search_files
from param_decomp_lab.harvest.files.search import match_by_tokens, trimmed
from param_decomp_lab.harvest.files.tables import table_file
from param_decomp_lab.safe_io.printable import printable

PAGE = 50
"""Components of a page."""
SORTS = {
    "importance": "mean λ",
    "largest": "max λ",
    "density": "density",
    "activation": "mean |a|",
    "largest_activation": "max |a|",
    "unlabelled": "unlabelled first",
    "number": "number",
    "match": "best match",
}
RANGES = {"density": "density", "importance": "mean λ"}
LABELLED = {"any": "all", "yes": "labelled", "no": "unlabelled"}
LONGEST_SEARCH = 200


@dataclass(frozen=True)
class Query:
    """What a reader asked for; in addresses as ``sort=density&search=the``. ``ranges``: least and most, by name."""

    sort: str = ""
    ascending: bool = False
    search: str = ""
    labelled: str = "any"
    ranges: tuple[tuple[str, float, float], ...] = ()

    @classmethod
    def parse(cls, given: Mapping[str, str]) -> "Query":
        """Raises UserError for what cannot be understood."""
        sort, labelled, search = given.get("sort", ""), given.get("labelled", "any") or "any", given.get("search", "")
        if sort and sort not in SORTS:
            raise UserError(f"sort: '{printable(sort, 40)}' is not one of {', '.join(SORTS)}")
        if labelled not in LABELLED:
            raise UserError(f"labelled: '{printable(labelled, 40)}' is not one of {', '.join(LABELLED)}")
        if len(search) > LONGEST_SEARCH:
            raise UserError(f"a search may have {LONGEST_SEARCH} characters; this one has {len(search):,}")
        ranges = []
        for name in RANGES:
            least, most = (_bound(given, f"{end}_{name}") for end in ("min", "max"))
            if least is not None or most is not None:
                ranges.append((name, 0.0 if least is None else least, np.inf if most is None else most))
        return cls(sort, given.get("order") == "up", trimmed(search), labelled, tuple(ranges))

    @property
    def address(self) -> dict[str, str]:
        """As parameters of an address; what is as usual is left out."""
        found = {"sort": self.sort, "order": "up" if self.ascending else "", "search": self.search}
        found["labelled"] = "" if self.labelled == "any" else self.labelled
        for name, least, most in self.ranges:
            found[f"min_{name}"] = f"{least:.6g}" if least > 0 else ""
            found[f"max_{name}"] = f"{most:.6g}" if most < np.inf else ""
        return {name: value for name, value in found.items() if value}

    @property
    def sorted_by(self) -> str:
        return self.sort or ("match" if self.search else "importance")

    def by(self, sort: str) -> "Query":
        """Sorted by this; the other way round if it already is."""
        return replace(self, sort=sort, ascending=not self.ascending if sort == self.sorted_by else sort == "number")


def find_components(opened: Opened, site: str, query: Query) -> Int[np.ndarray, " n"]:
    """Numbers of the site's components that fit, in order."""
    summary = opened.summary(site)
    labels = opened.labels.of_site(site)
    return _find(opened, site, query, tuple(sorted(labels.items())), summary.firings.size)


@lru_cache(maxsize=16)
def _find(opened: Opened, site: str, query: Query, labels: tuple[tuple[int, str], ...], C: int) -> np.ndarray:
    summary, named = opened.summary(site), {number: label for number, label in labels if 0 <= number < C}
    match = np.zeros(C)
    if query.search:
        match = _match_by_tokens(opened, site, query.search, summary)
        _add_labels(match, query.search, named)
    labelled = _marked(named, C)
    kept = _kept(summary, query, labelled, match)
    return _in_order(np.arange(C) if kept is None else np.flatnonzero(kept), summary, query, labelled, match)


def find_all_components(opened: Opened, query: Query) -> Int[np.ndarray, " n"]:
    """Numbers, through all sites, of the components of a harvest that fit, in order; equal ones by number."""
    everything = opened.all_components
    summary, C = everything.summary, len(everything.summary.firings)
    named = {
        number: label
        for site, component, label in opened.labels.of_all()
        if (number := everything.number(site, component)) is not None
    }
    labelled, match = _marked(named, C), np.zeros(C if query.search else 0)
    if query.search:
        fits, values = everything.token_index.find(matching_tokens(opened, query.search))
        match[fits] = values
        _add_labels(match, query.search, named)
    kept = _kept(summary, query, labelled, match)
    if query.search and kept is not None:
        return _in_order(np.flatnonzero(kept), summary, query, labelled, match)
    name = _ORDERS.get(query.sorted_by, "")
    if not name:  # by number; or by a match, which without a search is 0 for all
        numbers = np.arange(C, dtype=np.uint32) if kept is None else np.flatnonzero(kept)
        return numbers[::-1] if query.sorted_by == "number" and not query.ascending else numbers
    # Of so many, a filter of an order that is kept takes a tenth of the time of sorting.
    order = everything.in_order(name, query.ascending)
    if query.sorted_by == "unlabelled" and named:
        last = labelled[order]
        parts = order[~last], order[last]
        order = np.concatenate(parts[::-1] if query.ascending else parts)
    return order if kept is None else order[kept[order]]


_ORDERS = {
    "importance": "importance_mean",
    "largest": "importance_max",
    "density": "density",
    "activation": "activation_mean",
    "largest_activation": "activation_max",
    "unlabelled": "importance_mean",
}
"""Fields of `Summary` by which a list is sorted."""


def _marked(labels: Mapping[int, str], C: int) -> Bool[np.ndarray, " C"]:
    marked = np.zeros(C, bool)
    marked[list(labels)] = True
    return marked


def _kept(summary: Summary, query: Query, labelled: np.ndarray, match: np.ndarray) -> Bool[np.ndarray, " C"] | None:
    """Which components fit; None for all."""
    tests = []
    if query.labelled != "any":
        tests.append(labelled == (query.labelled == "yes"))
    for name, least, most in query.ranges:
        values = {"density": summary.density, "importance": summary.importance_mean}[name]
        tests.append((values >= least) & (values <= most))
    if query.search:
        tests.append(match > 0)
    return np.logical_and.reduce(tests) if tests else None


def _in_order(
    numbers: Int[np.ndarray, " n"], summary: Summary, query: Query, labelled: np.ndarray, match: np.ndarray
) -> Int[np.ndarray, " n"]:
    if query.sorted_by == "number":
        return numbers if query.ascending else numbers[::-1]
    value = (match if query.sorted_by == "match" else getattr(summary, _ORDERS[query.sorted_by]))[numbers]
    if query.sorted_by == "unlabelled":
        value = value - 2.0 * labelled[numbers]  # a mean λ is below 2
    return numbers[np.argsort(value if query.ascending else -value, kind="stable")]


def _match_by_tokens(opened: Opened, site: str, search: str, summary: Summary) -> Float[np.ndarray, " C"]:
    """The share of each component's firings that are on the tokens of a search, as far as it is raised there. 0 where
    it does not fit."""
    harvest = opened.harvest
    return match_by_tokens(
        table_file(harvest.folder, "tokens", harvest.sites[site]), matching_tokens(opened, search), summary.firings,
        harvest.input_totals, harvest.plan.n_positions,
    )  # fmt: skip


def _add_labels(match: Float[np.ndarray, " C"], search: str, labels: Mapping[int, str]) -> None:
    """Puts labels that contain a search before everything that fires on its tokens."""
    for number, label in labels.items():
        if search.casefold() in label.casefold():
            match[number] += 100


def matching_tokens(opened: Opened, search: str) -> Int[np.ndarray, " n"]:
    """Tokens that a search means; of a toy, the feature of this number."""
    return search_files.matching_tokens(opened.harvest.vocabulary, opened.harvest.plan.n_inputs, search)


def _bound(given: Mapping[str, str], name: str) -> float | None:
    text = given.get(name, "").strip()
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < np.inf:
        raise UserError(f"{name}: '{printable(text, 40)}' should be a number from 0 up")
    return value
