"""Defines the wrapper's `memory` section: a preset whose settings can be overridden one by one."""

from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from param_decomp_jax.sharding.memory import (
    BALANCED,
    FAST,
    INTERMEDIATES,
    LEAN,
    OFFLOADABLE,
    ONE_CARD,
    PLAIN,
    PUBLISHED,
    STATE_PARTS,
    Attention,
    HeldBy,
    HeldGroup,
    Intermediate,
    MemoryPolicy,
    StatePart,
)
from param_decomp_lab.schema.mistakes import Wrong, rule_error
from param_decomp_lab.schema.spelling import nearest
from param_decomp_lab.schema.strict import Count, ListOf, Strict, rule

Preset = Literal["plain", "one_card", "balanced", "lean", "fast", "published"]
PRESETS: dict[Preset, MemoryPolicy] = {
    "plain": PLAIN,
    "one_card": ONE_CARD,
    "balanced": BALANCED,
    "lean": LEAN,
    "fast": FAST,
    "published": PUBLISHED,
}
KEEP_ALL: frozenset[Preset] = frozenset({"plain", "one_card"})
"""Presets under which masked forwards are not recomputed, as `remat_recon_forwards: false` says."""


def _one_of(known: Collection[str]) -> Callable[[str], str]:
    def known_name(name: str) -> str:
        if name not in known:
            raise rule_error(("", f"there is no '{name}' here; {nearest(name, known)}"))
        return name

    return known_name


Names = ListOf[Annotated[str, AfterValidator(_one_of(INTERMEDIATES))]]
NamesOnHost = ListOf[Annotated[str, AfterValidator(_one_of((*INTERMEDIATES, *STATE_PARTS)))]]
OptimizerName = Literal["adamw", "lion", "adafactor"]


class Optimizers(Strict):
    """Optimisers used instead of AdamW (T1), with the schema file's learning rates, betas and weight decay."""

    components: OptimizerName = "adamw"
    ci_fn: OptimizerName = "adamw"


class Memory(Strict):
    """Memory settings. ``preset``: if null, `remat_recon_forwards` decides. Every other key overrides the preset."""

    preset: Preset | None = None
    save: Names = ()
    offload: NamesOnHost = ()
    recompute: Names = ()
    layers: Literal["scan", "unroll"] = "scan"
    layer_group: Count | None = None
    component_block: Count | None = None
    token_block: Count | None = None
    vocabulary_block: Count | None = None
    attention: Attention = "plain"
    micro_batches: Count = 1
    donate: bool = True
    xla_remat: bool = True
    held: dict[HeldGroup, HeldBy] = Field(default_factory=dict)
    collective_mib: Count | None = None
    state_dtypes: dict[StatePart, Literal["float32", "bfloat16"]] = Field(default_factory=dict)
    optimizers: Optimizers = Optimizers()

    @rule
    def _disjoint(self) -> Iterator[Wrong]:
        lists = {"save": self.save, "offload": self.offload, "recompute": self.recompute}
        for name in INTERMEDIATES:
            keys = [key for key, names in lists.items() if name in names]
            if len(keys) > 1:
                yield keys[1], f"'{name}' is listed in {' and in '.join(keys)}; keep one"

    @rule
    def _can_be_on_the_host(self) -> Iterator[Wrong]:
        can = (*(name for name in INTERMEDIATES if name in OFFLOADABLE), *STATE_PARTS)
        for name in self.offload:
            if name in INTERMEDIATES and name not in can:
                yield "offload", f"'{name}' cannot be kept in host memory; these can: {', '.join(can)}"

    def resolved(self, preset: Preset) -> "Memory":
        """Returns a copy with every setting explicit, taken from ``preset`` if none was given."""
        policy = self.policy(preset)
        chosen = {name: getattr(policy, name) for name in _CHOICES}
        return Memory(
            preset=preset,
            save=tuple(name for name in INTERMEDIATES if name in policy.save),
            offload=tuple(name for name in (*INTERMEDIATES, *STATE_PARTS) if name in self._offloaded(policy)),
            recompute=tuple(name for name in INTERMEDIATES if policy.recomputes(name)),
            held=dict(policy.held),
            state_dtypes=dict(policy.state_dtypes),
            optimizers=self.optimizers,
            **chosen,
        )

    @staticmethod
    def _offloaded(policy: MemoryPolicy) -> frozenset[str]:
        return frozenset((*policy.offload, *policy.offload_state))

    def policy(self, preset: Preset) -> MemoryPolicy:
        """Returns the core's memory policy: ``preset`` with the given keys overridden."""
        base = PRESETS[preset]
        moved: frozenset[Any] = frozenset((*self.save, *self.offload, *self.recompute))
        given: dict[str, Any] = {name: getattr(self, name) for name in _CHOICES if name in self.model_fields_set}
        save: frozenset[Intermediate] = (base.save - moved) | frozenset(_names(self.save))
        offload: frozenset[Intermediate] = (base.offload - moved) | frozenset(_names(self.offload))
        on_host: frozenset[StatePart] = frozenset(part for part in STATE_PARTS if part in self.offload)
        if "held" in self.model_fields_set:
            given["held"] = tuple(sorted(self.held.items()))
        if self.state_dtypes:
            given["state_dtypes"] = tuple(sorted(self.state_dtypes.items()))
        return replace(base, save=save, offload=offload, offload_state=base.offload_state | on_host, **given)


_CHOICES = (
    *("layers", "layer_group", "component_block", "token_block", "vocabulary_block"),
    *("attention", "micro_batches", "donate", "xla_remat", "collective_mib"),
)
"""Keys that are fields of `MemoryPolicy` under the same name."""


def _names(given: tuple[str, ...]) -> tuple[Intermediate, ...]:
    return tuple(name for name in INTERMEDIATES if name in given)
