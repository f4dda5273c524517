"""Checks the token data of a configuration using the footers of its shards, and what its rows begin with."""

from pathlib import Path

from param_decomp_lab.config import RunConfig
from param_decomp_lab.config.method_schema import LanguageModelFile
from param_decomp_lab.data.text import TokenText
from param_decomp_lab.data.token_data import TokenData, count_rows
from param_decomp_lab.errors import UserError
from param_decomp_lab.setup.bos import data_note, made_here, rows_begin_with, text_of_data
from param_decomp_lab.setup.named_text import named_text
from param_decomp_lab.setup.target_source import target_folder
from param_decomp_lab.ui.descriptions import shown_path


def check_data(config: RunConfig) -> tuple[str, ...]:
    """Lists data missing on this machine. UserError for data that does not fit the configuration."""
    method, replaced = config.method, config.wrapper.data
    if not isinstance(method, LanguageModelFile):
        return ()
    wanted = 0 if method.eval is None else method.eval.n_steps * method.eval.batch_size
    text = named_text(config)
    if text is not None:
        if not text.is_made:
            text.tokenizer()  # which may lack a BOS that is asked for
            return text.missing()
        replaced = text.folders
    if replaced is None:
        assert method.data.data_files is not None
        return _shards(config, method.data.data_files, method.pd.batch_size + wanted, "training and evaluation")
    if replaced.train.resolve() == replaced.eval.resolve():
        raise UserError(f"data.train and data.eval are the same folder ({replaced.train}); evaluate on other rows")
    missing = _shards(config, replaced.train, method.pd.batch_size, "one batch")
    return missing if method.eval is None else missing + _shards(config, replaced.eval, wanted, "an evaluation")


def data_notes(config: RunConfig) -> tuple[str, ...]:
    """What to tell of data and target that are on this machine and do not agree about BOS."""
    if not isinstance(config.method, LanguageModelFile):
        return ()
    try:
        target = target_folder(config)
    except UserError:
        target = None
    try:
        text = _text(config)
    except UserError:  # of data that are missing or damaged; `check_data` says so
        return ()
    note = None if text is None else data_note(text, target)
    return () if note is None else (note,)


def _text(config: RunConfig) -> TokenText | None:
    """The tokenizer of text that was or will be tokenized here, with the BOS that rows begin with; None of other data,
    of which one row may take long to read."""
    named, folders = named_text(config), made_here(config)
    if named is not None and not named.is_made:
        return named.tokenizer()
    if folders is None:
        return None
    text = text_of_data(folders)
    text.bos = rows_begin_with(TokenData(folders.train), text)
    return text


def _shards(config: RunConfig, source: str | Path, wanted: int, what_for: str) -> tuple[str, ...]:
    method = config.method
    assert isinstance(method, LanguageModelFile)
    if isinstance(source, Path) and not source.exists():
        return (f"data: {shown_path(source)}",)
    rows, length = count_rows(source)
    if rows < wanted:
        raise UserError(f"{source} has {rows} rows; {what_for} takes {wanted}")
    if length not in (None, method.data.max_seq_len):
        raise UserError(
            f"{source}: rows have {length} tokens, but data.max_seq_len is {method.data.max_seq_len}; "
            "make the two equal (`pd data tokenize --seq-len`)"
        )
    return ()
