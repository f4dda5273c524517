"""The objective (section 8, point 4): every term of a decomposition on one batch, and their weighted sum."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from typing import NamedTuple

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
from param_decomp_jax.method.recon import Merged, Reconstruction, TermDraws, draw_particle, errors, streams
from param_decomp_jax.method.state import Decomposition
from param_decomp_jax.nn.grouped import OverPositions
from param_decomp_jax.sharding.mesh import at_rest

Metrics = dict[str, Float[Array, ""]]


class Found(NamedTuple):
    """What an objective finds besides its total. ``means``: by term, those of L6 after the step."""

    metrics: Metrics
    means: dict[str, Means]


def term_keys(spec: Decomposition, key: PRNGKeyArray) -> Callable[[str], PRNGKeyArray]:
    """The key of each term's draws, by name, from the key of a step (M4): it depends on the term's number."""
    numbers = {term.name: number for number, term in enumerate(spec.terms)}
    return lambda name: jax.random.fold_in(key, numbers[name])


@dataclass(frozen=True)
class Objective:
    """The terms of a decomposition at one training step.

    ``draws``: from the name of a reconstruction term to its draws, or to their key (`term_keys`). ``means``: the
    state's (L6); none, where terms that need them have the batch's own frequencies, as in an evaluation.
    """

    spec: Decomposition
    step: Int[Array, ""]
    draws: Callable[[str], TermDraws]
    means: dict[str, Means] = field(default_factory=dict)

    def total_loss(self, batch: DecomposedBatch, raw: dict[str, Bundle]) -> tuple[Float[Array, ""], Found]:
        """``Σ coeff · term`` (point 4), every term by name without its coefficient, and the means after this step.

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
            # Else XLA splits V and U for faithfulness (N4) before the divergences, and keeps the parts meanwhile.
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
                    value = reconstructions[term.name]
            metrics[f"loss/{term.name}"] = value
            total += value_at(term.coeff, self.step, spec.steps) * value
        metrics["loss/total"] = total
        return total, Found(metrics, means)

    def reconstructions(
        self,
        batch: DecomposedBatch,
        raw: dict[str, Bundle],
        summarise: Summarise | None = None,
    ) -> tuple[dict[str, Float[Array, ""]], dict[str, Array]]:
        """Every reconstruction term by name, without coefficients, their forwards run together; 0 for one that is off.

        Also the summaries of all sites' logits, by stack ``[layers, C, …]``; empty without ``summarise``.
        """
        spec, target = self.spec, batch.target
        terms = [term for term in spec.terms if isinstance(term, Reconstruction)]
        attacks = {name: attack for name, (_, attack) in spec.persistent.items()}
        first_steps = {term.name: attacks[term.name].first_step(spec.steps) for term in terms if term.name in attacks}

        def values(from_step: int) -> tuple[dict[str, Array], dict[str, Array]]:
            """Of the terms that are on from this step on; the others are 0."""
            on = [term for term in terms if first_steps.get(term.name, 0) <= from_step]
            found: list[list[Stream]] = []
            for term in on:
                draws, bundle, adv_fraction = self.draws(term.name), None, None
                if term.name in attacks:
                    particle = draw_particle(term, draws, batch.clean_pass.leading)
                    bundle = effective(attacks[term.name], raw[term.name], particle)
                if isinstance(term.sources, Merged):
                    adv_fraction = value_at(term.sources.adv_fraction, self.step, spec.steps)
                found.append(streams(term, batch, draws, bundle, adv_fraction))
            all_streams = [stream for own in found for stream in own]
            kinds = [term.error for term, own in zip(on, found, strict=True) for _ in own]
            everywhere = {site for stream in all_streams for site in stream.live} == set(range(len(target.sites)))
            means: dict[str, Array] = {}
            sums: dict[str, Array] = {}
            if all_streams:
                with_summary = summarise if everywhere else None
                by_stream, sums = errors(batch, all_streams, kinds, with_summary)
                by_term = jnp.split(by_stream, list(accumulate(map(len, found)))[:-1])
                means = {term.name: jnp.mean(e) for term, e in zip(on, by_term, strict=True)}
            if summarise is not None and not everywhere:
                sums = per_component(batch.reader, batch.components, target.sites, target.memory, summarise)
            return {term.name: means.get(term.name, jnp.zeros(())) for term in terms}, sums

        # A6: off means not computed. The set of terms that are on changes at few steps; each set has its own branch.
        stages = sorted({0, *first_steps.values()})
        if len(stages) == 1:
            return values(0)
        stage = sum((self.step >= first).astype(jnp.int32) for first in stages[1:])
        branches = [partial(values, n) for n in stages]
        found: tuple[dict[str, Array], dict[str, Array]] = jax.lax.switch(stage, branches)
        return found
