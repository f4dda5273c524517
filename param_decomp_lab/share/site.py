"""`pd share site`: the browser's pages of some components as a folder of files, which need no server."""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from rich.console import Console

from param_decomp_lab.browse import group_pages, pages
from param_decomp_lab.browse.catalog import Catalog, Opened
from param_decomp_lab.browse.chosen import Chosen
from param_decomp_lab.browse.component_list import PAGE, Query
from param_decomp_lab.browse.graph_pages import GraphPages, View
from param_decomp_lab.browse.group_pages import GroupPages, GroupQuery
from param_decomp_lab.browse.pages import Pages
from param_decomp_lab.browse.server import static_files
from param_decomp_lab.browse.text_page import Workers
from param_decomp_lab.errors import UserError
from param_decomp_lab.folders import new_folder, refuse_existing
from param_decomp_lab.graph import Graph
from param_decomp_lab.label.choose import Selection, choose_components
from param_decomp_lab.share.graphs import find_graphs, kept_graphs
from param_decomp_lab.share.json_files import write_json
from param_decomp_lab.share.links import relative_page
from param_decomp_lab.share.shared_run import MARKER, SharedRun
from param_decomp_lab.ui.progress import progress

STATIC = "/static"
MEMBER_PAGES = 10
"""Pages shown of a group's members, which may be tens of thousands."""


@dataclass(frozen=True)
class SiteCopy:
    """What was written."""

    pages: int
    components: int
    graphs: int
    groups: int


def share_site(
    run: SharedRun,
    out: Path,
    components: Sequence[str] = (),
    graphs: Sequence[str] = (),
    most: int = 300,
    examples: int | None = None,
    context: int | None = None,
    *,
    overwrite: bool = False,
    console: Console | None = None,
) -> SiteCopy:
    """Writes pages of a run into the new folder ``out``. ``components``: each ``SITE:1,2,3``; by default the ``most``
    that stand in the graphs or, behind these, matter most. ``graphs``: names of kept graphs; all by default.
    ``examples``: at most so many in each list of a component's page, with at most ``context`` tokens each. Raises
    UserError for what is not there."""
    refuse_existing(out, marker=MARKER, overwrite=overwrite)
    files = _kept(run, graphs)
    numbers = read_components(run, components) if components else default_components(run, files.values(), most)
    chosen = Chosen(numbers, frozenset(path.stem for path in files.values()), examples, context)
    copy = _Copy(run, chosen, files)
    with (
        new_folder(out, marker=MARKER, overwrite=overwrite) as made,
        progress(console or Console(quiet=True)) as report,
    ):
        for done, file in enumerate(copy.pages):
            report("pages", done, len(copy.pages))
            copy.write(made, file)
        for name, (content, _) in static_files().items():
            place = made / STATIC[1:] / name
            place.parent.mkdir(exist_ok=True)
            place.write_bytes(content)
        write_json(made / MARKER, run.about | {"made_by": "pd share site"})
    return SiteCopy(len(copy.pages), chosen.count, len(files), copy.n_groups)


class _Copy:
    """The pages of a copy. ``pages``: what makes each, by file; ``files``: file by address."""

    def __init__(self, run: SharedRun, chosen: Chosen, graphs: Mapping[str, Path]) -> None:
        catalog = Catalog([run.folder])
        entry = next(e for e in catalog.runs.values() if e.folder == run.folder.resolve())
        self._opened: Opened = catalog.harvest(entry.name, run.harvest.folder.resolve().name)
        self._renderer = Pages(catalog, STATIC, chosen)
        self._chosen = chosen
        self._base = f"/{entry.name}/{self._opened.name}"
        self.files = {f"{STATIC}/{name}": f"{STATIC[1:]}/{name}" for name in static_files()}
        self.pages: dict[str, Callable[[], str]] = {}
        self.n_groups = 0
        self._add_sites()
        self._add_groups()
        self._add_graphs(graphs)

    def write(self, folder: Path, file: str) -> None:
        place = folder / file
        place.parent.mkdir(parents=True, exist_ok=True)
        text = relative_page(self.pages[file](), file, self.files)
        place.write_bytes(text.encode("utf-8", "replace"))

    def _add(self, address: str, file: str, page: Callable[[], str]) -> None:
        self.files[self._base + address] = file
        self.pages[file] = page

    def _add_list(self, address: str, file: str, n_pages: int, page: Callable[[int], str]) -> None:
        """The pages of a list; all but the first have their number in the address."""
        self._add(address, file, partial(page, 1))
        for number in range(2, n_pages + 1):
            where = file.replace("index.html", f"page-{number}.html")
            self._add(f"{address}?page={number}", where, partial(page, number))

    def _add_sites(self) -> None:
        opened, renderer, query = self._opened, self._renderer, Query()
        sites = list(opened.harvest.sites)
        self._add_list("", "index.html", _pages(len(sites), pages.SITES), partial(renderer.harvest, opened))
        for site in sites:
            numbers, place = self._chosen.of_site(site), f"sites/{site}"
            show = partial(renderer.site, opened, site, query)
            self._add_list(f"/{place}", f"{place}/index.html", _pages(len(numbers), PAGE), show)
            for n in numbers.tolist():
                show_one = partial(renderer.component, opened, site, n, query, False)
                self._add(f"/{place}/{n}", f"{place}/{n}.html", show_one)

    def _add_groups(self) -> None:
        opened, renderer, groups = self._opened, GroupPages(self._renderer), self._opened.groups
        numbers = [] if groups is None else self._chosen.groups(groups).tolist()
        self.n_groups = len(numbers)
        show = partial(renderer.groups, opened, GroupQuery())
        self._add_list("/groups", "groups/index.html", _pages(len(numbers), group_pages.PAGE), show)
        for number in numbers:
            assert groups is not None
            n_pages = min(MEMBER_PAGES, _pages(int(groups.sizes[number]), group_pages.PAGE))
            place = f"groups/{number}"
            self._add_list(f"/{place}", f"{place}/index.html", n_pages, partial(renderer.group, opened, number))

    def _add_graphs(self, graphs: Mapping[str, Path]) -> None:
        opened, renderer = self._opened, GraphPages(self._renderer, Workers())
        self._add("/graphs", "graphs/index.html", partial(renderer.listing, opened))
        for slug, path in graphs.items():
            show = partial(renderer.kept, opened, path.stem, View())
            self._add(f"/graphs/{path.stem}", f"graphs/{slug}/index.html", show)


def _pages(n: int, size: int) -> int:
    """Pages of a list of ``n`` entries, ``size`` on each."""
    return max(1, -(-n // size))


def _kept(run: SharedRun, names: Sequence[str]) -> dict[str, Path]:
    """Graphs of the run's folder; none where it has none. Raises UserError for a name that it has not."""
    kept = kept_graphs(run.folder)
    for name in names:
        if name.removesuffix(".json") not in kept:
            here = ", ".join(kept) if kept else "none"
            raise UserError(f"--graphs {name}: {run.folder} has kept no such graph; it has kept: {here}")
    return find_graphs(run.folder, names) if kept else {}


def read_components(run: SharedRun, given: Sequence[str]) -> dict[str, np.ndarray]:
    """Numbers by site, ascending, from texts such as ``layers.3.mlp.down_proj:1,2,17``. Raises UserError for what is
    none, and for a component that the harvest does not have."""
    found: dict[str, set[int]] = defaultdict(set)
    for text in given:
        parts = re.fullmatch(r"(.+):(\d{1,12}(?:,\d{1,12})*)", "".join(text.split()), re.ASCII)
        if parts is None:
            raise UserError(f"--components {text}: should be SITE:NUMBERS such as layers.3.mlp.down_proj:1,2,17")
        site = parts[1].removeprefix("model.").removesuffix(".weight")
        for number in parts[2].split(","):
            run.harvest.index.number_of(site, int(number))
            found[site].add(int(number))
    return _ascending(run, found)


def default_components(run: SharedRun, graphs: Iterable[Path], most: int) -> dict[str, np.ndarray]:
    """Numbers by site, ascending, of ``most`` components: those of the graphs, of largest influence first, then those
    of largest mean λ."""
    influence: dict[tuple[str, int], float] = defaultdict(float)
    for path in graphs:
        for node in Graph.load(path).components:
            if node.site in run.harvest.sites and node.number < run.harvest.site(node.site).C:
                influence[node.site, node.number] += node.influence
    order = sorted(influence, key=lambda component: (-influence[component], component))
    matter = choose_components(run.harvest, Selection(by="importance", limit=most))
    found: dict[str, set[int]] = defaultdict(set)
    for site, number in list(dict.fromkeys([*order, *matter]))[:most]:
        found[site].add(number)
    return _ascending(run, found)


def _ascending(run: SharedRun, numbers: Mapping[str, set[int]]) -> dict[str, np.ndarray]:
    return {site: np.asarray(sorted(numbers[site])) for site in run.harvest.sites if numbers.get(site)}
