"""Reads data sets of the Hugging Face hub, or of a folder with the same layout, through the `datasets` library.

A split is streamed: each of its files is read by one process, and only the text is kept. A slice of a split
(``train[:10000]``) needs the whole split, which is fetched into the library's cache, as `datasets` itself does.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from param_decomp_lab.data.pieces import Document
from param_decomp_lab.data.plan import Role, Unit
from param_decomp_lab.data.records import BadRecord, Column, column_documents, require_column
from param_decomp_lab.data.spans import ROWS_AT_ONCE
from param_decomp_lab.errors import CannotFetch, UserError
from param_decomp_lab.safe_io.answers import ANSWER_S, answer_within
from param_decomp_lab.safe_io.printable import printable, shortened
from param_decomp_lab.ui.quiet_hub import quiet_hub

ROWS_PER_UNIT = 1 << 16
"""Rows of a slice that form one unit."""


@dataclass(frozen=True)
class HubDataset:
    """``name``: ``organisation/name``, or a local folder. ``config``: one of its configurations. ``revision``: branch,
    tag or commit; None means the main branch. ``data_files``: a glob that selects some of its files.
    """

    name: str
    config: str | None = None
    revision: str | None = None
    data_files: str | None = None

    @property
    def is_local(self) -> bool:
        return Path(self.name).is_dir()

    @property
    def identity(self) -> str:
        """Returns the identity of a folder, which changes if a file in it does; empty for a data set of the hub."""
        if not self.is_local:
            return ""
        files = sorted(path for path in Path(self.name).rglob("*") if path.is_file())
        return "".join(f"\n{path} {path.stat().st_size} {path.stat().st_mtime_ns}" for path in files)

    def pinned(self) -> "HubDataset":
        """Returns the same data set pinned to the current commit of its revision. Raises UserError for what the hub
        refuses or does not have, and CannotFetch if the hub cannot be reached.
        """
        if self.is_local:
            return self
        from huggingface_hub import HfApi

        with self._asking(), quiet_hub():
            info = answer_within(ANSWER_S, lambda: HfApi().dataset_info(self.name, revision=self.revision))
        return replace(self, revision=info.sha)

    def units(self, split: str, role: Role) -> list[Unit]:
        """Returns the units of a split, or of a slice of one. Raises as `pinned` does."""
        sliced = "[" in split or "+" in split
        with self._asking(), quiet_hub():
            loaded = self._load(split, streaming=not sliced)
            if sliced:
                bounds = range(0, len(loaded), ROWS_PER_UNIT)
                spans = [HubSpan(self, split, n, 0, min(ROWS_PER_UNIT, len(loaded) - n)) for n in bounds]
            else:
                n = loaded.num_shards
                spans = [HubSpan(self, split, number, n, 0) for number in range(n)]
        return [Unit((span,), role) for span in spans]

    def tables(self, span: "HubSpan") -> Iterator[Any]:
        """Yields Arrow tables of a span's rows."""
        with self._asking(), quiet_hub():
            if span.n_shards:
                shard = self._load(span.split, streaming=True).shard(span.n_shards, span.first)
                yield from shard.with_format("arrow").iter(ROWS_AT_ONCE)
                return
            rows = self._load(span.split, streaming=False).with_format("arrow")
            stop = span.first + span.n_rows
            for start in range(span.first, stop, ROWS_AT_ONCE):
                yield rows[start : min(start + ROWS_AT_ONCE, stop)]

    def _load(self, split: str, *, streaming: bool) -> Any:
        try:
            from datasets import load_dataset
        except ImportError as error:
            raise UserError(
                f"{self} needs the package `datasets`, which is not installed: pip install datasets"
            ) from error
        return load_dataset(
            self.name, self.config, split=split, revision=self.revision, data_files=self.data_files, streaming=streaming
        )

    def describe(self) -> str:
        """Describes what was read, with its configuration, files and commit."""
        parts = (self.name, self.config, self.data_files, self.revision and f"commit {self.revision}")
        return ", ".join(part for part in parts if part)

    def __str__(self) -> str:
        return f"the data set {printable(self.name, 200)}"

    def _asking(self) -> AbstractContextManager[None]:
        """A block with requests to the hub: each error becomes one message, and the clients print nothing."""
        return explained(str(self), f"datasets/{self.name}", self.revision)


@dataclass(frozen=True)
class HubSpan:
    """File ``first`` of the ``n_shards`` of a streamed split, or ``n_rows`` rows of a slice from ``first`` on."""

    dataset: HubDataset
    split: str
    first: int
    n_shards: int
    n_rows: int

    @property
    def size(self) -> int:
        return 0  # unknown

    @property
    def identity(self) -> str:
        return f"{self!r}{self.dataset.identity}"

    def documents(self, column: Column) -> Iterator[Document | BadRecord]:
        where, first = f"{self.dataset}, split {self.split}", 1
        for table in self.dataset.tables(self):
            require_column(where, table.column_names, column)
            for values in table.column(column.name).chunks:
                yield from column_documents(where, first, values, column)
                first += len(values)


@contextmanager
def explained(what: str, page: str, revision: str | None = None) -> Iterator[None]:
    """A block that requests ``what``, whose page on the hub is ``page``. Raises UserError for what the hub refuses or
    does not have, and CannotFetch if the hub cannot be reached.
    """
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )
    from huggingface_hub.utils import httpx

    token = "a token of yours that may read it, in HF_TOKEN or by `hf auth login`"
    place = f"{constants.ENDPOINT}/{page}"
    refusals: dict[type[Exception], str] = {
        HFValidationError: f"{what}: is neither a folder nor a name on the Hugging Face hub (organisation/name)",
        GatedRepoError: (
            f"{what} is only for those whom its owner has given access; ask for it at {place}, and give {token}"
        ),
        RevisionNotFoundError: f"{what} has no revision {printable(str(revision), 80)}",
        RepositoryNotFoundError: f"{what} is not on {constants.ENDPOINT}, or it is private and needs {token}",
    }
    try:
        yield
    except (UserError, CannotFetch):
        raise
    except Exception as error:
        causes = list(_causes(error))  # `datasets` wraps the client's errors
        for kind, message in refusals.items():
            # For gated data sets, `datasets` keeps no cause.
            gated = kind is GatedRepoError and "gated dataset" in str(error)
            if gated or any(isinstance(cause, kind) for cause in causes):
                raise UserError(message) from error
        if any(isinstance(cause, OfflineModeIsEnabled) for cause in causes):
            raise _offline(what) from error
        if any(isinstance(cause, httpx.HTTPError | ConnectionError) for cause in causes) or isinstance(error, OSError):
            raise _unreachable(what, error) from error
        # An unknown split or configuration, or a file that the library cannot read.
        raise UserError(f"{what}: {printable(shortened(str(error), 600))}") from error


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _offline(what: str) -> UserError:
    return UserError(
        f"{what} is not on this machine, and HF_HUB_OFFLINE is set: tokenize where there is a network (`pd data "
        "tokenize --dataset`), and copy the folder"
    )


def _unreachable(what: str, error: Exception) -> CannotFetch | UserError:
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return _offline(what)
    reason = printable(shortened(str(error).partition("\n")[0], 300)) or type(error).__name__
    return CannotFetch(
        f"{what} could not be read from {constants.ENDPOINT}: {reason}; what is done is kept: start again where there "
        "is a network, or tokenize it there and copy the folder"
    )
