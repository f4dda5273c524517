"""Checks the rows of tokens of a run, holds some out for its evaluation, and makes batches of them."""

from jax.sharding import Mesh

from param_decomp_jax.ci import longest_row
from param_decomp_jax.method.step import Problem
from param_decomp_jax.sharding.placement import process_batch_rows
from param_decomp_jax.targets.architecture import TokenInputs
from param_decomp_lab.config.checks import LONGEST
from param_decomp_lab.config.method_schema import EvalConfig
from param_decomp_lab.config.wrapper import DataFolders
from param_decomp_lab.data.batches import Batches
from param_decomp_lab.data.row_range import RowRange, TokenRows
from param_decomp_lab.data.sources import TokenSource
from param_decomp_lab.errors import UserError


def evaluation_source(rows: TokenRows, settings: EvalConfig, seed: int, mesh: Mesh) -> TokenSource:
    """Returns the evaluation's batches of held-out ``rows``. Raises UserError if there are too few."""
    source = token_source(rows, settings.batch_size, seed, mesh)
    wanted = settings.n_steps * settings.batch_size
    if wanted > len(rows):
        raise UserError(
            f"{rows.source} has {len(rows)} rows, an evaluation reads {wanted} (eval.n_steps x "
            "eval.batch_size); give more held-out data or evaluate on less"
        )
    return source


def check_rows(rows: TokenRows, problem: Problem, seq_len: int) -> None:
    """Raises UserError for rows that the target or the CI function cannot take, or whose length is not ``seq_len``."""
    inputs = problem.target.architecture.inputs
    assert isinstance(inputs, TokenInputs)
    rows.check(inputs.vocab_size, longest_row(problem.decomposition.ci), LONGEST)
    if rows.seq_len != seq_len:
        raise UserError(
            f"{rows.source}: rows have {rows.seq_len} tokens, but data.max_seq_len is {seq_len}; "
            "make the two equal (`pd data tokenize --seq-len`)"
        )


def token_source(rows: TokenRows, batch_size: int, seed: int, mesh: Mesh, *, reshuffle: bool = True) -> TokenSource:
    """Returns batches, of each of which this process reads only the rows of its devices."""
    lo, hi = process_batch_rows(mesh, batch_size)
    batches = Batches(rows, batch_size, seed, reshuffle=reshuffle, lo=lo, hi=hi)
    return TokenSource(batch_size, rows.seq_len, mesh, batches)


def refuse_one_folder(folders: DataFolders) -> None:
    """Raises UserError if a run would be evaluated on the rows that it is trained on."""
    if folders.train.resolve() == folders.eval.resolve():
        raise UserError(f"data.train and data.eval are the same folder ({folders.train}); evaluate on other rows")


def split_rows(rows: TokenRows, held: int, batch_size: int) -> tuple[RowRange, RowRange]:
    """Returns all but the last ``held`` rows, and those last rows. Raises UserError if less than a batch remains to
    train on.
    """
    remaining = len(rows) - held
    if held and remaining < batch_size:
        raise UserError(f"{rows.source} has {len(rows)} rows; {held} are held out for evaluation and too few remain")
    return RowRange(rows, 0, remaining), RowRange(rows, remaining, len(rows))
