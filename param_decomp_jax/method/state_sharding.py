"""The logical axes and the shardings of a run's state."""

from typing import Any

import jax
import optax
from jax.sharding import NamedSharding

from param_decomp_jax.decomposition.components import Components, components_axes, with_lead
from param_decomp_jax.method.adversary import Adversary, Pool
from param_decomp_jax.method.masks import source_axes
from param_decomp_jax.method.state import Decomposition, State
from param_decomp_jax.sharding.mesh import AnyMesh, Axes, is_axes, replace_fields
from param_decomp_jax.sharding.placement import shardings

WHOLE = Axes(())


def state_axes(decomposition: Decomposition, state: State) -> State:
    """Returns the logical axes of every array of ``state`` (arrays or shapes), in its structure.

    Moments are split like what they are moments of, persistent sources like the batch if every row has its own (D2).
    """
    components, ci = components_axes(state.components), state.ci.axes()
    of_experts = {name for name, factors in state.components.items() if factors.V.ndim > 3}

    def adversary_axes(name: str, adversary: Adversary) -> Any:
        pool = isinstance(decomposition.persistent[name][1].scope, Pool)

        def bundle(sources: Any) -> Any:
            return {
                stack: source_axes(s, decomposition.batch_size, stack in of_experts, pool)
                for stack, s in sources.items()
            }

        axes: Any = jax.tree.map(lambda _: WHOLE, adversary)
        return replace_fields(
            axes,
            raw=bundle(adversary.raw),
            mean=adversary.mean and bundle(adversary.mean),
            square=adversary.square and bundle(adversary.square),
        )

    axes: Any = jax.tree.map(lambda _: WHOLE, state)
    return replace_fields(
        axes,
        components=components,
        ci=ci,
        components_moments=moments_axes(state.components_moments, state.components, components),
        ci_moments=moments_axes(state.ci_moments, state.ci, ci),
        adversaries={name: adversary_axes(name, a) for name, a in state.adversaries.items()},
        frequency_means=jax.tree.map(lambda x: with_lead(Axes(("component",)), len(x.shape)), state.frequency_means),
    )


def moments_axes(moments: Any, parameters: Any, axes: Any) -> Any:
    """Returns the logical axes of an optimiser's state. Parts with the structure of the parameters, some of them None,
    are split like the parameters."""
    # Parameters have None where a function lacks weights of a kind. A part has None there too, and here it is a leaf.
    structure: Any = jax.tree.structure(parameters, is_leaf=_is_none)

    def alike(part: Any) -> bool:
        return bool(jax.tree.structure(part, is_leaf=_is_none) == structure)

    def part_axes(part: Any) -> Any:
        if not alike(part):
            return WHOLE

        def own(a: Axes, p: Any, x: Any) -> Axes | None:
            if x is None:
                return None
            return a if x.shape == p.shape else WHOLE  # a factored moment (Adafactor's) has fewer axes

        return jax.tree.map(own, axes, parameters, part, is_leaf=is_axes)

    return jax.tree.map(part_axes, moments, is_leaf=alike)


def _is_none(x: Any) -> bool:
    return x is None


def moments_shardings(mesh: AnyMesh, optimizer: optax.GradientTransformation, components: Components) -> Any:
    """Returns the shardings of the state of an optimiser of components, in its structure."""
    moments = jax.eval_shape(optimizer.init, components)
    return shardings(mesh, moments_axes(moments, components, components_axes(components)), moments)


def state_shardings(mesh: AnyMesh, decomposition: Decomposition, state: State) -> State:
    """Returns shardings in the structure of ``state`` (arrays or shapes). Offloaded arrays lie in pinned host
    memory."""
    placed = shardings(mesh, state_axes(decomposition, state), state)
    offloaded = decomposition.memory.offload_state

    def on_host(part: Any, arrays: Any) -> Any:
        def host_sharding(where: NamedSharding, x: Any) -> NamedSharding:
            return where.with_memory_kind("pinned_host") if len(x.shape) > 0 else where

        return jax.tree.map(host_sharding, part, arrays)

    for name in ("components_moments", "ci_moments"):
        if name in offloaded:
            placed = replace_fields(placed, **{name: on_host(getattr(placed, name), getattr(state, name))})
    if "sources_moments" in offloaded:
        moved = {}
        for name, adversary in state.adversaries.items():
            own = placed.adversaries[name]
            mean, square = on_host(own.mean, adversary.mean), on_host(own.square, adversary.square)
            moved[name] = replace_fields(own, mean=mean, square=square)
        placed = replace_fields(placed, adversaries=moved)
    return placed
