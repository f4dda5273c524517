"""`target.json` of a run folder: the target's architecture, so that a run can be opened where its target is not."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from param_decomp_jax.targets.base import Target
from param_decomp_jax.targets.llama import Llama, LlamaConfig, RopeScaling
from param_decomp_jax.targets.resid_mlp import ResidMLP, ResidMLPConfig
from param_decomp_jax.targets.tms import TMS, TMSConfig
from param_decomp_lab.errors import UserError
from param_decomp_lab.folders import write_whole

TARGET_FILE = "target.json"
Architecture = LlamaConfig | TMSConfig | ResidMLPConfig
_NAMES: dict[str, type[Architecture]] = {"llama": LlamaConfig, "tms": TMSConfig, "resid_mlp": ResidMLPConfig}


def describe(architecture: Architecture) -> dict[str, Any]:
    """As JSON has it: the fields of the architecture, and which one it is."""
    (name,) = (name for name, kind in _NAMES.items() if isinstance(architecture, kind))
    return {"architecture": name, **asdict(architecture)}


def write_target(run_folder: Path, target: Target) -> None:
    """OSError where it cannot be written."""
    assert isinstance(target, Llama | TMS | ResidMLP)
    write_whole(run_folder / TARGET_FILE, json.dumps(describe(target.config), indent=2) + "\n")


def read_target(run_folder: Path) -> Architecture | None:
    """None for a run that has none, made before there were any. UserError for a file that is not whole."""
    file = run_folder / TARGET_FILE
    if not file.is_file():
        return None
    try:
        fields = json.loads(file.read_text())
        kind = _NAMES[fields.pop("architecture")]
        if fields.get("rope_scaling"):
            fields["rope_scaling"] = RopeScaling(**fields["rope_scaling"])
        return kind(**fields)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{file} is damaged or of another version ({error}); remove it, and the target's own folder is asked"
        ) from error
