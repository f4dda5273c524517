"""What it costs to read rows of tokens in random order, and what a training step waits for them.

    python -m experiments.benchmarks.reading --folder /tmp/rows   # makes 2 GiB of each kind, reads, removes them
    python -m experiments.benchmarks.reading --folder /tmp/rows --gib 0.1 --batches 20 --rounds 5

`parquet`: row groups of 256 rows with zstd, as `pd data tokenize` wrote until November 2026 and as others write;
`arrow`: what it writes now. Rows of 2,048 token ids of a vocabulary of 50,257, drawn from Zipf's law. Batches are those
of training (`Batches`), read one after the other as before (`in turn`) or ahead, by the thread (`ahead`).

*Decoded per used*: bytes of token ids that are decoded, or read where nothing is to be decoded, over those of the rows
looked up. The page cache is emptied of the files before each measurement.

The step is that of `configs/demo/transformer.yaml`, rows of 64 tokens, with random weights; it is given its tokens by
the trainer's own source, or ones that lie on the device already, in turn (`--rounds` rounds of five steps).
"""

import argparse
import os
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from jaxtyping import Int32

from param_decomp_lab.data.arrow_rows import ArrowRows, ArrowShard, rows_per_batch
from param_decomp_lab.data.batches import Batches
from param_decomp_lab.data.parquet_rows import ParquetRows
from param_decomp_lab.data.read_ahead import ReadAhead
from param_decomp_lab.data.token_data import TokenData

ROOT = Path(__file__).parents[2]
VOCABULARY = 50_257
ROWS_PER_SHARD = 65_536
STEPS_PER_ROUND = 5


def blocks(n_rows: int, seq_len: int, vocab_size: int) -> Iterator[Int32[np.ndarray, "rows T"]]:
    """Rows of ids of which few are frequent."""
    random = np.random.default_rng(0)
    chances = 1 / np.arange(1, vocab_size + 1)
    bounds = np.cumsum(chances / chances.sum())
    step = rows_per_batch(seq_len)
    for start in range(0, n_rows, step):
        size = (min(step, n_rows - start), seq_len)
        yield np.searchsorted(bounds, random.random(size)).clip(0, vocab_size - 1).astype(np.int32)


def make_arrow(folder: Path, n_rows: int, seq_len: int, vocab_size: int) -> None:
    folder.mkdir(parents=True)
    shard: ArrowShard | None = None
    for number, rows in enumerate(blocks(n_rows, seq_len, vocab_size)):
        if shard is None or shard.rows >= ROWS_PER_SHARD:
            if shard is not None:
                shard.close()
            shard = ArrowShard(folder / f"part-{number:05d}.arrow", seq_len, vocab_size)
        shard.write(rows)
    assert shard is not None
    shard.close()


def make_parquet(folder: Path, n_rows: int, seq_len: int, vocab_size: int) -> None:
    folder.mkdir(parents=True)
    kind = pa.list_(pa.int32(), seq_len)
    settings = {"compression": "zstd", "write_page_checksum": True}
    with pq.ParquetWriter(folder / "part-00000.parquet", pa.schema([("input_ids", kind)]), **settings) as writer:
        for rows in blocks(n_rows, seq_len, vocab_size):
            column = pa.FixedSizeListArray.from_arrays(pa.array(rows.ravel()), seq_len)
            writer.write_table(pa.table({"input_ids": column}), row_group_size=256)


MAKERS = {"parquet": make_parquet, "arrow": make_arrow}


class Decoded:
    """Counts the bytes of token ids that are decoded or read."""

    def __init__(self) -> None:
        self.bytes = 0

    def watch(self, of: type, name: str) -> None:
        """Counts what the method ``name`` returns."""
        method: Callable[..., np.ndarray] = getattr(of, name)

        def counted(*arguments: Any, **options: Any) -> np.ndarray:
            found = method(*arguments, **options)
            self.bytes += found.size * 4
            return found

        setattr(of, name, counted)


class Counted:
    """Token data that counts the rows that are looked up. ``end``: gives no more."""

    def __init__(self, data: TokenData) -> None:
        self._data, self.n_rows, self.end = data, 0, False
        self.source, self.seq_len, self.rows_per_read = data.source, data.seq_len, data.rows_per_read
        self.check = data.check

    def __len__(self) -> int:
        return len(self._data)

    def rows(self, ids: np.ndarray | Sequence[int]) -> np.ndarray:
        if self.end:
            raise EOFError
        found = self._data.rows(ids)
        self.n_rows += len(ids)
        return found


def forget(folder: Path) -> None:
    """Empties the page cache of a folder's files."""
    for file in folder.iterdir():
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def read(folder: Path, batch_size: int, n_batches: int, decoded: Decoded, ahead: bool) -> tuple[float, float]:
    """Rows per second, and bytes decoded per byte used."""
    forget(folder)
    data = Counted(TokenData(folder))
    batches = Batches(data, batch_size, seed=0)
    source = ReadAhead(batches) if ahead else None
    batches.rows(0)  # the order of the epoch
    decoded.bytes = 0
    start = time.perf_counter()
    for number in range(n_batches):
        _ = batches[number] if source is None else source.take(number, 1)
    seconds = time.perf_counter() - start
    found = n_batches * batch_size / seconds, decoded.bytes / (data.n_rows * data.seq_len * 4)
    data.end = True
    return found


def reading(options: argparse.Namespace) -> None:
    seq_len, n_rows = 2048, int(options.gib * 2**30) // (2048 * 4)
    decoded = Decoded()
    decoded.watch(ParquetRows, "_decode")
    decoded.watch(ArrowRows, "_row")
    print(f"{n_rows:,} rows of {seq_len:,} tokens ({options.gib:g} GiB as int32), batches of {options.batch_size}\n")
    print("| files | on the disk | opened in | read | rows/s | decoded per used |\n|---|---|---|---|---|---|")
    for kind, make in MAKERS.items():
        folder = options.folder / kind
        make(folder, n_rows, seq_len, VOCABULARY)
        size = sum(file.stat().st_size for file in folder.iterdir())
        forget(folder)
        start = time.perf_counter()
        TokenData(folder).check(VOCABULARY)
        opened = time.perf_counter() - start
        for ahead in (False, True):
            n = options.batches * (options.more if kind == "arrow" or ahead else 1)
            rate, times = read(folder, options.batch_size, n, decoded, ahead)
            how = "ahead" if ahead else "in turn"
            print(
                f"| {kind} | {size / 2**30:.2f} GiB | {opened:.2f} s | {how} | {rate:,.0f} | {times:.1f} |", flush=True
            )
        shutil.rmtree(folder)


def stepping(options: argparse.Namespace) -> None:
    import jax
    from rich.console import Console

    from param_decomp_jax.method.state import init_state
    from param_decomp_jax.method.state_sharding import state_shardings
    from param_decomp_jax.targets.llama import LlamaConfig
    from param_decomp_lab.config import load_config
    from param_decomp_lab.data.sources import TokenSource
    from param_decomp_lab.pretrain.models import random_weights
    from param_decomp_lab.setup import set_up
    from param_decomp_lab.setup.resolved import ResolvedConfig
    from param_decomp_lab.training.loop import compile_steps
    from param_decomp_lab.weights.target_folder import save_target

    seq_len, n_rows = 64, 400_000
    target = options.folder / "target"
    architecture = LlamaConfig(256, d_model=64, n_layers=4, n_heads=4, n_kv_heads=4, head_dim=16, d_mlp=192)
    save_target(target, architecture, random_weights(jax.random.key(0), architecture, 0.02, ()))
    print("\n| files | step, tokens there | ratio, read ahead | ratio, read in turn |\n|---|---|---|---|")
    for kind, make in MAKERS.items():
        folder = options.folder / kind
        make(folder, n_rows, seq_len, 256)
        changes = [
            f"data={{train: {folder}, eval: {target}}}", f"target={{folder: {target}}}", "eval=null"
        ]  # fmt: skip
        setup = set_up(
            ResolvedConfig(load_config(ROOT / "configs" / "demo" / "transformer.yaml", changes)), Console(stderr=True)
        )
        source, spec = setup.train, setup.problem.decomposition
        assert isinstance(source, TokenSource)
        with jax.set_mesh(setup.mesh):
            init = partial(init_state, spec, setup.problem.target.sites, setup.leading)
            state = jax.jit(init, out_shardings=state_shardings(setup.mesh, spec, jax.eval_shape(init)))()
            step = compile_steps(setup, 1)
            held = [source.inputs(number, 1, 1) for number in range(STEPS_PER_ROUND)]

            def in_turn(number: int, source: TokenSource = source) -> Any:
                return source._placed(source.batches.stretch(number, 1), 1)

            def ahead(number: int, source: TokenSource = source) -> Any:
                return source.inputs(number, 1, 1)

            def there(number: int, held: list[Any] = held) -> Any:
                return held[number % STEPS_PER_ROUND]

            rounds = []
            number = STEPS_PER_ROUND
            for _ in range(options.rounds + 1):
                seconds = []
                for inputs in (there, ahead, in_turn):
                    if inputs is ahead:  # as if no other side had been between
                        inputs(number)
                        number += 1
                    start = time.perf_counter()
                    for _ in range(STEPS_PER_ROUND):
                        state, rows = step(state, setup.weights, inputs(number), np.int32(1))
                        number += 1
                    jax.block_until_ready(rows)
                    seconds.append((time.perf_counter() - start) / STEPS_PER_ROUND)
                rounds.append(seconds)
        middle = statistics.median(there for there, _, _ in rounds[1:])
        ratios = [statistics.median(row[side] / row[0] for row in rounds[1:]) for side in (1, 2)]
        print(f"| {kind} | {1e3 * middle:.0f} ms | {ratios[0]:.3f} | {ratios[1]:.3f} |", flush=True)
        shutil.rmtree(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="made, and removed at the end")
    parser.add_argument("--gib", type=float, default=2.0, help="of token ids as int32")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--batches", type=int, default=30, help="of Parquet that are read in turn")
    parser.add_argument("--more", type=int, default=12, help="times as many where it is quicker")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--only-step", action="store_true")
    options = parser.parse_args()
    options.folder.mkdir(parents=True)
    try:
        if not options.only_step:
            reading(options)
        stepping(options)
    finally:
        shutil.rmtree(options.folder)


if __name__ == "__main__":
    main()
