"""Makes the batches of a language model from its rows of tokens, which are tokenized first if the configuration names
text.
"""

from pathlib import Path

from jax.sharding import Mesh
from rich.console import Console

from param_decomp_jax.method.step import Problem
from param_decomp_lab.config.method_schema import LanguageModelFile
from param_decomp_lab.data.sources import TokenSource
from param_decomp_lab.data.text import TokenText
from param_decomp_lab.processes.group import Processes
from param_decomp_lab.setup.bos import data_note, find_tokenizer, rows_begin_with
from param_decomp_lab.setup.resolved import ResolvedConfig
from param_decomp_lab.setup.rows import check_rows, evaluation_source, refuse_one_folder, token_source
from param_decomp_lab.ui.warnings import print_warnings


def token_batches(
    resolved: ResolvedConfig, problem: Problem, target: Path, mesh: Mesh, console: Console, processes: Processes
) -> tuple[TokenSource, TokenSource | None, TokenText | None]:
    """Returns batches for training and for the evaluation (None without one), and the tokenizer if there is one.
    ``target``: the folder of the target, which may have the tokenizer.

    Raises UserError for data that do not fit the target or the configuration, and CannotFetch.
    """
    method = resolved.config.method
    assert isinstance(method, LanguageModelFile)
    pd, settings, named = method.pd, method.eval, resolved.text
    if named is not None:
        processes.once_per_node(lambda: named.make(console))
    if resolved.data is not None:
        refuse_one_folder(resolved.data)
    train = resolved.train_rows
    held_out = None if settings is None else resolved.held_out_rows
    for rows in (train, held_out):
        if rows is not None:
            check_rows(rows, problem, method.data.max_seq_len)
    text = find_tokenizer(resolved.data, target)
    if text is not None:
        text.bos = rows_begin_with(train, text)
        note = data_note(text, target)
        print_warnings([] if note is None else [note], console)
    evaluated = None
    if settings is not None and held_out is not None:
        evaluated = evaluation_source(held_out, settings, pd.seed, mesh)
    batches = token_source(train, pd.batch_size, pd.seed, mesh, reshuffle=method.data.shuffle_each_epoch)
    return batches, evaluated, text
