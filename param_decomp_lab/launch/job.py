"""A job of Slurm: its batch script, made by submitit, and its submission.

Of submitit we take how options become a script and an array, and how a job's number is read. We do not let it run the
job: it would start a pickled function, and on its signal requeue the job from a handler in the first task, while the
others are somewhere else in a step. Our tasks agree on a step, save together, and `slurm/start.sh` requeues.
"""

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import submitit

from param_decomp_lab.errors import UserError
from param_decomp_lab.launch.layout import Layout

MANAGED = {
    "signal": "--notice", "nodes": "--nodes", "ntasks-per-node": "--gpus-per-node", "array": "--sweep",
    "output": "", "requeue": "", "no-requeue": "", "open-mode": "", "chdir": "", "ntasks": "--gpus-per-node",
}  # fmt: skip
"""Options of sbatch on which it depends that a run goes on, or where it is; and the options of ours that set them."""


@dataclass(frozen=True)
class Job:
    """What is asked of Slurm. ``notice_s``: seconds from being told to stop to the end; ``more``: options of `sbatch`,
    without value where it is None."""

    time: str = "24:00:00"
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    cpus_per_task: int = 12
    shared: bool = False
    notice_s: int = 300
    more: Mapping[str, str | None] | None = None


def parse_more(texts: Sequence[str]) -> dict[str, str | None]:
    """`--sbatch key=value` or `--sbatch key`. UserError for options that are ours to set."""
    found: dict[str, str | None] = {}
    for text in texts:
        key, equals, value = text.removeprefix("--").partition("=")
        key = key.strip().replace("_", "-")
        if not key:
            raise UserError(f"--sbatch {text}: should be an option of sbatch, such as constraint=h100")
        if key in MANAGED:
            other = f"; use {MANAGED[key]}" if MANAGED[key] else ", since a run that is requeued depends on it"
            raise UserError(f"--sbatch {text}: {key} cannot be set{other}")
        found[key] = value if equals else None
    return found


def script_text(job: Job, layout: Layout, name: str, runs: Sequence[Path], script: Path) -> str:
    """The batch script that starts ``runs``, as an array where there are several. ``name``: for people; ``script``:
    where it will be."""
    executor = _Script(script.parent)
    options: dict[str, Any] = {"partition": job.partition, "account": job.account, "qos": job.qos}
    if layout.on_gpus:
        options["gpus_per_node"] = layout.per_node
    if not job.shared:
        options |= {"exclusive": True, "mem": "0"}
    output = script.with_name("%A_%a.log") if len(runs) > 1 else runs[0] / "slurm-%j.log"
    executor.update_parameters(
        job_name=name,
        nodes=layout.nodes,
        ntasks_per_node=layout.per_node,
        cpus_per_task=job.cpus_per_task,
        time=job.time,
        setup=list(_setup(layout, runs, script)),
        use_srun=False,
        stderr_to_stdout=True,
        wckey=None,
        additional_parameters={
            "requeue": True,
            "signal": f"TERM@{job.notice_s}",
            "output": output,
            "chdir": Path.cwd(),
            **{key: True if value is None else value for key, value in (job.more or {}).items()},
        },
        **{key: value for key, value in options.items() if value is not None},
    )
    if len(runs) > 1:
        executor.parameters["map_count"] = len(runs)
    return str(executor._make_submission_file_text('exec bash "$run/code/slurm/start.sh" "$run"', uid=""))


def _setup(layout: Layout, runs: Sequence[Path], script: Path) -> list[str]:
    resubmit = f"sbatch {shlex.quote(str(script))}"
    if len(runs) == 1:
        lines = [f"run={shlex.quote(str(runs[0]))}", "export PD_JOB=$SLURM_JOB_ID"]
    else:
        lines = ["runs=(", *(f"    {shlex.quote(str(run))}" for run in runs), ")"]
        lines += ["export PD_JOB=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"]
        lines += ["run=${runs[$SLURM_ARRAY_TASK_ID]}", 'exec >> "$run/slurm-$SLURM_JOB_ID.log" 2>&1']
        resubmit = f"sbatch --array=$SLURM_ARRAY_TASK_ID {shlex.quote(str(script))}"
    lines += [f"export PYTHON={shlex.quote(sys.executable)}", f'export PD_AGAIN="{resubmit}"']
    lines += [f"export {name}={value}" for name, value in layout.shell_variables()]
    return lines


def submit(script: Path) -> str:
    """The number of the job. UserError where Slurm refuses, with its own words. After `check_slurm`."""
    environment = sbatch_environment(os.environ, script.read_text())
    done = subprocess.run(
        ["sbatch", str(script)], env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    if done.returncode:
        raise UserError(f"sbatch refuses the job: {(done.stderr or done.stdout).strip()}")
    return str(_Script._get_job_id_from_submission_command(done.stdout))


def check_slurm() -> None:
    """UserError where jobs cannot be submitted."""
    if shutil.which("sbatch") is None:
        raise UserError(
            "there is no Slurm here (no sbatch); submit on the cluster, run it here with --local, or see the script "
            "with --dry-run"
        )


KEPT_VARIABLES = ("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_TIME_FORMAT")
"""Which Slurm, and how it shows things; no part of another job."""
JOB_PREFIXES = ("SLURM_", "SLURMD_", "SRUN_", "SUBMITIT_", "SBATCH_CPU_BIND", "SBATCH_MEM_BIND", "PMI_", "PMIX_")
USER_DEFAULTS = ("ACCOUNT", "PARTITION", "QOS", "RESERVATION", "CONSTRAINT", "CLUSTERS")
"""As ``SBATCH_ACCOUNT``: what people set once for all their jobs."""
GPU_VARIABLES = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL")


def without_job_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Without what Slurm has set for a job inside of which we may be: sbatch would take options from it, and hand it on
    to the new job."""
    gone = GPU_VARIABLES if "SLURM_JOB_ID" in environment else ()
    return {
        name: value
        for name, value in environment.items()
        if name in KEPT_VARIABLES or not (name.startswith(JOB_PREFIXES) or name in gone)
    }


def sbatch_environment(environment: Mapping[str, str], script: str) -> dict[str, str]:
    """Scrubbed, and without variables that would go before what the script says: of a user's defaults stays what the
    script leaves open."""
    open_options = {f"SBATCH_{name}" for name in USER_DEFAULTS if f"#SBATCH --{name.lower()}=" not in script}
    return {
        name: value
        for name, value in without_job_variables(environment).items()
        if not name.startswith("SBATCH_") or name in open_options
    }


class _Script(submitit.SlurmExecutor):
    """For its text alone, which can be made where there is no Slurm."""

    @classmethod
    def affinity(cls) -> int:
        return 1

    parameters: dict[str, Any]
