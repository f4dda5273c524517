"""Entry points for looking into a step and for comparisons with other implementations.

A step is a function of state, weights, batch and random numbers. With these calls each of its parts can be computed
alone, the random numbers can be read or given, and arrays can be moved between the stacked layout and one by site name:

```python
draws = step_draws(problem, step=3, leading=(B, T))                 # what a step at this point draws
losses, gradients = loss_and_gradients(problem, state, weights, tokens, draws)
loss, gradients = term_loss_and_gradients(problem, state, weights, tokens, "StochasticReconLoss")
V = unstack_sites(problem.target.sites, gradients.components)["layers.0.mlp.up_proj"].V     # [d_in, C]
```

All are pure functions that can be jitted with ``problem`` (and names, and leading axes) static. `step.py:step_outcome`
is the whole step with its update and its gradients. `tests/core/tiny.py` uses them to hold the core against the
reference of the tests.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from param_decomp_jax.decomposition.sites import Sites
from param_decomp_jax.method.objective import Metrics, Objective, term_keys
from param_decomp_jax.method.recon import ForwardDraws, Reconstruction, draw_forwards
from param_decomp_jax.method.state import State
from param_decomp_jax.method.step import (
    GivenDraws,
    Gradients,
    Problem,
    compared_points,
    differentiable_importance,
    hold_trained,
    keeps_outputs,
    loss_gradients,
    losses_and_ascents,
    make_objective,
    run_clean_pass,
)
from param_decomp_jax.targets.base import Weights


def step_draws(problem: Problem, step: int | Int[Array, ""], leading: tuple[int, ...]) -> dict[str, list[ForwardDraws]]:
    """The random numbers of a training step as arrays: by reconstruction term, those of each of its masked forwards.

    ``leading``: global axes of an activation before its last one, ``(B, T)`` for a language model. A term's forwards
    come in the order of its live sets, and for each of these its samples; after them, of a persistent term on subsets,
    its warm-up ascents (A3). The result can be given to
    `step_outcome`, `loss_and_gradients` and `term_loss_and_gradients`; with other numbers in its place, made by
    another implementation, these compute with those. A forward's sources from arrays by site name:

    ```python
    by_site = {"layers.0.mlp.up_proj": Sources(components, delta)}      # [B, T, C] and [B, T]
    ForwardDraws(routes=None, sources=stack_sites(sites, by_site, fill=True))
    ```
    """
    spec = problem.decomposition
    keys = term_keys(spec, jax.random.fold_in(spec.key("train"), step))
    return {
        term.name: draw_forwards(term, keys(term.name), problem.target.sites, leading, spec.use_delta)
        for term in spec.terms
        if isinstance(term, Reconstruction)
    }


def loss_and_gradients(
    problem: Problem, state: State, weights: Weights, inputs: Array, draws: GivenDraws | None = None
) -> tuple[Metrics, Gradients]:
    """Losses and gradients of the training step that ``state`` is about to take, without the update.

    As in the step, persistent sources first take their warm-up ascents (A3). The losses are ``loss/<term>`` without
    coefficient, their parts (R6), and ``loss/total``, all scalars; the gradients are of the total, before any clip, in
    the structure of `State.components`, of `State.ci`, and of each persistent term's raw sources (`Gradients`).
    ``draws``: in place of the step's.
    """
    clean_pass = run_clean_pass(problem, state.ci, weights, inputs, keeps_outputs(problem), compared_points(problem))
    objective = make_objective(problem.decomposition, state, draws)
    copies = hold_trained(problem, state.learned)
    _, gradients, found = losses_and_ascents(problem, state, clean_pass, objective, copies)
    return found.metrics, gradients


def term_loss_and_gradients(
    problem: Problem, state: State, weights: Weights, inputs: Array, name: str, draws: GivenDraws | None = None
) -> tuple[Float[Array, ""], Gradients]:
    """What one term contributes to the total loss, ``coeff · term``, and the gradients of that contribution.

    The term draws what it draws in the step that ``state`` is about to take, or ``draws`` (those of other terms are
    ignored). The sources of a persistent term are those of ``state``, before any ascent. Contributions add up to the
    total loss. Gradients of the CI function do not add up where λ leaks (C1), which depends on the sign of the sum.
    Fails by assertion if no term has this name.
    """
    spec = problem.decomposition
    terms = tuple(term for term in spec.terms if term.name == name)
    assert terms, f"no term is called {name}; there are {', '.join(term.name for term in spec.terms)}"
    alone = replace(problem, decomposition=replace(spec, terms=terms))
    if draws is None:
        # A term's key depends on its number among all terms.
        keys = term_keys(spec, jax.random.fold_in(spec.key("train"), state.step))
        objective = Objective(alone.decomposition, state.step, keys, state.frequency_means)
    else:
        objective = make_objective(alone.decomposition, state, draws)
    clean_pass = run_clean_pass(alone, state.ci, weights, inputs, keeps_outputs(alone), compared_points(alone))
    copies = hold_trained(alone, state.learned)
    importance = differentiable_importance(alone, state, clean_pass, copies)
    raw = {term: state.adversaries[term].raw for term in alone.decomposition.persistent}
    gradients, found = loss_gradients(alone, objective, state, clean_pass, importance, raw, copies)
    return found.metrics["loss/total"], gradients


def unstack_sites(sites: Sites, stacked: Mapping[str, Any]) -> dict[str, Any]:
    """From the stacked layout to arrays by site name, in canonical order.

    ``stacked``: by stack name, trees of arrays with a leading layer axis: `State.components`, heads of a CI function,
    a `Bundle` of sources, ``Objective`` summaries. The result has the same trees without that axis (of experts: without
    the axes of layers and experts). Sites of stacks
    that ``stacked`` does not have (tied ones, T4) are left out.
    """
    rows = zip(sites.all, sites.stack_rows, strict=True)
    return {
        site.name: jax.tree.map(lambda x, row=row: x[row], stacked[stack.name])
        for site, (stack, row) in rows
        if stack.name in stacked
    }


def stack_sites(sites: Sites, by_site: Mapping[str, Any], fill: bool = False) -> dict[str, Any]:
    """The inverse of `unstack_sites`: from trees of arrays by site name to the stacked layout.

    Stacks with none of the given sites are left out. Of a stack, all sites must be given, or with ``fill`` at least
    one: the rows of the others are zeros. Fails by assertion otherwise, and for an unknown name.
    """
    unknown = by_site.keys() - {site.name for site in sites.all}
    assert not unknown, f"not sites of this decomposition: {', '.join(sorted(unknown))}"
    stacked = {}
    for stack in sites.stacks:
        names = [sites.all[n].name for n in stack.sites]
        given = [name for name in names if name in by_site]
        if not given:
            continue
        missing = [name for name in names if name not in by_site]
        assert fill or not missing, f"of the sites stacked in {stack.name}, {', '.join(missing)} are missing"
        zeros = jax.tree.map(jnp.zeros_like, by_site[given[0]])
        rows = (by_site.get(name, zeros) for name in names)
        stacked[stack.name] = jax.tree.map(lambda *own, stack=stack: stack.lay_out(jnp.stack(own)), *rows)
    return stacked
