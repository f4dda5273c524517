"""Tokenizes the text that a schema file's `data` names into rows in the cache, once, before the run begins.

The number of rows that the run reads is rounded up to a power of two, so that runs of similar length share them.
"""

import hashlib
import json
import re
import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from rich.console import Console

from param_decomp_lab.config import RunConfig
from param_decomp_lab.config.method_schema import HubSpec, LanguageModelData, LanguageModelFile
from param_decomp_lab.config.wrapper import DataFolders
from param_decomp_lab.data.hub_text import HubDataset
from param_decomp_lab.data.hub_tokenizer import cached_tokenizer, fetch_tokenizer
from param_decomp_lab.data.meta import META_FILE
from param_decomp_lab.data.plan import FORMAT, Role, Settings, Unit
from param_decomp_lab.data.records import Column
from param_decomp_lab.data.spans import FORMATS
from param_decomp_lab.data.text import TokenText
from param_decomp_lab.data.tokenize import file_units, make_plan, tokenize
from param_decomp_lab.data.tokenize_processes import available_cores
from param_decomp_lab.data.tokenizers import TOKENIZER_FILE, chosen_bos, tokenizer_hash
from param_decomp_lab.data.unfinished import Busy
from param_decomp_lab.errors import UserError
from param_decomp_lab.folders import cache_folder
from param_decomp_lab.ui.descriptions import shown_path

LEAST_FRACTION, LARGEST_FRACTION = 0.01, 0.5
"""Bounds of the fraction that is held out of a data set without an evaluation split."""
WAIT_S = 2.0
"""Seconds between two checks whether another run has finished tokenizing."""
FEW_TOKENS = 1 << 26
"""Up to this number of tokens, one process tokenizes alone: further processes would begin with text that is not needed.
"""


@dataclass(frozen=True)
class NamedText:
    """The text that a configuration names. ``data``: the section. ``train_rows``, ``eval_rows``: numbers of rows that
    the run reads. ``stand_in``: a tokenizer.json for the named tokenizer, from the folder that stands in for the model
    of the same name. ``bos``: whether rows begin with the tokenizer's BOS.
    """

    data: LanguageModelData
    train_rows: int
    eval_rows: int
    stand_in: Path | None
    bos: bool = False

    @cached_property
    def folder(self) -> Path:
        """The folder where its rows are or will be. Raises UserError for files that are missing."""
        name = re.sub(r"[^0-9A-Za-z]+", "-", self.data.dataset_name).strip("-")[:40]
        return cache_folder("tokens") / f"{name}-{self._key()}"

    @property
    def folders(self) -> DataFolders:
        return DataFolders(train=self.folder / "train", eval=self.folder / "eval")

    @property
    def is_made(self) -> bool:
        return (self.folder / META_FILE).is_file()

    @property
    def needs_hub(self) -> bool:
        """Whether the text must be fetched from the hub."""
        return not self.data.of_files and not HubDataset(self.data.dataset_name).is_local

    def describe(self) -> str:
        """Describes the text, and how much of it is used."""
        data = self.data
        what = f"{data.data_files} ({data.dataset_name})" if data.of_files else data.dataset_name
        evaluated = f", evaluated on {data.eval_split}" if self.eval_rows else ""
        parts = [] if data.of_files else [f"split {data.train_split}{evaluated}"]
        parts += [f"files {data.data_files}"] if data.data_files is not None and not data.of_files else []
        parts += [f"revision {data.revision}"] if data.revision is not None else []
        tokens = self._settings.tokens
        parts += [f"column {data.column_name}", f"the first {tokens:,} tokens, or as many as there are"]
        return f"{what}: {', '.join(parts)}"

    def missing(self) -> tuple[str, ...]:
        """Lists what is not on this machine, and what `pd train` does about it."""
        if self.is_made:
            return ()
        where = "fetches it from the Hugging Face hub and tokenizes it" if self.needs_hub else "tokenizes it"
        found = [f"the data, tokenized: `pd train` {where} first, into {shown_path(self.folder)}"]
        if self._tokenizer() is None and not self.data.is_tokenized:
            found.append(f"the tokenizer {self.data.tokenizer_name}: `pd train` fetches it from the Hugging Face hub")
        return tuple(found)

    def tokenizer(self) -> TokenText | None:
        """Returns the tokenizer, with the BOS that rows begin with, whether or not the rows are made yet; None for
        token ids, and if the tokenizer is only on the hub. Raises UserError if rows should begin with a BOS that it
        does not have.
        """
        found = None if self.data.is_tokenized else self._tokenizer()
        if found is None:
            return None
        text = TokenText(found)
        text.bos = chosen_bos(text.tokenizer, self.bos)
        return text

    def make(self, console: Console) -> None:
        """Tokenizes the text into `folder` unless it is there; waits if another run is doing it.

        Raises UserError for what the hub refuses or does not have, and for data that are not such text; CannotFetch if
        the hub cannot be reached.
        """
        if self.is_made:
            return
        out = self.folder
        console.print(f"tokenizing {self.describe()}\ninto {out}", soft_wrap=True, highlight=False)
        if self._settings.tokens is not None and self._settings.tokens > FEW_TOKENS:
            console.print(
                "this may take long; what is done is kept when it is interrupted. `pd data tokenize --part` does it in "
                "many jobs, for data: {train: …, eval: …} of the wrapper",
                soft_wrap=True,
            )
        tokenizer = None if self.data.is_tokenized else self._tokenizer() or fetch_tokenizer(self.data.tokenizer_name)
        units, source = self._units()
        plan = make_plan(units, self._settings, tokenizer, (source,), self.bos)
        few = self._settings.tokens is not None and self._settings.tokens <= FEW_TOKENS
        processes, is_waiting = 1 if few else available_cores(), False
        while not self.is_made:
            try:
                tokenize(plan, out, processes=processes, overwrite=True, console=console)
            except Busy:
                if not is_waiting:
                    console.print("another run is doing it: waiting for that")
                is_waiting = True
                time.sleep(WAIT_S)

    @property
    def _settings(self) -> Settings:
        data = self.data
        train, evaluated = _rounded(self.train_rows), _rounded(self.eval_rows)
        fraction = 2 * evaluated / (train + 2 * evaluated)
        return Settings(
            seq_len=data.max_seq_len,
            eval_fraction=min(LARGEST_FRACTION, max(LEAST_FRACTION, fraction)),
            tokens=train * data.max_seq_len,
            eval_tokens=evaluated * data.max_seq_len if self.eval_rows else None,
            column=Column(data.column_name, data.is_tokenized),
            row_starts=data.is_tokenized,
        )

    @property
    def _role(self) -> Role:
        """The role of the training split's text: part of it is held out if the evaluation has no split of its own."""
        data = self.data
        return "by hash" if self.eval_rows and (data.of_files or data.eval_split == data.train_split) else "train"

    def _units(self) -> tuple[list[Unit], str]:
        """Returns the text, and its origin in words."""
        data = self.data
        if data.of_files:
            assert data.data_files is not None
            named = next(known for known in FORMATS if known == data.dataset_name)
            return file_units([data.data_files], named, self._role), data.data_files
        hub = HubDataset(data.dataset_name, None, data.revision, data.data_files).pinned()
        units = hub.units(data.train_split, self._role)
        if self.eval_rows and self._role == "train":
            units += hub.units(data.eval_split, "eval")
        return units, hub.describe()

    def _tokenizer(self) -> str | None:
        """Returns the tokenizer on this machine: `bytes`, or its file; None if it is only on the hub."""
        if self.stand_in is not None:
            return str(self.stand_in)
        return cached_tokenizer(self.data.tokenizer_name)

    def _key(self) -> str:
        """Returns a key that differs if the rows could differ, and is the same with and without a network."""
        data = self.data
        name, stand_in = data.tokenizer_name, self.stand_in
        local = str(stand_in) if stand_in is not None else name if Path(name).exists() or name == "bytes" else None
        tokenizer = "" if data.is_tokenized else name if local is None else tokenizer_hash(local)
        text = data.model_dump(include={"dataset_name", "data_files", "revision", "train_split", "eval_split"})
        if data.of_files:
            units, _ = self._units()
            text = {"files": make_plan(units, self._settings, None, ()).inputs_hash}
        elif not self.needs_hub:
            text["folder"] = HubDataset(data.dataset_name).identity
        # Keys are added only for settings that are on, so that the folders of older runs keep their names.
        about = [FORMAT, str(self._settings), self._role, tokenizer, text, *["bos"] * self.bos]
        return hashlib.sha256(json.dumps(about).encode()).hexdigest()[:16]


def named_text(config: RunConfig) -> NamedText | None:
    """Returns the text that a run must tokenize first; None if it reads existing rows of tokens."""
    method = config.method
    assert isinstance(method, LanguageModelFile)
    if config.wrapper.data is not None or method.data.is_in_rows:
        return None
    evaluation = method.eval
    return NamedText(
        method.data,
        method.pd.steps * method.pd.batch_size,
        0 if evaluation is None else evaluation.n_steps * evaluation.batch_size,
        _stand_in(config, method),
        config.wrapper.bos,
    )


def _stand_in(config: RunConfig, method: LanguageModelFile) -> Path | None:
    """Returns the tokenizer.json of the target's folder, if the tokenizer has the model's name."""
    spec, source = method.target.spec, config.wrapper.target
    if not isinstance(spec, HubSpec) or spec.model_name != method.data.tokenizer_name:
        return None
    if source is None or source.folder is None:
        return None
    file = source.folder / TOKENIZER_FILE
    return file if file.is_file() else None


def _rounded(rows: int) -> int:
    """Rounds up to a power of two."""
    return 1 << max(rows - 1, 0).bit_length()


def not_made(text: NamedText) -> UserError:
    """Returns the error for text that is not tokenized yet, where only the start of a run may tokenize it."""
    return UserError(
        f"the run's data ({text.describe()}) are not in the cache of this machine ({text.folder}); give tokenized "
        "data: --set 'data={train: FOLDER, eval: FOLDER}'"
    )
