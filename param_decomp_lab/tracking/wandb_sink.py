"""Mirrors `metrics.jsonl` and `figures/` to wandb, in a separate process that no training step waits for."""

import contextlib
import json
import os
import shlex
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO, Any

from rich.console import Console
from rich.text import Text

from param_decomp_lab.config import RunConfig
from param_decomp_lab.errors import UserError
from param_decomp_lab.runs.folder import CONFIG_FILE, saved_config
from param_decomp_lab.runs.metrics_file import read_metrics
from param_decomp_lab.safe_io.printable import printable

MIRROR = (sys.executable, "-m", "param_decomp_lab.tracking.wandb_mirror")
LOG_FILE = "wandb.log"
FIRST_PAUSE_S, LONGEST_PAUSE_S = 10.0, 300.0
"""Pauses between attempts to reach wandb; each pause is twice the one before."""
CLOSING_S = 40.0
"""Time to send what is pending when the run has ended."""
WITHOUT = "run with WANDB_MODE=offline or disabled to do without"


def _enabled(config: RunConfig) -> bool:
    return config.method.wandb is not None and os.environ.get("WANDB_MODE") != "disabled"


def _init(config: RunConfig, run_folder: Path) -> dict[str, Any]:
    """Returns the arguments of `wandb.init`, which are the same at every start of a run."""
    wrapper, settings = config.wrapper, config.method.wandb
    assert settings is not None
    return {
        "project": settings.project, "entity": settings.entity, "name": wrapper.run_name, "id": wrapper.run_id,
        "group": wrapper.wandb_group, "tags": list(wrapper.wandb_tags), "dir": str(run_folder.resolve()),
        "config": {"wrapper": wrapper.model_dump(mode="json"), **config.method.model_dump(mode="json")},
    }  # fmt: skip


class Login:
    """Checks in the background whether the user is logged in to wandb; contacts no server."""

    def __init__(self, config: RunConfig) -> None:
        self._process: subprocess.Popen[str] | None = None
        if _enabled(config):
            self._process = subprocess.Popen(
                [*MIRROR, "check"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                text=True, start_new_session=True,
            )  # fmt: skip

    def require(self) -> None:
        """Raises UserError if nobody is logged in."""
        if self._process is not None:
            for line in self._process.communicate()[0].splitlines():
                said = json.loads(line)
                if said["what"] == "misuse":
                    raise UserError(f"wandb: {said['why']} ({WITHOUT})")


class Wandb:
    """Follows the run folder from its opening to `close`. It never delays the run, and fails it only if wandb's first
    answer is that it was used wrongly.

    If wandb cannot be reached, it is tried again; it then gets what it lacks, as it does when the run is resumed. A
    later refusal, when there are steps to lose, is reported, and the run goes on without wandb.
    """

    def __init__(self, config: RunConfig, run_folder: Path, console: Console) -> None:
        self._folder, self._console = run_folder, console
        self._thread: threading.Thread | None = None
        if not _enabled(config):
            return
        self._given = _init(config, run_folder)
        self._misuse: str | None = None
        self._trouble = self._sent = self._answered = self._late = False
        self._outcome: str | None = None
        self._ended, self._lock = threading.Event(), threading.Lock()
        self._mirror: subprocess.Popen[str] | None = None
        self._thread = threading.Thread(target=self._supervise, name="wandb", daemon=True)
        self._thread.start()

    @property
    def sent(self) -> bool:
        """Whether wandb or an offline folder has all of the run."""
        return self._thread is None or self._sent

    def check(self) -> None:
        """Raises UserError if wandb's first answer is that the request is wrong."""
        if self._thread is not None and self._misuse is not None and not self._late:
            raise UserError(f"wandb: {self._misuse} ({WITHOUT})")

    def close(self, outcome: str, within_s: float = CLOSING_S) -> None:
        """Ends the mirroring. ``outcome``: finished, failed or preempted. Waits at most ``within_s`` seconds for what
        is pending to be sent.
        """
        if self._thread is None:
            return
        with self._lock:
            self._outcome = outcome
            self._ended.set()
            if self._mirror is not None:
                self._tell(self._mirror, {"outcome": outcome})
        self._thread.join(within_s)
        with self._lock:
            if self._mirror is not None:
                self._mirror.kill()
        if not self._sent and self._misuse is None:
            later = self._later
            if outcome == "preempted":
                later = "it gets the rest when the run is resumed"
            self._console.print(Text(f"wandb has not got all of the run; {later}", "yellow"), soft_wrap=True)

    @property
    def _later(self) -> str:
        return f"`{shlex.join(('pd', 'wandb', str(self._folder)))}` sends it"

    @staticmethod
    def _tell(mirror: "subprocess.Popen[str]", message: dict[str, Any]) -> None:
        assert mirror.stdin is not None
        with contextlib.suppress(OSError):  # the process has died, which its output shows
            mirror.stdin.write(json.dumps(message) + "\n")
            mirror.stdin.flush()

    def _supervise(self) -> None:
        pause = FIRST_PAUSE_S
        while True:
            if self._follow():
                pause = FIRST_PAUSE_S
            if self._sent or self._misuse is not None or self._ended.is_set():
                return
            self._ended.wait(pause)
            if self._ended.is_set():
                return
            pause = min(2 * pause, LONGEST_PAUSE_S)

    def _follow(self) -> bool:
        """Runs one sending process; returns whether it reached wandb."""
        try:
            with (self._folder / LOG_FILE).open("a") as log, self._lock:
                self._mirror = mirror = subprocess.Popen(
                    [*MIRROR, "send"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
                    start_new_session=True,
                )  # fmt: skip
                self._tell(mirror, self._given)
                if self._outcome is not None:
                    self._tell(mirror, {"outcome": self._outcome})
        except OSError as error:
            self._report_trouble(str(error))
            return False
        reached = self._listen(mirror.stdout)
        mirror.wait()
        with self._lock:
            self._mirror = None
        if not self._sent and self._misuse is None:
            self._report_trouble(f"what sends to it has ended; see {self._folder / LOG_FILE}")
        return reached

    def _listen(self, said: IO[str] | None) -> bool:
        assert said is not None
        reached = False
        for line in said:
            message = json.loads(line)
            match message["what"]:
                case "connected":
                    reached = self._answered = True
                    where = f" at {message['why']}" if message["why"] else ""
                    if self._trouble or where:
                        self._console.print(f"wandb has the run{where}", soft_wrap=True)
                    self._trouble = False
                case "sent":
                    self._sent = True
                    if message["why"]:
                        self._console.print(f"wandb offline: `wandb sync {message['why']}` sends it", soft_wrap=True)
                case "misuse":
                    self._late, self._misuse = self._answered, message["why"]
                    if self._late:
                        refusal = f"wandb refuses the run, which goes on without it: {message['why']}; {self._later}"
                        self._console.print(Text(printable(refusal), "yellow"), soft_wrap=True)
                case "failed":
                    self._report_trouble(message["why"])
        return reached

    def _report_trouble(self, why: str) -> None:
        if not self._trouble and not self._ended.is_set():
            reason = printable(" ".join(why.split()), 300)
            self._console.print(
                Text(f"wandb cannot be reached; the run continues, and it is tried again: {reason}", "yellow"),
                soft_wrap=True,
            )
        self._trouble = self._answered = True


def send_to_wandb(run_folder: Path, console: Console) -> bool:
    """Sends what wandb lacks of a run that is not training; returns whether wandb now has all of it. Raises UserError
    for a misuse.
    """
    config, rows = saved_config(run_folder), read_metrics(run_folder)
    if config.method.wandb is None:
        raise UserError(f"{run_folder / CONFIG_FILE} says `wandb: null`: the run was not meant to be tracked")
    if not _enabled(config):
        raise UserError("WANDB_MODE is disabled; with online or offline the run can be sent")
    if not rows:
        raise UserError(f"{run_folder} has no rows of metrics yet")
    login = Login(config)
    login.require()
    sink = Wandb(config, run_folder, console)
    sink.close("finished" if rows[-1]["step"] >= config.method.pd.steps - 1 else "failed", within_s=3600)
    sink.check()
    return sink.sent
