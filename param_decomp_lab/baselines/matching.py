"""Matches a baseline to exactly the L0 of a decomposition, which need not be an integer (B5)."""

import math
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

P = TypeVar("P", bound="DataclassInstance")


def shares(l0: float) -> dict[int, float]:
    """Returns the numbers of parts that rows of the data have on, ascending, and the share of the
    rows with each (B5).
    """
    fewer, more = max(1, math.floor(l0)), max(1, math.ceil(l0))
    return {fewer: 1.0} if fewer == more else {fewer: more - l0, more: l0 - fewer}


def mixed(points: Mapping[float, P], l0: float) -> P:
    """Mixes points in which all rows have the same number of parts on into one in which each number has its share of
    the rows (B5). Every value is a mean over rows, so it is the weighted mean of theirs; texts are those of the first
    point. Raises KeyError if a number of parts is missing.
    """
    of = shares(l0)
    chosen = [points[k] for k in of]

    def mean(*values: Any) -> Any:
        if None in values or isinstance(values[0], str):
            return values[0]
        if isinstance(values[0], tuple):
            return tuple(mean(*each) for each in zip(*values, strict=True))
        return sum(share * x for share, x in zip(of.values(), values, strict=True))

    return replace(chosen[0], **{f.name: mean(*(getattr(p, f.name) for p in chosen)) for f in fields(chosen[0])})
