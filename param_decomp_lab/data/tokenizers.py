"""Turns text into token ids and back, by UTF-8 bytes or any Hugging Face tokenizer file."""

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
from param_decomp_lab.safe_io.files import read_text
from param_decomp_lab.safe_io.json_text import read_json
from param_decomp_lab.safe_io.printable import printable

BYTES = "bytes"
NO_TOKENIZER = "none"
"""The tokenizer of data that were tokenized elsewhere."""
TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
TOKENIZER_BYTES = 1 << 28
"""Largest tokenizer.json."""
LARGEST_ID = (1 << 24) - 1
"""Largest token id. Arrays have an entry for every id, and no network that can be loaded has a larger vocabulary."""
# Names in a bare tokenizer.json for the end (or, failing that, the beginning) of a document.
DOCUMENT_ENDS = ("<|end_of_text|>", "<|endoftext|>", "</s>", "<eos>", "<|begin_of_text|>", "<s>", "<bos>")
# Names in a bare tokenizer.json for the beginning of a document.
DOCUMENT_BEGINNINGS = ("<|begin_of_text|>", "<s>", "<bos>")
PROBES = ("a", "0", ".", " ")
"""Short texts to find what the tokenizer puts before a text."""
# Pieces of text are bounded (see tokenize.py), so that a batch of this many is a few MB.
BATCH = 256


class Tokenizer(Protocol):
    """Turns text into token ids and back."""

    @property
    def name(self) -> str:
        """Its name in ``meta.json``."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""

    @property
    def separator(self) -> int | None:
        """The id that separates documents; None without one."""

    @property
    def bos(self) -> int | None:
        """The id of the token that begins a text (BOS); None without one."""

    @property
    def adds_bos(self) -> bool:
        """Whether the tokenizer itself puts `bos` before every text."""

    def encode(self, texts: Sequence[str]) -> list[Int32[np.ndarray, "n"]]:
        """Returns the token ids of each text, without special tokens."""

    def pieces(self) -> dict[int, Piece]:
        """Returns what each id stands for: text, or bytes if a token is not whole characters or its name is that of a
        byte. Ids without a token are left out.
        """

    def save(self, folder: Path) -> None:
        """Saves what decoding needs in ``folder``."""


@dataclass(frozen=True)
class ByteTokenizer:
    """A tokenizer whose tokens are bytes of UTF-8; documents are separated by a zero byte."""

    vocab_size: int = 256
    separator: int | None = 0
    bos: int | None = None
    adds_bos: bool = False
    name: str = BYTES

    def encode(self, texts: Sequence[str]) -> list[Int32[np.ndarray, "n"]]:
        return [np.frombuffer(text.encode(), np.uint8).astype(np.int32) for text in texts]

    def pieces(self) -> dict[int, Piece]:
        return {i: bytes([i]) for i in range(256)}

    def save(self, folder: Path) -> None:
        del folder


@dataclass(frozen=True)
class HuggingFaceTokenizer:
    """A Hugging Face tokenizer. ``file``: a ``tokenizer.json``; a ``tokenizer_config.json`` beside it may name the
    end-of-document token.
    """

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
        return self._special(("eos_token", "bos_token"), DOCUMENT_ENDS)

    @cached_property
    def bos(self) -> int | None:
        first = self._put_first
        return self._special(("bos_token",), DOCUMENT_BEGINNINGS) if first is None else first

    @property
    def adds_bos(self) -> bool:
        return self._put_first is not None

    @cached_property
    def _put_first(self) -> int | None:
        """Returns the first id that the post-processor puts before a text. Like transformers 5, it ignores
        ``add_bos_token`` in `TOKENIZER_CONFIG` if there is a `TOKENIZER_FILE`.
        """
        for probe in PROBES:
            try:
                encoding = self._tokenizer.encode(probe)
            except BaseException as error:  # the vocabulary lacks both the text and an unknown token
                if not _of_the_library(error):
                    raise
                continue
            if 0 in encoding.sequence_ids:  # otherwise, no part of the probe is in the vocabulary
                first = int(encoding.ids[0])
                # A template may insert any number, even one that is not a token's.
                return None if encoding.sequence_ids[0] == 0 or first >= self.vocab_size else first
        return None

    def _special(self, keys: Sequence[str], names: Sequence[str]) -> int | None:
        """Returns the id of the first of these that is a token: the values of ``keys`` in `TOKENIZER_CONFIG`, then
        ``names``. Raises UserError for a key whose value is not text.
        """
        config = self.file.with_name(TOKENIZER_CONFIG)
        settings = read_json(config, "the tokenizer's settings", dict, TOKENIZER_BYTES) if config.is_file() else {}
        for key in keys:
            token = settings.get(key)
            token = token.get("content") if isinstance(token, dict) else token
            if token is not None and not isinstance(token, str):
                raise UserError(f"{config}: {key} should be a text, not {printable(repr(token), 80)}")
            if token is not None and (token_id := self._tokenizer.token_to_id(token)) is not None:
                return int(token_id)
        ids = (self._tokenizer.token_to_id(token) for token in names)
        return next((int(token_id) for token_id in ids if token_id is not None), None)

    def encode(self, texts: Sequence[str]) -> list[Int32[np.ndarray, "n"]]:
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.asarray(encoding.ids, np.int32) for encoding in encodings]

    def pieces(self) -> dict[int, Piece]:
        tokenizer, added = self._tokenizer, self._tokenizer.get_added_tokens_decoder()
        ids: Sequence[int] = range(self.vocab_size)
        if len(ids) > 2 * tokenizer.get_vocab_size():  # some ids are far beyond the others
            ids = sorted(tokenizer.get_vocab().values())
        # A token that is decoded alone may lose its leading space, so it is decoded after another one, which is
        # removed.
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
                found[i] = text  # nearly all; ids without a token have no text
            elif (piece := tokenizer.id_to_token(i)) is not None:
                found[i] = decoded_piece(piece, text, i in added)
        return found

    def save(self, folder: Path) -> None:
        for file in (self.file, self.file.with_name(TOKENIZER_CONFIG)):
            if file.is_file():
                shutil.copyfile(file, folder / file.name.replace(self.file.name, TOKENIZER_FILE))


def _of_the_library(error: BaseException) -> bool:
    """Whether the library raised an error: it raises bare Exception, and for a panic only a BaseException."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def load_tokenizer(tokenizer: str | Path) -> Tokenizer:
    """Loads ``bytes``, a ``tokenizer.json``, or a folder with one. Raises UserError if there is none."""
    if str(tokenizer) == BYTES:
        return ByteTokenizer()
    path = Path(tokenizer)
    file = path / TOKENIZER_FILE if path.is_dir() else path
    if not file.is_file():
        raise UserError(f"no tokenizer at {file}: give `bytes`, a {TOKENIZER_FILE}, or a local folder that holds one")
    found = HuggingFaceTokenizer(file)
    assert found.vocab_size > 0  # reads the file, so that a broken one is reported now
    return found


def chosen_bos(tokenizer: Tokenizer | None, wanted: bool | None, *, of_text: bool = True) -> int | None:
    """Returns the id that rows and documents begin with; None without one. ``wanted``: None does what the tokenizer
    itself does, and means no BOS for input that is already tokenized (not ``of_text``). Raises UserError if BOS is
    wanted and the tokenizer has none.
    """
    if wanted is None:
        return tokenizer.bos if tokenizer is not None and tokenizer.adds_bos and of_text else None
    if not wanted:
        return None
    if tokenizer is None:
        raise UserError("bos: only a tokenizer says which token begins a text; give the one that made these token ids")
    if tokenizer.bos is None:
        raise UserError(
            f"bos: the tokenizer {tokenizer.name} has no token that begins a text (a bos_token in {TOKENIZER_CONFIG}); "
            "leave it out"
        )
    return tokenizer.bos


def tokenizer_hash(tokenizer: str | Path | Tokenizer) -> str:
    """Returns a hash that differs if the ids of a text could. Raises UserError if there is no tokenizer."""
    found = load_tokenizer(tokenizer) if isinstance(tokenizer, str | Path) else tokenizer
    if not isinstance(found, HuggingFaceTokenizer):
        return found.name
    content = read_text(found.file, "the tokenizer", TOKENIZER_BYTES)
    return hashlib.sha256(f"{content}\n{found.separator}".encode()).hexdigest()
