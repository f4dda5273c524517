"""Sets up what a run works with, from its configuration: target, weights, data, mesh. All is checked before anything is
written.
"""

from rich.console import Console

from param_decomp_jax.targets.architecture import Architecture
from param_decomp_lab.config.method_schema import ToyFile
from param_decomp_lab.data.sources import BatchSource
from param_decomp_lab.processes.group import ALONE, Processes
from param_decomp_lab.setup.base import Setup, build_mesh
from param_decomp_lab.setup.problem import make_problem
from param_decomp_lab.setup.resolved import ResolvedConfig
from param_decomp_lab.setup.target_source import fetch_target
from param_decomp_lab.setup.token_batches import token_batches
from param_decomp_lab.setup.toys import feature_batches
from param_decomp_lab.ui.warnings import print_warnings
from param_decomp_lab.weights.recorded_target import read_as_recorded
from param_decomp_lab.weights.target_folder import TargetFolder, read_weights, training_shardings

__all__ = ["ResolvedConfig", "Setup", "set_up"]


def set_up(
    resolved: ResolvedConfig, console: Console, processes: Processes = ALONE, recorded: Architecture | None = None
) -> Setup:
    """Returns everything a run needs; call it in each of its ``processes``. ``recorded``: the target's architecture in
    the folder of a run that is resumed.

    Raises UserError if parts do not fit together, and CannotFetch. Missing parts of a target are fetched, or trained
    for a toy with a recipe, by process 0 or once per node. Process 0 tokenizes text that the schema file names.
    """
    mesh = build_mesh(resolved.mesh)
    folder = fetch_target(resolved.target, console, processes)
    files = TargetFolder(folder)
    architecture = files.architecture if recorded is None else read_as_recorded(files, recorded)
    print_warnings(files.head_notes(architecture), console)
    problem = make_problem(resolved, architecture, folder)
    train: BatchSource
    evaluated: BatchSource | None
    if isinstance(resolved.config.method, ToyFile):
        (train, evaluated), text = feature_batches(resolved.config.method, problem, mesh), None
    else:
        train, evaluated, text = token_batches(resolved, problem, folder, mesh, console, processes)
    weights = read_weights(folder, architecture, resolved.weights_dtype, training_shardings(mesh, problem.target))
    return Setup(problem, weights, mesh, resolved.leading, train, evaluated, text)
