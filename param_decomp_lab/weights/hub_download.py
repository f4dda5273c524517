"""Downloads files of a model of the Hugging Face hub into the local cache, with progress, continuing earlier tries."""

import hashlib
import os
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console

from param_decomp_lab.errors import CannotFetch
from param_decomp_lab.safe_io.printable import printable, shortened
from param_decomp_lab.weights.download_progress import LARGE_BYTES, download_progress, folder_bytes


def download_files(name: str, commit: str, sizes: Mapping[str, int], console: Console) -> Path:
    """Downloads these files and returns the commit's folder in the cache; files already there are not fetched again.

    ``sizes``: bytes by file. Large ones show progress, and interrupted downloads are continued.

    Files are fetched one at a time, so that an interruption costs little, and by one process at a time; the others wait
    and find the files. Raises what `huggingface_hub` does, and CannotFetch for a file whose content differs from the
    hub's description.
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
        there = folder_bytes(blobs, "*.partial")
        stack.enter_context(download_progress(f"downloading {name}", blobs, large, console, there))
        for file, size in left.items():
            if size >= LARGE_BYTES:
                _fetch_large(name, commit, file, blobs, console)
            hf_hub_download(name, file, revision=commit)
    return cache / folder_name / "snapshots" / commit


def _is_there(name: str, commit: str, file: str) -> bool:
    from huggingface_hub import try_to_load_from_cache

    return isinstance(try_to_load_from_cache(name, file, revision=commit), str)


def _fetch_large(name: str, commit: str, file: str, blobs: Path, console: Console) -> None:
    """Puts the content of a file where `hf_hub_download` finds it, since that function itself starts a file anew in
    every process.

    Files that are available in chunks (Xet) are still left to it, unless that fails: chunks are on separate hosts,
    which a firewall may block.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url
    from huggingface_hub.file_download import is_xet_available

    url = hf_hub_url(name, file, revision=commit)
    known = get_hf_file_metadata(url)
    if known.xet_file_data is not None and is_xet_available():
        try:
            hf_hub_download(name, file, revision=commit)
            return
        except RuntimeError as error:  # the only error of hf_xet
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
        partial.unlink()  # two processes have written it, on a disk without locks
    with partial.open("ab") as opened:
        # The client drops the token when it is redirected to the host that stores large files.
        http_get(url, opened, resume_size=opened.tell(), headers=build_hf_headers(), expected_size=size)
    with partial.open("rb") as opened:
        sha256 = hashlib.file_digest(opened, "sha256").hexdigest()
    if len(etag) == len(sha256) and sha256 != etag:
        partial.unlink()
        raise CannotFetch(f"{what} arrived damaged and was removed: start again")
    os.replace(partial, blobs / etag)
