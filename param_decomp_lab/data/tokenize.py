"""Text to Parquet shards of fixed-length rows of token ids, in a training and an evaluation split."""

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from jaxtyping import Int32
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from param_decomp_lab.data.meta import META_FILE, SPLITS, DataMeta, Split, SplitMeta
from param_decomp_lab.data.pieces import Document, Piece, choose_eval, find_documents, fingerprint, split_pieces
from param_decomp_lab.data.tokenizers import Tokenizer, load_tokenizer
from param_decomp_lab.errors import UserError
from param_decomp_lab.folders import new_folder
from param_decomp_lab.untrusted.json_text import INTEGER
from param_decomp_lab.untrusted.printable import shortened

COLUMN = "input_ids"
PIECES_PER_BATCH = 256
# Small enough that one random row costs little to read, large enough to compress.
ROWS_PER_GROUP = 256


def tokenize_files(
    inputs: Sequence[str | Path],
    out: str | Path,
    *,
    tokenizer: str | Path = "bytes",
    seq_len: int = 512,
    eval_fraction: float = 0.05,
    rows_per_shard: int = 65_536,
    seed: int = 0,
    overwrite: bool = False,
) -> DataMeta:
    """Tokenize the text files, folders and globs of ``inputs``; a file is a document. As ``tokenize_documents``."""
    return tokenize_documents(
        find_documents(inputs),
        out,
        tokenizer=tokenizer,
        seq_len=seq_len,
        eval_fraction=eval_fraction,
        rows_per_shard=rows_per_shard,
        seed=seed,
        overwrite=overwrite,
        sources=tuple(map(str, inputs)),
    )


def tokenize_documents(
    documents: Sequence[Document],
    out: str | Path,
    *,
    tokenizer: str | Path = "bytes",
    seq_len: int = 512,
    eval_fraction: float = 0.05,
    rows_per_shard: int = 65_536,
    seed: int = 0,
    overwrite: bool = False,
    sources: tuple[str, ...],
) -> DataMeta:
    """Write ``out/train/part-*.parquet`` and ``out/eval/part-*.parquet``, column ``input_ids``: int32 ``[seq_len]``.

    Documents are concatenated with the tokenizer's separator and cut into rows; the tail that fills no row is dropped.
    ``tokenizer``: ``bytes``, or a Hugging Face ``tokenizer.json`` or its folder, which is kept beside the data.
    ``eval_fraction``: share of the text, in characters, that is held out, by pieces (see pieces.py); ``seed`` picks
    which. ``rows_per_shard``: most rows in one Parquet file. ``sources``: where the text is from, for ``meta.json``.
    ``out`` appears only when it is complete. Returns what ``out/meta.json`` says.

    Raises UserError: a number out of range, no tokenizer, text that is not UTF-8 or too short for one row in each
    split, ``out`` not empty (unless ``overwrite``) or not writable.
    """
    for name, value, least in (("seq_len", seq_len, 2), ("rows_per_shard", rows_per_shard, 1), ("seed", seed, 0)):
        if value < least:
            raise UserError(f"{name} must be at least {least}; it is {value}")
    if seed >= INTEGER:
        raise UserError(f"seed must be below 2^64; it is {shortened(str(seed), 40)}")
    if not 0 < eval_fraction < 1:
        raise UserError(f"eval_fraction must lie between 0 and 1, as a share of the text; it is {eval_fraction}")
    loaded = load_tokenizer(tokenizer)
    out = Path(out)
    with new_folder(out, marker=META_FILE, overwrite=overwrite) as folder, _progress() as progress:
        lengths = _measure(documents, seed, progress)
        chosen = choose_eval(lengths, eval_fraction)
        writers = {split: _RowWriter(folder / split, seq_len, rows_per_shard, loaded.vocab_size) for split in SPLITS}
        task = progress.add_task("tokenizing", total=sum(lengths.values()))
        for piece, ids in _encode(loaded, split_pieces(documents, chosen, seed)):
            if not piece.follows and loaded.separator is not None:
                writers[piece.split].add(np.asarray([loaded.separator], np.int32))
            writers[piece.split].add(ids)
            progress.update(task, advance=len(piece.text))
        meta = DataMeta(
            tokenizer=loaded.name,
            vocab_size=loaded.vocab_size,
            separator=loaded.separator,
            seq_len=seq_len,
            seed=seed,
            eval_fraction=eval_fraction,
            sources=sources,
            documents=len(documents),
            train=writers["train"].close("train"),
            eval=writers["eval"].close("eval"),
            sha256=hashlib.sha256(b"".join(writers[split].digest() for split in SPLITS)).hexdigest(),
        )
        loaded.save(folder)
        meta.write(folder)
    return meta


def _progress() -> Progress:
    return Progress(TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())


def _measure(documents: Sequence[Document], seed: int, progress: Progress) -> dict[bytes, int]:
    """Characters of every piece, by fingerprint; repeated pieces count as often as they occur."""
    lengths: Counter[bytes] = Counter()
    for document in progress.track(documents, description="reading"):
        for text in document.pieces():
            lengths[fingerprint(text, seed)] += len(text)
    return dict(lengths)


def _encode(tokenizer: Tokenizer, pieces: Iterator[Piece]) -> Iterator[tuple[Piece, Int32[np.ndarray, "n"]]]:
    while batch := list(islice(pieces, PIECES_PER_BATCH)):
        yield from zip(batch, tokenizer.encode([piece.text for piece in batch]), strict=True)


class _RowWriter:
    """Cuts a stream of token ids into rows and writes them to ``folder/part-00000.parquet`` and so on."""

    def __init__(self, folder: Path, seq_len: int, rows_per_shard: int, vocab_size: int) -> None:
        folder.mkdir()
        self._folder, self._seq_len, self._rows_per_shard = folder, seq_len, rows_per_shard
        self._pending: list[Int32[np.ndarray, "n"]] = []
        self._n_pending = 0
        self._counts = np.zeros(vocab_size, np.int64)
        self._hash = hashlib.sha256()
        self._meta = SplitMeta(rows=0, tokens=0, dropped_tokens=0, shards=0, unigram_entropy=0.0)

    def add(self, ids: Int32[np.ndarray, "n"]) -> None:
        self._pending.append(ids)
        self._n_pending += len(ids)
        if self._n_pending >= self._rows_per_shard * self._seq_len:
            self._write_shards(whole=True)

    def close(self, split: Split) -> SplitMeta:
        """Write what is left. Raises UserError when the whole split did not fill one row."""
        self._write_shards(whole=True)
        self._write_shards(whole=False)
        meta = replace(self._meta, dropped_tokens=self._n_pending, unigram_entropy=unigram_entropy(self._counts))
        if meta.rows == 0:
            raise UserError(
                f"the text is too short: the {split} split has {self._n_pending} tokens, less than one row of "
                f"{self._seq_len}; give more text, a smaller seq_len, or another eval_fraction"
            )
        return meta

    def digest(self) -> bytes:
        return self._hash.digest()

    def _write_shards(self, *, whole: bool) -> None:
        """Write whole shards, or else one last shard of whole rows; the rest stays pending."""
        ids = np.concatenate(self._pending) if self._pending else np.zeros(0, np.int32)
        shard = self._rows_per_shard * self._seq_len
        step = shard if whole else max(len(ids) // self._seq_len * self._seq_len, 1)
        n_shards = len(ids) // step if len(ids) >= self._seq_len else 0
        for n in range(n_shards):
            self._write(ids[n * step : (n + 1) * step])
        self._pending = [ids[n_shards * step :]]
        self._n_pending = len(self._pending[0])

    def _write(self, ids: Int32[np.ndarray, "n"]) -> None:
        column = pa.FixedSizeListArray.from_arrays(pa.array(ids, pa.int32()), self._seq_len)
        file = self._folder / f"part-{self._meta.shards:05d}.parquet"
        # A checksum of each page, so that a bit that turns over on a disk is noticed, and trains nothing.
        settings = {"compression": "zstd", "row_group_size": ROWS_PER_GROUP, "write_page_checksum": True}
        pq.write_table(pa.table({COLUMN: column}), file, **settings)
        self._counts += np.bincount(ids, minlength=len(self._counts))
        self._hash.update(ids.tobytes())
        rows = self._meta.rows + len(column)
        self._meta = replace(self._meta, rows=rows, tokens=rows * self._seq_len, shards=self._meta.shards + 1)


def unigram_entropy(counts: Int32[np.ndarray, "vocab"]) -> float:
    """Entropy of the token frequencies, in nats: the cross-entropy of the best model that ignores context."""
    p = counts[counts > 0] / max(1, counts.sum())
    return float(-(p * np.log(p)).sum())
