"""The components of a site in the order and selection that a reader asked for."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

from param_decomp_lab.browse.catalog import Opened
from param_decomp_lab.errors import UserError
from param_decomp_lab.harvest.files import Summary
from param_decomp_lab.harvest.files import search as search_files
from param_decomp_lab.harvest.files.search import match_by_tokens
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
        return cls(sort, given.get("order") == "up", search.strip(), labelled, tuple(ranges))

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
    summary = opened.summary(site)
    kept = np.ones(C, bool)
    labelled = np.zeros(C, bool)
    labelled[[number for number, _ in labels if 0 <= number < C]] = True
    if query.labelled != "any":
        kept &= labelled == (query.labelled == "yes")
    for name, least, most in query.ranges:
        values = {"density": summary.density, "importance": summary.importance_mean}[name]
        kept &= (values >= least) & (values <= most)
    match = np.zeros(C)
    if query.search:
        match = _match(opened, site, query.search, dict(labels), summary)
        kept &= match > 0
    numbers = np.flatnonzero(kept)
    if query.sorted_by == "number":
        order = numbers if query.ascending else numbers[::-1]
    else:
        value = _VALUES[query.sorted_by](summary, labelled, match)[numbers]
        order = numbers[np.argsort(value if query.ascending else -value, kind="stable")]
    return order


_VALUES: dict[str, Callable[[Summary, Bool[np.ndarray, " C"], Float[np.ndarray, " C"]], Any]] = {
    "importance": lambda summary, labelled, match: summary.importance_mean,
    "largest": lambda summary, labelled, match: summary.importance_max,
    "density": lambda summary, labelled, match: summary.density,
    "activation": lambda summary, labelled, match: summary.activation_mean,
    "largest_activation": lambda summary, labelled, match: summary.activation_max,
    # The unlabelled ones by mean λ, which is below 2, then the labelled ones.
    "unlabelled": lambda summary, labelled, match: summary.importance_mean - 2.0 * labelled,
    "match": lambda summary, labelled, match: match,
}


def _match(opened: Opened, site: str, search: str, labels: dict[int, str], summary: Summary) -> Any:
    """How well each component fits a search: labels that contain it first, then the share of the firings that are on
    such tokens, as far as it is raised there. 0 where it does not fit."""
    harvest = opened.harvest
    found = match_by_tokens(
        table_file(harvest.folder, "tokens", harvest.sites[site]), matching_tokens(opened, search), summary.firings,
        harvest.input_totals, harvest.plan.n_positions,
    )  # fmt: skip
    for number, label in labels.items():
        if number < len(found) and search.casefold() in label.casefold():
            found[number] += 100
    return found


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
