"""A language model to decompose: its folder, its token data, its tokenizer."""

from jax.sharding import Mesh
from rich.console import Console

from param_decomp_jax.ci import longest_row
from param_decomp_jax.sharding.placement import process_batch_rows
from param_decomp_jax.targets.architecture import Architecture, FeatureInputs, TokenInputs
from param_decomp_lab.config import RunConfig
from param_decomp_lab.config.core_specs import decomposition
from param_decomp_lab.config.method_schema import LanguageModelData, LanguageModelFile
from param_decomp_lab.data.batches import Batches
from param_decomp_lab.data.row_range import RowRange, TokenRows
from param_decomp_lab.data.sources import TokenSource
from param_decomp_lab.data.token_data import TokenData
from param_decomp_lab.errors import UserError
from param_decomp_lab.processes.group import ALONE, Processes
from param_decomp_lab.setup.base import Setup, build_mesh
from param_decomp_lab.setup.bos import data_note, find_tokenizer, rows_begin_with
from param_decomp_lab.setup.named_text import named_text, not_made
from param_decomp_lab.setup.problem import make_problem
from param_decomp_lab.setup.target_source import fetch_target
from param_decomp_lab.ui.warnings import print_warnings
from param_decomp_lab.weights.recorded_target import read_as_recorded
from param_decomp_lab.weights.target_folder import (
    load_target,
    read_architecture,
    stored_head_note,
    weight_shardings,
)


def set_up_language_model(
    config: RunConfig, console: Console, processes: Processes = ALONE, recorded: Architecture | None = None
) -> Setup:
    """Target, weights, data and mesh of a language-model run.

    First a target that is elsewhere is fetched, and text that the schema file names is tokenized.

    Raises UserError for whatever does not fit together; CannotFetch.
    """
    method = config.method
    assert isinstance(method, LanguageModelFile)
    folder = fetch_target(config, console, processes)
    architecture = read_architecture(folder) if recorded is None else read_as_recorded(folder, recorded)
    if (note := stored_head_note(folder, architecture)) is not None:
        print_warnings([note], console)
    problem = make_problem(config, architecture, folder)
    named = named_text(config)
    if named is not None:
        processes.once_per_node(lambda: named.make(console))
    train, held_out = _data(config)
    for data in {id(d): d for d in (train, held_out) if d is not None}.values():
        check_rows(config, architecture.inputs, data)
    text = find_tokenizer(config, folder)
    if text is not None:
        text.bos = rows_begin_with(train, text)
        note = data_note(text, folder)
        print_warnings([] if note is None else [note], console)
    mesh = build_mesh(config)
    evaluated = None if held_out is None else evaluation_source(config, held_out, mesh)
    _, weights = load_target(folder, method.target.weights_dtype, weight_shardings(mesh, problem.target), architecture)
    leading = method.pd.batch_size, train.seq_len
    return Setup(
        problem=problem,
        weights=weights,
        mesh=mesh,
        leading=leading,
        train=_source(train, method.pd.batch_size, method.pd.seed, mesh, reshuffle=method.data.shuffle_each_epoch),
        eval=evaluated,
        text=text,
    )


def evaluation_source(config: RunConfig, rows: TokenRows, mesh: Mesh) -> TokenSource:
    """The evaluation's batches of held-out ``rows``. UserError for too few of them."""
    method = config.method
    assert method.eval is not None
    source = _source(rows, method.eval.batch_size, method.pd.seed, mesh)
    wanted = method.eval.n_steps * method.eval.batch_size
    if wanted > len(rows):
        raise UserError(
            f"{rows.source} has {len(rows)} rows, an evaluation reads {wanted} (eval.n_steps x "
            "eval.batch_size); give more held-out data or evaluate on less"
        )
    return source


def check_rows(config: RunConfig, inputs: TokenInputs | FeatureInputs, data: TokenRows) -> None:
    """UserError for rows that the target cannot take, or of another length than configured."""
    method = config.method
    assert isinstance(method, LanguageModelFile)
    assert isinstance(inputs, TokenInputs)
    ci = decomposition(config).ci
    data.check(inputs.vocab_size, longest_row(ci))
    if data.seq_len != method.data.max_seq_len:
        raise UserError(
            f"{data.source}: rows have {data.seq_len} tokens, but data.max_seq_len is {method.data.max_seq_len}; "
            "make the two equal (`pd data tokenize --seq-len`)"
        )


def held_out_rows(config: RunConfig) -> TokenRows:
    """What a run keeps for its evaluation. UserError where it keeps nothing apart."""
    if config.wrapper.data is not None:
        return TokenData(config.wrapper.data.eval)
    held_out = _data(config)[1]
    if held_out is None:
        raise UserError(
            "the run had no eval, so it trained on all of its data; give others: --set 'data={train: FOLDER, eval: "
            "FOLDER}'"
        )
    return held_out


def training_rows(config: RunConfig) -> TokenRows:
    """What a run is trained on."""
    return TokenData(config.wrapper.data.train) if config.wrapper.data is not None else _data(config)[0]


def _source(rows: TokenRows, batch_size: int, seed: int, mesh: Mesh, *, reshuffle: bool = True) -> TokenSource:
    """Batches of which this process reads what its devices hold."""
    lo, hi = process_batch_rows(mesh, batch_size)
    batches = Batches(rows, batch_size, seed, reshuffle=reshuffle, lo=lo, hi=hi)
    return TokenSource(batch_size, rows.seq_len, mesh, batches)


def _data(config: RunConfig) -> tuple[TokenRows, TokenRows | None]:
    data = config.method.data
    assert isinstance(data, LanguageModelData)
    settings = config.method.eval
    text, folders = named_text(config), config.wrapper.data
    if text is not None:
        if not text.is_made:
            raise not_made(text)
        folders = text.folders
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
    if len(rows) - held < config.method.pd.batch_size:
        raise UserError(f"{rows.source} has {len(rows)} rows; {held} are held out for evaluation and too few remain")
    return RowRange(rows, 0, len(rows) - held), RowRange(rows, len(rows) - held, len(rows))
