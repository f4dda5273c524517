"""Lists the settings that may change when a run is resumed: those that do not affect results, up to the order of
summation.
"""

from collections.abc import Iterable

from param_decomp_lab.config.resolve import RunConfig, difference
from param_decomp_lab.errors import UserError

MAY_CHANGE: dict[str, str] = {
    "mesh": "devices",
    "memory": "what is kept and recomputed",
    "remat_recon_forwards": "shorthand for a memory preset",
    "steps_per_dispatch": "steps per dispatch",
    "data.train": "new location of the same data",
    "data.eval": "new location of the same data",
    "data.data_files": "new location of the same data",
    "target.folder": "new location of the same weights",
    "target.pretrain": "new location of the recipe of the same weights",
    "target.spec.model_name": "new location of the same weights",
    "target.revision": "name of the same weights",
    "target.spec.run_path": "new location of the same weights",
    "target.run_path": "new location of the same weights",
    "out_dir": "new location of the run folder",
    "cadence.save_every": "when checkpoints are saved",
    "cadence.keep_last_n_checkpoints": "which checkpoints are kept",
    "milestones": "which checkpoints are kept",
    "run_name": "name of the run",
    "wandb": "tracking",
    "wandb_group": "tracking",
    "wandb_tags": "tracking",
}
"""Keys and whole sections that may change, with what they control."""

MUST_NOT = ("memory.state_dtypes", "memory.optimizers")
"""Exceptions within `MAY_CHANGE`: these affect results."""


SECTIONS = ("data", "target")
"""Sections that may also appear or disappear as a whole; fingerprints detect changed data or weights."""


def may_change(key: str) -> bool:
    def within(sections: Iterable[str]) -> bool:
        return any(key == section or key.startswith(f"{section}.") for section in sections)

    return key in SECTIONS or (within(MAY_CHANGE) and not within(MUST_NOT))


def allowed_changes(saved: RunConfig, now: RunConfig, what: str) -> list[str]:
    """Returns the differences between ``saved`` and ``now``, as lines `key: old -> new`.

    ``what``: the name, in the message, of what was made with ``saved``. Raises UserError if a difference affects
    results.
    """
    changes = difference(saved, now)
    refused = [line for line in changes if not may_change(line.partition(":")[0])]
    if refused:
        lines = "\n  ".join(refused)
        keys = ", ".join(key for key in MAY_CHANGE)
        raise UserError(
            f"{what} was made with another configuration; a resumed run must not change:\n  {lines}\n"
            f"These may change, since they affect no results: {keys} (of memory all but state_dtypes and "
            "optimizers). To start a new run from the parameters of this one, set init_from: RUN in a new configuration"
        )
    return changes
