"""Finds the runs and harvests that a browser shows."""

import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from param_decomp_lab.browse.all_components import AllComponents
from param_decomp_lab.errors import UserError
from param_decomp_lab.harvest.files import Groups, Harvest, Summary, find_harvests
from param_decomp_lab.harvest.files.averages import AVERAGES_FILE, Averages, find_averages
from param_decomp_lab.harvest.files.groups import CLUSTERS_FILE, find_groups
from param_decomp_lab.harvest.files.labels import Labels
from param_decomp_lab.harvest.files.plan import HARVESTS, NAME
from param_decomp_lab.harvest.files.scores import Scores
from param_decomp_lab.harvest.files.tables import PLAN_FILE
from param_decomp_lab.runs.folder import EVALUATIONS, TARGET_FILE
from param_decomp_lab.runs.listing import DEPTH, RunStatus, read_run, run_folders
from param_decomp_lab.safe_io.json_text import read_json
from param_decomp_lab.safe_io.printable import printable
from param_decomp_lab.schema.site_names import has_attention_heads

HARVESTS_OPEN = 4
Version = tuple[int, int]
"""A file's inode and time of change."""
TargetFields = dict[str, Any]
"""The fields of a run's `target.json`, as they stand there: making an `Architecture` of them imports JAX."""


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
        self._targets: dict[Path, TargetFields | None] = {}
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
        return self._open(entry.name, entry.folder, name, path, _version(path / PLAN_FILE))

    def others(self, opened: "Opened") -> list[tuple[str, str]]:
        """Returns the runs and harvests, by their names, whose target may be that of ``opened``, each run's newest
        first. Harvests of the same run and step are left out, and runs that do not say what their target is.
        """
        mine = self._target(opened.run_folder)
        if mine is None:
            return []
        step = f"step-{opened.harvest.plan.step}-"
        return [
            (name, harvest)
            for name, entry in self.runs.items()
            if entry.harvests and _may_be_equal(self._target(entry.folder), mine)
            for harvest in entry.harvests
            if name != opened.run or (harvest != opened.name and not harvest.startswith(step))
        ]

    def _target(self, run_folder: Path) -> TargetFields | None:
        """Like `_target_fields`, but looks at the file only after `refresh`."""
        known = self._targets
        if run_folder not in known:
            known[run_folder] = _target_fields(run_folder)
        return known[run_folder]

    def may_be_alike(self, opened: "Opened", other: "Opened") -> bool:
        """Whether two runs may decompose the same target: what both say about it is equal."""
        one, two = _target_fields(opened.run_folder), _target_fields(other.run_folder)
        return one is None or two is None or _may_be_equal(one, two)


@dataclass(frozen=True)
class Opened:
    """A harvest that is shown, under ``name``. Opened once more, it is the same unless it was made again: then its
    plan has another ``version``.
    """

    run: str
    run_folder: Path
    name: str
    harvest: Harvest = field(compare=False)
    version: Version

    @cached_property
    def labels(self) -> Labels:
        return Labels(self.run_folder, self.harvest.plan.step)

    @property
    def groups(self) -> Groups | None:
        """The newest groups of the harvest; None if nobody has looked for them. Raises UserError for damaged ones."""
        found = find_groups(self.harvest.folder)
        return self._groups(found[0], _version(found[0] / CLUSTERS_FILE)) if found else None

    @lru_cache(maxsize=1)  # noqa: B019 (as many harvests are kept as `_open` keeps)
    def _groups(self, folder: Path, version: Version) -> Groups:
        del version
        return Groups(folder, self.harvest.index, self.harvest.n_sampled)

    @property
    def averages(self) -> Averages | None:
        """The newest average attributions of the harvest, None if there are none. Raises UserError for damaged ones."""
        found = find_averages(self.harvest.folder)
        return self._averages(found[0], _version(found[0] / AVERAGES_FILE)) if found else None

    @lru_cache(maxsize=1)  # noqa: B019 (as many harvests are kept as `_open` keeps)
    def _averages(self, folder: Path, version: Version) -> Averages:
        del version
        return Averages(folder, self.harvest.index)

    @cached_property
    def scores(self) -> Scores:
        return Scores(self.run_folder, self.harvest.plan.step)

    @cached_property
    def sites_with_heads(self) -> frozenset[str]:
        """The sites that attention heads divide; empty if the run does not say what its target is."""
        if _target_fields(self.run_folder) is None:
            return frozenset()
        return frozenset(filter(has_attention_heads, self.harvest.sites))

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


def _open(run: str, run_folder: Path, name: str, path: Path, version: Version) -> Opened:
    return Opened(run, run_folder, name, Harvest(path), version)


def _target_fields(run_folder: Path) -> TargetFields | None:
    """Returns what a run says about its target; None if it says nothing, or its file is damaged."""
    return _read_target_fields(run_folder, _version(run_folder / TARGET_FILE))


@lru_cache(maxsize=512)
def _read_target_fields(run_folder: Path, version: Version) -> TargetFields | None:
    del version
    try:
        fields = read_json(run_folder / TARGET_FILE, "the target's architecture", dict)
    except UserError:
        return None
    return fields if "architecture" in fields else None


def _may_be_equal(one: TargetFields | None, two: TargetFields) -> bool:
    """Whether all fields that both have are equal. An older file lacks fields that have been added since."""
    return one is not None and all(one[key] == two[key] for key in one.keys() & two.keys())


def _version(file: Path) -> Version:
    """Returns another value once the file has been made again: its inode alone may be that of a file removed since."""
    try:
        found = file.stat()
    except OSError:
        return 0, 0
    return found.st_ino, found.st_mtime_ns


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
