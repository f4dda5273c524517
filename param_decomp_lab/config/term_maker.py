"""Makes the core's terms from the losses of the schema; rule ids refer to docs/semantics.md."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, assert_never

from param_decomp_jax.decomposition.schedules import Anneal, AnySchedule, Knot, Knots, Schedule
from param_decomp_jax.decomposition.sites import UnitKind
from param_decomp_jax.method.adversary import (
    AdamAscent,
    BroadcastAcrossBatch,
    FreshAttack,
    MomentumAscent,
    PerBatch,
    PerBatchPerPosition,
    PersistentAttack,
    Pool,
    RepeatAcrossBatch,
    SGDAscent,
    SignAscent,
    SingleSource,
)
from param_decomp_jax.method.adversary import Ascent as CoreAscent
from param_decomp_jax.method.adversary import Scope as CoreScope
from param_decomp_jax.method.locality import NonlinearityLocality
from param_decomp_jax.method.losses import Faithfulness, Frequency, ImportanceMinimality, Lp, SmoothL0
from param_decomp_jax.method.masks import Constant, Stochastic
from param_decomp_jax.method.recon import (
    AllSites,
    Beside,
    Chunks,
    EachSite,
    ErrorKind,
    LiveSets,
    Merged,
    Reconstruction,
    SourceSpec,
)
from param_decomp_jax.method.routing import Everywhere, StaticProbability, UniformKSubset
from param_decomp_jax.method.routing import Routing as CoreRouting
from param_decomp_jax.nn.split_product import DeltaProduct
from param_decomp_lab.config.loss_parts import (
    AdamConfig,
    Ascent,
    BroadcastAcrossBatchScope,
    KnotsConfig,
    MomentumConfig,
    PerBatchPerPositionScope,
    PerBatchScope,
    PoolConfig,
    RepeatAcrossBatchScope,
    Routing,
    ScheduleConfig,
    ScheduleLike,
    Scope,
    SGDConfig,
    SignConfig,
    SingleSourceScope,
    StaticProbabilityRouting,
    UniformKSubsetRouting,
)


@dataclass(frozen=True)
class TermMaker:
    """Makes the term of a `Loss` (`Loss.term`) from its name and coefficient, and the run's settings of steps, draws
    and precision.

    A reconstruction is a choice of live sets (all sites, `each_site`, `chunks`), routing, and sources (`constant`,
    `stochastic`, `fresh_attack`, `persistent_attack`).
    """

    name: str
    coeff: float | AnySchedule
    steps: int
    n_mask_samples: int
    sampling: Literal["continuous", "binomial"]
    delta_product: DeltaProduct
    beside: Beside | None = None

    def reconstruction(
        self,
        sources: SourceSpec,
        *,
        live: LiveSets = AllSites(),  # noqa: B008
        routing: Routing | None = None,
        n_samples: int = 1,
        error: ErrorKind = "output",
    ) -> Reconstruction:
        """Returns a reconstruction (R1), with what the loss compares beside the output (R6). ``routing``: None routes
        everywhere. ``n_samples``: masked forwards for each live set.
        """
        return Reconstruction(self.name, self.coeff, live, _routing(routing), sources, n_samples, error, self.beside)

    # ---- live sets ----

    @property
    def each_site(self) -> EachSite:
        return EachSite()

    def chunks(self, sites_per_chunk: int) -> Chunks:
        return Chunks(sites_per_chunk)

    # ---- sources ----

    def constant(self, value: float) -> Constant:
        """Returns masks λ + value · (1 − λ): 0 gives λ, 1 gives masks of 1."""
        return Constant(value)

    @property
    def stochastic(self) -> Stochastic:
        return Stochastic(self.sampling)

    def fresh_attack(
        self,
        init: Literal["random", "ones", "zeroes"],
        step_size: float,
        n_steps: int,
        mask_scope: Literal["unique_per_datapoint", "per_row", "shared_across_batch"],
    ) -> FreshAttack:
        """Returns the sources of a fresh attack (A1)."""
        return FreshAttack(init, step_size, n_steps, mask_scope)

    def persistent_attack(
        self, optimizer: Ascent, scope: Scope | PoolConfig, sigmoid: bool, n_warmup_steps: int, start_frac: float
    ) -> PersistentAttack:
        """Returns the sources of a persistent attack (A2 to A7, A9)."""
        return PersistentAttack(_ascent(optimizer), _scope(scope), sigmoid, n_warmup_steps, start_frac)

    def merged(self, attack: PersistentAttack, adv_fraction: ScheduleLike) -> Merged:
        """Returns the sources of A8: those of ``attack`` for some rows of the batch, and stochastic ones for the
        others.
        """
        return Merged(attack, self.stochastic, core_value(adv_fraction))

    # ---- other terms ----

    def faithfulness(self, normalize: Literal["entries", "per_site"]) -> Faithfulness:
        return Faithfulness(self.name, self.coeff, self.delta_product, normalize)

    def nonlinearity_locality(
        self, kinds: Mapping[UnitKind, float], threshold: ScheduleLike, normalize_at_one: bool
    ) -> NonlinearityLocality:
        """Returns the term of L7. ``kinds``: the kinds that count, with their weights."""
        own = tuple(kinds.items())
        return NonlinearityLocality(self.name, self.coeff, own, core_value(threshold), self.steps, normalize_at_one)

    def importance_minimality(
        self, penalty: Lp | SmoothL0, beta: float, frequency: Frequency | None
    ) -> ImportanceMinimality:
        return ImportanceMinimality(self.name, self.coeff, penalty, beta, frequency)

    def lp(
        self,
        eps: float,
        p: ScheduleLike,
        final: float | None,
        start_frac: float,
        end_frac: float,
        normalize_at_one: bool,
    ) -> Lp:
        """Returns the penalty (υ + eps)^p, where p is a schedule, or a number that anneals to ``final`` between two
        fractions of the steps (L4).
        """
        if isinstance(p, float):
            return Lp(Anneal(p, p if final is None else final, start_frac, end_frac), eps, normalize_at_one)
        return Lp(core_schedule(p), eps, normalize_at_one)

    def smooth_l0(self, gamma: ScheduleLike, normalize_at_one: bool) -> SmoothL0:
        return SmoothL0(core_schedule(gamma), normalize_at_one)

    def frequency(
        self, coeff: ScheduleLike, reference_token_count: float, ema_halflife_steps: float | None
    ) -> Frequency:
        return Frequency(core_value(coeff), reference_token_count, ema_halflife_steps)


def core_value(value: ScheduleLike) -> float | AnySchedule:
    """Returns the core's form of a SCHEDULE; a number stays a number."""
    return value if isinstance(value, float) else core_schedule(value)


def core_schedule(value: ScheduleLike) -> AnySchedule:
    """Returns the core's form of a SCHEDULE; a number becomes a constant schedule."""
    match value:
        case ScheduleConfig():
            return Schedule(value.start_val, value.fn_type, value.warmup_pct, value.final_val_frac)
        case KnotsConfig():
            points = (Knot(point.at, point.frac, point.interp) for point in value.points)
            return Knots(value.max_val, tuple(points))
        case _:
            return Schedule(value)


def _routing(config: Routing | None) -> CoreRouting:
    match config:
        case None:
            return Everywhere()
        case UniformKSubsetRouting():
            return UniformKSubset()
        case StaticProbabilityRouting(p=p):
            return StaticProbability(p)
        case _:
            assert_never(config)


def _ascent(config: Ascent) -> CoreAscent:
    schedule = core_schedule(config.lr_schedule)
    match config:
        case AdamConfig():
            return AdamAscent(schedule, config.beta1, config.beta2, config.eps)
        case SignConfig():
            return SignAscent(schedule)
        case SGDConfig():
            return SGDAscent(schedule)
        case MomentumConfig(momentum=momentum):
            return MomentumAscent(schedule, momentum)
        case _:
            assert_never(config)


def _scope(config: Scope | PoolConfig) -> CoreScope:
    match config:
        case SingleSourceScope():
            return SingleSource()
        case BroadcastAcrossBatchScope():
            return BroadcastAcrossBatch()
        case RepeatAcrossBatchScope(n_sources=n):
            return RepeatAcrossBatch(n)
        case PerBatchPerPositionScope():
            return PerBatchPerPosition()
        case PerBatchScope():
            return PerBatch()
        case PoolConfig(size_per_batch_element=size):
            return Pool(size)
        case _:
            assert_never(config)
