"""A harvest of planted firings, written in a moment: λ of every component at every position is known, and only some of
the positions are sampled, as in a large one."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from param_decomp_lab.harvest.files import Harvest
from param_decomp_lab.harvest.files.plan import HarvestPlan, PlannedSite
from param_decomp_lab.harvest.files.tables import SCHEMAS, Table, table_file

SITES, C = ("layers.0.mlp.up_proj", "layers.1.mlp.down_proj"), 24
ROWS, LENGTH, VOCABULARY = 120, 64, 50
EXAMPLES, AROUND, SAMPLED = 8, 10, 2000
THRESHOLD = 0.1


@dataclass(frozen=True)
class Planted:
    """``rows``: tokens [rows, length]. ``importances``: λ by site, [rows, length, C]."""

    folder: Path
    rows: np.ndarray
    importances: dict[str, np.ndarray]

    @property
    def harvest(self) -> Harvest:
        return Harvest(self.folder)


def plant(run: Path, seed: int = 0) -> Planted:
    """Component c fires on some tokens, from one that is nearly everywhere to one that is rare; the last one always."""
    rng = np.random.default_rng(seed)
    rows = rng.integers(0, VOCABULARY, (ROWS, LENGTH))
    importances = {}
    for site in SITES:
        share = np.append(np.geomspace(0.5, 0.004, C - 1), 1.0)
        fires = rng.random((ROWS, LENGTH, C)) < share
        lam = np.where(fires, rng.uniform(0.12, 1, fires.shape), rng.choice([0, 0.001, 0.05], fires.shape))
        importances[site] = lam.astype(np.float32)
    sites = tuple(PlannedSite(name, number, C, 4, 4) for number, name in enumerate(SITES))
    plan = HarvestPlan(
        run.name, 7, "planted", ROWS, ROWS, LENGTH, "tokens", VOCABULARY, sites, THRESHOLD, seed, ROWS, EXAMPLES,
        AROUND, SAMPLED, 2,
    )  # fmt: skip
    folder = run / "harvests" / plan.name
    for table in SCHEMAS:
        (folder / table).mkdir(parents=True)
    (folder / "harvest.json").write_text(json.dumps(asdict(plan)))
    _write(folder / "rows.parquet", {"row": pa.array(rows.astype(np.int32).tolist(), pa.list_(pa.int32()))})
    totals = np.bincount(rows.ravel(), minlength=VOCABULARY)
    _write(folder / "inputs.parquet", {"total": totals})
    # Short words, so that no two texts are the same by chance; two that look like marks.
    _write(folder / "vocabulary.parquet", {"text": [f" w{n}" for n in range(VOCABULARY - 2)] + [" «", "»\n"]})
    np.save(
        folder / "firings.npy",
        np.concatenate([(importances[site] > THRESHOLD).sum((0, 1)) for site in SITES]).astype(np.int64),
    )
    for number, site in enumerate(SITES):
        _write_site(folder, number, rows, importances[site], rng)
    _write_positions(folder, rows, importances, rng)
    return Planted(folder, rows, importances)


def _write_site(folder: Path, number: int, rows: np.ndarray, lam: np.ndarray, rng: np.random.Generator) -> None:
    tables: dict[Table, list[dict[str, object]]] = {"components": [], "examples": [], "tokens": [], "weights": []}
    padded = np.pad(lam, ((0, 0), (AROUND, AROUND), (0, 0)))
    for c in range(C):
        found = np.argwhere(lam[:, :, c] > THRESHOLD)
        values = lam[found[:, 0], found[:, 1], c]
        n = np.bincount(rows[found[:, 0], found[:, 1]], minlength=VOCABULARY)
        tables["components"].append(
            {"component": c, "firings": len(found), "firings_at_one": int((values >= 0.999).sum()),
             "importance_sum": float(lam[:, :, c].sum()), "importance_max": float(values.max()), "activation_sum": 1.0,
             "activation_max": 1.0, "firing_activation_sum": 1.0, "V_norm": 1.0, "U_norm": 1.0, "tokens": [-1] * 4,
             "importance_histogram": [0] * 20, "activation_histogram": [0] * 48}
        )  # fmt: skip
        top, uniform = np.argsort(-values)[:EXAMPLES], rng.permutation(len(found))[:EXAMPLES]
        for kind, chosen in (("top", top), ("uniform", uniform)):
            for row, position in found[chosen].tolist():
                around = padded[row, position : position + 2 * AROUND + 1, c]
                tables["examples"].append(
                    {"component": c, "kind": kind, "row": row, "position": position,
                     "importance": float(lam[row, position, c]), "activation": 1.0, "scale": 1.0,
                     "importances": np.round(around * 255).astype(np.uint8).tobytes(),
                     "activations": bytes(2 * AROUND + 1)}
                )  # fmt: skip
        tables["tokens"] += [{"component": c, "token": t, "n": int(n[t])} for t in np.argsort(-n)[:8] if n[t]]
        tables["weights"].append(
            {"component": c, **{name: [] for name in SCHEMAS["weights"].names if name != "component"}}
        )
    for table, made in tables.items():
        pq.write_table(pa.Table.from_pylist(made, SCHEMAS[table]), table_file(folder, table, number))


def _write_positions(
    folder: Path, rows: np.ndarray, importances: dict[str, np.ndarray], rng: np.random.Generator
) -> None:
    chosen = rng.permutation(ROWS * LENGTH)[:SAMPLED]
    fires = np.concatenate([importances[site].reshape(-1, C)[chosen] > THRESHOLD for site in SITES], axis=1)
    _write(
        folder / "positions.parquet",
        {"row": (chosen // LENGTH).astype(np.int32), "position": (chosen % LENGTH).astype(np.int32),
         "token": rows.ravel()[chosen].astype(np.int32),
         "outputs": pa.array(rng.integers(0, VOCABULARY, (SAMPLED, 2)).tolist(), pa.list_(pa.int32())),
         "values": pa.array(np.full((SAMPLED, 2), 0.25).tolist(), pa.list_(pa.float64()))},
    )  # fmt: skip
    for name, table in (("positions", fires), ("components", fires.T)):
        np.save(folder / f"{name}_ends.npy", np.concatenate([[0], np.cumsum(table.sum(1))]).astype(np.int64))
        np.save(folder / f"{name}_members.npy", np.nonzero(table)[1].astype(np.int32))
    np.save(folder / "components_negative.npy", np.zeros(fires.sum(), np.int8))


def _write(file: Path, columns: dict[str, object]) -> None:
    pq.write_table(pa.table(columns), file)
