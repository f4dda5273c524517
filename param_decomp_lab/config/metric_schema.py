"""Defines what `eval.metrics` takes: any LOSS without a coefficient, and the metrics that are not losses."""

from collections.abc import Iterator
from typing import Annotated

from pydantic import BeforeValidator, SerializeAsAny

from param_decomp_lab.config.loss_schema import LOSSES, Loss, not_refused
from param_decomp_lab.metrics import METRICS, Metric
from param_decomp_lab.schema.kinds import by_type
from param_decomp_lab.schema.mistakes import Wrong
from param_decomp_lab.schema.strict import Strict, rule_here


def _without_coefficient(metric: Strict) -> Iterator[Wrong]:
    if isinstance(metric, Loss) and metric.coeff is not None:
        given = metric.coeff if isinstance(metric.coeff, float) else "a schedule"
        yield (
            "coeff",
            f"is {given}, but metrics are reported without a coefficient; remove it or set it to null",
        )


Measured = Annotated[
    Loss | Metric,
    SerializeAsAny(),
    by_type(LOSSES, METRICS),
    rule_here(_without_coefficient),
    BeforeValidator(not_refused),
]
