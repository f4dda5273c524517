"""Writes the groups of a harvest into a folder that appears only when it is complete."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from jaxtyping import Int64

from param_decomp_lab.cluster.merging import History
from param_decomp_lab.folders import new_folder
from param_decomp_lab.harvest.files.groups import (
    CLUSTERS_FILE,
    COMPONENTS,
    COMPONENTS_FILE,
    MERGES,
    MERGES_FILE,
    Options,
    SeedResult,
)


def publish(
    out: Path,
    options: Options,
    components: Int64[np.ndarray, " n"],
    firings: Int64[np.ndarray, " n"],
    history: History,
    seed: int,
    results: Sequence[SeedResult],
    cost_before: float,
) -> None:
    """Writes everything and renames the folder to ``out``, replacing what is there. ``history``: the merges of
    ``seed``. Raises UserError and CannotWrite as `new_folder` does.
    """
    with new_folder(out, marker=CLUSTERS_FILE, overwrite=out.exists()) as folder:
        leaves = pa.table([components.astype(np.int32), firings], schema=COMPONENTS)
        pq.write_table(leaves, folder / COMPONENTS_FILE, compression="zstd")
        pq.write_table(pa.table(list(history), schema=MERGES), folder / MERGES_FILE, compression="zstd")
        about = {
            "options": asdict(options),
            "seed": seed,
            "cost_before": cost_before,
            "results": [asdict(result) for result in results],
        }
        (folder / CLUSTERS_FILE).write_text(json.dumps(about, indent=1) + "\n")
