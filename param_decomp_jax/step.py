"""The training step (section 8)."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, PRNGKeyArray

from param_decomp_jax.adversary import Adversary, PersistentAttack, ascend, effective, warm_up
from param_decomp_jax.ci import ci_logits, squashings
from param_decomp_jax.components import Components, with_views
from param_decomp_jax.losses import Faithfulness, ImportanceMinimality, faithfulness, importance_minimality
from param_decomp_jax.masks import Bundle
from param_decomp_jax.optim import AdamW, clip, global_norm, transformation
from param_decomp_jax.recon import Reconstruction, Scene, persistent_error, reconstruction
from param_decomp_jax.state import Decomposition, State
from param_decomp_jax.targets.base import Target, Weights
from param_decomp_jax.targets.plain_linears import PlainLinears

Metrics = dict[str, Float[Array, ""]]
Logits = dict[str, Float[Array, "layers *n C"]]


@dataclass(frozen=True)
class Problem:
    """A decomposition of a target: everything static that the step is compiled for."""

    decomposition: Decomposition
    target: Target

    @property
    def compute_dtype(self) -> Any:
        return jnp.dtype(self.decomposition.compute_dtype)


class Gradients(NamedTuple):
    """Of the total loss, before any clip; of the sources, with respect to their raw values."""

    components: Components
    ci: Any
    sources: dict[str, Bundle]


def training_step(problem: Problem, state: State, weights: Weights, inputs: Array) -> tuple[State, Metrics]:
    """One step on one global batch (``[B, T]`` token ids for a language model): the new state and its metrics.

    Metrics, all scalars: ``loss/<term>`` without coefficient, ``loss/total``, ``grad_norms/summary/*`` before the clip,
    ``schedules/*``. Entries of a persistent term that is still off (A6) are 0.
    """
    spec = problem.decomposition
    key = jax.random.fold_in(spec.key("train"), state.step)

    scene, site_inputs = clean_pass(problem, weights, inputs)
    adversaries, gradients, metrics = losses_and_ascents(problem, state, scene, site_inputs, key)
    components, components_moments, components_norm = descend(
        spec.components_optimizer, spec.steps, state.components, gradients.components, state.components_moments
    )
    ci, ci_moments, ci_norm = descend(spec.ci_optimizer, spec.steps, state.ci, gradients.ci, state.ci_moments)

    metrics |= {
        "grad_norms/summary/components": components_norm,
        "grad_norms/summary/ci_fns": ci_norm,
        "grad_norms/summary/total": jnp.hypot(components_norm, ci_norm),
        "schedules/components_lr": spec.components_optimizer.schedule(state.step, spec.steps),
        "schedules/ci_fns_lr": spec.ci_optimizer.schedule(state.step, spec.steps),
    }
    for name, (_, attack) in spec.persistent.items():
        metrics[f"schedules/{name}_lr"] = attack.optimizer.schedule(state.step, spec.steps)
    return State(components, ci, components_moments, ci_moments, adversaries, state.step + 1), metrics


def clean_pass(problem: Problem, weights: Weights, inputs: Array) -> tuple[Scene, dict[str, Array]]:
    """F4, F5: the forward with no live site, and by stack the clean inputs ``[layers, …, d_in]`` of the sites."""
    target = problem.target
    hidden_acts = any(isinstance(t, Reconstruction) and t.error == "hidden_acts" for t in problem.decomposition.terms)
    return run_clean(target, weights, inputs, problem.decomposition.use_delta, outputs=hidden_acts)


def run_clean(
    target: Target, weights: Weights, inputs: Array, use_delta: bool, outputs: bool
) -> tuple[Scene, dict[str, Array]]:
    """`clean_pass` with everything named; ``outputs`` keeps the sites' outputs too."""
    linears = PlainLinears(target.sites, outputs)
    clean = jax.lax.stop_gradient(target.forward(weights, inputs, linears))
    site_inputs = {
        stack.name: clean.records[segment.first][stack.reads]
        for segment in target.sites.segments
        for stack in segment.stacks
    }
    leading = next(iter(site_inputs.values())).shape[1:-1]
    return Scene(target, weights, inputs, clean, leading, use_delta), site_inputs


def losses_and_ascents(
    problem: Problem, state: State, scene: Scene, site_inputs: dict[str, Array], key: PRNGKeyArray
) -> tuple[dict[str, Adversary], Gradients, Metrics]:
    """Points 2 to 5 of section 8, up to the optimisers: CI, warm-up ascents, one backward, last ascents."""
    spec = problem.decomposition
    lower, _ = squashings(spec.squashing)

    sites = problem.target.sites

    def judge(components: Components, ci: Any) -> Logits:
        return ci_logits(ci, site_inputs, with_views(components, sites), problem.compute_dtype)

    # The CI function is run once; its backward waits until the losses have said what they want of the logits.
    logits, judge_backward = jax.vjp(judge, state.components, state.ci)

    climb = persistent_error(scene, with_views(state.components, sites), jax.tree.map(lower, logits))
    adversaries = {
        name: when_on(
            spec, attack, state, lambda a, attack=attack: warm_up(attack, a, climb, state.step, spec.steps), adversary
        )
        for name, adversary in state.adversaries.items()
        for attack in (spec.persistent[name][1],)
    }

    def total(components: Components, logits: Logits, raw: dict[str, Bundle]) -> tuple[Array, Metrics]:
        return total_loss(problem, state, scene, with_views(components, sites), logits, raw, key)

    raw = {name: adversary.raw for name, adversary in adversaries.items()}
    (_, metrics), (direct, to_logits, to_sources) = jax.value_and_grad(total, argnums=(0, 1, 2), has_aux=True)(
        state.components, logits, raw
    )
    through_ci, to_ci = judge_backward(to_logits)  # C5: a scalar CI function reads V
    gradients = Gradients(jax.tree.map(jnp.add, direct, through_ci), to_ci, to_sources)

    for name, (term, attack) in spec.persistent.items():
        # A4: the bundle feeds this term alone (A6), so the total's gradient over the coefficient is the term's own.
        own = jax.tree.map(lambda g, c=term.coeff: g / c, to_sources[name])
        adversaries[name] = when_on(
            spec,
            attack,
            state,
            lambda a, attack=attack, own=own: ascend(attack, a, own, state.step, spec.steps),
            adversaries[name],
        )
    return adversaries, gradients, metrics


def total_loss(
    problem: Problem,
    state: State,
    scene: Scene,
    components: Components,
    logits: Logits,
    raw: dict[str, Bundle],
    key: PRNGKeyArray,
) -> tuple[Float[Array, ""], Metrics]:
    """``Σ coeff · term`` (point 4), and every term by name without its coefficient. ``components``: of every stack."""
    spec = problem.decomposition
    lower, upper = squashings(spec.squashing)
    importances = jax.tree.map(lower, logits)
    total, metrics = jnp.zeros(()), {}
    for number, term in enumerate(spec.terms):
        of_term = jax.random.fold_in(key, number)
        match term:
            case Faithfulness():
                value = faithfulness(components, scene.target.site_weights(scene.weights))
            case ImportanceMinimality():
                value, frequency = importance_minimality(term, jax.tree.map(upper, logits), state.step, spec.steps)
                if term.frequency is not None and frequency is not None:
                    metrics[f"loss/{term.name}_frequency"] = frequency
                    total += term.frequency.coeff * frequency
            case Reconstruction(sources=PersistentAttack() as attack):
                bundle = effective(attack, raw[term.name])
                value = when_on(
                    spec, attack, state,
                    lambda _, term=term, of_term=of_term, bundle=bundle: reconstruction(
                        term, scene, components, importances, of_term, bundle
                    ),
                    jnp.zeros(()),
                )  # fmt: skip
            case Reconstruction():
                value = reconstruction(term, scene, components, importances, of_term)
        metrics[f"loss/{term.name}"] = value
        total += term.coeff * value
    metrics["loss/total"] = total
    return total, metrics


def when_on(spec: Decomposition, attack: PersistentAttack, state: State, then: Any, otherwise: Any) -> Any:
    """A6: ``then(otherwise)`` from the attack's first step on, ``otherwise`` before; off means not computed."""
    first = attack.first_step(spec.steps)
    if first == 0:
        return then(otherwise)
    return jax.lax.cond(state.step >= first, then, lambda x: x, otherwise)


def descend(spec: AdamW, steps: int, parameters: Any, gradient: Any, moments: Any) -> tuple[Any, Any, Array]:
    """Clip and AdamW: new parameters, new moments, and the gradient's norm before the clip."""
    norm = global_norm(gradient)
    updates, moments = transformation(spec, steps).update(clip(gradient, norm, spec.clip_norm), moments, parameters)
    return optax.apply_updates(parameters, updates), moments, norm


def warmup_step(
    problem: Problem, components: Components, moments: Any, weights: Weights
) -> tuple[Components, Any, Float[Array, ""]]:
    """T3: one step on faithfulness alone, before training; gives components, moments and the loss before the step."""

    def error(components: Components) -> Array:
        return faithfulness(with_views(components, problem.target.sites), problem.target.site_weights(weights))

    loss, gradient = jax.value_and_grad(error)(components)
    updates, moments = warmup_transformation(problem).update(gradient, moments, components)
    return optax.apply_updates(components, updates), moments, loss


def warmup_transformation(problem: Problem) -> optax.GradientTransformation:
    """T3's own optimiser; its state is thrown away."""
    warmup = problem.decomposition.warmup
    return optax.adamw(warmup.lr, eps=1e-8, weight_decay=warmup.weight_decay)
