"""The LOSS table of the torch schema: one class for each loss, named after its `type`, which says what it computes.

`registered` makes a class a loss of `LOSSES`, which are what `pd.loss_metrics` and `eval.metrics` take.
"""

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from math import inf
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, SerializeAsAny

from param_decomp_lab.config.loss_parts import DEFAULT_ROUTING, Ascent, Routing, ScheduleConfig, Scope
from param_decomp_lab.schema.kinds import by_type, registered
from param_decomp_lab.schema.mistakes import Wrong, rule_error
from param_decomp_lab.schema.strict import Count, Fraction, Natural, NonNegative, Positive, Strict, rule, rule_here

if TYPE_CHECKING:  # the configuration needs no JAX, which the types of the core bring
    from param_decomp_jax.method.adversary import FreshAttack, PersistentAttack
    from param_decomp_jax.method.losses import Lp, SmoothL0, Term
    from param_decomp_lab.config.term_maker import TermMaker

Name = Annotated[str, Field(pattern=r"^[^/\s]([^/]*[^/\s])?$")]
"""No slashes: names become parts of metric keys and of paths in a checkpoint."""


class Loss(Strict):
    """Keys that every LOSS has. ``coeff`` is required in `pd.loss_metrics` and absent in `eval.metrics`."""

    type: str
    coeff: float | None = None
    name: Name | None = None

    usual: ClassVar[Mapping[str, Any]] = {}
    """The keys besides `type` where `pd eval --metric` gives the type only and the run does not configure it."""

    @rule
    def _not_total(self) -> Iterator[Wrong]:
        if self.name == "total":
            yield "name", "'total' is the key of the sum of all terms; choose another name"

    @abstractmethod
    def term(self, make: "TermMaker") -> "Term":
        """The term of the core that computes this loss. ``make``: makes it, with its name and coefficient."""


LOSSES: dict[str, type[Loss]] = {}
"""Every loss, by the `type` that configurations have."""


@registered(LOSSES)
class FaithfulnessLoss(Loss):
    type: Literal["FaithfulnessLoss"]

    def term(self, make: "TermMaker") -> "Term":
        return make.faithfulness()


@registered(LOSSES)
class UnmaskedReconLoss(Loss):
    type: Literal["UnmaskedReconLoss"]

    def term(self, make: "TermMaker") -> "Term":
        return make.reconstruction(make.constant(1.0))


@registered(LOSSES)
class CIMaskedReconLoss(Loss):
    type: Literal["CIMaskedReconLoss"]

    def term(self, make: "TermMaker") -> "Term":
        return make.reconstruction(make.constant(0.0))


@registered(LOSSES)
class CIMaskedReconLayerwiseLoss(Loss):
    type: Literal["CIMaskedReconLayerwiseLoss"]

    def term(self, make: "TermMaker") -> "Term":
        return make.reconstruction(make.constant(0.0), live=make.each_site)


@registered(LOSSES)
class CIMaskedReconSubsetLoss(Loss):
    type: Literal["CIMaskedReconSubsetLoss"]
    routing: Routing = DEFAULT_ROUTING

    def term(self, make: "TermMaker") -> "Term":
        return make.reconstruction(make.constant(0.0), routing=self.routing)


@registered(LOSSES)
class StochasticReconLoss(Loss):
    type: Literal["StochasticReconLoss"]

    def term(self, make: "TermMaker") -> "Term":
        return make.reconstruction(make.stochastic, n_samples=make.n_mask_samples)


@registered(LOSSES)
class StochasticReconLayerwiseLoss(Loss):
    type: Literal["StochasticReconLayerwiseLoss"]

    def term(self, make: "TermMaker") -> "Term":
        return make.reconstruction(make.stochastic, live=make.each_site, n_samples=make.n_mask_samples)


@registered(LOSSES)
class StochasticReconSubsetLoss(Loss):
    type: Literal["StochasticReconSubsetLoss"]
    routing: Routing = DEFAULT_ROUTING

    def term(self, make: "TermMaker") -> "Term":
        return make.reconstruction(make.stochastic, routing=self.routing, n_samples=make.n_mask_samples)


@registered(LOSSES)
class StochasticHiddenActsReconLoss(Loss):
    type: Literal["StochasticHiddenActsReconLoss"]

    def term(self, make: "TermMaker") -> "Term":
        return make.reconstruction(make.stochastic, n_samples=make.n_mask_samples, error="hidden_acts")


@registered(LOSSES)
class ChunkwiseSubsetReconLoss(Loss):
    type: Literal["ChunkwiseSubsetReconLoss"]
    routing: Routing
    sites_per_chunk: Count
    n_samples: Count = 1

    def term(self, make: "TermMaker") -> "Term":
        chunks = make.chunks(self.sites_per_chunk)
        return make.reconstruction(make.stochastic, live=chunks, routing=self.routing, n_samples=self.n_samples)


class FrequencyConfig(Strict):
    """The batch-size-invariant form of the frequency penalty (L2), in place of the β part."""

    coeff: NonNegative
    reference_token_count: Positive


@registered(LOSSES)
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

    def term(self, make: "TermMaker") -> "Term":
        if self.gamma is not None:
            penalty: Lp | SmoothL0 = make.smooth_l0(self.gamma)
        else:
            final = self.pnorm if self.p_anneal_final_p is None else self.p_anneal_final_p
            penalty = make.lp(self.eps, self.pnorm, final, self.p_anneal_start_frac, self.p_anneal_end_frac)
        frequency = None
        if self.frequency is not None:
            frequency = make.frequency(self.frequency.coeff, self.frequency.reference_token_count)
        return make.importance_minimality(penalty, self.beta, frequency)


class FreshPGD(Loss):
    """Fresh PGD (A1)."""

    init: Literal["random", "ones", "zeroes"]
    step_size: Positive
    n_steps: Natural
    mask_scope: Literal["unique_per_datapoint", "shared_across_batch"]

    usual: ClassVar = {"init": "random", "step_size": 0.1, "n_steps": 20, "mask_scope": "shared_across_batch"}

    def _attack(self, make: "TermMaker") -> "FreshAttack":
        return make.fresh_attack(self.init, self.step_size, self.n_steps, self.mask_scope)


@registered(LOSSES)
class PGDReconLoss(FreshPGD):
    type: Literal["PGDReconLoss"]

    def term(self, make: "TermMaker") -> "Term":
        return make.reconstruction(self._attack(make))


@registered(LOSSES)
class PGDReconLayerwiseLoss(FreshPGD):
    type: Literal["PGDReconLayerwiseLoss"]

    def term(self, make: "TermMaker") -> "Term":
        return make.reconstruction(self._attack(make), live=make.each_site)


@registered(LOSSES)
class PGDReconSubsetLoss(FreshPGD):
    type: Literal["PGDReconSubsetLoss"]
    routing: Routing = DEFAULT_ROUTING

    def term(self, make: "TermMaker") -> "Term":
        return make.reconstruction(self._attack(make), routing=self.routing)


class PersistentPGD(Loss):
    """Persistent PGD (A2 to A7)."""

    optimizer: Ascent
    scope: Scope
    use_sigmoid_parameterization: bool = False
    n_warmup_steps: Natural = 0
    start_frac: Fraction = 0.0
    n_samples: Count = 1

    def _attack(self, make: "TermMaker") -> "PersistentAttack":
        return make.persistent_attack(
            self.optimizer, self.scope, self.use_sigmoid_parameterization, self.n_warmup_steps, self.start_frac
        )


@registered(LOSSES)
class PersistentPGDReconLoss(PersistentPGD):
    type: Literal["PersistentPGDReconLoss"]

    def term(self, make: "TermMaker") -> "Term":
        return make.reconstruction(self._attack(make))  # R5: routed everywhere, so computed once whatever n_samples is


@registered(LOSSES)
class PersistentPGDReconSubsetLoss(PersistentPGD):
    type: Literal["PersistentPGDReconSubsetLoss"]
    routing: Routing = DEFAULT_ROUTING

    def term(self, make: "TermMaker") -> "Term":
        return make.reconstruction(self._attack(make), routing=self.routing, n_samples=self.n_samples)


REFUSED = ("CIMaskedAttnPatternsReconLoss", "StochasticAttnPatternsReconLoss")
"""Types of the PyTorch project that are not supported."""


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
    SerializeAsAny[Loss],
    by_type(LOSSES),
    rule_here(_with_coefficient),
    BeforeValidator(not_refused),
]
