"""Writes the tables of a harvest into a folder that appears only when it is complete."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import duckdb
import jax
import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from jaxtyping import Array, Int32

from param_decomp_jax.targets.decoder import Decoder
from param_decomp_lab.folders import new_folder
from param_decomp_lab.harvest import keys
from param_decomp_lab.harvest.examples import EMPTY, Examples, Kind, place_in_group
from param_decomp_lab.harvest.files.plan import HarvestPlan, PlannedSite
from param_decomp_lab.harvest.files.tables import (
    FIRINGS_FILE,
    GROUPS,
    INPUTS_FILE,
    NEGATIVE_FILE,
    PLAN_FILE,
    POSITIONS_FILE,
    RARE_TOKEN,
    ROWS_FILE,
    SCHEMAS,
    TOP_TOKENS,
    VOCABULARY_FILE,
    Table,
    table_file,
)
from param_decomp_lab.harvest.plan import Source
from param_decomp_lab.harvest.state import HarvestState, SiteState
from param_decomp_lab.harvest.totals import UNIT
from param_decomp_lab.runs.opened import OpenedRun

TOKENS_KEPT = 32
"""The number of tokens that are kept for a component because they are most frequent where it fires, and of those with
the largest lift.
"""
NEURONS = 8
LENS_TOKENS = 10
ENGINE_MEMORY = "1GB"
ASKED_AT_ONCE = 8 * GROUPS["tokens"]
"""The number of components whose tokens one query adds up. Each query reads every file."""
HALF, SIGN = np.uint64(32), np.uint64(1)
"""Bits of the lower number of a pair, and of the sign behind it."""


def publish(run: OpenedRun, plan: HarvestPlan, source: Source, state: HarvestState, out: Path) -> None:
    """Writes all tables and renames the folder to ``out``. Raises UserError and CannotWrite as `new_folder` does.

    ``state`` is emptied during writing, which needs memory, too.
    """
    with new_folder(out, marker=PLAN_FILE, overwrite=False) as folder:
        totals = _write_rows(plan, source, folder)
        for name in SCHEMAS:
            (folder / name).mkdir()
        if plan.inputs == "tokens" and run.text is not None:
            names = pa.table({"text": run.text.tokens(range(plan.n_inputs))})
            pq.write_table(names, folder / VOCABULARY_FILE, compression="zstd")
        np.save(folder / FIRINGS_FILE, np.concatenate([site.totals.firings for site in state.sites]))
        with _engine(folder, totals) as engine:
            for number, site in enumerate(plan.sites):
                found = state.sites.pop(0)
                top = write_tokens(engine, state.token_files, plan, number, found, totals, folder)
                _write_components(run, site, found, top, table_file(folder, "components", number))
                _write_examples(found, table_file(folder, "examples", number))
                _write_weights(run, site, table_file(folder, "weights", number))
        write_positions(plan, state, folder)
        (folder / PLAN_FILE).write_text(json.dumps(asdict(plan), indent=1) + "\n")


def _write_rows(plan: HarvestPlan, source: Source, folder: Path) -> np.ndarray:
    """Writes the inputs themselves; returns how often each occurs."""
    totals = np.zeros(plan.n_inputs, np.int64)
    kind = pa.int32() if plan.inputs == "tokens" else pa.float32()
    schema = pa.schema([("row", pa.list_(kind))])
    with pq.ParquetWriter(folder / ROWS_FILE, schema, compression="zstd") as writer:
        for block in range(plan.n_blocks):
            rows = source.block(plan, block)[: len(plan.rows_of_block(block))]
            totals += (
                np.bincount(rows.ravel(), minlength=plan.n_inputs) if plan.inputs == "tokens" else (rows != 0).sum(0)
            )
            writer.write_table(pa.table({"row": _lists(rows)}, schema=schema))
    pq.write_table(pa.table({"total": totals}), folder / INPUTS_FILE, compression="zstd")
    return totals


def _lists(rows: np.ndarray) -> pa.Array:
    n, width = rows.shape
    return pa.ListArray.from_arrays(np.arange(n + 1, dtype=np.int32) * width, pa.array(rows.ravel()))


def _write_groups(file: Path, table: Table, groups: Iterator[dict[str, Any]]) -> None:
    """Writes the columns of the row groups, one row group after another."""
    schema = SCHEMAS[table]
    with pq.ParquetWriter(file, schema, compression="zstd") as writer:
        for columns in groups:
            made = pa.table({name: columns[name] for name in schema.names}, schema=schema)
            writer.write_table(made, row_group_size=max(1, len(made)))


def _groups(table: Table, C: int) -> Iterator[slice]:
    for first in range(0, C, GROUPS[table]):
        yield slice(first, min(C, first + GROUPS[table]))


def _write_components(run: OpenedRun, site: PlannedSite, state: SiteState, top_tokens: np.ndarray, file: Path) -> None:
    found = state.totals

    def columns(part: slice) -> dict[str, Any]:
        V, U = run.factors_of(site.name, part)
        return {
            "component": np.arange(part.start, part.stop, dtype=np.int32),
            "firings": found.firings[part],
            "firings_at_one": found.firings_at_one[part],
            **{
                name: getattr(found, name)[part] * UNIT
                for name in ("importance_sum", "activation_sum", "firing_activation_sum")
            },
            "importance_max": found.importance_max[part],
            "activation_max": found.activation_max[part],
            "V_norm": np.linalg.norm(V, axis=0).astype(np.float32),
            "U_norm": np.linalg.norm(U, axis=1).astype(np.float32),
            "tokens": _lists(top_tokens[part]),
            "importance_histogram": _lists(found.importance_histogram[part]),
            "activation_histogram": _lists(found.activation_histogram[part]),
        }

    _write_groups(file, "components", map(columns, _groups("components", site.C)))


def _write_examples(state: SiteState, file: Path) -> None:
    kinds: dict[Kind, Examples] = {"top": state.top, "uniform": state.uniform}

    def columns(part: slice) -> dict[str, Any]:
        found = [_sorted_examples(kind, examples, part) for kind, examples in kinds.items()]
        joined = {name: np.concatenate([f[name] for f in found]) for name in found[0]}
        order = np.argsort(joined["component"], kind="stable")
        arrays = {name: x[order] for name, x in joined.items()}
        binary = {
            name: pa.array([x.tobytes() for x in arrays[name]], pa.binary()) for name in ("importances", "activations")
        }
        kind = pa.DictionaryArray.from_arrays(pa.array(arrays["kind"], pa.int8()), list(kinds))
        return {**arrays, **binary, "kind": kind}

    _write_groups(file, "examples", map(columns, _groups("examples", len(state.totals.firings))))


def _sorted_examples(kind: Kind, examples: Examples, part: slice) -> dict[str, np.ndarray]:
    """Returns the examples of some components, best first."""
    rank = examples.rank[part]
    order = np.argsort(rank, axis=1, kind="stable")
    component, place = np.nonzero(np.take_along_axis(rank, order, axis=1) != EMPTY)
    at = part.start + component, order[component, place]
    names = ("row", "position", "importance", "activation", "scale", "importances", "activations")
    return {
        "component": at[0].astype(np.int32),
        "kind": np.full(len(component), 0 if kind == "top" else 1, np.int8),
        **{name: getattr(examples, name)[at] for name in names},
    }


@contextmanager
def _engine(folder: Path, totals: np.ndarray) -> Iterator[duckdb.DuckDBPyConnection]:
    """DuckDB with bounded memory and a table of how often each token occurs."""
    engine = duckdb.connect(config={"memory_limit": ENGINE_MEMORY, "temp_directory": str(folder / ".engine")})
    try:
        engine.execute("SET parquet_metadata_cache = true")  # hundreds of files are opened again and again
        engine.register("totals", pa.table({"token": np.arange(len(totals), dtype=np.int32), "t": totals}))
        yield engine
    finally:
        engine.close()


def write_tokens(
    engine: duckdb.DuckDBPyConnection,
    files: Sequence[Path],
    plan: HarvestPlan,
    number: int,
    state: SiteState,
    totals: np.ndarray,
    folder: Path,
) -> Int32[np.ndarray, "C top"]:
    """Adds up the counts in ``files`` for a site, and keeps the important tokens of each component; returns the most
    informative ones, by n · PMI.
    """
    C = plan.sites[number].C
    top = np.full((C, TOP_TOKENS), -1, np.int32)

    def columns(table: pa.Table) -> Any:
        component, token, n = (table[name].to_numpy() for name in ("component", "token", "n"))
        expected = state.totals.firings[component] * (totals[token] / plan.n_positions)
        score = np.where(totals[token] >= RARE_TOKEN, n * np.log(n / np.maximum(expected, 1e-300)), 0)
        order = np.lexsort((token, -score, component))
        order = order[score[order] > 0]
        place = place_in_group(component[order])
        best = order[place < TOP_TOKENS]
        top[component[best], place[place < TOP_TOKENS]] = token[best]
        return table

    nothing = (SCHEMAS["tokens"].empty_table() for _ in _groups("tokens", C))
    tables = _tokens_by_group(engine, files, number, C) if files else nothing
    _write_groups(table_file(folder, "tokens", number), "tokens", map(columns, tables))
    return top


def _tokens_by_group(engine: duckdb.DuckDBPyConnection, files: Sequence[Path], site: int, C: int) -> Iterator[pa.Table]:
    """The tokens of the components of each row group."""
    for first in range(0, C, ASKED_AT_ONCE):
        asked = slice(first, min(C, first + ASKED_AT_ONCE))
        found = _tokens_of(engine, files, site, asked)
        starts = range(asked.start, asked.stop, GROUPS["tokens"])
        cuts = [*np.searchsorted(found["component"].to_numpy(), list(starts)).tolist(), len(found)]
        for start, stop in pairwise(cuts):
            yield found.slice(start, stop - start)


def _tokens_of(engine: duckdb.DuckDBPyConnection, files: Sequence[Path], site: int, part: slice) -> pa.Table:
    return engine.sql(
        f"""
        WITH counted AS (
            SELECT component, token, sum(n)::BIGINT AS n FROM read_parquet(?)
            WHERE site = ? AND component >= ? AND component < ? GROUP BY component, token
        ), ranked AS (
            SELECT component, token, n,
                row_number() OVER (PARTITION BY component ORDER BY n DESC, token) AS by_count,
                row_number() OVER (
                    PARTITION BY component ORDER BY t >= {RARE_TOKEN} DESC, n / t DESC, n DESC, token
                ) AS by_lift
            FROM counted JOIN totals USING (token)
        )
        SELECT component, token, n FROM ranked WHERE by_count <= {TOKENS_KEPT} OR by_lift <= {TOKENS_KEPT}
        ORDER BY component, n DESC, token
        """,
        params=[[str(file) for file in files], site, part.start, part.stop],
    ).to_arrow_table()


def _write_weights(run: OpenedRun, site: PlannedSite, file: Path) -> None:
    lens = _lens(run, site)

    def columns(part: slice) -> dict[str, Any]:
        V, U = run.factors_of(site.name, part)
        inputs, outputs = _largest(V.T, NEURONS), _largest(U, NEURONS)
        empty = np.zeros((part.stop - part.start, 0))
        promoted, suppressed = lens(U) if lens is not None else ((empty, empty), (empty, empty))
        pairs = {"input": inputs, "output": outputs}
        found: dict[str, Any] = {"component": np.arange(part.start, part.stop, dtype=np.int32)}
        for name, (numbers, cosines) in pairs.items():
            found |= {
                f"{name}s": _lists(numbers.astype(np.int32)),
                f"{name}_cosines": _lists(cosines.astype(np.float32)),
            }
        for name, (numbers, logits) in {"promoted": promoted, "suppressed": suppressed}.items():
            found |= {name: _lists(numbers.astype(np.int32)), f"{name}_logits": _lists(logits.astype(np.float32))}
        return found

    _write_groups(file, "weights", map(columns, _groups("weights", site.C)))


def _largest(x: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the ``k`` largest entries of each row by absolute value, and their cosines: the entries of the row scaled
    to length 1.
    """
    norm = np.linalg.norm(x, axis=1, keepdims=True)
    cosines = x / np.where(norm > 0, norm, 1)
    order = np.argsort(-np.abs(cosines), axis=1, kind="stable")[:, :k]
    return order, np.take_along_axis(cosines, order, axis=1)


def _lens(run: OpenedRun, site: PlannedSite) -> Any:
    """Returns the logit lens of a site that writes to the residual stream; None for other sites.

    ``U_c`` goes through the unembedding, with the scales of the final norm, but without its division, which is not
    linear.
    """
    if not isinstance(run.target, Decoder) or run.sites[site.name].kind not in run.target.writes_residual:
        return None
    k = min(LENS_TOKENS, run.n_outputs)

    def largest(weights: Any, U: Array) -> Any:
        logits = run.target.lens(weights, U)
        logits = logits - logits.mean(axis=-1, keepdims=True)
        return jax.lax.top_k(logits, k), jax.lax.top_k(-logits, k)

    jitted = jax.jit(largest)

    def lens(U: np.ndarray) -> Any:
        with jax.set_mesh(run.mesh):
            (up, promoted), (down, suppressed) = jax.device_get(jitted(run.weights, jnp.asarray(U)))
        return (promoted, up), (suppressed, -down)

    return lens


def write_positions(plan: HarvestPlan, state: HarvestState, folder: Path) -> None:
    """Writes the sampled positions in random order, and the firings there by position and by component.

    Components are numbered across all sites. The lists are arrays on disk, of which a reader reads the parts it needs.
    """
    blocks = [state.positions[block] for block in sorted(state.positions)]
    positions = np.concatenate([block.positions for block in blocks])
    # Ordered by the positions' own keys, so that the first few are a uniform sample, too.
    order = np.argsort(keys.keys(keys.stream(plan.seed, keys.POSITIONS), positions), kind="stable")
    outputs, values = (np.concatenate([getattr(b, name) for b in blocks])[order] for name in ("outputs", "values"))
    columns = {"row": (positions[order] // plan.length).astype(np.int32),
               "position": (positions[order] % plan.length).astype(np.int32),
               "token": np.concatenate([block.tokens for block in blocks])[order],
               "outputs": _lists(outputs), "values": _lists(values)}  # fmt: skip
    pq.write_table(pa.table(columns), folder / POSITIONS_FILE, compression="zstd")

    offsets = np.concatenate([[0], np.cumsum([site.C for site in plan.sites])])
    place = np.argsort(order).astype(np.uint64)
    # A pair of a position and a component, with a sign behind it, is one number of 64 bits, which is sorted in place.
    # Both have fewer than 2^31.
    pairs = []
    for number in range(len(plan.sites)):
        component = np.concatenate([b.components.pop(number) for b in blocks]).astype(np.uint64)
        negative = np.concatenate([b.negative.pop(number) for b in blocks])
        counts = np.concatenate([b.counts.pop(number) for b in blocks])
        lower = ((component + np.uint64(offsets[number])) << SIGN) | negative.astype(np.uint64)
        pairs.append(np.repeat(place << (HALF + SIGN), counts) | lower)
    packed = np.concatenate(pairs)
    pairs.clear()
    for name, n in (("positions", len(positions)), ("components", int(offsets[-1]))):
        packed.sort()
        ends = np.searchsorted(packed, np.arange(n + 1, dtype=np.uint64) << (HALF + SIGN))
        np.save(folder / f"{name}_ends.npy", ends.astype(np.int64))
        np.save(folder / f"{name}_members.npy", (packed >> SIGN).astype(np.uint32).view(np.int32))
        if name == "components":
            np.save(folder / NEGATIVE_FILE, (packed & SIGN).astype(np.int8))
        else:  # by component next
            packed = (packed >> SIGN << (HALF + SIGN)) | (packed >> (HALF + SIGN) << SIGN) | (packed & SIGN)
