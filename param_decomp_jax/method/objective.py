"""The objective (section 8, point 4): every term of a decomposition on one batch, and their weighted sum."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from param_decomp_jax.ci import Summarise, per_component, squashings
from param_decomp_jax.decomposition.schedules import value_at
from param_decomp_jax.method.adversary import effective
from param_decomp_jax.method.clean_pass import DecomposedBatch
from param_decomp_jax.method.losses import (
    DirectTerm,
    ImportanceMinimality,
    Means,
    importance_minimality,
    mean_frequency,
    penalty_sum,
)
from param_decomp_jax.method.masked import Stream
from param_decomp_jax.method.masks import Bundle
from param_decomp_jax.method.recon import (
    ForwardErrors,
    Reconstruction,
    TermDraws,
    ascends_output_alone,
    at_step,
    attack_of,
    draw_particle,
    errors,
    points_of,
    reconstruction,
    streams,
    term_error,
)
from param_decomp_jax.method.state import Decomposition
from param_decomp_jax.nn.grouped import OverPositions
from param_decomp_jax.sharding.mesh import at_rest
from param_decomp_jax.targets.base import Target

Metrics = dict[str, Float[Array, ""]]


class ObjectiveResults(NamedTuple):
    """What an objective returns besides its total. ``means``: the means of L6 after the step, by term."""

    metrics: Metrics
    means: dict[str, Means]


def term_keys(spec: Decomposition, key: PRNGKeyArray) -> Callable[[str], PRNGKeyArray]:
    """Returns a function from a term's name to the key of its draws, given the key of a step (M4). It depends on the
    term's number."""
    numbers = {term.name: number for number, term in enumerate(spec.terms)}
    return lambda name: jax.random.fold_in(key, numbers[name])


@dataclass(frozen=True)
class Objective:
    """The terms of a decomposition at one training step.

    ``draws``: maps the name of a reconstruction term to its draws, or to their key (`term_keys`). ``means``: those of
    the state (L6). Without them, as in an evaluation, terms use the batch's own frequencies.
    """

    spec: Decomposition
    step: Int[Array, ""]
    draws: Callable[[str], TermDraws]
    means: dict[str, Means] = field(default_factory=dict)

    def total_loss(self, batch: DecomposedBatch, raw: dict[str, Bundle]) -> tuple[Float[Array, ""], ObjectiveResults]:
        """Returns ``Σ coeff · term`` (point 4), every term by name without its coefficient, and the means after this
        step.

        ``raw``: raw sources of the persistent terms, by name.
        """
        spec = self.spec
        _, upper = squashings(spec.squashing)
        minimised = [term for term in spec.terms if isinstance(term, ImportanceMinimality)]

        def penalties(logits: Float[Array, "*n C"], over: OverPositions) -> Float[Array, "*experts C terms"]:
            by_term = [penalty_sum(term.penalty, upper(logits), self.step, spec.steps, over) for term in minimised]
            return jnp.stack(by_term, axis=-1)

        summarise = penalties if minimised else None
        reconstructions, sums = self.reconstructions(batch, raw, summarise)
        total, metrics, means = jnp.zeros(()), Metrics(), dict[str, Means]()
        whole = replace(batch, components=at_rest(batch.components))
        if reconstructions and spec.compute_dtype == "bfloat16":
            # Otherwise XLA splits V and U for faithfulness (N4) before the divergences, and keeps the parts meanwhile.
            done = jax.lax.stop_gradient(reconstructions)
            whole = replace(whole, components=jax.lax.optimization_barrier((whole.components, done))[0])
        for term in spec.terms:
            match term:
                case DirectTerm():
                    value = term.value(whole, self.step)
                case ImportanceMinimality():
                    term_sums = {name: S[..., minimised.index(term)] for name, S in sums.items()}
                    value, frequency = importance_minimality(term, term_sums, batch.n_positions)
                    if term.frequency is not None and frequency is not None:
                        if term.name in self.means:
                            metrics[f"loss/{term.name}_frequency_batch"] = frequency
                            frequency, means[term.name] = mean_frequency(
                                term.frequency, self.means[term.name], term_sums, batch.n_positions, self.step
                            )
                        metrics[f"loss/{term.name}_frequency"] = frequency
                        total += value_at(term.frequency.coeff, self.step, spec.steps) * frequency
                case Reconstruction():
                    value, own = reconstructions[term.name], f"{term.name}/"
                    metrics |= {f"loss/{name}": x for name, x in reconstructions.items() if name.startswith(own)}
            metrics[f"loss/{term.name}"] = value
            total += value_at(term.coeff, self.step, spec.steps) * value
        metrics["loss/total"] = total
        return total, ObjectiveResults(metrics, means)

    def reconstructions(
        self,
        batch: DecomposedBatch,
        raw: dict[str, Bundle],
        summarise: Summarise | None = None,
    ) -> tuple[dict[str, Float[Array, ""]], dict[str, Array]]:
        """Returns every reconstruction term by name, without coefficients; 0 for a term that is off. All forwards run
        together. The parts of R6, ``<term>/output`` and ``<term>/<point>``, are included.

        Also returns the summaries of all sites' logits, by stack ``[layers, C, …]``; empty without ``summarise``.
        """
        spec, target = self.spec, batch.target
        terms = [term for term in spec.terms if isinstance(term, Reconstruction)]
        attacks = {name: attack for name, (_, attack) in spec.persistent.items()}
        first_steps = {term.name: attacks[term.name].first_step(spec.steps) for term in terms if term.name in attacks}

        def values(from_step: int) -> tuple[dict[str, Array], dict[str, Array]]:
            """Returns the values of the terms that are on from this step on; the others are 0."""
            on = [term for term in terms if first_steps.get(term.name, 0) <= from_step]
            found: list[list[Stream]] = []
            for term in on:
                draws, bundle = self.draws(term.name), None
                if term.name in attacks:
                    own = raw[term.name]
                    if ascends_output_alone(term):  # `output_gradients`
                        own = jax.lax.stop_gradient(own)
                    bundle = _effective(term, batch, draws, own)
                now = at_step(term, self.step, spec.steps)
                found.append(streams(term, batch, draws, bundle, now))
            all_streams = [stream for own in found for stream in own]
            kinds = [term.error for term, own in zip(on, found, strict=True) for _ in own]
            everywhere = {site for stream in all_streams for site in stream.live} == set(range(len(target.sites)))
            means = {name: jnp.zeros(()) for term in terms for name in _names(term, target)}
            sums: dict[str, Array] = {}
            if all_streams:
                with_summary = summarise if everywhere else None
                of_all = errors(batch, all_streams, kinds, with_summary)
                sums, ends = of_all.summaries, list(accumulate(map(len, found)))
                by_term = zip(on, jnp.split(of_all.by_stream, ends[:-1]), pairwise([0, *ends]), strict=True)
                for term, by_stream, (first, stop) in by_term:
                    own_errors = ForwardErrors(by_stream, {}, of_all.at_points[first:stop])
                    value, parts = term_error(own_errors, at_step(term, self.step, spec.steps))
                    means |= {term.name: value} | {f"{term.name}/{part}": x for part, x in parts.items()}
            if summarise is not None and not everywhere:
                sums = per_component(batch.reader, batch.components, target.sites, target.memory, summarise)
            return means, sums

        # Terms that are off are not computed (A6). The set of terms that are on changes at few steps, and each set has
        # its own branch.
        stages = sorted({0, *first_steps.values()})
        if len(stages) == 1:
            return values(0)
        stage = sum((self.step >= first).astype(jnp.int32) for first in stages[1:])
        branches = [partial(values, n) for n in stages]
        found: tuple[dict[str, Array], dict[str, Array]] = jax.lax.switch(stage, branches)
        return found

    def output_gradients(self, batch: DecomposedBatch, raw: dict[str, Bundle]) -> dict[str, Bundle]:
        """Returns, for terms whose sources ascend the output's error alone (R6), the gradient of that error times the
        coefficient; 0 for a term that is off. Components and λ of ``batch`` are constant. ``raw``: as in
        `total_loss`."""
        spec, found = self.spec, {}
        for name, (term, attack) in spec.persistent.items():
            if not ascends_output_alone(term):
                continue

            def error(own: Bundle, term: Reconstruction = term) -> Float[Array, ""]:
                draws, now = self.draws(term.name), at_step(term, self.step, spec.steps)
                bundle = _effective(term, batch, draws, own)
                return reconstruction(replace(term, beside=None), batch, draws, bundle, now)[0]

            coeff, first = value_at(term.coeff, self.step, spec.steps), attack.first_step(spec.steps)

            def gradient(own: Bundle, error: Any = error, coeff: Any = coeff) -> Bundle:
                return jax.tree.map(lambda g: g * coeff, jax.grad(error)(own))

            if first == 0:
                found[name] = gradient(raw[name])
            else:
                zeros = partial(jax.tree.map, jnp.zeros_like)
                found[name] = jax.lax.cond(self.step >= first, gradient, zeros, raw[name])
        return found


def _effective(term: Reconstruction, batch: DecomposedBatch, draws: TermDraws, raw: Bundle) -> Bundle:
    """Returns the sources in [0, 1] of a persistent term in the step that has these ``draws`` (A5, A9)."""
    attack = attack_of(term)
    assert attack is not None
    return effective(attack, raw, draw_particle(term, draws, batch.clean_pass.leading))


def _names(term: Reconstruction, target: Target) -> list[str]:
    """Returns the names under which a term is logged: its own, and those of its parts (R6)."""
    points = points_of(term, target)
    parts = ("output", *(point.name for point in points)) if points else ()
    return [term.name, *(f"{term.name}/{part}" for part in parts)]
