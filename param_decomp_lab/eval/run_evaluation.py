"""Evaluates any checkpoint of a run post hoc, without changing `metrics.jsonl`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from param_decomp_jax.method.state import State
from param_decomp_jax.targets.architecture import FeatureInputs
from param_decomp_lab.config import RunConfig
from param_decomp_lab.config.method_schema import EvalConfig, LanguageModelFile, ToyFile
from param_decomp_lab.data.sources import BatchSource
from param_decomp_lab.errors import UserError
from param_decomp_lab.eval.evaluation import Evaluation
from param_decomp_lab.eval.request import EvaluationRequest, evaluation_config
from param_decomp_lab.opening import Run, load_run
from param_decomp_lab.setup.problem import make_problem
from param_decomp_lab.setup.resolved import ResolvedConfig
from param_decomp_lab.setup.rows import check_rows, evaluation_source
from param_decomp_lab.setup.toys import EVAL, feature_source


@dataclass(frozen=True)
class Evaluated:
    """The results of a post-hoc evaluation.

    ``row``: the metrics, as the run would have written them at ``step``. ``figures``: files by name. ``data``: the
    source of the batches.
    """

    step: int
    row: dict[str, float]
    figures: dict[str, Path]
    settings: EvalConfig
    data: str


def evaluate_run(
    folder: Path,
    request: EvaluationRequest | None = None,
    *,
    step: int | None = None,
    figures: Path | None = None,
    devices: int | None = None,
    target: Path | None = None,
) -> Evaluated:
    """Opens a run as `load_run` does and evaluates it. ``request``: None for the run's own evaluation.

    ``figures``: folder for metrics that are figures; None omits them. Persistent attacks start with new sources, as in
    the evaluations during training, so no training state is needed. Raises UserError like `load_run`, and for a request
    that cannot be evaluated.
    """
    request = request or EvaluationRequest()
    run = load_run(folder, step, devices=devices, target=target)
    config = evaluation_config(run.config, request, f"{folder}: the evaluation")
    settings = config.method.eval
    assert settings is not None
    _refuse_uneven(settings, config, run)
    problem = make_problem(ResolvedConfig(config), run.architecture, folder)
    batches, data = evaluation_batches(run, config, request)
    learned, weights = run.learned, run.weights
    state = State(learned.components, learned.ci, None, None, {}, jnp.asarray(run.step, jnp.int32))
    drawn: dict[str, Path] = {}
    with jax.set_mesh(run.mesh):
        evaluation = Evaluation(config, problem, batches, run.mesh, lambda: run.text)
        measured = evaluation.fast(state, weights, run.step, lambda: False)
        measured = evaluation.slow(state, weights, run.step, measured, lambda: False)
        if figures is not None:
            drawn = evaluation.figures(state, weights, run.step, measured, figures, lambda: False)
    return Evaluated(run.step, measured.row, drawn, settings, data)


def _refuse_uneven(settings: EvalConfig, config: RunConfig, run: Run) -> None:
    parts = run.mesh.size * config.wrapper.memory.micro_batches
    if settings.batch_size % parts:
        raise UserError(
            f"eval.batch_size is {settings.batch_size}; it must be a multiple of {parts} (devices x "
            "memory.micro_batches): change --batch-size or --devices"
        )


def evaluation_batches(run: Run, config: RunConfig, request: EvaluationRequest) -> tuple[BatchSource, str]:
    """Returns the evaluation's batches, and a description of their source."""
    method, inputs = config.method, run.architecture.inputs
    assert method.eval is not None
    if isinstance(method, ToyFile):
        assert isinstance(inputs, FeatureInputs)
        return feature_source(method, inputs, method.eval.batch_size, EVAL, run.mesh), "features drawn for evaluation"
    # The rows that the run held out, not those that this evaluation would hold out, because the run trained on all
    # others.
    others = any(text.startswith("data") for text in request.overrides)
    rows = (ResolvedConfig(config) if others else run.resolved).held_out_rows
    assert isinstance(method, LanguageModelFile)
    check_rows(rows, run.problem, method.data.max_seq_len)
    return evaluation_source(rows, method.eval, method.pd.seed, run.mesh), rows.source


def as_json(found: Evaluated, folder: Path) -> dict[str, Any]:
    """Returns the results as `pd eval` writes them."""
    return {
        "run": folder.name,
        "step": found.step,
        "data": found.data,
        "batches": found.settings.n_steps,
        "batch_size": found.settings.batch_size,
        "metrics": [metric.model_dump(mode="json") for metric in found.settings.metrics],
        "row": found.row,
        "figures": {name: str(path) for name, path in found.figures.items()},
    }
