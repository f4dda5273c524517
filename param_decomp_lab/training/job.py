"""What the parts of a training run share: its configuration, folder, processes, checkpoints and stop signal."""

from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from param_decomp_lab.config import RunConfig
from param_decomp_lab.eval.evaluation import Evaluation
from param_decomp_lab.processes.group import Processes
from param_decomp_lab.processes.stop_signal import LAST_PATIENCE_S, StopSignal
from param_decomp_lab.runs.checkpoints.store import Checkpoints
from param_decomp_lab.runs.data_file import TextOfRun, write_data
from param_decomp_lab.runs.ending import clear_end
from param_decomp_lab.runs.folder import record_start, resume_command
from param_decomp_lab.runs.identity import FolderIdentity
from param_decomp_lab.runs.target_file import write_target
from param_decomp_lab.setup import Setup
from param_decomp_lab.training.inputs import fingerprint_inputs

NOTHING = "there was nothing to save"


class Preempted(Exception):
    """The run was asked to stop and has saved its state if there was anything to save. Exit status 75."""


class TrainingJob:
    """One job of a run, from its start or resumption to its end.

    ``check_lock``: raises if another job has taken the folder. ``evaluation``: None without data for it. ``identity``:
    identifies the folder, in process 0. ``inputs``: fingerprints of the target's weights and the data.
    """

    def __init__(
        self,
        config: RunConfig,
        setup: Setup,
        folder: Path,
        console: Console,
        processes: Processes,
        stop: StopSignal,
        check_lock: Callable[[], None],
    ) -> None:
        self.config, self.setup, self.folder, self.console = config, setup, folder, console
        self.processes, self.stop, self.check_lock = processes, stop, check_lock
        self.outline, self.spec = setup.outline, setup.problem.decomposition
        stop.hint = resume_hint(folder)
        self.evaluation = (
            None
            if setup.eval is None
            else Evaluation(config, setup.problem, setup.eval, setup.mesh, lambda: setup.text)
        )
        keep = config.method.cadence.keep_last_n_checkpoints
        self.checkpoints = Checkpoints(folder, keep, config.wrapper.is_milestone, processes)
        self.identity = FolderIdentity(folder) if processes.first else None
        self.inputs: dict[str, str] = {}

    def fingerprint_inputs(self) -> None:
        """Sets ``inputs``, under the mesh in force. Must be called in all processes."""
        self.inputs = fingerprint_inputs(self.setup, self.processes)

    def close(self) -> None:
        if self.identity is not None:
            self.identity.close()

    def is_in_place(self) -> bool:
        return self.identity is None or self.identity.is_in_place()

    def check_folder(self) -> None:
        """Raises Displaced, in process 0, if the run folder is no longer at its path, because the next write would
        create part of it anew.
        """
        if self.identity is not None:
            self.identity.check()

    def record_start(self, step: int, changes: Sequence[str] = (), renamed: Sequence[str] = ()) -> None:
        """Records in the folder that the run starts at ``step``, and with which target and text. ``changes``: to its
        configuration; ``renamed``: damaged checkpoints.
        """
        if self.processes.first:
            self.check_folder()
            clear_end(self.folder)
            record_start(self.folder, self.config, step, changes, renamed)
            write_target(self.folder, self.setup.problem.target.architecture)
            if self.setup.text is not None:
                write_data(self.folder, TextOfRun(self.setup.text.bos))

    def preempted(self, where: str) -> Preempted:
        self.stop.may_leave(where, LAST_PATIENCE_S)
        return Preempted(f"stopped {where}; {self.stop.hint}")


def resume_hint(folder: Path) -> str:
    return f"resume with `{resume_command(folder)}`"
