"""The files of groups of components that act together (found by `pd cluster`), and their reader.

Needs no JAX. Files are treated as untrusted: reads are bounded, and missing or damaged files raise a `UserError`.
"""

import hashlib
import json
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from jaxtyping import Float64, Int, Int32, Int64

from param_decomp_lab.errors import UserError
from param_decomp_lab.harvest.files.component_index import ComponentIndex
from param_decomp_lab.safe_io.files import LISTING_BYTES, regular_file
from param_decomp_lab.safe_io.json_text import read_json
from param_decomp_lab.safe_io.printable import printable

CLUSTERS = "clusters"
"""The subfolder of a harvest with its groupings."""
CLUSTERS_FILE = "clusters.json"
MERGES_FILE = "merges.parquet"
COMPONENTS_FILE = "components.parquet"
FORMAT = 1
NAME = re.compile(r"[\w.-]*\w[\w.-]*", re.ASCII)
GROUP = "group"
"""Stands for the site where a selection names a group: ``group:12``."""
APART = -1
"""The group number of components that are in no group."""

MERGES = pa.schema(
    [
        ("first", pa.int32()),
        ("second", pa.int32()),
        ("active", pa.int64()),
        ("together", pa.int64()),
        ("change", pa.float64()),
    ]
)
"""Merges, in order. The component in row i of `COMPONENTS` is node i of n; the merge in row m makes node n + m.
``active``: sampled positions at which the new group is active; ``together``: at which both were. ``change``: the change
of the cost, in bits per position.
"""
COMPONENTS = pa.schema([("component", pa.int32()), ("active", pa.int64())])
"""Components that are in a group: numbers across all sites, ascending; and the number of sampled positions at which
each fires.
"""


@dataclass(frozen=True)
class Options:
    """What determines the groups of a harvest. ``min_density``: components that fire at a smaller share of the sampled
    positions stay ungrouped. ``draw``: used by all seeds but the first; 0 if there are none (semantics, section 15).
    """

    alpha: float
    seeds: int
    min_density: float
    draw: float
    format: int = FORMAT

    @property
    def name(self) -> str:
        """The name of the folder."""
        text = json.dumps(asdict(self), sort_keys=True)
        return f"alpha-{self.alpha:g}-{hashlib.sha256(text.encode()).hexdigest()[:8]}".replace("+", "")


@dataclass(frozen=True)
class SeedResult:
    """The result of one seed: the number of groups, their cost in bits per position, and how well they agree with the
    chosen seed's groups: the adjusted Rand index, and the share of the pairs that the chosen seed keeps together which
    this seed keeps together, too.
    """

    groups: int
    cost: float
    adjusted_rand: float
    kept: float


class Groups:
    """The groups of a harvest, in ``folder``. The largest come first; among groups of equal size, those that are active
    more often.

    A group is identified by its number, a component by its site and number, which ``index`` has. ``sampled``: positions
    at which all firings are known. ``options``: how the groups were made; ``cost_before``: bits per position with every
    component in its own group; ``results``: one for each seed. The groups are those of ``seed``, which has the least
    cost. Raises UserError for what is missing or damaged.
    """

    def __init__(self, folder: str | Path, index: ComponentIndex, sampled: int, merges: int | None = None) -> None:
        self.folder, self.index, self._sampled = Path(folder), index, sampled
        file = self.folder / CLUSTERS_FILE
        if not file.is_file():
            raise UserError(f"{self.folder} holds no groups; make them with `pd cluster RUN`")
        with self._damage(file):
            about = read_json(file, "the groups", dict, LISTING_BYTES)
            if about["options"]["format"] != FORMAT:
                raise ValueError(f"its format is {about['options']['format']}, this version reads {FORMAT}")
            self.options = checked_numbers(Options, about["options"])
            self.results = [checked_numbers(SeedResult, one) for one in about["results"]]
            self.seed, self.cost_before = about["seed"], float(about["cost_before"])
            if not (type(self.seed) is int and 0 <= self.seed < len(self.results)):
                raise ValueError("its seed")
        with self._damage(self.folder):
            components = _columns(self.folder / COMPONENTS_FILE, COMPONENTS)
            self.components, self._active = components["component"], components["active"]
            self._merges = _columns(self.folder / MERGES_FILE, MERGES)
            self._check()
        self._n_merges = len(self._merges["first"]) if merges is None else merges

    def _check(self) -> None:
        n, n_merges = len(self.components), len(self._merges["first"])
        if n and not (
            0 <= self.components[0] <= self.components[-1] < len(self.index) and (np.diff(self.components) > 0).all()
        ):
            raise ValueError("no such component")
        nodes = np.stack([self._merges["first"], self._merges["second"]], axis=1)
        if not ((nodes >= 0).all() and (nodes < n + np.arange(n_merges)[:, None]).all()):
            raise ValueError("a merge of what is not there yet")
        if len(np.unique(nodes)) != nodes.size:
            raise ValueError("what is merged twice")
        if not np.isfinite(self._merges["change"]).all():
            raise ValueError("numbers that are not finite")

    # --- all groups ---

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def n_merges(self) -> int:
        """The number of merges that made these groups."""
        return self._n_merges

    @property
    def history(self) -> pa.Table:
        """All merges, in order (`MERGES`)."""
        return pa.table(self._merges, schema=MERGES)

    @property
    def cost(self) -> float:
        """The cost, in bits per position."""
        return self.cost_before + float(self._merges["change"][: self._n_merges].sum())

    def cut(self, k: int) -> "Groups":
        """Returns the groups at the point of the history where there are ``k`` of them. Raises UserError for a ``k``
        that does not occur.
        """
        n, least = len(self.components), len(self.components) - len(self._merges["first"])
        if not least <= k <= n:
            raise UserError(
                f"the history goes from {n:,} groups to {least:,}, and {k:,} is not among them; for fewer, cluster "
                "with a smaller --alpha"
            )
        return Groups(self.folder, self.index, self._sampled, n - k)

    @cached_property
    def sizes(self) -> Int64[np.ndarray, " k"]:
        return np.diff(self._ends)

    @cached_property
    def densities(self) -> Float64[np.ndarray, " k"]:
        """The share of the sampled positions at which each group is active."""
        return self._group_active / max(1, self._sampled)

    @cached_property
    def n_sites(self) -> Int64[np.ndarray, " k"]:
        """The number of sites in which each group has members."""
        pairs = np.unique(np.stack([self._label, self.index.site_numbers(self.components)]), axis=1)
        return np.bincount(pairs[0], minlength=len(self))

    # --- one group, one component ---

    def members(self, group: int) -> list[tuple[str, int]]:
        """Returns the site and number of each member, in the order of the sites. Raises UserError if there is no such
        group.
        """
        return self.index.named(self._numbers(group))

    def member_densities(self, group: int) -> Float64[np.ndarray, " r"]:
        """Returns the densities of the members, in the order of `members`."""
        return self._active[self._leaves(group)] / max(1, self._sampled)

    def group_of(self, site: str, component: int) -> int | None:
        """Returns the group of a component; None if it is in no group. Raises UserError if the harvest has no such
        component.
        """
        number = self.index.number_of(site, component)
        at = int(np.searchsorted(self.components, number))
        found = at < len(self.components) and self.components[at] == number
        return int(self._label[at]) if found else None

    def merges_of(self, group: int) -> tuple[Int64[np.ndarray, " r"], list[dict[str, Any]]]:
        """Returns the members' nodes, in the order of `members`, and the merges that made the group, in order: `node`,
        and the columns of `MERGES`.
        """
        leaves = self._leaves(group)
        inside = np.flatnonzero(self._root_of_merge == self._root[leaves[0]])
        n = len(self.components)
        rows = [{"node": n + m, **{name: x[m].item() for name, x in self._merges.items()}} for m in inside.tolist()]
        return leaves, rows

    # --- inside ---

    @contextmanager
    def _damage(self, path: Path) -> Iterator[None]:
        try:
            yield
        except (OSError, pa.ArrowException, LookupError, ValueError, TypeError, MemoryError, OverflowError) as error:
            why = printable(str(error), 300)
            raise UserError(f"{path} cannot be read ({why}): the groups are damaged; make them again") from error

    @cached_property
    def _nodes(self) -> Int32[np.ndarray, " nodes"]:
        merges = self._merges
        return roots(merges["first"], merges["second"], len(self.components), self._n_merges)

    @property
    def _root(self) -> Int32[np.ndarray, " n"]:
        return self._nodes[: len(self.components)]

    @property
    def _root_of_merge(self) -> Int32[np.ndarray, " merges"]:
        return self._nodes[len(self.components) :]

    @cached_property
    def _sorted(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Returns the group of each component; the components by group, and their ends; and the active positions of
        each group.
        """
        root, number, counts = np.unique(self._root, return_inverse=True, return_counts=True)
        n = len(self.components)
        node_active = np.concatenate([self._active, self._merges["active"]])
        active = node_active[root] if n else np.zeros(0, np.int64)
        order = np.lexsort((root, -active, -counts))
        place = np.empty(len(order), np.int64)
        place[order] = np.arange(len(order))
        label = place[number]
        ends = np.concatenate([[0], np.cumsum(counts[order])])
        return label, np.argsort(label, kind="stable"), ends, active[order]

    @property
    def _label(self) -> Int64[np.ndarray, " n"]:
        return self._sorted[0]

    @property
    def _ends(self) -> Int64[np.ndarray, " k_plus_1"]:
        return self._sorted[2]

    @property
    def _group_active(self) -> Int64[np.ndarray, " k"]:
        return self._sorted[3]

    def _leaves(self, group: int) -> Int64[np.ndarray, " r"]:
        if not 0 <= group < len(self):
            raise UserError(f"{self.folder} has groups 0 to {len(self) - 1:,}, and no group {group:,}")
        return self._sorted[1][self._ends[group] : self._ends[group + 1]]

    def _numbers(self, group: int) -> Int32[np.ndarray, " r"]:
        return self.components[self._leaves(group)]

    def __repr__(self) -> str:
        return (
            f"Groups of {len(self.components):,} components: {len(self):,}, {int((self.sizes > 1).sum()):,} of them "
            "with several members"
        )


def roots(
    first: Int32[np.ndarray, " merges"], second: Int32[np.ndarray, " merges"], n: int, done: int
) -> Int32[np.ndarray, " n_plus_merges"]:
    """Returns the node to which each node belongs after the first ``done`` merges."""
    root = np.arange(n + len(first), dtype=np.int32)
    for m, a, b in zip(range(done - 1, -1, -1), first[:done][::-1].tolist(), second[:done][::-1].tolist(), strict=True):
        root[a] = root[b] = root[n + m]
    return root


def labels_at(
    first: Int32[np.ndarray, " merges"], second: Int32[np.ndarray, " merges"], n: int, done: int
) -> Int[np.ndarray, " n"]:
    """Returns the number of each component's group after the first ``done`` merges; the numbers have no particular
    order.
    """
    return np.unique(roots(first, second, n, done)[:n], return_inverse=True)[1]


def _columns(file: Path, schema: pa.Schema) -> dict[str, np.ndarray]:
    table = pq.read_table(regular_file(file, "the groups"))
    if table.schema != schema:
        raise ValueError("other columns than groups have")
    return {name: table[name].to_numpy() for name in schema.names}


def checked_numbers(kind: type, raw: Any) -> Any:
    """Makes a dataclass of numbers from JSON."""
    values = {field.name: raw[field.name] for field in fields(kind)}
    for field in fields(kind):
        value = values[field.name]
        good = type(value) is int if field.type is int else type(value) in (int, float)
        if not (good and math.isfinite(value)):
            raise ValueError(f"{field.name}: {printable(repr(value), 80)}")
    return kind(**values)


def find_groups(harvest_folder: Path) -> list[Path]:
    """Returns the folders of the finished groupings of a harvest, the newest first."""
    found = [path.parent for path in (harvest_folder / CLUSTERS).glob(f"*/{CLUSTERS_FILE}")]
    found = [path for path in found if NAME.fullmatch(path.name) and not path.name.startswith(".")]
    return sorted(found, key=lambda path: (-path.stat().st_mtime, path.name))
