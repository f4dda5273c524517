"""`pd import`: reads a run of the PyTorch project and writes it as a run folder."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from rich.console import Console

from param_decomp_jax.ci import CIConfig, GlobalMLP, GlobalTransformer, LayerwiseMLP
from param_decomp_jax.decomposition.sites import Sites
from param_decomp_jax.method.step import Problem
from param_decomp_lab.config import RunConfig
from param_decomp_lab.errors import Errors, UserError
from param_decomp_lab.folders import new_folder, refuse_existing
from param_decomp_lab.importing.run_files import RunFiles, find_run_files
from param_decomp_lab.importing.settings import Translated, translate
from param_decomp_lab.importing.target import find_target
from param_decomp_lab.importing.tensors import CheckpointLayout, paths_of_sites, todays_name
from param_decomp_lab.runs.checkpoints.store import Checkpoints
from param_decomp_lab.runs.folder import begin_run_folder
from param_decomp_lab.runs.imported import IMPORTED_FILE, ImportOrigin
from param_decomp_lab.runs.metrics_file import METRICS_FILE
from param_decomp_lab.runs.target_file import write_target
from param_decomp_lab.safe_io.printable import first_few
from param_decomp_lab.safe_io.yaml_text import read_mapping
from param_decomp_lab.setup.problem import make_problem
from param_decomp_lab.setup.resolved import ResolvedConfig
from param_decomp_lab.weights.torch_checkpoint import read_checkpoint
from param_decomp_lab.weights.torch_models import strip_wrappers


@dataclass(frozen=True)
class Made:
    imported: ImportOrigin
    problem: Problem

    def describe(self) -> str:
        sites = self.problem.target.sites.all
        return (
            f"{len(sites)} sites, {sum(site.C for site in sites):,} components, of "
            f"{self.problem.target.architecture.describe()}"
        )


def import_run(
    source: str,
    out: Path,
    console: Console,
    *,
    target: str | None = None,
    step: int | None = None,
    overrides: Sequence[str] = (),
    overwrite: bool = False,
) -> Made:
    """Makes the run folder ``out`` from the run ``source``, a folder or a run on wandb.

    ``target``: as in `find_target`. ``step``: of the checkpoint; None for the newest. ``overrides``: assignments to the
    translated configuration. ``out`` appears only when it is complete. Raises UserError if ``source`` is not such a
    run, has no counterpart here, or is inconsistent, and CannotFetch.
    """
    refuse_existing(out, marker=IMPORTED_FILE, overwrite=overwrite)  # before any work is done
    files = find_run_files(source, step, console)
    translated = translate(read_mapping(files.configuration, "the configuration of a run"), str(files.configuration))
    config = _config(translated, files, out).with_overrides(overrides)
    console.print(f"reading {files.checkpoint}", soft_wrap=True, highlight=False)
    state = {todays_name(name): array for name, array in strip_wrappers(read_checkpoint(files.checkpoint)).items()}
    found = find_target(target, config, files, state, out, console)
    problem = make_problem(ResolvedConfig(found.config), found.architecture, files.configuration)
    layout = _layout(problem, paths_of_sites(state), files)
    layout.check(state, str(files.checkpoint))
    with files.checkpoint.open("rb") as opened:
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
    imported = ImportOrigin(
        files.source, files.step, files.checkpoint.name, digest, files.configuration.name, found.origin,
        translated.left_out,
    )  # fmt: skip
    with new_folder(out, marker=IMPORTED_FILE, overwrite=overwrite) as folder:
        begin_run_folder(folder, found.config)
        (folder / METRICS_FILE).touch()
        write_target(folder, found.architecture)
        if found.own is not None:
            found.own.write(folder)
        imported.write(folder)
        checkpoints = Checkpoints(folder)
        checkpoints.save(files.step, layout.read(state), found.config.to_yaml())
        checkpoints.close()
    return Made(imported, problem)


def _config(translated: Translated, files: RunFiles, out: Path) -> RunConfig:
    wrapper = {
        "torch_config": str(files.configuration),
        "run_name": files.source.rstrip("/").rpartition("/")[2],
        "out_dir": str(out.absolute().parent),
        "experiment": translated.experiment,
    }
    return RunConfig.from_mapping({"wrapper": wrapper, "torch": translated.method}, str(files.configuration))


def _layout(problem: Problem, paths: dict[str, str], files: RunFiles) -> CheckpointLayout:
    """Returns the places of the arrays. Raises UserError unless the sites are the checkpoint's and have a counterpart
    here.
    """
    sites, config, errors = problem.target.sites, problem.decomposition.ci, Errors()
    with errors:
        _refuse_other_sites(sites, paths, files)
    with errors:
        tables = [site.name for site in sites.all if site.lookup]
        if tables:
            raise UserError(
                f"{files.source}: {', '.join(tables)} is an embedding: the CI function there reads its components' "
                "activations, the one here its rows (F7), so the run cannot be imported"
            )
    with errors:
        if not isinstance(config, LayerwiseMLP | GlobalMLP | GlobalTransformer):
            raise UserError(f"pd.ci_config: the PyTorch project had no {type(config).__name__}; give what the run had")
        if later := _options_it_lacked(config):
            raise UserError(f"pd.ci_config: the PyTorch project had no {', '.join(later)}; leave that out")
    errors.raise_all()
    return CheckpointLayout(sites, config, paths)


def _options_it_lacked(config: CIConfig) -> list[str]:
    """Returns the keys of options of the CI function that the PyTorch project did not have (C9, C10)."""
    usual = {field.name: field.default for field in fields(config)}
    keys = {name: name for name in ("causal", "n_kv_heads", "mlp_type", "learned_norm_scale")} | {"taps": "input_tap"}
    return [key for name, key in keys.items() if name in usual and getattr(config, name) != usual[name]]


def _refuse_other_sites(sites: Sites, paths: dict[str, str], files: RunFiles) -> None:
    ours = {site.name for site in sites.all}
    lines = [f"{name}: is only in the configuration" for name in sorted(ours - paths.keys())]
    lines += [f"{name}: is only in the checkpoint" for name in sorted(paths.keys() - ours)]
    if lines:
        told = "\n  ".join(first_few(lines))
        raise UserError(
            f"{files.checkpoint}: its sites are not those that {files.configuration.name} chooses:\n  {told}"
        )
