"""From a configuration to what a run works with: target, weights, data, mesh; checked before anything is written."""

from rich.console import Console

from param_decomp_jax.targets.architecture import Architecture
from param_decomp_lab.config.method_schema import LanguageModelFile
from param_decomp_lab.processes.group import ALONE, Processes
from param_decomp_lab.setup.base import Setup
from param_decomp_lab.setup.language_model import set_up_language_model
from param_decomp_lab.setup.resolved import ResolvedConfig
from param_decomp_lab.setup.toys import set_up_toy

__all__ = ["ResolvedConfig", "Setup", "set_up"]


def set_up(
    resolved: ResolvedConfig, console: Console, processes: Processes = ALONE, recorded: Architecture | None = None
) -> Setup:
    """Everything a run needs, in each of the ``processes`` that make it. ``recorded``: the target's architecture in the
    folder of a run that goes on.

    UserError for whatever does not fit together; CannotFetch. What is missing of a target is fetched, or, of a toy with
    a recipe, trained, by process 0 or once per node; text that the schema file names is tokenized by process 0.
    """
    if isinstance(resolved.config.method, LanguageModelFile):
        return set_up_language_model(resolved, console, processes, recorded)
    return set_up_toy(resolved, console, processes)
