"""Writes the batch script of a Slurm job with submitit, and submits it.

submitit turns options into a script and an array, and parses the job number. It does not run the job: it would start a
pickled function, and on a signal it would requeue the job from a handler in the first task, while the others are
elsewhere in a step. Our tasks agree on a step, save together, and `slurm/start.sh` requeues.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import submitit

from param_decomp_lab.errors import UserError
from param_decomp_lab.launch.layout import JobLayout

MANAGED = {
    "signal": "--notice", "nodes": "--nodes", "ntasks-per-node": "--gpus-per-node", "array": "--sweep",
    "output": "", "requeue": "", "no-requeue": "", "open-mode": "", "chdir": "", "ntasks": "--gpus-per-node",
}  # fmt: skip
"""Options of sbatch that resuming and layout depend on, with the option of `pd launch` that sets each."""


@dataclass(frozen=True)
class SlurmJob:
    """Options of a Slurm job. ``notice_s``: seconds between the signal to stop and the end; ``more``: other options of
    `sbatch`, None for options without a value."""

    time: str = "24:00:00"
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    cpus_per_task: int = 12
    shared: bool = False
    notice_s: int = 300
    more: Mapping[str, str | None] | None = None


def parse_more(texts: Sequence[str]) -> dict[str, str | None]:
    """Parses `--sbatch key=value` or `--sbatch key`. Raises UserError for options that `pd launch` sets itself."""
    found: dict[str, str | None] = {}
    for text in texts:
        key, equals, value = text.removeprefix("--").partition("=")
        key = key.strip().replace("_", "-")
        if not re.fullmatch(r"[A-Za-z][A-Za-z0-9-]*", key):
            raise UserError(f"--sbatch {text!r}: should be a long option of sbatch, such as constraint=h100")
        # sbatch accepts unambiguous prefixes of options, such as --sig, so these are refused, too.
        managed = key if key in MANAGED else next((option for option in MANAGED if option.startswith(key)), None)
        if managed is not None:
            other = f"; use {MANAGED[managed]}" if MANAGED[managed] else ", since a run that is requeued depends on it"
            short = "" if managed == key else f" (sbatch takes {key} for it)"
            raise UserError(f"--sbatch {text}: {managed} cannot be set{short}{other}")
        found[key] = value if equals else None
    return found


def script_text(job: SlurmJob, layout: JobLayout, name: str, runs: Sequence[Path], script: Path) -> str:
    """Returns the batch script that starts ``runs``, as an array if there are several. ``name``: of the job;
    ``script``: path where it will be saved. Raises UserError for options that do not fit on a line of the script.
    """
    executor = _Script(script.parent)
    here = Path.cwd()
    several = len(runs) > 1
    log = script.with_name("%A_%a.log") if several else runs[0] / "slurm-%j.log"
    options: dict[str, Any] = {"partition": job.partition, "account": job.account, "qos": job.qos}
    if layout.on_gpus:
        options["gpus_per_node"] = layout.per_node
    if not job.shared:
        options |= {"exclusive": True, "mem": "0"}
    executor.update_parameters(
        job_name=_value("the name of the configuration", name),
        nodes=layout.nodes,
        ntasks_per_node=layout.per_node,
        cpus_per_task=job.cpus_per_task,
        time=_value("--time", job.time),
        setup=_setup(layout, runs, script, here),
        use_srun=False,
        stderr_to_stdout=True,
        wckey=None,
        additional_parameters={
            "requeue": True,
            "signal": f"TERM@{job.notice_s}",
            "output": log if _is_plain(log.parent) else os.devnull,
            "chdir": here if _is_plain(here) else "/",
            **{
                key: True if value is None else _value(f"--sbatch {key}", value)
                for key, value in (job.more or {}).items()
            },
        },
        **{
            key: _value(f"--{key}", value) if isinstance(value, str) else value
            for key, value in options.items()
            if value is not None
        },
    )
    if several:
        executor.parameters["map_count"] = len(runs)
    return str(executor._make_submission_file_text('exec bash "$run/code/slurm/start.sh" "$run"', uid=""))


def _value(option: str, text: str) -> str:
    """Returns the value of an option in the form that submitit needs.

    sbatch reads a backslash as an escape, even within the quotes that submitit adds. Raises UserError for a line break,
    after which a new line of the script would begin, and for a value that is not text.
    """
    bad = next((character for character in text if unicodedata.category(character) in ("Cc", "Cs")), None)
    if bad is not None:
        raise UserError(
            f"{option}: {text!r} contains {bad!r}; in a batch script it must be one line without control characters"
        )
    return text.replace("\\", "\\\\")


def _is_plain(folder: Path) -> bool:
    """Whether Slurm takes the path from an option literally: it replaces patterns with %, and stops doing so if there
    is a backslash. Other paths are passed to the shell instead.
    """
    return not any(c in "%\\" or unicodedata.category(c) in ("Cc", "Cs") for c in str(folder))


def _setup(layout: JobLayout, runs: Sequence[Path], script: Path, here: Path) -> list[str]:
    """Returns lines of shell that say which run the job starts, and how."""
    # Quoted twice: for this script, and for the shell that later runs the command.
    quoted = shlex.quote(shlex.quote(str(script)))
    if len(runs) == 1:
        lines = [f"run={shlex.quote(str(runs[0]))}", "export PD_JOB=$SLURM_JOB_ID"]
        resubmit = f"'sbatch '{quoted}"
    else:
        lines = ["runs=(", *(f"    {shlex.quote(str(run))}" for run in runs), ")"]
        lines += ["export PD_JOB=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"]
        lines += ["run=${runs[$SLURM_ARRAY_TASK_ID]}"]
        resubmit = f'"sbatch --array=$SLURM_ARRAY_TASK_ID "{quoted}'
    if len(runs) > 1 or not _is_plain(runs[0]):
        lines += ['exec >> "$run/slurm-$SLURM_JOB_ID.log" 2>&1']
    if not _is_plain(here):
        lines += [f"cd -- {shlex.quote(str(here))} || exit 2"]
    lines += [f"export PYTHON={shlex.quote(sys.executable)}", f"export PD_AGAIN={resubmit}"]
    lines += [f"export {name}={value}" for name, value in layout.shell_variables()]
    return lines


def submit(script: Path) -> str:
    """Submits a script and returns the job number. Raises UserError if Slurm refuses. Call `check_slurm` first."""
    environment = sbatch_environment(os.environ, script.read_text())
    done = subprocess.run(
        ["sbatch", str(script)], env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    if done.returncode:
        raise UserError(f"sbatch refuses the job: {(done.stderr or done.stdout).strip()}")
    return str(_Script._get_job_id_from_submission_command(done.stdout))


def check_slurm() -> None:
    """Raises UserError if there is no `sbatch`."""
    if shutil.which("sbatch") is None:
        raise UserError(
            "there is no Slurm here (no sbatch); submit on the cluster, run it here with --local, or see the script "
            "with --dry-run"
        )


KEPT_VARIABLES = ("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_TIME_FORMAT")
"""Variables that configure Slurm's commands and do not describe a job."""
JOB_PREFIXES = ("SLURM_", "SLURMD_", "SRUN_", "SUBMITIT_", "SBATCH_CPU_BIND", "SBATCH_MEM_BIND", "PMI_", "PMIX_")
USER_DEFAULTS = ("ACCOUNT", "PARTITION", "QOS", "RESERVATION", "CONSTRAINT", "CLUSTERS")
"""Suffixes of variables such as ``SBATCH_ACCOUNT``, which users set once for all their jobs."""
GPU_VARIABLES = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL")


def without_job_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment without the variables of an enclosing Slurm job, which sbatch would read and pass on."""
    gone = GPU_VARIABLES if "SLURM_JOB_ID" in environment else ()
    return {
        name: value
        for name, value in environment.items()
        if name in KEPT_VARIABLES or not (name.startswith(JOB_PREFIXES) or name in gone)
    }


def sbatch_environment(environment: Mapping[str, str], script: str) -> dict[str, str]:
    """Returns the environment for sbatch: `without_job_variables`, without defaults that override
    the script's options.
    """
    open_options = {f"SBATCH_{name}" for name in USER_DEFAULTS if f"#SBATCH --{name.lower()}=" not in script}
    return {
        name: value
        for name, value in without_job_variables(environment).items()
        if not name.startswith("SBATCH_") or name in open_options
    }


class _Script(submitit.SlurmExecutor):
    """Generates the script's text, even on machines without Slurm."""

    @classmethod
    def affinity(cls) -> int:
        return 1

    parameters: dict[str, Any]
