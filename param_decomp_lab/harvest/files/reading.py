"""Reads what a harvest knows about a component, without loading the data of the others.

Needs no JAX. Files are treated as untrusted: reads are bounded, and missing or damaged files raise a `UserError`.
"""

import hashlib
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, lru_cache
from pathlib import Path
from tokenize import TokenError
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from jaxtyping import Float32, Float64, Int32, Int64

from param_decomp_lab.config.site_patterns import chosen_sites
from param_decomp_lab.data.token_names import stored_names, unnamed
from param_decomp_lab.errors import UserError
from param_decomp_lab.harvest.files.averages import Averages, find_averages
from param_decomp_lab.harvest.files.component_index import ComponentIndex
from param_decomp_lab.harvest.files.example import Example
from param_decomp_lab.harvest.files.groups import Groups, find_groups
from param_decomp_lab.harvest.files.known import KnownComponent, OfSign
from param_decomp_lab.harvest.files.labels import Labels
from param_decomp_lab.harvest.files.plan import HARVESTS, HarvestPlan, PlannedSite
from param_decomp_lab.harvest.files.search import match_by_tokens, matching_tokens, trimmed
from param_decomp_lab.harvest.files.tables import (
    COMPONENTS,
    FIRINGS_FILE,
    GROUPS,
    INPUTS_FILE,
    NEGATIVE_FILE,
    PLAN_FILE,
    POSITIONS_FILE,
    ROWS_FILE,
    TOP_TOKENS,
    VOCABULARY_FILE,
    Table,
    schema_of,
    table_file,
)
from param_decomp_lab.safe_io.files import LISTING_BYTES, regular_file
from param_decomp_lab.safe_io.json_text import read_json
from param_decomp_lab.safe_io.printable import printable
from param_decomp_lab.ui.cards import card

DAMAGE = (
    *(OSError, pa.ArrowException, LookupError, ValueError, TypeError),
    *(MemoryError, OverflowError, EOFError),
)
"""Errors that reading a damaged file can raise."""
MOST_POSITIONS = 256
"""Sampled positions at which co-firing components and outputs are counted: a uniform sample of the firings."""
MOST_SIGNED = 1024
"""Sampled positions at which tokens and outputs are counted by the sign of a."""
MOST_MEMBERS = 1 << 18
LEAST_OF_SIGN = 4, 0.01
"""Firings of the rarer sign of a, and their share, from which on tables are split by the sign."""
BY_CHANCE = 32
"""From this number of positions on, components that fire there only once are left out, since that happens by chance."""
SITES_SHOWN = 24
"""Sites that a notebook shows of a harvest."""
FILES_OPEN = 256
"""The number of tables of sites that stay open, because reading one again is then much faster."""


class Summary(NamedTuple):
    """All components of a site: densities, means over all positions and largest values of λ and ``|a|``, and the most
    informative tokens (-1 fills up).
    """

    firings: Int64[np.ndarray, " C"]
    density: Float64[np.ndarray, " C"]
    importance_mean: Float64[np.ndarray, " C"]
    importance_max: Float32[np.ndarray, " C"]
    activation_mean: Float64[np.ndarray, " C"]
    activation_max: Float32[np.ndarray, " C"]
    tokens: Int32[np.ndarray, "C top"]


FOUND = pa.schema(
    [
        ("site", pa.string()),
        ("component", pa.int32()),
        ("label", pa.string()),
        ("tokens", pa.list_(pa.string())),
        ("density", pa.float64()),
        ("importance_mean", pa.float64()),
        ("match", pa.float64()),
    ]
)
"""Columns of `Harvest.find`."""
MEANS = {"density": "firings", "importance_mean": "importance_sum", "activation_mean": "activation_sum"}
"""Columns of `Harvest.components` that are columns of the file divided by the number of positions."""


class NumberList:
    """Integers in an `.npy` file, of which parts are read on demand. The file is not memory-mapped, so parts that were
    read do not stay in memory.
    """

    def __init__(self, file: Path) -> None:
        try:
            mapped = np.load(regular_file(file, "a list of numbers"), mmap_mode="r", allow_pickle=False)
        except (TokenError, SyntaxError, RecursionError) as error:  # from a header that is not Python
            raise ValueError(f"not an array: {error}") from error
        if mapped.ndim != 1 or mapped.dtype.kind != "i":
            raise ValueError("not a list of whole numbers")
        self._dtype, self._offset, self._length = mapped.dtype, mapped.offset, len(mapped)
        self._descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)

    def __len__(self) -> int:
        return self._length

    def read(self, start: int, stop: int) -> np.ndarray:
        if not 0 <= start <= stop <= self._length:
            raise ValueError(f"numbers {start} to {stop} of {self._length}")
        size = self._dtype.itemsize
        return np.frombuffer(
            os.pread(self._descriptor, (stop - start) * size, self._offset + start * size), self._dtype
        )

    def __del__(self) -> None:
        if hasattr(self, "_descriptor"):
            os.close(self._descriptor)


class Harvest:
    """A finished harvest, in ``folder``. Raises UserError if the folder has none, or a damaged one.

    ``plan``: what was read. Sites are identified by name, components by number.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        file = self.folder / PLAN_FILE
        if not file.is_file():
            raise UserError(f"{self.folder} holds no harvest; make one with `pd harvest RUN`")
        try:
            self.plan = HarvestPlan.from_json(read_json(file, "the harvest", dict, LISTING_BYTES))
        except (TypeError, KeyError, ValueError) as error:
            raise UserError(f"{file} is damaged or of another version ({error}); harvest again") from error
        self.index = ComponentIndex(self.folder, self.plan.sites)
        self.sites = self.index.site_number
        self._file = lru_cache(maxsize=8)(self._open)
        self._table = lru_cache(maxsize=FILES_OPEN)(self._open_table)
        self._component_row = lru_cache(maxsize=64)(self._row_of)
        # The next component is usually in the same row groups, of a few MB each.
        self._row_group = lru_cache(maxsize=len(GROUPS))(self._read_row_group)

    # --- tables of a site ---

    def components(self, site: str, columns: Sequence[str] | None = None) -> pa.Table:
        """Returns all components of a site, one row for each: firings, sums, maxima, norms, histograms
        (`tables.py:COMPONENTS`), and ``density``, ``importance_mean``, ``activation_mean``: means over all positions.
        ``columns``: those to read.
        """
        wanted = [*COMPONENTS.names, *MEANS] if columns is None else list(columns)
        stored = dict.fromkeys(MEANS.get(name, name) for name in wanted)
        with self._reading("components", site) as file:
            table = file.read(columns=list(stored))
            for name in wanted:
                if name in MEANS:
                    table = table.append_column(name, pa.array(np.asarray(table[MEANS[name]]) / self.plan.n_positions))
            return table.select(wanted)

    def summary(self, site: str) -> Summary:
        """Returns what a list of a site's components shows, as arrays over components."""
        names = ["firings", "importance_sum", "importance_max", "activation_sum", "activation_max", "tokens"]
        with self._reading("components", site) as file:
            table = file.read(columns=names, use_threads=False)
            found = {name: table[name].combine_chunks() for name in names}
            tokens = found.pop("tokens").values.to_numpy().reshape(-1, TOP_TOKENS)
            x, N = {name: column.to_numpy() for name, column in found.items()}, self.plan.n_positions
            if len(tokens) != self.site(site).C:
                raise ValueError(f"{len(tokens)} components")
            if not all(np.isfinite(values).all() for values in x.values()):
                raise ValueError("numbers that are not finite")
        return Summary(
            x["firings"], x["firings"] / N, x["importance_sum"] / N, x["importance_max"],
            x["activation_sum"] / N, x["activation_max"], tokens,
        )  # fmt: skip

    def densities(self, site: str) -> np.ndarray:
        """Returns the density of each component of a site."""
        return np.asarray(self.components(site, ["firings"])["firings"]) / self.plan.n_positions

    # --- one component ---

    def component(self, site: str, number: int) -> dict[str, Any]:
        """Returns a row of `components` and the means: of λ and ``|a|`` over all positions, and of ``|a|`` over the
        firings.
        """
        row = self._component_row(site, number)
        n, f = self.plan.n_positions, row["firings"]
        return row | {
            "density": f / n,
            "importance_mean": row["importance_sum"] / n,
            "activation_mean": row["activation_sum"] / n,
            "firing_activation_mean": row["firing_activation_sum"] / f if f else 0.0,
        }

    def read(self, site: str, number: int) -> KnownComponent:
        """Returns everything about a component that people look at first; a notebook shows it as a card."""
        history = self.labels.history(site, number)
        return KnownComponent(
            site, number, self.component(site, number), history[0].text if history else "",
            self.examples(site, number), self.tokens(site, number), self.outputs(site, number),
            self.plan.n_positions, self.plan.inputs == "tokens", self.by_sign(site, number),
        )  # fmt: skip

    def examples(self, site: str, number: int, most: int | None = None) -> list[Example]:
        """Returns the firings of largest ``λ · |a|``, best first (``top``; of both signs of a, if it has both), then a
        uniform sample of all in random order (``uniform``). In harvests of format 1, ``top`` are those of largest λ.
        ``most``: returns only this number of ``top`` examples, which is much faster.
        """
        rows = self._rows("examples", site, number).to_pylist()
        with self._damage(self.folder):
            if most is not None:
                top = [row for row in rows if row["kind"] == "top"]
                rows = sorted(top, key=lambda row: -row["importance"] * abs(row["activation"]))[:most]
            return [self._example(row) for row in sorted(rows, key=lambda row: row["kind"])]

    def tokens(self, site: str, number: int) -> pa.Table:
        """Returns the inputs where a component fires, the most frequent first: ``token``, its name ``text``, ``n`` (the
        count), ``total`` (how often it occurs overall), ``precision`` n/f, ``recall`` n/t, ``lift`` (n/f)/(t/N),
        ``pmi`` ln(nN/(ft)).
        """
        rows = self._rows("tokens", site, number)
        with self._damage(self.folder):
            f, N = self.component(site, number)["firings"], self.plan.n_positions
            n = rows["n"].to_numpy().astype(float)
            t = self.input_totals[rows["token"].to_numpy()].astype(float)
            lift = n * N / (f * t) if len(n) else n
            columns = {
                "total": t.astype(np.int64),
                "precision": n / max(f, 1),
                "recall": n / t,
                "lift": lift,
                "pmi": np.log(lift),
            }
            for name, column in columns.items():
                rows = rows.append_column(name, pa.array(column))
            rows = rows.drop_columns("component")
        return self._with_names(rows)

    def co_firing(self, site: str, number: int, most: int = 30) -> pa.Table:
        """Returns the co-firing components of all sites, ordered by n · PMI, which favours those that fire there often
        and more often than by chance.

        They are counted at up to `MOST_POSITIONS` of its firings at the sampled positions, or fewer if more than
        `MOST_MEMBERS` components fire there in total: ``n`` out of ``of``. ``precision``: P(that fires | this fires) =
        n/of. ``recall``: P(this fires | that fires), computed from precision and the firings of both, as are
        ``jaccard`` and ``pmi``.
        """
        me = self.index.number_of(site, number)
        places = self._firing_places(me)
        with self._damage(self.folder):
            together, n_read = self._members_at(places)
        other, n = np.unique(together, return_counts=True)
        kept = (other != me) & (n > (n_read >= BY_CHANCE))
        other, n = other[kept], n[kept]
        f_i, of, N = int(self._firings[me]), max(n_read, 1), self.plan.n_positions
        pmi = np.log(n / of * N / np.maximum(self._firings[other], 1))
        score = n * pmi
        best = np.arange(len(score))
        if len(score) > most:  # what is certainly not among them need not be sorted
            best = np.flatnonzero(score >= np.partition(score, -most)[-most])
        order = best[np.lexsort((other[best], -score[best]))][:most]
        other, n, pmi = other[order], n[order].astype(float), pmi[order]
        f_j = self._firings[other].astype(float)
        precision = n / of
        both = precision * f_i
        named = self.index.named(other)
        return pa.table(
            {
                "site": pa.array([name for name, _ in named], pa.string()),
                "component": pa.array([c for _, c in named], pa.int32()),
                "n": n.astype(np.int64),
                "of": np.full(len(n), n_read, np.int64),
                "precision": precision,
                "recall": both / np.maximum(f_j, 1),
                "jaccard": both / np.maximum(f_i + f_j - both, 1e-300),
                "pmi": pmi,
            }
        )

    companions = co_firing
    """The name of `co_firing` until November 2026."""

    def outputs(self, site: str, number: int, most: int = 10) -> pa.Table:
        """Returns what the target predicts more where a component fires: ``token``, its name ``text``, ``mean`` there,
        and ``everywhere``, ordered by their difference. Means are over the positions of `co_firing`; tokens that are
        not among the largest predictions of a position count as 0.
        """
        return self._outputs_at(self._firing_places(self.index.number_of(site, number)), most)

    def _outputs_at(self, places: np.ndarray, most: int) -> pa.Table:
        with self._damage(self.folder):
            here, everywhere = self._mean_outputs(places), self._outputs_everywhere
        more = np.flatnonzero(here > everywhere)
        order = more[np.argsort(everywhere[more] - here[more], kind="stable")[:most]]
        return self._with_names(pa.table({"token": order, "mean": here[order], "everywhere": everywhere[order]}))

    def by_sign(self, site: str, number: int, most: int = 10) -> list[OfSign]:
        """Returns the tokens where a component fires, and what the target predicts there, where a ≥ 0 and where a < 0:
        it writes U in one direction or the other. Counted at up to `MOST_SIGNED` of its firings at the sampled
        positions. Empty if one sign does not occur there or hardly (`LEAST_OF_SIGN`), and for harvests before format 3,
        which do not keep signs.
        """
        if self.plan.format < 3:
            return []
        with self._damage(self.folder):
            ends, _ = self._lists["components"]
            me = self.index.number_of(site, number)
            first, last = ends.read(me, me + 2).tolist()
            negative = self._negative.read(first, max(first, min(last, first + MOST_SIGNED))) != 0
            places = self._firing_places(me, MOST_SIGNED)
        rarer, (least, share) = min(int(negative.sum()), int((~negative).sum())), LEAST_OF_SIGN
        if rarer < max(least, share * len(negative)):
            return []
        parts = (("a ≥ 0", places[~negative]), ("a < 0", places[negative]))
        return [OfSign(sign, len(at), self._tokens_at(at, most), self._outputs_at(at, most)) for sign, at in parts]

    def _tokens_at(self, places: np.ndarray, most: int) -> pa.Table:
        """The most frequent tokens at some of the sampled positions; none for a toy."""
        with self._damage(self.folder / POSITIONS_FILE):
            at = self._sampled_tokens[places] if self.plan.inputs == "tokens" else np.zeros(0, np.int32)
            token, n = np.unique(at, return_counts=True)
            order = np.argsort(-n, kind="stable")[:most]
            token, n = token[order], n[order]
            share = n / max(len(places), 1)
            pmi = np.log(share / (self.input_totals[token] / self.plan.n_positions))
        return self._with_names(pa.table({"token": token, "n": n, "precision": share, "pmi": pmi}))

    def weights(self, site: str, number: int) -> dict[str, Any]:
        """Returns the neurons of which V and U consist (largest cosines) and, if the site writes to the residual
        stream, the tokens that U raises and lowers most.
        """
        return self._only_row("weights", site, number)

    # --- finding components ---

    @cached_property
    def labels(self) -> Labels:
        """The labels of the run's components at this step; empty if there are none."""
        folder = self.folder.resolve()
        return Labels(folder.parent.parent if folder.parent.name == HARVESTS else folder, self.plan.step)

    def find(
        self,
        *,
        token: str | int | None = None,
        label: str | None = None,
        sites: str | Sequence[str] | None = None,
        most: int = 50,
    ) -> pa.Table:
        """Finds components that fire on a token, or whose label contains a text, the best match first.

        ``token``: a token's id, or its text, ignoring case and surrounding spaces; if no token has this text, those
        that contain it; for a toy, the number of a feature. ``label``: ignores case. If both are given, both must
        match. ``sites``: names or patterns; None for all.

        Columns: ``site``, ``component``, ``label`` (empty without one), ``tokens`` (the most informative ones),
        ``density``, ``importance_mean``, ``match`` (the share of the firings that are on the token, times the logarithm
        of its lift; 0 if no token is given). Raises UserError if neither is given, for an unknown site, and for a token
        that is not in the vocabulary.
        """
        if token is None and not label:
            raise UserError("find: give token=…, label=…, or both")
        if token is not None:
            tokens = self._tokens_meant(token)
        rows: list[dict[str, Any]] = []
        for site in chosen_sites(self.sites, sites):
            summary, labels = self.summary(site), self.labels.of_site(site)
            fits, match = np.ones(len(summary.firings), bool), np.zeros(len(summary.firings))
            if token is not None:
                file = table_file(self.folder, "tokens", self.sites[site])
                match = match_by_tokens(file, tokens, summary.firings, self.input_totals, self.plan.n_positions)
                fits = match > 0
            if label:
                named = [n for n, own in labels.items() if label.casefold() in own.casefold() and 0 <= n < len(fits)]
                fits &= np.isin(np.arange(len(fits)), named)
            order = np.flatnonzero(fits)
            order = order[np.lexsort((-summary.importance_mean[order], -match[order]))][:most]
            rows += [
                {
                    "site": site, "component": n, "label": labels.get(n, ""),
                    "tokens": self.names([t for t in summary.tokens[n].tolist() if t >= 0]),
                    "density": float(summary.density[n]), "importance_mean": float(summary.importance_mean[n]),
                    "match": float(match[n]),
                }
                for n in order.tolist()
            ]  # fmt: skip
        rows.sort(key=lambda row: (-row["match"], -row["importance_mean"]))
        return pa.Table.from_pylist(rows[:most], FOUND)

    def _tokens_meant(self, token: str | int) -> Int64[np.ndarray, " n"]:
        if isinstance(token, str):
            found = matching_tokens(self.vocabulary, self.plan.n_inputs, trimmed(token) or token)
            if not len(found):
                how = "give a token's id" if self.vocabulary is None else "no token has this text in it"
                raise UserError(f"token '{printable(token, 100)}': {how}")
            return found
        if not 0 <= token < self.plan.n_inputs:
            raise UserError(f"token {token}: they go from 0 to {self.plan.n_inputs - 1}")
        return np.asarray([token])

    # --- groups and averages ---

    def sampled_firings(self) -> tuple[Int64[np.ndarray, " C_plus_1"], Int32[np.ndarray, " firings"]]:
        """Returns where every component fires among the sampled positions: the ends of the components, numbered across
        all sites, and the places from 0 to `n_sampled` - 1, ascending.
        """
        with self._damage(self.folder):
            ends, members = self._lists["components"]
            found, places = ends.read(0, len(ends)).astype(np.int64), members.read(0, len(members))
            inside = np.delete(np.diff(places) > 0, found[1:-1][(found[1:-1] > 0) & (found[1:-1] < len(places))] - 1)
            good = found[0] == 0 and found[-1] == len(places) and (np.diff(found) >= 0).all() and inside.all()
            if not good or (len(places) and not 0 <= places.min() <= places.max() < self.n_sampled):
                raise ValueError("lists of positions that no harvest has")
            return found, places.astype(np.int32)

    @property
    def groups(self) -> Groups:
        """The groups of components that act together: the newest ones that `pd cluster` has found. Raises UserError if
        there are none.
        """
        found = find_groups(self.folder)
        if not found:
            raise UserError(f"{self.folder} has no groups; make them with `pd cluster {self.folder}`")
        return Groups(found[0], self.index, self.n_sampled)

    @property
    def averages(self) -> Averages:
        """The average attributions between components: the newest ones of `pd graph --dataset`. Raises UserError if
        there are none.
        """
        found = find_averages(self.folder)
        if not found:
            raise UserError(f"{self.folder} has no average attributions; make them with `pd graph RUN --dataset`")
        return Averages(found[0], self.index)

    # --- inside ---

    def site(self, name: str) -> PlannedSite:
        """Returns the site of this name. Raises UserError if the harvest has no such site."""
        return self.index.site(name)

    def row(self, number: int) -> np.ndarray:
        """The tokens of a row, or a toy's features."""
        with self._damage(self.folder / ROWS_FILE):
            group, place = divmod(number, self.plan.block_rows)
            rows = self._file(ROWS_FILE).read_row_group(group, use_threads=False)["row"]
            if not pa.types.is_list(rows.type):
                raise TypeError(f"its rows are {rows.type}")
            return np.asarray(rows[place].values)

    def _example(self, row: dict[str, Any]) -> Example:
        plan, around = self.plan, self.plan.around
        first, stop = max(0, row["position"] - around), min(plan.length, row["position"] + around + 1)
        inside = slice(first - row["position"] + around, stop - row["position"] + around)
        values = self.row(row["row"])
        tokens = values[first:stop] if plan.inputs == "tokens" else np.flatnonzero(values)
        importances = np.frombuffer(row["importances"], np.uint8)[inside].astype(np.float32) / 255
        activations = np.frombuffer(row["activations"], np.int8)[inside].astype(np.float32) / 127 * row["scale"]
        if not (math.isfinite(row["importance"]) and np.isfinite(activations).all()):
            raise ValueError("numbers that are not finite")
        return Example(
            row["kind"], row["row"], row["position"], row["importance"], row["activation"], first,
            tuple(tokens.tolist()), importances, activations, tuple(self.names(tokens.tolist())),
            plan.inputs == "tokens",
        )  # fmt: skip

    def _with_names(self, table: pa.Table) -> pa.Table:
        names = pa.array(self.names(table["token"].to_pylist()), pa.string())
        return table.add_column(table.column_names.index("token") + 1, "text", names)

    def _row_of(self, site: str, number: int) -> dict[str, Any]:
        return self._only_row("components", site, number)

    def _only_row(self, table: Table, site: str, number: int) -> dict[str, Any]:
        rows = self._rows(table, site, number).to_pylist()
        with self._damage(table_file(self.folder, table, self.sites[site])):
            if len(rows) != 1:
                raise ValueError(f"{len(rows)} rows of component {number}")
            row: dict[str, Any] = rows[0]
            if not all(math.isfinite(value) for value in row.values() if isinstance(value, float)):
                raise ValueError("numbers that are not finite")
            return row

    def _rows(self, table: Table, site: str, number: int) -> pa.Table:
        """Returns the rows of one component."""
        self.index.number_of(site, number)  # raises if it does not exist
        with self._reading(table, site):
            group = self._row_group(table, site, number // GROUPS[table])
            mine = np.flatnonzero(group["component"].to_numpy() == number)
            return group.slice(mine[0], len(mine)) if len(mine) else group.slice(0, 0)

    def _read_row_group(self, table: Table, site: str, group: int) -> pa.Table:
        with self._reading(table, site) as file:
            return file.read_row_group(group, use_threads=False)

    @contextmanager
    def _reading(self, table: Table, site: str) -> Iterator[pq.ParquetFile]:
        C = self.site(site).C
        with self._damage(table_file(self.folder, table, self.sites[site])):
            yield self._table(table, self.sites[site], -(-C // GROUPS[table]))

    def _open_table(self, table: Table, number: int, groups: int) -> pq.ParquetFile:
        file = self._open(str(table_file(Path(), table, number)))
        if file.schema_arrow != schema_of(table, self.plan.format) or file.num_row_groups != groups:
            raise ValueError("other columns than a harvest has")
        return file

    def _open(self, name: str) -> pq.ParquetFile:
        path = self.folder / name
        if not path.is_file():
            raise UserError(f"{path} is missing: the harvest is damaged; make it again")
        return pq.ParquetFile(path)

    @contextmanager
    def _damage(self, path: Path) -> Iterator[None]:
        try:
            yield
        except DAMAGE as error:
            raise UserError(f"{path} cannot be read ({error}): the harvest is damaged; make it again") from error

    @cached_property
    def _firings(self) -> Int64[np.ndarray, " C"]:
        with self._damage(self.folder / FIRINGS_FILE):
            numbers = NumberList(self.folder / FIRINGS_FILE)
            if len(numbers) != len(self.index):
                raise ValueError(f"{len(numbers)} components")
            return numbers.read(0, len(numbers))

    @cached_property
    def vocabulary(self) -> pa.Array | None:
        """The name of each token, by id; None if the run has no tokenizer. Names from the file are made safe to show
        and distinct, which those of older harvests may not be.
        """
        if not (self.folder / VOCABULARY_FILE).is_file():
            return None
        with self._damage(self.folder / VOCABULARY_FILE):
            texts = self._file(VOCABULARY_FILE).read()["text"].combine_chunks()
            if texts.type != pa.string() or texts.null_count:
                raise ValueError("not a list of texts")
            return pa.array(stored_names(texts.to_pylist()), pa.string())

    def names(self, inputs: Sequence[int]) -> list[str]:
        """Returns the names of inputs: names of tokens, or numbers of a toy's features. Raises UserError for tokens
        that the vocabulary does not have.
        """
        vocabulary = self.vocabulary
        if vocabulary is None:
            return [f"feature {i}" if self.plan.inputs == "features" else unnamed(i) for i in inputs]
        if len(inputs) and not 0 <= min(inputs) <= max(inputs) < len(vocabulary):
            raise UserError(f"{self.folder} has tokens that are not in its vocabulary: the harvest is damaged")
        found: list[str] = vocabulary.take(pa.array(inputs, pa.int32())).to_pylist()
        return found

    @cached_property
    def input_totals(self) -> Int64[np.ndarray, " n"]:
        with self._damage(self.folder / INPUTS_FILE):
            found: np.ndarray = self._file(INPUTS_FILE).read()["total"].to_numpy()
            if len(found) != self.plan.n_inputs:
                raise ValueError(f"{len(found)} inputs of {self.plan.n_inputs}")
            return found

    @cached_property
    def _lists(self) -> dict[str, tuple[NumberList, NumberList]]:
        """Returns the components that fire at each sampled position, and the positions at which each component fires:
        ends, and members.
        """
        found = {}
        for name, n in (("positions", self.n_sampled), ("components", len(self._firings))):
            files = [self.folder / f"{name}_{part}.npy" for part in ("ends", "members")]
            with self._damage(files[0]):
                ends, members = map(NumberList, files)
                if len(ends) != n + 1:
                    raise ValueError(f"{len(ends) - 1} lists of {n}")
                found[name] = ends, members
        return found

    def firing_places(self, site: str, number: int) -> Int32[np.ndarray, " f"]:
        """Returns all places, among the sampled positions, at which a component fires. The first of them are a uniform
        sample.
        """
        with self._damage(self.folder):
            return self._firing_places(self.index.number_of(site, number), self.n_sampled)

    def site_firings(self, site: str) -> tuple[Int64[np.ndarray, " C_plus_1"], Int32[np.ndarray, " firings"]]:
        """Returns where every component of a site fires among the sampled positions: the ends of the components, from
        0, and the places.
        """
        first = self.index.number_of(site, 0)
        with self._damage(self.folder):
            ends, members = self._lists["components"]
            found = ends.read(first, first + self.site(site).C + 1).astype(np.int64)
            places = members.read(int(found[0]), max(int(found[0]), int(found[-1])))
            inside = len(places) == 0 or 0 <= places.min() <= places.max() < self.n_sampled
            if (np.diff(found) < 0).any() or not inside:
                raise ValueError("lists of positions that no harvest has")
            return found - found[0], places.astype(np.int32)

    def firing_at(self, places: Int32[np.ndarray, " n"]) -> tuple[Int32[np.ndarray, " m"], int]:
        """Returns the components that fire at some of the sampled positions, by their numbers across all sites and
        repeated for each firing, and how many of ``places``, from the first on, were used: fewer if more than
        `MOST_MEMBERS` firings would be returned.
        """
        with self._damage(self.folder):
            return self._members_at(places)

    def _members_at(self, places: Int32[np.ndarray, " n"]) -> tuple[Int32[np.ndarray, " m"], int]:
        ends, members = self._lists["positions"]
        spans = [ends.read(place, place + 2).tolist() for place in places.tolist()]
        read = np.cumsum([stop - start for start, stop in spans])
        spans = spans[: max(1, int(np.searchsorted(read, MOST_MEMBERS, side="right")))]
        found = np.concatenate([np.zeros(0, np.int32), *(members.read(*span) for span in spans)])
        if len(found) and not 0 <= found.min() <= found.max() < len(self.index):
            raise ValueError("no such component")
        return found, len(spans)

    @cached_property
    def _negative(self) -> NumberList:
        """Whether a is negative, of every entry of the components' list of `_lists`."""
        with self._damage(self.folder / NEGATIVE_FILE):
            found = NumberList(self.folder / NEGATIVE_FILE)
            if len(found) != len(self._lists["components"][1]):
                raise ValueError(f"{len(found)} signs")
            return found

    @cached_property
    def _sampled_tokens(self) -> Int32[np.ndarray, " s"]:
        with self._damage(self.folder / POSITIONS_FILE):
            found: np.ndarray = self._file(POSITIONS_FILE).read(columns=["token"])["token"].to_numpy()
            if not 0 <= found.min() <= found.max() < self.plan.n_inputs:
                raise ValueError(f"tokens {found.min()} to {found.max()} of {self.plan.n_inputs}")
            return found

    @cached_property
    def sampled_counts(self) -> Int64[np.ndarray, " C"]:
        """The number of sampled positions at which each component fires, by its number across all sites."""
        with self._damage(self.folder):
            ends, _ = self._lists["components"]
            return np.diff(ends.read(0, len(ends)).astype(np.int64))

    @cached_property
    def rows_digest(self) -> str:
        """A digest of the rows and of the sampled positions: equal for harvests of the same rows that keep the firings
        at the same positions.
        """
        digest = hashlib.sha256(f"{self.plan.inputs} {self.plan.rows} {self.plan.length}".encode())
        with self._damage(self.folder / ROWS_FILE):
            file = self._file(ROWS_FILE)
            for group in range(file.num_row_groups):
                for chunk in file.read_row_group(group, columns=["row"], use_threads=False)["row"].chunks:
                    values = np.asarray(chunk.flatten())
                    digest.update(values.astype(np.int64 if values.dtype.kind in "iu" else np.float64).tobytes())
        for values in self.sampled_positions:
            digest.update(values.astype(np.int64).tobytes())
        return digest.hexdigest()

    def firing_sample(
        self, site: str, number: int, most: int
    ) -> tuple[Int64[np.ndarray, " n"], Int64[np.ndarray, " n"]]:
        """Returns the row, and the position in it, of up to ``most`` firings of a component, a uniform sample of all.

        They are the firings at the sampled positions or, if these are fewer, the uniform sample among its examples,
        which has all firings of a rare component.
        """
        examples = self._rows("examples", site, number)
        with self._damage(self.folder):
            uniform = examples.filter(
                pa.array([kind == "uniform" for kind in examples["kind"].to_pylist()], pa.bool_())
            )
            places = self._firing_places(self.index.number_of(site, number), most)
            if len(places) >= min(most, len(uniform)):
                sampled = self.sampled_positions
                rows, positions = (x[places].astype(np.int64) for x in sampled)
            else:
                rows, positions = (uniform[name].to_numpy()[:most].astype(np.int64) for name in ("row", "position"))
            for values, end in ((rows, self.plan.rows), (positions, self.plan.length)):
                if len(values) and not 0 <= values.min() <= values.max() < end:
                    raise ValueError(f"{values.min()} to {values.max()} of {end}")
            return rows, positions

    @cached_property
    def sampled_positions(self) -> tuple[Int32[np.ndarray, " s"], Int32[np.ndarray, " s"]]:
        """The row, and the position in it, of every sampled position, in the random order in which
        places are numbered.
        """
        with self._damage(self.folder / POSITIONS_FILE):
            table = self._file(POSITIONS_FILE).read(columns=["row", "position"])
            rows, positions = (table[name].to_numpy() for name in ("row", "position"))
            for values, end in ((rows, self.plan.rows), (positions, self.plan.length)):
                if len(values) and not 0 <= values.min() <= values.max() < end:
                    raise ValueError(f"{values.min()} to {values.max()} of {end}")
            return rows, positions

    def _firing_places(self, component: int, most: int | None = None) -> np.ndarray:
        """Returns the places, among the sampled positions, at which a component fires; the first
        are a uniform sample.
        """
        ends, members = self._lists["components"]
        first, last = ends.read(component, component + 2).tolist()
        return members.read(first, max(first, min(last, first + (MOST_POSITIONS if most is None else most))))

    @property
    def n_sampled(self) -> int:
        """The number of positions at which all firings are kept."""
        with self._damage(self.folder / POSITIONS_FILE):
            return int(self._file(POSITIONS_FILE).metadata.num_rows)

    @cached_property
    def _outputs(self) -> tuple[np.ndarray, np.ndarray]:
        with self._damage(self.folder / POSITIONS_FILE):
            table = self._file(POSITIONS_FILE).read(columns=["outputs", "values"])
            k = self.plan.outputs
            return tuple(
                table[name].combine_chunks().flatten().to_numpy().reshape(-1, k) for name in table.column_names
            )

    def _mean_outputs(self, places: np.ndarray) -> np.ndarray:
        outputs, values = self._outputs
        if outputs.size and not 0 <= outputs.min() <= outputs.max() < self.plan.n_inputs:
            raise ValueError(f"outputs {outputs.min()} to {outputs.max()} of {self.plan.n_inputs}")
        sums = np.bincount(outputs[places].ravel(), values[places].ravel().astype(float), self.plan.n_inputs)
        return sums / max(1, len(places))

    @cached_property
    def _outputs_everywhere(self) -> np.ndarray:
        return self._mean_outputs(np.arange(len(self._outputs[0])))

    def __repr__(self) -> str:
        plan = self.plan
        what = "tokens" if plan.inputs == "tokens" else "inputs"
        return (
            f"Harvest of {printable(plan.run, 200)}, step {plan.step:,}: {plan.n_positions:,} {what}, "
            f"{len(plan.sites)} sites, {sum(site.C for site in plan.sites):,} components, "
            f"fires above {plan.threshold:g}"
        )

    def _repr_html_(self) -> str:
        rows, labelled = [], self.labels.count()
        for site in self.plan.sites[:SITES_SHOWN]:
            firings = np.asarray(self.components(site.name, ["firings"])["firings"])
            rows.append(
                {
                    "name": site.name, "C": site.C, "alive": int((firings > 0).sum()),
                    "l0": float(firings.sum() / self.plan.n_positions), "labelled": labelled.get(site.name, 0),
                }
            )  # fmt: skip
        C = sum(site.C for site in self.plan.sites)
        return card("harvest", plan=self.plan, rows=rows, C=C, more=max(0, len(self.plan.sites) - SITES_SHOWN))
