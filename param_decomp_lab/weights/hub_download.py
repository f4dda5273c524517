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
from param_decomp_lab.untrusted.printable import printable, shortened

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
                _fetch_large(name, commit, file, blobs, console)
            hf_hub_download(name, file, revision=commit)
    return cache / folder_name / "snapshots" / commit


def _is_there(name: str, commit: str, file: str) -> bool:
    from huggingface_hub import try_to_load_from_cache

    return isinstance(try_to_load_from_cache(name, file, revision=commit), str)


def _fetch_large(name: str, commit: str, file: str, blobs: Path, console: Console) -> None:
    """Puts the content of a file where `hf_hub_download` finds it, for that begins a file anew in every process.

    What is to be had by chunks (Xet) is left to it all the same, unless that fails: the chunks are on hosts of their
    own, which a firewall may not let through.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url
    from huggingface_hub.file_download import is_xet_available

    url = hf_hub_url(name, file, revision=commit)
    known = get_hf_file_metadata(url)
    if known.xet_file_data is not None and is_xet_available():
        try:
            hf_hub_download(name, file, revision=commit)
            return
        except RuntimeError as error:  # all that hf_xet raises
            reason = shortened(str(error).partition("http")[0].rstrip(" :("), 200)
            said = f"{file}: its chunks could not be fetched ({printable(reason)}); it is downloaded as a whole"
            console.print(said, soft_wrap=True, highlight=False)
    if known.etag is not None and known.size is not None and not (blobs / known.etag).exists():
        _fetch_whole(url, known.etag, known.size, blobs, f"{name}: {file}")


def _fetch_whole(url: str, etag: str, size: int, blobs: Path, what: str) -> None:
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers

    partial = blobs / f"{etag}.partial"
    if partial.exists() and partial.stat().st_size > size:
        partial.unlink()  # two processes have written it, on a disk that knows no locks
    with partial.open("ab") as opened:
        # The client drops the token when it is sent on to the host that stores large files.
        http_get(url, opened, resume_size=opened.tell(), headers=build_hf_headers(), expected_size=size)
    with partial.open("rb") as opened:
        sha256 = hashlib.file_digest(opened, "sha256").hexdigest()
    if len(etag) == len(sha256) and sha256 != etag:
        partial.unlink()
        raise CannotFetch(f"{what} arrived damaged and was removed: start again")
    os.replace(partial, blobs / etag)


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
