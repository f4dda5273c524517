"""`ended.json` of a run folder: how the run ended, if it could still be written. Absent while the run is running."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

from param_decomp_lab.errors import UserError
from param_decomp_lab.folders import write_whole
from param_decomp_lab.processes.group import ALONE, Processes
from param_decomp_lab.processes.stop_signal import STOPPED
from param_decomp_lab.runs.lock import displaced_by
from param_decomp_lab.safe_io.json_text import read_json

ENDING_FILE = "ended.json"
Ending = Literal["finished", "stopped", "failed"]


@contextmanager
def record_end(
    run_folder: Path,
    stopped: type[Exception],
    processes: Processes = ALONE,
    in_place: Callable[[], bool] = lambda: True,
) -> Iterator[None]:
    """A block around a run; process 0 records how it ends, also when ended by `Processes.end`, but not when killed.

    ``stopped``: the exception of a run that was asked to stop. ``in_place``: whether the folder is still the run's.
    A resumption refused with a UserError before `clear_end` keeps the record of the previous end.
    """
    file = run_folder / ENDING_FILE

    def note(how: Ending, why: str) -> None:
        with suppress(OSError):  # a folder that cannot be written is reported elsewhere
            # Otherwise, another job has the run, or another folder has its name.
            if processes.first and in_place() and displaced_by(run_folder) is None:
                write_whole(file, json.dumps({"how": how, "why": why, "time": time.time()}) + "\n")

    def by_force(status: int) -> None:
        note("stopped" if status == STOPPED else "failed", f"ended with status {status}")

    processes.exit_hooks.append(by_force)
    try:
        yield
    except UserError as error:
        if not file.exists():
            note("failed", str(error))
        raise
    except BaseException as error:
        note("stopped" if isinstance(error, stopped) else "failed", str(error) or type(error).__name__)
        raise
    else:
        note("finished", "")
    finally:
        processes.exit_hooks.remove(by_force)


def clear_end(run_folder: Path) -> None:
    """Removes the record of the previous end when a run starts or resumes. For process 0."""
    with suppress(OSError):
        (run_folder / ENDING_FILE).unlink(missing_ok=True)


def read_ending(run_folder: Path) -> tuple[Ending, str] | None:
    """How the run ended and why; None while it is running, after a kill, or if the file is unreadable."""
    try:
        found = read_json(run_folder / ENDING_FILE, "the record of a run's end", dict)
    except UserError:
        return None
    how, why = found.get("how"), str(found.get("why", ""))
    return (how, why) if how in ("finished", "stopped", "failed") else None
