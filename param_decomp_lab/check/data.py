"""Checks the token data of a configuration using the footers of its shards, and what its rows begin with."""

import glob
from pathlib import Path

from param_decomp_lab.config.method_schema import LanguageModelFile
from param_decomp_lab.data.text import TokenText
from param_decomp_lab.data.token_data import count_rows
from param_decomp_lab.errors import UserError
from param_decomp_lab.setup.bos import data_note, rows_begin_with, text_of_data
from param_decomp_lab.setup.resolved import ResolvedConfig
from param_decomp_lab.setup.rows import refuse_one_folder
from param_decomp_lab.setup.target_source import target_folder
from param_decomp_lab.ui.descriptions import shown_path


def check_data(resolved: ResolvedConfig) -> tuple[str, ...]:
    """Lists data missing on this machine. UserError for data that does not fit the configuration."""
    method, text = resolved.config.method, resolved.text
    if not isinstance(method, LanguageModelFile):
        return ()
    wanted = 0 if method.eval is None else method.eval.n_steps * method.eval.batch_size
    if text is not None and not text.is_made:
        text.tokenizer()  # which may lack a BOS that is asked for
        return text.missing()
    replaced = resolved.data
    if replaced is None:
        assert method.data.data_files is not None
        return _shards(method, method.data.data_files, method.pd.batch_size + wanted, "training and evaluation")
    refuse_one_folder(replaced)
    missing = _shards(method, replaced.train, method.pd.batch_size, "one batch")
    return missing if method.eval is None else missing + _shards(method, replaced.eval, wanted, "an evaluation")


def data_notes(resolved: ResolvedConfig) -> tuple[str, ...]:
    """What to tell of data and target that are on this machine and do not agree about BOS."""
    if not isinstance(resolved.config.method, LanguageModelFile):
        return ()
    try:
        target = target_folder(resolved.target)
    except UserError:
        target = None
    try:
        text = _text(resolved)
    except UserError:  # of data that are missing or damaged; `check_data` says so
        return ()
    note = None if text is None else data_note(text, target)
    return () if note is None else (note,)


def _text(resolved: ResolvedConfig) -> TokenText | None:
    """The tokenizer of text that was or will be tokenized here, with the BOS that rows begin with; None of other data,
    of which one row may take long to read."""
    if resolved.text is not None and not resolved.text.is_made:
        return resolved.text.tokenizer()
    text = text_of_data(resolved.data)
    if text is not None:
        text.bos = rows_begin_with(resolved.train_rows, text)
    return text


def _shards(method: LanguageModelFile, source: str | Path, wanted: int, what_for: str) -> tuple[str, ...]:
    if isinstance(source, Path) and not source.exists():
        return (f"data: {shown_path(source)}",)
    if isinstance(source, str) and not (glob.has_magic(folder := str(Path(source).parent)) or Path(folder).is_dir()):
        return (f"data: {source}",)
    rows, length = count_rows(source)
    if rows < wanted:
        raise UserError(f"{source} has {rows} rows; {what_for} takes {wanted}")
    if length not in (None, method.data.max_seq_len):
        raise UserError(
            f"{source}: rows have {length} tokens, but data.max_seq_len is {method.data.max_seq_len}; "
            "make the two equal (`pd data tokenize --seq-len`)"
        )
    return ()
