"""Reading batches ahead: the same batches, whatever is read with them, and the same errors."""

import threading
import time

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from param_decomp_lab.data import parquet_rows, read_ahead
from param_decomp_lab.data.arrow_rows import ArrowShard
from param_decomp_lab.data.batches import Batches
from param_decomp_lab.data.read_ahead import ReadAhead
from param_decomp_lab.data.row_range import RowRange
from param_decomp_lab.data.token_data import TokenData
from param_decomp_lab.errors import UserError

B, T = 3, 4


def data_of(folder, kind, n_rows=40):
    """Rows whose tokens are their number."""
    folder.mkdir(exist_ok=True)
    ids = np.repeat(np.arange(n_rows), T).reshape(n_rows, T).astype(np.int32)
    if kind == "parquet":
        column = pa.FixedSizeListArray.from_arrays(pa.array(ids.ravel()), T)
        settings = {"compression": "none", "use_dictionary": False, "write_page_checksum": True}
        pq.write_table(pa.table({"input_ids": column}), folder / "a.parquet", row_group_size=16, **settings)
        return TokenData(folder)
    for part in range(2):
        shard = ArrowShard(folder / f"part-{part}.arrow", T, 256)
        for rows in np.array_split(ids[part * n_rows // 2 : (part + 1) * n_rows // 2], 3):
            shard.write(rows)
        shard.close()
    return TokenData(folder)


@pytest.fixture(scope="module", params=["arrow", "parquet", "large parquet"])
def data(request, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "large parquet":
            patch.setattr(parquet_rows, "CACHE_BYTES", 16 * T * 4)
        kind = request.param.split()[-1]
        return data_of(tmp_path_factory.mktemp(kind) / "rows", kind)


@given(takes=st.lists(st.tuples(st.integers(0, 60), st.integers(1, 5), st.integers(1, 6)), min_size=1, max_size=4))
@settings(max_examples=40)
def test_batches_are_those_of_their_numbers(data, takes):
    """Runs of steps, each begun anywhere: a run that is resumed, a dispatch of several steps."""
    batches = Batches(data, B, seed=5)
    ahead = ReadAhead(batches)
    for first, n, times in takes:
        for step in range(first, first + n * times, n):
            found = ahead.take(step, n)
            np.testing.assert_array_equal(found, [batches[number] for number in range(step, step + n)])


class Slow:
    """Rows that are read when they are let."""

    source, seq_len = "slow", T

    def __init__(self, rows_per_read):
        self.rows_per_read, self.let, self.reads = rows_per_read, threading.Semaphore(0), []

    def __len__(self):
        return 1000

    def rows(self, ids):
        assert self.let.acquire(timeout=60)
        self.reads.append(len(ids))
        return np.repeat(np.asarray(ids, np.int32)[:, None], T, axis=1)


def wait_until(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


def test_the_next_batch_is_read_before_it_is_asked_for():
    data = Slow(rows_per_read=1)
    ahead = ReadAhead(Batches(data, B, seed=0))
    data.let.release()
    ahead.take(0, 1)
    data.let.release()
    wait_until(lambda: len(data.reads) == 2)  # nobody has asked
    ahead.take(1, 1)  # would wait for ever
    data.let.release(100)  # the thread is waited for when Python exits


def test_costly_rows_are_read_many_batches_at_once(monkeypatch):
    monkeypatch.setattr(read_ahead, "STRETCH_BYTES", 10 * B * T * 4)
    data = Slow(rows_per_read=256)
    ahead = ReadAhead(Batches(data, B, seed=0))
    data.let.release(100)
    for step in range(40):
        ahead.take(step, 1)
    assert [n // B for n in data.reads[:7]] == [1, 2, 4, 8, 10, 10, 10]


@pytest.mark.parametrize("kind", ["arrow", "parquet"])
def test_what_is_damaged_is_said_where_it_is_needed(tmp_path, kind):
    data = data_of(tmp_path / "rows", kind)
    batches = Batches(data, B, seed=1)
    file = next((tmp_path / "rows").iterdir())
    content = bytearray(file.read_bytes())
    place = content.index(bytes([19, 0, 0, 0] * T) if kind == "parquet" else bytes([19] * T))
    content[place] ^= 1
    file.write_bytes(content)
    first = next(step for step in range(40) if 19 in batches.rows(step))
    ahead = ReadAhead(batches)
    if kind == "arrow":  # a row by itself; a Parquet file's has its group with it
        for step in range(first):
            np.testing.assert_array_equal(ahead.take(step, 1)[0], batches[step])
        for _ in range(2):
            with pytest.raises(UserError, match=r"part-0\.arrow, row 19: its tokens are not those that were written"):
                ahead.take(first, 1)
        return
    with pytest.raises(UserError, match=r"a\.parquet"):
        [ahead.take(step, 1) for step in range(first + 1)]


def test_the_first_epoch_s_order_for_all(data):
    one = Batches(data, 4, seed=2, reshuffle=False)
    for step in range(10):
        np.testing.assert_array_equal(one[step], one[step + 10])
        np.testing.assert_array_equal(one[step], Batches(data, 4, seed=2)[step])
    assert not np.array_equal(Batches(data, 4, seed=2)[0], Batches(data, 4, seed=2)[10])


def test_what_a_row_costs(tmp_path, monkeypatch):
    assert data_of(tmp_path / "a", "arrow").rows_per_read == 1
    assert data_of(tmp_path / "b", "parquet").rows_per_read == 1  # all of it stays in memory, decoded
    monkeypatch.setattr(parquet_rows, "CACHE_BYTES", 16 * T * 4)
    assert RowRange(data_of(tmp_path / "c", "parquet"), 3, 9).rows_per_read == 16
