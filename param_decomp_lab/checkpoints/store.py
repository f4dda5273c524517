"""Checkpoints of a run: ``ckpts/<step>/`` with the items ``learned`` and ``training`` (T5).

``learned`` is what a reader of the decomposition wants (components, CI function), ``training`` the rest of the
trajectory, so that looking at V and U need not read moments and sources. Arrays are stored under their path in the
state, so that a file can be read without our classes.
"""

import logging
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from jax.errors import JaxRuntimeError
from jax.tree_util import keystr, tree_flatten_with_path
from orbax.checkpoint.checkpoint_managers import preservation_policy

from param_decomp_jax.ci import CIFunction
from param_decomp_jax.components import Components
from param_decomp_jax.state import State
from param_decomp_lab.checkpoints.damage import (
    DAMAGED_PREFIX,
    Damaged,
    described,
    find_file_damage,
    read_description,
    record_files,
    set_aside,
)
from param_decomp_lab.checkpoints.fingerprints import fingerprint, fingerprints
from param_decomp_lab.errors import CannotWrite, UserError
from param_decomp_lab.processes.group import ALONE, Processes
from param_decomp_lab.run_folder.folder import CHECKPOINTS, checkpoint_steps
from param_decomp_lab.run_folder.unwritable import why_not_written

LEARNED = ("components", "ci")
TEMPORARY = ".orbax-checkpoint-tmp"
"""In the names of folders that orbax has not finished."""
RETRY_AFTER_S = 2.0
"""Between two looks at a checkpoint that seems damaged."""


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


class Learned(NamedTuple):
    """What a reader of a decomposition wants: the item ``learned``, with the names that it has in a `State`."""

    components: Components
    ci: CIFunction


class Checkpoints:
    """The checkpoints in a run folder, oldest first by their steps.

    ``keep_last``: how many of the newest stay (None: all); ``is_milestone``: steps that stay whatever comes after.
    Saves are atomic: orbax fills a temporary folder and renames it. With every array goes its fingerprint, by which it
    is judged when it is read. Nothing is made, swept or deleted before the first save, so a run that goes on meanwhile
    can be read.
    """

    def __init__(
        self,
        run_folder: Path,
        keep_last: int | None = None,
        is_milestone: Callable[[int], bool] = lambda step: False,
        processes: Processes = ALONE,
    ) -> None:
        logging.getLogger("absl").setLevel(logging.ERROR)  # orbax narrates every save
        self._keep_last, self._is_milestone, self._processes = keep_last, is_milestone, processes
        self._run_folder = run_folder
        self._folder = (run_folder / CHECKPOINTS).resolve()

    @cached_property
    def _manager(self) -> Any:
        policies: list[Any] = [preservation_policy.LatestN(self._keep_last), _Milestones(self._is_milestone)]
        keep = (
            preservation_policy.PreserveAll()
            if self._keep_last is None
            else preservation_policy.AnyPreservationPolicy(policies)
        )
        return ocp.CheckpointManager(
            self._folder,
            options=ocp.CheckpointManagerOptions(
                preservation_policy=keep, enable_async_checkpointing=False, cleanup_tmp_directories=True
            ),
        )

    def save(
        self, step: int, state: State, configuration: str, inputs: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        """Writes the state after ``step`` steps, with the configuration that made it; a second save is no save.

        ``inputs``: fingerprints of what the run was given besides. CannotWrite where the folder does not take it: what
        was saved before is still there, and nothing half-made counts.
        """
        if self._processes.from_first("saved" if step in self.steps() else ""):
            return
        items = _items(state)
        prints = {name: fingerprints(leaves) for name, leaves in items.items()}
        about = described(configuration, prints, inputs)
        arguments = {name: ocp.args.StandardSave(leaves) for name, leaves in items.items()}
        try:
            self._manager.save(step, args=ocp.args.Composite(**arguments), custom_metadata=about)
            self._manager.wait_until_finished()
            if self._processes.first:
                record_files(self.path(step), items)
        except Exception as error:
            why = why_not_written(error, self._folder)
            if why is None:
                raise
            raise CannotWrite(f"the checkpoint of step {step} could not be saved: {why}") from error

    def sweep(self) -> None:
        """Removes what saves that were killed have left half-made. For the run itself, in one process."""
        for half_made in self._folder.glob(f"*{TEMPORARY}*"):
            shutil.rmtree(half_made, ignore_errors=True)

    def path(self, step: int) -> Path:
        return self._folder / str(step)

    def steps(self) -> list[int]:
        """Steps of complete checkpoints, good or damaged."""
        return checkpoint_steps(self._run_folder)

    def set_aside(self) -> list[str]:
        """Names of the folders of checkpoints that were found damaged earlier."""
        return sorted(path.name for path in self._folder.glob(f"{DAMAGED_PREFIX}*"))

    def configuration(self, step: int) -> str:
        """The configuration that the checkpoint was made with. `Damaged` when it cannot be read."""
        return str(read_description(self.path(step))["configuration"])

    def inputs(self, step: int) -> dict[str, str]:
        """As `save` was given them. `Damaged` when they cannot be read."""
        return dict(read_description(self.path(step))["inputs"])

    def restore(self, step: int, template: State) -> State:
        """The whole state of ``step``, placed as ``template`` says (shapes, shardings); its buffers can be donated.

        `Damaged` when it cannot be read or is not what was saved.
        """
        leaves = self._read(step, _items(template))
        state: State = unflatten(template, leaves)
        return state

    def restore_learned(self, step: int, template: Learned) -> Learned:
        """Components and CI function of ``step`` alone, as `restore` does it, on whatever devices saved them."""
        learned: Learned = unflatten(template, self._read(step, {"learned": flatten(template)}))
        return learned

    def _read(self, step: int, items: Mapping[str, dict[str, Any]]) -> dict[str, jax.Array]:
        """The arrays of ``items``, by name. What one process finds wrong is raised in all of them."""
        arrays: dict[str, jax.Array] = {}
        try:
            with self._sharing_errors():
                prints = read_description(self.path(step))["fingerprints"]
                for item, wanted in items.items():
                    self._read_item(step, item, wanted, arrays)
            # Not before: a fingerprint takes all processes, so in here none may find what the others do not.
            with self._sharing_errors():
                for item, wanted in items.items():
                    for name, expected in prints.get(item, {}).items():
                        if name in wanted and fingerprint(arrays[name]) != expected:
                            raise Damaged(f"{self.path(step) / item}: {name} does not hold what was saved")
        except UserError:
            for array in arrays.values():  # there may be no room for two states
                array.delete()
            raise
        return arrays

    def _read_item(self, step: int, item: str, wanted: dict[str, Any], arrays: dict[str, jax.Array]) -> None:
        """Adds what an item holds to ``arrays``. No word to other processes: orbax's manager would leave them waiting
        for one that fails."""
        checkpoint = self.path(step)
        wrong = find_file_damage(checkpoint, [item])
        if wrong:
            raise Damaged(f"{checkpoint}: {wrong}")
        handler = ocp.StandardCheckpointHandler()
        try:
            read = handler.restore(checkpoint / item, args=ocp.args.StandardRestore(wanted))
        except (MemoryError, JaxRuntimeError):
            raise
        except Exception as error:
            if "permission denied" in str(error).lower().replace("_", " "):
                raise UserError(f"{checkpoint / item} may not be read: {error}") from error
            raise Damaged(f"{checkpoint / item} cannot be read: {error}") from error
        finally:
            handler.close()
        for name, array in read.items():
            arrays[name] = own(array)

    @contextmanager
    def _sharing_errors(self) -> Iterator[None]:
        """A block in which every process may find something wrong; all raise what the first of them has found."""
        found: UserError | None = None
        try:
            yield
        except UserError as error:
            found = error
        kind = "damaged" if isinstance(found, Damaged) else "refused"
        said = self._processes.gather("" if found is None else f"{kind} {found}")
        first = next((words for words in said if words), "")
        if first:
            kind, _, text = first.partition(" ")
            try:
                raise (Damaged if kind == "damaged" else UserError)(text) from found
            finally:
                found = None  # it holds this frame, which would hold it

    def restore_newest(self, template: State, fits: Callable[[int], None]) -> tuple[int, State, dict[int, str]] | None:
        """The newest checkpoint that is good, its step, and what is wrong with the newer ones; None if there is none
        at all. The same one in all processes.

        ``fits``: is asked of each step before its arrays are read, and raises UserError where it is another run's.
        UserError when all are damaged; they stay where they are.
        """
        wrong: dict[int, str] = {}
        steps = [int(step) for step in self._processes.from_first(" ".join(map(str, self.steps()))).split()]
        for step in reversed(steps):
            found = self._try_twice(step, template, fits)
            if not isinstance(found, str):
                return step, found, wrong
            wrong[step] = found
        if wrong:
            lines = "\n  ".join(wrong.values())
            raise UserError(f"no checkpoint of this run is good; nothing was changed:\n  {lines}")
        aside = self.set_aside()
        if aside:
            raise UserError(
                f"{self._folder} has no checkpoint but damaged ones ({', '.join(aside)}); to begin again, start "
                "another run with the same configuration"
            )
        return None

    def _try_twice(self, step: int, template: State, fits: Callable[[int], None]) -> State | str:
        """The state of ``step``, or what is wrong with it. A shared file system may fail for a moment, so nothing is
        called damaged at the first look."""
        wrong = ""
        for wait in (0.0, RETRY_AFTER_S):
            time.sleep(wait)
            try:
                with self._sharing_errors():
                    fits(step)
                return self.restore(step, template)
            except Damaged as error:
                wrong = str(error)
        return wrong

    def rename_damaged(self, steps: Iterable[int]) -> list[str]:
        """Gives damaged checkpoints other names, so that their steps can be saved again. For process 0."""
        return [set_aside(self.path(step)).name for step in steps]

    def close(self) -> None:
        if "_manager" in self.__dict__:
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
