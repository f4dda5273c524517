"""The global CI MLP (C4): one MLP reads the concatenation of every site's clean input."""

from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
from jaxtyping import Array, Float, PRNGKeyArray

from param_decomp_jax.ci.affine import (
    HIDDEN_GAIN,
    MLP,
    Affine,
    GlobalCI,
    JointAffine,
    boundaries,
    gelu,
    init_affine,
    init_heads,
    init_joint_affine,
    read_by,
)  # fmt: skip
from param_decomp_jax.ci.taps import Reads, Taps
from param_decomp_jax.decomposition.sites import Sites
from param_decomp_jax.sharding.memory import MemoryPolicy
from param_decomp_jax.sharding.mesh import constrain, gather_tree, replace_fields


@dataclass(frozen=True)
class GlobalMLP:
    """The settings of the global MLP. ``hidden``: the widths of the hidden layers, at least one. ``taps``: what it
    reads; None: the inputs of all sites."""

    hidden: tuple[int, ...]
    taps: Taps | None = None


class GlobalMLPCI(GlobalCI):
    """An MLP ``Σ d_in → hidden … → Σ C``, with its first layer kept by stack and its last layer cut into one head per
    site."""

    first: JointAffine
    middle: MLP
    heads: dict[str, Affine]
    boundaries: tuple[int, ...] = eqx.field(static=True, default=())

    def features(
        self, inputs: Reads, leading: tuple[int, ...], compute_dtype: Any, memory: MemoryPolicy
    ) -> Float[Array, "*n d"]:
        """Returns the last hidden layer, from what is read. ``leading``: the axes of an activation before its last
        one."""
        read = read_by(self.boundaries, inputs)
        h = gelu(self.first(read, leading, lambda x: x.astype(compute_dtype), memory)).astype(compute_dtype)
        for layer in self.middle:
            h = gelu(gather_tree(layer, layer.axes(columns="split"), compute_dtype)(h)).astype(compute_dtype)
        return constrain(h, "batch")

    def axes(self) -> Any:
        """Returns the axes: every matrix is split by output, the heads by component."""
        return replace_fields(
            self,
            first=self.first.axes(),
            middle=tuple(layer.axes(columns="split") for layer in self.middle),
            heads=self.heads_axes(),
        )


def init_global_mlp(config: GlobalMLP, key: PRNGKeyArray, sites: Sites) -> GlobalMLPCI:
    """Draws fresh weights (C4)."""
    to_first, to_middle, to_heads = jax.random.split(key, 3)
    widths = zip(config.hidden[:-1], config.hidden[1:], strict=True)
    middle = tuple(
        init_affine(jax.random.fold_in(to_middle, n), (), d_in, d_out, HIDDEN_GAIN)
        for n, (d_in, d_out) in enumerate(widths)
    )
    return GlobalMLPCI(
        first=init_joint_affine(to_first, sites, config.hidden[0], config.taps),
        middle=middle,
        heads=init_heads(to_heads, sites, config.hidden[-1]),
        boundaries=boundaries(config.taps, sites),
    )
