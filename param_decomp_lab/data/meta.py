"""What a folder of tokenized text says about itself: ``meta.json`` beside ``train/`` and ``eval/``."""

import json
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter, ValidationError

from param_decomp_lab.errors import UserError
from param_decomp_lab.untrusted.files import LISTING_BYTES, read_text
from param_decomp_lab.untrusted.json_text import parse_json

META_FILE = "meta.json"
Split = Literal["train", "eval"]
SPLITS: tuple[Split, Split] = ("train", "eval")
LARGEST_VOCABULARY = 1 << 24
"""More than any tokenizer has, and few enough for an array of counts."""
Size = Annotated[int, Field(ge=0, lt=2**63)]


@dataclass(frozen=True)
class SplitMeta:
    """Counts of one split. ``unigram_entropy``: of its token frequencies, in nats per token.
    ``dropped_tokens``: the tail that did not fill a row."""

    rows: Size
    tokens: Size
    dropped_tokens: Size
    shards: Size
    unigram_entropy: Annotated[float, Field(ge=0, allow_inf_nan=False)]


@dataclass(frozen=True)
class DataMeta:
    """``tokenizer``: ``bytes``, or the name of the Hugging Face tokenizer file kept beside ``meta.json``.
    ``separator``: token id between documents, or None. ``sha256``: digest of all token ids, train then eval."""

    tokenizer: str
    vocab_size: Annotated[int, Field(ge=1, le=LARGEST_VOCABULARY)]
    separator: Annotated[int, Field(ge=0, le=LARGEST_VOCABULARY)] | None
    seq_len: Annotated[int, Field(ge=1, lt=2**31)]
    seed: Size
    eval_fraction: Annotated[float, Field(gt=0, lt=1)]
    sources: tuple[str, ...]
    documents: Size
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
        text = read_text(file, "the description of the data", LISTING_BYTES)
        parse_json(text, str(file), dict)
        try:
            return _adapter().validate_json(text, strict=True)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise UserError(
                f"{file} is damaged or of another version ({where}: {first['msg']}): tokenize the text again"
            ) from error


@cache
def _adapter() -> "TypeAdapter[DataMeta]":
    return TypeAdapter(DataMeta)
