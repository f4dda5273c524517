"""Entry points for inspecting a step and for comparing it with other implementations.

A step is a function of state, weights, batch and random numbers. These calls compute each of its parts alone, read its
random numbers or take others, and convert arrays between the stacked layout and one by site name:

```python
draws = step_draws(problem, step=3, leading=(B, T))                 # what a step at this point draws
losses, gradients = loss_and_gradients(problem, state, weights, tokens, draws)
loss, gradients = term_loss_and_gradients(problem, state, weights, tokens, "StochasticReconLoss")
V = unstack_sites(problem.target.sites, gradients.components)["layers.0.mlp.up_proj"].V     # [d_in, C]
```

All are pure functions that can be jitted with ``problem`` (and names, and leading axes) static. `step.py:step_outcome`
is the whole step with its update and its gradients. `tests/core/tiny.py` uses these calls to compare the core with the
reference implementation of the tests.
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
    """Returns the random numbers of a training step as arrays: for each reconstruction term, those of its masked
    forwards.

    ``leading``: global axes of an activation before its last one, ``(B, T)`` for a language model. A term's forwards
    come in the order of its live sets, with the samples of each live set together. For a persistent term on subsets,
    its warm-up ascents follow (A3). `step_outcome`, `loss_and_gradients` and `term_loss_and_gradients` take this
    result, or numbers from another implementation in its place. To make a forward's sources from arrays by site name:

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
    """Returns losses and gradients of the training step that ``state`` is about to take, without the update.

    As in the step, persistent sources first take their warm-up ascents (A3). The losses are ``loss/<term>`` without
    coefficient, their parts (R6), and ``loss/total``, all scalars; the gradients are of the total, before any clip, in
    the structure of `State.components`, of `State.ci`, and of each persistent term's raw sources (`Gradients`).
    ``draws``: used in place of the step's own.
    """
    clean_pass = run_clean_pass(problem, state.ci, weights, inputs, keeps_outputs(problem), compared_points(problem))
    objective = make_objective(problem.decomposition, state, draws)
    copies = hold_trained(problem, state.learned)
    _, gradients, found = losses_and_ascents(problem, state, clean_pass, objective, copies)
    return found.metrics, gradients


def term_loss_and_gradients(
    problem: Problem, state: State, weights: Weights, inputs: Array, name: str, draws: GivenDraws | None = None
) -> tuple[Float[Array, ""], Gradients]:
    """Returns what one term contributes to the total loss, ``coeff · term``, and the gradients of that contribution.

    The term's random numbers are those of the step that ``state`` is about to take, or ``draws`` (those of other terms
    are ignored). The sources of a persistent term are those of ``state``, before any ascent. Contributions add up to
    the total loss. Gradients of the CI function do not add up where λ leaks (C1), because the leak depends on the sign
    of the sum. Fails by assertion if no term has this name.
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
    """Converts the stacked layout to arrays by site name, in canonical order.

    ``stacked``: by stack name, trees of arrays with a leading layer axis: `State.components`, heads of a CI function, a
    `Bundle` of sources, ``Objective`` summaries. The result has the same trees without that axis (for experts, without
    the axes of layers and experts). Sites of stacks that ``stacked`` lacks (tied ones, T4) are left out.
    """
    rows = zip(sites.all, sites.stack_rows, strict=True)
    return {
        site.name: jax.tree.map(lambda x, row=row: x[row], stacked[stack.name])
        for site, (stack, row) in rows
        if stack.name in stacked
    }


def stack_sites(sites: Sites, by_site: Mapping[str, Any], fill: bool = False) -> dict[str, Any]:
    """Inverts `unstack_sites`: converts trees of arrays by site name to the stacked layout.

    Stacks with none of the given sites are left out. All sites of a stack must be given, or with ``fill`` at least one;
    the rows of the others are then zeros. Fails by assertion otherwise, and for an unknown name.
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
