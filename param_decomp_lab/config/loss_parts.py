"""What losses of the torch schema are made of: SCHEDULE, ROUTING, and the ascents and scopes of persistent PGD."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from param_decomp_lab.schema.mistakes import Wrong
from param_decomp_lab.schema.strict import Count, Fraction, NonNegative, Positive, Strict, rule


class ScheduleConfig(Strict):
    """SCHEDULE (T2)."""

    start_val: NonNegative
    warmup_pct: Fraction = 0.0
    final_val_frac: NonNegative = 1.0
    fn_type: Literal["constant", "linear", "cosine"] = "constant"

    @rule
    def _constant_stays(self) -> Iterator[Wrong]:
        if self.fn_type == "constant" and self.final_val_frac != 1.0:
            wrong = f"is {self.final_val_frac}, but fn_type constant requires final_val_frac: 1"
            yield "final_val_frac", f"{wrong}; or choose fn_type linear or cosine"


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
    lr_schedule: ScheduleConfig


class SignConfig(Strict):
    type: Literal["sign"]
    lr_schedule: ScheduleConfig


class SingleSourceScope(Strict):
    type: Literal["single_source"]


class BroadcastAcrossBatchScope(Strict):
    type: Literal["broadcast_across_batch"]


class PerBatchPerPositionScope(Strict):
    type: Literal["per_batch_per_position"]


class RepeatAcrossBatchScope(Strict):
    type: Literal["repeat_across_batch"]
    n_sources: Count


Ascent = Annotated[AdamConfig | SignConfig, Field(discriminator="type")]
Scope = Annotated[
    SingleSourceScope | BroadcastAcrossBatchScope | PerBatchPerPositionScope | RepeatAcrossBatchScope,
    Field(discriminator="type"),
]
