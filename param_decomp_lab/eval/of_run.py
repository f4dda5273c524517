"""The evaluation of a run that has been left, from its newest checkpoint."""

from pathlib import Path

import jax
from rich.console import Console

from param_decomp_lab.build import build
from param_decomp_lab.checkpoints import Checkpoints
from param_decomp_lab.config import RunConfig
from param_decomp_lab.errors import UserError
from param_decomp_lab.eval.evaluation import Evaluation
from param_decomp_lab.programs import state_shapes
from param_decomp_lab.run_folder import CONFIG_FILE


def evaluate_run(folder: Path, console: Console) -> tuple[int, dict[str, float]]:
    """The step of the newest checkpoint, and the row that the run would have written there. UserError without one."""
    config = RunConfig.from_yaml(folder / CONFIG_FILE)
    built = build(config, console)
    if built.eval is None:
        raise UserError(f"{folder}: its configuration has no eval")
    checkpoints = Checkpoints(folder)
    steps = checkpoints.steps()
    if not steps:
        raise UserError(f"{folder} has no checkpoint yet")
    with jax.set_mesh(built.mesh):
        state = checkpoints.restore(steps[-1], state_shapes(built.outline))
        evaluation = Evaluation(config, built.problem, built.eval, built.mesh)
        row = evaluation.fast(state, built.weights, steps[-1], lambda: False)
    checkpoints.close()
    return steps[-1], row
