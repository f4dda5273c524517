"""Checkpoints of a run: ``ckpts/<step>/`` with the items ``learned`` and ``training`` (T5).

``learned`` is what a reader of the decomposition wants (components, CI function), ``training`` the rest of the
trajectory, so that looking at V and U need not read moments and sources. Arrays are stored under their path in the
state, so that a file can be read without our classes.
"""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from jax.tree_util import keystr, tree_flatten_with_path
from orbax.checkpoint.checkpoint_managers import preservation_policy

from param_decomp_jax.state import State
from param_decomp_lab.errors import UserError

FOLDER = "ckpts"
LEARNED = ("components", "ci")


def flatten(tree: Any) -> dict[str, Any]:
    """Leaves by path, such as ``components/layers.1-2.mlp.up_proj/V``."""
    # A slash inside a component of the path would become a folder; stack names have none.
    return {keystr(path, simple=True, separator="/"): leaf for path, leaf in tree_flatten_with_path(tree)[0]}


def unflatten(template: Any, leaves: dict[str, Any]) -> Any:
    """The inverse of `flatten`, in the structure of ``template``."""
    return jax.tree.unflatten(jax.tree.structure(template), [leaves[name] for name in flatten(template)])


def _items(state: Any) -> dict[str, dict[str, Any]]:
    leaves = flatten(state)
    learned = {name: leaf for name, leaf in leaves.items() if name.split("/")[0] in LEARNED}
    return {"learned": learned, "training": {name: leaf for name, leaf in leaves.items() if name not in learned}}


class Checkpoints:
    """The checkpoints in a run folder.

    ``keep_last``: how many of the newest stay (None: all); ``is_milestone``: steps that stay whatever comes after.
    Saves are atomic: orbax fills a temporary folder and renames it.
    """

    def __init__(
        self, run_folder: Path, keep_last: int | None = None, is_milestone: Callable[[int], bool] = lambda step: False
    ) -> None:
        logging.getLogger("absl").setLevel(logging.ERROR)  # orbax narrates every save
        policies: list[Any] = [preservation_policy.LatestN(keep_last), _Milestones(is_milestone)]
        keep = (
            preservation_policy.PreserveAll()
            if keep_last is None
            else preservation_policy.AnyPreservationPolicy(policies)
        )
        self._folder = (run_folder / FOLDER).resolve()
        self._manager = ocp.CheckpointManager(
            self._folder,
            options=ocp.CheckpointManagerOptions(
                preservation_policy=keep, enable_async_checkpointing=False, cleanup_tmp_directories=True
            ),
        )

    def save(self, step: int, state: State, configuration: str) -> None:
        """Writes the state after ``step`` steps, with the configuration that made it; a second save is no save."""
        if step in self.steps():
            return
        items = {name: ocp.args.StandardSave(leaves) for name, leaves in _items(state).items()}
        self._manager.save(step, args=ocp.args.Composite(**items), custom_metadata={"configuration": configuration})
        self._manager.wait_until_finished()

    def steps(self) -> list[int]:
        """Steps that can be restored, oldest first."""
        return sorted(self._manager.all_steps())

    def configuration(self, step: int) -> str:
        """The configuration that the checkpoint was made with."""
        metadata = self._manager.metadata(step).custom_metadata or {}
        return str(metadata["configuration"])

    def restore(self, step: int, template: State) -> State:
        """The whole state of ``step``, placed as ``template`` says (shapes, shardings); its buffers can be donated."""
        try:
            wanted = {name: ocp.args.StandardRestore(leaves) for name, leaves in _items(template).items()}
            restored = self._manager.restore(step, args=ocp.args.Composite(**wanted))
        except (ValueError, KeyError, FileNotFoundError, OSError) as error:
            raise UserError(f"the checkpoint {self._folder / str(step)} cannot be read: {error}") from error
        state = unflatten(
            template, {name: leaf for item in ("learned", "training") for name, leaf in restored[item].items()}
        )
        owned: State = jax.tree.map(own, state)
        return owned

    def close(self) -> None:
        self._manager.close()


def own(restored: jax.Array) -> jax.Array:
    """A restored array in a buffer of ours, where it lies; the buffer it came in, which may be the reader's, is let go.

    Donating a buffer of the reader's would copy in silence. One array after the other: never the whole state twice.
    """
    copied: jax.Array = copy_program(restored)(restored).block_until_ready()
    restored.delete()
    return copied


def copy_program(array: jax.Array | jax.ShapeDtypeStruct) -> Any:
    """What `own` runs, from `jax.jit`."""
    return jax.jit(jnp.copy, out_shardings=array.sharding)


class _Milestones(preservation_policy.PreservationPolicy):
    def __init__(self, is_milestone: Callable[[int], bool]) -> None:
        self._is_milestone = is_milestone

    def should_preserve(self, checkpoints: Any, *, context: Any) -> list[bool]:
        return [self._is_milestone(checkpoint.step) for checkpoint in checkpoints]
