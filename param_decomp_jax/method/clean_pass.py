"""The clean pass of a batch (F4): what all masked forwards of the batch share."""

from dataclasses import dataclass, replace
from typing import Any

import jax
from jaxtyping import Array, Int, UInt32

from param_decomp_jax.ci import ImportanceReader
from param_decomp_jax.ci.inputs import (
    ChosenExperts,
    CIInputs,
    KeptInputs,
    RecomputedInputs,
    SiteInputs,
    chosen_experts,
)
from param_decomp_jax.ci.squash import Squash
from param_decomp_jax.decomposition.components import Components
from param_decomp_jax.targets.base import Forward, Target, Weights
from param_decomp_jax.targets.plain_linears import RESIDUAL


@dataclass(frozen=True)
class CleanPass:
    """A batch and the results of its forward pass with no live site.

    ``forward``: the output and the records. ``reference``: what errors compare masked outputs with, where that is made
    beforehand. ``site_inputs``: clean inputs of the sites by stack, empty where they are recomputed. ``at``: global
    numbers of the positions (M4). ``batch``: rows of the global batch.
    """

    target: Target
    weights: Weights
    inputs: Array
    forward: Forward
    reference: Any
    site_inputs: SiteInputs
    at: UInt32[Array, "*leading"]
    batch: int
    use_delta: bool

    @property
    def leading(self) -> tuple[int, ...]:
        """Leading axes of an activation, global."""
        return self.at.shape

    @property
    def looked_up(self) -> dict[str, Int[Array, "layers *leading"]]:
        """Of the stacks of tables, the numbers of the rows that are looked up (F7)."""
        return {stack.name: self.inputs[None] for stack in self.target.sites.stacks if stack.lookup}

    @property
    def chosen(self) -> ChosenExperts:
        """The experts that its positions take, where these are sites."""
        return chosen_experts(self.target.sites, dict(self.forward.records))

    @property
    def ci_inputs(self) -> CIInputs:
        """What a global CI function reads."""
        if self.site_inputs:
            return KeptInputs(self.site_inputs, self.chosen)
        return RecomputedInputs(self.target, self.weights, dict(self.forward.records))

    def residual(self, live: tuple[int, ...]) -> Array:
        """F6: the clean residual where a forward with these live sites leaves the clean pass, its first live layer."""
        layer = self.target.sites.all[live[0]].layer
        first = max(start for start in self.forward.records if start <= layer)
        return self.forward.records[first][RESIDUAL][layer - first]


@dataclass(frozen=True)
class DecomposedBatch:
    """A batch as losses and masked forwards see it.

    ``components``: those of every stack, each of their arrays ``[layers, …]``. ``reader``: reads the causal importances
    of its positions, site by site.
    """

    clean_pass: CleanPass
    components: Components
    reader: ImportanceReader

    @property
    def target(self) -> Target:
        return self.clean_pass.target

    @property
    def n_positions(self) -> int:
        """The positions of the batch; a toy's rows have one each."""
        return self.clean_pass.at.size

    def with_squash(self, squash: Squash) -> "DecomposedBatch":
        """The batch with another function from logits to causal importances."""
        return replace(self, reader=replace(self.reader, squash=squash))

    def constant(self) -> "DecomposedBatch":
        """The batch for an adversary (A1): no gradient reaches components or causal importances."""
        reader = replace(self.reader, outputs=jax.lax.stop_gradient(self.reader.outputs))
        return replace(self, components=jax.lax.stop_gradient(self.components), reader=reader)
