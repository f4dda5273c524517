"""A configuration whose mistakes are all listed: those in its files, and what does not fit its target."""

from collections.abc import Sequence
from pathlib import Path

from param_decomp_lab.config import RunConfig, load_config
from param_decomp_lab.config.resolve import ConfigError


def load_checked(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """As `load_config`. An error also says what of the parts that could be read does not fit the target."""
    try:
        return load_config(path, overrides)
    except ConfigError as error:
        if error.config is None:
            raise
        from param_decomp_lab.setup.known_target import target_mistakes  # imports JAX, which a right file needs later

        raise ConfigError([*error.lines, *target_mistakes(error.config)]) from error
