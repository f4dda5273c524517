"""What a folder of tokenized text says about itself: ``meta.json`` beside ``train/`` and ``eval/``."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from param_decomp_lab.errors import UserError

META_FILE = "meta.json"
Split = Literal["train", "eval"]
SPLITS: tuple[Split, Split] = ("train", "eval")


@dataclass(frozen=True)
class SplitMeta:
    """Counts of one split. ``unigram_entropy``: of its token frequencies, in nats per token.
    ``dropped_tokens``: the tail that did not fill a row."""

    rows: int
    tokens: int
    dropped_tokens: int
    shards: int
    unigram_entropy: float


@dataclass(frozen=True)
class DataMeta:
    """``tokenizer``: ``bytes``, or the name of the Hugging Face tokenizer file kept beside ``meta.json``.
    ``separator``: token id between documents, or None. ``sha256``: digest of all token ids, train then eval."""

    tokenizer: str
    vocab_size: int
    separator: int | None
    seq_len: int
    seed: int
    eval_fraction: float
    sources: tuple[str, ...]
    documents: int
    train: SplitMeta
    eval: SplitMeta
    sha256: str

    def write(self, folder: Path) -> None:
        (folder / META_FILE).write_text(json.dumps(asdict(self), indent=2) + "\n")

    @classmethod
    def read(cls, folder: Path) -> "DataMeta":
        """Raises UserError when ``folder`` was not made by ``pd data tokenize``."""
        file = folder / META_FILE
        if not file.is_file():
            raise UserError(f"no {META_FILE} in {folder}: give the folder that `pd data tokenize --out` wrote")
        try:
            fields = json.loads(file.read_text())
            fields |= {split: SplitMeta(**fields[split]) for split in SPLITS}
            return cls(**{**fields, "sources": tuple(fields["sources"])})
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{file} is damaged or of another version ({error}): tokenize the text again") from error
