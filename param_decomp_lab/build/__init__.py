"""From a configuration to what a run works with: target, weights, data, mesh; checked before anything is written."""

from rich.console import Console

from param_decomp_lab.build.built import Built
from param_decomp_lab.build.language_model import build_language_model
from param_decomp_lab.build.toys import build_toy
from param_decomp_lab.config import RunConfig
from param_decomp_lab.config.torch_schema import LanguageModelFile

__all__ = ["Built", "build"]


def build(config: RunConfig, console: Console) -> Built:
    """Everything a run needs. UserError for whatever does not fit together; a toy's target is trained if missing."""
    if isinstance(config.torch, LanguageModelFile):
        return build_language_model(config)
    return build_toy(config, console)
