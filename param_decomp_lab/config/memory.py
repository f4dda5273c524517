"""The wrapper's `memory` section: a preset, any part of which can be replaced."""

from dataclasses import fields, replace
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import field_validator, model_validator

from param_decomp_jax.attention import Attention
from param_decomp_jax.memory import (
    BALANCED,
    INTERMEDIATES,
    LEAN,
    OFFLOADABLE,
    PLAIN,
    PUBLISHED,
    Intermediate,
    MemoryPolicy,
)
from param_decomp_lab.config.strict import Count, ListOf, Strict, broken, nearest

Preset = Literal["plain", "balanced", "lean", "published"]
PRESETS: dict[Preset, MemoryPolicy] = {
    "plain": PLAIN,
    "balanced": BALANCED,
    "lean": LEAN,
    "published": PUBLISHED,
}
Names = ListOf[Annotated[str, "an intermediate"]]


class Memory(Strict):
    """``preset``: null as `remat_recon_forwards` says. Every other key that is given replaces the preset's choice."""

    later: ClassVar[frozenset[str]] = frozenset({"state_dtypes"})

    preset: Preset | None = None
    save: Names = ()
    offload: Names = ()
    recompute: Names = ()
    layers: Literal["scan", "unroll"] = "scan"
    layer_group: Count | None = None
    component_block: Count | None = None
    token_block: Count | None = None
    attention: Attention = "plain"
    micro_batches: Count = 1
    donate: bool = True

    @field_validator("save", "offload", "recompute")
    @classmethod
    def _known(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        unknown = [(str(n), f"'{name}' is no intermediate; {nearest(name, INTERMEDIATES)}")
                   for n, name in enumerate(names) if name not in INTERMEDIATES]  # fmt: skip
        if unknown:
            raise broken(*unknown)
        return names

    @model_validator(mode="after")
    def _disjoint(self) -> "Memory":
        lists = {"save": self.save, "offload": self.offload, "recompute": self.recompute}
        for name in INTERMEDIATES:
            places = [key for key, names in lists.items() if name in names]
            if len(places) > 1:
                raise broken((places[1], f"'{name}' stands in {' and in '.join(places)}; keep one"))
        held = [name for name in self.offload if name not in OFFLOADABLE]
        if held:
            can = ", ".join(sorted(OFFLOADABLE))
            raise broken(("offload", f"'{held[0]}' cannot wait in host memory; these can: {can}"))
        return self

    def settled(self, preset: Preset) -> "Memory":
        """The same with every choice written out, those of ``preset`` where none was given."""
        policy = self.policy(preset)
        chosen = {name: getattr(policy, name) for name in _CHOICES}
        return Memory(
            preset=preset,
            save=tuple(name for name in INTERMEDIATES if name in policy.save),
            offload=tuple(name for name in INTERMEDIATES if name in policy.offload),
            recompute=tuple(name for name in INTERMEDIATES if policy.recomputes(name)),
            **chosen,
        )

    def policy(self, preset: Preset) -> MemoryPolicy:
        """What the core is told: ``preset`` with the keys that were given in its place."""
        base = PRESETS[preset]
        moved: frozenset[Any] = frozenset((*self.save, *self.offload, *self.recompute))
        given: dict[str, Any] = {name: getattr(self, name) for name in _CHOICES if name in self.model_fields_set}
        save: frozenset[Intermediate] = (base.save - moved) | frozenset(_names(self.save))
        offload: frozenset[Intermediate] = (base.offload - moved) | frozenset(_names(self.offload))
        return replace(base, save=save, offload=offload, **given)


_CHOICES = tuple(field.name for field in fields(MemoryPolicy) if field.name not in ("save", "offload"))


def _names(given: tuple[str, ...]) -> tuple[Intermediate, ...]:
    known: tuple[Intermediate, ...] = get_args(Intermediate)
    return tuple(name for name in known if name in given)
