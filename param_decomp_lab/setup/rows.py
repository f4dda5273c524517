"""The rows of tokens of a run: what it is trained on, what is held out, and batches of them."""

from jax.sharding import Mesh

from param_decomp_jax.ci import longest_row
from param_decomp_jax.sharding.placement import process_batch_rows
from param_decomp_jax.targets.architecture import FeatureInputs, TokenInputs
from param_decomp_lab.config.method_schema import LanguageModelData, LanguageModelFile
from param_decomp_lab.data.batches import Batches
from param_decomp_lab.data.row_range import RowRange, TokenRows
from param_decomp_lab.data.sources import TokenSource
from param_decomp_lab.data.token_data import TokenData
from param_decomp_lab.errors import UserError
from param_decomp_lab.setup.named_text import not_made
from param_decomp_lab.setup.resolved import ResolvedConfig


def evaluation_source(resolved: ResolvedConfig, rows: TokenRows, mesh: Mesh) -> TokenSource:
    """The evaluation's batches of held-out ``rows``. UserError for too few of them."""
    method = resolved.config.method
    assert method.eval is not None
    source = token_source(rows, method.eval.batch_size, method.pd.seed, mesh)
    wanted = method.eval.n_steps * method.eval.batch_size
    if wanted > len(rows):
        raise UserError(
            f"{rows.source} has {len(rows)} rows, an evaluation reads {wanted} (eval.n_steps x "
            "eval.batch_size); give more held-out data or evaluate on less"
        )
    return source


def check_rows(resolved: ResolvedConfig, inputs: TokenInputs | FeatureInputs, data: TokenRows) -> None:
    """UserError for rows that the target cannot take, or of another length than configured."""
    method = resolved.config.method
    assert isinstance(method, LanguageModelFile)
    assert isinstance(inputs, TokenInputs)
    data.check(inputs.vocab_size, longest_row(resolved.decomposition.ci))
    if data.seq_len != method.data.max_seq_len:
        raise UserError(
            f"{data.source}: rows have {data.seq_len} tokens, but data.max_seq_len is {method.data.max_seq_len}; "
            "make the two equal (`pd data tokenize --seq-len`)"
        )


def held_out_rows(resolved: ResolvedConfig) -> TokenRows:
    """What a run keeps for its evaluation. UserError where it keeps nothing apart."""
    folders = resolved.config.wrapper.data
    if folders is not None:
        return TokenData(folders.eval)
    held_out = find_rows(resolved)[1]
    if held_out is None:
        raise UserError(
            "the run had no eval, so it trained on all of its data; give others: --set 'data={train: FOLDER, eval: "
            "FOLDER}'"
        )
    return held_out


def training_rows(resolved: ResolvedConfig) -> TokenRows:
    """What a run is trained on."""
    folders = resolved.config.wrapper.data
    return TokenData(folders.train) if folders is not None else find_rows(resolved)[0]


def token_source(rows: TokenRows, batch_size: int, seed: int, mesh: Mesh, *, reshuffle: bool = True) -> TokenSource:
    """Batches of which this process reads what its devices hold."""
    lo, hi = process_batch_rows(mesh, batch_size)
    batches = Batches(rows, batch_size, seed, reshuffle=reshuffle, lo=lo, hi=hi)
    return TokenSource(batch_size, rows.seq_len, mesh, batches)


def find_rows(resolved: ResolvedConfig) -> tuple[TokenRows, TokenRows | None]:
    """The rows that a run is trained on, and those that are held out, None without an evaluation."""
    method = resolved.config.method
    data, settings, folders = method.data, method.eval, resolved.data
    assert isinstance(data, LanguageModelData)
    if resolved.text is not None and not resolved.text.is_made:
        raise not_made(resolved.text)
    if folders is not None:
        if folders.train.resolve() == folders.eval.resolve():
            raise UserError(f"data.train and data.eval are the same folder ({folders.train}); evaluate on other rows")
        return TokenData(folders.train), TokenData(folders.eval) if settings is not None else None
    assert data.data_files is not None
    rows = TokenData(data.data_files)
    if settings is None:
        return rows, None
    # One set of files for both: the last rows are held out, as many as an evaluation reads.
    held = settings.batch_size * settings.n_steps
    if len(rows) - held < method.pd.batch_size:
        raise UserError(f"{rows.source} has {len(rows)} rows; {held} are held out for evaluation and too few remain")
    return RowRange(rows, 0, len(rows) - held), RowRange(rows, len(rows) - held, len(rows))
