"""The LOSS table of the torch schema: one class for each loss, named after its `type`, that says what the loss
computes.

`registered` adds a class to `LOSSES`, from which `pd.loss_metrics` and `eval.metrics` choose.
"""

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from math import inf
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, SerializeAsAny

from param_decomp_lab.config.loss_parts import (
    DEFAULT_ROUTING,
    Ascent,
    PoolConfig,
    Routing,
    Scheduled,
    Scope,
    above_0,
    bounds,
)
from param_decomp_lab.schema.kinds import by_type, registered, type_of
from param_decomp_lab.schema.mistakes import Wrong, rule_error
from param_decomp_lab.schema.spelling import nearest_alike
from param_decomp_lab.schema.strict import (
    Count,
    Fraction,
    ListOf,
    Natural,
    NonNegative,
    Positive,
    Strict,
    rule,
    rule_here,
)

if TYPE_CHECKING:  # the core's types import JAX, which configurations do without
    from param_decomp_jax.decomposition.sites import UnitKind
    from param_decomp_jax.method.adversary import FreshAttack, PersistentAttack
    from param_decomp_jax.method.losses import Lp, SmoothL0, Term
    from param_decomp_lab.config.term_maker import TermMaker

Name = Annotated[str, Field(pattern=r"^[^/\s]([^/]*[^/\s])?$")]
"""A name, without slashes because it becomes part of metric keys and of paths in a checkpoint."""
FEW_OWNERS = 3
"""The largest number of losses with a key that a message names."""


class Loss(Strict):
    """Keys that every LOSS has. ``coeff`` is required in `pd.loss_metrics` and absent in `eval.metrics`."""

    type: str
    coeff: Scheduled[float] | None = None
    name: Name | None = None

    slow: ClassVar[bool] = False
    """Whether it is measured at the interval of figures, and is not for training."""
    usual: ClassVar[Mapping[str, Any]] = {}
    """The keys besides `type` that `pd eval --metric` uses if the run does not configure the loss."""

    @rule
    def _not_total(self) -> Iterator[Wrong]:
        if self.name == "total":
            yield "name", "'total' is the key of the sum of all terms; choose another name"

    @classmethod
    def _refusal(cls, key: str) -> str:
        """Says to which losses a key belongs that this one lacks, unless it looks like a misspelled
        key of this loss.
        """
        owners = [name for name, loss in LOSSES.items() if key in loss.model_fields]
        if not owners or nearest_alike(key, cls.model_fields) is not None:
            return super()._refusal(key)
        few = ", ".join(owners[:FEW_OWNERS]) + (", …" if len(owners) > FEW_OWNERS else "")
        whose = "losses that compare the output" if key in ReconLoss.model_fields else few
        return f"'{key}' is a key of {whose}, not of {type_of(cls)}; remove it"

    @abstractmethod
    def term(self, make: "TermMaker") -> "Term":
        """Returns the core's term for this loss. ``make``: makes it, with its name and coefficient."""


LOSSES: dict[str, type[Loss]] = {}
"""Every loss, by its `type` in configurations."""


class HiddenActsReconstruction(Strict):
    """What R6 compares. ``points``: patterns of names of activations, such as ``resid_post.*``."""

    coeff: Scheduled[NonNegative]
    points: Annotated[ListOf[str], Field(min_length=1)]


class ReconLoss(Loss):
    """Keys that every reconstruction of the network's output has."""

    hidden_acts_reconstruction: HiddenActsReconstruction | None = None


@registered(LOSSES)
class FaithfulnessLoss(Loss):
    """L1, or L5 with ``normalize`` "per_site"."""

    type: Literal["FaithfulnessLoss"]
    normalize: Literal["entries", "per_site"] = "entries"

    def term(self, make: "TermMaker") -> "Term":
        return make.faithfulness(self.normalize)


@registered(LOSSES)
class UnmaskedReconLoss(ReconLoss):
    type: Literal["UnmaskedReconLoss"]

    def term(self, make: "TermMaker") -> "Term":
        return make.reconstruction(make.constant(1.0))


@registered(LOSSES)
class CIMaskedReconLoss(ReconLoss):
    type: Literal["CIMaskedReconLoss"]

    def term(self, make: "TermMaker") -> "Term":
        return make.reconstruction(make.constant(0.0))


@registered(LOSSES)
class CIMaskedReconLayerwiseLoss(ReconLoss):
    type: Literal["CIMaskedReconLayerwiseLoss"]

    def term(self, make: "TermMaker") -> "Term":
        return make.reconstruction(make.constant(0.0), live=make.each_site)


@registered(LOSSES)
class CIMaskedReconSubsetLoss(ReconLoss):
    type: Literal["CIMaskedReconSubsetLoss"]
    routing: Routing = DEFAULT_ROUTING

    def term(self, make: "TermMaker") -> "Term":
        return make.reconstruction(make.constant(0.0), routing=self.routing)


@registered(LOSSES)
class StochasticReconLoss(ReconLoss):
    type: Literal["StochasticReconLoss"]

    def term(self, make: "TermMaker") -> "Term":
        return make.reconstruction(make.stochastic, n_samples=make.n_mask_samples)


@registered(LOSSES)
class StochasticReconLayerwiseLoss(ReconLoss):
    type: Literal["StochasticReconLayerwiseLoss"]

    def term(self, make: "TermMaker") -> "Term":
        return make.reconstruction(make.stochastic, live=make.each_site, n_samples=make.n_mask_samples)


@registered(LOSSES)
class StochasticReconSubsetLoss(ReconLoss):
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
class ChunkwiseSubsetReconLoss(ReconLoss):
    type: Literal["ChunkwiseSubsetReconLoss"]
    routing: Routing
    sites_per_chunk: Count
    n_samples: Count = 1

    def term(self, make: "TermMaker") -> "Term":
        chunks = make.chunks(self.sites_per_chunk)
        return make.reconstruction(make.stochastic, live=chunks, routing=self.routing, n_samples=self.n_samples)


class FrequencyConfig(Strict):
    """The batch-size-invariant form of the frequency penalty (L2), in place of the β part."""

    coeff: Scheduled[NonNegative]
    reference_token_count: Positive
    ema_halflife_steps: Annotated[float, Field(gt=0, le=1e6)] | None = None


@registered(LOSSES)
class ImportanceMinimalityLoss(Loss):
    """L2, L4. ``penalty``, ``gamma`` and ``frequency`` extend the torch schema; smooth_l0 uses gamma instead of p."""

    type: Literal["ImportanceMinimalityLoss"]
    pnorm: Scheduled[Positive]
    beta: NonNegative
    eps: NonNegative = 1e-12
    p_anneal_start_frac: Fraction = 1.0
    p_anneal_final_p: Positive | None = None
    p_anneal_end_frac: Fraction = 1.0
    penalty: Literal["lp", "smooth_l0"] = "lp"
    gamma: Scheduled[Positive] | None = None
    frequency: FrequencyConfig | None = None
    normalize_at_one: bool = False

    @property
    def _anneals(self) -> bool:
        return self.p_anneal_final_p is not None and self.p_anneal_start_frac < 1

    @property
    def least_p(self) -> float:
        """The least value of p during training (L4); infinity if p has no effect."""
        if self.penalty != "lp":
            return inf
        least, _ = bounds(self.pnorm)
        return min(least, self.p_anneal_final_p or least) if self._anneals else least

    @rule
    def _anneal_ends_after_its_start(self) -> Iterator[Wrong]:
        if self._anneals and self.p_anneal_start_frac > self.p_anneal_end_frac:
            order = f"is {self.p_anneal_end_frac}, before p_anneal_start_frac ({self.p_anneal_start_frac})"
            yield "p_anneal_end_frac", f"{order}; the anneal ends where it starts or later"

    @rule
    def _one_course_of_p(self) -> Iterator[Wrong]:
        if isinstance(self.pnorm, float):
            return
        if bounds(self.pnorm)[0] == 0:
            yield "pnorm", f"must stay above 0: {above_0(self.pnorm)}"
        for key in ("p_anneal_start_frac", "p_anneal_final_p", "p_anneal_end_frac"):
            if getattr(self, key) != type(self).model_fields[key].default:
                yield key, "anneals a number, but pnorm is a schedule; remove it, and write the anneal into pnorm"

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
        elif bounds(self.gamma)[0] == 0:
            yield "gamma", f"must stay above 0 (0/0 at an importance of 0): {above_0(self.gamma)}"

    @rule
    def _finite_gradient(self) -> Iterator[Wrong]:
        if self.penalty == "lp" and self.eps == 0 and self.least_p < 1:
            yield "eps", "is 0, where the gradient for p < 1 is infinite; 1e-6 is stable"

    def term(self, make: "TermMaker") -> "Term":
        if self.gamma is not None:
            penalty: Lp | SmoothL0 = make.smooth_l0(self.gamma, self.normalize_at_one)
        else:
            anneal = self.p_anneal_final_p, self.p_anneal_start_frac, self.p_anneal_end_frac
            penalty = make.lp(self.eps, self.pnorm, *anneal, self.normalize_at_one)
        frequency = None
        if self.frequency is not None:
            own = self.frequency
            frequency = make.frequency(own.coeff, own.reference_token_count, own.ema_halflife_steps)
        return make.importance_minimality(penalty, self.beta, frequency)


class UnitKindCoefficients(Strict):
    """Weights by kind of unit (L7); null leaves a kind out."""

    neuron: NonNegative | None = None
    attention_head: NonNegative | None = None

    @rule
    def _of_some_kind(self) -> Iterator[Wrong]:
        if self.neuron is None and self.attention_head is None:
            yield "", "gives no kind of unit a weight; give neuron, attention_head, or both a number"

    @property
    def given(self) -> dict["UnitKind", float]:
        """Returns the kinds that are given, with their weights."""
        by_kind: dict[UnitKind, float | None] = {"neuron": self.neuron, "attention_head": self.attention_head}
        return {kind: weight for kind, weight in by_kind.items() if weight is not None}


@registered(LOSSES)
class NonlinearityLocalityLoss(Loss):
    """L7."""

    type: Literal["NonlinearityLocalityLoss"]
    unit_kind_coefficients: UnitKindCoefficients
    relative_threshold: Scheduled[Positive]
    normalize_at_one: bool = False

    @rule
    def _threshold_above_0(self) -> Iterator[Wrong]:
        if bounds(self.relative_threshold)[0] == 0:
            wrong = "must stay above 0 (0/0 where a component does not touch a unit)"
            yield "relative_threshold", f"{wrong}: {above_0(self.relative_threshold)}"

    def term(self, make: "TermMaker") -> "Term":
        kinds = self.unit_kind_coefficients.given
        return make.nonlinearity_locality(kinds, self.relative_threshold, self.normalize_at_one)


class FreshPGD(ReconLoss):
    """Fresh PGD (A1)."""

    init: Literal["random", "ones", "zeroes"]
    step_size: Positive
    n_steps: Natural
    mask_scope: Literal["unique_per_datapoint", "per_row", "shared_across_batch"]

    usual: ClassVar = {"init": "random", "step_size": 0.1, "n_steps": 20, "mask_scope": "shared_across_batch"}

    def _attack(self, make: "TermMaker") -> "FreshAttack":
        return make.fresh_attack(self.init, self.step_size, self.n_steps, self.mask_scope)


@registered(LOSSES)
class PGDReconLoss(FreshPGD):
    type: Literal["PGDReconLoss"]

    def term(self, make: "TermMaker") -> "Term":
        return make.reconstruction(self._attack(make))


@registered(LOSSES)
class SlowPGDReconLoss(FreshPGD):
    """PGDReconLoss measured at the interval of figures, for attacks of hundreds of steps."""

    type: Literal["SlowPGDReconLoss"]

    slow: ClassVar = True

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


class PersistentAdversary(ReconLoss):
    """Keys that losses with persistent sources have in common (A2 to A7)."""

    optimizer: Ascent
    use_sigmoid_parameterization: bool = False
    n_warmup_steps: Natural = 0
    start_frac: Fraction = 0.0
    adversary_objective: Literal["output", "term"] = "output"

    def _attack(self, make: "TermMaker", scope: Scope | PoolConfig) -> "PersistentAttack":
        return make.persistent_attack(
            self.optimizer, scope, self.use_sigmoid_parameterization, self.n_warmup_steps, self.start_frac
        )


class PersistentPGD(PersistentAdversary):
    """Persistent PGD (A2 to A7)."""

    scope: Scope
    n_samples: Count = 1


@registered(LOSSES)
class PersistentPGDReconLoss(PersistentPGD):
    type: Literal["PersistentPGDReconLoss"]

    def term(self, make: "TermMaker") -> "Term":
        return make.reconstruction(
            self._attack(make, self.scope)
        )  # R5: routed everywhere, so computed once whatever n_samples is


@registered(LOSSES)
class PersistentPGDReconSubsetLoss(PersistentPGD):
    type: Literal["PersistentPGDReconSubsetLoss"]
    routing: Routing = DEFAULT_ROUTING

    def term(self, make: "TermMaker") -> "Term":
        return make.reconstruction(self._attack(make, self.scope), routing=self.routing, n_samples=self.n_samples)


class Merged(PersistentAdversary):
    """A8."""

    adv_fraction: Scheduled[Fraction]
    routing: Routing = DEFAULT_ROUTING

    @rule
    def _is_a_probability(self) -> Iterator[Wrong]:
        highest = bounds(self.adv_fraction)[1]
        if highest > 1:
            yield "adv_fraction", f"rises to {highest:g}; it is a probability, at most 1"

    def _merged(self, make: "TermMaker", scope: Scope | PoolConfig) -> "Term":
        return make.reconstruction(make.merged(self._attack(make, scope), self.adv_fraction), routing=self.routing)


@registered(LOSSES)
class MergedStochasticSubsetPPGDReconLoss(Merged):
    """A8."""

    type: Literal["MergedStochasticSubsetPPGDReconLoss"]
    scope: Scope

    def term(self, make: "TermMaker") -> "Term":
        return self._merged(make, self.scope)


@registered(LOSSES)
class MergedStochasticSubsetPooledPPGDReconLoss(Merged):
    """A8, with the sources of A9."""

    type: Literal["MergedStochasticSubsetPooledPPGDReconLoss"]
    pool: PoolConfig

    def term(self, make: "TermMaker") -> "Term":
        return self._merged(make, self.pool)


REFUSED = ("CIMaskedAttnPatternsReconLoss", "StochasticAttnPatternsReconLoss")
"""Types of the PyTorch project that are not supported."""


def not_refused(raw: Any) -> Any:
    """Returns an entry unchanged. Raises if its type is one of `REFUSED`."""
    if isinstance(raw, dict) and raw.get("type") in REFUSED:
        instead = "CIHiddenActsReconLoss and StochasticHiddenActsReconLoss measure the sites' outputs"
        raise rule_error(("type", f"'{raw['type']}' is not supported; remove this entry ({instead})"))
    return raw


def _can_be_trained_on(loss: Loss) -> Iterator[Wrong]:
    if loss.slow:
        same = f"train on {loss.type.removeprefix('Slow')}, which has the same keys"
        yield "type", f"'{loss.type}' is measured in evaluations alone; {same}, or move this entry to eval.metrics"


def _with_coefficient(loss: Loss) -> Iterator[Wrong]:
    if loss.coeff is None:
        yield "coeff", "is required for a loss"
    elif isinstance(loss, PersistentAdversary) and bounds(loss.coeff)[0] <= 0:
        if isinstance(loss.coeff, float):
            yield "coeff", f"is {loss.coeff}; a persistent attack needs coeff > 0 (A4)"
        else:
            why = "a persistent attack divides by its coefficient (A4)"
            yield "coeff", f"must stay above 0 at every step, for {why}: {above_0(loss.coeff)}"


TrainingLoss = Annotated[
    SerializeAsAny[Loss],
    by_type(LOSSES),
    rule_here(_with_coefficient),
    rule_here(_can_be_trained_on),
    BeforeValidator(not_refused),
]
