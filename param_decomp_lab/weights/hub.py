"""Finds models of the Hugging Face hub in the local cache, and fetches missing files.

`huggingface_hub` keeps the cache, finds the token (``HF_TOKEN``, or what `hf auth login` saved) and asks the hub.
Cached files are used without asking the hub, so a resumed run reads the weights with which it began.
"""

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from param_decomp_lab.errors import CannotFetch, UserError
from param_decomp_lab.folders import DISK_ERRORS, not_written
from param_decomp_lab.safe_io.answers import ANSWER_S, answer_within, ask_for_file
from param_decomp_lab.safe_io.printable import printable, shortened
from param_decomp_lab.ui.quiet_hub import quiet_hub
from param_decomp_lab.weights.download_progress import LARGE_BYTES
from param_decomp_lab.weights.hub_download import download_files
from param_decomp_lab.weights.safetensors_files import INDEX_FILE, SINGLE_FILE, listed_files, missing_files
from param_decomp_lab.weights.target_folder import CONFIG_FILE

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model",
    "vocab.json", "merges.txt",
)  # fmt: skip
PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")


class Offline(UserError):
    """Raised for files that are not in the cache and may not be fetched (``HF_HUB_OFFLINE``)."""


@dataclass(frozen=True)
class HubModel:
    """A model on the hub. ``name``: ``organisation/name``; ``revision``: branch, tag or commit; None means the main
    branch. ``where``: the key that names it, for errors.
    """

    name: str
    revision: str | None = None
    where: str = "target.spec.model_name"

    def __str__(self) -> str:
        return self.name if self.revision is None else f"{self.name} at revision {self.revision}"

    def cached_config(self) -> Path | None:
        """Returns the folder in the cache with its config.json, possibly without weights. Raises UserError for an
        invalid name of a model.
        """
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError

        try:
            found = try_to_load_from_cache(self.name, CONFIG_FILE, revision=self.revision)
        except HFValidationError as error:
            raise UserError(
                f"{self.where}: {printable(repr(self.name), 200)} is neither a folder nor the name of a model on the "
                "Hugging Face hub (organisation/name); a revision goes into target: {revision: …} of the wrapper"
            ) from error
        return Path(found).parent if isinstance(found, str) else None

    def cached(self) -> Path | None:
        """Returns the folder in the cache if it has all of the weights, too."""
        folder = self.cached_config()
        return None if folder is None or missing_files(folder) else folder

    def missing(self) -> str:
        """Says what is not on this machine, and how to get it."""
        what = "" if self.cached_config() is None else "the weights of "
        return f"{what}{self}: not in the local Hugging Face cache; `pd train` fetches it, or `pd weights fetch`"

    def fetch_config(self) -> Path:
        """Returns the folder in the cache with its config.json, which is fetched if the hub answers at once.

        Raises CannotFetch without an answer, Offline, and UserError for what the hub refuses.
        """
        from huggingface_hub import hf_hub_download

        cached = self.cached_config()
        if cached is not None:
            return cached
        with self._explained():
            ask_for_file(self.name, CONFIG_FILE, self.revision)
            return Path(hf_hub_download(self.name, CONFIG_FILE, revision=self.revision)).parent

    def fetch(self, console: Console) -> Path:
        """Returns the folder in the cache with config.json, safetensors and tokenizer, after fetching what is missing.

        Partial downloads of a broken connection or a killed process are continued. Raises CannotFetch if the hub cannot
        be reached, CannotWrite for a full disk, Offline, and UserError for what the hub refuses or does not have.
        """
        from huggingface_hub import HfApi, hf_hub_download

        cached = self.cached()
        if cached is not None:
            return cached
        with self._explained():
            info = answer_within(
                ANSWER_S, lambda: HfApi().model_info(self.name, revision=self.revision, files_metadata=True)
            )
            sizes = {file.rfilename: file.size or LARGE_BYTES for file in info.siblings or ()}
            self._refuse_unreadable(sizes)
            assert info.sha is not None
            small = [name for name in (CONFIG_FILE, INDEX_FILE, *TOKENIZER_FILES) if name in sizes]
            folder = download_files(self.name, info.sha, {name: sizes[name] for name in small}, console)
            weights = [SINGLE_FILE] if SINGLE_FILE in sizes else listed_files(folder)
            if not sizes.keys() >= set(weights):
                names = ", ".join(printable(name, 100) for name in weights if name not in sizes)
                raise UserError(f"{self.where}: {self} lacks {names}, which its {INDEX_FILE} lists: it is not whole")
            download_files(self.name, info.sha, {name: sizes[name] for name in weights}, console)
            # Fetched by revision name, which records its commit for use without the hub.
            hf_hub_download(self.name, CONFIG_FILE, revision=self.revision)
        return folder

    def _refuse_unreadable(self, files: Iterable[str]) -> None:
        """Raises UserError for a model without a configuration or without safetensors."""
        names = set(files)
        if CONFIG_FILE not in names:
            raise UserError(
                f"{self.where}: {self} has no {CONFIG_FILE}, so it is not a model in the Hugging Face layout"
            )
        if names & {SINGLE_FILE, INDEX_FILE}:
            return
        if names & set(PICKLES):
            raise UserError(
                f"{self.where}: {self} stores its weights as pytorch_model.bin only, a pickle, which is not read; "
                f"fetch it with `hf download {self.name}`, turn the folder that this prints into another with `pd "
                "weights import-torch FOLDER --out OUT`, and give target: {folder: OUT} in the wrapper"
            )
        gguf = next((name for name in sorted(names) if name.endswith(".gguf")), None)
        then = f"; fetch {gguf} and use `pd weights import-gguf`" if gguf else ""
        raise UserError(f"{self.where}: {self} has neither {SINGLE_FILE} nor {INDEX_FILE}{then}")

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """A block with requests to the hub, without the client's own progress and warnings, which would show URLs that
        work without a token for a while. Each error becomes one message.
        """
        from huggingface_hub.errors import OfflineModeIsEnabled
        from huggingface_hub.utils import httpx

        try:
            with quiet_hub():
                yield
        except OfflineModeIsEnabled as error:
            raise Offline(
                f"{self.where}: {self} is not in the local Hugging Face cache, and HF_HUB_OFFLINE is set; fetch it "
                "where there is a network (`pd weights fetch`), or give target: {folder: <path>} in the wrapper"
            ) from error
        except httpx.TransportError as error:
            raise self._unreachable(error) from error
        except OSError as error:  # includes errors that the hub returns
            response = getattr(error, "response", None)
            if response is None and (error.filename is not None or error.errno in DISK_ERRORS):
                place = Path(error.filename or "the Hugging Face cache")
                raise not_written(place, error, "choose another place with HF_HOME") from error
            if response is None:
                raise self._unreachable(error) from error
            raise self._refused(error, response.status_code) from error

    def _unreachable(self, error: Exception) -> CannotFetch:
        reason = shortened(str(error).partition("\n")[0].partition("http")[0].strip(" :("), 200) or type(error).__name__
        return CannotFetch(
            f"{self.where}: {self} could not be fetched from {_hub()}: {reason}; what has arrived is kept: "
            "start again where there is a network, or give target: {folder: <path>} in the wrapper"
        )

    def _refused(self, error: Exception, status: int) -> UserError | CannotFetch:
        from huggingface_hub import get_token
        from huggingface_hub.errors import (
            EntryNotFoundError,
            GatedRepoError,
            RepositoryNotFoundError,
            RevisionNotFoundError,
        )

        page, has_token = f"{_hub()}/{self.name}", get_token() is not None
        token = "a token of yours, in HF_TOKEN or by `hf auth login`"
        if isinstance(error, GatedRepoError):
            then = (
                f"the token that was sent has no access to it: ask for access at {page} with the token's account, and "
                "see that the token may read gated models"
                if has_token
                else f"ask for access at {page} and give {token}"
            )
            return UserError(f"{self.where}: {self} is only for those whom its owner has given access; {then}")
        if isinstance(error, RevisionNotFoundError):
            return UserError(f"target.revision: {self.name} has no revision '{self.revision}'; see {page}/tree/main")
        if isinstance(error, EntryNotFoundError):
            return UserError(
                f"{self.where}: {self} has no {CONFIG_FILE}, so it is not a model in the Hugging Face layout"
            )
        if isinstance(error, RepositoryNotFoundError):
            private = "the token that was sent may not see it" if has_token else f"it is private and needs {token}"
            return UserError(f"{self.where}: there is no {self.name} on {_hub()}, or {private}")
        if status == 401:
            return UserError(f"{self.where}: the hub does not know the token that was sent; give {token}, or none")
        if status == 403:
            return UserError(f"{self.where}: the token that was sent may not read {self}; give another in HF_TOKEN")
        return CannotFetch(
            f"{self.where}: {self} could not be fetched: the hub answers with status {status}; try later"
        )


def _hub() -> str:
    """Returns the address of the hub, without a password that it may contain."""
    from huggingface_hub import constants

    return re.sub("//[^/]*@", "//", str(constants.ENDPOINT))
