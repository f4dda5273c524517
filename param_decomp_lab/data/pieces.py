"""Cuts documents into pieces and assigns each piece to the training or the evaluation split.

A piece is a document, or a part of a long one that ends at a line break. The split of a piece depends on its content
alone, so repeated pieces are never in both splits.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int32

from param_decomp_lab.data.meta import Split

PIECE_CHARS = 16_384
Content = str | Int32[np.ndarray, "n"]
"""Text, or its token ids."""
Choice = Callable[[Content], Split]


@dataclass(frozen=True)
class Document:
    """``source``: where it is from, for errors. ``content``: its text, whole or in parts, or its token ids. ``begins``:
    False if it continues a part that was read elsewhere.
    """

    source: str
    content: str | Iterable[str] | Int32[np.ndarray, "n"]
    begins: bool = True

    def pieces(self) -> Iterator[Content]:
        """Yields the text in order, cut at line breaks into pieces of about 16,000 characters;
        token ids are one piece.
        """
        if isinstance(self.content, np.ndarray):
            yield self.content
            return
        pending = ""
        for part in [self.content] if isinstance(self.content, str) else self.content:
            pending += part
            start = 0
            while len(pending) - start >= PIECE_CHARS:
                end = pending.rfind("\n", start, start + PIECE_CHARS) + 1 or start + PIECE_CHARS
                yield pending[start:end]
                start = end
            pending = pending[start:]
        if pending:
            yield pending


def fingerprint(piece: Content, seed: int) -> bytes:
    """Returns 16 bytes that depend on the piece's content and on ``seed``."""
    content = piece.encode() if isinstance(piece, str) else piece.tobytes()
    return hashlib.blake2b(content, digest_size=16, salt=seed.to_bytes(16, "big")).digest()


def choose_by_hash(eval_fraction: float, seed: int) -> Choice:
    """Assigns a piece to the evaluation split if its fingerprint is below ``eval_fraction`` of the largest possible
    one. In a text of many pieces, this holds out about that share, without looking at the other pieces.
    """
    bound = int(eval_fraction * 2**64)
    return lambda piece: "eval" if int.from_bytes(fingerprint(piece, seed)[:8], "big") < bound else "train"


def choose_exactly(pieces: Iterable[Content], eval_fraction: float, seed: int) -> Choice:
    """Assigns the pieces with the smallest fingerprints to the evaluation split, until it has ``eval_fraction`` of the
    total length. It gets at least one piece and never all. For a text of few pieces.
    """
    lengths: dict[bytes, int] = {}
    for piece in pieces:
        key = fingerprint(piece, seed)
        lengths[key] = lengths.get(key, 0) + len(piece)  # a repeated piece counts every time it occurs
    chosen = choose_eval(lengths, eval_fraction)
    return lambda piece: "eval" if fingerprint(piece, seed) in chosen else "train"


def choose_eval(lengths: dict[bytes, int], eval_fraction: float) -> frozenset[bytes]:
    """Returns the fingerprints of the pieces of the evaluation split: the smallest ones, until ``eval_fraction`` of the
    total of ``lengths`` is reached. It has at least one piece and never all.
    """
    wanted = eval_fraction * sum(lengths.values())
    chosen: list[bytes] = []
    for key in sorted(lengths)[:-1]:
        if wanted <= 0:
            break
        chosen.append(key)
        wanted -= lengths[key]
    return frozenset(chosen)


@dataclass(frozen=True)
class DocumentPart:
    """A piece of a document. ``first``: whether it is the first piece of the document that is read here; ``begins``:
    whether the document begins with it.
    """

    content: Content
    first: bool
    begins: bool


@dataclass(frozen=True)
class TextPiece:
    """``follows``: whether it continues the last piece of its split, so that no separator belongs between them."""

    content: Content
    split: Split
    follows: bool


def split_documents(documents: Iterable[Document]) -> Iterator[DocumentPart]:
    """Yields the pieces of all documents, in order."""
    for document in documents:
        for number, content in enumerate(document.pieces()):
            yield DocumentPart(content, number == 0, number == 0 and document.begins)


def split_pieces(cuts: Iterable[DocumentPart], choice: Choice) -> Iterator[TextPiece]:
    """Yields all pieces in order, each with its split."""
    before: Split | None = None
    for piece in cuts:
        split = choice(piece.content)
        follows = not piece.begins if piece.first else split == before
        yield TextPiece(piece.content, split, follows)
        before = split
