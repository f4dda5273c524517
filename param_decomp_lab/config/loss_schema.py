"""The LOSS, SCHEDULE and ROUTING tables of the torch schema. Each class is named after its `type`."""

from collections.abc import Iterator
from math import inf
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from param_decomp_lab.config.strict import (
    Count,
    Fraction,
    Natural,
    NonNegative,
    Positive,
    Strict,
    Wrong,
    rule,
    rule_error,
    where_it_stands,
)

Name = Annotated[str, Field(pattern=r"^[^/\s]([^/]*[^/\s])?$")]
"""No slashes: names become parts of metric keys and of paths in a checkpoint."""


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
"""Of the four losses on subsets of sites."""


class Loss(Strict):
    """Keys that every LOSS has. ``coeff`` is required in `pd.loss_metrics` and absent in `eval.metrics`."""

    type: str
    coeff: float | None = None
    name: Name | None = None

    @rule
    def _not_total(self) -> Iterator[Wrong]:
        if self.name == "total":
            yield "name", "'total' is the key of the sum of all terms; choose another name"


class FaithfulnessLoss(Loss):
    type: Literal["FaithfulnessLoss"]


class UnmaskedReconLoss(Loss):
    type: Literal["UnmaskedReconLoss"]


class CIMaskedReconLoss(Loss):
    type: Literal["CIMaskedReconLoss"]


class CIMaskedReconLayerwiseLoss(Loss):
    type: Literal["CIMaskedReconLayerwiseLoss"]


class CIMaskedReconSubsetLoss(Loss):
    type: Literal["CIMaskedReconSubsetLoss"]
    routing: Routing = DEFAULT_ROUTING


class StochasticReconLoss(Loss):
    type: Literal["StochasticReconLoss"]


class StochasticReconLayerwiseLoss(Loss):
    type: Literal["StochasticReconLayerwiseLoss"]


class StochasticReconSubsetLoss(Loss):
    type: Literal["StochasticReconSubsetLoss"]
    routing: Routing = DEFAULT_ROUTING


class StochasticHiddenActsReconLoss(Loss):
    type: Literal["StochasticHiddenActsReconLoss"]


class ChunkwiseSubsetReconLoss(Loss):
    type: Literal["ChunkwiseSubsetReconLoss"]
    routing: Routing
    sites_per_chunk: Count
    n_samples: Count = 1


class FrequencyConfig(Strict):
    """The batch-size-invariant form of the frequency penalty (L2), in place of the β part."""

    coeff: NonNegative
    reference_token_count: Positive


class ImportanceMinimalityLoss(Loss):
    """L2, L4. ``penalty``, ``gamma`` and ``frequency`` extend the torch schema; smooth_l0 uses gamma instead of p."""

    type: Literal["ImportanceMinimalityLoss"]
    pnorm: Positive
    beta: NonNegative
    eps: NonNegative = 1e-12
    p_anneal_start_frac: Fraction = 1.0
    p_anneal_final_p: Positive | None = None
    p_anneal_end_frac: Fraction = 1.0
    penalty: Literal["lp", "smooth_l0"] = "lp"
    gamma: ScheduleConfig | None = None
    frequency: FrequencyConfig | None = None

    @property
    def _anneals(self) -> bool:
        return self.p_anneal_final_p is not None and self.p_anneal_start_frac < 1

    @property
    def least_p(self) -> float:
        """The least that p is during training (L4); infinity where no p has an effect."""
        if self.penalty != "lp":
            return inf
        return min(self.pnorm, self.p_anneal_final_p or self.pnorm) if self._anneals else self.pnorm

    @rule
    def _anneal_ends_after_its_start(self) -> Iterator[Wrong]:
        if self._anneals and self.p_anneal_start_frac > self.p_anneal_end_frac:
            order = f"is {self.p_anneal_end_frac}, before p_anneal_start_frac ({self.p_anneal_start_frac})"
            yield "p_anneal_end_frac", f"{order}; the anneal ends where it starts or later"

    @rule
    def _frequency_in_place_of_beta(self) -> Iterator[Wrong]:
        if self.frequency is not None and self.beta != 0:
            yield "beta", f"is {self.beta}, but frequency replaces the beta part; set beta: 0"

    @rule
    def _gamma_of_smooth_l0(self) -> Iterator[Wrong]:
        if self.penalty == "lp":
            if self.gamma is not None:
                yield "gamma", "belongs to penalty: smooth_l0; remove it or choose that penalty"
        elif self.gamma is None:
            yield "gamma", "is required with penalty: smooth_l0"
        elif 0 in (self.gamma.start_val, self.gamma.final_val_frac) or self.gamma.warmup_pct > 0:
            instead = "start_val and final_val_frac above 0, and warmup_pct: 0"
            yield "gamma", f"must stay above 0 (0/0 at an importance of 0): {instead}"

    @rule
    def _finite_gradient(self) -> Iterator[Wrong]:
        if self.penalty == "lp" and self.eps == 0 and self.least_p < 1:
            yield "eps", "is 0, where the gradient for p < 1 is infinite; 1e-6 is stable"


class FreshPGD(Loss):
    """Fresh PGD (A1)."""

    init: Literal["random", "ones", "zeroes"]
    step_size: Positive
    n_steps: Natural
    mask_scope: Literal["unique_per_datapoint", "shared_across_batch"]


class PGDReconLoss(FreshPGD):
    type: Literal["PGDReconLoss"]


class PGDReconLayerwiseLoss(FreshPGD):
    type: Literal["PGDReconLayerwiseLoss"]


class PGDReconSubsetLoss(FreshPGD):
    type: Literal["PGDReconSubsetLoss"]
    routing: Routing = DEFAULT_ROUTING


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


Scope = Annotated[
    SingleSourceScope | BroadcastAcrossBatchScope | PerBatchPerPositionScope | RepeatAcrossBatchScope,
    Field(discriminator="type"),
]


class PersistentPGD(Loss):
    """Persistent PGD (A2 to A7)."""

    optimizer: Annotated[AdamConfig | SignConfig, Field(discriminator="type")]
    scope: Scope
    use_sigmoid_parameterization: bool = False
    n_warmup_steps: Natural = 0
    start_frac: Fraction = 0.0
    n_samples: Count = 1


class PersistentPGDReconLoss(PersistentPGD):
    type: Literal["PersistentPGDReconLoss"]


class PersistentPGDReconSubsetLoss(PersistentPGD):
    type: Literal["PersistentPGDReconSubsetLoss"]
    routing: Routing = DEFAULT_ROUTING


AnyLoss = (
    FaithfulnessLoss
    | ImportanceMinimalityLoss
    | UnmaskedReconLoss
    | CIMaskedReconLoss
    | CIMaskedReconSubsetLoss
    | CIMaskedReconLayerwiseLoss
    | StochasticReconLoss
    | StochasticReconSubsetLoss
    | StochasticReconLayerwiseLoss
    | StochasticHiddenActsReconLoss
    | ChunkwiseSubsetReconLoss
    | PGDReconLoss
    | PGDReconSubsetLoss
    | PGDReconLayerwiseLoss
    | PersistentPGDReconLoss
    | PersistentPGDReconSubsetLoss
)


REFUSED = ("CIMaskedAttnPatternsReconLoss", "StochasticAttnPatternsReconLoss")
"""Types of the torch project that are not supported."""


def not_refused(raw: Any) -> Any:
    """Returns an entry unchanged. Raises if its type is one of `REFUSED`."""
    if isinstance(raw, dict) and raw.get("type") in REFUSED:
        instead = "CIHiddenActsReconLoss and StochasticHiddenActsReconLoss measure the sites' outputs"
        raise rule_error(("type", f"'{raw['type']}' is not supported; remove this entry ({instead})"))
    return raw


def _with_coefficient(loss: Loss) -> Iterator[Wrong]:
    if loss.coeff is None:
        yield "coeff", "is required for a loss"
    elif isinstance(loss, PersistentPGD) and loss.coeff <= 0:
        yield "coeff", f"is {loss.coeff}; a persistent attack needs coeff > 0 (A4)"


TrainingLoss = Annotated[
    AnyLoss,
    Field(discriminator="type"),
    where_it_stands(_with_coefficient),
    BeforeValidator(not_refused),
]
