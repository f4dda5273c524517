"""Where the target of a run comes from, and its folder on this machine."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from param_decomp_lab.config import RunConfig
from param_decomp_lab.config.method_schema import PretrainedSpec, ToyFile
from param_decomp_lab.errors import UserError
from param_decomp_lab.pretrain.toy_recipe import ToyRecipe
from param_decomp_lab.pretrain.toys import is_trained, pretrain_toy, read_toy_recipe
from param_decomp_lab.processes.group import ALONE, Processes
from param_decomp_lab.ui.descriptions import shown_path
from param_decomp_lab.weights.hub import HubModel
from param_decomp_lab.weights.torch_run import TorchRun, find_run


@dataclass(frozen=True)
class PretrainedToy:
    """A toy that `pd pretrain` trains from a recipe. ``recipe``: its file, or what would be in it. ``where``: the key
    that gives it."""

    recipe: Path | dict[str, Any]
    where: str = "target.pretrain"

    def read(self) -> ToyRecipe:
        """The recipe. Raises UserError when it is wrong or no toy's."""
        return read_toy_recipe(self.recipe, self.where)

    def cached(self) -> Path | None:
        """The folder with the toy, if it has been trained. Raises UserError as `is_trained`."""
        recipe = self.read()
        return Path(recipe.out) if is_trained(recipe) else None

    def missing(self) -> str:
        """How it comes to this machine."""
        return f"a recipe makes the target; {self.how_to_train}"

    @property
    def title(self) -> str:
        """The recipe, for messages."""
        return shown_path(self.recipe) if isinstance(self.recipe, Path) else "the recipe of the configuration"

    @property
    def how_to_train(self) -> str:
        """What a user can do to train it."""
        if isinstance(self.recipe, Path):
            return f"train it with `pd pretrain {self.recipe}`"
        return "`pd train` trains it before the run, from the recipe of the configuration"

    def fetch(self, console: Console) -> Path:
        """The folder with the toy, trained now if it has not been. Raises UserError as `pretrain_toy`."""
        return pretrain_toy(self.read(), console=console).folder


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
        assert method.target.run_path is not None, "checked: a toy without a run has a target in its wrapper"
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
