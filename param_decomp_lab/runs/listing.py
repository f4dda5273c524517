"""`pd runs`: lists the runs below a folder, from small files only, any of which may be damaged."""

import json
import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any, Literal

from rich.text import Text

from param_decomp_lab.config.wrapper import RUN_ID
from param_decomp_lab.errors import UserError
from param_decomp_lab.runs.configuration import PER_POSITION, attack_name, component_counts
from param_decomp_lab.runs.ending import ENDING_FILE, read_ending
from param_decomp_lab.runs.evaluation_rows import attacks, kl, l0_names, l0_table
from param_decomp_lab.runs.folder import CHECKPOINTS, CONFIG_FILE, checkpoint_steps
from param_decomp_lab.runs.imported import read_imported
from param_decomp_lab.runs.lock import LOCK_FILE, holder, is_held
from param_decomp_lab.runs.metrics_file import METRICS_FILE, parse_row
from param_decomp_lab.runs.position_attack import find_position_attack
from param_decomp_lab.runs.series import series_by_key
from param_decomp_lab.safe_io.printable import printable
from param_decomp_lab.safe_io.yaml_text import read_mapping
from param_decomp_lab.ui.console import wide_console
from param_decomp_lab.ui.numbers import duration, number
from param_decomp_lab.ui.tables import plain_table

DEPTH = 4
"""Depth of the search below the given folder: sweeps and experiments keep their runs in subfolders."""
PATIENCE_S = 900.0
"""A run counts as stopped if it wrote nothing for this long and for ten times its logging interval."""
TAIL = 1 << 20
"""Bytes read from the end of `metrics.jsonl` to find the last rows."""
WIDEST = 60
"""Longest folder name that is not wrapped, in characters."""

State = Literal["waiting", "training", "stopped", "finished", "imported", "failed", "broken"]
STYLES: dict[State, str] = {
    "waiting": "dim", "training": "green", "stopped": "yellow", "finished": "bold", "imported": "bold", "failed": "red",
    "broken": "red",
}  # fmt: skip


@dataclass(frozen=True)
class RunStatus:
    """The status of a run, read from its folder. ``step``: finished training steps; ``steps``: planned steps.
    ``seconds``: per step. ``seen``: when it last wrote something, in seconds since 1970. ``why``: reason if it
    failed or is broken, or where it was imported from. ``attack``: what `main`'s attack is called, with
    its scope. ``position_attack``: the error under one with a mask for each position, from the newest comparison with
    baselines, made at step ``position_attack_step``. ``last``: the newest value of every metric."""

    folder: str
    id: str
    state: State
    name: str = ""
    step: int | None = None
    steps: int | None = None
    checkpoint: int | None = None
    seconds: float | None = None
    tokens_per_second: float | None = None
    seen: float = 0.0
    why: str = ""
    main: dict[str, float] = field(default_factory=dict)
    attack: str = "attack"
    position_attack: float | None = None
    position_attack_step: int | None = None
    last: dict[str, float] = field(default_factory=dict)

    @property
    def headline(self) -> dict[str, float]:
        """The main metrics under the names that readers see: an attack with what it finds masks for."""
        found: dict[str, float] = {}
        for name, value in self.main.items():
            found[self.attack if name == "attack" else name] = value
            if name == "attack" and self.position_attack is not None:
                step = self.position_attack_step
                other = f" at step {step:,}" if step is not None and step != self.step else ""
                found[f"attack, {PER_POSITION}, beside baselines{other}"] = self.position_attack
        return found


def find_runs(folders: Sequence[Path]) -> list[RunStatus]:
    """Returns all runs in or below ``folders``, the most recently active first. Raises UserError
    for a missing folder.
    """
    for folder in folders:
        if not folder.is_dir():
            raise UserError(f"{folder} is not a folder; say where the runs are: pd runs FOLDER")
    paths = dict.fromkeys(path for folder in folders for path in run_folders(folder, DEPTH))
    return sorted(map(read_run, paths), key=lambda run: -run.seen)


def run_folders(folder: Path, depth: int) -> Iterator[Path]:
    if _looks_like_a_run(folder):
        yield folder
    elif depth:
        try:
            below = sorted(entry.path for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False))
        except OSError:
            return
        for path in map(Path, below):
            if not path.name.startswith("."):
                yield from run_folders(path, depth - 1)


def _looks_like_a_run(folder: Path) -> bool:
    """Whether the folder looks like a run, by its files or its name."""
    try:
        has_files = (folder / CONFIG_FILE).is_file() or (folder / CHECKPOINTS).is_dir()
    except OSError:  # somebody else's folder
        return False
    return has_files or re.fullmatch(RUN_ID, folder.name) is not None


def read_run(folder: Path) -> RunStatus:
    """The status of one run; problems with its folder are reported in it, not raised."""
    try:
        return _read(folder)
    except Exception as error:  # an error in one run must not hide the others
        why = str(error) if isinstance(error, UserError | OSError) else f"{type(error).__name__}: {error}"
        return RunStatus(str(folder), folder.name, "broken", seen=_seen(folder), why=printable(why, 2000))


def _read(folder: Path) -> RunStatus:
    config = read_mapping(folder / CONFIG_FILE, "the configuration of a run")
    steps = config["torch"]["pd"]["steps"]
    if type(steps) is not int:
        raise UserError(f"{folder / CONFIG_FILE}: pd.steps is {steps!r}")
    last, logged, span = _last_values(folder / METRICS_FILE)
    checkpoints = checkpoint_steps(folder)
    newest = max(checkpoints, default=None)
    seen, seconds = _seen(folder), last.get("train/perf/step_time_s")
    ending, imported = read_ending(folder), read_imported(folder)
    held, locked_at = is_held(folder), _changed(folder / LOCK_FILE)
    # The lock is held by another machine, whose process cannot be checked; only that it took the lock after the last
    # end.
    on_other_machine = held is None and holder(folder) is not None and locked_at > _changed(folder / ENDING_FILE)
    quiet = time.time() - max(seen, locked_at if on_other_machine else 0.0)
    writes = quiet < max(PATIENCE_S, 10 * span * (seconds or 0.0))
    state: State
    if imported is not None:
        state = "imported"
    elif held or (on_other_machine and writes):
        state = "training"
    elif ending is not None:
        state = ending[0]
    elif newest == steps:
        state = "finished"
    elif logged is None and not (folder / CHECKPOINTS).is_dir():
        state = "waiting"
    else:
        state = "training" if held is None and writes else "stopped"
    of_positions = find_position_attack(folder)
    done = [step for step in (logged, newest) if step is not None]
    return RunStatus(
        folder=str(folder),
        id=folder.name,
        state=state,
        name=str(config["wrapper"].get("run_name", "")),
        step=max(done) if done else None,
        steps=steps,
        checkpoint=newest,
        seconds=seconds,
        tokens_per_second=last.get("train/perf/tok_per_s"),
        seen=seen,
        why=str(imported or "") or (ending[1] if ending is not None and state == "failed" else ""),
        main=_main(last, config),
        attack=next((attack_name(config, name) for name in attacks(series_by_key([{"step": 0, **last}]))), "attack"),
        position_attack=None if of_positions is None else of_positions.error,
        position_attack_step=None if of_positions is None else of_positions.step,
        last=last,
    )


def _seen(folder: Path) -> float:
    """When the run last wrote: a row, a checkpoint, its configuration."""
    own = [time for path in (METRICS_FILE, CHECKPOINTS, CONFIG_FILE) if (time := _changed(folder / path))]
    return max(own, default=_changed(folder))


def _changed(path: Path) -> float:
    """Returns the modification time in seconds since 1970; 0 if it cannot be read."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _last_values(file: Path) -> tuple[dict[str, float], int | None, int]:
    """Newest value of every metric near the end of `metrics.jsonl`; steps done by then (None without a row); steps
    between the last two training rows. Skips lines that are incomplete because of a kill, or because only the end of
    the file is read.
    """
    last: dict[str, float] = {}
    done: int | None = None
    trained: list[int] = []
    for row in rows_at_the_end(file):
        step = row["step"]
        values = {key: series.last for key, series in series_by_key([row]).items()}
        last |= values
        has_trained = any(key.startswith("train/") for key in values)
        done = max(done or 0, step + 1 if has_trained else step)
        trained += [step] if has_trained else []
    span = trained[-1] - trained[-2] if len(trained) > 1 else 1
    return last, done, span


def rows_at_the_end(file: Path) -> Iterator[dict[str, Any]]:
    """Yields rows near the end of a `metrics.jsonl`, if it exists; skips lines that are not rows."""
    if not file.is_file():
        return
    with file.open("rb") as lines:
        size = lines.seek(0, os.SEEK_END)
        lines.seek(max(0, size - TAIL))
        if size > TAIL:
            lines.readline()
        for line in lines:
            with suppress(ValueError):
                yield parse_row(line)
            if not line.endswith(b"\n"):  # the run is writing it: the next read gives its remainder
                return


def _main(last: dict[str, float], config: dict[str, Any]) -> dict[str, float]:
    """The main metrics of a decomposition."""
    series = series_by_key([{"step": 0, **last}])
    found = {"loss": last.get("train/loss/total")}
    for name, masking in (("kl ci", "ci_masked"), ("kl stoch", "stoch_masked")):
        masked_kl = kl(series, masking)
        found[name] = masked_kl.last if masked_kl else None
    found["attack"] = next((values.last for values in attacks(series).values()), None)
    l0 = l0_table(series, component_counts(config, l0_names(series)))
    found["L0"] = l0.mean if l0 else None
    errors = [value for key, value in last.items() if key.startswith("eval/identity_ci_error/")]
    found["ci errors"] = sum(errors) if errors else None
    found["MMCS"] = last.get("eval/tms/mmcs")
    return {name: value for name, value in found.items() if value is not None}


# --- what is printed ---


def show_runs(found: Sequence[RunStatus], as_json: bool) -> None:
    """A table, or JSON on one object per run."""
    if as_json:
        print(json.dumps([_plain(asdict(run)) for run in found], indent=2))
        return
    console = wide_console()
    if not found:
        console.print("no runs here")
        return
    columns = (("run", "wrap"), ("name", "wrap"), ("state", "left"), ("step", "right"), ("a step", "right"))
    table = plain_table("", *columns, ("tok/s", "right"), ("seen", "right"), ("", "wrap"))
    # An unwrapped folder name can be copied; the numbers may take more lines.
    table.columns[0].no_wrap = all(len(run.folder) <= WIDEST for run in found)
    for run in found:
        table.add_row(
            Text(printable(run.folder)), Text(printable(run.name, 200)), Text(run.state, style=STYLES[run.state]),
            _progress(run), _step_time(run),
            "" if run.tokens_per_second is None else number(run.tokens_per_second), _ago(run.seen), _headline_text(run),
        )  # fmt: skip
    console.print(table)


def _plain(value: Any) -> Any:
    """JSON has no NaN and no infinities: they are null."""
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    return None if isinstance(value, float) and not isfinite(value) else value


def _progress(run: RunStatus) -> str:
    if run.steps is None:
        return ""
    return f"{run.step or 0:,} of {run.steps:,}"


def _step_time(run: RunStatus) -> str:
    if run.seconds is None:
        return ""
    return f"{1000 * run.seconds:.3g} ms" if run.seconds < 1 else f"{run.seconds:.3g} s"


def _ago(seen: float) -> str:
    seconds = max(0.0, time.time() - seen)
    return f"{duration(seconds)} ago" if seconds < 86400 else f"{seconds / 86400:.0f} d ago"


def _headline_text(run: RunStatus) -> Text:
    if run.why:
        return Text(printable(run.why, 2000).splitlines()[0])
    return Text("  ".join(f"{name} {number(value)}" for name, value in run.headline.items()))
