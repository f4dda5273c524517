"""Cuts a stream of token ids into rows and writes them to shards, with statistics at the end."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Int32, Int64

from param_decomp_lab.data.arrow_rows import SUFFIX, ArrowShard, rows_per_batch


@dataclass(frozen=True)
class Written:
    """Rows that were written. ``counts``: of each token id in them. ``tail``: the tokens after the last row.
    ``sha256``: of the rows, as int32."""

    rows: int
    shards: int
    counts: Int64[np.ndarray, "ids"]
    tail: Int32[np.ndarray, "n"]
    sha256: bytes


class TokenWriter:
    """Writes ``folder/NAME-00000.arrow`` and so on, each of at most ``rows_per_shard`` rows.

    ``vocab_size``: every id is below it. ``most_rows``: rows beyond this number are not written. ``bos``: the id that
    rows begin with; None without one (`cut_rows`).
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        seq_len: int,
        vocab_size: int,
        rows_per_shard: int,
        most_rows: int | None,
        bos: int | None = None,
    ) -> None:
        self.rows, self._shards = 0, 0
        self._folder, self._name, self._seq_len, self._vocab_size = folder, name, seq_len, vocab_size
        self._rows_per_shard, self._most_rows, self._bos = rows_per_shard, most_rows, bos
        self._pending: list[Int32[np.ndarray, "n"]] = []
        self._n_pending = 0
        self._counts = np.zeros(0, np.int64)
        self._hash = hashlib.sha256()
        self._shard: ArrowShard | None = None

    @property
    def whole_rows(self) -> int:
        """The number of rows so far, including those not written yet; with BOS, there may be a few more."""
        return self.rows + self._n_pending // self._seq_len

    def add(self, ids: Int32[np.ndarray, "n"]) -> None:
        if self.rows == self._most_rows:
            return
        self._pending.append(ids)
        self._n_pending += len(ids)
        at_once = rows_per_batch(self._seq_len)
        if self._n_pending >= at_once * self._seq_len:
            self._write_rows(at_once)

    def close(self) -> Written:
        """Writes the remaining rows."""
        self._write_rows(1)
        if self._shard is not None:
            self._shard.close()
        tail = self._pending[0] if self._pending else np.zeros(0, np.int32)
        return Written(self.rows, self._shards, self._counts, tail, self._hash.digest())

    def discard(self) -> None:
        """Removes the unfinished file."""
        if self._shard is not None:
            self._shard.discard()

    def _write_rows(self, multiple: int) -> None:
        """Writes pending rows, in a number that is a multiple of ``multiple``."""
        if not self._pending:
            return
        ids = np.concatenate(self._pending)
        most = None if self._most_rows is None else self._most_rows - self.rows
        rows, used = cut_rows(ids, self._seq_len, self._bos, multiple=multiple, most=most)
        self._counts = add_counts(self._counts, np.bincount(rows.ravel()))
        self._hash.update(rows.astype(np.int32).tobytes())
        self.rows += len(rows)
        self._pending = [ids[used:]]
        self._n_pending = len(self._pending[0])
        while len(rows):
            if self._shard is None:
                file = self._folder / f"{self._name}-{self._shards:05d}{SUFFIX}"
                self._shard = ArrowShard(file, self._seq_len, self._vocab_size)
                self._shards += 1
            here = min(rows_per_batch(self._seq_len), self._rows_per_shard - self._shard.rows)
            self._shard.write(rows[:here])
            rows = rows[here:]
            if self._shard.rows == self._rows_per_shard:
                self._shard.close()
                self._shard = None


def cut_rows(
    ids: Int32[np.ndarray, "n"], seq_len: int, bos: int | None, *, multiple: int = 1, most: int | None = None
) -> tuple[Int32[np.ndarray, "rows T"], int]:
    """Returns the rows of ``seq_len`` tokens that a stream fills, and how many ids of the stream are in them.
    ``multiple``: the number of rows is a multiple of it; ``most``: the largest number of rows.

    With ``bos``, every row begins with it, followed by the stream's next ``seq_len - 1`` ids. If the next id of the
    stream is ``bos`` itself, as at the start of a document, the row begins with that one.
    """
    if bos is None:
        n = len(ids) // (multiple * seq_len) * multiple
        n = n if most is None else min(n, most)
        return ids[: n * seq_len].reshape(n, seq_len), n * seq_len
    starts, at = list[int](), 0  # of the ids after each row's BOS
    while at < len(ids):
        start = at + int(ids[at] == bos)
        at = start + seq_len - 1
        if at <= len(ids):
            starts.append(start)
    n = len(starts) // multiple * multiple
    n = n if most is None else min(n, most)
    rows = np.full((n, seq_len), bos, ids.dtype)
    rows[:, 1:] = ids[np.asarray(starts[:n], np.int64)[:, None] + np.arange(seq_len - 1)]
    return rows, starts[n - 1] + seq_len - 1 if n else 0


def before_document(ids: Int32[np.ndarray, "n"], separator: int | None, bos: int | None) -> Int32[np.ndarray, "k"]:
    """Returns what comes between the previous documents and the one that begins with ``ids``: the separator and BOS, if
    they exist. If the separator is BOS, it occurs once, and a text that already begins with BOS gets no second one.
    """
    between = [token for token in (separator, bos) if token is not None]
    if bos is not None and bos == separator:
        between = [bos]
    if bos is not None and len(ids) and ids[0] == bos:
        between = between[:-1]
    return np.asarray(between, np.int32)


def add_counts(a: Int64[np.ndarray, "m"], b: Int64[np.ndarray, "n"]) -> Int64[np.ndarray, "k"]:
    """Returns the sum of two arrays of counts by token id, which may differ in length."""
    if len(a) < len(b):
        a, b = b, a
    total = a.astype(np.int64)
    total[: len(b)] += b
    return total


def unigram_entropy(counts: Int64[np.ndarray, "vocab"]) -> float:
    """Returns the entropy of the token frequencies, in nats: the cross-entropy of the best model
    that ignores context.
    """
    p = counts[counts > 0] / max(1, counts.sum())
    return float(-(p * np.log(p)).sum())
