"""The memory policy: how a step is arranged in time and space to need less memory, with the same numbers.

`sharding/remat.py` and `method/offload.py` carry it out. This file does without JAX, because configurations are read
with it.
"""

from dataclasses import dataclass
from typing import Literal

Intermediate = Literal[
    "logits", "layers", "attention", "site_outputs", "attack_outputs", "site_inputs", "ci", "vocabulary", "deltas"
]

INTERMEDIATES: dict[Intermediate, str] = {
    "logits": "causal importance logits [tokens, C] of every site; recomputed: made where a site is masked (lazy)",
    "layers": "everything else inside a layer of a masked forward; recomputed: a layer keeps its input alone",
    "attention": "outputs of attention, in a masked forward whose layers are recomputed",
    "site_outputs": "outputs of the live sites, in a masked forward whose layers are recomputed",
    "attack_outputs": "the same in the forwards of an attack, which keep nothing beyond one ascent",
    "site_inputs": "what a global CI function reads on the clean pass; recomputed: from each layer's clean input",
    "ci": "everything inside the CI function's shared part but its result; recomputed block by block",
    "vocabulary": "logits over the vocabulary; recomputed: the fused KL, by blocks of tokens",
    "deltas": "W - VU of every site, split over the devices, where layers are recomputed; of the faithfulness loss",
}
"""Intermediates that a policy saves for the backward pass, keeps in pinned host memory until then, or recomputes."""

OFFLOADABLE: frozenset[Intermediate] = frozenset({"attention", "site_outputs", "attack_outputs"})
"""Intermediates that can wait in pinned host memory."""


Attention = Literal["plain", "blocked", "flash"]
"""``plain``: all scores at once, kept for the backward.

``blocked``: the scores of one block of queries at a time, recomputed in the backward pass.

``flash``: cuDNN's kernel, if the program is lowered for an NVIDIA GPU and the kernel supports the heads (bf16 or fp16;
8, 16, … 128 dimensions); ``blocked`` otherwise.
"""

StatePart = Literal["components_moments", "ci_moments", "sources_moments"]

STATE_PARTS: dict[StatePart, str] = {
    "components_moments": "the optimiser's moments of V and U",
    "ci_moments": "the optimiser's moments of the CI function",
    "sources_moments": "Adam's moments of the persistent sources",
}
"""Parts of the train state that can lie in pinned host memory between updates, or be kept in fewer bits."""


HeldGroup = Literal["components", "ci", "heads", "target", "sources"]

HELD_GROUPS: dict[HeldGroup, str] = {
    "components": "V and U",
    "ci": "the CI function's matrices, those of its heads too unless `heads` says otherwise",
    "heads": "the heads of the CI function, of which every masked site reads its own",
    "target": "the frozen network; held for good, not for a step",
    "sources": "sources that all rows of the batch share, of persistent and fresh attacks; held for an ascent",
}
"""Groups of matrices of which a copy can be held, so that they are not gathered from all devices wherever they are
used."""

HeldBy = Literal["node", "device"]
"""``node``: each node has a whole copy, split over its devices. ``device``: each device has one."""


_COMBINED = ("all_gather", "reduce_scatter", "all_reduce")


@dataclass(frozen=True)
class MemoryPolicy:
    """Choices that may change memory and time, but numbers only by floating-point reassociation.

    ``save``, ``offload``: which of `INTERMEDIATES` are kept on the device and in pinned host memory; the others are
    recomputed. ``layers``: one scanned body for layers of one form, or unrolled layers. ``layer_group``: layers per
    outer step of a nested scan that keeps only one input per group (√n checkpointing). ``component_block``,
    ``token_block``: how many components and tokens a site processes at once. ``vocabulary_block``: how many tokens the
    fused KL processes at once. All three are counted over all devices. ``attention``: see `attention.py`.
    ``micro_batches``: the number of parts of the batch that run in sequence. ``donate``: whether the step reuses the
    buffers of the state that it is given. ``xla_remat``: whether XLA may recompute more by itself when memory runs
    short.

    ``held``: which of `HELD_GROUPS` have a copy held for a step, in the dtype of products, and by what.
    ``collective_mib``: transfers between devices at one point of a program are combined into collective operations of
    up to this many MiB; None leaves XLA's default of 30.

    ``offload_state``: which of `STATE_PARTS` lie in pinned host memory and are fetched only for their update.
    ``state_dtypes``: the dtypes of `STATE_PARTS`, fp32 if not given. This is the only choice here that rounds numbers.
    """

    save: frozenset[Intermediate] = frozenset(INTERMEDIATES)
    offload: frozenset[Intermediate] = frozenset()
    layers: Literal["scan", "unroll"] = "scan"
    layer_group: int | None = None
    component_block: int | None = None
    token_block: int | None = None
    vocabulary_block: int | None = None
    attention: Attention = "plain"
    micro_batches: int = 1
    donate: bool = True
    xla_remat: bool = True
    held: tuple[tuple[HeldGroup, HeldBy], ...] = ()
    collective_mib: int | None = None
    offload_state: frozenset[StatePart] = frozenset()
    state_dtypes: tuple[tuple[StatePart, Literal["float32", "bfloat16"]], ...] = ()

    def __post_init__(self) -> None:
        assert not self.save & self.offload, "what is offloaded is not saved on the device"
        assert self.offload <= OFFLOADABLE, f"cannot be offloaded: {sorted(self.offload - OFFLOADABLE)}"

    @property
    def compiler_options(self) -> dict[str, str | bool]:
        """Returns XLA's options for compiling the step. Options for GPUs are accepted without a GPU and do nothing
        there."""
        options: dict[str, str | bool] = {}
        if not self.xla_remat:
            options["xla_disable_hlo_passes"] = "rematerialization"
        if self.collective_mib is not None:
            most = str(self.collective_mib * 2**20)
            options |= {f"xla_gpu_{kind}_combine_threshold_bytes": most for kind in _COMBINED}
            # Otherwise XLA combines only arrays that are split along the same axis number: V, but not U.
            options |= {f"xla_gpu_enable_{kind}_combine_by_dim": False for kind in _COMBINED if kind != "all_reduce"}
        return options

    def held_by(self, group: HeldGroup) -> HeldBy | None:
        """Returns what holds a copy of this group during a step; None if nothing does."""
        held = dict(self.held)
        return held.get("heads", held.get("ci")) if group == "heads" else held.get(group)

    def recomputes(self, name: Intermediate) -> bool:
        return name not in self.save and name not in self.offload

    def writes_out_ascents(self, n: int) -> bool:
        """Returns whether ``n`` ascents of an attack are unrolled, as the layers are. What they have in common, the
        first live layer up to its masks, is then computed once per step. Many ascents would take long to compile."""
        return self.layers == "unroll" and not self.recomputes("layers") and n <= 4


PLAIN = MemoryPolicy()
"""Everything saved, no blocks, nothing fused: the readable reference."""

ONE_CARD = MemoryPolicy(
    layers="unroll", vocabulary_block=1 << 11, attention="flash", xla_remat=False, held=(("components", "device"),)
)
"""Everything saved, for the fastest step on one card: only attention recomputes anything."""

BALANCED = MemoryPolicy(
    save=frozenset({"attention", "site_outputs", "attack_outputs", "deltas"}),
    component_block=1 << 13,
    vocabulary_block=1 << 15,
    attention="flash",
    xla_remat=False,
)
"""Nothing of the size [tokens, C] is kept, only what remains of a layer without its sites."""

LEAN = MemoryPolicy(
    save=frozenset({"attack_outputs", "deltas"}),
    component_block=1 << 12,
    token_block=1 << 20,
    vocabulary_block=1 << 15,
    attention="flash",
    xla_remat=False,
)
"""As little as possible kept."""

FAST = MemoryPolicy(
    save=frozenset({"attention", "site_outputs", "attack_outputs", "deltas"}),
    vocabulary_block=1 << 15,
    attention="flash",
    xla_remat=False,
    held=(("ci", "device"), ("components", "device"), ("sources", "device"), ("target", "device")),
    collective_mib=1 << 12,
)
"""Every device has whole copies of the matrices it multiplies by, which trades memory for fewer gathers. Only the KL is
computed in blocks."""

PUBLISHED = MemoryPolicy(save=frozenset({"logits", "site_inputs", "ci", "vocabulary"}), layers="unroll", donate=False)
"""The published step: layers unrolled and recomputed, every site's tensors alive together, no donation."""
