"""Loads a configuration and lists all its mistakes: those in its files, and what does not fit its target."""

from collections.abc import Sequence
from pathlib import Path

from param_decomp_lab.config import RunConfig, load_config
from param_decomp_lab.config.resolve import ConfigError


def load_checked(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Loads a configuration like `load_config`. An error also says which of the parts that could be read do not fit the
    target.
    """
    try:
        return load_config(path, overrides)
    except ConfigError as error:
        if error.config is None:
            raise
        from param_decomp_lab.setup.known_target import target_mistakes  # imports JAX, not needed before

        raise ConfigError([*error.lines, *target_mistakes(error.config)]) from error
