"""The common part of all text decoders: the pass over the layers, the head, and the error of a masked pass.

A family's own file writes `embed`, `layer` and `head`. The forward pass ends at the last hidden state. The head belongs
to the error, so that it can be computed in blocks of tokens.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from param_decomp_jax.decomposition.components import look_up
from param_decomp_jax.decomposition.sites import Sites
from param_decomp_jax.nn.attention import Window, attend, pattern
from param_decomp_jax.nn.fused_kl import Head, fused_kl
from param_decomp_jax.nn.numerics import divergence_from, matmul_wide
from param_decomp_jax.sharding.memory import PLAIN, MemoryPolicy
from param_decomp_jax.sharding.mesh import Axes, constrain, held_axes
from param_decomp_jax.sharding.remat import named, token_blocks
from param_decomp_jax.targets.base import (
    Forward,
    LayerLinears,
    Linears,
    ReadsPatterns,
    UniformLayers,
    Weights,
    run_layers,
    site_weights,
)  # fmt: skip
from param_decomp_jax.targets.plain_linears import frozen_axes
from param_decomp_jax.targets.points import RESID_POST, RESID_PRE

NORMALIZED = "ln2.hook_normalized"
"""The hook at the output of the norm before the MLP, before its weight and bias."""


@dataclass(frozen=True)
class Decoder:
    """The target of sections 1 and 2, except for what differs between families.

    ``architecture``: has ``n_layers`` and what the family's own methods read. ``compute_dtype``: the dtype of
    activations and of the inputs of products (N1). The weights have ``layers``: arrays with a leading axis of all
    layers.
    """

    architecture: Any
    sites: Sites
    memory: MemoryPolicy = PLAIN
    compute_dtype: Any = jnp.float32

    # ---- what a family writes ----

    @abstractmethod
    def embed(self, weights: Weights, tokens: Int[Array, "B T"]) -> Float[Array, "B T d"]:
        """Returns the input of the first layer."""

    @abstractmethod
    def layer(self, x: Float[Array, "B T d"], w: Mapping[str, Array], linear: LayerLinears) -> Float[Array, "rows T d"]:
        """Computes one layer with its weights ``w``. Every matrix that can be a site is applied by ``linear``.

        The output has more rows than the input if forward passes share rows before this layer (`joins_rows`).
        """

    @abstractmethod
    def head(self, weights: Weights, dtype: Any) -> Head:
        """Returns the map from the last hidden state to logits in fp32 or wider, including the final norm, with its
        arrays gathered.

        ``dtype``: that of the product's inputs.
        """

    @property
    def joins_rows(self) -> bool:
        return False

    @property
    def writes_residual(self) -> frozenset[str]:
        """The kinds of the matrices whose output is added to the residual stream, as it is or multiplied by a
        number."""
        return frozenset()

    @property
    def hooks(self) -> frozenset[str]:
        """The activations of a layer that can be replaced (B6), by TransformerLens' names. A family whose layers call
        `hooked` has more than these."""
        return frozenset({RESID_PRE, RESID_POST})

    @property
    def centers(self) -> bool:
        """Whether everything that reads the residual stream subtracts its mean first."""
        return False

    def normalized(self, x: Float[Array, "*n d"]) -> Float[Array, "*n d"]:
        """Returns the output of the norm before the MLP for a residual stream, without the norm's weight and bias. Only
        families with the hook `NORMALIZED` have it."""
        raise NotImplementedError

    def queries_and_keys(
        self, weights: Weights, layer: int, q: Float[Array, "n T _"], k: Float[Array, "m S _"]
    ) -> tuple[Float[Array, "n T heads d"], Float[Array, "m S kv_heads d"]]:
        """Turns parts of a layer's queries and keys, at the positions 0, 1, …, into what its attention multiplies, as
        far as that is linear (H2). Only families with attention have it."""
        raise NotImplementedError

    # ---- what they share ----

    def attend(
        self,
        linear: LayerLinears,
        q: Float[Array, "B T heads d"],
        k: Float[Array, "B T kv_heads d"],
        v: Float[Array, "B T kv_heads d"],
        window: Window | None = None,
        cap: float | None = None,
    ) -> Float[Array, "B T heads d"]:
        """Computes a layer's causal attention with `nn/attention.py:attend`. A ``linear`` that reads patterns is given
        this layer's."""
        if isinstance(linear, ReadsPatterns):
            linear.see_pattern(pattern(q, k, True, window, cap))
        return named(attend(q, k, v, True, self.memory.attention, window, cap), "attention")

    @property
    def frozen(self) -> Axes:
        """The logical axes of a matrix at rest."""
        return frozen_axes(self.memory)

    def look_up(self, table: Float[Array, "n d"], rows: Int[Array, "B T"]) -> Float[Array, "B T d"]:
        """Returns rows of a table that is split by column."""
        return constrain(look_up(table, rows, self.frozen).astype(self.compute_dtype), "batch")

    def forward(
        self, weights: Weights, inputs: Int[Array, "B T"], linears: Linears, start: tuple[int, Array] | None = None
    ) -> Forward:
        """Maps token ids to the last hidden state (before the final norm), ``[B, T, d_model]``."""
        groups = self.uniform_layers(weights)
        if start is None:
            start = (-1, inputs) if groups[0].first == -1 else (0, self.embed(weights, inputs))
        first, x = start
        return Forward(*run_layers(groups, x, linears, first, self.memory))

    def uniform_layers(self, weights: Weights) -> Sequence[UniformLayers]:
        """Returns all layers as one run. If the embedding is a site, a layer −1 that reads tokens comes before them."""
        return (UniformLayers(self.layer, weights["layers"], 0, self.architecture.n_layers),)

    def activation_axes(self, inputs: tuple[int, ...]) -> tuple[int, ...]:
        """Returns batch and positions."""
        return inputs

    def predictions(self, weights: Weights, output: Float[Array, "*n d"]) -> Float[Array, "*n vocab"]:
        """Returns next-token logits in fp32 or wider from the forward's output."""
        return self.logits(weights, output)

    def logits(self, weights: Weights, hidden: Float[Array, "*n d"]) -> Float[Array, "*n vocab"]:
        """Returns next-token logits in fp32 or wider from the forward's output."""
        return self.head(weights, hidden.dtype)(hidden)

    def lens(self, weights: Weights, directions: Float[Array, "*n d"]) -> Float[Array, "*n vocab"]:
        """Returns what directions of the residual stream add to the logits, as far as that is linear: through the
        scales of the final norm and the unembedding, without the norm's division (the logit lens; nostalgebraist,
        2020)."""
        matrix = self.head(weights, directions.dtype).args[0]
        return matmul_wide((directions * self.final_scale(weights)).astype(directions.dtype), matrix)

    def final_scale(self, weights: Weights) -> Float[Array, " d"]:
        """Returns the factor of each dimension in the final norm."""
        scale: Array = weights["norm"]
        return scale

    def reference(self, weights: Weights, clean: Float[Array, "B T d"]) -> Float[Array, "B T _"]:
        """Returns the logarithms of the clean next-token probabilities in fp32 or wider, if the policy keeps them; else
        the clean output itself."""
        return self._log_probabilities(weights, clean) if self._keeps_log_probabilities else clean

    def _log_probabilities(self, weights: Weights, hidden: Float[Array, "*n d"]) -> Float[Array, "*n vocab"]:
        return jax.nn.log_softmax(self.head(weights, hidden.dtype)(hidden))

    @property
    def _keeps_log_probabilities(self) -> bool:
        # With micro-batches, nothing is kept whose size grows with the whole batch.
        return not self.memory.recomputes("vocabulary") and self.memory.micro_batches == 1

    def errors(
        self, weights: Weights, reference: Float[Array, "B T _"], masked: Sequence[Float[Array, "B T d"]]
    ) -> Float[Array, " streams"]:
        """Returns R1: the mean over positions of KL(softmax(clean) ‖ softmax(masked))."""
        head = self.head(weights, masked[0].dtype)
        if self.memory.recomputes("vocabulary"):
            n_blocks = token_blocks(reference.shape[:-1], self.memory.vocabulary_block)
            return fused_kl(head, reference, masked, n_blocks)
        log_p = reference if self._keeps_log_probabilities else self._log_probabilities(weights, reference)
        return jnp.stack([jnp.mean(divergence_from(log_p, head(x))) for x in masked])

    def site_weights(self, weights: Weights) -> dict[str, Float[Array, "*lead d_in d_out"]]:
        """Returns W of every site, by stack."""
        layers = weights["layers"]
        return site_weights(self.sites, lambda s: layers[s.kind][s.first : s.first + s.n_layers])

    def weight_axes(self, weights: Weights) -> Any:
        """Returns the logical axes of every array, in the structure of the weights."""
        return held_axes(self.architecture.weight_axes(), self.memory.held_by("target"))
