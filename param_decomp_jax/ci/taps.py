"""Taps: residual streams of the clean pass, which a CI function can read in place of the inputs of its sites (C10)."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from jaxtyping import Array, Float

from param_decomp_jax.ci.inputs import CIInputs, KeptInputs
from param_decomp_jax.decomposition.sites import Sites
from param_decomp_jax.targets.points import Point

TAPS = "taps"
"""The name of the rows of a projection that reads taps."""


@dataclass(frozen=True)
class ResidualInputs:
    """The residual streams of the clean pass, held constant.

    ``at(boundaries)``: returns those that enter the blocks with these numbers, stacked. The number of blocks stands for
    the output of the last block.
    """

    at: Callable[[Sequence[int]], Float[Array, "taps *n d"]]

    def kept(self, boundaries: Sequence[int]) -> KeptInputs:
        """Returns some of them, in the form that a projection reads."""
        return KeptInputs({TAPS: self.at(boundaries)})


Reads = CIInputs | ResidualInputs
"""What a CI function reads: the inputs of sites, or, if it has boundaries, residual streams."""


class UnfitTaps(ValueError):
    """Taps that do not fit a target. The message begins with what is wrong."""


@dataclass(frozen=True)
class Taps:
    """The residual streams that a group reads. ``choice``: the one that enters the first block with sites of the group,
    or those that enter each such block, or, given offsets, those that enter the blocks at these offsets from the first.
    ``width``: that of the residual stream; None while the target is not known yet."""

    choice: Literal["first_block_resid", "all_block_resids"] | tuple[int, ...]
    width: int | None = None

    @property
    def known_width(self) -> int:
        assert self.width is not None, "the target is not known yet"
        return self.width

    def boundaries(self, layers: Iterable[int]) -> tuple[int, ...]:
        """Returns what a group with sites in these layers reads. The embedding's layer, −1, is not counted.

        Raises UnfitTaps if there is no other layer.
        """
        blocks = sorted({layer for layer in layers if layer >= 0})
        if not blocks:
            raise UnfitTaps("a group has no site but the embedding, which belongs to no block")
        match self.choice:
            case "first_block_resid":
                return tuple(blocks[:1])
            case "all_block_resids":
                return tuple(blocks)
            case offsets:
                return tuple(blocks[0] + offset for offset in offsets)


def all_layers(sites: Sites) -> list[int]:
    """Returns the layers that have sites, in order."""
    return [layer for segment in sites.segments for layer in range(segment.first, segment.stop)]


def tap_points(boundaries: Iterable[int], sites: Sites, n_blocks: int) -> tuple[Point, ...]:
    """Returns the points at which the clean pass must record these residual streams. Those that enter a layer with
    sites are recorded anyway (F6)."""
    own = set(all_layers(sites))
    return tuple(
        Point(boundary, "resid_pre") if boundary < n_blocks else Point(boundary - 1, "resid_post")
        for boundary in sorted(set(boundaries) - own)
    )
