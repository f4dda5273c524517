"""Finds whether the rows of a run's data begin with BOS, the token that begins a text, and whether its target expects
it.

A network that was trained only on texts with BOS may do badly on text without it.
"""

from dataclasses import dataclass
from pathlib import Path

from param_decomp_lab.config.wrapper import DataFolders
from param_decomp_lab.data.meta import META_FILE, DataMeta
from param_decomp_lab.data.row_range import TokenRows
from param_decomp_lab.data.text import TokenText
from param_decomp_lab.data.tokenizers import chosen_bos
from param_decomp_lab.errors import UserError

ROWS_READ = 8
"""How many rows are read if the data do not say whether their rows begin with BOS."""


def text_of_data(folders: DataFolders | None) -> TokenText | None:
    """Returns the tokenizer beside data that `pd data tokenize` or a run made, with `meta.json`; None for other data.
    Its prompts begin with BOS if the data say that rows do. Raises UserError if such data lack the tokenizer.
    """
    if folders is None or not (folders.train.parent / META_FILE).is_file():
        return None
    folder = folders.train.parent
    return TokenText(folder, DataMeta.read(folder).bos)


def find_tokenizer(data: DataFolders | None, target: Path) -> TokenText | None:
    """Returns the tokenizer beside the data if they were tokenized here, else the target's own;
    None if it is missing.
    """
    try:
        return text_of_data(data) or TokenText(target)
    except UserError:
        return None


def rows_begin_with(rows: TokenRows, text: TokenText) -> int | None:
    """Returns the BOS that rows begin with: what their ``meta.json`` says, or else the tokenizer's, if all of the first
    rows begin with it. Raises UserError for damaged rows.
    """
    bos = text.tokenizer.bos
    if text.bos is not None or bos is None:
        return text.bos
    first = rows.rows(range(min(ROWS_READ, len(rows))))[:, 0]
    return bos if (first == bos).all() else None


def data_note(text: TokenText, target: Path | None) -> str | None:
    """Returns a message if the data and the target disagree about BOS, else None. ``text``: the tokenizer of the data.
    ``target``: its folder, if it is on this machine.
    """
    reads = _target_reads(target) or _Reads(text, chosen_bos(text.tokenizer, None), "the tokenizer adds")
    if reads.bos == text.bos:
        return None
    if reads.bos is None:
        assert text.bos is not None
        return (
            f"data: rows begin with {_shown(text, text.bos)}, but {reads.who} no BOS; the target may do "
            "badly on such rows (`pd data tokenize --no-bos`)"
        )
    instead = "" if text.bos is None else f" (but with {_shown(text, text.bos)})"
    return (
        f"data: rows do not begin with {_shown(reads.text, reads.bos)}{instead}, but {reads.who} it; the target "
        "may do badly on such rows (`pd data tokenize --bos`; bos: true in the wrapper where the run tokenizes)"
    )


@dataclass(frozen=True)
class _Reads:
    """What a target was trained on. ``bos``: the id that its texts begin with; None if they begin with no such token.
    ``who``: the source of this, as the beginning of "… it".
    """

    text: TokenText
    bos: int | None
    who: str


def _target_reads(folder: Path | None) -> _Reads | None:
    """Returns what the target was trained on, according to its folder; None if the folder has no tokenizer."""
    try:
        if folder is None:
            return None
        text = TokenText(folder)
        if (folder / META_FILE).is_file():  # made by `pd pretrain`
            return _Reads(text, DataMeta.read(folder).bos, "the target was trained with")
        return _Reads(text, chosen_bos(text.tokenizer, None), "the target's tokenizer adds")
    except UserError:
        return None


def _shown(text: TokenText, token: int) -> str:
    try:
        return text.tokens([token])[0]
    except UserError:  # a tokenizer that cannot say what its ids are
        return f"token {token}"
