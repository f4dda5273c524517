"""Checks data that a run has not named before their rows are taken for its text."""

from pathlib import Path

import numpy as np

from param_decomp_lab.data.meta import META_FILE, DataMeta
from param_decomp_lab.data.row_range import TokenRows
from param_decomp_lab.data.text import TokenText
from param_decomp_lab.data.token_data import find_shards
from param_decomp_lab.data.tokenizers import NO_TOKENIZER
from param_decomp_lab.errors import UserError
from param_decomp_lab.setup.bos import rows_begin_with
from param_decomp_lab.setup.resolved import ResolvedConfig

ROWS_COMPARED = 512
"""Rows whose token ids are compared. Another tokenizer shows in a few; special tokens that no row has may differ."""


def refuse_other_tokens(source: Path, rows: TokenRows, text: TokenText, resolved: ResolvedConfig) -> None:
    """Raises UserError if token ids of ``rows`` stand for other text than in a run, or rows begin with another BOS, or
    with one where the run's do not.

    ``source``: where ``rows`` come from. ``text``: the run's tokenizer. Ids are compared if ``meta.json`` lies beside
    ``source``, as `pd data tokenize` puts it there: those of the first rows that both tokenizers have. Nothing is said
    about BOS if it is not known how the run's rows begin, because its data are not on this machine.
    """
    shard, theirs = source.resolve(), None
    folder = shard.parent if shard.is_dir() else shard.parent.parent
    meta = DataMeta.read(folder) if (folder / META_FILE).is_file() else None
    if meta is not None and meta.tokenizer != NO_TOKENIZER:
        theirs = TokenText(folder, meta.bos)
        token = theirs.first_difference(text, np.unique(rows.rows(np.arange(min(len(rows), ROWS_COMPARED)))))
        if token is not None:
            raise UserError(
                f"{source}: token {token} is {theirs.tokens([token])[0]!r} there and "
                f"{text.tokens([token])[0]!r} in the run; tokenize the text with the run's tokenizer"
            )
    first = rows_begin_with(rows, theirs or text.with_bos(None if meta is None else meta.bos))
    try:
        own = text.bos if text.bos is not None else rows_begin_with(resolved.train_rows, text)
    except UserError:  # the run's data are not on this machine
        return
    if first != own:
        here, there = (f"with {text.tokens([bos])[0]!r}" if bos is not None else "without BOS" for bos in (first, own))
        raise UserError(
            f"{source}: rows begin {here} and those of the run {there}; tokenize the text "
            f"again (`pd data tokenize --{'no-' if own is None else ''}bos`)"
        )


def trained_on(source: Path, resolved: ResolvedConfig) -> bool | None:
    """Whether any file of ``source`` is one that the run trained on, by its path; None if the run's data are not on
    this machine. Raises UserError if there are no files.
    """
    files = {file.resolve() for file in find_shards(str(source))}
    try:
        own = find_shards(resolved.train_rows.source)
    except UserError:
        return None
    return not files.isdisjoint(file.resolve() for file in own)
