"""The optimizer of a pretraining: what a recipe says of it, and what it becomes."""

from collections.abc import Iterator
from typing import Any, Literal

import jax
import optax
from pydantic import Field

from param_decomp_jax.decomposition.schedules import Schedule
from param_decomp_lab.schema.mistakes import Wrong
from param_decomp_lab.schema.strict import Fraction, NonNegative, Positive, Strict, rule


class OptimizerRecipe(Strict):
    """AdamW; Adam with a ``weight_decay`` of 0, which else acts on all that is trained but norms and, of a GPT, biases.
    ``warmup_pct``: share of the steps spent rising to ``lr``. ``final_val_frac``: last learning rate over ``lr``.
    ``clip_norm``: on the global gradient norm, or null."""

    lr: Positive
    schedule: Literal["constant", "linear", "cosine"] = "cosine"
    warmup_pct: Fraction = 0.05
    final_val_frac: Fraction = 0.1
    weight_decay: NonNegative = 0.1
    betas: tuple[Fraction, Fraction] = Field(default=(0.9, 0.95), strict=False)
    clip_norm: Positive | None = 1.0

    @rule
    def _constant(self) -> Iterator[Wrong]:
        if self.schedule == "constant" and self.final_val_frac != 1.0:
            yield "final_val_frac", "must be 1.0 with a constant schedule"

    def learning_rate(self) -> Schedule:
        return Schedule(self.lr, self.schedule, self.warmup_pct, self.final_val_frac)


def make_optimizer(
    recipe: OptimizerRecipe, steps: int, spared: tuple[str, ...] = ("norm",)
) -> optax.GradientTransformation:
    """AdamW with the recipe's schedule; weights in whose name is one of ``spared`` are not decayed."""
    schedule = recipe.learning_rate()

    def decayed(weights: Any) -> Any:
        def of(path: tuple[Any, ...], _: Any) -> bool:
            return not any(name in path[-1].key for name in spared)

        return jax.tree_util.tree_map_with_path(of, weights)

    clip = optax.clip_by_global_norm(recipe.clip_norm) if recipe.clip_norm is not None else optax.identity()
    b1, b2 = recipe.betas
    decay = recipe.weight_decay
    return optax.chain(
        clip, optax.adamw(lambda count: schedule(count, steps), b1, b2, weight_decay=decay, mask=decayed)
    )
