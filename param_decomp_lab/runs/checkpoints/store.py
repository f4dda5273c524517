"""Checkpoints of a run: ``ckpts/<step>/`` with the items ``learned`` and ``training`` (T5).

``learned`` has the components and the CI function, ``training`` everything else of the train state, so that moments and
sources need not be read for V and U. Arrays are stored under their paths in the state, so that files can be read
without the classes of this package.
"""

import logging
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from jax.errors import JaxRuntimeError
from jax.tree_util import keystr, tree_flatten_with_path
from orbax.checkpoint.checkpoint_managers import preservation_policy

from param_decomp_jax.method.state import Learned, State
from param_decomp_lab.errors import CannotWrite, UserError
from param_decomp_lab.processes.group import ALONE, Processes
from param_decomp_lab.runs.checkpoints.damage import (
    DAMAGED_PREFIX,
    Damaged,
    find_file_damage,
    make_description,
    read_description,
    record_files,
    set_aside,
)
from param_decomp_lab.runs.checkpoints.fingerprints import fingerprint, fingerprints
from param_decomp_lab.runs.folder import CHECKPOINTS, checkpoint_steps
from param_decomp_lab.runs.identity import Displaced, FolderIdentity
from param_decomp_lab.runs.unwritable import why_not_written
from param_decomp_lab.safe_io.printable import shortened

LEARNED = ("components", "ci")
TEMPORARY = ".orbax-checkpoint-tmp"
"""Part of the names of folders that orbax has not finished."""
_ORBAX = str(Path(ocp.__file__).parents[1])
"""The folder of its code."""
RETRY_AFTER_S = 2.0
"""Wait before a checkpoint that seems damaged is read again."""


def flatten(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> dict[str, Any]:
    """Leaves by path, such as ``components/layers.1-2.mlp.up_proj/V``."""
    # A slash inside a component of the path would become a folder; stack names have none.
    return {keystr(path, simple=True, separator="/"): leaf for path, leaf in tree_flatten_with_path(tree, is_leaf)[0]}


def unflatten(template: Any, leaves: dict[str, Any]) -> Any:
    """The inverse of `flatten`, in the structure of ``template``."""
    return jax.tree.unflatten(jax.tree.structure(template), [leaves[name] for name in flatten(template)])


def _items(state: State | Learned) -> dict[str, dict[str, Any]]:
    leaves = flatten(state)
    learned = {name: leaf for name, leaf in leaves.items() if name.split("/")[0] in LEARNED}
    if isinstance(state, Learned):
        return {"learned": learned}
    return {"learned": learned, "training": {name: leaf for name, leaf in leaves.items() if name not in learned}}


class Checkpoints:
    """The checkpoints in a run folder, oldest first by their steps.

    ``keep_last``: how many of the newest to keep (None: all). ``is_milestone``: steps whose checkpoints are all kept.
    Saves are atomic: orbax fills a temporary folder and renames it. A fingerprint of every array is saved, and checked
    on reading. Nothing is created or deleted before the first save, so the checkpoints of a running run can be read.
    """

    def __init__(
        self,
        run_folder: Path,
        keep_last: int | None = None,
        is_milestone: Callable[[int], bool] = lambda step: False,
        processes: Processes = ALONE,
    ) -> None:
        _leave_errors_to_exceptions()
        self._keep_last, self._is_milestone, self._processes = keep_last, is_milestone, processes
        self._run_folder = run_folder
        self._folder = (run_folder / CHECKPOINTS).resolve()
        self._identity: FolderIdentity | None = None

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
        self, step: int, state: State | Learned, configuration: str, inputs: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        """Saves the state after ``step`` steps with its configuration; does nothing if that step is saved already.

        ``state``: the learned part alone is enough for everything but resuming. ``inputs``: fingerprints of the
        target's weights and the data. Raises CannotWrite if the folder cannot be written; earlier checkpoints then stay
        intact, and the incomplete one is ignored. Raises Displaced, in process 0, if the folder of the checkpoints is
        not where it was: orbax would make another, with this checkpoint alone.
        """
        self._check_folder()
        if self._processes.from_first("saved" if step in self.steps() else ""):
            return
        items = _items(state)
        prints = {name: fingerprints(leaves) for name, leaves in items.items()}
        about = make_description(configuration, prints, inputs)
        arguments = {name: ocp.args.StandardSave(leaves) for name, leaves in items.items()}
        try:
            self._manager.save(step, args=ocp.args.Composite(**arguments), custom_metadata=about)
            self._manager.wait_until_finished()
            if self._processes.first:
                record_files(self.path(step), items)
            self._check_folder()
        except Displaced:
            raise
        except Exception as error:
            why = why_not_written(error, self._folder)
            if why is None:
                raise
            raise CannotWrite(f"the checkpoint of step {step} could not be saved: {why}") from error

    def _check_folder(self) -> None:
        """Raises Displaced if the folder is not the one that this run has saved to or read from. For process 0."""
        if not self._processes.first:
            return
        if self._identity is not None:
            self._identity.check()
        elif self._folder.is_dir():
            self._identity = FolderIdentity(self._folder, self._run_folder)

    def sweep(self) -> None:
        """Removes temporary folders of saves that were killed. To be called by the run itself, in one process."""
        for half_made in self._folder.glob(f"*{TEMPORARY}*"):
            shutil.rmtree(half_made, ignore_errors=True)

    def path(self, step: int) -> Path:
        return self._folder / str(step)

    def steps(self) -> list[int]:
        """Steps of complete checkpoints, damaged ones included."""
        return checkpoint_steps(self._run_folder)

    def renamed(self) -> list[str]:
        """Names of the folders of checkpoints that were found damaged earlier."""
        return sorted(path.name for path in self._folder.glob(f"{DAMAGED_PREFIX}*"))

    def configuration(self, step: int) -> str:
        """The configuration saved in the checkpoint. Raises `Damaged` if it cannot be read."""
        return str(read_description(self.path(step))["configuration"])

    def inputs(self, step: int) -> dict[str, str]:
        """The fingerprints of inputs passed to `save`. Raises `Damaged` if they cannot be read."""
        return dict(read_description(self.path(step))["inputs"])

    def restore(self, step: int, template: State) -> State:
        """The whole state of ``step``, placed as ``template`` says (shapes, shardings); its buffers can be donated.

        Raises `Damaged` if it cannot be read or differs from what was saved.
        """
        leaves = self._read(step, _items(template))
        state: State = unflatten(template, leaves)
        return state

    def restore_learned(self, step: int, template: Learned) -> Learned:
        """Components and CI function of ``step`` alone, as `restore` does it, on whatever devices saved them."""
        learned: Learned = unflatten(template, self._read(step, {"learned": flatten(template)}))
        return learned

    def _read(self, step: int, items: Mapping[str, dict[str, Any]]) -> dict[str, jax.Array]:
        """The arrays of ``items``, by name. An error found by one process is raised in all of them."""
        arrays: dict[str, jax.Array] = {}
        try:
            with self._sharing_errors():
                prints = read_description(self.path(step))["fingerprints"]
                for item, wanted in items.items():
                    self._read_item(step, item, wanted, arrays)
            # Separately: fingerprints are computed by all processes, so all must have read the arrays without error.
            with self._sharing_errors():
                for item, wanted in items.items():
                    for name, expected in prints.get(item, {}).items():
                        if name in wanted and fingerprint(arrays[name]) != expected:
                            raise Damaged(f"{self.path(step) / item}: {name} does not hold what was saved")
        except UserError:
            for array in arrays.values():  # two states may not fit into memory
                array.delete()
            raise
        return arrays

    def _read_item(self, step: int, item: str, wanted: dict[str, Any], arrays: dict[str, jax.Array]) -> None:
        """Adds the arrays of an item to ``arrays``, without communication: orbax's manager would leave other processes
        waiting for one that fails."""
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
            cause = first_cause(error)
            if "permission denied" in cause.lower().replace("_", " "):
                raise UserError(f"{checkpoint / item} may not be read: {cause}") from error
            raise Damaged(f"{checkpoint / item} cannot be read: {cause}") from error
        finally:
            handler.close()
        for name, array in read.items():
            arrays[name] = copy_restored(array)

    @contextmanager
    def _sharing_errors(self) -> Iterator[None]:
        """A block in which any process may raise UserError; all raise the error of the first process that did."""
        found: UserError | None = None
        try:
            yield
        except UserError as error:
            found = error
        kind = "damaged" if isinstance(found, Damaged) else "refused"
        messages = self._processes.gather("" if found is None else f"{kind} {found}")
        first = next((words for words in messages if words), "")
        if first:
            kind, _, text = first.partition(" ")
            try:
                raise (Damaged if kind == "damaged" else UserError)(text) from found
            finally:
                found = None  # breaks the reference cycle with this frame

    def restore_newest(self, template: State, fits: Callable[[int], None]) -> tuple[int, State, dict[int, str]] | None:
        """The step and state of the newest undamaged checkpoint, the same in all processes, and what is wrong with
        newer ones, by step. None if the run has no checkpoint.

        ``fits``: called with each step before its arrays are read; raises UserError if the checkpoint is another
        run's. Raises UserError if all checkpoints are damaged, and leaves them in place.
        """
        self._check_folder()
        wrong: dict[int, str] = {}
        steps = [int(step) for step in self._processes.from_first(" ".join(map(str, self.steps()))).split()]
        for step in reversed(steps):
            found = self._try_twice(step, template, fits)
            if not isinstance(found, str):
                return step, found, wrong
            wrong[step] = found
        if wrong:
            lines = "\n  ".join(wrong.values())
            raise UserError(f"every checkpoint of this run is damaged; nothing was changed:\n  {lines}")
        renamed = self.renamed()
        if renamed:
            raise UserError(
                f"{self._folder} has only damaged checkpoints ({', '.join(renamed)}); to start over, train "
                "another run with the same configuration"
            )
        return None

    def _try_twice(self, step: int, template: State, fits: Callable[[int], None]) -> State | str:
        """The state of ``step``, or what is wrong with it. Tries twice: a shared file system may fail briefly."""
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
        """Renames damaged checkpoints, so that their steps can be saved again; returns the new names. For process 0."""
        return [set_aside(self.path(step)).name for step in steps]

    def close(self) -> None:
        if self._identity is not None:
            self._identity.close()
            self._identity = None
        if "_manager" in self.__dict__:
            self._manager.close()


def _leave_errors_to_exceptions() -> None:
    """Silences orbax and what it uses. Orbax logs every save, and the errors of its threads with tracebacks, although
    it later raises the first of these errors. asyncio logs the others, and Python logs those of abandoned coroutines.
    The storage library reports that it cannot reach event loops that orbax has closed.
    """
    for library in ("absl", "asyncio"):
        logging.getLogger(library).setLevel(logging.CRITICAL)
    if not isinstance(sys.unraisablehook, _HideOrbax):
        sys.unraisablehook = _HideOrbax(sys.unraisablehook)


@dataclass(frozen=True)
class _HideOrbax:
    """A `sys.unraisablehook` that ignores closed event loops and orbax's coroutines, and passes on everything else."""

    report: Callable[[Any], object]

    def __call__(self, unraisable: Any) -> None:
        code = getattr(unraisable.object, "cr_code", None)
        of_orbax = code is not None and code.co_filename.startswith(_ORBAX)
        if not of_orbax and str(unraisable.exc_value) != "Event loop is closed":
            self.report(unraisable)


def first_cause(error: BaseException) -> str:
    """The first line of the message of the error that this one was raised from; TensorStore's messages have many."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = str(error).strip().splitlines()
    return shortened(lines[0] if lines else type(error).__name__, 500)


def copy_restored(restored: jax.Array) -> jax.Array:
    """Copies a restored array on its devices and deletes the original, whose buffer may belong to the reader.

    Donating a buffer of the reader would copy it silently. To be called for one array at a time, so that the state is
    never held twice.
    """
    copied: jax.Array = copy_program(restored)(restored).block_until_ready()
    restored.delete()
    return copied


def copy_program(array: jax.Array | jax.ShapeDtypeStruct) -> Any:
    """The jitted function that `copy_restored` calls."""
    return jax.jit(jnp.copy, out_shardings=array.sharding)


class _Milestones(preservation_policy.PreservationPolicy):
    def __init__(self, is_milestone: Callable[[int], bool]) -> None:
        self._is_milestone = is_milestone

    def should_preserve(self, checkpoints: Any, *, context: Any) -> list[bool]:
        return [self._is_milestone(checkpoint.step) for checkpoint in checkpoints]
