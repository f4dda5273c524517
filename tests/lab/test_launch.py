"""`pd launch`: sweeps, copies of the code, the batch script, the probe before it; processes here in place of a job."""

import itertools
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from param_decomp_lab.config import RunConfig, load_config
from param_decomp_lab.errors import UserError
from param_decomp_lab.launch import command as launching
from param_decomp_lab.launch import local
from param_decomp_lab.launch.code_copy import Code
from param_decomp_lab.launch.job import SlurmJob, parse_more, sbatch_environment, script_text, without_job_variables
from param_decomp_lab.launch.layout import JobLayout, choose_layout
from param_decomp_lab.launch.sweep import choices
from param_decomp_lab.probe.subprocess import ProbeOutput
from tests.lab.one_node import FAST, Checkout, sets
from tests.lab.several import environment_of
from tests.lab.tiny_run import LIGHT, PD, ROOT, Outcome, Tiny, pd_here, rows, saved_steps
from tests.plugin import needs_plugin

GPUS = JobLayout(nodes=2, per_node=4, simulated=None)
CPUS = JobLayout(nodes=1, per_node=2, simulated=3)


# ---- sweeps ----


def test_sweep_is_the_product_of_its_keys() -> None:
    found = choices(["pd.seed=0,1", "mesh={fsdp: 2, tensor: 1},{fsdp: 4}", "pd.x=1e-3"], ["pd.steps=3"])
    assert [choice.sets for choice in found] == [
        ("pd.seed=0", 'mesh={"fsdp": 2, "tensor": 1}', "pd.x=0.001"),
        ("pd.seed=0", 'mesh={"fsdp": 4}', "pd.x=0.001"),
        ("pd.seed=1", 'mesh={"fsdp": 2, "tensor": 1}', "pd.x=0.001"),
        ("pd.seed=1", 'mesh={"fsdp": 4}', "pd.x=0.001"),
    ]
    assert str(found[1]) == 'pd.seed=0 mesh={"fsdp": 4} pd.x=0.001'
    assert [choice.sets for choice in choices([], ["pd.steps=3"])] == [()]


@pytest.mark.parametrize(
    ("sweeps", "held", "says"),
    [
        (["pd.seed"], [], "should be key=values"),
        (["pd.seed="], [], "should be key=values"),
        (["pd.seed=[1"], [], "not valid YAML"),
        (["pd.seed=1,2", "pd.seed=3"], [], "pd.seed is given twice"),
        (["pd.seed=1,2"], ["pd.seed=3"], "pd.seed is given by --set too"),
        (["pd.seed=1,2,1"], [], "1 is given twice, which would be the same run"),
        (["run_id=p-00000001"], [], "run_id cannot be swept"),
        (["pd.seed=1,2"], ["run_id=p-00000001"], "--set run_id: each run of a sweep gets an id of its own"),
    ],
)
def test_no_sweep(sweeps: list[str], held: list[str], says: str) -> None:
    with pytest.raises(UserError, match=says):
        choices(sweeps, held)


# ---- the copy of the code ----


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file() and ".git/" not in str(path))
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_copy_is_of_the_commit_and_stays(tmp_path: Path) -> None:
    checkout = Checkout.make(tmp_path / "checkout")
    (checkout.folder / "configs").mkdir()
    (checkout.folder / "configs" / "mine.yaml").write_text("a configuration is kept otherwise")
    code = Code.from_checkout(checkout.folder)
    assert code.changes == ()
    code.refuse_changes()
    committed = contents(checkout.folder)
    code.copy_to(tmp_path / "copy")
    (checkout.folder / "slurm" / "start.sh").write_text("edited")
    copied = contents(tmp_path / "copy")
    assert copied.pop("COMMIT").decode() == f"{checkout.git('rev-parse', 'HEAD')}\n"
    assert copied == {name: text for name, text in committed.items() if not name.startswith(("configs/", ".git"))}
    assert not [path for path in (tmp_path / "copy").rglob("*") if path.is_file() and path.stat().st_mode & 0o222]
    # Each knows the commit that its code is of; a run notes it.
    asked = "from param_decomp_lab.runs.folder import commit_of_the_code as of; print(of())"
    for folder in (checkout.folder, tmp_path / "copy"):
        command = [sys.executable, "-B", "-c", asked]
        told = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
        assert told.stdout.strip() == checkout.git("rev-parse", "HEAD")


def test_changes_are_refused_or_taken_along(tmp_path: Path) -> None:
    """Edited, removed, new, renamed, binary, and not valid UTF-8; nothing is left in the repository."""
    checkout = Checkout.make(tmp_path / "checkout")
    lab, clean = checkout.folder / "param_decomp_lab", tmp_path / "clean"
    checkout.git("clone", "--quiet", str(checkout.folder), str(clean))
    (lab / "folders.py").write_text((lab / "folders.py").read_text() + "# edited\r\n")
    (lab / "errors.py").unlink()
    (lab / "new one.py").write_bytes(b"caf\xe9 = 1\n")
    (lab / "image.png").write_bytes(bytes(range(256)))
    checkout.git("mv", "slurm/start.sh", "slurm/begin.sh")
    before = checkout.git("status", "--porcelain"), checkout.git("count-objects")
    code = Code.from_checkout(checkout.folder)
    with pytest.raises(UserError, match=r"has uncommitted changes:(.|\n)*folders\.py(.|\n)*--with-changes"):
        code.refuse_changes()
    code.copy_to(tmp_path / "copy")
    assert (checkout.git("status", "--porcelain"), checkout.git("count-objects")) == before
    copied, there = contents(tmp_path / "copy"), contents(checkout.folder)
    commit, patch = copied.pop("COMMIT"), copied.pop("changes.patch")
    assert commit.decode() == f"{checkout.git('rev-parse', 'HEAD')}, with changes.patch\n"
    assert copied == {name: text for name, text in there.items() if not name.startswith(".git")}
    applied = subprocess.run(["git", "apply", "--whitespace=nowarn"], cwd=clean, input=patch, capture_output=True)
    assert applied.returncode == 0, applied.stderr
    assert {name: text for name, text in contents(clean).items() if not name.startswith(".git")} == copied


def test_no_checkout(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not a git checkout; a run is launched from one"):
        Code.from_checkout(tmp_path)
    checkout = Checkout.make(tmp_path / "other")
    (checkout.folder / "site-packages").mkdir()
    with pytest.raises(UserError, match=r"is not a git checkout of its own \(it lies in .*other\)"):
        Code.from_checkout(checkout.folder / "site-packages")


# ---- the job ----


def test_script_of_a_run(tmp_path: Path) -> None:
    run = tmp_path / "with a space" / "p-00000001"
    job = SlurmJob(
        "12:00:00", "gpu", "lab", "high", 7, shared=True, notice_s=900, more={"constraint": "h100", "contiguous": None}
    )
    text = script_text(job, GPUS, "llama", [run], run / "job.sbatch")
    options = {line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH")}
    assert options == {
        "--job-name=llama", "--nodes=2", "--ntasks-per-node=4", "--gpus-per-node=4", "--cpus-per-task=7",
        "--time=12:00:00", "--partition=gpu", "--account=lab", "--qos=high", "--constraint=h100", "--contiguous",
        "--requeue", "--open-mode=append", "--signal=TERM@900", f"--output='{run}/slurm-%j.log'",
        f"--chdir={Path.cwd()}",
    }  # fmt: skip
    assert started_by(text, run) == [str(run), "", "", f"sbatch '{run}/job.sbatch'", "9"]


def test_script_of_a_sweep(tmp_path: Path) -> None:
    """One array; each job of it starts its own run, with simulated devices where there are no GPUs."""
    runs = [tmp_path / f"p-0000000{number}" for number in range(3)]
    script = tmp_path / "sweeps" / "s-00000000" / "job.sbatch"
    text = script_text(SlurmJob(), CPUS, "tms", runs, script)
    options = {line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH")}
    assert {"--array=0-2%3", f"--output={script.parent}/%A_%a.log", "--exclusive", "--mem=0"} <= options
    assert not [option for option in options if "gpu" in option or "wckey" in option]
    flag = "--before --xla_force_host_platform_device_count=3"
    for index, run in enumerate(runs):
        again = f"sbatch --array={index} {script}"
        # Slurm has given job 9, the array's own number, to one of its jobs: for all is not what is meant.
        assert started_by(text, run, str(index)) == [str(run), "cpu", flag, again, f"9_{index}"]


HOSTILE = [
    "it's", 'a"b', "a'; touch x; '", '"; touch x; "', "$(touch x)", "`touch x`", "$HOME ${PATH}", "back\\slash\\",
    "a\nb",
    "a\n#SBATCH --array=0-9\ntouch x", "a;touch x", "a&&touch x|y", "* ? [a] {b,c}", "-rf", "--help", "~", "!!", "#no",
    "ü 漢 \N{LINE SEPARATOR}", "%j %% %A", "tab\there", "é\u0301", "  two  ", "x=y", "<a>(b)",
]  # fmt: skip


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("name", HOSTILE)
def test_names_reach_the_run_as_they_are(
    name: str, several: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the run, of the script and of the folder it is submitted from; none is read as shell or as an option.
    What is printed for later is a command that a shell takes."""
    here = tmp_path / "here" / name
    here.mkdir(parents=True)
    monkeypatch.chdir(here)
    monkeypatch.setattr(sys, "executable", f"/venv {name}/python")
    runs = [tmp_path / name / f"p-0000000{number}" for number in range(1 + several)]
    script = tmp_path / name / "job.sbatch"
    plain = [Path("/p-00000001"), Path("/p-00000002")][: 1 + several]
    text = script_text(SlurmJob(), GPUS, "job", runs, script)
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0
    # Options come before the first line of shell: the later lines of a name, whatever they look like, are none.
    assert list(options_of(text)) == list(options_of(script_text(SlurmJob(), GPUS, "job", plain, script)))
    start = runs[-1] / "code" / "slurm" / "start.sh"
    start.parent.mkdir(parents=True)
    start.write_text('printf "%s\\0" "$1" "$PYTHON" "$PD_AGAIN" "$PWD" > "$1/given"')
    environment = {"PATH": os.environ["PATH"], "SLURM_ARRAY_TASK_ID": "1", "SLURM_JOB_ID": "9",
                   "SLURM_ARRAY_JOB_ID": "9", "HOME": "/home/me"}  # fmt: skip
    (tmp_path / "script").write_text(text)
    # Where Slurm starts it: where --chdir says.
    (where,) = shlex.split(options_of(text)["--chdir"])
    done = subprocess.run(["bash", "-u", tmp_path / "script"], env=environment, cwd=where, capture_output=True)
    assert done.returncode == 0, done.stderr
    run, python, again, folder, _ = (runs[-1] / "given").read_bytes().decode().split("\0")
    assert (run, python, folder) == (str(runs[-1]), f"/venv {name}/python", str(here))
    wanted = ["sbatch", *(["--array=1"] if several else []), str(script)]
    evaluated = subprocess.run(
        ["bash", "-c", f"sbatch() {{ printf '%s\\0' sbatch \"$@\"; }}; {again}"], capture_output=True, text=True
    )
    assert evaluated.stdout.split("\0")[:-1] == wanted
    assert not list(tmp_path.rglob("x"))
    (output,) = shlex.split(options_of(text)["--output"])
    if output == os.devnull or several:
        assert (runs[-1] / "slurm-9.log").is_file()
    else:
        assert output == str(runs[0] / "slurm-%j.log")


def options_of(text: str) -> dict[str, str]:
    """As sbatch reads them: up to the first line that is neither empty nor a comment."""
    head = itertools.takewhile(lambda line: not line or line.startswith("#"), text.split("\n"))
    lines = (line.removeprefix("#SBATCH ").partition("=") for line in head if line.startswith("#SBATCH "))
    return {option: value for option, _, value in lines}


def test_a_folder_that_the_python_path_cannot_name(tiny: Tiny, tmp_path: Path) -> None:
    outcome = launch(tiny, tmp_path / "a:b", "--gpu", "none", "--prepare")
    assert outcome.status == 2, outcome
    assert "a:b/p-" in outcome.err
    assert "contains ':'" in outcome.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("value", ["a\nb", "a\rb", "a\0b", "a\x1bb", "a\udc80"])
@pytest.mark.parametrize("option", ["partition", "account", "qos", "time", "comment", "name"])
def test_options_of_more_than_a_line(option: str, value: str) -> None:
    job, name = SlurmJob(), "job"
    if option == "name":
        name = value
    elif option == "comment":
        job = SlurmJob(more={"comment": value})
    else:
        job = replace(job, **{option: value})
    with pytest.raises(UserError, match=r": 'a.*b?' contains .*; in a batch script it must be one line"):
        script_text(job, GPUS, name, [Path("/p-00000001")], Path("/p-00000001/job.sbatch"))


def test_values_are_quoted_as_sbatch_reads_them() -> None:
    """It takes the character after a backslash as it is, in quotes as well."""
    job = SlurmJob(partition="it's", more={"comment": "a\\b #c"})
    text = script_text(job, GPUS, "job", [Path("/p-00000001")], Path("/p-00000001/job.sbatch"))
    assert options_of(text)["--comment"] == "'a\\\\b #c'"
    assert shlex.split(options_of(text)["--partition"]) == ["it's"]


def started_by(text: str, run: Path, index: str = "") -> list[str]:
    """What `start.sh` of the run's copy is given: the run; and of the environment devices, the command for later, and
    the job to requeue."""
    start = run / "code" / "slurm" / "start.sh"
    start.parent.mkdir(parents=True)
    start.write_text('printf "%s\\n" "$1" "${JAX_PLATFORMS:-}" "${XLA_FLAGS:-}" "$PD_AGAIN" "$PD_JOB"')
    environment = {"PATH": os.environ["PATH"], "SLURM_ARRAY_TASK_ID": index, "SLURM_JOB_ID": "9"}
    environment |= {"XLA_FLAGS": "--before", "SLURM_ARRAY_JOB_ID": "9"} if index else {}
    done = subprocess.run(["bash", "-u"], input=text, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return ((run / "slurm-9.log").read_text() if index else done.stdout).splitlines()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("signal=USR1@5", "use --notice"),
        ("--nodes=3", "use --nodes"),
        ("no_requeue", "a run that is requeued depends on it"),
        ("=3", "should be a long option of sbatch"),
        ("a b=3", "should be a long option of sbatch"),
        ("comment\n#SBATCH --array=3", "should be a long option of sbatch"),
        ("-J", "should be a long option of sbatch"),
    ],
)
def test_options_that_are_ours(text: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        parse_more([text])


def test_another_jobs_variables_are_scrubbed() -> None:
    other = {"SLURM_JOB_ID": "1", "SLURM_CPU_BIND": "x", "SBATCH_CPU_BIND": "x", "SUBMITIT_EXECUTOR": "slurm",
             "CUDA_VISIBLE_DEVICES": "0"}  # fmt: skip
    own = {"SLURM_CONF": "/etc/slurm.conf", "SBATCH_ACCOUNT": "lab", "HOME": "/home/me"}
    assert without_job_variables({**other, **own}) == own
    assert without_job_variables({"CUDA_VISIBLE_DEVICES": "1"}) == {"CUDA_VISIBLE_DEVICES": "1"}


def test_defaults_do_not_go_before_what_was_said() -> None:
    """sbatch prefers variables to what a script says."""
    script = script_text(SlurmJob(partition="gpu"), GPUS, "a", [Path("/p-00000001")], Path("/p-00000001/job.sbatch"))
    defaults = {"SBATCH_ACCOUNT": "lab", "SBATCH_PARTITION": "cpu", "SBATCH_TIMELIMIT": "5", "SBATCH_NO_REQUEUE": "1"}
    assert sbatch_environment({**defaults, "HOME": "/"}, script) == {"SBATCH_ACCOUNT": "lab", "HOME": "/"}


def test_places(tiny: Tiny) -> None:
    def on(mesh: str, *where: Any) -> JobLayout:
        return choose_layout(load_config(tiny.config, [f"mesh={mesh}", "pd.batch_size=24", "eval=null"]), *where)

    eight = "{replica: 2, fsdp: 4}"
    assert on(eight, 2, 4, True) == on(eight, 2, None, True) == on(eight, None, 4, True) == GPUS
    assert on(eight, None, None, True) == JobLayout(1, 8, None)
    assert on("{fsdp: 6}", None, 2, False) == CPUS
    assert on(eight, None, None, False) == JobLayout(1, 1, 8)
    with pytest.raises(UserError, match="2 nodes of 8 GPUs are 16; make them equal"):
        on(eight, 2, 8, True)
    with pytest.raises(UserError, match="are 8 devices, which cannot be divided evenly over 3 tasks"):
        on(eight, None, 3, False)


# ---- the command ----


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A `sbatch` that takes everything, and keeps what it was given."""
    given = tmp_path / "given"
    given.mkdir()
    sbatch = tmp_path / "bin" / "sbatch"
    sbatch.parent.mkdir()
    sbatch.write_text(f'#!/bin/sh\ncp "$1" {given}/script; env > {given}/environment; echo "Submitted batch job 7"\n')
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{sbatch.parent}:{os.environ['PATH']}")
    return given


def launch(tiny: Tiny, out: Path, *arguments: str, settings: Sequence[str] = ()) -> Outcome:
    return pd_here(
        "launch", tiny.config, *sets((*LIGHT, f"out_dir={out}", *settings)), "--with-changes", *arguments
    )  # fmt: skip


def told(verdict: str) -> ProbeOutput:
    answer = {"verdict": verdict, "peak_gib": 171.5, "pool_gib": 160.1, "largest_part": "training step"}
    return {
        "fits": ProbeOutput(0, answer, "a table", ""),
        "does_not_fit": ProbeOutput(3, answer, "a table", ""),
        "unknown": ProbeOutput(1, None, "", "training step: the compiler gave up"),
        "no compiler": ProbeOutput(2, None, "", "no CUDA plugin to compile with: pip install 'param-decomp[probe]'"),
    }[verdict]


@pytest.mark.parametrize(
    ("verdict", "option", "status", "says"),
    [
        ("fits", "", 0, "fits: tiny needs 171.5 of 160.1 GiB"),
        ("does_not_fit", "", 3, "a table\ndoes not fit: tiny needs 171.5 of 160.1 GiB of each GPU (training step)"),
        ("does_not_fit", "--anyway", 0, "note: submitted anyway"),
        ("unknown", "", 1, "pd probe could not tell if it fits: training step: the compiler gave up"),
        ("unknown", "--anyway", 0, "it is unknown whether tiny fits; submitted anyway"),
        ("no compiler", "", 2, "pip install 'param-decomp[probe]'\nto submit without this check: --no-probe"),
        ("no compiler", "--no-probe", 0, ""),
    ],
)
def test_probed_before_it_is_submitted(
    verdict: str, option: str, status: int, says: str, tiny: Tiny, slurm: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    asked = []

    def answer(*question: Any) -> ProbeOutput:
        asked.append(question)
        return told(verdict)

    monkeypatch.setattr("param_decomp_lab.launch.fits.probe_in_subprocess", answer)
    arguments = ("--gpu", "h100", "--gpus-per-node", "2", *filter(None, [option]))
    outcome = launch(tiny, tmp_path / "runs", *arguments, settings=["mesh.fsdp=2", "run_id=p-00000001"])
    assert outcome.status == status, outcome
    assert says in outcome.out + outcome.err
    if option != "--no-probe":
        ((path, settings, options),) = asked
        assert path == tiny.config
        assert "mesh.fsdp=2" in settings
        assert options == ("--gpu", "h100", "--nodes", "1", "--gpus-per-node", "2")
    run = tmp_path / "runs" / "p-00000001"
    assert run.is_dir() == (slurm / "script").exists() == (status == 0)
    if status == 0:
        assert (slurm / "script").read_text() == (run / "job.sbatch").read_text()
        assert "#SBATCH --gpus-per-node=2" in (run / "job.sbatch").read_text()
        assert json.loads((run / "launch.json").read_text())["jobs"] == ["7"]
        assert f"job 7: {run}" in outcome.out


@needs_plugin
@pytest.mark.slow
def test_probed_for_real(tiny: Tiny, slurm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    outcome = launch(tiny, tmp_path / "runs", "--gpu", "h100", settings=["mesh.fsdp=2"])
    assert outcome.status == 0, outcome
    assert "fits: tiny needs 0." in outcome.out


def test_what_is_in_the_folder(tiny: Tiny, slurm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The configuration that `pd train` would have, and the code; nothing of another job goes to this one."""
    monkeypatch.setenv("SLURM_CPU_BIND", "mask_cpu:0x1")
    outcome = launch(tiny, tmp_path / "runs", "--gpu", "none", settings=["run_id=p-00000001"])
    assert outcome.status == 0, outcome
    run = tmp_path / "runs" / "p-00000001"
    wanted = load_config(tiny.config, [*LIGHT, f"out_dir={tmp_path / 'runs'}", "run_id=p-00000001"])
    assert (run / "config.yaml").read_text() == wanted.to_yaml()
    assert sorted(path.name for path in run.iterdir()) == [
        "code",
        "config.yaml",
        "figures",
        "job.sbatch",
        "launch.json",
    ]
    assert (run / "code" / "slurm" / "start.sh").read_bytes() == (ROOT / "slurm" / "start.sh").read_bytes()
    assert "CPU_BIND" not in (slurm / "environment").read_text()
    again = launch(tiny, tmp_path / "runs", "--gpu", "none", settings=["run_id=p-00000001"])
    assert again.status == 2
    assert f"{run} exists already" in again.err


def test_recipe_of_a_toy_is_kept(slurm: Path, tmp_path: Path) -> None:
    settings = sets((f"out_dir={tmp_path / 'runs'}", "run_id=p-00000001"))
    outcome = pd_here("launch", ROOT / "configs/toys/tms_5-2.yaml", *settings, "--gpu", "none", "--with-changes")
    assert outcome.status == 0, outcome
    kept = RunConfig.from_yaml(tmp_path / "runs" / "p-00000001" / "config.yaml").wrapper.target
    assert kept is not None
    assert kept.pretrain == tmp_path / "runs" / "p-00000001" / "target.yaml"
    assert yaml.safe_load(kept.pretrain.read_text()) == yaml.safe_load(
        (ROOT / "configs/toys/targets/tms_5-2.yaml").read_text()
    )


@pytest.mark.parametrize("where", ["job", "--local"])
def test_dry_run_writes_nothing(where: str, tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And needs no Slurm, and no answer of the probe. What it prints is a script, and nothing else."""
    monkeypatch.setattr("param_decomp_lab.launch.fits.probe_in_subprocess", None)
    monkeypatch.setattr("param_decomp_lab.launch.command.gpus_here", lambda: 0)
    options = ("--gpus-per-node", "2", "--sweep", "pd.seed=1,2", "--dry-run", *([where] if where != "job" else []))
    outcome = launch(tiny, tmp_path / "runs", *options, settings=["mesh.fsdp=2"])
    assert outcome.status == 0, outcome
    assert list(tmp_path.iterdir()) == []
    assert subprocess.run(["bash", "-n"], input=outcome.out, text=True, check=False).returncode == 0
    if where == "job":
        assert outcome.out.startswith("#!/bin/bash\n")
        assert "#SBATCH --array=0-1%2" in outcome.out
    else:
        processes = outcome.out.splitlines()
        assert [line.rpartition("--process-id ")[2] for line in processes] == ["0", "1", "0", "1"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--gpu", "b20"), "--gpu b20: unknown"),
        (("--gpus-per-node", "4"), "4 GPUs are 4; make them equal, such as with --set mesh.fsdp=4"),
        (
            ("--sweep", "mesh.fsdp=2,4", "--gpu", "none", "--gpus-per-node", "2"),
            "all runs must use the same number of nodes and GPUs",
        ),
        (("--sweep", "pd.stepz=1,2"), "pd.stepz"),
        (("--sbatch", "array=0-3"), "--sbatch array=0-3: array cannot be set; use --sweep"),
        (("--prepare", "--local"), "--prepare makes a run's folder and nothing else"),
        (("--prepare", "--sweep", "pd.seed=1,2"), "--prepare makes one run's folder"),
        (("--no-probe",), "there is no Slurm here (no sbatch)"),
    ],
)
def test_refusals(arguments: tuple[str, ...], says: str, tiny: Tiny, tmp_path: Path, monkeypatch: Any) -> None:
    """Before anything is written."""
    monkeypatch.setattr("shutil.which", lambda _: None)
    outcome = launch(tiny, tmp_path / "runs", *arguments)
    assert outcome.status == 2, outcome
    assert says in outcome.err
    assert list(tmp_path.iterdir()) == []


def test_uncommitted_changes_are_refused(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = Code(ROOT, "0" * 40, (" M param_decomp_lab/training/run.py",))
    monkeypatch.setattr(launching.Code, "from_checkout", lambda: code)
    outcome = pd_here("launch", tiny.config, *sets([f"out_dir={tmp_path / 'runs'}"]), "--gpu", "none", "--dry-run")
    assert outcome.status == 2
    assert "M param_decomp_lab/training/run.py" in outcome.err
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_is_there(tiny: Tiny, slurm: Path, tmp_path: Path) -> None:
    """It keeps its configuration and the code that it has; one that was not launched gets the code."""
    made = pd_here("launch", tiny.config, *sets((*LIGHT, f"out_dir={tmp_path}", "run_id=p-00000001")), "--prepare",
                   "--with-changes")  # fmt: skip
    run = tmp_path / "p-00000001"
    assert (made.status, made.out.splitlines()[-1]) == (0, str(run))
    commit = (run / "code" / "COMMIT").stat().st_ino
    for job in range(2):
        again = pd_here("launch", run, "--gpu", "none", "--with-changes")
        assert again.status == 0, again
        assert json.loads((run / "launch.json").read_text())["jobs"] == ["7"] * (job + 1)
    assert (run / "code" / "COMMIT").stat().st_ino == commit
    for path in [*(run / "code").rglob("*")][::-1]:
        path.rmdir() if path.is_dir() else path.unlink()
    (run / "code").rmdir()
    assert pd_here("launch", run, "--gpu", "none", "--with-changes").status == 0
    assert (run / "code" / "slurm" / "task.sh").is_file()
    before = (run / "job.sbatch").read_text()
    (tmp_path / "bin" / "sbatch").write_text("#!/bin/sh\necho 'sbatch: error: no such partition' >&2; exit 1\n")
    refused = pd_here("launch", run, "--gpu", "none", "--with-changes", "--partition", "nowhere")
    assert refused.status == 2
    assert "sbatch refuses the job: sbatch: error: no such partition" in refused.err
    assert (run / "job.sbatch").read_text() == before  # which earlier jobs name as the way to go on
    assert not list(run.glob("*.new"))
    refused = pd_here("launch", run, "--gpu", "none", "--with-changes", "--set", "pd.steps=3")
    assert refused.status == 2
    assert f"{run} is a run, whose configuration is fixed" in refused.err


# ---- processes here ----


def tasks(tmp_path: Path, text: str) -> Path:
    """A run whose tasks do this; $n is the number of the process."""
    run = tmp_path / "p-00000001"
    (run / "code" / "slurm").mkdir(parents=True)
    (run / "code" / "slurm" / "task.sh").write_text(f'for n in "$@"; do :; done\ncd {run}\n{text}\n')
    return run


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("exit 0", 0),
        ("exit 75", 75),
        ("[ $n = 0 ] && exit 2; sleep 600", 2),
        ("[ $n = 0 ] && exit 75; exit 1", 1),
        ("[ $n = 1 ] && kill -KILL $$; sleep 600", 137),
    ],
)
def test_status_of_processes_here(text: str, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the first that failed; the others are ended soon, and so is what they started."""
    monkeypatch.setattr(local, "GRACE_S", 0.3)
    run = tasks(tmp_path, text)
    started = time.monotonic()
    assert local.run_here(run, CPUS) == status
    assert time.monotonic() - started < 60


def test_processes_here_are_told_to_stop(tmp_path: Path) -> None:
    run = tasks(tmp_path, "trap 'touch told$n; exit 75' TERM; touch up$n; while :; do sleep 0.1; done")

    def tell() -> None:
        until = time.monotonic() + 60
        while len(list(run.glob("up*"))) < 2 and time.monotonic() < until:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    teller = threading.Thread(target=tell)
    teller.start()
    assert local.run_here(run, CPUS) == 75
    teller.join()
    assert {path.name for path in run.glob("told*")} == {"told0", "told1"}


def test_what_processes_here_see(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices of their own, and nothing of a job that this is done in."""
    run = tasks(
        tmp_path, 'echo "$JAX_PLATFORMS $XLA_FLAGS $CUDA_VISIBLE_DEVICES ${PD_PREEMPTED-no} ${SLURM_JOB_ID-no}" > $n'
    )
    for name, value in {"PD_PREEMPTED": "x", "SLURM_JOB_ID": "4", "CUDA_VISIBLE_DEVICES": "5,6", "XLA_FLAGS": "--a",
                        "JAX_PLATFORMS": ""}.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    assert local.run_here(run, CPUS) == 0
    assert (run / "1").read_text() == "cpu --a --xla_force_host_platform_device_count=3  no no\n"
    assert local.run_here(run, JobLayout(1, 2, None)) == 0
    assert [(run / str(number)).read_text() for number in range(2)] == [" --a 5 no no\n", " --a 6 no no\n"]


def test_gpus_that_are_not_here(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("param_decomp_lab.launch.command.gpus_here", lambda: 1)
    outcome = launch(tiny, tmp_path / "runs", "--local", settings=["mesh.fsdp=2"])
    assert outcome.status == 2
    assert "this machine has 1 GPU for 2 processes; take a smaller mesh, or simulate devices on the CPU" in outcome.err


@pytest.mark.slow
def test_stopped_here_and_gone_on_with(tiny: Tiny, tmp_path: Path) -> None:
    """Two processes of two devices: stopped by SIGTERM to the launcher, then to the end."""
    checkout = Checkout.make(tmp_path / "checkout")
    longer = ("pd.steps=150", "cadence={train_log_every: 1}", "mesh={fsdp: 4}", f"out_dir={tmp_path}")
    arguments = [str(tiny.config), *sets((*LIGHT, *longer, "run_id=p-00000001"))]
    where = ("--local", "--gpu", "none", "--gpus-per-node", "2")
    run = tmp_path / "p-00000001"
    environment = {**environment_of(8, FAST), "JAX_COMPILATION_CACHE_DIR": str(tiny.compiled)}
    command = [*PD, "launch", *arguments, *where]
    process = subprocess.Popen(command, cwd=checkout.folder, env={**environment, "PYTHONPATH": str(checkout.folder)})
    try:
        until = time.monotonic() + 240
        while not (run / "metrics.jsonl").exists() or len(rows(run)) < 4:
            assert process.poll() is None
            assert time.monotonic() < until
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 75
    finally:
        process.kill()
    (at,) = saved_steps(run)
    assert 3 < at < 150
    done = checkout.pd("launch", str(run), *where, environment=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"resuming {run} at step {at} of 150" in done.stdout
    assert [row["step"] for row in rows(run)] == list(range(150))
