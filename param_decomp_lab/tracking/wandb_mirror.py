"""Sends to wandb what the run folder has and wandb lacks, in a separate process that `wandb_sink.py` starts.

    python -m param_decomp_lab.tracking.wandb_mirror check    # whether wandb could be logged in to, without asking it
    python -m param_decomp_lab.tracking.wandb_mirror send

It sends `metrics.jsonl` and `figures/`; nothing is passed in memory. It reads lines of JSON: first the arguments of
`wandb.init`, later how the run ended. It writes lines of JSON: `connected`, then `sent`; or `misuse`, or `failed`. It
exits as soon as its input ends, because then the process that started it is gone.
"""

import json
import os
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from param_decomp_lab.runs.metrics_file import parse_row

POLL_S = 0.5
INIT_TIMEOUT_S = 60.0
FINISH_TIMEOUT_S = 20.0
"""Time to send what is still pending when the run has ended. wandb keeps the rest on disk."""
RETRIES = 1_000_000
"""How often wandb repeats a request before it gives up on the run: so many times that it never does."""
OUTCOMES = {"finished": 0, "failed": 1, "preempted": 1}
"""wandb's exit code for each outcome of a run."""


class Ending:
    """How the run ended, once this is known. A thread reads it from stdin."""

    def __init__(self) -> None:
        self.outcome: str | None = None
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        for line in sys.stdin:
            self.outcome = json.loads(line)["outcome"]
        os._exit(1)


def say(channel: int, what: str, why: str = "") -> None:
    os.write(channel, (json.dumps({"what": what, "why": why}) + "\n").encode())


def check() -> None:
    """Raises wandb's own errors if nobody is logged in; contacts no server."""
    import wandb

    if wandb.setup().settings.mode in ("offline", "dryrun", "disabled"):
        return
    if not wandb.login(verify=False, prompt=False):
        raise wandb.errors.UsageError("nobody is logged in on this machine; run `wandb login`")


def send(channel: int, given: dict[str, Any], ending: Ending) -> None:
    """Sends until the run has ended and all of it is sent. Raises wandb's own errors, and TimeoutError at the end."""
    import wandb

    folder = Path(given["dir"])
    settings = wandb.Settings(
        silent=True, console="off", init_timeout=INIT_TIMEOUT_S,
        finish_timeout=FINISH_TIMEOUT_S, finish_timeout_raises=True,
        x_graphql_retry_max=RETRIES, x_file_stream_retry_max=RETRIES, x_file_transfer_retry_max=RETRIES,
    )  # fmt: skip
    offline = wandb.setup().settings.mode in ("offline", "dryrun")
    if offline:
        _put_aside(folder / "wandb")
    before = set((folder / "wandb").glob("*"))
    try:
        run = wandb.init(**given, resume=None if offline else "allow", settings=settings)
    except BaseException:
        for made in set((folder / "wandb").glob("run-*")) - before:  # one empty folder for each try
            shutil.rmtree(made, ignore_errors=True)
        raise
    say(channel, "connected", run.url or "")
    # Rows that wandb has are not sent again, since a resumed run produces the same ones.
    first = 0 if offline else run.starting_step
    for row in read_rows(folder / "metrics.jsonl", ending):
        if row["step"] >= first:
            run.log({**row, **_figures(folder, row["step"])}, step=row["step"], commit=True)
    if ending.outcome == "preempted":
        run.mark_preempting()
    run.finish(exit_code=OUTCOMES[ending.outcome or "failed"])
    say(channel, "sent", str(run.settings.sync_dir) if offline else "")


def _put_aside(made: Path) -> None:
    """Moves aside the offline folders of earlier starts of the run. This start writes one with all rows, and syncing
    several with `wandb sync` would duplicate rows.
    """
    aside = made / "superseded"
    for older in made.glob("offline-run-*"):
        aside.mkdir(exist_ok=True)
        older.rename(aside / older.name)


def read_rows(file: Path, ending: Ending) -> Iterator[dict[str, Any]]:
    """Yields rows as they are written, until the run has ended. A line that is then still incomplete is left out.
    Raises ValueError, with the line number, for a line that is not a row.
    """
    rest, number = b"", 0
    with file.open("rb") as lines:
        while True:
            ended = ending.outcome is not None  # checked first: what was written before the end is still read
            *whole, rest = (rest + lines.read()).split(b"\n")
            for line in whole:
                number += 1
                try:
                    yield parse_row(line.decode())
                except ValueError as error:
                    raise ValueError(f"{file}:{number}: {error}") from error
            if ended:
                return
            time.sleep(POLL_S)


def _figures(folder: Path, step: int) -> dict[str, Any]:
    """Returns the figures that belong to a row; they were drawn before the row was written."""
    import wandb

    ending = f"_{step}.png"
    found = sorted((folder / "figures").glob(f"*{ending}"))
    return {f"slow_eval/figures/{path.name.removesuffix(ending)}": wandb.Image(str(path)) for path in found}


def is_misuse(error: BaseException) -> bool:
    """Whether a retry cannot help: nobody is logged in, or the server says that the request is wrong."""
    import wandb

    if isinstance(error, wandb.errors.UsageError | wandb.errors.AuthenticationError):
        return True
    # No entity, no permission, no such key. 408, 409, 425 and 429 ask for a retry.
    refused = re.search(r"returned error (4\d\d)", str(error))
    return refused is not None and int(refused[1]) not in (408, 409, 425, 429)


def main() -> None:
    """Always exits with status 0; the outcome is reported on the channel."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # the signal is meant for the run, which then reports its end here
    os.nice(5)  # the run's own threads have priority
    # wandb may print to stdout, but only our own messages may reach the parent process.
    channel = os.dup(1)
    os.dup2(2, 1)
    try:
        if sys.argv[1:] == ["check"]:
            check()
            say(channel, "usable")
        else:
            given = json.loads(sys.stdin.readline())
            send(channel, given, Ending())
    except Exception as error:
        say(channel, "misuse" if is_misuse(error) else "failed", str(error) or type(error).__name__)
    os._exit(0)  # wandb's exit handler would wait for a server that does not answer


if __name__ == "__main__":
    main()
