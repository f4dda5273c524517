"""A language model to decompose: its folder, its token data, its tokenizer."""

from rich.console import Console

from param_decomp_jax.targets.architecture import Architecture
from param_decomp_lab.config.method_schema import LanguageModelFile
from param_decomp_lab.processes.group import ALONE, Processes
from param_decomp_lab.setup.base import Setup, build_mesh
from param_decomp_lab.setup.bos import data_note, find_tokenizer, rows_begin_with
from param_decomp_lab.setup.problem import make_problem
from param_decomp_lab.setup.resolved import ResolvedConfig
from param_decomp_lab.setup.rows import check_rows, evaluation_source, find_rows, token_source
from param_decomp_lab.setup.target_source import fetch_target
from param_decomp_lab.ui.warnings import print_warnings
from param_decomp_lab.weights.recorded_target import read_as_recorded
from param_decomp_lab.weights.target_folder import (
    read_architecture,
    read_weights,
    stored_head_note,
    weight_shardings,
)


def set_up_language_model(
    resolved: ResolvedConfig, console: Console, processes: Processes = ALONE, recorded: Architecture | None = None
) -> Setup:
    """Target, weights, data and mesh of a language-model run.

    First a target that is elsewhere is fetched, and text that the schema file names is tokenized.

    Raises UserError for whatever does not fit together; CannotFetch.
    """
    config = resolved.config
    method = config.method
    assert isinstance(method, LanguageModelFile)
    folder = fetch_target(resolved.target, console, processes)
    architecture = read_architecture(folder) if recorded is None else read_as_recorded(folder, recorded)
    if (note := stored_head_note(folder, architecture)) is not None:
        print_warnings([note], console)
    problem = make_problem(resolved, architecture, folder)
    named = resolved.text
    if named is not None:
        processes.once_per_node(lambda: named.make(console))
    train, held_out = find_rows(resolved)
    for data in {id(d): d for d in (train, held_out) if d is not None}.values():
        check_rows(resolved, architecture.inputs, data)
    text = find_tokenizer(resolved, folder)
    if text is not None:
        text.bos = rows_begin_with(train, text)
        note = data_note(text, folder)
        print_warnings([] if note is None else [note], console)
    mesh = build_mesh(config)
    evaluated = None if held_out is None else evaluation_source(resolved, held_out, mesh)
    shardings = weight_shardings(mesh, problem.target)
    weights = read_weights(folder, architecture, method.target.weights_dtype, shardings)
    leading = method.pd.batch_size, train.seq_len
    return Setup(
        problem=problem,
        weights=weights,
        mesh=mesh,
        leading=leading,
        train=token_source(train, method.pd.batch_size, method.pd.seed, mesh, reshuffle=method.data.shuffle_each_epoch),
        eval=evaluated,
        text=text,
    )
