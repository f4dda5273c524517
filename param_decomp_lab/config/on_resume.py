"""What a run may be told anew when it goes on: what changes none of its numbers, up to the order of sums."""

from collections.abc import Iterable

from param_decomp_lab.config.resolve import RunConfig, difference
from param_decomp_lab.errors import UserError

MAY_CHANGE: dict[str, str] = {
    "mesh": "on which devices",
    "memory": "what is kept and recomputed",
    "remat_recon_forwards": "the same in one word",
    "steps_per_dispatch": "how many steps are started at once",
    "data.train": "where the same data lies now",
    "data.eval": "where the same data lies now",
    "data.data_files": "where the same data lies now",
    "target.folder": "where the same weights lie now",
    "target.pretrain": "where the recipe of the same weights lies now",
    "target.spec.model_name": "where the same weights lie now",
    "out_dir": "where the run folder lies now",
    "cadence.save_every": "when checkpoints are saved",
    "cadence.keep_last_n_checkpoints": "which of them stay",
    "milestones": "which of them stay",
    "run_name": "what people call it",
    "wandb": "tracking",
    "wandb_group": "tracking",
    "wandb_tags": "tracking",
}
"""Keys, or sections as a whole, and what they are about."""

MUST_NOT = ("memory.state_dtypes", "memory.optimizers")
"""Within them: what does change numbers."""


SECTIONS = ("data", "target")
"""As keys, sections of the wrapper that were null or are it now. Fingerprints tell whether data and weights changed."""


def may_change(key: str) -> bool:
    def within(sections: Iterable[str]) -> bool:
        return any(key == section or key.startswith(f"{section}.") for section in sections)

    return key in SECTIONS or (within(MAY_CHANGE) and not within(MUST_NOT))


def allowed_changes(saved: RunConfig, now: RunConfig, what: str) -> list[str]:
    """What ``now`` changes, as lines `key: old -> new`. UserError if anything that makes another run of it is among
    them; ``what`` was made with ``saved``, for the message."""
    changes = difference(saved, now)
    refused = [line for line in changes if not may_change(line.partition(":")[0])]
    if refused:
        lines = "\n  ".join(refused)
        keys = ", ".join(key for key in MAY_CHANGE)
        raise UserError(
            f"{what} was made with another configuration; a run that goes on must not change it:\n  {lines}\n"
            f"These may change, since no number depends on them: {keys} (of memory all but state_dtypes and "
            "optimizers). For another run from what this one has learned, give a new configuration init_from: RUN"
        )
    return changes
