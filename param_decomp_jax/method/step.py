"""The training step (section 8)."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from param_decomp_jax.ci import (
    CIOutputs,
    ImportanceReader,
    LazyLogits,
    ResidualInputs,
    run_ci_function,
    squashings,
    tap_points,
)
from param_decomp_jax.ci.function import CIFunction
from param_decomp_jax.ci.inputs import site_inputs
from param_decomp_jax.decomposition.components import Components, components_axes, with_views
from param_decomp_jax.decomposition.draws import positions
from param_decomp_jax.decomposition.schedules import value_at
from param_decomp_jax.method.adversary import (
    Adversary,
    PersistentAttack,
    ascend,
    fetched_adversary,
    kept_adversary,
    warm_up,
)
from param_decomp_jax.method.clean_pass import CleanPass, DecomposedBatch, point_records, squares
from param_decomp_jax.method.losses import faithfulness
from param_decomp_jax.method.masks import Bundle
from param_decomp_jax.method.objective import Metrics, Objective, ObjectiveResults, term_keys
from param_decomp_jax.method.offload import fetch, store
from param_decomp_jax.method.optim import Optimizer, clip, global_norm, transformation
from param_decomp_jax.method.recon import (
    ErrorKind,
    ForwardDraws,
    Reconstruction,
    ascends_output_alone,
    at_step,
    draw_particle,
    points_of,
    warm_up_error,
)
from param_decomp_jax.method.state import Decomposition, Learned, State
from param_decomp_jax.sharding.mesh import at_rest, constrain, held, hold, replace_fields
from param_decomp_jax.targets.base import Target, Weights, layers_of_segment
from param_decomp_jax.targets.plain_linears import PlainLinears
from param_decomp_jax.targets.points import Point


@dataclass(frozen=True)
class Problem:
    """A decomposition of a target: all static information that the step is compiled for."""

    decomposition: Decomposition
    target: Target

    @property
    def compute_dtype(self) -> Any:
        return jnp.dtype(self.decomposition.compute_dtype)


class HeldCopies(NamedTuple):
    """Copies of trained arrays as they are held for a step (`sharding/mesh.py:hold`); None for arrays without a
    copy."""

    components: Any
    ci: Any


class Gradients(NamedTuple):
    """The gradients of the total loss, before any clip. Gradients of sources are with respect to their raw values. If a
    term's sources ascend the output's error alone (R6), theirs are the gradients of that part."""

    components: Components
    ci: Any
    sources: dict[str, Bundle]


class StepOutcome(NamedTuple):
    """Everything that a training step computes. ``gradients``: those of the total loss, before any clip."""

    state: State
    metrics: Metrics
    gradients: Gradients


GivenDraws = Mapping[str, Sequence[ForwardDraws]]
"""Draws of a step by the name of the reconstruction term, to replace those from its key
(`inspection.py:step_draws`)."""


def training_step(problem: Problem, state: State, weights: Weights, inputs: Array) -> tuple[State, Metrics]:
    """Takes one step on one global batch (``[B, T]`` token ids for a language model). Returns the new state and its
    metrics.

    Metrics, all scalars: ``loss/<term>`` without coefficient, ``loss/total``, ``grad_norms/summary/*`` before the clip,
    ``schedules/*``. Entries of a persistent term that is still off (A6) are 0.
    """
    outcome = step_outcome(problem, state, weights, inputs)
    return outcome.state, outcome.metrics


def step_outcome(
    problem: Problem, state: State, weights: Weights, inputs: Array, draws: GivenDraws | None = None
) -> StepOutcome:
    """Takes a `training_step` and returns its gradients as well; its random numbers can be given.

    ``draws``: those of every reconstruction term; if None, they follow from seed and step.
    """
    spec = problem.decomposition
    objective = make_objective(spec, state, draws)
    copies = hold_trained(problem, state.learned)

    with jax.named_scope("clean_pass"):
        clean_pass = run_clean_pass(
            problem, state.ci, weights, inputs, keeps_outputs(problem), compared_points(problem)
        )
    adversaries, gradients, found = losses_and_ascents(problem, state, clean_pass, objective, copies)
    memory = spec.memory
    with jax.named_scope("components_update"):
        components, components_moments, components_norm = descend(
            spec.components_optimizer,
            spec.steps,
            components_axes(state.components),
            state.components,
            gradients.components,
            fetch(memory, "components_moments", state.components_moments, gradients.components),
        )
    with jax.named_scope("ci_update"):
        ci, ci_moments, ci_norm = descend(
            spec.ci_optimizer,
            spec.steps,
            state.ci.axes(),
            state.ci,
            gradients.ci,
            fetch(memory, "ci_moments", state.ci_moments, gradients.ci),
        )

    metrics = found.metrics | {
        "grad_norms/summary/components": components_norm,
        "grad_norms/summary/ci_fns": ci_norm,
        "grad_norms/summary/total": jnp.hypot(components_norm, ci_norm),
        **{f"schedules/{name}": schedule(state.step, spec.steps) for name, schedule in spec.logged_schedules.items()},
    }
    components_moments = store(memory, "components_moments", components_moments)
    ci_moments = store(memory, "ci_moments", ci_moments)
    state = State(components, ci, components_moments, ci_moments, adversaries, state.step + 1, found.means)
    return StepOutcome(state, metrics, gradients)


def hold_trained(problem: Problem, learned: Learned) -> HeldCopies:
    """Returns the copies of V, U and the CI function that the policy holds."""
    (components, ci), memory = learned, problem.decomposition.memory
    with jax.named_scope("hold"):
        dtype, of_ci = problem.compute_dtype, ci.axes()
        body = hold(_headless(ci), _headless(of_ci), memory.held_by("ci"), dtype)
        return HeldCopies(
            hold(components, components_axes(components), memory.held_by("components"), dtype),
            replace_fields(body, heads=hold(ci.heads, of_ci.heads, memory.held_by("heads"), dtype)),
        )


def _headless(ci: Any) -> Any:
    """Returns a CI function, or what describes one, without its heads."""
    return replace_fields(ci, heads={})


def hold_for_reading(problem: Problem, learned: Learned) -> Learned:
    """Returns the components of every stack and the CI function, with the copies that the policy holds of them."""
    return with_copies(problem, learned, hold_trained(problem, learned))


def with_copies(problem: Problem, learned: Learned, copies: HeldCopies) -> Learned:
    """Returns the components of every stack and the CI function, with the copies that are used in their place."""
    memory, ci = problem.decomposition.memory, learned.ci
    components = held(learned.components, copies.components, memory.held_by("components"))
    body = held(_headless(ci), _headless(copies.ci), memory.held_by("ci"))
    ci = replace_fields(body, heads=held(ci.heads, copies.ci.heads, memory.held_by("heads")))
    return Learned(with_views(components, problem.target.sites), ci)


def make_objective(spec: Decomposition, state: State, draws: GivenDraws | None = None) -> Objective:
    """Returns the terms of ``spec`` at the state's step, with given draws or with those that follow from seed and
    step."""
    if draws is None:
        keys = term_keys(spec, jax.random.fold_in(spec.key("train"), state.step))
        return Objective(spec, state.step, keys, state.frequency_means)
    missing = {term.name for term in spec.terms if isinstance(term, Reconstruction)} - draws.keys()
    assert not missing, f"no draws are given for {', '.join(sorted(missing))}"
    return Objective(spec, state.step, draws.__getitem__, state.frequency_means)


def keeps_outputs(problem: Problem) -> bool:
    """Returns whether a term compares the outputs of sites (R2's exception)."""
    return _has_error(problem, "hidden_acts")


def compared_points(problem: Problem, terms: Iterable[Any] = ()) -> tuple[Point, ...]:
    """Returns the points at which a term of the problem, or one of ``terms``, compares with the clean pass (R6)."""
    every = (*problem.decomposition.terms, *terms)
    found = [points_of(term, problem.target) for term in every if isinstance(term, Reconstruction)]
    return tuple(dict.fromkeys(point for own in found for point in own))


def compares_outputs(problem: Problem) -> bool:
    """Returns whether a term compares the network's outputs (R1)."""
    return _has_error(problem, "output")


def _has_error(problem: Problem, kind: ErrorKind) -> bool:
    terms = problem.decomposition.terms
    return any(isinstance(term, Reconstruction) and term.error == kind for term in terms)


def run_clean_pass(
    problem: Problem,
    ci: CIFunction,
    weights: Weights,
    inputs: Array,
    outputs: bool,
    points: Collection[Point] = (),
    inputs_of_sites: bool = False,
) -> CleanPass:
    """Runs the forward without live sites, and keeps what the CI function reads in it (F4, F5). ``outputs``: keeps the
    outputs of the sites, too.

    ``points``: keeps the activations there. ``inputs_of_sites``: keeps the sites' inputs even if the CI function does
    not read them.
    """
    target = problem.target
    if ci.boundaries:
        n_blocks = 1 + max(point.layer for point in target.architecture.points())
        points = {*points, *tap_points(ci.boundaries, target.sites, n_blocks)}
    groups = target.uniform_layers(weights)
    for segment in target.sites.segments:
        layers_of_segment(groups, segment)  # fails by assertion if a segment lies in two groups
    unread = ci.jointly and (bool(ci.boundaries) or target.memory.recomputes("site_inputs"))
    kept = inputs_of_sites or not unread
    linears = PlainLinears(target.sites, kept, outputs, target.memory, tuple(points))
    clean = jax.lax.stop_gradient(target.forward(weights, inputs, linears))
    at_points = point_records(clean.records, points)
    records = {
        first: {name: x for name, x in own.items() if name not in at_points} for first, own in clean.records.items()
    }
    clean = clean._replace(records=records)
    at = constrain(positions(target.activation_axes(inputs.shape)), "batch")
    read = site_inputs(target.sites, records) if kept else {}
    reference = jax.lax.stop_gradient(target.reference(weights, clean.output)) if compares_outputs(problem) else None
    return CleanPass(
        target, weights, inputs, clean, reference, read, at, at.shape[0], problem.decomposition.use_delta, at_points,
        squares(at_points),
    )  # fmt: skip


def causal_importance(problem: Problem, clean_pass: CleanPass, components: Components, ci: CIFunction) -> CIOutputs:
    """Returns the CI function's outputs on a batch after its clean pass. ``components``: those of every stack."""
    return run_ci_function(
        ci,
        ResidualInputs(clean_pass.at_boundaries) if ci.boundaries else clean_pass.ci_inputs,
        clean_pass.leading,
        components,
        problem.compute_dtype,
        problem.target.memory,
        clean_pass.chosen,
        head_inputs(ci, clean_pass),
    )


def head_inputs(ci: CIFunction, clean_pass: CleanPass) -> dict[str, Any]:
    """Returns what the CI function's heads read of their own sites."""
    return ci.head_inputs(clean_pass.site_inputs, clean_pass.looked_up)


def importance_reader(
    problem: Problem,
    ci: CIFunction,
    ci_outputs: CIOutputs,
    clean_pass: CleanPass,
    copies: HeldCopies | None = None,
) -> ImportanceReader:
    """Returns a reader of the CI function's outputs as λ, as the losses read them. ``copies``: held copies of the heads
    among the outputs, if these have none yet."""
    lower, _ = squashings(problem.decomposition.squashing)
    by = problem.decomposition.memory.held_by("heads")
    if copies is not None and isinstance(ci_outputs, LazyLogits) and by is not None:
        ci_outputs = LazyLogits(ci_outputs.features, held(ci_outputs.heads, copies.ci.heads, by))
    return ImportanceReader.from_ci_function(
        ci,
        ci_outputs,
        lower,
        head_inputs(ci, clean_pass),
        clean_pass.at.ndim,
        problem.compute_dtype,
        clean_pass.chosen,
    )


class DifferentiableImportance(NamedTuple):
    """The CI function's outputs on a batch, and their pullback to components and CI function."""

    outputs: CIOutputs
    pullback: Callable[[CIOutputs], tuple[Components, CIFunction]]


def differentiable_importance(
    problem: Problem, state: State, clean_pass: CleanPass, copies: HeldCopies
) -> DifferentiableImportance:
    """Runs the CI function once; its backward pass waits for the losses' gradients with respect to its outputs."""

    def importance(components: Components, ci: CIFunction) -> CIOutputs:
        with jax.named_scope("causal_importance"):
            # Copies are kept out of the outputs, because nothing is differentiated with respect to them.
            used = with_copies(problem, Learned(components, ci), copies)
            return at_rest(causal_importance(problem, clean_pass, *used))

    return DifferentiableImportance(*jax.vjp(importance, state.components, state.ci))


def loss_gradients(
    problem: Problem,
    objective: Objective,
    state: State,
    clean_pass: CleanPass,
    importance: DifferentiableImportance,
    raw: dict[str, Bundle],
    copies: HeldCopies,
) -> tuple[Gradients, ObjectiveResults]:
    """Returns the objective's terms and its gradients (point 4 of section 8). ``raw``: the sources of its persistent
    terms."""

    def total(components: Components, outputs: CIOutputs, raw: dict[str, Bundle]) -> tuple[Array, ObjectiveResults]:
        factors, _ = with_copies(problem, Learned(components, state.ci), copies)
        reader = importance_reader(problem, state.ci, outputs, clean_pass, copies)
        with jax.named_scope("losses"):
            return objective.total_loss(DecomposedBatch(clean_pass, factors, reader), raw)

    (_, found), (direct, to_outputs, to_sources) = jax.value_and_grad(total, argnums=(0, 1, 2), has_aux=True)(
        state.components, importance.outputs, raw
    )
    if any(ascends_output_alone(term) for term, _ in problem.decomposition.persistent.values()):
        with jax.named_scope("last_ascents"):
            factors, _ = with_copies(problem, state.learned, copies)
            reader = importance_reader(problem, state.ci, importance.outputs, clean_pass, copies)
            constant = DecomposedBatch(clean_pass, factors, reader).constant()
            to_sources = to_sources | objective.output_gradients(constant, raw)
    through_ci, to_ci = importance.pullback(to_outputs)  # C5: a scalar CI function reads V
    return Gradients(jax.tree.map(jnp.add, direct, through_ci), to_ci, to_sources), found


def losses_and_ascents(
    problem: Problem, state: State, clean_pass: CleanPass, objective: Objective, copies: HeldCopies
) -> tuple[dict[str, Adversary], Gradients, ObjectiveResults]:
    """Computes points 2 to 5 of section 8, up to the optimisers: CI, warm-up ascents, one backward pass, last
    ascents."""
    spec = problem.decomposition
    importance = differentiable_importance(problem, state, clean_pass, copies)

    def update(adversary: Adversary, by: Callable[[Adversary], Adversary]) -> Adversary:
        return kept_adversary(spec.memory, by(fetched_adversary(spec.memory, adversary)))

    # Fetched and stored even if nothing changes, because both branches must leave it in the same memory.
    untouched = partial(update, by=lambda adversary: adversary)

    reader = importance_reader(problem, state.ci, importance.outputs, clean_pass, copies)
    components, _ = with_copies(problem, state.learned, copies)
    batch = DecomposedBatch(clean_pass, components, reader)

    def warmed_up(term: Reconstruction, attack: PersistentAttack, adversary: Adversary) -> Adversary:
        with jax.named_scope("warm_up_ascents"):
            draws = objective.draws(term.name)
            now, particle = at_step(term, state.step, spec.steps), draw_particle(term, draws, clean_pass.leading)
            error = warm_up_error(term, batch, draws, now)
            written_out = spec.memory.writes_out_ascents(attack.n_warmup_steps)
            return update(adversary, lambda a: warm_up(attack, a, error, state.step, spec.steps, written_out, particle))

    def ascended(attack: PersistentAttack, own: Bundle, adversary: Adversary) -> Adversary:
        return update(adversary, lambda a: ascend(attack, a, own, state.step, spec.steps))

    adversaries = {
        name: when_on(spec, attack, state, partial(warmed_up, term, attack), untouched, adversary)
        for name, adversary in state.adversaries.items()
        for term, attack in (spec.persistent[name],)
    }

    raw = {name: adversary.raw for name, adversary in adversaries.items()}
    gradients, found = loss_gradients(problem, objective, state, clean_pass, importance, raw, copies)

    for name, (term, attack) in spec.persistent.items():
        # The bundle feeds this term alone (A6), so the total's gradient divided by the coefficient is the term's own
        # (A4).
        with jax.named_scope("last_ascents"):
            coeff = value_at(term.coeff, state.step, spec.steps)
            own = jax.tree.map(lambda g, c=coeff: g / c, gradients.sources[name])
            then = partial(ascended, attack, own)
            adversaries[name] = when_on(spec, attack, state, then, untouched, adversaries[name])
    return adversaries, gradients, found


def when_on(
    spec: Decomposition,
    attack: PersistentAttack,
    state: State,
    then: Callable[[Adversary], Adversary],
    otherwise: Callable[[Adversary], Adversary],
    adversary: Adversary,
) -> Adversary:
    """Returns ``then(adversary)`` from the attack's first step on and ``otherwise`` before; what is off is not computed
    (A6)."""
    first = attack.first_step(spec.steps)
    if first == 0:
        return then(adversary)
    new: Adversary = jax.lax.cond(state.step >= first, then, otherwise, adversary)
    return new


def descend(
    spec: Optimizer, steps: int, axes: Any, parameters: Any, gradient: Any, moments: Any
) -> tuple[Any, Any, Array]:
    """Clips the gradient and applies the optimiser. Returns new parameters, new moments, and the gradient's norm before
    the clip.

    ``axes``: descriptions of the parameters.
    """
    norm = global_norm(gradient)
    optimizer = transformation(spec, steps, axes)
    updates, moments = optimizer.update(clip(gradient, norm, spec.clip_norm), moments, parameters)
    return optax.apply_updates(parameters, updates), moments, norm


def warmup_step(
    problem: Problem, components: Components, moments: Any, weights: Weights
) -> tuple[Components, Any, Float[Array, ""]]:
    """Takes one step on faithfulness alone, before training (T3). Returns components, moments, and the loss before the
    step."""

    def error(components: Components) -> Array:
        factors = with_views(components, problem.target.sites)
        site_weights, product = problem.target.site_weights(weights), problem.decomposition.warmup.product
        return faithfulness(factors, site_weights, problem.target.memory, product)

    loss, gradient = jax.value_and_grad(error)(components)
    updates, moments = warmup_transformation(problem).update(gradient, moments, components)
    return optax.apply_updates(components, updates), moments, loss


def warmup_transformation(problem: Problem) -> optax.GradientTransformation:
    """Returns T3's own optimiser, whose state is discarded."""
    warmup = problem.decomposition.warmup
    return optax.adamw(warmup.lr, eps=1e-8, weight_decay=warmup.weight_decay)
