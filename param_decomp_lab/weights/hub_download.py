"""Files of a model on the Hugging Face hub into the local cache, with progress, going on where an earlier try ended."""

import hashlib
import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from param_decomp_lab.display.numbers import byte_size
from param_decomp_lab.errors import CannotFetch

LARGE_BYTES = 1 << 24
"""Files from here on show progress, and are gone on with when a try was interrupted."""
LINE_S = 30.0
"""Between two lines of progress, where there is no terminal."""


def download_files(name: str, commit: str, sizes: Mapping[str, int], console: Console) -> Path:
    """The folder of the commit in the cache, with these files; those already there are not fetched again.

    ``sizes``: bytes by file.

    One file after the other, so that an interruption costs little; one process at a time, the others wait and find
    the files. Raises what `huggingface_hub` does, and CannotFetch for a file that is not what the hub says it is.
    """
    from huggingface_hub import constants, hf_hub_download
    from huggingface_hub.file_download import repo_folder_name
    from huggingface_hub.utils import WeakFileLock

    cache, folder_name = Path(constants.HF_HUB_CACHE), repo_folder_name(repo_id=name, repo_type="model")
    locks, blobs = cache / ".locks" / folder_name, cache / folder_name / "blobs"
    locks.mkdir(parents=True, exist_ok=True)
    blobs.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(locks / "param-decomp.lock"), ExitStack() as stack:
        left = {file: size for file, size in sizes.items() if not _is_there(name, commit, file)}
        large = sum(size for size in left.values() if size >= LARGE_BYTES)
        stack.enter_context(_progress(f"downloading {name}", blobs, large, console))
        for file, size in left.items():
            if size >= LARGE_BYTES:
                _complete_blob(name, commit, file, blobs)
            hf_hub_download(name, file, revision=commit)
    return cache / folder_name / "snapshots" / commit


def _is_there(name: str, commit: str, file: str) -> bool:
    from huggingface_hub import try_to_load_from_cache

    return isinstance(try_to_load_from_cache(name, file, revision=commit), str)


def _complete_blob(name: str, commit: str, file: str, blobs: Path) -> None:
    """Puts the content of a large file where `hf_hub_download` finds it. That function itself begins a file anew in
    every process; what it fetches by chunks (Xet) is left to it."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers

    url = hf_hub_url(name, file, revision=commit)
    known = get_hf_file_metadata(url)
    if known.xet_file_data is not None or known.etag is None or known.size is None or (blobs / known.etag).exists():
        return
    partial = blobs / f"{known.etag}.partial"
    if partial.exists() and partial.stat().st_size > known.size:
        partial.unlink()  # two processes have written it, on a disk that knows no locks
    with partial.open("ab") as opened:
        # The client drops the token when it is sent on to the host that stores large files.
        http_get(url, opened, resume_size=opened.tell(), headers=build_hf_headers(), expected_size=known.size)
    with partial.open("rb") as opened:
        sha256 = hashlib.file_digest(opened, "sha256").hexdigest()
    if len(known.etag) == len(sha256) and sha256 != known.etag:
        partial.unlink()
        raise CannotFetch(f"{name}: {file} arrived damaged and was removed: start again")
    os.replace(partial, blobs / known.etag)


@contextmanager
def _progress(what: str, blobs: Path, total: int, console: Console) -> Iterator[None]:
    """A block that shows how much of ``total`` bytes has arrived: a bar on a terminal, elsewhere a line now and then.

    The files that grow are watched, since there are several ways by which they are fetched."""
    if not total:
        yield
        return
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(True), TransferSpeedColumn()
    done = threading.Event()
    start, partial = time.monotonic(), _size(blobs, "*.partial")
    others = _size(blobs) - partial
    with Progress(*columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=total, completed=partial)

        def watch() -> None:
            line = time.monotonic()
            while not done.wait(0.5):
                arrived = min(_size(blobs) - others, total)
                bar.update(task, completed=arrived)
                if not console.is_terminal and time.monotonic() - line >= LINE_S:
                    line = time.monotonic()
                    console.print(f"{what}: {byte_size(arrived)} of {byte_size(total)}", highlight=False)

        if not console.is_terminal:
            there = f", of which {byte_size(partial)} are there" if partial else ""
            console.print(f"{what}: {byte_size(total)}{there}", highlight=False)
        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()
        bar.update(task, completed=total)
    if not console.is_terminal:
        console.print(f"{what}: done in {time.monotonic() - start:.0f} s", highlight=False)


def _size(folder: Path, pattern: str = "*") -> int:
    """Bytes of the files in a folder, those that are being written included."""
    total = 0
    for path in folder.glob(pattern):
        with suppress(OSError):  # renamed meanwhile
            total += path.stat().st_size
    return total
