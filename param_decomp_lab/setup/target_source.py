"""Where the target of a run comes from, and its folder on this machine."""

from pathlib import Path

from rich.console import Console

from param_decomp_lab.config import RunConfig
from param_decomp_lab.config.method_schema import PretrainedSpec, ToyFile
from param_decomp_lab.errors import UserError
from param_decomp_lab.processes.group import ALONE, Processes
from param_decomp_lab.weights.hub import HubModel
from param_decomp_lab.weights.torch_run import TorchRun, find_run

Source = Path | HubModel | TorchRun
"""A folder in the layout of `weights/target_folder.py`, which may not be there, or what such a folder is made from."""


def target_source(config: RunConfig) -> Source:
    """What holds the weights: the wrapper's folder, else what the schema file names.

    UserError for a name that can be nothing of the kind, and for a toy that a recipe makes.
    """
    given, method = config.wrapper.target, config.method
    if given is not None and given.folder is not None:
        return given.folder
    if given is not None and given.pretrain is not None:
        raise UserError(f"target.pretrain: a recipe makes the target; train it with `pd pretrain {given.pretrain}`")
    if isinstance(method, ToyFile):
        return find_run(method.target.run_path, "target.run_path")
    spec = method.target.spec
    if isinstance(spec, PretrainedSpec):
        return find_run(spec.run_path, "target.spec.run_path")
    local = Path(spec.model_name).expanduser()
    if local.is_dir():
        return local
    return HubModel(spec.model_name, None if given is None else given.revision)


def target_folder(source: Source) -> Path:
    """The folder with the target's weights; nothing is fetched. UserError, which says how it could be, if there is none
    on this machine. A folder that the configuration names itself is returned even if it is not there."""
    if isinstance(source, Path):
        return source
    found = source.cached()
    if found is None:
        raise UserError(f"{source.where}: {source.missing()}")
    return found


def fetch_target(source: Source, console: Console, processes: Processes = ALONE) -> Path:
    """As `target_folder`, but what is elsewhere is fetched, and what is torch's is converted, once on every node.

    Raises UserError and CannotFetch as the source's `fetch` does.
    """
    if isinstance(source, Path):
        return source
    return processes.once_per_node(lambda: source.fetch(console))
