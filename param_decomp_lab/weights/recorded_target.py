"""Compares the target that a run recorded with the one in a folder."""

from dataclasses import asdict
from typing import Any

from param_decomp_jax.targets.architecture import Architecture
from param_decomp_lab.errors import UserError
from param_decomp_lab.weights.target_folder import TargetFolder


def describe(architecture: Architecture) -> dict[str, Any]:
    """Returns the architecture's name and fields, as JSON values."""
    return {"architecture": architecture.name, **asdict(architecture)}  # type: ignore[call-overload]


def read_as_recorded(folder: TargetFolder, recorded: Architecture) -> Architecture:
    """Returns the architecture in ``folder`` for continuing a run that recorded one (`as_recorded`). Raises UserError,
    with the differences, if the folder has another.
    """
    found = as_recorded(folder.architecture, recorded)
    if found != recorded:
        here, then = describe(found), describe(recorded)
        changes = ", ".join(
            f"{key} {then.get(key)} -> {value}" for key, value in here.items() if then.get(key) != value
        )
        raise UserError(f"{folder.path} holds another target than the one the run decomposed: {changes}")
    return found


def as_recorded(found: Architecture, recorded: Architecture) -> Architecture:
    """Returns the architecture with which a run reads its target again. ``found``: the folder's. ``recorded``: the
    run's own.

    Runs made before tied heads were checked use the embedding as the head, and continue to do so.
    """
    if recorded.tied_tensors is None or recorded.untied() != found:
        return found
    return recorded
