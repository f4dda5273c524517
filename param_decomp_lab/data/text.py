"""Turns token ids into text to show to people."""

from collections.abc import Mapping, Sequence
from copy import copy
from functools import cached_property
from pathlib import Path

import numpy as np
from jaxtyping import Bool, Int

from param_decomp_lab.data.meta import META_FILE, DataMeta
from param_decomp_lab.data.token_names import Piece, text_of, token_names, unnamed, whole_bytes, whole_text
from param_decomp_lab.data.tokenizers import BYTES, Tokenizer, load_tokenizer


class TokenText:
    """Decodes the tokens of a folder that ``pd data tokenize`` wrote, or of a pretrained model's folder.

    ``folder``: has ``tokenizer.json``, or a ``meta.json`` that says that tokens are bytes. ``bos``: the token id that a
    prompt begins with, as the rows of the run's data do; None without one. Raises UserError if the folder has neither
    file.
    """

    def __init__(self, folder: str | Path, bos: int | None = None) -> None:
        folder, self.bos = Path(folder), bos
        of_bytes = (folder / META_FILE).is_file() and DataMeta.read(folder).tokenizer == BYTES
        self.tokenizer: Tokenizer = load_tokenizer(BYTES if of_bytes else folder)

    def ids(self, text: str) -> list[int]:
        """Returns the token ids of a text, without special tokens."""
        return [int(i) for i in self.tokenizer.encode([text])[0]]

    def one_token(self, text: str) -> list[int]:
        """Returns the token that is exactly this text, alone in a list; without one, the ids of the text. Some
        tokenizers put a space in front of every text, so the ids of ``ed`` may be the token `` ed``.
        """
        ids = self.ids(text)
        if len(ids) == 1 and self.decode(ids) == text:
            return ids
        return next(([token] for token, piece in self._pieces.items() if piece == text), ids)

    def prompt(self, text: str) -> list[int]:
        """Returns the token ids of a text as the model should read it: with `bos` first, unless the text already begins
        with it.
        """
        ids = self.ids(text)
        return ids if self.bos is None or ids[:1] == [self.bos] else [self.bos, *ids]

    def with_bos(self, bos: int | None) -> "TokenText":
        """Returns the same tokenizer for prompts that begin with another BOS."""
        found = copy(self)
        found.bos = bos
        return found

    def first_difference(self, other: "TokenText", among: Int[np.ndarray, " n"]) -> int | None:
        """Returns the first of these token ids that both tokenizers have and that stands for another text in the other
        one; None if there is none.
        """
        both = (n for n in among.tolist() if n in self._pieces and n in other._pieces)
        return next((n for n in both if not _same(self._pieces[n], other._pieces[n])), None)

    def tokens(self, ids: Sequence[int]) -> list[str]:
        """Returns the name of each token id, in a list as long as ``ids``; see `token_names`. Spaces stay spaces. Ids
        that the tokenizer does not have become `[300]`.
        """
        names = self._names
        return [names.get(int(i)) or unnamed(int(i)) for i in ids]

    def text(self, ids: Sequence[int]) -> str:
        """Returns the text of these token ids as a whole, with control characters as in `tokens`."""
        return text_of(self._pieces, [int(i) for i in ids])

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Returns the text of these token ids as a whole, unchanged; bytes that form no character become `\\xe6`."""
        return whole_text(self._pieces, [int(i) for i in ids])

    def ends_with(self, rows: Int[np.ndarray, "B T"], text: str) -> Bool[np.ndarray, "B T"]:
        """At which positions the text of a row, up to and with the token there, ends with ``text``: whatever tokens
        that is made of, and also where it begins within one. The beginning of a row is the beginning of its text."""
        end = text.encode()
        if not end:
            return np.ones(rows.shape, bool)
        pieces = {token: whole_bytes(self._pieces, [token]) for token in np.unique(rows).tolist()}
        longest = max(map(len, pieces.values()), default=0)
        found: dict[int, Bool[np.ndarray, "B T"]] = {}
        if len(end) > longest * rows.shape[1]:
            return np.zeros(rows.shape, bool)
        for n in range(1, len(end) + 1):  # where the text ends with the first n bytes
            part = end[:n]
            here = np.isin(rows, [token for token, piece in pieces.items() if piece.endswith(part)])
            lasts: dict[int, list[int]] = {}
            for token, piece in pieces.items():
                if 0 < len(piece) < n and part.endswith(piece):
                    lasts.setdefault(len(piece), []).append(token)
            for length, tokens in lasts.items():
                here[:, 1:] |= np.isin(rows[:, 1:], tokens) & found[n - length][:, :-1]
            found[n] = here
            found.pop(n - longest, None)  # no token reaches further back
        return found[len(end)]

    @cached_property
    def _names(self) -> Mapping[int, str]:
        return token_names(self._pieces)

    @cached_property
    def _pieces(self) -> dict[int, Piece]:
        return self.tokenizer.pieces()


def _same(one: Piece, other: Piece) -> bool:
    """Text or its bytes are the same piece."""
    return (one.encode() if isinstance(one, str) else one) == (other.encode() if isinstance(other, str) else other)
