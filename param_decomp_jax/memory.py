"""The memory policy: how a step is laid out in time and space so that it needs less memory, with the same numbers."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array

from param_decomp_jax.attention import Attention
from param_decomp_jax.mesh import fitting_blocks
from param_decomp_jax.numerics import wide

Intermediate = Literal[
    "logits", "layers", "attention", "site_outputs", "attack_outputs", "site_inputs", "ci", "vocabulary"
]

INTERMEDIATES: dict[Intermediate, str] = {
    "logits": "causal importance logits [tokens, C] of every site; recomputed: made where a site is masked (lazy)",
    "layers": "everything else inside a layer of a masked forward; recomputed: a layer keeps its input alone",
    "attention": "what attention gives, in a masked forward whose layers are recomputed",
    "site_outputs": "outputs of the live sites, in a masked forward whose layers are recomputed",
    "attack_outputs": "the same in the forwards of an attack, which keep nothing beyond one ascent",
    "site_inputs": "what a global CI function reads on the clean pass; recomputed: from each layer's clean input",
    "ci": "everything inside the CI function's shared part but its result; recomputed block by block",
    "vocabulary": "logits over the vocabulary; recomputed: the fused KL, by blocks of tokens",
}
"""What a policy saves for the backward pass, sends to the host's pinned memory until then, or recomputes."""

OFFLOADABLE: frozenset[Intermediate] = frozenset({"attention", "site_outputs", "attack_outputs"})
"""Intermediates that can wait in pinned host memory."""


StatePart = Literal["components_moments", "ci_moments", "sources_moments"]

STATE_PARTS: dict[StatePart, str] = {
    "components_moments": "the optimiser's moments of V and U",
    "ci_moments": "the optimiser's moments of the CI function",
    "sources_moments": "Adam's moments of the persistent sources",
}
"""Parts of the train state that can lie in pinned host memory between updates, or be kept in fewer bits."""


@dataclass(frozen=True)
class MemoryPolicy:
    """Choices that may change memory and time, never a number beyond floating-point reassociation.

    ``save``, ``offload``: what is kept of `INTERMEDIATES` on the device and in pinned host memory; the rest is
    recomputed. ``layers``: one scanned body for alike layers, or the layers written out one after the other.
    ``layer_group``: layers per outer step of a nested scan that keeps only one input per group (√n checkpointing).
    ``component_block``: components of a site worked on at once, all devices together; ``token_block``: tokens the
    fused KL works on at once, all devices together. ``attention``: see `attention.py`. ``micro_batches``: parts of the
    batch, one after the other. ``donate``: the step reuses the buffers of the state it is given.

    ``offload_state``: which of `STATE_PARTS` lie in pinned host memory and are brought in for their update alone.
    ``state_dtypes``: in what they are kept, fp32 where nothing is said; the one choice here that rounds numbers.
    """

    save: frozenset[Intermediate] = frozenset(INTERMEDIATES)
    offload: frozenset[Intermediate] = frozenset()
    layers: Literal["scan", "unroll"] = "scan"
    layer_group: int | None = None
    component_block: int | None = None
    token_block: int | None = None
    attention: Attention = "plain"
    micro_batches: int = 1
    donate: bool = True
    offload_state: frozenset[StatePart] = frozenset()
    state_dtypes: tuple[tuple[StatePart, Literal["bfloat16", "float32"]], ...] = ()

    def __post_init__(self) -> None:
        assert not self.save & self.offload, "what is offloaded is not saved on the device"
        assert self.offload <= OFFLOADABLE, f"cannot be offloaded: {sorted(self.offload - OFFLOADABLE)}"

    def recomputes(self, name: Intermediate) -> bool:
        return name not in self.save and name not in self.offload

    def over_layers(
        self, body: Callable[[Any, Any], tuple[Any, Any]], carry: Any, xs: Any, of: Intermediate = "layers"
    ) -> tuple[Any, Any]:
        """``lax.scan(body, carry, xs)``, as this policy would have it; one layer alone may change the carry's shape."""
        n_layers = jax.tree.leaves(xs)[0].shape[0]
        unrolled = self.layers == "unroll" or n_layers == 1
        group = 1
        if self.recomputes(of):
            # In a scan nothing can be merged with what it recomputes: no barriers against that are needed.
            body = jax.checkpoint(body, policy=self._inside(), prevent_cse=unrolled)
            if self.layer_group is not None:
                group = max(n for n in range(1, min(self.layer_group, n_layers) + 1) if n_layers % n == 0)
        if unrolled:
            return _unrolled(body, carry, xs, n_layers)
        if group in (1, n_layers):
            return lax.scan(body, carry, xs)
        grouped = jax.tree.map(lambda x: x.reshape(n_layers // group, group, *x.shape[1:]), xs)
        of_group = jax.checkpoint(lambda c, x: lax.scan(body, c, x), prevent_cse=False)
        carry, ys = lax.scan(of_group, carry, grouped)
        return carry, jax.tree.map(lambda y: y.reshape(n_layers, *y.shape[2:]), ys)

    def _inside(self) -> Any:
        """What a recomputed layer keeps nevertheless."""
        return jax.checkpoint_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=sorted(self.save & OFFLOADABLE),
            names_which_can_be_offloaded=sorted(self.offload),
            offload_src="device",
            offload_dst="pinned_host",
        )

    def component_blocks(self, C: int) -> int:
        """Into how many blocks a site with C components is cut."""
        return fitting_blocks(C, self.component_block, "component")

    def over_blocks(self, of_block: Callable[[Any], tuple[Any, Any]], blocks: Any, n_blocks: int) -> tuple[Any, Any]:
        """Over the leading axis of ``blocks``: the sum of the first results, and the second ones stacked.

        Nothing is kept of one of several blocks, and the sum is added outside of what is recomputed, so no partial sum
        is kept either.
        """
        if n_blocks == 1:
            total, found = of_block(jax.tree.map(lambda x: x[0], blocks))
            return total, jax.tree.map(lambda x: x[None], found)
        recomputed = jax.checkpoint(of_block, prevent_cse=False)
        shapes, _ = jax.eval_shape(of_block, jax.tree.map(lambda x: x[0], blocks))
        start = jax.tree.map(lambda y: jnp.zeros(y.shape, y.dtype), shapes)

        def add(total: Any, block: Any) -> tuple[Any, Any]:
            own, found = recomputed(block)
            return jax.tree.map(jnp.add, total, own), found

        return lax.scan(add, start, blocks)

    # --- the train state between updates ---

    def fetch(self, part: StatePart, state: Any) -> Any:
        """A part of the train state as its update computes with it: on the device, in fp32 or wider."""

        def of(x: Array) -> Array:
            if not _is_kept(x):
                return x
            here = jax.device_put(x, jax.memory.Space.Device) if part in self.offload_state else x
            return wide(here)

        return jax.tree.map(of, state)

    def store(self, part: StatePart, state: Any) -> Any:
        """A part of the train state as it is kept."""
        dtype = dict(self.state_dtypes).get(part)

        def of(x: Array) -> Array:
            if not _is_kept(x):
                return x
            kept = x if dtype is None else x.astype(dtype)
            return jax.device_put(kept, jax.memory.Space.Host) if part in self.offload_state else kept

        return jax.tree.map(of, state)


def _is_kept(x: Array) -> bool:
    """Counts stay as they are and where they are."""
    return x.ndim > 0 and bool(jnp.issubdtype(x.dtype, jnp.floating))


def named(x: Array, name: Intermediate) -> Array:
    """Marks an intermediate for the policy."""
    return checkpoint_name(x, name)


def _unrolled(body: Callable[[Any, Any], tuple[Any, Any]], carry: Any, xs: Any, n_layers: int) -> tuple[Any, Any]:
    ys = []
    for row in range(n_layers):
        carry, y = body(carry, jax.tree.map(lambda x, row=row: x[row], xs))
        ys.append(y)
    return carry, jax.tree.map(lambda *rows: jnp.stack(rows), *ys)


PLAIN = MemoryPolicy()
"""Everything saved, no blocks, nothing fused: the readable reference."""

BALANCED = MemoryPolicy(
    save=frozenset({"attention", "site_outputs", "attack_outputs"}),
    component_block=1 << 13,
    token_block=1 << 15,
    attention="flash",
)
"""Nothing of the size [tokens, C] is kept; what a layer is left with after its sites is."""

LEAN = MemoryPolicy(save=frozenset({"attack_outputs"}), component_block=1 << 12, token_block=1 << 15, attention="flash")
"""As little as possible is kept."""

PUBLISHED = MemoryPolicy(save=frozenset({"logits", "site_inputs", "ci", "vocabulary"}), layers="unroll", donate=False)
"""The published step: layers unrolled and recomputed, every site's tensors alive together, no donation."""
