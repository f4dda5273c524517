"""Defines the parts of the torch schema's losses: SCHEDULE, ROUTING, and the optimisers and scopes
of persistent PGD.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Discriminator, Field, Tag

from param_decomp_lab.schema.mistakes import Wrong
from param_decomp_lab.schema.strict import Count, Fraction, ListOf, NonNegative, Positive, Strict, rule, spelling


class ScheduleConfig(Strict):
    """SCHEDULE, in the torch schema's form (T2)."""

    start_val: NonNegative
    warmup_pct: Fraction = 0.0
    final_val_frac: NonNegative = 1.0
    fn_type: Literal["constant", "linear", "cosine"] = "constant"

    @property
    def bounds(self) -> tuple[float, float]:
        """The least and the greatest value over training."""
        ends = (self.start_val, self.start_val * self.final_val_frac)
        return (0.0 if self.warmup_pct > 0 else min(ends), max(ends))

    @rule
    def _constant_stays(self) -> Iterator[Wrong]:
        if self.fn_type == "constant" and self.final_val_frac != 1.0:
            wrong = f"is {self.final_val_frac}, but fn_type constant requires final_val_frac: 1"
            yield "final_val_frac", f"{wrong}; or choose fn_type linear or cosine"


class KnotConfig(Strict):
    """A point of a schedule that is given by knots."""

    at: Fraction
    frac: Fraction
    interp: Literal["linear", "cosine", "hold"] = "linear"


class KnotsConfig(Strict):
    """SCHEDULE, given by knots (T8)."""

    max_val: Positive
    points: Annotated[ListOf[KnotConfig], Field(min_length=2)]

    @property
    def bounds(self) -> tuple[float, float]:
        """The least and the greatest value over training."""
        return self.max_val * min(point.frac for point in self.points), self.max_val

    @rule
    def _from_start_to_end(self) -> Iterator[Wrong]:
        if self.points[0].at != 0:
            yield "points.0.at", f"is {self.points[0].at}; the first knot must have at: 0, the first step"
        if self.points[-1].at != 1:
            yield (
                f"points.{len(self.points) - 1}.at",
                f"is {self.points[-1].at}; the last knot must have at: 1, the last step",
            )

    @rule
    def _in_order(self) -> Iterator[Wrong]:
        for n, (before, point) in enumerate(pairwise(self.points), start=1):
            if point.at <= before.at:
                order = "list the knots in order, each at a larger share of training than the one before"
                yield f"points.{n}.at", f"is {point.at}, not above {before.at}; {order}"

    @rule
    def _reaches_its_peak(self) -> Iterator[Wrong]:
        highest = max(point.frac for point in self.points)
        if highest == 0:
            yield "points", "have frac: 0 everywhere; write the number 0, or give one knot frac: 1"
        elif highest < 1:
            instead = f"write max_val: {self.max_val * highest:g} and divide every frac by {highest:g}"
            yield "points", f"reach {highest:g} of max_val, and one must have frac: 1; {instead}"


def _form(raw: Any) -> str:
    """Tells which of the three forms of SCHEDULE a value has, or is meant to have."""
    if isinstance(raw, dict):
        return "knots" if any(spelling(KnotsConfig, raw, name) for name in KnotsConfig.model_fields) else "schedule"
    return "knots" if isinstance(raw, KnotsConfig) else "schedule" if isinstance(raw, ScheduleConfig) else "number"


Number = TypeVar("Number")
Scheduled = Annotated[
    Annotated[Number, Tag("number")]
    | Annotated[ScheduleConfig, Tag("schedule")]
    | Annotated[KnotsConfig, Tag("knots")],
    Discriminator(_form),
]
"""SCHEDULE in any of its forms; a number is a constant schedule."""
ScheduleLike = float | ScheduleConfig | KnotsConfig


def bounds(value: ScheduleLike) -> tuple[float, float]:
    """The least and the greatest value over training."""
    return (value, value) if isinstance(value, float) else value.bounds


def above_0(value: ScheduleLike) -> str:
    """Says what to write for a schedule that must not be 0 at any step."""
    match value:
        case ScheduleConfig():
            return "give start_val and final_val_frac above 0, and warmup_pct: 0"
        case KnotsConfig():
            return "give every knot a frac above 0"
        case _:
            return "give a number above 0"


class UniformKSubsetRouting(Strict):
    type: Literal["uniform_k_subset"]


class StaticProbabilityRouting(Strict):
    type: Literal["static_probability"]
    p: Annotated[float, Field(gt=0, le=1)]


Routing = Annotated[UniformKSubsetRouting | StaticProbabilityRouting, Field(discriminator="type")]
DEFAULT_ROUTING = UniformKSubsetRouting(type="uniform_k_subset")
"""The default of the four losses on subsets of sites."""


class AdamConfig(Strict):
    type: Literal["adam"]
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    eps: Positive = 1e-8
    lr_schedule: Scheduled[NonNegative]


class SGDConfig(Strict):
    type: Literal["sgd"]
    lr_schedule: Scheduled[NonNegative]


class MomentumConfig(Strict):
    type: Literal["momentum"]
    momentum: Annotated[float, Field(ge=0, lt=1)]
    lr_schedule: Scheduled[NonNegative]


class SignConfig(Strict):
    type: Literal["sign"]
    lr_schedule: Scheduled[NonNegative]


class SingleSourceScope(Strict):
    type: Literal["single_source"]


class BroadcastAcrossBatchScope(Strict):
    type: Literal["broadcast_across_batch"]


class PerBatchPerPositionScope(Strict):
    type: Literal["per_batch_per_position"]


class PerBatchScope(Strict):
    type: Literal["per_batch"]


class RepeatAcrossBatchScope(Strict):
    type: Literal["repeat_across_batch"]
    n_sources: Count


class PoolConfig(Strict):
    """The pool of sources of A9."""

    size_per_batch_element: Count


Ascent = Annotated[AdamConfig | SignConfig | SGDConfig | MomentumConfig, Field(discriminator="type")]
Scope = Annotated[
    SingleSourceScope | BroadcastAcrossBatchScope | PerBatchPerPositionScope | PerBatchScope | RepeatAcrossBatchScope,
    Field(discriminator="type"),
]
