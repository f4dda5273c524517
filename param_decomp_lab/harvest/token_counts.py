"""Counts how often each token occurs where a component fires, in memory with spills to Parquet."""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from jaxtyping import Int, UInt64

BUFFER = 1 << 24
"""The number of counts that all sites together keep in memory before these are added up and written."""
COUNT_BITS, TOKEN_BITS = 24, 20
"""Bits of a packed count for the count and for the token; the component has the other 20."""
SCHEMA = pa.schema([("site", pa.int16()), ("component", pa.int32()), ("token", pa.int32()), ("n", pa.int64())])


@dataclass
class TokenCounts:
    """Counts of each pair of a component and a token, for each site; for a toy, of a component and an active feature.

    ``files``: names of the written files, in ``folder``. A file has the counts of one spill, sorted.
    """

    folder: Path
    files: list[str] = field(default_factory=list)
    _waiting: dict[int, list[UInt64[np.ndarray, " n"]]] = field(default_factory=dict)

    @property
    def paths(self) -> list[Path]:
        return [self.folder / file for file in self.files]

    def add(self, site: int, packed: UInt64[np.ndarray, " n"]) -> None:
        """Adds the counts of one block (see `Inputs.counted`). Different sites may be added concurrently."""
        self._waiting.setdefault(site, []).append(packed)

    def spill(self, name: str, *, always: bool = False) -> None:
        """Writes the pending counts to a file of this name, if there are many or ``always`` is set."""
        n = sum(len(packed) for waiting in self._waiting.values() for packed in waiting)
        if n == 0 or not (always or n > BUFFER):
            return
        file = f"{name}.parquet"
        with pq.ParquetWriter(self.folder / file, SCHEMA, compression="zstd") as writer:
            for site in sorted(self._waiting):
                component, token, counts = added_up(np.concatenate(self._waiting.pop(site)))
                columns = np.full(len(counts), site, np.int16), component, token, counts
                writer.write_table(pa.table(list(columns), schema=SCHEMA), row_group_size=1 << 17)
        self.files.append(file)


def pack(
    component: Int[np.ndarray, " n"], token: Int[np.ndarray, " n"], n: Int[np.ndarray, " #n"]
) -> UInt64[np.ndarray, " n"]:
    """Packs a component, a token and a count into one number, because sorting numbers is fast."""
    high = (component.astype(np.uint64) << np.uint64(TOKEN_BITS)) | token.astype(np.uint64)
    return (high << np.uint64(COUNT_BITS)) | n.astype(np.uint64)


def added_up(packed: UInt64[np.ndarray, " n"]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the components, tokens and counts of the distinct pairs, in order."""
    packed.sort()
    pair = packed >> np.uint64(COUNT_BITS)
    # A site that fires nowhere, such as that of an unused expert, has no pairs, so there is no first one.
    starts = np.flatnonzero(np.concatenate([[True], pair[1:] != pair[:-1]])[: len(pair)])
    n = np.add.reduceat((packed & np.uint64((1 << COUNT_BITS) - 1)).astype(np.int64), starts)
    pair = pair[starts]
    token = pair & np.uint64((1 << TOKEN_BITS) - 1)
    return (pair >> np.uint64(TOKEN_BITS)).astype(np.int32), token.astype(np.int32), n
