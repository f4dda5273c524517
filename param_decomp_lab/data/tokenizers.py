"""Text to token ids and back: UTF-8 bytes, or any Hugging Face tokenizer file."""

import hashlib
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol

import numpy as np
from jaxtyping import Int32
from tokenizers import Tokenizer as HfTokenizer

from param_decomp_lab.data.token_names import BYTE_PIECES, LOST, Piece, decoded_piece
from param_decomp_lab.errors import UserError
from param_decomp_lab.untrusted.files import read_text
from param_decomp_lab.untrusted.json_text import read_json
from param_decomp_lab.untrusted.printable import printable

BYTES = "bytes"
NO_TOKENIZER = "none"
"""Of data that were tokenized elsewhere."""
TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
TOKENIZER_BYTES = 1 << 28
"""Largest tokenizer.json."""
LARGEST_ID = (1 << 24) - 1
"""Largest token id. Arrays have an entry for every id, and no network that can be loaded has a larger vocabulary."""
# What a bare tokenizer.json calls the end (or, failing that, the beginning) of a document.
DOCUMENT_ENDS = ("<|end_of_text|>", "<|endoftext|>", "</s>", "<eos>", "<|begin_of_text|>", "<s>", "<bos>")
# Pieces of text are bounded (see tokenize.py), so that a batch of this many is a few MB.
BATCH = 256


class Tokenizer(Protocol):
    """Turns text into token ids and back."""

    @property
    def name(self) -> str:
        """What ``meta.json`` calls it."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""

    @property
    def separator(self) -> int | None:
        """The id put between documents; None without one."""

    def encode(self, texts: Sequence[str]) -> list[Int32[np.ndarray, "n"]]:
        """Token ids of each text, without special tokens."""

    def pieces(self) -> dict[int, Piece]:
        """What each id stands for: text, or bytes where a token is not whole characters, or is a byte by its name. Ids
        of no token are left out."""

    def save(self, folder: Path) -> None:
        """Put what decoding needs into ``folder``."""


@dataclass(frozen=True)
class ByteTokenizer:
    """A token is a byte of UTF-8; documents are separated by a zero byte."""

    vocab_size: int = 256
    separator: int | None = 0
    name: str = BYTES

    def encode(self, texts: Sequence[str]) -> list[Int32[np.ndarray, "n"]]:
        return [np.frombuffer(text.encode(), np.uint8).astype(np.int32) for text in texts]

    def pieces(self) -> dict[int, Piece]:
        return {i: bytes([i]) for i in range(256)}

    def save(self, folder: Path) -> None:
        del folder


@dataclass(frozen=True)
class HuggingFaceTokenizer:
    """``file``: a ``tokenizer.json``; a ``tokenizer_config.json`` beside it may name the end-of-document token."""

    file: Path
    name: str = TOKENIZER_FILE

    @cached_property
    def _tokenizer(self) -> HfTokenizer:
        text = read_text(self.file, "the tokenizer", TOKENIZER_BYTES)
        try:
            tokenizer = HfTokenizer.from_str(text)
        except BaseException as error:
            if not _of_the_library(error):
                raise
            why = printable(str(error), 1000)
            raise UserError(f"{self.file} is not a Hugging Face tokenizer file: {why}") from error
        ids = tokenizer.get_vocab(with_added_tokens=True)
        if not ids:
            raise UserError(f"{self.file}: its vocabulary is empty; give the tokenizer of a model")
        last = max(ids, key=lambda token: ids[token])
        if ids[last] > LARGEST_ID:
            shown = printable(repr(last), 80)
            raise UserError(f"{self.file}: the token {shown} has the id {ids[last]}; at most {LARGEST_ID} is possible")
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer

    @cached_property
    def vocab_size(self) -> int:
        return 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values())

    @cached_property
    def separator(self) -> int | None:
        config = self.file.with_name(TOKENIZER_CONFIG)
        settings = read_json(config, "the tokenizer's settings", dict, TOKENIZER_BYTES) if config.is_file() else {}
        for key in ("eos_token", "bos_token"):
            token = settings.get(key)
            token = token.get("content") if isinstance(token, dict) else token
            if token is not None and not isinstance(token, str):
                raise UserError(f"{config}: {key} should be a text, not {printable(repr(token), 80)}")
            if token is not None and (token_id := self._tokenizer.token_to_id(token)) is not None:
                return int(token_id)
        ids = (self._tokenizer.token_to_id(token) for token in DOCUMENT_ENDS)
        return next((int(token_id) for token_id in ids if token_id is not None), None)

    def encode(self, texts: Sequence[str]) -> list[Int32[np.ndarray, "n"]]:
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.asarray(encoding.ids, np.int32) for encoding in encodings]

    def pieces(self) -> dict[int, Piece]:
        tokenizer, added = self._tokenizer, self._tokenizer.get_added_tokens_decoder()
        ids: Sequence[int] = range(self.vocab_size)
        if len(ids) > 2 * tokenizer.get_vocab_size():  # some far beyond the others
            ids = sorted(tokenizer.get_vocab().values())
        # Alone, a token may lose its leading space: decode it after another one and take that one off.
        try:
            anchor = tokenizer.encode("a", add_special_tokens=False).ids[-1:]
            alone = tokenizer.decode(anchor, skip_special_tokens=False)
        except BaseException as error:
            if not _of_the_library(error):
                raise
            anchor, alone = [], ""
        found: dict[int, Piece] = {}
        by_byte = {tokenizer.token_to_id(piece) for piece in BYTE_PIECES}
        for i in ids:
            try:
                text = tokenizer.decode((*anchor, i), skip_special_tokens=False).removeprefix(alone)
            except BaseException as error:
                if not _of_the_library(error):
                    raise
                text = ""
            if text and LOST not in text and i not in by_byte:
                found[i] = text  # nearly all; ids of no token have no text
            elif (piece := tokenizer.id_to_token(i)) is not None:
                found[i] = decoded_piece(piece, text, i in added)
        return found

    def save(self, folder: Path) -> None:
        for file in (self.file, self.file.with_name(TOKENIZER_CONFIG)):
            if file.is_file():
                shutil.copyfile(file, folder / file.name.replace(self.file.name, TOKENIZER_FILE))


def _of_the_library(error: BaseException) -> bool:
    """The library raises bare Exception, and one that is not even that for a panic."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def load_tokenizer(tokenizer: str | Path) -> Tokenizer:
    """``bytes``, a ``tokenizer.json``, or a folder that holds one. Raises UserError when there is none."""
    if str(tokenizer) == BYTES:
        return ByteTokenizer()
    path = Path(tokenizer)
    file = path / TOKENIZER_FILE if path.is_dir() else path
    if not file.is_file():
        raise UserError(f"no tokenizer at {file}: give `bytes`, a {TOKENIZER_FILE}, or a local folder that holds one")
    found = HuggingFaceTokenizer(file)
    assert found.vocab_size > 0  # reads the file: a broken one is reported here and not in the middle of the work
    return found


def tokenizer_hash(tokenizer: str | Path) -> str:
    """Differs where the ids of a text may. Raises UserError when there is no tokenizer."""
    found = load_tokenizer(tokenizer)
    if not isinstance(found, HuggingFaceTokenizer):
        return found.name
    content = read_text(found.file, "the tokenizer", TOKENIZER_BYTES)
    return hashlib.sha256(f"{content}\n{found.separator}".encode()).hexdigest()
