"""From a configuration to what a run works with: target, weights, data, mesh; checked before anything is written."""

from rich.console import Console

from param_decomp_lab.build.built import Built
from param_decomp_lab.build.language_model import build_language_model
from param_decomp_lab.build.toys import build_toy
from param_decomp_lab.config import RunConfig
from param_decomp_lab.config.torch_schema import LanguageModelFile
from param_decomp_lab.processes import ALONE, Processes

__all__ = ["Built", "build"]


def build(config: RunConfig, console: Console, processes: Processes = ALONE) -> Built:
    """Everything a run needs, in each of the ``processes`` that make it.

    UserError for whatever does not fit together; a toy's target is trained if missing, by process 0.
    """
    if isinstance(config.torch, LanguageModelFile):
        return build_language_model(config)
    return build_toy(config, console, processes)
