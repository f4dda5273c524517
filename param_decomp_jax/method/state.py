"""The (static) settings of a decomposition, and the training state that is passed from step to step."""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, PRNGKeyArray

from param_decomp_jax.ci import CIConfig, CIFunction, Squashing, init_ci
from param_decomp_jax.decomposition.components import Components, components_axes, init_components
from param_decomp_jax.decomposition.schedules import AnySchedule, Knots, Schedule
from param_decomp_jax.decomposition.sites import Sites
from param_decomp_jax.method.adversary import Adversary, PersistentAttack, init_adversary, kept_adversary
from param_decomp_jax.method.locality import NonlinearityLocality
from param_decomp_jax.method.losses import ImportanceMinimality, Means, Term, has_means
from param_decomp_jax.method.offload import store
from param_decomp_jax.method.optim import Optimizer, transformation
from param_decomp_jax.method.recon import Merged, Reconstruction, attack_of
from param_decomp_jax.nn.split_product import DeltaProduct
from param_decomp_jax.sharding.memory import PLAIN, MemoryPolicy


@dataclass(frozen=True)
class FaithfulnessWarmup:
    """T3: AdamW on faithfulness alone before step 0. ``product``: how V U is computed (N4)."""

    steps: int = 0
    lr: float = 1e-3
    weight_decay: float = 0.0
    product: DeltaProduct = "fp32"


@dataclass(frozen=True)
class Decomposition:
    """The method's settings. ``steps`` and ``batch_size`` (global) count training steps and rows."""

    seed: int
    steps: int
    batch_size: int
    squashing: Squashing
    use_delta: bool
    ci: CIConfig
    terms: tuple[Term, ...]
    components_optimizer: Optimizer
    ci_optimizer: Optimizer
    warmup: FaithfulnessWarmup = FaithfulnessWarmup()
    compute_dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    memory: MemoryPolicy = PLAIN

    @property
    def persistent(self) -> dict[str, tuple[Reconstruction, PersistentAttack]]:
        """The terms whose sources live in the train state, by name, each with its attack."""
        return {
            term.name: (term, attack)
            for term in self.terms
            if isinstance(term, Reconstruction) and (attack := attack_of(term)) is not None
        }

    @property
    def logged_schedules(self) -> dict[str, AnySchedule]:
        """Learning rates and scheduled coefficients, by their names under ``schedules/`` in the metrics."""
        found: dict[str, float | AnySchedule] = {
            "components_lr": self.components_optimizer.schedule,
            "ci_fns_lr": self.ci_optimizer.schedule,
            **{f"{name}_lr": attack.optimizer.schedule for name, (_, attack) in self.persistent.items()},
        }
        for term in self.terms:
            found[f"{term.name}_coeff"] = term.coeff
            if isinstance(term, ImportanceMinimality) and term.frequency is not None:
                found[f"{term.name}_frequency_coeff"] = term.frequency.coeff
            if isinstance(term, NonlinearityLocality):
                found[f"{term.name}_relative_threshold"] = term.threshold
            if isinstance(term, Reconstruction) and term.beside is not None:
                found[f"{term.name}_hidden_acts_coeff"] = term.beside.coeff
            if isinstance(term, Reconstruction) and isinstance(term.sources, Merged):
                found[f"{term.name}_adv_fraction"] = term.sources.adv_fraction
        return {name: value for name, value in found.items() if isinstance(value, Schedule | Knots)}

    def key(self, purpose: Literal["init", "train", "eval"]) -> PRNGKeyArray:
        """Returns the root key of all draws for one purpose. It gives the same numbers on every machine (M4)."""
        root = jax.random.key(self.seed, impl="threefry2x32")
        return jax.random.fold_in(root, ("init", "train", "eval").index(purpose))


class State(eqx.Module):
    """Everything that determines the further training (T5). ``step`` counts finished steps. ``frequency_means``: by
    term (L6)."""

    components: Components
    ci: CIFunction
    components_moments: Any
    ci_moments: Any
    adversaries: dict[str, Adversary]
    step: Int[Array, ""]
    frequency_means: dict[str, Means] = eqx.field(default_factory=dict)

    @property
    def learned(self) -> "Learned":
        return Learned(self.components, self.ci)


class Learned(NamedTuple):
    """The trained part of a decomposition, with the field names of `State`."""

    components: Components
    ci: CIFunction


class InitKeys(NamedTuple):
    components: PRNGKeyArray
    ci: PRNGKeyArray
    sources: PRNGKeyArray


def init_keys(decomposition: Decomposition) -> InitKeys:
    """Returns the keys with which the state before step 0 is drawn."""
    return InitKeys(*jax.random.split(decomposition.key("init"), 3))


def init_state(decomposition: Decomposition, sites: Sites, leading: tuple[int, ...]) -> State:
    """Returns the state before step 0 (and before the faithfulness warm-up). ``leading``: global leading axes of a
    batch."""
    keys = init_keys(decomposition)
    components = init_components(keys.components, sites)
    ci = init_ci(decomposition.ci, keys.ci, sites)
    memory = decomposition.memory
    steps, of_components = decomposition.steps, components_axes(components)
    components_moments = transformation(decomposition.components_optimizer, steps, of_components).init(components)
    ci_moments = transformation(decomposition.ci_optimizer, steps, ci.axes()).init(ci)

    def adversary(number: int, attack: PersistentAttack) -> Adversary:
        key = jax.random.fold_in(keys.sources, number)
        return kept_adversary(memory, init_adversary(attack, key, sites, leading, decomposition.use_delta))

    return State(
        components=components,
        ci=ci,
        components_moments=store(memory, "components_moments", components_moments),
        ci_moments=store(memory, "ci_moments", ci_moments),
        adversaries={
            name: adversary(number, attack)
            for number, (name, (_, attack)) in enumerate(decomposition.persistent.items())
        },
        step=jnp.zeros((), jnp.int32),
        frequency_means={
            term.name: {s.name: jnp.zeros((*s.lead, s.C), jnp.float32) for s in sites.stacks}
            for term in decomposition.terms
            if isinstance(term, ImportanceMinimality) and has_means(term)
        },
    )
