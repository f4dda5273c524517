"""What each page shows: from harvests and labels to the values of a template."""

import math
import re
import unicodedata
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from typing import Any
from urllib.parse import quote, urlencode

import numpy as np
import pyarrow as pa
from markupsafe import Markup

from param_decomp_lab.browse.catalog import Catalog, Opened, RunEntry, user_name
from param_decomp_lab.browse.chosen import Chosen, around
from param_decomp_lab.browse.component_list import (
    LABELLED,
    PAGE,
    SORTS,
    Query,
    find_all_components,
    find_components,
    matching_tokens,
)
from param_decomp_lab.browse.plots import ACROSS, DOWN, activation_histogram, importance_histogram, site_map
from param_decomp_lab.browse.text_worker import LONGEST as LONGEST_TEXT
from param_decomp_lab.browse.text_worker import PLACES
from param_decomp_lab.data.token_names import visible
from param_decomp_lab.errors import UserError
from param_decomp_lab.harvest.files import Example, Summary
from param_decomp_lab.harvest.files.labels import LONGEST, LONGEST_NAME
from param_decomp_lab.harvest.files.scores import CHANCE
from param_decomp_lab.harvest.files.tables import AT_ONE, RARE_TOKEN
from param_decomp_lab.report.verdict import BESIDE_BASELINES, HeadlineCard, sentence, verdict
from param_decomp_lab.runs.evaluation_rows import L0, l0_table
from param_decomp_lab.runs.folder import CONFIG_FILE
from param_decomp_lab.runs.listing import RunStatus
from param_decomp_lab.runs.position_attack import find_position_attack
from param_decomp_lab.runs.series import series_by_key
from param_decomp_lab.safe_io.printable import printable
from param_decomp_lab.safe_io.yaml_text import read_mapping
from param_decomp_lab.schema.site_names import expert_of
from param_decomp_lab.ui.charts import Series
from param_decomp_lab.ui.numbers import amount, number, percent, signed
from param_decomp_lab.ui.templates import templates_beside

RUNS = 20
"""Runs of a page."""
RARE_FIRINGS = 100
"""Ratios of components that fire less often are of little meaning."""
TOKENS_SHOWN = 12
OF_SIGN = 8
"""Tokens of each sign of a that are shown."""
CO_FIRING = 12
THIRDS = ("upper third", "middle third", "lower third")
LABEL_CHARACTERS = 80
"""Characters of a label in a list."""
AVERAGES_SHOWN = 10
GROUP_MEMBERS = 12
"""Members of its group that a component's page names."""
SCORES_SHOWN = 12
SITES = 200
"""Sites of a page."""
BEFORE_UNSEEN, AFTER_UNSEEN, NAMED_UNSEEN = 20, 60, 6
"""How much of a text with invisible characters is shown before and after the first, and how many are named."""
_UNHELD = re.compile("[\x00\ud800-\udfff]")


class NotThere(UserError):
    """An address of something that does not exist."""


class Pages:
    """Renders the pages of a catalog. ``static``: the address of the style sheet and the script. ``only``: what a copy
    without a server has; its pages have no forms."""

    def __init__(self, catalog: Catalog, static: str, only: Chosen | None = None) -> None:
        self.catalog, self.only = catalog, only
        self._templates = templates_beside(__file__)
        self._templates.globals.update(static=static, url=address, range=range, copy=only is not None)
        self._templates.filters.update(
            number=number,
            percent=percent,
            amount=amount,
            clean=clean,
            typed=typed,
            brief=brief,
            signed=signed,
            breakable=breakable,
        )

    def render(self, template: str, **values: Any) -> str:
        return self._templates.get_template(template).render(**values)

    def message(self, title: str, text: str) -> str:
        return self.render("message.html", title=title, text=clean(text, 2000))

    # --- runs ---

    def runs(self, page: int) -> str:
        self.catalog.refresh()
        names = list(self.catalog.runs)
        pages = max(1, math.ceil(len(names) / RUNS))
        page = min(page, pages)
        shown = [self._run_row(self.catalog.runs[name]) for name in names[(page - 1) * RUNS : page * RUNS]]
        return self.render("runs.html", runs=shown, page=page, pages=pages, total=len(names))

    def _run_row(self, run: RunEntry) -> dict[str, Any]:
        status, harvests, beside = run.status, [], ""
        for name in run.harvests:
            try:
                opened = self.catalog.harvest(run.name, name)
                plan = opened.harvest.plan
                harvests.append({"name": name, "plan": plan, "C": sum(site.C for site in plan.sites), "wrong": ""})
                beside = beside or (name if self.catalog.others(opened) else "")
            except UserError as error:
                harvests.append({"name": name, "wrong": clean(str(error), 500)})
        return {
            "name": run.name, "folder": str(run.folder), "status": status, "harvests": harvests,
            "main": _headline(status), "beside": beside,
        }  # fmt: skip

    # --- a harvest ---

    def harvest(self, opened: Opened, page: int) -> str:
        plan = opened.harvest.plan
        status = self.catalog.run(opened.run).status
        series = series_by_key([{"step": 0, **status.last}])
        l0 = l0_table(series, {site.name: site.C for site in plan.sites})
        labelled = opened.labels.count()
        pages = max(1, math.ceil(len(plan.sites) / SITES))
        page = min(page, pages)
        rows = []
        for site in plan.sites[(page - 1) * SITES : page * SITES]:
            logged = next((s for s in l0.sites if s.name == site.name), None) if l0 else None
            rows.append({"site": site, "labelled": labelled.get(site.name, 0), "logged": logged})
        return self.render(
            "harvest.html", opened=opened, plan=plan, status=status, rows=rows, sentence=sentence(series, l0),
            cards=self._cards(opened, status, series, l0), unit=unit(opened), labelled=sum(labelled.values()),
            C=sum(site.C for site in plan.sites), page=page, pages=pages,
            others=self._others(opened), copied=0 if self.only is None else self.only.count,
            experts=l0 is not None and l0.has_experts,
        )  # fmt: skip

    def _cards(
        self, opened: Opened, status: RunStatus, series: Mapping[str, Series], l0: L0 | None
    ) -> list[HeadlineCard]:
        config: Mapping[str, Any] = {}
        with suppress(UserError):  # damaged: the numbers are shown without what they are about
            config = read_mapping(opened.run_folder / CONFIG_FILE, "the configuration of a run")
        cards = verdict(series, config, l0, find_position_attack(opened.run_folder), status.step)
        if self.only is None:
            return cards
        # A copy has no page of baselines.
        return [replace(card, rule="") if card.rule == BESIDE_BASELINES else card for card in cards]

    def _others(self, opened: Opened) -> list[tuple[str, str]]:
        """Harvests that one can be matched with; a copy has none."""
        return [] if self.only is not None else self.catalog.others(opened)

    def _routed(self, opened: Opened, site: str) -> float | None:
        """The share of the positions that take the expert of a matrix, as the run logged it; None for a site that
        exists everywhere."""
        return self.catalog.run(opened.run).status.last.get(f"eval/routed/{expert_of(site)}")

    # --- a site ---

    def site(self, opened: Opened, site: str, query: Query, page: int) -> str:
        where = opened.harvest.site(site)
        numbers = find_components(opened, site, query)
        if self.only is not None:
            numbers = numbers[np.isin(numbers, self.only.of_site(site))]
        summary, labels = opened.summary(site), opened.labels.of_site(site)
        pages = max(1, math.ceil(len(numbers) / PAGE))
        page = min(page, pages)
        shown = numbers[(page - 1) * PAGE : page * PAGE]
        rows = [_list_row(opened, site, n, labels.get(n, ""), summary, n) for n in shown.tolist()]
        base = (opened.run, opened.name, "sites", site)

        def of_range(density: tuple[float, float], importance: tuple[float, float]) -> str:
            ranges = (("density", *density), ("importance", *importance))
            return address(*base, **Query(query.sort, query.ascending, query.search, query.labelled, ranges).address)

        return self.render(
            "site.html", opened=opened, site=where, base=base, rows=rows, page=page, pages=pages, total=len(numbers),
            map=site_map(summary, numbers, lambda n: address(*base, n), of_range), across=ACROSS, down=DOWN,
            alive=int((summary.firings > 0).sum()), l0=float(summary.density.sum()), n_labels=len(labels),
            neighbours=_site_neighbours(opened, site), routed=self._routed(opened, site), **_list_values(opened, query),
        )  # fmt: skip

    def all_components(self, opened: Opened, query: Query, page: int) -> str:
        """The components of all sites in one list."""
        numbers = find_all_components(opened, query)
        pages = max(1, math.ceil(len(numbers) / PAGE))
        page = min(page, pages)
        shown = numbers[(page - 1) * PAGE : page * PAGE]
        named = opened.harvest.index.named(shown)
        labels = {site: opened.labels.of_site(site) for site in {site for site, _ in named}}
        everything = opened.all_components
        rows = [
            _list_row(opened, site, n, labels[site].get(n, ""), everything.summary, k)
            for k, (site, n) in zip(shown.tolist(), named, strict=True)
        ]
        return self.render(
            "all_components.html", opened=opened, site=None, base=(opened.run, opened.name, "components"), rows=rows,
            page=page, pages=pages, total=len(numbers), C=len(opened.harvest.index), alive=everything.alive,
            l0=everything.l0, n_labels=sum(opened.labels.count().values()), **_list_values(opened, query),
        )  # fmt: skip

    # --- a component ---

    def component(self, opened: Opened, site: str, n: int, query: Query, given: bool) -> str:
        """``given``: whether the address had a query, whose order previous and next then follow."""
        harvest, plan = opened.harvest, opened.harvest.plan
        where = harvest.site(site)
        checked_number(opened, site, n)
        row = harvest.component(site, n)
        tokens, outputs = harvest.tokens(site, n), harvest.outputs(site, n)
        weights, co_firing = harvest.weights(site, n), harvest.co_firing(site, n, CO_FIRING)
        labels = opened.labels
        previous, following, place = _neighbours(opened, site, n, query if given else None, self.only)
        examples, history = harvest.examples(site, n), labels.history(site, n)
        return self.render(
            "component.html", opened=opened, plan=plan, site=where, n=n, row=row, query=query if given else None,
            previous=previous, following=following, place=place, history=history,
            scores=_scores(opened, site, n, history[0].text if history else ""),
            importances=importance_histogram(row["importance_histogram"]),
            activations=activation_histogram(row["activation_histogram"]),
            top=self.lists(opened, by_sign(examples), row["activation_max"]),
            uniform=self.lists(opened, by_third(examples), row["activation_max"]),
            id=f"{site}:{n}", python="" if self.only is not None else _in_python(opened, site, n),
            at_one=AT_ONE, ranked_by_a=plan.format > 1,
            tokens=_token_rows(tokens), outputs=outputs.to_pylist(), signs=harvest.by_sign(site, n, OF_SIGN),
            co_firing=[
                {**c, "label": opened.labels.history(c["site"], c["component"])[:1]} for c in co_firing.to_pylist()
            ],
            promoted=_signed(opened, weights, "promoted"), suppressed=_signed(opened, weights, "suppressed"),
            neurons=[
                (name, list(zip(weights[key], weights[cosines], strict=True)))
                for name, key, cosines in (
                    ("read by V", "inputs", "input_cosines"), ("written by U", "outputs", "output_cosines")
                )
            ],
            rare=row["firings"] < RARE_FIRINGS, unit=unit(opened), author=user_name(),
            routed=self._routed(opened, site), longest=LONGEST, longest_name=LONGEST_NAME,
            longest_text=LONGEST_TEXT, places=PLACES,
            others=self._others(opened),
            group=_group_of(opened, site, n), shown_members=GROUP_MEMBERS, averages=_averages(opened, site, n),
        )  # fmt: skip

    def lists(
        self, opened: Opened, lists: Sequence[tuple[str, Sequence[Example]]], largest: float
    ) -> list[dict[str, Any]]:
        """Lists of examples that are sorted by ``λ · |a|``, with the values of it between which each lies. A copy may
        have fewer."""
        most = None if self.only is None else self.only.examples
        return [
            {
                "title": title, "examples": [self._example(opened, e, largest) for e in found[:most]],
                "most": _size(found[0]), "least": _size(found[-1]),
            }
            for title, found in lists
        ]  # fmt: skip

    def _example(self, opened: Opened, example: Example, largest: float) -> dict[str, Any]:
        if opened.harvest.plan.inputs == "features":
            values = opened.harvest.row(example.row)
            named = zip(example.names, example.tokens, strict=True)
            context = Markup(", ").join(f"{name} = {values[feature]:.3g}" for name, feature in named)
        else:
            tokens = None if self.only is None else self.only.context
            context = (example if tokens is None else example.near(tokens)).marked(max(largest, 1e-30))
        return {"context": context, "importance": example.importance, "activation": example.activation}


def _list_values(opened: Opened, query: Query) -> dict[str, Any]:
    """What every list of components needs of what was asked."""
    tokens = matching_tokens(opened, query.search) if query.search else np.zeros(0, int)
    return {
        "query": query, "sorts": SORTS, "labelled": LABELLED, "unit": unit(opened), "n_matched": len(tokens),
        "matched": shown_tokens(opened, tokens[:8].tolist()),
    }  # fmt: skip


def _list_row(opened: Opened, site: str, n: int, label: str, summary: Summary, at: int) -> dict[str, Any]:
    """A component in a list; ``at``: its place in ``summary``."""
    return {
        "site": site, "number": n, "label": label, "density": float(summary.density[at]),
        "importance_mean": float(summary.importance_mean[at]), "importance_max": float(summary.importance_max[at]),
        "activation_mean": float(summary.activation_mean[at]), "activation_max": float(summary.activation_max[at]),
        "tokens": shown_tokens(opened, summary.tokens[at].tolist()),
    }  # fmt: skip


def checked_number(opened: Opened, site: str, n: int) -> None:
    """Raises NotThere for a component that a site does not have."""
    C = opened.harvest.site(site).C
    if not 0 <= n < C:
        raise NotThere(f"{site} has components 0 to {C - 1:,}, and no component {n:,}")


def _in_python(opened: Opened, site: str, n: int) -> str:
    """Lines that open the component."""
    opens = f"run = load_run({str(opened.run_folder)!r}, step={opened.harvest.plan.step})"
    return f"from param_decomp_lab import load_run\n\n{opens}\ncomponent = run.component({site!r}, {n})"


def by_sign(examples: Sequence[Example]) -> list[tuple[str, list[Example]]]:
    """The top examples of each sign of a that has any, those of largest ``λ · |a|`` first. Places where a = 0, so that
    the component does nothing, are left out."""
    top = sorted((e for e in examples if e.kind == "top"), key=_size, reverse=True)
    signs = ("a > 0", [e for e in top if e.activation > 0]), ("a < 0", [e for e in top if e.activation < 0])
    return [(title, found) for title, found in signs if found]


def by_third(examples: Sequence[Example]) -> list[tuple[str, list[Example]]]:
    """The uniform sample in thirds by ``λ · |a|``, the largest first. Up to chance, the thirds of a uniform sample are
    those of all firings. Fewer than three where there are fewer examples."""
    found = sorted((e for e in examples if e.kind == "uniform"), key=_size, reverse=True)
    ends = [round(len(found) * k / len(THIRDS)) for k in range(len(THIRDS) + 1)]
    return [(title, found[a:b]) for title, (a, b) in zip(THIRDS, pairwise(ends), strict=True) if a < b]


def _size(example: Example) -> float:
    return example.importance * abs(example.activation)


def _group_of(opened: Opened, site: str, n: int) -> dict[str, Any] | None:
    """The group of a component: its number and its other members, or what is wrong with the groups; None where it has
    none."""
    try:
        groups = opened.groups
        number = None if groups is None else groups.group_of(site, n)
        if groups is None or number is None:
            return None
        others = [member for member in groups.members(number) if member != (site, n)]
    except UserError as error:  # a component is shown without damaged groups
        return {"wrong": str(error)}
    return {"number": number, "others": others, "density": float(groups.densities[number]), "wrong": ""}


def _averages(opened: Opened, site: str, n: int) -> dict[str, Any] | None:
    """What leads to a component on average and what it leads to, or what is wrong with the averages; None without
    any."""
    try:
        averages = opened.averages
        if averages is None:
            return None
        into, out = averages.into(site, n)[:AVERAGES_SHOWN], averages.out_of(site, n)[:AVERAGES_SHOWN]
    except UserError as error:
        return {"wrong": str(error)}
    labels = {name: opened.labels.of_site(name) for name in {edge.site for edge in (*into, *out)}}
    lists = [
        (title, [(edge, labels[edge.site].get(edge.component, "")) for edge in edges])
        for title, edges in (("comes from", into), ("leads to", out))
    ]
    return {"wrong": "", "lists": lists, "rows": averages.options.rows, "any": bool(into or out)}


def address(*parts: object, **parameters: object) -> str:
    """The address of a page: nothing in a part can leave it. A part may be several, as a tuple."""
    flat = [one for part in parts for one in (part if isinstance(part, tuple) else (part,))]
    path = "/" + "/".join(quote(str(part), safe="") for part in flat)
    given = {name: value for name, value in parameters.items() if value not in ("", None)}
    return f"{path}?{urlencode(given)}" if given else path


def clean(text: object, limit: int = 10_000) -> str:
    """Text from outside, without what reverses or hides text."""
    return printable(str(text), limit)


def line_feeds(text: str) -> str:
    """A text whose lines all end with a line feed."""
    return text.replace("\r\n", "\n").replace("\r", "\n")


def typed(text: object) -> str:
    """`clean` for a text that is sent back from here: tabs stay, and lines end as `line_feeds` makes them, so that it
    is the same text the next time."""
    return "\t".join(map(clean, line_feeds(str(text)).split("\t")))


def as_asked(text: str) -> str:
    """A text that was run, for the box and the addresses that run it again: unchanged, since an escape would be other
    characters the next time; `unseen` tells of what does not show. What no page can hold is escaped."""
    return _UNHELD.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), line_feeds(text))


def unseen(text: str) -> dict[str, str]:
    """What a text, as it was run, has that is invisible or looks like a space, by name, and the text from there on,
    with all of it made visible; empty if there is none."""
    text = line_feeds(text)
    plain = text.replace("\n", "").replace("\t", "")
    found = sorted({character for character in plain if visible(character) != character})
    if not found:
        return {}
    first = min(text.index(character) for character in found)
    start = max(0, first - BEFORE_UNSEEN)
    shown = visible(text[start : first + AFTER_UNSEEN])
    ends = "…" if start else "", "…" if len(text) > first + AFTER_UNSEEN else ""
    names = [f"U+{ord(c):04X} {unicodedata.name(c, '')}".strip() for c in found]
    more = f" and {len(names) - NAMED_UNSEEN} more" if len(names) > NAMED_UNSEEN else ""
    return {"names": ", ".join(names[:NAMED_UNSEEN]) + more, "shown": f"{ends[0]}{shown}{ends[1]}"}


def brief(text: object) -> str:
    """The beginning of a text from outside, for a list."""
    said = clean(text)
    return said if len(said) <= LABEL_CHARACTERS else f"{said[: LABEL_CHARACTERS - 1].rstrip()}…"


def breakable(name: str) -> Markup:
    """The name of a site, which a line may break after its dots."""
    return Markup(".<wbr>").join(name.split("."))


def shown_tokens(opened: Opened, ids: Sequence[int]) -> list[str]:
    """Without those that only fill up."""
    return opened.harvest.names([i for i in ids if i >= 0])


def unit(opened: Opened) -> str:
    return "tokens" if opened.harvest.plan.inputs == "tokens" else "features"


def _token_rows(tokens: pa.Table) -> dict[str, Any]:
    """The most frequent inputs, and those most raised among the frequent ones."""
    rows = tokens.to_pylist()
    common = [row for row in rows if row["total"] >= RARE_TOKEN]
    raised = sorted(common, key=lambda row: (-row["pmi"], -row["n"]))
    return {"frequent": rows[:TOKENS_SHOWN], "raised": raised[:TOKENS_SHOWN], "rare": len(rows) - len(common)}


def _signed(opened: Opened, weights: Mapping[str, Any], name: str) -> list[tuple[str, float]]:
    return list(zip(opened.harvest.names(weights[name]), weights[f"{name}_logits"], strict=True))


def _scores(opened: Opened, site: str, n: int, label: str) -> list[dict[str, Any]]:
    """Scores of the label that it has now, and those that need none; the newest of each judge."""
    rows = []
    for score in opened.scores.of_component(site, n):
        if score.score is not None and score.kind in CHANCE and score.label in ("", label):
            rows.append(
                {**score._asdict(), "judge": clean(score.judge, LABEL_CHARACTERS), "chance": CHANCE[score.kind]}
            )
    return rows[:SCORES_SHOWN]


def _neighbours(
    opened: Opened, site: str, n: int, query: Query | None, only: Chosen | None
) -> tuple[int | None, int | None, str]:
    """The components before and after this one in the order of ``query``, or by number; and where it stands."""
    C = opened.harvest.site(site).C
    if only is not None:
        return *around(only.of_site(site), n), ""
    if query is not None:
        numbers = find_components(opened, site, query)
        at = np.flatnonzero(numbers == n)
        if len(at):
            k = int(at[0])
            previous = int(numbers[k - 1]) if k else None
            return previous, int(numbers[k + 1]) if k + 1 < len(numbers) else None, f"{k + 1:,} of {len(numbers):,}"
    return n - 1 if n else None, n + 1 if n + 1 < C else None, ""


def _site_neighbours(opened: Opened, site: str) -> tuple[str | None, str | None]:
    names = list(opened.harvest.sites)
    k = names.index(site)
    return names[k - 1] if k else None, names[k + 1] if k + 1 < len(names) else None


def _headline(status: RunStatus) -> list[tuple[str, str]]:
    return [(name, number(value)) for name, value in status.headline.items()]
