"""Activations of a network besides what its matrices read: the residual stream around its blocks, and what attention
and the MLP add to it (R6).

A layer exposes them through `targets/base.py:hooked`; `targets/base.py:run_layers` exposes the residual stream.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

PointKind = Literal["resid_pre", "attn_out", "mlp_out", "resid_post"]
RESID_PRE, RESID_POST = "hook_resid_pre", "hook_resid_post"
"""The hooks at the residual stream that enters a layer, and at the one that leaves it."""


@dataclass(frozen=True)
class Point:
    """An activation of the layer ``layer``: the residual stream that enters it (`resid_pre`) or leaves it
    (`resid_post`), or what its attention or its MLP adds to that (`attn_out`, `mlp_out`)."""

    layer: int
    kind: PointKind

    @property
    def name(self) -> str:
        return point_name(self.hook, self.layer)

    @property
    def hook(self) -> str:
        """The hook at which a layer exposes it, under TransformerLens' name."""
        return f"hook_{self.kind}"

    @property
    def boundary(self) -> int | None:
        """The number of the layer that a point of the residual stream enters, or the number of all layers after the
        last one."""
        return {"resid_pre": self.layer, "resid_post": self.layer + 1}.get(self.kind)


def point_name(hook: str, layer: int) -> str:
    """Returns the name of the point at a hook of a layer."""
    return f"{hook.removeprefix('hook_')}.{layer}"


def points_of_layers(n_layers: int, kinds: Sequence[PointKind]) -> tuple[Point, ...]:
    """Returns the points of a network whose layers all have ``kinds``, in order."""
    return tuple(Point(layer, kind) for layer in range(n_layers) for kind in kinds)


class UnfitPoints(ValueError):
    """Patterns that name no points of a network, or one activation twice."""


def match_points(points: Iterable[Point], patterns: Sequence[str]) -> tuple[Point, ...]:
    """Returns the points whose name matches a pattern (fnmatch), each once, in the network's order.

    Raises UnfitPoints for a pattern that matches none, and for `resid_post.l` together with `resid_pre.(l + 1)`, which
    are one activation.
    """
    points = tuple(points)
    if not points:
        raise UnfitPoints("the target has no residual stream, and so no points")
    for pattern in patterns:
        if not any(fnmatchcase(point.name, pattern) for point in points):
            kinds = ", ".join(dict.fromkeys(point.kind for point in points))
            last = max(point.layer for point in points)
            raise UnfitPoints(f"{pattern!r} matches no point; there are {kinds}, each with a layer from .0 to .{last}")
    found = tuple(point for point in points if any(fnmatchcase(point.name, pattern) for pattern in patterns))
    boundaries: dict[int, Point] = {}
    for point in found:
        if point.boundary is not None:
            other = boundaries.setdefault(point.boundary, point)
            if other != point:
                raise UnfitPoints(f"{other.name} and {point.name} are one activation; keep one of the two")
    return found
