"""Finds the components of a site that fire on some tokens, ordered by the share of their firings on these."""

from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import Float, Int

from param_decomp_lab.errors import UserError
from param_decomp_lab.harvest.files.tables import RARE_TOKEN
from param_decomp_lab.safe_io.files import regular_file
from param_decomp_lab.safe_io.printable import printable

MATCHED_SHARE = 0.02
"""A component matches a token that accounts for this share of its firings, and is more frequent there than elsewhere.
"""
TOKENS_MATCHED = 200
ENGINE_MEMORY = "200MB"


def matching_tokens(vocabulary: pa.Array | None, n_inputs: int, search: str) -> Int[np.ndarray, " n"]:
    """Returns the tokens that equal this text, ignoring case and surrounding spaces; if there are none, those that
    contain it. Without a vocabulary, returns the input of this number.
    """
    if vocabulary is None:
        return np.asarray([int(search)] if search.isdecimal() and int(search) < n_inputs else [], int)
    words = pc.utf8_lower(vocabulary)
    equal = pc.equal(pc.utf8_trim_whitespace(words), pa.scalar(search.lower()))
    found = np.flatnonzero(equal.to_numpy(zero_copy_only=False))
    if not len(found):
        found = np.flatnonzero(pc.match_substring(words, search.lower()).to_numpy(zero_copy_only=False))
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
    if not len(tokens):
        return found
    path = regular_file(file, "the tokens")
    try:
        # Each search has its own connection, because one that is still open when Python exits is reported as a leak.
        with duckdb.connect(config={"memory_limit": ENGINE_MEMORY, "threads": 2}) as engine:
            query = "SELECT component, token, n FROM read_parquet(?) WHERE token = ANY(?)"
            rows = engine.execute(query, [str(path), tokens.tolist()]).fetchnumpy()
    except duckdb.Error as error:
        why = printable(str(error), 300)
        raise UserError(f"{path} cannot be read ({why}): make the harvest again") from error
    component, n = rows["component"], rows["n"].astype(float)
    unknown = component[(component < 0) | (component >= len(found))]
    if len(unknown):
        raise UserError(
            f"{path} is damaged: it has component {unknown[0]}, and its site has {len(found):,} of them: make the "
            "harvest again"
        )
    total = input_totals[rows["token"]]
    share = n / np.maximum(firings[component], 1)
    lift = share * n_positions / np.maximum(total, 1)
    good = (share >= MATCHED_SHARE) & (lift > 1) & (total >= RARE_TOKEN)
    np.add.at(found, component[good], share[good] * np.log(lift[good]))
    return found
