"""Tokenizes one unit of a plan into shards, with a record of their contents."""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int32

from param_decomp_lab.data.meta import NAMED, NOTHING_SKIPPED, Skipped, Split
from param_decomp_lab.data.pieces import (
    Document,
    DocumentPart,
    TextPiece,
    choose_by_hash,
    choose_exactly,
    split_documents,
    split_pieces,
)
from param_decomp_lab.data.plan import Settings, TokenizePlan, Unit
from param_decomp_lab.data.records import BadRecord
from param_decomp_lab.data.token_writer import TokenWriter, Written, before_document
from param_decomp_lab.data.tokenizers import LARGEST_ID, Tokenizer
from param_decomp_lab.safe_io.files import regular_file
from param_decomp_lab.safe_io.printable import shortened

PIECES_AT_ONCE = 1024
CHARS_AT_ONCE = 1 << 22
EXACT_CHARS = 1 << 25
"""A text of one unit is kept in memory up to this size, to hold out exactly the requested share."""

Report = Callable[[int, int], None]
"""Receives the numbers of characters and tokens since the last call; may raise to stop."""


@dataclass(frozen=True)
class UnitRecord:
    """The results of a unit. ``written``: by split. ``skipped``: the number of records that were left out, and the
    errors of the first of them.
    """

    documents: int
    written: dict[Split, Written]
    skipped: Skipped = NOTHING_SKIPPED

    def save(self, file: Path) -> None:
        """Replaces ``file``, which is complete at any time."""
        arrays: dict[str, Any] = {
            "documents": np.array(self.documents),
            "skipped": np.array(self.skipped.n),
            "skipped_first": np.array(self.skipped.first, np.str_),
        }
        for split, written in self.written.items():
            ids = np.flatnonzero(written.counts)
            arrays |= {
                f"{split}_rows": np.array([written.rows, written.shards]),
                f"{split}_ids": ids.astype(np.int32),
                f"{split}_counts": written.counts[ids],
                f"{split}_tail": written.tail,
                f"{split}_sha256": np.frombuffer(written.sha256, np.uint8),
            }
        unfinished = file.with_name(f".{file.name}.{os.getpid()}.tmp")
        with open(unfinished, "wb") as opened:
            np.savez_compressed(opened, **arrays)
            opened.flush()
            os.fsync(opened.fileno())
        os.replace(unfinished, file)

    @classmethod
    def load(cls, file: Path) -> "UnitRecord":
        with np.load(regular_file(file, "a record"), allow_pickle=False) as arrays:
            written: dict[Split, Written] = {}
            splits: tuple[Split, Split] = ("train", "eval")
            for split in splits:
                if f"{split}_rows" not in arrays:
                    continue
                ids, rows = arrays[f"{split}_ids"], arrays[f"{split}_rows"]
                counts = np.zeros(1 + ids[-1] if len(ids) else 0, np.int64)
                counts[ids] = arrays[f"{split}_counts"]
                sha256 = arrays[f"{split}_sha256"].tobytes()
                written[split] = Written(int(rows[0]), int(rows[1]), counts, arrays[f"{split}_tail"], sha256)
            skipped = NOTHING_SKIPPED
            if "skipped" in arrays:  # not in the records of older versions
                skipped = Skipped(int(arrays["skipped"]), tuple(arrays["skipped_first"].tolist()))
            return cls(int(arrays["documents"]), written, skipped)


def tokenize_unit(
    plan: TokenizePlan, tokenizer: Tokenizer | None, number: int, folder: Path, report: Report
) -> UnitRecord:
    """Writes the shards of unit ``number`` into ``folder/train`` and ``folder/eval``. Raises UserError for text that
    cannot be read, and what ``report`` raises; shards that are written by then are replaced the next time."""
    unit, settings = plan.units[number], plan.settings
    vocab_size = 1 + LARGEST_ID if tokenizer is None else tokenizer.vocab_size
    writers = {
        split: TokenWriter(
            folder / split,
            f"part-{number:05d}",
            settings.seq_len,
            vocab_size,
            settings.rows_per_shard,
            settings.most_rows(split),
            plan.bos,
        )
        for split in unit.splits
    }
    documents = _Documents(unit, settings)
    separator = None if tokenizer is None else tokenizer.separator
    try:
        for batch in _batches(_chosen(plan, unit, documents)):
            n_tokens = 0
            for piece, ids in zip(batch, _encoded(tokenizer, batch), strict=True):
                writer = writers[piece.split]
                if not piece.follows:
                    writer.add(before_document(ids, separator, plan.bos))
                writer.add(ids)
                n_tokens += len(ids)
            report(sum(len(piece.content) for piece in batch), n_tokens)
            if plan.is_enough(number, {split: writer.whole_rows for split, writer in writers.items()}):
                break
        written = {split: writer.close() for split, writer in writers.items()}
        return UnitRecord(documents.n, written, Skipped(documents.n_bad, tuple(documents.bad)))
    except BaseException:
        for writer in writers.values():
            writer.discard()
        raise


def training_text(plan: TokenizePlan) -> Iterator[str]:
    """Yields the text of the training split, in order and in pieces. Raises as `tokenize_unit` does."""
    for unit in plan.units:
        for piece in _chosen(plan, unit, _Documents(unit, plan.settings)):
            if piece.split == "train":
                assert isinstance(piece.content, str)
                yield piece.content


class _Documents:
    """The documents of a unit, and their number. ``n_bad``: how many records were left out; ``bad``: the reasons for
    the first of them.
    """

    def __init__(self, unit: Unit, settings: Settings) -> None:
        self._unit, self._settings, self.n = unit, settings, 0
        self.n_bad, self.bad = 0, list[str]()

    def __iter__(self) -> Iterator[Document]:
        for span in self._unit.spans:
            for found in span.documents(self._settings.column):
                document = self._row(found) if self._settings.row_starts else found
                if isinstance(document, BadRecord):
                    self._leave_out(document)
                else:
                    self.n += document.begins
                    yield document

    def _leave_out(self, bad: BadRecord) -> None:
        if not self._settings.skip_bad_records:
            raise bad
        self.n_bad += 1
        if len(self.bad) < NAMED:
            self.bad.append(shortened(str(bad), 300))

    def _row(self, document: Document | BadRecord) -> Document | BadRecord:
        if isinstance(document, BadRecord):
            return document
        ids, seq_len = document.content, self._settings.seq_len
        assert isinstance(ids, np.ndarray)
        if len(ids) < seq_len:
            return BadRecord(
                f"{document.source}: has a row of {len(ids)} token ids, fewer than the {seq_len} of --seq-len"
            )
        return Document(document.source, ids[:seq_len])


def _chosen(plan: TokenizePlan, unit: Unit, documents: Iterable[Document]) -> Iterator[TextPiece]:
    """Yields the pieces of a unit with their splits. If it is the only unit and fits in memory, exactly the requested
    share is held out, because the hashes of a few pieces may all fall on one side.
    """
    settings, cuts = plan.settings, split_documents(documents)
    if unit.role != "by hash":
        role: Split = unit.role
        return split_pieces(cuts, lambda _: role)
    if len(plan.units) == 1:
        held: list[DocumentPart] = []
        size = 0
        while size <= EXACT_CHARS:
            piece = next(cuts, None)
            if piece is None:
                contents = (piece.content for piece in held)
                return split_pieces(held, choose_exactly(contents, settings.eval_fraction, settings.seed))
            held.append(piece)
            size += len(piece.content)
        cuts = chain(held, cuts)
    return split_pieces(cuts, choose_by_hash(settings.eval_fraction, settings.seed))


def _encoded(tokenizer: Tokenizer | None, batch: Sequence[TextPiece]) -> Sequence[Int32[np.ndarray, "n"]]:
    """Returns the token ids of each piece."""
    texts = [piece.content for piece in batch if isinstance(piece.content, str)]
    if texts:
        assert tokenizer is not None
        return tokenizer.encode(texts)
    return [piece.content for piece in batch if isinstance(piece.content, np.ndarray)]


def _batches(pieces: Iterator[TextPiece]) -> Iterator[list[TextPiece]]:
    """Yields lists of pieces that are encoded together."""
    batch: list[TextPiece] = []
    size = 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece.content)
        if len(batch) == PIECES_AT_ONCE or size >= CHARS_AT_ONCE:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
