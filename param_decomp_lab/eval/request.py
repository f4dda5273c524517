"""Reads a request for a post-hoc evaluation: which metrics, on which batches."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from param_decomp_lab.config import RunConfig
from param_decomp_lab.config.loss_schema import LOSSES
from param_decomp_lab.config.overrides import apply_overrides, parse_overrides
from param_decomp_lab.config.wrapper import Mesh
from param_decomp_lab.errors import UserError
from param_decomp_lab.metrics import METRICS
from param_decomp_lab.safe_io.files import read_text
from param_decomp_lab.safe_io.yaml_text import parse_yaml

SETTABLE = ("eval", "data", "memory")
"""Top-level keys that `--set` may change; others would change the decomposition."""


@dataclass(frozen=True)
class EvaluationRequest:
    """What to evaluate.

    ``metrics``: types, YAML mappings as text, or mappings; None for the run's own. ``batches``, ``batch_size``: None
    for the run's own. ``overrides``: assignments such as `eval.n_steps=4`.
    """

    metrics: Sequence[str | Mapping[str, Any]] | None = None
    batches: int | None = None
    batch_size: int | None = None
    overrides: Sequence[str] = ()


def evaluation_config(config: RunConfig, request: EvaluationRequest, where: str) -> RunConfig:
    """Returns ``config`` with the requested evaluation. ``where``: prefix of errors.

    Raises UserError for an unknown metric, or an override that would change the decomposition.
    """
    assignments = parse_overrides(request.overrides)
    for override in assignments:
        if override.path[0] not in SETTABLE:
            raise UserError(
                f"--set {override.text}: an evaluation cannot change the run; keys that can be set begin with "
                f"{', '.join(SETTABLE)}"
            )
    wrapper, method = config.wrapper.model_dump(mode="json"), config.method.model_dump(mode="json")
    # Devices are chosen when the run is opened, not by the mesh that trained it.
    wrapper["mesh"] = Mesh().model_dump()
    if any(override.path[0] == "memory" for override in assignments):
        del wrapper["remat_recon_forwards"]  # it would contradict another preset
    wrapper = apply_overrides(wrapper, [override for override in assignments if override.is_for_wrapper])
    if method["eval"] is None:
        method["eval"] = {"batch_size": config.method.pd.batch_size, "n_steps": 1, "every": 1, "slow_every": 1}
    method = apply_overrides(method, [override for override in assignments if not override.is_for_wrapper])
    if not isinstance(method["eval"], dict):
        raise UserError("--set eval: should be a section; there is nothing to evaluate without it")
    settings = dict(method["eval"])
    if request.metrics is not None:
        settings["metrics"] = [_metric(metric, config) for metric in request.metrics]
    if request.batches is not None:
        settings["n_steps"] = request.batches
    if request.batch_size is not None:
        settings["batch_size"] = request.batch_size
    if not settings.get("metrics"):
        raise UserError(f"{where} has no eval.metrics: say which, e.g. --metric CI_L0 --metric CEandKLLosses")
    found = RunConfig.from_mapping({"wrapper": wrapper, "torch": {**method, "eval": settings}}, where)
    return replace(found, ignored=config.ignored)


def read_metric_file(file: Path) -> list[Mapping[str, Any]]:
    """Reads metrics from a YAML file: a list, or a mapping with the list under `metrics` or `eval.metrics`."""
    found = parse_yaml(read_text(file, "the metrics"), str(file))
    for key in ("eval", "metrics"):
        if isinstance(found, dict) and key in found:
            found = found[key]
    if not isinstance(found, list) or not all(isinstance(metric, dict) for metric in found):
        raise UserError(f"{file}: should be a list of metrics, or have one under metrics: - {{type: CI_L0, …}}")
    return found


def _metric(metric: str | Mapping[str, Any], config: RunConfig) -> dict[str, Any]:
    """Returns the metric as a mapping. A metric given by its type gets the keys from the run, or the usual ones."""
    if isinstance(metric, str) and metric.lstrip().startswith("{"):
        metric = parse_yaml(metric, f"--metric {metric}")
    if isinstance(metric, Mapping):
        return dict(metric)
    own = () if config.method.eval is None else config.method.eval.metrics
    for known in (*own, *config.method.pd.loss_metrics):
        if known.type == metric:
            return {**known.model_dump(mode="json"), **({"coeff": None} if hasattr(known, "coeff") else {})}
    model = LOSSES.get(metric) or METRICS.get(metric)
    return {"type": metric, **(model.usual if model else {})}
