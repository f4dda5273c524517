"""Matrices taken apart without training, and passes in which chosen parts of every site are on (section 17).

A decomposition should be compared with what costs no training. Here its parts and those of a baseline are masked in the
same way: with given masks and without delta.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray, Shaped

from param_decomp_jax.decomposition.components import Components, Factors, look_up
from param_decomp_jax.decomposition.sites import PRE_IDENTITY
from param_decomp_jax.method.step import Problem
from param_decomp_jax.nn.grouped import ExpertGroups, grouped_matmul
from param_decomp_jax.nn.numerics import matmul, wide
from param_decomp_jax.sharding.memory import PLAIN
from param_decomp_jax.sharding.mesh import Axes, constrain, gather
from param_decomp_jax.targets.base import Weights, WholeForward
from param_decomp_jax.targets.plain_linears import RESIDUAL, UNTOUCHED, PlainLinears, frozen_axes, top_experts

Masks = dict[str, Float[Array, "layers *n _C"]]
"""By stack; ``*n`` are the leading axes of an activation."""

N_POINTS = 2
"""The number of points at which gradients are taken in one round of the choice by gradient (B2)."""
GROWTH = 8
"""How many parts are on for each part that one round adds (B2)."""


@dataclass
class SelectedLayer:
    """One layer whose sites return ``Σ m_c (x · V_c) U_c``; other matrices are applied as they are."""

    parts: dict[str, Factors]
    masks: dict[str, Float[Array, "*n _C"]]
    frozen: Axes
    records: dict[str, Array] = field(default_factory=dict)

    def enter(self, x: Shaped[Array, "*n"]) -> None:
        pass

    def choose(self, logits: Float[Array, "*n experts"], k: int) -> Int[Array, "*n k"]:
        return top_experts(logits, k)

    def look_up(
        self, kind: str, rows: Int[Array, "*n"], table: Float[Array, "n d"], dtype: Any
    ) -> Float[Array, "*n d"]:
        return look_up(table, rows, self.frozen).astype(dtype)

    def __call__(
        self, kind: str, x: Float[Array, "*n d_in"], W: Float[Array, "d_in d_out"]
    ) -> Float[Array, "*n d_out"]:
        x = self._masked(kind + PRE_IDENTITY, x, lambda: x)
        return self._masked(kind, x, lambda: constrain(matmul(x, gather(W, self.frozen, x.dtype)), "batch"))

    def grouped(
        self, kind: str, x: Float[Array, "*n s d_in"], W: Float[Array, "experts d_in d_out"], groups: ExpertGroups
    ) -> Float[Array, "*n k d_out"]:
        return grouped_matmul(x, gather(W, self.frozen.under(), x.dtype), groups)

    def _masked(self, kind: str, x: Array, apply: Callable[[], Array]) -> Array:
        if kind not in self.parts:
            return apply()
        own = self.parts[kind]
        inner = matmul(x, own.V.astype(x.dtype)) * self.masks[kind].astype(x.dtype)
        return constrain(matmul(inner, own.U.astype(x.dtype)), "batch")


@dataclass(frozen=True)
class SelectedLinears(WholeForward):
    """Passes in which every site is the masked sum of its parts. ``parts``, ``masks``: by stack."""

    parts: Components
    masks: Masks

    def slices(self, first: int, stop: int) -> Any:
        stacks = self.stacks_at(first)
        return {s.kind: self.parts[s.name] for s in stacks}, {s.kind: self.masks[s.name] for s in stacks}

    def layer(self, first: int, stop: int, slice_: Any) -> SelectedLayer:
        parts, masks = slice_
        return SelectedLayer(parts, masks, frozen_axes(PLAIN))


@dataclass(frozen=True)
class MaskedPasses:
    """Passes over one batch in which every site is the masked sum of its parts. Each starts at the first layer with a
    site, from the clean residual ``entry`` there (F6). ``reference``: what errors compare outputs with."""

    problem: Problem
    parts: Components
    weights: Weights
    inputs: Array
    entry: Array
    reference: Array

    def output(self, masks: Masks) -> Array:
        target = self.problem.target
        start = (target.sites.segments[0].first, self.entry)
        linears = SelectedLinears(target.sites, self.parts, masks)
        output: Array = target.forward(self.weights, self.inputs, linears, start).output
        return output

    def error(self, masks: Masks) -> Float[Array, ""]:
        """Returns R1 under the given masks."""
        return self.problem.target.errors(self.weights, self.reference, [self.output(masks)])[0]


def masked_passes(problem: Problem, parts: Components, weights: Weights, inputs: Array) -> MaskedPasses:
    """Runs the clean pass of a batch, and returns the masked passes over it."""
    target = problem.target
    linears = PlainLinears(target.sites, inputs=False, memory=target.memory)
    clean = target.forward(weights, inputs, linears)
    entry = clean.records[target.sites.segments[0].first][RESIDUAL][0]
    reference = target.reference(weights, clean.output)
    return MaskedPasses(problem, parts, weights, inputs, *jax.lax.stop_gradient((entry, reference)))


class MaskedErrors(NamedTuple):
    """Errors under some masks: R1 with the given masks; a language model's cross-entropy of the next token with them (0
    for a toy); R1 with inactive components at random; and R1 after each of the attacks' lengths."""

    error: Float[Array, ""]
    cross_entropy: Float[Array, ""]
    random: Float[Array, ""]
    attacked: Float[Array, " lengths"]


def activations(problem: Problem, parts: Components, weights: Weights, inputs: Array) -> Masks:
    """Returns ``‖U_c‖ (x · V_c)`` in the clean pass, by stack."""
    target, sites = problem.target, problem.target.sites
    clean = target.forward(weights, inputs, PlainLinears(sites, memory=target.memory))
    found = {}
    for segment in sites.segments:
        for stack in segment.stacks:
            x = wide(clean.records[segment.first][stack.reads])
            own = parts[stack.name]
            scaled = own.V * jnp.linalg.norm(own.U, axis=-1)[:, None, :]
            found[stack.name] = jnp.einsum("l...d,ldc->l...c", x, scaled)
    return found


def by_gradient(
    problem: Problem, parts: Components, weights: Weights, inputs: Array, most: int | Int[Array, ""]
) -> Masks:
    """Returns values from which `largest` makes the choice by gradient (B2), for any number of parts up to ``most``.
    The sooner a part is switched on, the larger its value; parts that stay off have 0."""
    target = problem.target
    error = masked_passes(problem, parts, weights, inputs).error
    axes = target.activation_axes(inputs.shape)
    none = {s.name: jnp.zeros((s.n_layers, *axes, parts[s.name].U.shape[1])) for s in target.sites.stacks}

    def switch_on(state: tuple[Masks, Int[Array, ""]]) -> tuple[Masks, Int[Array, ""]]:
        values, n = state
        scores = integrated_gradients(error, jax.tree.map(jnp.sign, values), N_POINTS)
        together = jnp.maximum(1, n // GROWTH)

        def of_stack(v: Array, score: Array) -> Array:
            rank = jnp.argsort(jnp.argsort(jnp.where(v > 0, jnp.inf, -score), axis=-1), axis=-1)
            return jnp.where((v == 0) & (rank < together), v.shape[-1] - n - rank, v)

        return jax.tree.map(of_stack, values, scores), n + together

    values, _ = jax.lax.while_loop(lambda state: state[1] < most, switch_on, (none, jnp.zeros((), jnp.int32)))
    return values


def integrated_gradients(
    error: Callable[[Masks], Float[Array, ""]], on: Masks, n_points: int | Int[Array, ""]
) -> Masks:
    """Returns by how much each part lowers the error while the masks that are 0 in ``on`` go from 0 to 1 together (B2).
    Over these parts the values add up to the error with ``on`` minus the error with all parts on, up to the midpoint
    rule's accuracy. ``on``: 0 or 1."""

    def add(n: Int[Array, ""], total: Masks) -> Masks:
        masks = jax.tree.map(lambda m: jnp.where(m > 0, m, (n + 0.5) / n_points), on)
        return jax.tree.map(lambda x, g: x - g / n_points, total, jax.grad(error)(masks))

    # Points run in sequence, so that only one backward pass has its activations in memory.
    return jax.lax.fori_loop(0, n_points, add, jax.tree.map(jnp.zeros_like, on))


def largest(values: Masks, k: int) -> Masks:
    """Returns 1 for the k largest values of each site at each position and 0 for the others (B2). Of equal values,
    those with lower numbers are chosen. Values that are not above 0 are never chosen."""

    def of_stack(x: Array) -> Array:
        found, which = jax.lax.top_k(x, min(k, x.shape[-1]))
        none = jnp.zeros(x.shape, jnp.float32)
        return jnp.put_along_axis(none, which, (found > 0).astype(jnp.float32), axis=-1, inplace=False)

    return {name: of_stack(x) for name, x in values.items()}


def mean_l0(masks: Masks) -> Float[Array, ""]:
    """Returns the mean over positions and sites of the number of parts that are on (B5)."""
    counts = [jnp.mean(jnp.sum(m > 0, axis=-1, dtype=jnp.float32)) * m.shape[0] for m in masks.values()]
    return jnp.sum(jnp.stack(counts)) / sum(m.shape[0] for m in masks.values())


def masked_errors(
    problem: Problem,
    parts: Components,
    weights: Weights,
    inputs: Array,
    masks: Masks,
    key: PRNGKeyArray,
    lengths: tuple[int, ...],
    step_size: float,
) -> MaskedErrors:
    """Returns the errors of B3 and B4. ``lengths``: lengths of attacks, ascending; each attack continues where the one
    before ended (A1)."""
    passes = masked_passes(problem, parts, weights, inputs)
    error = passes.error

    def with_sources(sources: Masks) -> Masks:
        return {name: m + (1 - m) * sources[name] for name, m in masks.items()}

    def draw(key: PRNGKeyArray) -> Masks:
        keys = jax.random.split(key, len(masks))
        return {name: jax.random.uniform(k, m.shape) for k, (name, m) in zip(keys, masks.items(), strict=True)}

    for_random, for_attack = jax.random.split(key)
    plain = passes.output(masks)
    sources, attacked, done = draw(for_attack), [], 0
    for length in lengths:

        def ascend(_: Int[Array, ""], s: Masks) -> Masks:
            gradient = jax.grad(lambda s: error(with_sources(s)))(s)
            return jax.tree.map(lambda x, g: jnp.clip(x + step_size * jnp.sign(g), 0, 1), s, gradient)

        sources = jax.lax.fori_loop(0, length - done, ascend, sources)
        attacked.append(error(with_sources(sources)))
        done = length
    return MaskedErrors(
        problem.target.errors(weights, passes.reference, [plain])[0],
        cross_entropy_of(problem, weights, inputs, plain),
        error(with_sources(draw(for_random))),
        jnp.stack(attacked) if attacked else jnp.zeros(0),
    )


def cross_entropy(problem: Problem, weights: Weights, inputs: Array) -> Float[Array, ""]:
    """Returns the cross-entropy of the undecomposed target; 0 for a toy."""
    return cross_entropy_of(problem, weights, inputs, problem.target.forward(weights, inputs, UNTOUCHED).output)


def cross_entropy_of(problem: Problem, weights: Weights, inputs: Array, output: Array) -> Float[Array, ""]:
    """Returns the cross-entropy of the next token under an output of the target; 0 for a toy."""
    if not jnp.issubdtype(inputs.dtype, jnp.integer):
        return jnp.zeros(())
    log_p = jax.nn.log_softmax(problem.target.predictions(weights, output[:, :-1]))
    return -jnp.mean(jnp.take_along_axis(log_p, inputs[:, 1:, None], axis=-1))


def second_moments(problem: Problem, weights: Weights, inputs: Array) -> Mapping[str, Float[Array, "layers d d"]]:
    """Returns the mean of ``x xᵀ`` over the positions of a batch, for what each site reads, by stack."""
    target, sites = problem.target, problem.target.sites
    clean = target.forward(weights, inputs, PlainLinears(sites, memory=target.memory))
    found = {}
    for segment in sites.segments:
        for stack in segment.stacks:
            x = wide(clean.records[segment.first][stack.reads])
            rows = x.reshape(x.shape[0], -1, x.shape[-1])
            found[stack.name] = jnp.einsum("lrd,lre->lde", rows, rows) / rows.shape[1]
    return found
