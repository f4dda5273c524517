"""Where the target of a run comes from, and its folder on this machine."""

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from param_decomp_lab.config import RunConfig
from param_decomp_lab.config.method_schema import PretrainedSpec, ToyFile
from param_decomp_lab.errors import UserError
from param_decomp_lab.pretrain.toys import ensure_target, is_trained, read_toy_recipe
from param_decomp_lab.processes.group import ALONE, Processes
from param_decomp_lab.weights.hub import HubModel
from param_decomp_lab.weights.torch_run import TorchRun, find_run


@dataclass(frozen=True)
class PretrainedToy:
    """A toy that `pd pretrain` trains from the recipe in ``path``. ``where``: the key that names it."""

    path: Path
    where: str = "target.pretrain"

    def cached(self) -> Path | None:
        """The folder with the toy, if it has been trained. Raises UserError as `is_trained`."""
        recipe = read_toy_recipe(self.path)
        return Path(recipe.out) if is_trained(recipe) else None

    def missing(self) -> str:
        """How it comes to this machine."""
        return f"a recipe makes the target; train it with `pd pretrain {self.path}`"

    def fetch(self, console: Console) -> Path:
        """The folder with the toy, trained now if it has not been. Raises UserError as `ensure_target`."""
        return ensure_target(self.path, console)


Source = Path | HubModel | TorchRun | PretrainedToy
"""A folder in the layout of `weights/target_folder.py`, which may not be there, or what such a folder is made from."""


def target_source(config: RunConfig) -> Source:
    """What holds the weights: the wrapper's folder or recipe, else what the schema file names. Raises UserError for a
    name that can be nothing of the kind."""
    given, method = config.wrapper.target, config.method
    if given is not None and given.folder is not None:
        return given.folder
    if given is not None and given.pretrain is not None:
        return PretrainedToy(given.pretrain)
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
    """As `target_folder`, but what is elsewhere is fetched, and what is torch's is converted, once on every node; a toy
    with a recipe is trained by process 0.

    Raises UserError and CannotFetch as the source's `fetch` does.
    """
    if isinstance(source, Path):
        return source
    once = processes.in_turn if isinstance(source, PretrainedToy) else processes.once_per_node
    return once(lambda: source.fetch(console))
