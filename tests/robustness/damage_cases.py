"""What can befall a run folder, done to real runs by real processes: for `damage_table.py`, and for the tests.

Every case gets a copy of the folder of one small finished run (a toy: 60 steps, a checkpoint every 20), does its
damage, and starts `pd`. What a run was like is told by its rows of metrics and the fingerprints in its last checkpoint.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "configs" / "toys" / "tms_5-2.yaml"
RUN_ID = "p-00000001"
STEPS, EVERY = 60, 20
TIMEOUT_S = 900.0
UNPRIVILEGED = ("setpriv", "--bounding-set=-dac_override,-dac_read_search", "--inh-caps=-dac_override,-dac_read_search")
"""What permissions say counts for root, too. Another user might not be let to the interpreter."""

SETTINGS = (
    f"pd.steps={STEPS}",
    "pd.batch_size=16",
    "pd.faithfulness_warmup_steps=3",
    "eval=null",
    "steps_per_dispatch=1",
    f"cadence={{train_log_every: 5, save_every: {EVERY}}}",
)


@dataclass(frozen=True)
class Ended:
    """A `pd` that has ended: its status, and what it said."""

    command: str
    status: int
    text: str

    def line(self, part: str) -> str:
        """The line with ``part`` in it, "" without one."""
        return next((line for line in self.text.splitlines() if part in line), "")


@dataclass(frozen=True)
class Seen:
    """What became of a case. ``command``: as a user would type it. ``said``: the lines that matter. ``left``: what lies
    in `ckpts`. ``then``: what the next `pd train --resume` makes of it."""

    command: str
    status: int
    said: str
    left: str
    then: str


@dataclass(frozen=True)
class Case:
    """``status`` and ``says``: what is to be seen. ``needs_root``: it mounts something."""

    what: str
    act: Callable[["Rig"], Seen]
    status: int
    says: str
    then: str
    needs_root: bool = False


@dataclass
class Rig:
    """A place to work in, and the run that nothing has befallen yet."""

    place: Path
    whole: Path
    run: Path = field(init=False)

    def __post_init__(self) -> None:
        self.run = self.place / RUN_ID
        shutil.copytree(self.whole, self.run)

    def resume(self, *more: str, **how: Any) -> Ended:
        return pd(self.whole.parent, "train", "--resume", str(self.run), *more, **how)

    def checkpoint(self, step: int) -> Path:
        return self.run / "ckpts" / str(step)

    def largest(self, step: int, item: str) -> Path:
        """The file with an item's arrays."""
        files = [path for path in (self.checkpoint(step) / item).rglob("*") if path.is_file()]
        return max(files, key=lambda path: path.stat().st_size)

    def left(self) -> str:
        names = sorted((path.name for path in (self.run / "ckpts").iterdir()), key=lambda n: (not n.isdecimal(), n))
        return f"`ckpts/`: {', '.join(names) or 'nothing'}"

    def then(self) -> str:
        """What a further `--resume` gives."""
        return self.outcome(self.resume())

    def outcome(self, ended: Ended) -> str:
        if ended.status != 0:
            return f"status {ended.status}: {self.shown(ended.line('error:'))}"
        return "finishes, to the last bit like the undisturbed run" if self.is_whole() else "finishes, otherwise"

    def is_whole(self) -> bool:
        return rows(self.run) == rows(self.whole) and prints(self.run) == prints(self.whole)

    def shown(self, text: str) -> str:
        """With short paths, and nothing that another time would be other."""
        text = text.replace(str(self.run), "RUN").replace(str(self.place), "…")
        text = re.sub(r"process \d+ on \S+, since \S+", "process 4242 on node01, since 2026-01-01T12:00:00+00:00", text)
        text = re.sub(r"\d+\.\d MB free of \d+\.\d", "0.1 MB free of 1.2", text)
        text = re.sub(r"/d/[0-9a-f]{32}", "/d/7ef0a17b…", text)
        return re.sub(r"\s+", " ", text).strip()


def pd(base: Path, *arguments: str, unprivileged: bool = False) -> Ended:
    """`pd` to its end. ``unprivileged``: not even root may do what permissions forbid."""
    first = UNPRIVILEGED if unprivileged and os.geteuid() == 0 else ()
    ended = subprocess.run(
        [*first, sys.executable, "-m", "param_decomp_lab", *arguments],
        env=environment(base), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    return Ended(" ".join(("pd", *arguments)), ended.returncode, ended.stdout)


@contextmanager
def started(base: Path, output: Path, *arguments: str) -> Iterator["subprocess.Popen[bytes]"]:
    """`pd` in the background; killed at the end of the block if it still runs."""
    with output.open("wb") as file:
        command = [sys.executable, "-m", "param_decomp_lab", *arguments]
        process = subprocess.Popen(command, env=environment(base), cwd=ROOT, stdout=file, stderr=subprocess.STDOUT)
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def environment(base: Path) -> dict[str, str]:
    """Of every `pd` here: on the CPU, each program compiled once for all."""
    more = {"JAX_PLATFORMS": "cpu", "JAX_COMPILATION_CACHE_DIR": str(base / "compiled")}
    more |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "WANDB_MODE": "disabled", "COLUMNS": "400"}
    more |= {"HOME": str(base), "PYTHONDONTWRITEBYTECODE": "1"}
    return {**os.environ, **more}


def wait_until(happened: Callable[[], bool], process: "subprocess.Popen[bytes]", what: str) -> None:
    until = time.monotonic() + TIMEOUT_S
    while not happened():
        if process.poll() is not None or time.monotonic() > until:
            raise RuntimeError(f"{what} did not come; the status is {process.poll()}")
        time.sleep(0.02)


def make_whole(base: Path) -> Path:
    """The folder of the run that nothing befalls, made under ``base`` with its target."""
    import numpy as np

    from param_decomp_jax.targets.tms import TMSConfig
    from param_decomp_lab.weights.target_folder import save_target

    draw = np.random.default_rng(0)
    linear1 = draw.normal(size=(5, 2)).astype(np.float32)
    weights = {"linear1": linear1, "linear2": linear1.T.copy(), "bias": np.zeros(5, np.float32)}
    save_target(base / "target", TMSConfig(n_features=5, n_hidden=2), weights)
    ended = pd(base, "train", str(CONFIG), *settings(base))
    if ended.status != 0:
        raise RuntimeError(ended.text)
    return base / RUN_ID


def settings(base: Path, out: Path | None = None, *more: str) -> list[str]:
    """Of a run in ``out``, with the target that lies in ``base``."""
    where = (f"target={{folder: {base / 'target'}}}", f"out_dir={out or base}", f"run_id={RUN_ID}")
    return [word for setting in (*SETTINGS, *where, *more) for word in ("--set", setting)]


def rows(run: Path) -> list[dict[str, Any]]:
    """Without what depends on the clock."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith(("train/perf/", "train/mem/"))} for row in lines]


def prints(run: Path) -> Any:
    """What the last checkpoint holds."""
    about = json.loads((run / "ckpts" / str(STEPS) / "_CHECKPOINT_METADATA").read_text())
    return about["custom_metadata"]["fingerprints"]


# ---- the cases ----


def _resumed(rig: Rig, part: str, noise: tuple[str, ...] = ()) -> Seen:
    """`--resume` after the damage. ``noise``: what no line may have."""
    ended = rig.resume()
    assert not any(ended.line(word) for word in noise), ended.text
    return Seen("pd train --resume RUN", ended.status, rig.shown(ended.line(part)), rig.left(), rig.outcome(ended))


def _truncated(rig: Rig) -> Seen:
    file = rig.largest(STEPS, "learned")
    os.truncate(file, file.stat().st_size // 2)
    return _resumed(rig, "damaged checkpoint")


def _missing(rig: Rig) -> Seen:
    rig.largest(STEPS, "training").unlink()
    return _resumed(rig, "damaged checkpoint")


def _bits(rig: Rig) -> Seen:
    file = rig.largest(STEPS, "training")
    content = bytearray(file.read_bytes())
    # Some lie in what no array is read from (an older node of the file's tree): those do no harm, and are not noticed.
    for part in range(16):
        content[len(content) * (2 * part + 1) // 32] ^= 1
    file.write_bytes(content)
    return _resumed(rig, "damaged checkpoint")


def _zeros(rig: Rig) -> Seen:
    """As after a disk that lost its blocks: every file has its size."""
    for item in ("learned", "training"):
        file = rig.largest(STEPS, f"{item}/ocdbt.process_0/d")
        file.write_bytes(bytes(file.stat().st_size))
    return _resumed(rig, "damaged checkpoint", noise=("Traceback", "TensorStore"))


def _other_values(rig: Rig) -> Seen:
    """As after a node that died: the list of files was not written any more, and an item is that of another step."""
    for step in (STEPS, STEPS - EVERY):
        (rig.checkpoint(step) / "files.json").unlink()
    shutil.rmtree(rig.checkpoint(STEPS) / "learned")
    shutil.copytree(rig.checkpoint(STEPS - EVERY) / "learned", rig.checkpoint(STEPS) / "learned")
    return _resumed(rig, "damaged checkpoint")


def _all(rig: Rig) -> Seen:
    kept = {}
    for step in (20, 40, 60):
        file = rig.largest(step, "learned")
        kept[file] = file.read_bytes()
        file.unlink()
    ended, left = rig.resume(), rig.left()
    again = rig.resume()
    assert again == ended, again
    for file, content in list(kept.items())[:2]:
        file.write_bytes(content)
    said = rig.shown(" ".join(ended.text.splitlines()))
    return Seen("pd train --resume RUN", ended.status, said, left, f"with one of them mended: {rig.then()}")


def _mid_line(rig: Rig) -> Seen:
    """The end of a kill: a row that nobody finished, behind the last checkpoint."""
    shutil.rmtree(rig.checkpoint(STEPS))
    file = rig.run / "metrics.jsonl"
    os.truncate(file, file.stat().st_size - 40)
    return _resumed(rig, "resuming")


def _rows_lost(rig: Rig) -> Seen:
    """Rows from before the last checkpoint."""
    file = rig.run / "metrics.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(lines[:10]) + lines[10][:40])
    ended, left = rig.resume(), rig.left()
    said = rig.shown(ended.line("lacks the rows"))
    (rig.checkpoint(STEPS)).rename(rig.run / "ckpts" / "later")
    return Seen("pd train --resume RUN", ended.status, said, left, f"with `ckpts/60` renamed: {rig.then()}")


def _put_back(rig: Rig, name: str, content: bytes, then: str, part: str = "") -> Seen:
    """`--resume` with another content in a file of the run, and once more with the old one."""
    file = rig.run / name
    before = file.read_bytes()
    assert content != before
    file.write_bytes(content)
    ended, left = rig.resume(), rig.left()
    file.write_bytes(before)
    said = rig.shown(ended.line(part) if part else " ".join(ended.text.splitlines()))
    return Seen("pd train --resume RUN", ended.status, said, left, f"{then}: {rig.then()}")


def _garbled(rig: Rig) -> Seen:
    lines = (rig.run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    content = b"".join([*lines[:3], lines[3][:40] + b"\n", *lines[4:]])
    return _put_back(rig, "metrics.jsonl", content, "with the line mended", "error:")


def _edited(rig: Rig) -> Seen:
    content = (rig.run / "config.yaml").read_bytes().replace(b"seed: 0", b"seed: 1")
    return _put_back(rig, "config.yaml", content, "with the old line")


def _edited_harmlessly(rig: Rig) -> Seen:
    shutil.rmtree(rig.checkpoint(STEPS))
    file = rig.run / "config.yaml"
    file.write_text(file.read_text().replace(f"save_every: {EVERY}", "save_every: 30"))
    return _resumed(rig, "changed since")


def _emptied(rig: Rig) -> Seen:
    return _put_back(rig, "config.yaml", b"", "with the old file", "error:")


def _second_job(rig: Rig) -> Seen:
    out, base = rig.place / "long", rig.whole.parent
    run = out / RUN_ID
    with started(base, rig.place / "log", "train", str(CONFIG), *settings(base, out, "pd.steps=1000000")) as first:
        wait_until(lambda: (run / "metrics.jsonl").exists() and len(rows(run)) > 2, first, "a row")
        second = pd(base, "train", "--resume", str(run))
        still = first.poll() is None
        first.send_signal(signal.SIGTERM)
        status = first.wait(TIMEOUT_S)
    said = rig.shown(second.line("error:").replace(str(run), "RUN"))
    left = "the first job goes on" if still and status == 75 else f"the first job: {still}, {status}"
    return Seen("pd train --resume RUN", second.status, said, left, _goes_on(rig, run))


def _killed_job(rig: Rig) -> Seen:
    out, base = rig.place / "long", rig.whole.parent
    run = out / RUN_ID
    with started(base, rig.place / "log", "train", str(CONFIG), *settings(base, out, "pd.steps=1000000")) as first:
        wait_until(lambda: (run / "ckpts" / str(EVERY)).exists(), first, "a checkpoint")
        first.kill()
        first.wait(TIMEOUT_S)
    holder = (run / "lock").stat().st_size
    then = _goes_on(rig, run)
    text = (rig.place / "second").read_text()
    said = next((line for line in text.splitlines() if "taking over" in line), "")
    left = "the name of the killed job in `lock`" if holder else "an empty `lock`"
    return Seen("pd train --resume RUN", 75, rig.shown(said.replace(str(run), "RUN")), left, then)


def _goes_on(rig: Rig, run: Path) -> str:
    """Resumed in the background, stopped by SIGTERM when it has made some steps more."""
    base, before = rig.whole.parent, len(rows(run))
    with started(base, rig.place / "second", "train", "--resume", str(run)) as again:
        wait_until(lambda: _lines(run) > before + 5, again, "more rows")
        again.send_signal(signal.SIGTERM)
        status = again.wait(TIMEOUT_S)
    return "goes on" if status == 75 else f"status {status}: {(rig.place / 'second').read_text()}"


@contextmanager
def mounted(what: str, folder: Path, *options: str) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", *options, what, str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def small_disk(folder: Path, size: int) -> AbstractContextManager[None]:
    """``size``: bytes."""
    return mounted("tmpfs", folder, "-t", "tmpfs", "-o", f"size={size}")


def _full(rig: Rig) -> Seen:
    """On a disk with room for the run so far, and for half a checkpoint."""
    for step in (STEPS, STEPS - EVERY):
        shutil.rmtree(rig.checkpoint(step))
    (rig.run / "report.html").unlink()
    small = rig.place / "small"
    with small_disk(small, 64 << 20):
        shutil.copytree(rig.run, small / RUN_ID)
        one = _on_disk(rig.checkpoint(EVERY))
        ballast = small / "ballast"
        with ballast.open("wb") as file:
            file.write(b"\0" * (shutil.disk_usage(small).free - one // 2))
        rig.run = small / RUN_ID
        ended = rig.resume()
        left = rig.left()
        ballast.unlink()
        return Seen("pd train --resume RUN", ended.status, rig.shown(ended.line("error:")), left, rig.then())


def _full_rows(rig: Rig) -> Seen:
    """A disk that fills up and has room again, between two checkpoints of a job that runs."""
    small, base = rig.place / "small", rig.whole.parent
    log, run, ballast = rig.place / "log", small / RUN_ID, small / "ballast"
    given = settings(base, small, "pd.steps=1000000", "cadence={train_log_every: 5}")
    with small_disk(small, 64 << 20), started(base, log, "train", str(CONFIG), *given) as job:
        wait_until(lambda: (run / "metrics.jsonl").exists() and len(rows(run)) > 2, job, "a row")
        with ballast.open("wb", buffering=0) as file, suppress(OSError):
            while True:
                file.write(bytes(4096))
        wait_until(lambda: "wait until they can" in log.read_text(), job, "the message")
        ballast.unlink()
        before = _lines(run)
        wait_until(lambda: _lines(run) > before + 5, job, "more rows")
        job.send_signal(signal.SIGTERM)
        status = job.wait(TIMEOUT_S)
        steps = [row["step"] for row in rows(run)]
        every = steps == list(range(0, steps[-1] + 1, 5))
        rig.run = run
        said = rig.shown(Ended("", status, log.read_text()).line("wait until they can"))
        left = f"{rig.left().partition(':')[0]}: the checkpoint of the last step" if saved(run) else rig.left()
        then = "every row is there, once" if every else f"rows {steps}"
        return Seen("pd train CONFIG", status, said, left, f"with room again, and SIGTERM: {then}")


def saved(run: Path) -> list[int]:
    return sorted(int(path.name) for path in (run / "ckpts").iterdir() if path.name.isdecimal())


def _lines(run: Path) -> int:
    return len((run / "metrics.jsonl").read_bytes().splitlines())


def _on_disk(folder: Path) -> int:
    """Bytes of a folder on a file system with pages of 4 KiB."""
    return sum(-(-path.stat().st_size // 4096) * 4096 for path in folder.rglob("*") if path.is_file())


def _read_only(rig: Rig) -> Seen:
    shutil.rmtree(rig.checkpoint(STEPS))
    view = rig.place / "view"
    with mounted(str(rig.run), view, "--bind"):
        subprocess.run(["mount", "-o", "remount,bind,ro", str(view)], check=True)
        ended = pd(rig.whole.parent, "train", "--resume", str(view))
    said = rig.shown(ended.line("error:").replace(str(view), "RUN"))
    return Seen("pd train --resume RUN", ended.status, said, rig.left(), f"mounted for writing: {rig.then()}")


def _no_permission(rig: Rig) -> Seen:
    """A user who may write to the run's folder, but not to `ckpts`: seen only when the first checkpoint is due."""
    shutil.rmtree(rig.checkpoint(STEPS))
    (rig.run / "ckpts").chmod(0o555)
    ended = rig.resume(unprivileged=True)
    left = rig.left()
    (rig.run / "ckpts").chmod(0o755)
    then = f"with permission: {rig.outcome(rig.resume(unprivileged=True))}"
    return Seen("pd train --resume RUN", ended.status, rig.shown(ended.line("error:")), left, then)


_AGAIN = "finishes, to the last bit like the undisturbed run"

CASES: dict[str, Case] = {
    "truncated": Case("a file of the newest checkpoint cut in half", _truncated, 0, "were saved", _AGAIN),
    "missing": Case("an array file of the newest checkpoint removed", _missing, 0, "No such file", _AGAIN),
    "bits": Case("bits of an array file turned over", _bits, 0, "was renamed to damaged-60", _AGAIN),
    "zeros": Case("blocks of an array file zeroed", _zeros, 0, "was renamed to damaged-60", _AGAIN),
    "other-values": Case(
        "the arrays of another step under the newest one's name, and no list of files", _other_values, 0,
        "does not hold what was saved", _AGAIN,
    ),
    "all-damaged": Case(
        "a file of every checkpoint removed", _all, 2, "every checkpoint of this run is damaged", _AGAIN
    ),
    "mid-line": Case(
        "`metrics.jsonl` cut in the middle of its last line, behind the last checkpoint", _mid_line, 0,
        "resuming RUN at step 40", _AGAIN,
    ),
    "rows-lost": Case(
        "`metrics.jsonl` cut in the middle of a line, before the last checkpoint", _rows_lost, 0,
        "lacks the rows of steps 46 to 55", _AGAIN,
    ),
    "garbled": Case("a line in the middle of `metrics.jsonl` garbled", _garbled, 2, "metrics.jsonl:4: not a", _AGAIN),
    "edited": Case("`config.yaml` edited: another seed", _edited, 2, "pd.seed: 0 -> 1", _AGAIN),
    "edited-harmlessly": Case(
        "`config.yaml` edited: other checkpoints", _edited_harmlessly, 0, "cadence.save_every: 20 -> 30", _AGAIN
    ),
    "emptied": Case("`config.yaml` empty", _emptied, 2, "this file is empty", _AGAIN),
    "disk-full": Case("the disk full while a checkpoint is saved", _full, 1, "No space left on device", _AGAIN, True),
    "disk-full-rows": Case(
        "the disk full for a while, between two checkpoints", _full_rows, 75, "wait until they can",
        "every row is there, once", True,
    ),
    "read-only": Case("the folder mounted read-only", _read_only, 2, "Read-only file system", _AGAIN, True),
    "no-permission": Case(
        "`ckpts` not to be written any more when a checkpoint is due", _no_permission, 1, "Permission denied", _AGAIN,
    ),
    "second-job": Case("a second job started in the folder of one that runs", _second_job, 2, "another job", "goes on"),
    "killed-job": Case("a job resumed that was killed (`kill -9`)", _killed_job, 75, "taking over RUN", "goes on"),
}  # fmt: skip
