"""Turns text into shards of fixed-length rows of token ids, in a training and an evaluation split.

The text is divided into units (plan.py). Each unit is tokenized by one process, into its own shards; which process and
when does not change the output. The remainder of each unit, less than a row, is joined with the others at the end.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int32, Int64
from rich.console import Console

from param_decomp_lab.data.arrow_rows import SUFFIX, ArrowRows, ArrowShard, rows_per_batch
from param_decomp_lab.data.meta import META_FILE, NOTHING_SKIPPED, SPLITS, DataMeta, Split, SplitMeta
from param_decomp_lab.data.pieces import Document
from param_decomp_lab.data.plan import Role, Settings, TokenizePlan, Unit, cut_units, unit_bytes
from param_decomp_lab.data.spans import Format, MemorySpan, file_spans, find_files
from param_decomp_lab.data.token_writer import Written, add_counts, before_document, cut_rows, unigram_entropy
from param_decomp_lab.data.tokenize_processes import tokenize_units
from param_decomp_lab.data.tokenizers import NO_TOKENIZER, chosen_bos, load_tokenizer, tokenizer_hash
from param_decomp_lab.data.unfinished import Unfinished, unfinished
from param_decomp_lab.errors import CannotWrite, UserError

TAIL = "part-tail"
"""The name of the shard with the remainders of the units; it sorts after theirs."""


def tokenize_documents(
    documents: Sequence[Document],
    out: str | Path,
    *,
    tokenizer: str | Path = "bytes",
    overwrite: bool = False,
    bos: bool | None = None,
    sources: tuple[str, ...],
    **settings: Any,
) -> DataMeta:
    """Tokenizes documents in memory, like `tokenize`. ``bos``: as in `make_plan`. ``settings``: those of `Settings`."""
    plan = make_plan([memory_unit(documents)], Settings(**settings), tokenizer, sources, bos)
    meta = tokenize(plan, out, overwrite=overwrite)
    assert meta is not None
    return meta


def tokenize_files(
    inputs: Sequence[str | Path],
    out: str | Path,
    *,
    tokenizer: str | Path = "bytes",
    overwrite: bool = False,
    bos: bool | None = None,
    **settings: Any,
) -> DataMeta:
    """Tokenizes the files, folders and globs of ``inputs``; each text file is a document. ``bos``: as in `make_plan`.
    ``settings``: those of `Settings`. Otherwise like `tokenize`.
    """
    plan = make_plan(file_units(inputs), Settings(**settings), tokenizer, tuple(map(str, inputs)), bos)
    meta = tokenize(plan, out, overwrite=overwrite)
    assert meta is not None
    return meta


def memory_unit(documents: Sequence[Document]) -> Unit:
    """Returns documents in memory as one unit."""
    return Unit((MemorySpan(tuple(documents)),), "by hash")


def file_units(inputs: Sequence[str | Path], fmt: Format | None = None, role: Role = "by hash") -> list[Unit]:
    """Returns the units of files, folders and globs. ``fmt``: None goes by the files' endings. Raises UserError."""
    files = find_files(inputs)
    size = unit_bytes(sum(file.stat().st_size for file in files))
    return cut_units(file_spans(files, fmt, size), role, size)


def make_plan(
    units: Sequence[Unit],
    settings: Settings,
    tokenizer: str | Path | None,
    sources: tuple[str, ...],
    bos: bool | None = None,
) -> TokenizePlan:
    """Makes a plan. ``tokenizer``: None if the input is already tokenized. ``bos``: whether rows and documents begin
    with the tokenizer's BOS; None does what the tokenizer itself does with a text. Raises UserError if the tokenizer
    does not exist, or has no BOS although one is wanted.
    """
    if bos and settings.row_starts:
        raise UserError("bos: rows are taken as they are, so no token is put before them; leave it out")
    found = None if tokenizer is None else load_tokenizer(tokenizer)
    begins = chosen_bos(found, bos, of_text=not settings.column.tokenized)
    if found is None:
        return TokenizePlan(tuple(units), settings, None, "", sources, begins)
    return TokenizePlan(tuple(units), settings, str(tokenizer), tokenizer_hash(found), sources, begins)


def tokenize(
    plan: TokenizePlan,
    out: str | Path,
    *,
    processes: int = 1,
    part: tuple[int, int] | None = None,
    overwrite: bool = False,
    console: Console | None = None,
) -> DataMeta | None:
    """Writes ``out/train`` and ``out/eval``, shards of rows of ``plan.settings.seq_len`` tokens (arrow_rows.py), the
    tokenizer and ``meta.json``. ``out`` appears only when it is complete. The same call continues one that was killed,
    and the output depends on the plan alone.

    Documents are concatenated with the tokenizer's separator and cut into rows; an incomplete row at the end is
    dropped. With ``plan.bos``, each row begins with it, and it follows each separator (`cut_rows`). ``processes``: how
    many tokenize. ``part``: number and count, if several jobs make ``out`` together: each job does its own units, and
    the one that finds all done makes ``out``. ``console``: shows the progress.

    Returns the content of ``out/meta.json``; None while other parts are missing. Raises UserError for text that cannot
    be read or is too short for one row in each split, and if ``out`` is not empty (unless ``overwrite``) or not
    writable.
    """
    if part is not None and (meta := _finished(Path(out), plan)) is not None:
        return meta
    try:
        with unfinished(Path(out), plan, part, overwrite=overwrite) as work:
            tokenize_units(plan, work, processes, part, console)
            return _publish_if_whole(plan, work, overwrite=overwrite)
    except CannotWrite:
        # Another part has finished the data set while this one repeated work that was already done.
        meta = None if part is None else _finished(Path(out), plan)
        if meta is None:
            raise
        return meta


def _publish_if_whole(plan: TokenizePlan, work: Unfinished, *, overwrite: bool) -> DataMeta | None:
    """Puts the data in place if all units that they need are done."""
    with work.publishing() as is_there:
        if not is_there:  # another part has done it
            return _finished(work.out, plan)
        needed = _needed(plan, work)
        if needed is None:
            return None
        meta = _publish(plan, work, needed)
        work.put_in_place(overwrite=overwrite)
        return meta


def _finished(out: Path, plan: TokenizePlan) -> DataMeta | None:
    """Returns the description of data already made from the same plan; None otherwise."""
    if not (out / META_FILE).is_file():
        return None
    meta = DataMeta.read(out)
    return meta if meta.plan == plan.hash else None


def _needed(plan: TokenizePlan, work: Unfinished) -> list[int] | None:
    """Returns the units that make up the data set, in order; None while one is not done."""
    done, before = work.done(), dict.fromkeys(SPLITS, 0)
    needed = []
    for number in range(len(plan.units)):
        if not plan.is_needed(number, before):
            continue
        if number not in done:
            return None
        needed.append(number)
        for split, written in work.record(number).written.items():
            before[split] += written.rows
    return needed


def _publish(plan: TokenizePlan, work: Unfinished, needed: Sequence[int]) -> DataMeta:
    """Assembles the data of the units. It can be repeated after a kill, with the same result."""
    tokenizer = None if plan.tokenizer is None else load_tokenizer(plan.tokenizer)
    separator = None if tokenizer is None else tokenizer.separator
    joined = {split: _Joined(plan, work, split, separator) for split in SPLITS}
    documents, skipped = 0, NOTHING_SKIPPED
    for number in needed:
        record = work.record(number)
        documents += record.documents
        skipped = skipped.joined(record.skipped)
        for split, written in record.written.items():
            joined[split].add(number, written)
    metas = {split: joined[split].close() for split in SPLITS}
    counts = add_counts(joined["train"].counts, joined["eval"].counts)
    meta = DataMeta(
        tokenizer=NO_TOKENIZER if tokenizer is None else tokenizer.name,
        vocab_size=len(counts) if tokenizer is None else tokenizer.vocab_size,
        separator=separator,
        seq_len=plan.settings.seq_len,
        seed=plan.settings.seed,
        eval_fraction=plan.settings.eval_fraction,
        sources=plan.sources,
        documents=documents,
        train=metas["train"],
        eval=metas["eval"],
        sha256=hashlib.sha256(b"".join(joined[split].digest() for split in SPLITS)).hexdigest(),
        plan=plan.hash,
        skipped_records=skipped.n,
        skipped=skipped.first,
        bos=plan.bos,
    )
    if tokenizer is not None:
        tokenizer.save(work.data)
    meta.write(work.data)
    return meta


class _Joined:
    """One split, joined from its units: at most the requested number of rows, and rows made of the remainders."""

    def __init__(self, plan: TokenizePlan, work: Unfinished, split: Split, separator: int | None) -> None:
        self._settings, self._folder, self._split = plan.settings, work.data / split, split
        self._separator, self._bos = separator, plan.bos
        self._most = plan.settings.most_rows(split)
        self._is_wanted = any(split in unit.splits for unit in plan.units)
        self.rows, self.counts = 0, np.zeros(0, np.int64)
        self._shards: list[Path] = []
        self._tails: list[np.ndarray] = []
        self._digests: list[bytes] = []

    def add(self, number: int, written: Written) -> None:
        shards = [self._folder / f"part-{number:05d}-{n:05d}{SUFFIX}" for n in range(written.shards)]
        rows, counts, digest = written.rows, written.counts, written.sha256
        if self._most is not None and self.rows + rows > self._most:
            rows = self._most - self.rows
            counts, digest, shards = _cut(shards, rows, self._settings)
        self.rows += rows
        self.counts = add_counts(self.counts, counts)
        self._digests.append(digest)
        self._shards += shards
        # A remainder whose document continues in the next unit is joined to it as a separate document.
        if self._tails and len(written.tail) and written.tail[0] != self._separator:
            self._tails.append(before_document(written.tail, self._separator, self._bos))
        self._tails.append(written.tail)

    def close(self) -> SplitMeta:
        """Removes shards of units that are not needed. Raises UserError if the whole split does not fill one row."""
        length = self._settings.seq_len
        tail = np.concatenate(self._tails) if self._tails else np.zeros(0, np.int32)
        most = None if self._most is None else self._most - self.rows
        more, used = cut_rows(tail, length, self._bos, most=most)
        if self.rows + len(more) == 0 and self._is_wanted:
            raise UserError(
                f"the text is too short: the {self._split} split has {len(tail)} tokens, less than one row of "
                f"{length}; give more text, a smaller seq_len, or another eval_fraction"
            )
        for shard in self._shards:
            if not shard.is_file():
                work = self._folder.parents[1]
                raise CannotWrite(f"{shard}, which had been written, is gone; remove {work} and start again")
        if len(more):
            self._write_tail(more)
        for file in self._folder.iterdir():
            if file not in self._shards:
                file.unlink()
        return SplitMeta(
            rows=self.rows,
            tokens=self.rows * length,
            dropped_tokens=len(tail) - used,
            shards=len(self._shards),
            unigram_entropy=unigram_entropy(self.counts),
        )

    def digest(self) -> bytes:
        """Returns the digest of all token ids, as int32."""
        return self._digests[0] if len(self._digests) == 1 else hashlib.sha256(b"".join(self._digests)).digest()

    def _write_tail(self, rows: Int32[np.ndarray, "n T"]) -> None:
        file = self._folder / f"{TAIL}{SUFFIX}"
        shard = ArrowShard(file, self._settings.seq_len, 1 + int(rows.max()))
        shard.write(rows)
        shard.close()
        self.rows += len(rows)
        self.counts = add_counts(self.counts, np.bincount(rows.ravel()))
        self._digests.append(hashlib.sha256(rows.tobytes()).digest())
        self._shards.append(file)


def _cut(shards: Sequence[Path], n_rows: int, settings: Settings) -> tuple[Int64[np.ndarray, "ids"], bytes, list[Path]]:
    """Cuts shards to their first ``n_rows`` rows. Returns the counts and the digest of `Written` for these, and the
    shards that remain.
    """
    counts, digest, kept = np.zeros(0, np.int64), hashlib.sha256(), []
    for shard in shards:
        if n_rows == 0:
            break
        data = ArrowRows(str(shard), [shard])
        here = min(n_rows, len(data))
        shorter = ArrowShard(shard, settings.seq_len, data.most_ids) if here < len(data) else None
        for start in range(0, here, rows_per_batch(settings.seq_len)):
            rows = data.rows(range(start, min(here, start + rows_per_batch(settings.seq_len))))
            counts = add_counts(counts, np.bincount(rows.ravel()))
            digest.update(rows.tobytes())
            if shorter is not None:
                shorter.write(rows)
        if shorter is not None:
            shorter.close()
        kept.append(shard)
        n_rows -= here
    return counts, digest.digest(), kept
