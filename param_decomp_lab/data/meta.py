"""Describes a folder of tokenized text: ``meta.json`` beside ``train/`` and ``eval/``."""

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar, get_type_hints

from param_decomp_lab.errors import UserError
from param_decomp_lab.safe_io.files import LISTING_BYTES
from param_decomp_lab.safe_io.json_text import read_json

META_FILE = "meta.json"
COLUMN = "input_ids"
"""The column of the shards: rows of token ids."""
Split = Literal["train", "eval"]
SPLITS: tuple[Split, Split] = ("train", "eval")
Meta = TypeVar("Meta", "SplitMeta", "DataMeta")


@dataclass(frozen=True)
class SplitMeta:
    """Counts of one split. ``unigram_entropy``: of its token frequencies, in nats per token.
    ``dropped_tokens``: the tail that did not fill a row."""

    rows: int
    tokens: int
    dropped_tokens: int
    shards: int
    unigram_entropy: float


class Skipped(NamedTuple):
    """Records that were left out: how many, and the places and errors of the ``first`` of them."""

    n: int
    first: tuple[str, ...]

    def joined(self, more: "Skipped") -> "Skipped":
        return Skipped(self.n + more.n, (*self.first, *more.first)[:NAMED])


NAMED = 100
"""The largest number of omitted records that are named."""
NOTHING_SKIPPED = Skipped(0, ())


@dataclass(frozen=True)
class DataMeta:
    """``tokenizer``: ``bytes``, the name of the Hugging Face tokenizer file kept beside ``meta.json``, or ``none``.
    ``separator``: token id between documents, or None. ``sha256``: digest of all token ids, train then eval. ``plan``:
    the hash of the plan of which the data were made (`TokenizePlan.hash`); empty in older data. ``skipped_records``:
    how many were left out; ``skipped``: the errors and places of the first of them. ``bos``: token id that rows and
    documents begin with; None without one, as in older data.
    """

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
    plan: str = ""
    skipped_records: int = 0
    skipped: tuple[str, ...] = ()
    bos: int | None = None

    def write(self, folder: Path) -> None:
        (folder / META_FILE).write_text(json.dumps(asdict(self), indent=2) + "\n")

    @classmethod
    def read(cls, folder: Path) -> "DataMeta":
        """Reads ``meta.json``. Raises UserError if ``folder`` was not made by ``pd data tokenize``."""
        file = folder / META_FILE
        if not file.is_file():
            raise UserError(f"no {META_FILE} in {folder}: give the folder that `pd data tokenize --out` wrote")
        try:
            raw = read_json(file, "the description of the data", dict, LISTING_BYTES)
            raw |= {split: _checked(SplitMeta(**raw[split])) for split in SPLITS}
            lists = {key: tuple(raw.get(key, ())) for key in ("sources", "skipped")}
            return _checked(cls(**{**raw, **lists}))
        except (UserError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{file} is damaged or of another version ({error}): tokenize the text again") from error


def _checked(meta: Meta) -> Meta:
    """Returns ``meta`` unchanged. Raises ValueError for a number that is negative or not a number, and for a text that
    is not a text.
    """
    kinds = get_type_hints(type(meta))
    for field in fields(meta):
        value, kind = getattr(meta, field.name), kinds[field.name]
        if kind in (int, int | None, float):
            right = (value is None and kind == int | None) or (
                type(value) in ((int, float) if kind is float else (int,)) and value >= 0
            )
        else:
            right = kind is not str or isinstance(value, str)
        if not right:
            raise ValueError(f"{field.name} is {value!r:.80}")
    return meta
