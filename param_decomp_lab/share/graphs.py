"""`pd share graph`: a folder with graphs, their list, and the feature files of their components."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from param_decomp_lab.errors import UserError
from param_decomp_lab.folders import new_folder, refuse_existing
from param_decomp_lab.graph import Graph
from param_decomp_lab.graph.graph import FOLDER
from param_decomp_lab.harvest.files import Harvest, find_harvests
from param_decomp_lab.harvest.files.labels import Labels
from param_decomp_lab.runs.folder import CONFIG_FILE
from param_decomp_lab.share.attribution import About, HandGroups, attribution_graph
from param_decomp_lab.share.features import feature_file
from param_decomp_lab.share.json_files import write_json
from param_decomp_lab.share.numbering import Numbering, pair, run_numbering
from param_decomp_lab.share.readers import CircuitTracer, Reader
from param_decomp_lab.share.shared_run import MARKER, SharedRun, usable_name
from param_decomp_lab.ui.progress import progress

LIST_FILE = "graph-metadata.json"
FEATURES = "features"
"""Subfolder with a folder of feature files for each checkpoint."""


@dataclass(frozen=True)
class GraphExport:
    """What was written. ``without_harvest``: steps of graphs that no harvest is of."""

    graphs: int
    nodes: int
    links: int
    feature_files: int
    without_harvest: tuple[int, ...]


def share_graphs(
    run: Path,
    names: Sequence[str],
    out: Path,
    *,
    reader: Reader = CircuitTracer(),  # noqa: B008 (frozen)
    by_hand: HandGroups | None = None,
    clusters: bool = False,
    creator: str = "",
    overwrite: bool = False,
    console: Console | None = None,
) -> GraphExport:
    """Writes graphs of a run into the new folder ``out``. ``names``: of kept graphs, or files; all kept ones by
    default. ``clusters``: make supernodes of the harvest's groups. Raises UserError for a graph that is not there, not
    of this run, or one that ``reader`` cannot show; for ids in ``by_hand`` that no graph has; and for ``clusters``
    where there are none."""
    refuse_existing(out, marker=MARKER, overwrite=overwrite)
    if not (run / CONFIG_FILE).is_file():
        raise UserError(f"{run} is not the folder of a run; give one: pd share graph RUN --out FOLDER")
    files = find_graphs(run, names)
    _refuse_unknown(by_hand or {}, files)
    numbering = run_numbering(run)
    writer = _Writer(run, numbering, reader, creator, by_hand or {}, clusters)
    with (
        new_folder(out, marker=MARKER, overwrite=overwrite) as made,
        progress(console or Console(quiet=True)) as report,
    ):
        for done, (slug, file) in enumerate(files.items()):
            report("graphs", done, len(files))
            writer.write_graph(made, slug, file)
        write_json(made / LIST_FILE, {"graphs": writer.metadata})
        for done, (step, site, component) in enumerate(sorted(writer.components)):
            report("feature files", done, len(writer.components))
            writer.write_feature(made, step, site, component)
        exported = GraphExport(
            len(files), writer.nodes, writer.links, writer.feature_files, tuple(sorted(writer.without_harvest))
        )
        about = {"made_by": "pd share graph", "graphs": list(files), "numbering": numbering.to_json()}
        write_json(made / MARKER, about)
    return exported


class _Writer:
    """Writes one file after the other, and remembers what the next ones need."""

    def __init__(
        self, run: Path, numbering: Numbering, reader: Reader, creator: str, by_hand: HandGroups, clusters: bool
    ) -> None:
        self._run, self._numbering, self._reader = run, numbering, reader
        self._creator, self._by_hand, self._clusters = creator, by_hand, clusters
        self._shared: dict[int, SharedRun | None] = {}
        self.metadata: list[dict[str, Any]] = []
        self.components: set[tuple[int, str, int]] = set()
        self.without_harvest: set[int] = set()
        self.nodes = self.links = self.feature_files = 0

    def write_graph(self, folder: Path, slug: str, file: Path) -> None:
        graph = Graph.load(file)
        shared = self._of_step(graph.step)
        made_ms = file.stat().st_mtime_ns // 10**6
        about = About(slug, self._features(graph.step), self._creator, made_ms, self._reader)
        if self._clusters and shared is None:
            raise UserError(f"--clusters: graph {slug} is of step {graph.step}, which has no harvest to take them from")
        clusters = shared.harvest.groups if shared is not None and self._clusters else None
        found = attribution_graph(graph, self._numbering, about, self._labels(graph), clusters, self._by_hand)
        write_json(folder / f"{slug}.json", found)
        self.metadata.append(found["metadata"])
        self.nodes += len(found["nodes"])
        self.links += len(found["links"])
        if shared is None:
            self.without_harvest.add(graph.step)
            return
        sites = shared.harvest.sites
        self.components |= {(graph.step, n.site, n.number) for n in graph.components if n.site in sites}

    def write_feature(self, folder: Path, step: int, site: str, component: int) -> None:
        shared = self._of_step(step)
        assert shared is not None
        index = pair(*self._numbering.feature(site, component))
        name = self._features(step)
        place = folder / FEATURES / name
        place.mkdir(parents=True, exist_ok=True)
        write_json(place / f"{index}.json", feature_file(shared, site, component, index, name))
        self.feature_files += 1

    def _features(self, step: int) -> str:
        """Name of the folder of feature files."""
        return usable_name(f"{self._run.resolve().name}-step-{step}")

    def _of_step(self, step: int) -> SharedRun | None:
        if step not in self._shared:
            harvests = (Harvest(path) for path in find_harvests(self._run))
            found = next((harvest for harvest in harvests if harvest.plan.step == step), None)
            self._shared[step] = None if found is None else SharedRun(self._run, found)
        return self._shared[step]

    def _labels(self, graph: Graph) -> dict[tuple[str, int], str]:
        kept = Labels(self._run, graph.step)
        sites = {node.site for node in graph.components}
        return {(site, number): text for site in sites for number, text in kept.of_site(site).items()}


def kept_graphs(run: Path) -> dict[str, Path]:
    """Files of the graphs in a run's folder, by name."""
    return {path.stem: path for path in sorted((run / FOLDER).glob("*.json")) if path.is_file()}


def find_graphs(run: Path, names: Sequence[str]) -> dict[str, Path]:
    """Files of graphs by their names in the folder that is made: all that the run has kept, by default. Raises
    UserError for one that is not there, and where none is."""
    kept = kept_graphs(run)
    if not names:
        if not kept:
            raise UserError(f'{run} has no graphs; make one with `pd graph {run} "some text"`')
        chosen = list(kept.values())
    else:
        chosen = [_graph_file(run, name, kept) for name in names]
    found: dict[str, Path] = {}
    for path in dict.fromkeys(chosen):
        stem = usable_name(path.stem)
        slug = stem if stem not in found else next(s for n in range(2, 10**6) if (s := f"{stem}-{n}") not in found)
        found[slug] = path
    return found


def _graph_file(run: Path, name: str, kept: Mapping[str, Path]) -> Path:
    stem = name.removesuffix(".json")
    if stem in kept:
        return kept[stem]
    if Path(name).is_file():
        return Path(name)
    here = ", ".join(kept) if kept else "none"
    raise UserError(f"{name} is neither a file nor a graph that {run} has kept; it has kept: {here}")


def _refuse_unknown(by_hand: HandGroups, files: Mapping[str, Path]) -> None:
    """Raises UserError for a member that is in none of the graphs."""
    if not by_hand:
        return
    ids = {node.id for file in files.values() for node in Graph.load(file).nodes}
    for name, members in by_hand.items():
        for member in members:
            if member not in ids:
                raise UserError(
                    f"--group {name}: no graph has a node {member}; `pd browse` shows the ids of what is selected, "
                    "such as layers.3.mlp.down_proj:17@4"
                )
