"""Causal importance: from clean activations to one logit per component and position, and to λ and υ (section 3).

A CI function has two parts. ``features`` sees the clean inputs of all sites at once (None for a layerwise function);
``logits`` is one site's head on them. Cutting it there lets a head be run where its mask is used, or all at once.
"""

from typing import Any, Protocol, runtime_checkable

import jax
from jaxtyping import Array, Float, PRNGKeyArray

from param_decomp_jax.ci.global_mlp import GlobalMLP, init_global_mlp
from param_decomp_jax.ci.layerwise import LayerwiseMLP, init_layerwise
from param_decomp_jax.ci.squash import Squashing, squashings
from param_decomp_jax.ci.transformer import GlobalTransformer, init_transformer
from param_decomp_jax.components import Components
from param_decomp_jax.sites import Sites

__all__ = [
    "CIConfig", "CIFunction", "GlobalMLP", "GlobalTransformer", "LayerwiseMLP", "Squashing", "ci_logits", "init_ci",
    "squashings",
]  # fmt: skip

CIConfig = LayerwiseMLP | GlobalMLP | GlobalTransformer


@runtime_checkable
class CIFunction(Protocol):
    """A trained pytree; ``heads`` holds what belongs to one site, by stack, with a leading layer axis."""

    heads: dict[str, Any]

    def features(self, inputs: dict[str, Array], compute_dtype: Any) -> Any:
        """What the heads share, from every stack's clean inputs ``[layers, …, d_in]`` in canonical stack order."""
        ...

    def logits(
        self, head: Any, features: Any, x: Float[Array, "*n d_in"], V: Float[Array, "d_in C"]
    ) -> Float[Array, "*n C"]:
        """Logits of one site in fp32 (N1), from its head, the shared features, its clean input and its V."""
        ...


def init_ci(config: CIConfig, key: PRNGKeyArray, sites: Sites) -> CIFunction:
    """A CI function with fresh weights."""
    match config:
        case LayerwiseMLP():
            return init_layerwise(config, key, sites)
        case GlobalMLP():
            return init_global_mlp(config, key, sites)
        case GlobalTransformer():
            return init_transformer(config, key, sites)


def ci_logits(
    ci: CIFunction, inputs: dict[str, Array], components: Components, compute_dtype: Any
) -> dict[str, Float[Array, "layers *n C"]]:
    """Logits of every site at once, by stack. ``inputs`` are clean and constant (F5); V is not detached (C5)."""
    inputs = jax.lax.stop_gradient(inputs)
    features = ci.features(inputs, compute_dtype)

    def of_stack(name: str, x: Array) -> Array:
        per_layer = jax.vmap(ci.logits, in_axes=(0, None, 0, 0))
        return per_layer(ci.heads[name], features, x.astype(compute_dtype), components[name].V)

    return {name: of_stack(name, x) for name, x in inputs.items()}
