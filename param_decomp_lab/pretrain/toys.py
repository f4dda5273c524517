"""Training a toy target, from a recipe to a folder that ``load_target`` reads."""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int, PRNGKeyArray
from rich.console import Console

from param_decomp_jax.nn.numerics import mean_squared_error
from param_decomp_lab.errors import UserError
from param_decomp_lab.folders import new_folder, refuse_existing
from param_decomp_lab.pretrain.finished import SUMMARY_FILE, find_finished, identity, write_finished
from param_decomp_lab.pretrain.log import METRICS_FILE, finite, write_metrics
from param_decomp_lab.pretrain.optimizer import make_optimizer
from param_decomp_lab.pretrain.recipe import parse_recipe, read_recipe
from param_decomp_lab.pretrain.toy_models import Examination, Toy, make_toy
from param_decomp_lab.pretrain.toy_recipe import TOYS, ToyRecipe
from param_decomp_lab.ui.console import PlainConsole
from param_decomp_lab.ui.progress import StepsBar
from param_decomp_lab.weights.target_folder import Weights, save_target

FRESH_BATCHES = 8
"""Batches after the last of training, on which a trained toy is examined."""


@dataclass(frozen=True)
class Try:
    """A seed, and the features that the model trained from it does not represent."""

    seed: int
    lost: tuple[int, ...]


@dataclass(frozen=True)
class TrainedToy:
    """The model in ``folder``, which ``seed`` gave after the seeds ``tried`` (itself the last). ``loss``,
    ``unexplained``, ``figures``: see `Examination`. ``seconds``: of all tries, compilation included. ``cached``: it was
    there already."""

    folder: Path
    seed: int
    tried: tuple[Try, ...]
    loss: float
    unexplained: float
    figures: dict[str, float]
    seconds: float
    cached: bool = False


def ensure_target(recipe_path: str | Path, console: Console) -> Path:
    """The folder of the toy target of a recipe, for ``load_target``; it is trained if it is not there.

    ``out`` in the recipe is relative to the current folder. Raises UserError: the recipe is wrong or no toy's, its
    ``out`` holds something else, no try represents every feature.
    """
    return pretrain_toy(read_toy_recipe(recipe_path), console=console).folder


def read_toy_recipe(given: str | Path | dict[str, Any], where: str = "the recipe") -> ToyRecipe:
    """The recipe in a YAML file, or in what would be in one. ``where``: the place of the latter, for errors. Raises
    UserError when it is wrong or no toy's."""
    if isinstance(given, dict):
        recipe = parse_recipe(given, where)
    else:
        recipe, where = read_recipe(given), str(given)
    if not isinstance(recipe, ToyRecipe):
        raise UserError(
            f"{where}: model.architecture: should be a toy's ({', '.join(TOYS)}), not {recipe.model.architecture}"
        )
    return recipe


def is_trained(recipe: ToyRecipe) -> bool:
    """Whether `pretrain_toy` would find its work done. Raises UserError when ``out`` holds something else."""
    folder = Path(recipe.out)
    if find_finished(folder, identity(recipe)):
        return True
    refuse_existing(folder, marker=SUMMARY_FILE, overwrite=False)
    return False


def pretrain_toy(recipe: ToyRecipe, *, overwrite: bool = False, console: Console | None = None) -> TrainedToy:
    """Train the toy of ``recipe`` and write it to ``recipe.out``, which appears only when it is complete.

    The folder holds ``config.json`` and ``model.safetensors``, ``metrics.jsonl`` (one object per logged step of the try
    that succeeded), ``recipe.yaml`` and ``summary.json``. When it is there already and the same recipe made it, nothing
    is done. ``console``: where progress goes.

    Raises UserError: ``out`` made by another recipe (unless ``overwrite``), not writable, or a feature is lost in every
    try. NonFiniteLoss: the loss at a log step is infinite or NaN.
    """
    console = console or PlainConsole()
    folder = Path(recipe.out)
    if not overwrite and (summary := find_finished(folder, identity(recipe))):
        tried = tuple(Try(t["seed"], tuple(t["lost"])) for t in summary.pop("tried"))
        finished = TrainedToy(folder, tried=tried, cached=True, **summary)
        _tell(console, finished)
        return finished
    refuse_existing(folder, marker=SUMMARY_FILE, overwrite=overwrite)  # before any work is done
    with new_folder(folder, marker=SUMMARY_FILE, overwrite=overwrite) as partial_folder:
        start = time.perf_counter()
        weights, seen, tries = _try_seeds(recipe, partial_folder / METRICS_FILE, console)
        seconds = round(time.perf_counter() - start, 2)
        result = TrainedToy(folder, tries[-1].seed, tries, seen.loss, seen.unexplained, seen.figures, seconds)
        save_target(partial_folder, recipe.model.config(), weights)
        summary = {key: value for key, value in asdict(result).items() if key not in ("folder", "cached")}
        write_finished(partial_folder, identity(recipe), summary)
    _tell(console, result)
    return result


def _try_seeds(recipe: ToyRecipe, metrics: Path, console: Console) -> tuple[Weights, Examination, tuple[Try, ...]]:
    """The first model that lost nothing, what was seen of it, and the tries up to it."""
    toy = make_toy(recipe)
    optimizer = make_optimizer(recipe.optimizer, recipe.steps)
    run = make_run(toy, optimizer, recipe.batch_size)  # compiled once for all seeds
    tries: list[Try] = []
    for seed in range(recipe.seed, recipe.seed + recipe.tries):
        with open(metrics, "w") as log:
            weights = _train(recipe, toy, optimizer, run, seed, log, console)
        _, of_data = _keys(seed)
        fresh = [toy.features.batch(of_data, recipe.steps + k, recipe.batch_size) for k in range(FRESH_BATCHES)]
        seen = toy.examine(weights, jnp.concatenate(fresh))
        tries.append(Try(seed, seen.lost))
        if not seen.lost:
            return weights, seen, tuple(tries)
        console.print(_losses(tries[-1]), soft_wrap=True)
    raise UserError(
        "\n".join([f"no model of {recipe.tries} tries represents every feature:", *map(_losses, tries)])
        + "\nGive another `seed`, more `tries`, more `steps`, or a model with more room"
    )


Run = Callable[[Weights, optax.OptState, Weights, PRNGKeyArray, int, int], tuple[Weights, optax.OptState, Array]]


def make_run(toy: Toy, optimizer: optax.GradientTransformation, batch_size: int) -> Run:
    """The jitted ``run(trained, opt_state, fixed, key, first, stop)``: steps ``first .. stop - 1`` in one dispatch.

    Returns the trained part, the optimizer's state and the loss at the last step. The batch of a step is drawn in the
    program, a function of (key, step), and the count is dynamic: neither the results nor the program depend on how
    many steps a dispatch takes.
    """

    def loss_of(trained: Weights, fixed: Weights, inputs: Float[Array, "B n"]) -> Float[Array, ""]:
        return mean_squared_error(toy.label(inputs), toy.outputs(toy.weights(trained, fixed), inputs))

    def run(
        trained: Weights, opt_state: optax.OptState, fixed: Weights, key: PRNGKeyArray, first: int, stop: int
    ) -> tuple[Weights, optax.OptState, Array]:
        def step(k: Int[Array, ""], carry: Any) -> Any:
            trained, opt_state, _ = carry
            loss, gradients = jax.value_and_grad(loss_of)(trained, fixed, toy.features.batch(key, k, batch_size))
            updates, opt_state = optimizer.update(gradients, opt_state, trained)
            return optax.apply_updates(trained, updates), opt_state, loss

        result: tuple[Weights, optax.OptState, Array] = jax.lax.fori_loop(
            first, stop, step, (trained, opt_state, jnp.zeros(()))
        )
        return result

    return jax.jit(run)


def _train(
    recipe: ToyRecipe,
    toy: Toy,
    optimizer: optax.GradientTransformation,
    run: Run,
    seed: int,
    log: TextIO,
    console: Console,
) -> Weights:
    of_weights, of_data = _keys(seed)
    trained, fixed = toy.init(of_weights)
    opt_state = optimizer.init(trained)
    learning_rate = recipe.optimizer.learning_rate()
    first = 0
    with StepsBar(console, f"seed {seed}", recipe.steps) as bar:
        while first < recipe.steps:
            # Up to the next log step and with it: 0, log_every, 2 log_every, …, and the last.
            stop = min(-(-first // recipe.log_every) * recipe.log_every + 1, recipe.steps)
            trained, opt_state, loss = run(trained, opt_state, fixed, of_data, first, stop)
            value = finite(stop - 1, loss)
            lr = float(learning_rate(stop - 1, recipe.steps))
            write_metrics(log, {"step": stop - 1, "train/loss/total": value, "train/schedules/lr": lr})
            bar.advance(stop)
            bar.show(f"loss {value:.5f}")
            first = stop
    return toy.weights(trained, fixed)


def _keys(seed: int) -> tuple[PRNGKeyArray, PRNGKeyArray]:
    """The keys of the initial weights, and of the data."""
    of_weights, of_data = jax.random.split(jax.random.key(seed))
    return of_weights, of_data


def _losses(attempt: Try) -> str:
    names = ", ".join(map(str, attempt.lost))
    return f"  seed {attempt.seed} lost {len(attempt.lost)} feature{'s'[: len(attempt.lost) > 1]}: {names}"


def _tell(console: Console, result: TrainedToy) -> None:
    figures = ", ".join(f"{name.replace('_', ' ')} {value:.3g}" for name, value in result.figures.items())
    before = [_losses(attempt) for attempt in result.tried[:-1]] if result.cached else []
    console.print(
        "\n".join(
            [
                f"{'cached' if result.cached else 'pretrained'}: {result.folder}  ({result.seconds:.0f} s)",
                *before,
                f"  seed {result.seed} represents every feature: loss {result.loss:.3g} on fresh data, "
                f"{100 * result.unexplained:.1f} % of the label's variance",
                f"  {figures}",
            ]
        ),
        soft_wrap=True,
        highlight=False,
    )
