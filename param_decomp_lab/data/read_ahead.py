"""Reads batches before they are needed, on a thread, while the devices compute."""

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int32

from param_decomp_lab.data.batches import Batches

STRETCH_BYTES = 1 << 26
"""Bytes of batches that are read at once if reading a row decodes many others. A row group that several of the batches
need is then decoded once.
"""


@dataclass(frozen=True)
class _Stretch:
    """Batches ``first`` to ``stop - 1``, which are being read."""

    first: int
    stop: int
    rows: "Future[Int32[np.ndarray, 'n local T']]"


class ReadAhead:
    """Gives ``batches`` in order, each read before it is needed. The numbers of the batches do not change.

    An error while a batch is read is raised when that batch is taken.
    """

    def __init__(self, batches: Batches) -> None:
        self._batches = batches
        data = batches.data
        bytes_each = (batches.hi - batches.lo) * data.seq_len * 4
        self._longest = 1 if data.rows_per_read == 1 else max(1, STRETCH_BYTES // bytes_each)
        self._reads: deque[_Stretch] = deque()
        self._thread: ThreadPoolExecutor | None = None

    def take(self, first: int, n: int) -> Int32[np.ndarray, "n local T"]:
        """Returns batches ``first`` to ``first + n - 1``. They were read ahead if they follow those that were taken
        last.
        """
        if not self._reads or not self._reads[0].first <= first <= self._reads[0].stop:
            self._drop()
        found = np.empty((n, self._batches.hi - self._batches.lo, self._batches.data.seq_len), np.int32)
        step = first
        while step < first + n:
            if self._reads and self._reads[0].stop <= step:
                self._reads.popleft()
            if not self._reads:
                self._read(step, first + n - step)
            stretch = self._reads[0]
            stop = min(stretch.stop, first + n)
            found[step - first : stop - first] = stretch.rows.result()[step - stretch.first : stop - stretch.first]
            step = stop
        self._read_on(step, n)
        return found

    def _read_on(self, step: int, n: int) -> None:
        """Starts reading ``n`` batches from ``step`` on, and another stretch besides the one in use."""
        while len(self._reads) < 2 or self._reads[-1].stop < step + n:
            last = self._reads[-1]
            # The first stretches are short, so that nothing waits for a long one.
            self._read(last.stop, min(self._longest, 2 * (last.stop - last.first)))

    def _read(self, first: int, n: int) -> None:
        self._thread = self._thread or ThreadPoolExecutor(1, thread_name_prefix="reads batches")
        self._reads.append(_Stretch(first, first + n, self._thread.submit(self._batches.stretch, first, n)))

    def _drop(self) -> None:
        for stretch in self._reads:
            stretch.rows.cancel()
        self._reads.clear()
