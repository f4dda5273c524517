"""`pd check`: prints what a configuration would run, without loading weights or data or using an accelerator."""

from collections.abc import Iterable
from functools import partial

import jax
from rich.console import Console
from rich.table import Table
from rich.text import Text

from param_decomp_jax.method.state import init_state
from param_decomp_lab.check.data import check_data, data_notes
from param_decomp_lab.check.evaluation import evaluation_table
from param_decomp_lab.check.schedules import schedules_table
from param_decomp_lab.check.tables import patterns_table, sites_table, state_table, terms_table
from param_decomp_lab.config import RunConfig
from param_decomp_lab.config.core_specs import delta_product
from param_decomp_lab.config.method_schema import LanguageModelFile
from param_decomp_lab.config.wrapper import MilestonesEvery
from param_decomp_lab.errors import Errors, UserError
from param_decomp_lab.runs.folder import refuse_taken
from param_decomp_lab.runs.parent import Parent, find_parent, refuse_mismatch
from param_decomp_lab.setup.known_target import KnownTarget, UnknownTarget, find_target
from param_decomp_lab.setup.resolved import ResolvedConfig
from param_decomp_lab.ui.descriptions import describe_ci, describe_memory, shown_path
from param_decomp_lab.ui.numbers import exact
from param_decomp_lab.ui.warnings import print_warnings

__all__ = ["check"]

PLOT_WIDTH = (20, 60)
"""Smallest and largest width of a schedule's curve, in columns."""


def check(resolved: ResolvedConfig, console: Console) -> None:
    """Prints what a configuration would run. UserError if it would not start, or if its target is unknown and on no
    server.

    Weights and data missing on this machine are listed and are not an error; those present must fit.
    """
    config, errors = resolved.config, Errors()
    with errors:
        if config.wrapper.run_id is not None:
            refuse_taken(config.wrapper.out_dir / config.wrapper.run_id)
    with errors:
        target = find_target(resolved)
    with errors:
        missing = check_data(resolved)
    with errors:
        parent, elsewhere = _parent(config)
    errors.raise_all()
    method, missing = config.method, missing + elsewhere
    spec = target.problem.decomposition if isinstance(target, KnownTarget) else resolved.decomposition
    if parent is not None and isinstance(target, KnownTarget):
        state = jax.eval_shape(partial(init_state, spec, target.problem.target.sites, resolved.leading))
        refuse_mismatch(parent, state.learned)
    console.print(_overview(resolved, target, parent))
    n_sites = None
    if isinstance(target, KnownTarget):
        sites = target.problem.target.sites
        n_sites, missing = len(sites), target.missing + missing
        state = jax.eval_shape(partial(init_state, spec, sites, resolved.leading))
        console.print("", sites_table(sites, state))
        console.print(terms_table(spec.terms, n_sites, spec.steps))
        console.print(state_table(target, state))
    else:
        console.print("", patterns_table(method.pd))
        console.print(terms_table(spec.terms, n_sites, spec.steps))
    console.print(schedules_table(spec, min(PLOT_WIDTH[1], max(PLOT_WIDTH[0], console.width - 50))))
    if method.eval is not None:
        console.print(evaluation_table(method.eval, config, n_sites))
    if isinstance(target, UnknownTarget) and target.elsewhere:
        missing = (f"the target, so its sites are not checked: {target.reason}", *missing)
    of_target = target.notes if isinstance(target, KnownTarget) else ()
    _notes((*config.notes, *of_target, *data_notes(resolved)), missing, console)
    if isinstance(target, UnknownTarget) and not target.elsewhere:
        raise UserError(target.reason)


def _parent(config: RunConfig) -> tuple[Parent | None, tuple[str, ...]]:
    """The run that `init_from` names, and what of it is missing on this machine."""
    if config.wrapper.parent is None:
        return None, ()
    folder, _ = config.wrapper.parent
    return (find_parent(config), ()) if folder.exists() else (None, (f"init_from: {shown_path(folder)}",))


def _overview(resolved: ResolvedConfig, target: KnownTarget | UnknownTarget, parent: Parent | None) -> Table:
    config, spec = resolved.config, resolved.decomposition
    wrapper, pd = config.wrapper, config.method.pd
    warmup = spec.warmup
    before = f", after {warmup.steps:,} on faithfulness alone (lr {exact(warmup.lr)})" if warmup.steps else ""
    mesh = f"{wrapper.mesh.devices} device{'s'[: wrapper.mesh.devices > 1]}"
    axes = " × ".join(f"{name} {size}" for name, size in wrapper.mesh if size > 1)
    split = f" ({axes})" if axes else ""
    delta = ", of Δ in split bf16" if delta_product(config) == "split" else ""
    rows = [
        ("run", f"{wrapper.run_name}: {_EXPERIMENTS[config.experiment]}"),
        ("schema file", shown_path(wrapper.torch_config)),
        ("target", target.architecture.describe() if isinstance(target, KnownTarget) else "not known"),
        ("", f"from {target.origin}" if isinstance(target, KnownTarget) else ""),
        ("data", _data(resolved)),
        (
            "begins with",
            "" if parent is None else f"what {shown_path(parent.folder)} at step {parent.step} has learned",
        ),
        ("training", f"{pd.steps:,} steps of {_batch(config)}{before}"),
        ("importances", f"{describe_ci(spec.ci)}; {spec.squashing}"),
        ("tied", _ties(config)),
        ("masks", f"{'with' if spec.use_delta else 'without'} the delta component"),
        ("numbers", f"matrix products in {spec.compute_dtype}{delta}, {mesh}{split}"),
        ("memory", describe_memory(wrapper.memory.preset or "", spec.memory)),
        ("results", _results(config)),
    ]
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim")
    grid.add_column(overflow="fold")
    for label, value in rows:
        if value:
            grid.add_row(label, Text(value))
    return grid


_EXPERIMENTS = {"language_model": "a language model", "tms": "TMS", "resid_mlp": "ResidMLP"}


def _data(resolved: ResolvedConfig) -> str:
    method, replaced, text = resolved.config.method, resolved.config.wrapper.data, resolved.text
    if not isinstance(method, LanguageModelFile):
        return f"features with probability {exact(method.data.feature_probability)}, {method.data.data_generation_type}"
    if replaced is not None:
        return f"{shown_path(replaced.train)}, evaluated on {shown_path(replaced.eval)}"
    if text is not None:
        return f"{text.describe()}{'' if text.is_made else '; to be tokenized first'}"
    return f"{method.data.data_files}, its last rows held out" if method.eval else str(method.data.data_files)


def _ties(config: RunConfig) -> str:
    pairs = ", ".join(" and ".join(pair) for pair in config.method.pd.tied_weights or ())
    return pairs and f"{pairs}: updated once a step; the PyTorch project updates a pair twice, once for each name (T4)"


def _batch(config: RunConfig) -> str:
    rows = f"{config.method.pd.batch_size:,} rows"
    if not isinstance(config.method, LanguageModelFile):
        return rows
    length = config.method.data.max_seq_len
    return f"{rows} × {length:,} = {config.method.pd.batch_size * length:,} tokens"


def _results(config: RunConfig) -> str:
    cadence, milestones = config.method.cadence, config.wrapper.milestones
    saved = [] if cadence.save_every is None else [f"every {cadence.save_every:,} steps"]
    if isinstance(milestones, MilestonesEvery):
        saved += [f"for good every {milestones.every:,}"]
    elif milestones:
        saved += [f"for good at {', '.join(f'{step:,}' for step in milestones)}"]
    kept = f" ({cadence.keep_last_n_checkpoints:,} kept)" if cadence.keep_last_n_checkpoints is not None else ""
    folder = config.wrapper.out_dir / (config.wrapper.run_id or "p-…")
    wandb = f"; wandb project {config.method.wandb.project}" if config.method.wandb is not None else ""
    return f"{folder}, saved {', '.join([*saved, 'at the end'])}{kept}{wandb}"


def _notes(notes: Iterable[str], missing: tuple[str, ...], console: Console) -> None:
    print_warnings(notes, console, wrap=True)
    print_warnings(missing, console, "not on this machine", wrap=True)
