"""BOS, the token that begins a text: whether the rows of a run's data begin with it, and whether its target expects it.

A network that was trained on texts that all begin with BOS may do badly on text without it.
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
"""How many rows are read where the data do not say whether their rows begin with BOS."""


def text_of_data(folders: DataFolders | None) -> TokenText | None:
    """The tokenizer beside data that `pd data tokenize` or a run made, with `meta.json`; None for other data. Its
    prompts begin with BOS if the data say that rows do. Raises UserError where there is none."""
    if folders is None or not (folders.train.parent / META_FILE).is_file():
        return None
    folder = folders.train.parent
    return TokenText(folder, DataMeta.read(folder).bos)


def find_tokenizer(data: DataFolders | None, target: Path) -> TokenText | None:
    """The tokenizer beside the data if they were tokenized here, else the target's own; None where it is missing."""
    try:
        return text_of_data(data) or TokenText(target)
    except UserError:
        return None


def rows_begin_with(rows: TokenRows, text: TokenText) -> int | None:
    """The BOS that rows begin with: what their ``meta.json`` says, or else the tokenizer's, if the first rows all begin
    with that. Raises UserError for rows that are damaged."""
    bos = text.tokenizer.bos
    if text.bos is not None or bos is None:
        return text.bos
    first = rows.rows(range(min(ROWS_READ, len(rows))))[:, 0]
    return bos if (first == bos).all() else None


def data_note(text: TokenText, target: Path | None) -> str | None:
    """What to tell if the data and the target disagree about BOS, else None. ``text``: of the data. ``target``: its
    folder, if that is on this machine."""
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
    """What a target was trained on. ``bos``: the id that its texts begin with, None for none. ``who``: says so, as the
    beginning of "… it"."""

    text: TokenText
    bos: int | None
    who: str


def _target_reads(folder: Path | None) -> _Reads | None:
    """What the target was trained on, as far as its folder says; None where that has no tokenizer."""
    try:
        if folder is None:
            return None
        text = TokenText(folder)
        if (folder / META_FILE).is_file():  # `pd pretrain` has made it
            return _Reads(text, DataMeta.read(folder).bos, "the target was trained with")
        return _Reads(text, chosen_bos(text.tokenizer, None), "the target's tokenizer adds")
    except UserError:
        return None


def _shown(text: TokenText, token: int) -> str:
    try:
        return text.tokens([token])[0]
    except UserError:  # a tokenizer that cannot say what its ids are
        return f"token {token}"
