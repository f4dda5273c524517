"""Finds the runs and harvests that a browser shows."""

import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path

from param_decomp_jax.targets.architecture import Architecture
from param_decomp_lab.browse.all_components import AllComponents
from param_decomp_lab.errors import UserError
from param_decomp_lab.harvest.files import Groups, Harvest, Summary, find_harvests
from param_decomp_lab.harvest.files.averages import AVERAGES_FILE, Averages, find_averages
from param_decomp_lab.harvest.files.groups import CLUSTERS_FILE, find_groups
from param_decomp_lab.harvest.files.labels import Labels
from param_decomp_lab.harvest.files.plan import HARVESTS, NAME
from param_decomp_lab.harvest.files.scores import Scores
from param_decomp_lab.harvest.files.tables import PLAN_FILE
from param_decomp_lab.runs.folder import EVALUATIONS
from param_decomp_lab.runs.listing import DEPTH, RunStatus, read_run, run_folders
from param_decomp_lab.runs.target_file import TARGET_FILE, read_target
from param_decomp_lab.safe_io.printable import printable

HARVESTS_OPEN = 4


@dataclass(frozen=True)
class RunEntry:
    """``name``: of the run in addresses. ``harvests``: by the names of their folders, the newest first."""

    name: str
    folder: Path
    harvests: dict[str, Path]

    @property
    def status(self) -> RunStatus:
        """As `pd runs` shows it."""
        return _status(self.folder, _changed(self.folder))


class Catalog:
    """The runs in and below ``folders``. A folder may also be a harvest itself: then its run has this one alone.

    Raises UserError for what is not a folder, and where there is nothing to show.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        for folder in folders:
            if not folder.is_dir():
                raise UserError(f"{folder} is not a folder; say where the runs are: pd browse FOLDER")
        self.folders = folders
        self._open = lru_cache(maxsize=HARVESTS_OPEN)(_open)
        self.runs: dict[str, RunEntry] = {}
        self._targets: dict[Path, Architecture | None] = {}
        self.refresh()
        if not self.runs:
            raise UserError(f"no run in {', '.join(map(str, folders))}; say where the runs are: pd browse FOLDER")

    def refresh(self) -> None:
        """Looks again: harvests may have been made, or removed."""
        found: dict[Path, dict[str, Path]] = {}
        for folder in self.folders:
            if (folder / PLAN_FILE).is_file():
                harvest = folder.resolve()
                run = harvest.parent.parent if harvest.parent.name == HARVESTS else harvest
                found.setdefault(run, {})[harvest.name] = harvest
            else:
                for run in run_folders(folder, DEPTH):
                    found[run.resolve()] = {path.name: path for path in _harvests(run)}
        runs: dict[str, RunEntry] = {}
        for folder, harvests in found.items():
            usable = folder.name if NAME.fullmatch(folder.name) else "run"
            name = next(n for n in _numbered(usable) if n not in runs)
            runs[name] = RunEntry(name, folder, {name: path for name, path in harvests.items() if NAME.fullmatch(name)})
        self.runs, self._targets = runs, {}  # at once, since pages look at them in other threads

    def run(self, name: str) -> RunEntry:
        """Raises UserError for a run that is not there."""
        if name not in self.runs:
            self.refresh()
        if name not in self.runs:
            raise UserError(f"there is no run {printable(name, 200)} here")
        return self.runs[name]

    def harvest(self, run: str, name: str) -> "Opened":
        """Raises UserError for one that is not there, or damaged."""
        entry = self.run(run)
        if name not in entry.harvests:
            self.refresh()
            entry = self.run(run)
        if name not in entry.harvests:
            raise UserError(f"run {entry.name} has no harvest {printable(name, 200)}")
        path = entry.harvests[name]
        # Made again under the same name, it is another file.
        return self._open(entry.name, entry.folder, name, path, _inode(path / PLAN_FILE))

    def others(self, opened: "Opened") -> list[tuple[str, str]]:
        """Runs and harvests, by their names, of the same architecture as the target of ``opened``, each run's newest
        first; without those of the same run and step, and without runs that do not say what their target is."""
        mine = self._target(opened.run_folder)
        if mine is None:
            return []
        step = f"step-{opened.harvest.plan.step}-"
        return [
            (name, harvest)
            for name, entry in self.runs.items()
            if entry.harvests and self._target(entry.folder) == mine
            for harvest in entry.harvests
            if name != opened.run or (harvest != opened.name and not harvest.startswith(step))
        ]

    def _target(self, run_folder: Path) -> Architecture | None:
        """As `_architecture`, which looks at a file each time; this does after `refresh` alone."""
        known = self._targets
        if run_folder not in known:
            known[run_folder] = _architecture(run_folder)
        return known[run_folder]

    def may_be_alike(self, opened: "Opened", other: "Opened") -> bool:
        """Whether two runs may decompose the same target: their architectures are equal, as far as both say what it
        is."""
        one, two = _architecture(opened.run_folder), _architecture(other.run_folder)
        return one is None or two is None or one == two


@dataclass(frozen=True)
class Opened:
    """A harvest that is shown, under ``name``. Opened once more, it is the same unless it was made again: ``inode`` is
    that of its plan."""

    run: str
    run_folder: Path
    name: str
    harvest: Harvest = field(compare=False)
    inode: int

    @cached_property
    def labels(self) -> Labels:
        return Labels(self.run_folder, self.harvest.plan.step)

    @property
    def groups(self) -> Groups | None:
        """The newest groups of the harvest; None if nobody has looked for them. Raises UserError for damaged ones."""
        found = find_groups(self.harvest.folder)
        return self._groups(found[0], _inode(found[0] / CLUSTERS_FILE)) if found else None

    @lru_cache(maxsize=1)  # noqa: B019 (as many harvests are kept as `_open` keeps)
    def _groups(self, folder: Path, inode: int) -> Groups:
        del inode
        return Groups(folder, self.harvest.index, self.harvest.n_sampled)

    @property
    def averages(self) -> Averages | None:
        """The newest average attributions of the harvest, None if there are none. Raises UserError for damaged ones."""
        found = find_averages(self.harvest.folder)
        return self._averages(found[0], _inode(found[0] / AVERAGES_FILE)) if found else None

    @lru_cache(maxsize=1)  # noqa: B019 (as many harvests are kept as `_open` keeps)
    def _averages(self, folder: Path, inode: int) -> Averages:
        del inode
        return Averages(folder, self.harvest.index)

    @cached_property
    def scores(self) -> Scores:
        return Scores(self.run_folder, self.harvest.plan.step)

    @cached_property
    def sites_with_heads(self) -> frozenset[str]:
        """The sites that are cut into attention heads; empty where the run does not say what its target is."""
        architecture = _architecture(self.run_folder)
        if architecture is None:
            return frozenset()
        return frozenset(matrix.name for matrix in architecture.attention_matrices()) & set(self.harvest.sites)

    def summary(self, site: str) -> Summary:
        """What a list of a site's components shows."""
        if "all_components" in self.__dict__:
            return self.all_components.of_site(site)
        return self._summary(site)

    @lru_cache(maxsize=32)  # noqa: B019 (as many harvests are kept as `_open` keeps)
    def _summary(self, site: str) -> Summary:
        return self.harvest.summary(site)

    @cached_property
    def all_components(self) -> AllComponents:
        """What a list of the components of all sites shows. From then on, `summary` gives its parts."""
        Opened._summary.cache_clear()  # the same numbers once more
        return AllComponents(self.harvest)

    @lru_cache(maxsize=1 << 14)  # noqa: B019
    def telling_tokens(self, site: str, number: int) -> tuple[int, ...]:
        """Ids of the tokens that tell most about a component, -1 where there are fewer. Kept for each component by
        itself: a graph has nodes of more sites than `summary` keeps."""
        return tuple(self.summary(site).tokens[number].tolist())


def _open(run: str, run_folder: Path, name: str, path: Path, inode: int) -> Opened:
    return Opened(run, run_folder, name, Harvest(path), inode)


def _architecture(run_folder: Path) -> Architecture | None:
    """The architecture of a run's target; None where the run does not say what it is."""
    return _read_architecture(run_folder, _inode(run_folder / TARGET_FILE))


@lru_cache(maxsize=512)
def _read_architecture(run_folder: Path, inode: int) -> Architecture | None:
    del inode
    try:
        return read_target(run_folder)
    except UserError:
        return None


def _inode(file: Path) -> int:
    try:
        return file.stat().st_ino
    except OSError:
        return 0


@lru_cache(maxsize=512)
def _status(folder: Path, changed: tuple[int, ...]) -> RunStatus:
    del changed
    return read_run(folder)


def _changed(folder: Path) -> tuple[int, ...]:
    """When the files from which a status is read changed."""
    found = []
    for name in ("config.yaml", "metrics.jsonl", "ckpts", "lock", "ended.json", EVALUATIONS):
        try:
            found.append((folder / name).stat().st_mtime_ns)
        except OSError:
            found.append(0)
    return tuple(found)


def _harvests(run: Path) -> list[Path]:
    try:
        return find_harvests(run)
    except OSError:  # removed meanwhile, or somebody else's
        return []


def _numbered(name: str) -> Iterator[str]:
    """Runs of one name in several folders."""
    yield name
    yield from (f"{name}~{number}" for number in itertools.count(2))


def user_name() -> str:
    """Who labels, unless another name is given."""
    return os.environ.get("USER") or os.environ.get("LOGNAME") or ""
