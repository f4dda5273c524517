"""The pages of the groups of components that act together."""

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Int

from param_decomp_lab.browse.catalog import Opened
from param_decomp_lab.browse.chosen import around
from param_decomp_lab.browse.dendrogram import WIDTH, dendrogram
from param_decomp_lab.browse.pages import NotThere, Pages, shown_tokens
from param_decomp_lab.errors import UserError
from param_decomp_lab.harvest.files import Groups
from param_decomp_lab.harvest.files.tables import RARE_TOKEN
from param_decomp_lab.safe_io.printable import printable

PAGE = 50
"""Groups of a page, and members."""
SITES = 3
"""Sites of a group that are named in the list."""
READ = 12
"""Members whose tokens are read, those that fire most often."""
TOKENS = 16
SORTS = {"members": "members", "density": "density", "sites": "sites", "number": "number"}


@dataclass(frozen=True)
class GroupQuery:
    """How a reader wants the groups sorted; in addresses as ``sort=density&order=up``."""

    sort: str = "members"
    ascending: bool = False

    @classmethod
    def parse(cls, given: Mapping[str, str]) -> "GroupQuery":
        """Raises UserError for an order that there is not."""
        sort = given.get("sort", "") or "members"
        if sort not in SORTS:
            raise UserError(f"sort: '{printable(sort, 40)}' is not one of {', '.join(SORTS)}")
        return cls(sort, given.get("order") == "up")

    @property
    def address(self) -> dict[str, str]:
        """As parameters of an address; what is as usual is left out."""
        return {"sort": "" if self.sort == "members" else self.sort, "order": "up" if self.ascending else ""}

    def by(self, sort: str) -> "GroupQuery":
        """Sorted by this; the other way round if it already is."""
        return GroupQuery(sort, not self.ascending if sort == self.sort else sort == "number")

    def order(self, groups: Groups) -> Int[np.ndarray, " several"]:
        """Numbers of the groups with several members."""
        several = np.flatnonzero(groups.sizes > 1)
        values: dict[str, Any] = {
            "members": groups.sizes, "density": groups.densities, "sites": groups.n_sites,
            "number": np.arange(len(groups)),
        }  # fmt: skip
        value = values[self.sort][several]
        return several[np.argsort(value if self.ascending else -value, kind="stable")]


class GroupPages:
    """Renders the list of a harvest's groups, and the page of one."""

    def __init__(self, pages: Pages) -> None:
        self._pages = pages

    def groups(self, opened: Opened, query: GroupQuery, page: int) -> str:
        groups = opened.groups
        if groups is None:
            return self._pages.render("groups.html", opened=opened, groups=None)
        numbers = query.order(groups)
        several, only = len(numbers), self._pages.only
        if only is not None:
            numbers = numbers[np.isin(numbers, only.groups(groups))]
        pages = max(1, math.ceil(len(numbers) / PAGE))
        page = min(page, pages)
        rows = []
        for n in numbers[(page - 1) * PAGE : page * PAGE].tolist():
            members = groups.members(n)
            sites = list(dict.fromkeys(site for site, _ in members))
            labels = [label for site, c in members[:READ] if (label := opened.labels.of_site(site).get(c))]
            rows.append(
                {
                    "number": n, "members": int(groups.sizes[n]), "density": float(groups.densities[n]),
                    "sites": sites[:SITES], "more": len(sites) - SITES, "n_sites": len(sites),
                    "label": labels[0] if labels else "", "first": members[0],
                }
            )  # fmt: skip
        return self._pages.render(
            "groups.html", opened=opened, groups=groups, query=query, rows=rows, page=page, pages=pages,
            total=len(numbers), apart=sum(s.C for s in opened.harvest.plan.sites) - len(groups.components),
            others=[result for seed, result in enumerate(groups.results) if seed != groups.seed],
            several=several, alone=len(groups) - several, sampled=opened.harvest.n_sampled,
        )  # fmt: skip

    def group(self, opened: Opened, number: int, page: int) -> str:
        groups = opened.groups
        if groups is None:
            raise NotThere(f"harvest {opened.name} has no groups; make them with `pd cluster`")
        if not 0 <= number < len(groups):
            raise NotThere(f"there are groups 0 to {len(groups) - 1:,}, and no group {number:,}")
        members, densities = groups.members(number), groups.member_densities(number)
        every, only = np.arange(len(groups)), self._pages.only
        previous, following = around(every if only is None else only.groups(groups), number)
        pages = max(1, math.ceil(len(members) / PAGE))
        page = min(page, pages)
        shown = slice((page - 1) * PAGE, page * PAGE)
        rows = [
            {
                "site": site, "number": c, "density": float(density), "label": opened.labels.of_site(site).get(c, ""),
                "tokens": shown_tokens(opened, opened.summary(site).tokens[c].tolist()),
            }
            for (site, c), density in zip(members[shown], densities[shown].tolist(), strict=True)
        ]  # fmt: skip
        leaves, merges = groups.merges_of(number)
        tree = dendrogram(leaves.tolist(), merges, opened.harvest.n_sampled)
        names = dict(zip(leaves.tolist(), members, strict=True))
        most_often = [members[k] for k in np.argsort(-densities, kind="stable")[:READ].tolist()]
        return self._pages.render(
            "group.html", opened=opened, groups=groups, n=number, previous=previous, following=following,
            rows=rows, page=page, pages=pages, total=len(members),
            density=float(groups.densities[number]), n_sites=int(groups.n_sites[number]), tree=tree, names=names,
            width=WIDTH, tokens=_common_tokens(opened, most_often), read=len(most_often),
            unit="tokens" if opened.harvest.plan.inputs == "tokens" else "features",
            sum=float(densities.sum()), sampled=opened.harvest.n_sampled,
            longest=max(len(f"{site} {c}") for site, c in members),
        )  # fmt: skip


def _common_tokens(opened: Opened, members: list[tuple[str, int]]) -> list[dict[str, Any]]:
    """Inputs that many of the members fire at, more often than elsewhere: by how many, and by their share of the
    members' firings times PMI."""
    found: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for site, c in members:
        table = opened.harvest.tokens(site, c)
        columns = (table[name].to_pylist() for name in ("token", "precision", "pmi", "total"))
        for token, precision, pmi, total in zip(*columns, strict=True):
            if total >= RARE_TOKEN and pmi > 0:
                found[token].append((precision, pmi))
    rows: list[dict[str, Any]] = [
        {
            "token": token, "members": len(values), "precision": sum(p for p, _ in values) / len(members),
            "pmi": sum(pmi for _, pmi in values) / len(values),
        }
        for token, values in found.items()
    ]  # fmt: skip
    rows.sort(key=lambda row: (-row["precision"] * row["pmi"], row["token"]))
    rows = rows[:TOKENS]
    words = opened.harvest.names([row["token"] for row in rows])
    return [{**row, "text": text} for row, text in zip(rows, words, strict=True)]
