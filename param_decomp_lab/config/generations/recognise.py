"""Tells to which generation of the original project's files a file belongs, by keys that no other generation has."""

from collections.abc import Iterator, Mapping
from typing import Any, Literal

Generation = Literal["spring", "june", "august"]
TITLES: Mapping[Generation, str] = {
    "spring": "spring 2026",
    "june": "June and July 2026",
    "august": "August 2026",
}

_FOREIGN = (
    "run_name",
    "decomposition",
    "resume_provenance",
    "prompts",
    "nontarget",
    "pd.type",
    "pd.ci_scaled_weight_decay",
    "pd.ci_config.type",
    "runtime.tp",
    "runtime.sharding",
    "runtime.mesh",
    "runtime.replicate",
    "runtime.remat_recon_forwards",
    "runtime.remat_ci_fn",
    "runtime.compiler_options",
    "runtime.launch_env",
    "cadence.checkpointing",
    "cadence.dense_log_phase",
    "wandb.group",
    "wandb.tags",
    "target.attention_implementation",
    "target.output_edge",
    "target.pretrain",
    "data.train",
    "pd.loss_metrics.*.source_shape",
    "pd.loss_metrics.*.n_mask_samples",
    "pd.loss_metrics.*.auxiliaries",
    "pd.loss_metrics.*.frequency.reference_datapoint_count",
    "eval.metrics.*.source_shape",
)
"""Keys that neither the current schema nor that of spring has."""
_FOREIGN_TYPES = frozenset(("SmoothL0ImportanceMinimalityLoss", "MergedStochasticPGDReconLoss"))
_AUGUST = ("cadence.checkpointing", "runtime.mesh", "runtime.replicate", "target.output_edge", "pd.type")
_LATE_AUGUST = ("runtime.mesh", "target.output_edge")


def generation(raw: Mapping[str, Any]) -> Generation:
    """Returns the generation of a file with a section `pd`. The current form, an extension of that of spring, counts as
    spring.
    """
    entries = [entry for key in _FOREIGN for entry in _values(raw, key)]
    foreign_types = _FOREIGN_TYPES & {str(value) for value in _values(raw, "pd.loss_metrics.*.type")}
    if not entries and not foreign_types:
        return "spring"
    late = any(True for key in _AUGUST for _ in _values(raw, key))
    return "august" if late or has_knots(raw) else "june"


def is_late_august(raw: Mapping[str, Any]) -> bool:
    """Whether the file is from late August, when some defaults changed."""
    if any(True for key in _LATE_AUGUST for _ in _values(raw, key)):
        return True
    return "runtime" not in raw and not any(_values(raw, "cadence.train_log_every"))


def has_knots(value: Any) -> bool:
    """Whether any schedule is given by knots, as all are in files of August."""
    if isinstance(value, dict):
        return "max_val" in value or any(map(has_knots, value.values()))
    return isinstance(value, list) and any(map(has_knots, value))


def _values(value: Any, key: str) -> Iterator[Any]:
    """Yields the values at a dotted key, in which `*` stands for every entry of a list. A null counts as a value."""
    first, _, rest = key.partition(".")
    if first == "*":
        inner = value if isinstance(value, list) else []
    else:
        inner = [value[first]] if isinstance(value, dict) and first in value else []
    for found in inner:
        if rest:
            yield from _values(found, rest)
        else:
            yield found
