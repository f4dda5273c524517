"""Finds the source of a run's target, and its folder on this machine."""

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
        """Returns the recipe. Raises UserError if it is invalid or not a toy's."""
        return read_toy_recipe(self.recipe, self.where)

    def cached(self) -> Path | None:
        """Returns the folder with the toy, if it has been trained. Raises UserError as `is_trained` does."""
        recipe = self.read()
        return Path(recipe.out) if is_trained(recipe) else None

    def missing(self) -> str:
        """Says how the toy gets to this machine."""
        return f"a recipe makes the target; {self.how_to_train}"

    @property
    def title(self) -> str:
        """Names the recipe in messages."""
        return shown_path(self.recipe) if isinstance(self.recipe, Path) else "the recipe of the configuration"

    @property
    def how_to_train(self) -> str:
        """Says what a user can do to train it."""
        if isinstance(self.recipe, Path):
            return f"train it with `pd pretrain {self.recipe}`"
        return "`pd train` trains it before the run, from the recipe of the configuration"

    def fetch(self, console: Console) -> Path:
        """Returns the folder with the toy, after training it if needed. Raises UserError as `pretrain_toy` does."""
        return pretrain_toy(self.read(), console=console).folder


Source = Path | HubModel | TorchRun | PretrainedToy
"""A folder in the layout of `weights/target_folder.py`, which may not exist, or the source from which such a folder is
made.
"""


def target_source(config: RunConfig) -> Source:
    """Returns the source of the weights: the wrapper's folder or recipe, else what the schema file names. Raises
    UserError for a name that cannot be one.
    """
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
    """Returns the folder with the target's weights; fetches nothing. Raises UserError, which says how to fetch it, if
    it is not on this machine. A folder that the configuration itself names is returned even if it does not exist.
    """
    if isinstance(source, Path):
        return source
    found = source.cached()
    if found is None:
        raise UserError(f"{source.where}: {source.missing()}")
    return found


def fetch_target(source: Source, console: Console, processes: Processes = ALONE) -> Path:
    """Like `target_folder`, but fetches what is elsewhere and converts torch runs, once on every node; process 0 trains
    a toy with a recipe.

    Raises UserError and CannotFetch as the source's `fetch` does.
    """
    if isinstance(source, Path):
        return source
    once = processes.in_turn if isinstance(source, PretrainedToy) else processes.once_per_node
    return once(lambda: source.fetch(console))
