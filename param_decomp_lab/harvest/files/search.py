"""Finds the components of a site that fire on some tokens, ordered by the share of their firings on these."""

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from jaxtyping import Bool, Float, Int

from param_decomp_lab.data.token_names import visible
from param_decomp_lab.errors import UserError
from param_decomp_lab.harvest.files.tables import RARE_TOKEN
from param_decomp_lab.safe_io.files import regular_file
from param_decomp_lab.safe_io.printable import printable

MATCHED_SHARE = 0.02
"""A component matches a token that accounts for this share of its firings, and is more frequent there than elsewhere.
"""
TOKENS_MATCHED = 200
ROWS_AT_ONCE = 1 << 17


def trimmed(search: str) -> str:
    """Returns a search without the blanks around it. If it has nothing else, those that a keyboard does not type, such
    as a no-break space, are what is searched for.
    """
    return search.strip() or search.strip(" \t\r\n")


def matching_tokens(vocabulary: pa.Array | None, n_inputs: int, search: str) -> Int[np.ndarray, " n"]:
    """Returns the tokens that equal this text, ignoring case and surrounding spaces; if there are none, those that
    contain it. What does not show may be given as it is, or as the escape in the tokens' names. Without a vocabulary,
    returns the input of this number.
    """
    if vocabulary is None:
        return np.asarray([int(search)] if search.isdecimal() and int(search) < n_inputs else [], int)
    words, wanted = pc.utf8_lower(vocabulary), visible(search).lower()
    equal = pc.equal(pc.utf8_trim_whitespace(words), pa.scalar(wanted))
    found = np.flatnonzero(equal.to_numpy(zero_copy_only=False))
    if not len(found):
        found = np.flatnonzero(pc.match_substring(words, wanted).to_numpy(zero_copy_only=False))
    return found[:TOKENS_MATCHED]


def match_by_tokens(
    file: Path,
    tokens: Int[np.ndarray, " n"],
    firings: Int[np.ndarray, " C"],
    input_totals: Int[np.ndarray, " inputs"],
    n_positions: int,
) -> Float[np.ndarray, " C"]:
    """Returns how well each component of a site matches these tokens: the share of its firings that are on them,
    weighted by their lift; 0 if it does not match.

    ``file``: the site's table of tokens. ``firings``: of each component. ``input_totals``: how often each input occurs.
    Raises UserError if the file is damaged.
    """
    found = np.zeros(len(firings))
    if len(tokens):
        wanted = np.zeros(len(input_totals), bool)
        wanted[tokens[tokens < len(wanted)]] = True
        _, component, value = _all_fits(file, firings, input_totals, n_positions, wanted)
        np.add.at(found, component, value)
    return found


def _fits(
    path: Path,
    component: Int[np.ndarray, " n"],
    token: Int[np.ndarray, " n"],
    n: Int[np.ndarray, " n"],
    firings: Int[np.ndarray, " C"],
    input_totals: Int[np.ndarray, " inputs"],
    n_positions: int,
) -> tuple[Int[np.ndarray, " n"], Float[np.ndarray, " n"], Bool[np.ndarray, " n"]]:
    """Rows of a table of tokens: the components, how well each fits its token, and whether it does."""
    unknown = component[(component < 0) | (component >= len(firings))]
    if len(unknown):
        raise UserError(
            f"{path} is damaged: it has component {unknown[0]}, and its site has {len(firings):,} of them: make the "
            "harvest again"
        )
    total = input_totals[token]
    share = n.astype(float) / np.maximum(firings[component], 1)
    lift = share * n_positions / np.maximum(total, 1)
    good = (share >= MATCHED_SHARE) & (lift > 1) & (total >= RARE_TOKEN)
    return component, share * np.log(np.where(good, lift, 1)), good


class TokenIndex:
    """Which components of all sites fit a token, in a file without a name that goes with this object: reading all
    tables of tokens takes seconds for a million components, looking into this some milliseconds.

    ``sites``: their tables, and the firings of their components. The rest is as in `match_by_tokens`, and so is what is
    found. Raises UserError if a table is damaged, or if there is no room for the file.
    """

    def __init__(
        self,
        sites: Sequence[tuple[Path, Int[np.ndarray, " C"]]],
        input_totals: Int[np.ndarray, " inputs"],
        n_positions: int,
    ) -> None:
        self._sites: list[tuple[int, int]] = []  # where each begins in the file, and how many tokens it has
        first = at = 0
        try:
            self._file = tempfile.TemporaryFile(prefix="pd-browse-")  # noqa: SIM115 (closed with this object)
            for file, firings in sites:
                token, component, value = _all_fits(file, firings, input_totals, n_positions)
                order = np.argsort(token, kind="stable")
                names, starts = np.unique(token[order], return_index=True)
                entries = np.empty(len(order), _ENTRY)
                entries["component"], entries["value"] = component[order] + first, value[order]
                ends = np.append(starts, len(order)).astype(np.int64)
                written = names.astype(np.int32).tobytes() + ends.tobytes() + entries.tobytes()
                self._file.write(written)
                self._sites.append((at, len(names)))
                at, first = at + len(written), first + len(firings)
            self._file.flush()
        except OSError as error:
            raise UserError(f"a search needs room in {_temporary_folder()}: {error.strerror or error}") from error

    def find(self, tokens: Int[np.ndarray, " n"]) -> tuple[Int[np.ndarray, " m"], Float[np.ndarray, " m"]]:
        """Numbers, through all sites, of the components that fit some of these tokens, ascending, and how well."""
        descriptor, found = self._file.fileno(), [np.zeros(0, _ENTRY)]
        for at, n in self._sites:
            names = np.frombuffer(os.pread(descriptor, 4 * n, at), np.int32)
            places = np.flatnonzero(np.isin(names, tokens)).tolist()
            if not places:
                continue
            ends_at = at + 4 * n
            ends = np.frombuffer(os.pread(descriptor, 8 * (n + 1), ends_at), np.int64)
            entries_at = ends_at + ends.nbytes
            for k in places:
                start, stop = ends[k : k + 2].tolist()
                part = os.pread(descriptor, (stop - start) * _ENTRY.itemsize, entries_at + start * _ENTRY.itemsize)
                found.append(np.frombuffer(part, _ENTRY))
        every = np.concatenate(found)
        numbers, place = np.unique(every["component"], return_inverse=True)
        return numbers, np.bincount(place, every["value"], len(numbers))


def _temporary_folder() -> str:
    try:
        return tempfile.gettempdir()
    except OSError:  # there is none that can be written
        return "a temporary folder"


_ENTRY = np.dtype([("component", np.int32), ("value", np.float64)])


def _all_fits(
    file: Path,
    firings: Int[np.ndarray, " C"],
    input_totals: Int[np.ndarray, " inputs"],
    n_positions: int,
    wanted: Bool[np.ndarray, " inputs"] | None = None,
) -> tuple[Int[np.ndarray, " n"], Int[np.ndarray, " n"], Float[np.ndarray, " n"]]:
    """Returns tokens, components and how well they fit, of all rows of a table that do. ``wanted``: whether a token
    counts; by default all do.
    """
    found: list[tuple[np.ndarray, ...]] = [(np.zeros(0, np.int32), np.zeros(0, np.int32), np.zeros(0))]
    path = regular_file(file, "the tokens")
    try:
        with pq.ParquetFile(path) as table:
            for batch in table.iter_batches(ROWS_AT_ONCE, columns=["component", "token", "n"], use_threads=False):
                component, token, n = (batch[name].to_numpy() for name in ("component", "token", "n"))
                if len(token) and not 0 <= token.min() <= token.max() < len(input_totals):
                    raise ValueError(f"tokens {token.min()} to {token.max()}")
                if wanted is not None:
                    at = np.flatnonzero(wanted[token])
                    component, token, n = component[at], token[at], n[at]
                _, value, good = _fits(path, component, token, n, firings, input_totals, n_positions)
                found.append((token[good], component[good], value[good]))
    except (OSError, pa.ArrowException, LookupError, ValueError, TypeError, MemoryError, OverflowError) as error:
        raise UserError(f"{path} cannot be read ({printable(str(error), 300)}): make the harvest again") from error
    token, component, value = (np.concatenate(part) for part in zip(*found, strict=True))
    return token, component, value
