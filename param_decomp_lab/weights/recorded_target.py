"""The target that a run recorded, and whether a folder still holds it."""

from dataclasses import asdict
from typing import Any

from param_decomp_jax.targets.architecture import Architecture
from param_decomp_lab.errors import UserError
from param_decomp_lab.weights.target_folder import TargetFolder


def describe(architecture: Architecture) -> dict[str, Any]:
    """The architecture's name and fields, as JSON values."""
    return {"architecture": architecture.name, **asdict(architecture)}  # type: ignore[call-overload]


def read_as_recorded(folder: TargetFolder, recorded: Architecture) -> Architecture:
    """The architecture in ``folder``, with which a run that recorded one goes on (`as_recorded`). Raises UserError,
    with what differs, if the folder holds another."""
    found = as_recorded(folder.architecture, recorded)
    if found != recorded:
        here, then = describe(found), describe(recorded)
        changes = ", ".join(
            f"{key} {then.get(key)} -> {value}" for key, value in here.items() if then.get(key) != value
        )
        raise UserError(f"{folder.path} holds another target than the one the run decomposed: {changes}")
    return found


def as_recorded(found: Architecture, recorded: Architecture) -> Architecture:
    """The architecture with which a run reads its target again. ``found``: the folder's. ``recorded``: the run's own.

    Runs that were made when a tied head was not looked at have the embedding in its place, and keep it.
    """
    if recorded.tied_tensors is None or recorded.untied() != found:
        return found
    return recorded
