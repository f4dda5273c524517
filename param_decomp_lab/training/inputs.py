"""What a run is given beside its configuration, target and data, told apart by fingerprints.

A folder that the configuration names may hold something else tomorrow, and may lie elsewhere on another machine. So
what is in it decides whether a run goes on with what it was started with.
"""

import hashlib
from collections.abc import Mapping

from param_decomp_lab.checkpoints.fingerprints import fingerprints, together
from param_decomp_lab.checkpoints.store import flatten
from param_decomp_lab.data.row_range import TokenRows
from param_decomp_lab.data.sources import TokenSource
from param_decomp_lab.processes.group import ALONE, Processes
from param_decomp_lab.setup import Setup


def fingerprints_of_inputs(setup: Setup, processes: Processes = ALONE) -> dict[str, str]:
    """Of the target's weights, bit by bit as they are held, and of the token data. A toy draws its data.

    To be asked in all processes.
    """
    found = {"target": together(fingerprints(flatten(setup.weights)))}
    for what, source in (("data.train", setup.train), ("data.eval", setup.eval)):
        if isinstance(source, TokenSource):
            with processes.together():
                value = _of_tokens(source.batches.data) if processes.first else ""
            found[what] = processes.from_first(value)
    return found


def _of_tokens(data: TokenRows) -> str:
    """The number of rows, their length, and three of them: each costs the decoding of a group of rows."""
    some = data.rows([0, len(data) // 2, len(data) - 1])
    return hashlib.sha256(f"{len(data)} {data.seq_len} ".encode() + some.tobytes()).hexdigest()[:16]


def changed_inputs(saved: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """What of ``saved`` is not the same ``now``."""
    return [what for what, value in saved.items() if now.get(what) != value]
