"""The component readout (C7): around any CI function, it adds a term from every component's own activation to its
logit."""

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, NamedTuple

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from param_decomp_jax.ci.function import CIFunction
from param_decomp_jax.ci.inputs import SiteInputs
from param_decomp_jax.ci.squash import two_sided_leaky
from param_decomp_jax.ci.taps import Reads
from param_decomp_jax.decomposition.components import row_or_product
from param_decomp_jax.decomposition.sites import Sites, Stack
from param_decomp_jax.nn.grouped import ExpertGroups
from param_decomp_jax.nn.numerics import wide
from param_decomp_jax.sharding.memory import MemoryPolicy
from param_decomp_jax.sharding.mesh import Axes, replace_fields


class Readout(eqx.Module):
    """The seven vectors of a site in fp32, or, with leading axes, those of a stack."""

    s_plus: Float[Array, "*lead C"]
    a_plus: Float[Array, "*lead C"]
    b_plus: Float[Array, "*lead C"]
    s_minus: Float[Array, "*lead C"]
    a_minus: Float[Array, "*lead C"]
    b_minus: Float[Array, "*lead C"]
    b: Float[Array, "*lead C"]

    def __call__(self, h: Float[Array, "*slots C"], groups: ExpertGroups | None = None) -> Float[Array, "*slots C"]:
        """Returns what is added to the logits of components with these activations (C7). ``groups``: the slots of
        experts, for experts' sites."""

        def own(vector: Array) -> Array:
            return vector if groups is None else vector[groups.chosen]

        plus = own(self.s_plus) * two_sided_leaky(own(self.a_plus) * h + own(self.b_plus))
        minus = own(self.s_minus) * two_sided_leaky(own(self.a_minus) * -h + own(self.b_minus))
        return plus + minus + own(self.b)

    def axes(self) -> Any:
        """Returns the axes: all vectors are split by component."""
        of_each = Axes((*(None,) * (self.b.ndim - 1), "component"))
        names = ("s_plus", "a_plus", "b_plus", "s_minus", "a_minus", "b_minus", "b")
        return replace_fields(self, **dict.fromkeys(names, of_each))


class ReadoutHead(eqx.Module):
    """A head with a readout. ``head``: the head of the inner function."""

    head: Any
    readout: Readout


class LookedUp(NamedTuple):
    """What is read of a site whose rows are looked up (F7). ``row``: a row of W. ``number``: the number of that row."""

    row: Float[Array, "*n d_out"]
    number: Int[Array, "*n"]


class ReadoutCI(eqx.Module):
    """A CI function with a readout for every site. ``function``: the CI function without its heads, which are in
    ``heads``."""

    jointly: ClassVar[bool] = False
    function: Any
    heads: dict[str, ReadoutHead]

    @property
    def boundaries(self) -> tuple[int, ...]:
        """The boundaries of the inner function."""
        found: tuple[int, ...] = self.function.boundaries
        return found

    def features(self, inputs: Reads, leading: tuple[int, ...], compute_dtype: Any, memory: MemoryPolicy) -> Any:
        """Returns the features of the inner function."""
        return self.function.features(inputs, leading, compute_dtype, memory)

    def head_inputs(self, inputs: SiteInputs, numbers: dict[str, Array]) -> dict[str, Any]:
        """Returns the input of every site, whatever the inner function reads."""
        return {name: LookedUp(x, numbers[name]) if name in numbers else x for name, x in inputs.items()}

    @property
    def logits(self) -> Callable[..., Array]:
        """`CIFunction.logits`."""
        return partial(_logits, self.function.logits)

    def axes(self) -> Any:
        """Returns the axes of the inner function; the vectors are split by component."""
        whole = replace_fields(self.function, heads={name: own.head for name, own in self.heads.items()}).axes()
        heads = {
            name: replace_fields(own, head=whole.heads[name], readout=own.readout.axes())
            for name, own in self.heads.items()
        }
        return replace_fields(self, function=replace_fields(whole, heads={}), heads=heads)

    def with_scales(self, scales: dict[str, Float[Array, "*lead C"]]) -> "ReadoutCI":
        """Returns the function with these scales as a₊ and a₋, by stack."""

        def scaled(own: ReadoutHead, scale: Array) -> ReadoutHead:
            # Each gets its own array, because a step reuses the memory of the state that it is given.
            return replace_fields(own, readout=replace_fields(own.readout, a_plus=scale, a_minus=jnp.copy(scale)))

        found: ReadoutCI = replace_fields(
            self, heads={name: scaled(own, scales[name]) for name, own in self.heads.items()}
        )
        return found


def activations(
    x: Array | LookedUp, V: Float[Array, "*experts d_in C"], groups: ExpertGroups | None = None
) -> Float[Array, "*slots C"]:
    """Returns h of C7 in fp32 or wider, with the product's inputs in the dtype of ``x`` (N1)."""
    if isinstance(x, LookedUp):
        return row_or_product(x.number, V.astype(x.row.dtype), groups)
    return row_or_product(x, V, groups)


def _logits(
    inside: Callable[..., Array],
    head: ReadoutHead,
    features: Any,
    x: Any,
    V: Float[Array, "*experts d_in C"],
    groups: ExpertGroups | None = None,
) -> Float[Array, "*slots C"]:
    read = x.row if isinstance(x, LookedUp) else x
    # A head that reads features reads nothing else.
    f = inside(head.head, features, read if features is None else None, V, groups)
    return f + head.readout(activations(x, V, groups), groups)


def with_readout(function: CIFunction, sites: Sites) -> ReadoutCI:
    """Adds a readout as in C8, with scales of 1 in place of those that `method/calibration.py:calibrate` takes from a
    batch."""

    def readout(stack: Stack) -> Readout:
        # These are separate arrays, because a step reuses the memory of the state that it is given.
        zero, one = (lambda value=value: jnp.full((*stack.lead, stack.C), value, jnp.float32) for value in (0.0, 1.0))
        return Readout(zero(), one(), zero(), zero(), one(), zero(), zero())

    heads = {stack.name: ReadoutHead(function.heads[stack.name], readout(stack)) for stack in sites.stacks}
    return ReadoutCI(replace_fields(function, heads={}), heads)


def initial_scales(largest: Float[Array, "*lead C"]) -> Float[Array, "*lead C"]:
    """Returns a of C8, from the percentiles q of the size of h; 1 if all of a site's percentiles are 0."""
    q = wide(largest)
    of_site = jnp.max(q, axis=-1, keepdims=True)
    return 1 / jnp.where(of_site > 0, jnp.maximum(q, of_site / 1000), 1)
