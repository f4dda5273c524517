"""Cutting text into pieces and giving each piece to the training or the evaluation split.

A piece is a document, or a stretch of a long one that ends at a line. Which split a piece belongs to depends on its
content alone, so that nothing is in both, however often it is repeated.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from param_decomp_lab.data.meta import Split
from param_decomp_lab.errors import UserError

PIECE_CHARS = 16_384


@dataclass(frozen=True)
class Document:
    """Text with a name, read when it is needed: ``text`` itself, or the UTF-8 file at ``source``."""

    source: str
    text: str | None = None

    def pieces(self) -> Iterator[str]:
        """The text in order, cut at lines into pieces of some 16,000 characters. Raises UserError if not UTF-8."""
        lines = iter([self.text]) if self.text is not None else self._lines()
        pending = ""
        for line in lines:
            pending += line
            while len(pending) >= PIECE_CHARS:
                end = pending.rfind("\n", 0, PIECE_CHARS) + 1 or PIECE_CHARS
                yield pending[:end]
                pending = pending[end:]
        if pending:
            yield pending

    def _lines(self) -> Iterator[str]:
        try:
            with open(self.source, encoding="utf-8", newline="") as file:
                while chunk := file.read(PIECE_CHARS):
                    yield chunk
        except UnicodeDecodeError as error:
            raise UserError(
                f"{self.source} is not UTF-8 text ({error}); convert it, or leave it out (a glob such as 'texts/*.txt')"
            ) from error
        except OSError as error:
            raise UserError(f"cannot read {self.source}: {error.strerror}") from error


def find_documents(inputs: Sequence[str | Path]) -> list[Document]:
    """The files that ``inputs`` (files, folders, globs) mean, each once, sorted within each input; hidden ones are not
    taken from a folder. Raises UserError for an input that means no file."""
    files: dict[str, None] = {}
    for given in map(str, inputs):
        if not given.strip():  # a variable that is not set; Path("") is the working directory
            raise UserError("an input is empty; give a text file, a folder or a glob (. for the working directory)")
        path = Path(given)
        if path.is_dir():
            inside = (file for file in path.rglob("*") if file.is_file())
            found = [file for file in inside if not any(p.startswith(".") for p in file.relative_to(path).parts)]
        elif path.is_file():
            found = [path]
        else:
            root = Path(path.anchor) if path.is_absolute() else Path()
            pattern = str(path.relative_to(root)) if path.is_absolute() else given
            try:
                found = [file for file in root.glob(pattern) if file.is_file()] if pattern not in ("", ".") else []
            except ValueError as error:  # such as a**b
                raise UserError(f"{given} is no glob ({error}); write for instance 'corpus/**/*.txt'") from error
        if not found:
            raise UserError(f"{given}: no such text file, no folder with files, and no glob that matches one")
        files |= dict.fromkeys(str(file) for file in sorted(found))
    return [Document(file) for file in files]


def fingerprint(piece: str, seed: int) -> bytes:
    """16 bytes that depend on the piece's content and on ``seed``."""
    return hashlib.blake2b(piece.encode(), digest_size=16, salt=seed.to_bytes(16, "big")).digest()


def choose_eval(lengths: dict[bytes, int], eval_fraction: float) -> frozenset[bytes]:
    """The fingerprints of the pieces that make up the evaluation split: the smallest ones, until ``eval_fraction`` of
    the total of ``lengths`` is reached. At least one, and never all."""
    wanted = eval_fraction * sum(lengths.values())
    chosen: list[bytes] = []
    for key in sorted(lengths)[:-1]:
        if wanted <= 0:
            break
        chosen.append(key)
        wanted -= lengths[key]
    return frozenset(chosen)


@dataclass(frozen=True)
class Piece:
    """``follows``: it goes on where the last piece of its split stopped, so that no separator belongs between them."""

    text: str
    split: Split
    follows: bool


def split_pieces(documents: Sequence[Document], chosen: frozenset[bytes], seed: int) -> Iterator[Piece]:
    """All pieces in order, each with its split."""
    for document in documents:
        before: Split | None = None
        for text in document.pieces():
            split: Split = "eval" if fingerprint(text, seed) in chosen else "train"
            yield Piece(text, split, follows=split == before)
            before = split
