"""The METRIC table of the torch schema: any LOSS without a coefficient, and metrics that are not losses."""

from collections.abc import Iterator
from typing import Annotated, Literal, get_args

from pydantic import BeforeValidator, Field, SerializeAsAny

from param_decomp_lab.config.loss_schema import LOSSES, Loss, not_refused
from param_decomp_lab.schema.kinds import by_type
from param_decomp_lab.schema.mistakes import Wrong
from param_decomp_lab.schema.strict import Count, Fraction, ListOf, NonNegative, Strict, Width, rule_here


class CEandKLLosses(Strict):
    type: Literal["CEandKLLosses"]
    rounding_threshold: Fraction


class CI_L0(Strict):
    type: Literal["CI_L0"]
    groups: dict[str, Annotated[ListOf[str], Field(min_length=1)]] | None
    ci_alive_threshold: NonNegative = 0.0


class CIHistograms(Strict):
    type: Literal["CIHistograms"]
    n_batches_accum: Count | None


class ComponentActivationDensity(Strict):
    type: Literal["ComponentActivationDensity"]
    ci_alive_threshold: NonNegative = 0.0


class CIMeanPerComponent(Strict):
    type: Literal["CIMeanPerComponent"]


class CIHiddenActsReconLoss(Strict):
    type: Literal["CIHiddenActsReconLoss"]


class IdentityPattern(Strict):
    layer_pattern: str
    n_features: Width


class DensePattern(Strict):
    layer_pattern: str
    k: Count


class IdentityCIError(Strict):
    type: Literal["IdentityCIError"]
    identity_ci: ListOf[IdentityPattern] | None
    dense_ci: ListOf[DensePattern] | None


class PermutedCIPlots(Strict):
    type: Literal["PermutedCIPlots"]
    identity_patterns: ListOf[str] | None
    dense_patterns: ListOf[str] | None


class UVPlots(Strict):
    type: Literal["UVPlots"]
    identity_patterns: ListOf[str] | None
    dense_patterns: ListOf[str] | None


OnlyMeasured = (
    CEandKLLosses
    | CI_L0
    | CIHistograms
    | ComponentActivationDensity
    | CIMeanPerComponent
    | CIHiddenActsReconLoss
    | IdentityCIError
    | PermutedCIPlots
    | UVPlots
)


def _without_coefficient(metric: Strict) -> Iterator[Wrong]:
    if isinstance(metric, Loss) and metric.coeff is not None:
        yield (
            "coeff",
            f"is {metric.coeff}, but metrics are reported without a coefficient; remove it or set it to null",
        )


Metric = Annotated[
    Loss | OnlyMeasured,
    SerializeAsAny(),
    by_type(LOSSES, {model.__name__: model for model in get_args(OnlyMeasured)}),
    rule_here(_without_coefficient),
    BeforeValidator(not_refused),
]
