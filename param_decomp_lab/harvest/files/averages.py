"""The files of average attributions between a harvest's components (made by `pd graph --dataset`), and their reader.
Needs no JAX.
"""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from jaxtyping import Float32, Int32

from param_decomp_lab.errors import UserError
from param_decomp_lab.folders import new_folder
from param_decomp_lab.harvest.files.component_index import ComponentIndex
from param_decomp_lab.harvest.files.groups import checked_numbers
from param_decomp_lab.safe_io.files import LISTING_BYTES, regular_file
from param_decomp_lab.safe_io.json_text import read_json

AVERAGES = "averages"
"""The subfolder of a harvest with its average attributions."""
AVERAGES_FILE = "averages.json"
EDGES_FILE = "edges.parquet"
FORMAT = 1

EDGES = pa.schema([("target", pa.int32()), ("source", pa.int32()), ("weight", pa.float32())])
"""Edges, sorted by target, then by decreasing absolute weight. Components are numbered across all sites."""


@dataclass(frozen=True)
class AverageOptions:
    """What determines averages of a harvest. ``rows``: how many of the harvest's rows are read. ``largest``: edges kept
    for each target. ``least_firings``: the fewest firings of a target in the harvest.
    """

    rows: int
    largest: int
    least_firings: int
    format: int = FORMAT

    @property
    def name(self) -> str:
        """The name of the folder."""
        text = json.dumps(asdict(self), sort_keys=True)
        return f"rows-{self.rows}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


class AverageEdge(NamedTuple):
    """An edge's other end, and its weight (E8)."""

    site: str
    component: int
    weight: float


class Averages:
    """Average attributions in ``folder``, between the components that ``index`` numbers. Raises UserError for what is
    missing or damaged. ``options``: how they were made; ``targets``: components whose incoming edges were computed."""

    def __init__(self, folder: str | Path, index: ComponentIndex) -> None:
        self.folder, self.index = Path(folder), index
        file = self.folder / AVERAGES_FILE
        if not file.is_file():
            raise UserError(f"{self.folder} holds no average attributions; make them with `pd graph RUN --dataset`")
        with self._damage():
            about = read_json(file, "the averages", dict, LISTING_BYTES)
            if about["options"]["format"] != FORMAT:
                raise ValueError(f"its format is {about['options']['format']}, this version reads {FORMAT}")
            self.options: AverageOptions = checked_numbers(AverageOptions, about["options"])
            self.targets = int(about["targets"])

    def __len__(self) -> int:
        return len(self._columns[0])

    def into(self, site: str, component: int) -> list[AverageEdge]:
        """Returns the edges that lead to a component, the largest absolute weight first."""
        number = self.index.number_of(site, component)
        target, source, weight = self._columns
        rows = slice(*np.searchsorted(target, [number, number + 1]))
        return self._named(source[rows], weight[rows])

    def out_of(self, site: str, component: int) -> list[AverageEdge]:
        """Returns the kept edges that lead from a component, the largest absolute weight first."""
        number = self.index.number_of(site, component)
        target, source, weight = self._columns
        rows = np.flatnonzero(source == number)
        rows = rows[np.argsort(-np.abs(weight[rows]), kind="stable")]
        return self._named(target[rows], weight[rows])

    @property
    def table(self) -> pa.Table:
        """All edges (`EDGES`)."""
        return pa.table(list(self._columns), schema=EDGES)

    def _named(self, numbers: np.ndarray, weights: np.ndarray) -> list[AverageEdge]:
        named = self.index.named(numbers)
        return [AverageEdge(site, c, w) for (site, c), w in zip(named, weights.tolist(), strict=True)]

    @cached_property
    def _columns(
        self,
    ) -> tuple[Int32[np.ndarray, " edges"], Int32[np.ndarray, " edges"], Float32[np.ndarray, " edges"]]:
        with self._damage():
            table = pq.read_table(regular_file(self.folder / EDGES_FILE, "the edges"))
            if table.schema != EDGES:
                raise ValueError("other columns than averages have")
            target, source, weight = (table[name].to_numpy() for name in EDGES.names)
            ends = np.concatenate([target, source])
            if len(ends) and not 0 <= ends.min() <= ends.max() < len(self.index):
                raise ValueError("no such component")
            if (np.diff(target) < 0).any() or not np.isfinite(weight).all():
                raise ValueError("edges that are out of order, or not finite")
        return target, source, weight

    @contextmanager
    def _damage(self) -> Iterator[None]:
        try:
            yield
        except (OSError, KeyError, TypeError, ValueError, pa.ArrowException) as error:
            raise UserError(
                f"{self.folder} is damaged ({error}); remove it and run `pd graph --dataset` again"
            ) from error


def write_averages(out: Path, options: AverageOptions, targets: int, edges: list[np.ndarray]) -> None:
    """Writes averages. ``edges``: columns of `EDGES`. Renames the folder to ``out`` when it is complete. Raises
    UserError and CannotWrite as `new_folder` does.
    """
    with new_folder(out, marker=AVERAGES_FILE, overwrite=out.exists()) as folder:
        pq.write_table(pa.table(edges, schema=EDGES), folder / EDGES_FILE, compression="zstd")
        about: dict[str, Any] = {"options": asdict(options), "targets": targets}
        (folder / AVERAGES_FILE).write_text(json.dumps(about, indent=1) + "\n")


def find_averages(harvest_folder: Path) -> list[Path]:
    """Returns the folders of a harvest's finished averages, the newest first."""
    found = [path.parent for path in (harvest_folder / AVERAGES).glob(f"[!.]*/{AVERAGES_FILE}")]
    return sorted(found, key=lambda path: (-path.stat().st_mtime, path.name))
