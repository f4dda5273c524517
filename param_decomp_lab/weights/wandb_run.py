"""Fetches files of a run on wandb with its own client: lists them first, then fetches only the needed ones."""

import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from param_decomp_lab.errors import CannotFetch, UserError
from param_decomp_lab.safe_io.paths import path_within
from param_decomp_lab.safe_io.printable import printable, shortened
from param_decomp_lab.weights.download_progress import LARGE_BYTES, download_progress
from param_decomp_lab.weights.torch_files import SETTINGS_FILES, newest_checkpoint, settings_files, tokenizer_files

TIMEOUT_S = 20
_NO_KEY = "needs an API key of wandb: run `wandb login`, or set WANDB_API_KEY"
_NO_ANSWER = re.compile("respond|time|connect|dial|refused|host|network|proxy", re.IGNORECASE)
"""Words in the errors with which wandb's client could not reach the server."""
_NAME = r"[A-Za-z0-9_.-]+"
_PATH = re.compile(
    rf"(?:wandb:(?://)?|https://(?:{_NAME}\.)?wandb\.ai/)?"
    rf"(?P<entity>{_NAME})/(?P<project>{_NAME})/(?:runs/)?(?P<id>{_NAME})/?"
)


@dataclass(frozen=True)
class WandbRun:
    """A run on wandb."""

    entity: str
    project: str
    id: str

    def __str__(self) -> str:
        return f"wandb:{self.entity}/{self.project}/{self.id}"


def parse_run_path(text: str) -> WandbRun | None:
    """Parses ``wandb:entity/project/id``, also with ``runs/`` before the id, with ``wandb://`` or without a prefix, or
    the address of the run's page. Returns None for anything else.
    """
    found = _PATH.fullmatch(text)
    if found is None or any(part in (".", "..") for part in found.groups()):
        return None
    return WandbRun(found["entity"], found["project"], found["id"])


def fetch_files(run: WandbRun, folder: Path, where: str, console: Console) -> None:
    """Fetches settings, tokenizer and newest checkpoint of a run into ``folder``; existing files are kept.

    ``where``: the key that names the run, for errors. Raises UserError if nobody is logged in, or the run or its files
    do not exist, and CannotFetch if wandb cannot be reached.
    """

    def chosen(names: Iterable[str]) -> list[str]:
        settings, checkpoint = settings_files(names), newest_checkpoint(names, f"{where}: {run}")
        if not settings:
            raise UserError(f"{where}: {run} has none of {', '.join(SETTINGS_FILES)}, so its model is not known")
        return [*settings, *tokenizer_files(names), checkpoint]

    fetch_chosen(run, folder, where, console, chosen)


def fetch_chosen(
    run: WandbRun, folder: Path, where: str, console: Console, choose: Callable[[Iterable[str]], list[str]]
) -> list[str]:
    """Like `fetch_files`, but fetches the files that ``choose`` selects by name; returns these."""
    import wandb

    with _explained(run, where):
        if not wandb.login(prompt=False, verify=False):
            raise UserError(f"{where}: {run} {_NO_KEY}")
        found = wandb.Api(timeout=TIMEOUT_S).run(f"{run.entity}/{run.project}/{run.id}")
        files = {file.name: file for file in found.files()}
        chosen = list(dict.fromkeys(choose(files)))
        for name in chosen:
            place = path_within(folder, name, str(run))
            if not place.is_file():
                _download(files[name], place, folder.parent / "partial", console)
    return chosen


def _download(file: Any, place: Path, partial: Path, console: Console) -> None:
    total = file.size if file.size >= LARGE_BYTES else 0
    with download_progress(f"downloading {file.name}", partial, total, console):
        file.download(root=str(partial), replace=True).close()
    arrived = partial / file.name
    if arrived.stat().st_size != file.size:
        raise CannotFetch(f"{file.name} arrived with {arrived.stat().st_size:,} bytes, not {file.size:,}: start again")
    place.parent.mkdir(parents=True, exist_ok=True)
    os.replace(arrived, place)


@contextmanager
def _explained(run: WandbRun, where: str) -> Iterator[None]:
    """A block with requests to wandb, whose client prints nothing; each error becomes one message."""
    import wandb

    silent = os.environ.get("WANDB_SILENT")
    os.environ["WANDB_SILENT"] = "true"
    try:
        yield
    except wandb.errors.UsageError as error:
        raise UserError(f"{where}: {run} {_NO_KEY}") from error
    except (wandb.errors.Error, ValueError) as error:
        text = printable(str(error), 2000)
        # Its errors differ only in their text: without a network, credentials also "failed to verify".
        reason = shortened(re.sub(r"^Failed to verify credentials with \S+: ", "", text).partition("\n")[0], 200)
        if isinstance(error, wandb.errors.AuthenticationError) and not _NO_ANSWER.search(reason):
            raise UserError(f"{where}: wandb does not know the API key that was sent: run `wandb login`") from error
        if re.search("ould not find|not found|404|403", text):
            raise UserError(
                f"{where}: there is no {run}, or the account of the API key may not see it; the path is "
                "wandb:entity/project/id, with the id from the address of the run's page"
            ) from error
        raise CannotFetch(
            f"{where}: {run} could not be fetched from wandb ({reason}); start again where there is a network, or give "
            "target: {folder: <path>} in the wrapper"
        ) from error
    finally:
        if silent is None:
            del os.environ["WANDB_SILENT"]
        else:
            os.environ["WANDB_SILENT"] = silent
