"""Layerwise CI functions (C4): a site's importances depend only on its own clean input."""

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from param_decomp_jax.ci.affine import MLP, apply_mlp, init_mlp
from param_decomp_jax.ci.inputs import SiteInputs
from param_decomp_jax.ci.scalar_mlp import apply_scalar_mlps
from param_decomp_jax.ci.taps import Reads
from param_decomp_jax.decomposition.draws import draw_per_site
from param_decomp_jax.decomposition.sites import Sites, Stack
from param_decomp_jax.nn.grouped import ExpertGroups, product_wide
from param_decomp_jax.nn.numerics import matmul_wide
from param_decomp_jax.sharding.memory import MemoryPolicy
from param_decomp_jax.sharding.mesh import replace_fields


@dataclass(frozen=True)
class LayerwiseMLP:
    """The settings of a layerwise function. ``shared_mlp``: one MLP d_in → C per site. ``mlp``: one scalar MLP per
    component, on x · V[:, c]. ``vector_mlp``: one MLP d_in → 1 per component."""

    kind: Literal["mlp", "vector_mlp", "shared_mlp"]
    hidden: tuple[int, ...]


class _Layerwise(eqx.Module):
    """An MLP, or one per component, for every site, by stack. The sites share nothing."""

    jointly: ClassVar[bool] = False
    heads: dict[str, MLP]

    @property
    def boundaries(self) -> tuple[int, ...]:
        return ()

    def features(self, inputs: Reads, leading: tuple[int, ...], compute_dtype: Any, memory: MemoryPolicy) -> None:
        return None

    def head_inputs(self, inputs: SiteInputs, numbers: dict[str, Array]) -> dict[str, Any]:
        return dict(inputs)


class SharedMLP(_Layerwise):
    """One MLP ``d_in → hidden … → C`` for every site."""

    @staticmethod
    def logits(
        head: MLP,
        features: None,
        x: Float[Array, "*n d_in"],
        V: Float[Array, "*experts _ C"],
        groups: ExpertGroups | None = None,
    ) -> Float[Array, "*slots C"]:
        return apply_mlp(head, x, groups)

    def axes(self) -> Any:
        """Returns the axes: hidden layers are split by unit, the last one by component."""

        def mlp_axes(mlp: MLP) -> Any:
            *hidden, last = mlp
            lead = (None,) * (last.b.ndim - 1)
            return (*(layer.axes(*lead, columns="split") for layer in hidden), last.axes(*lead, columns="component"))

        return replace_fields(self, heads={name: mlp_axes(head) for name, head in self.heads.items()})


class ScalarMLP(_Layerwise):
    """One MLP ``1 → hidden … → 1`` for every component, on the scalar ``x · V[:, c]``.

    The scalar is not detached (C5): losses reach V through it.
    """

    @staticmethod
    def logits(
        head: MLP,
        features: None,
        x: Float[Array, "*n d_in"],
        V: Float[Array, "*experts d_in C"],
        groups: ExpertGroups | None = None,
    ) -> Float[Array, "*slots C"]:
        if groups is not None:
            scalars = product_wide(x, V, groups).astype(x.dtype)[..., None]  # [..., k, C, 1]
            per_component = jax.vmap(lambda mlp, s: apply_mlp(mlp, s, groups), in_axes=(1, -2), out_axes=-2)
            return per_component(head, scalars)[..., 0]
        scalars = jnp.moveaxis(matmul_wide(x, V), -1, 0)
        return jnp.moveaxis(apply_scalar_mlps(head, scalars), 0, -1)

    def axes(self) -> Any:
        """Returns the axes: every array is split by component."""
        return replace_fields(self, heads=_per_component_axes(self.heads))


class VectorMLP(_Layerwise):
    """One MLP ``d_in → hidden … → 1`` for every component."""

    @staticmethod
    def logits(
        head: MLP,
        features: None,
        x: Float[Array, "*n d_in"],
        V: Float[Array, "*experts _ C"],
        groups: ExpertGroups | None = None,
    ) -> Float[Array, "*slots C"]:
        of_one = partial(apply_mlp, groups=groups)
        per_component = jax.vmap(of_one, in_axes=(0 if groups is None else 1, None), out_axes=-2)
        return per_component(head, x)[..., 0]

    def axes(self) -> Any:
        """Returns the axes: every array is split by component."""
        return replace_fields(self, heads=_per_component_axes(self.heads))


def _per_component_axes(heads: dict[str, MLP]) -> Any:
    return {
        name: tuple(layer.axes(*(None,) * (layer.b.ndim - 2), "component", columns=None) for layer in head)
        for name, head in heads.items()
    }


LayerwiseCI = SharedMLP | ScalarMLP | VectorMLP


def init_layerwise(config: LayerwiseMLP, key: PRNGKeyArray, sites: Sites) -> LayerwiseCI:
    """Draws fresh weights. Those of a site depend on its canonical number, not on how sites are stacked."""

    def head(key: PRNGKeyArray, stack: Stack) -> MLP:
        match config.kind:
            case "shared_mlp":
                return init_mlp(key, (), (stack.read_width, *config.hidden, stack.C))
            case "mlp":
                return init_mlp(key, (stack.C,), (1, *config.hidden, 1))
            case "vector_mlp":
                return init_mlp(key, (stack.C,), (stack.read_width, *config.hidden, 1))

    heads = {
        stack.name: jax.tree.map(stack.lay_out, draw_per_site(partial(head, stack=stack), key, stack.sites))
        for stack in sites.stacks
    }
    match config.kind:
        case "shared_mlp":
            return SharedMLP(heads)
        case "mlp":
            return ScalarMLP(heads)
        case "vector_mlp":
            return VectorMLP(heads)
