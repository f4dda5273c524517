"""Token data of a configuration, as far as the footers of its shards tell."""

from pathlib import Path

from param_decomp_lab.check.words import shown_path
from param_decomp_lab.config import RunConfig
from param_decomp_lab.config.torch_schema import LanguageModelFile
from param_decomp_lab.data.token_data import count_rows
from param_decomp_lab.errors import UserError


def check_data(config: RunConfig) -> tuple[str, ...]:
    """What is missing on this machine. UserError for data that is there and does not fit."""
    torch, replaced = config.torch, config.wrapper.data
    if not isinstance(torch, LanguageModelFile):
        return ()
    wanted = 0 if torch.eval is None else torch.eval.n_steps * torch.eval.batch_size
    if replaced is None:
        assert torch.data.data_files is not None
        return _shards(config, torch.data.data_files, torch.pd.batch_size + wanted, "training and evaluation")
    if replaced.train.resolve() == replaced.eval.resolve():
        raise UserError(f"data.train and data.eval are the same folder ({replaced.train}); evaluate on other rows")
    missing = _shards(config, replaced.train, torch.pd.batch_size, "one batch")
    return missing if torch.eval is None else missing + _shards(config, replaced.eval, wanted, "an evaluation")


def _shards(config: RunConfig, source: str | Path, wanted: int, what_for: str) -> tuple[str, ...]:
    torch = config.torch
    assert isinstance(torch, LanguageModelFile)
    if isinstance(source, Path) and not source.exists():
        return (f"data: {shown_path(source)}",)
    rows, length = count_rows(source)
    if rows < wanted:
        raise UserError(f"{source} has {rows} rows; {what_for} takes {wanted}")
    if length not in (None, torch.data.max_seq_len):
        raise UserError(
            f"{source}: rows have {length} tokens, but data.max_seq_len is {torch.data.max_seq_len}; "
            "make the two equal (`pd data tokenize --seq-len`)"
        )
    return ()
