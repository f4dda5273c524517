"""The interface of a CI function."""

from collections.abc import Callable
from typing import Any, ClassVar, Protocol, runtime_checkable

from jaxtyping import Array, Float

from param_decomp_jax.ci.inputs import SiteInputs
from param_decomp_jax.ci.taps import Reads
from param_decomp_jax.sharding.memory import MemoryPolicy


@runtime_checkable
class CIFunction(Protocol):
    """A CI function: a trained pytree. ``heads`` holds what belongs to single sites, by stack, with a leading layer
    axis."""

    heads: dict[str, Any]
    jointly: ClassVar[bool]
    """Whether it reads the inputs of sites only in sums over sites, so that inputs can be recomputed; otherwise they
    are kept."""

    @property
    def boundaries(self) -> tuple[int, ...]:
        """The residual streams that features are computed from in place of the inputs of sites, given by the numbers of
        the blocks that they enter (C10); empty without taps."""
        ...

    def features(self, inputs: Reads, leading: tuple[int, ...], compute_dtype: Any, memory: MemoryPolicy) -> Any:
        """Returns the features that heads share, from every site's clean input or from residual streams: one array for
        all sites, or `StackFeatures`; None for a layerwise function.

        ``leading``: the axes of an activation before its last one.
        """
        ...

    def head_inputs(self, inputs: SiteInputs, numbers: dict[str, Array]) -> dict[str, Any]:
        """Returns what heads read of their own sites, by stack; empty if they read only features.

        ``numbers``: for stacks of tables, the rows that are looked up (F7).
        """
        ...

    @property
    def logits(self) -> Callable[..., Float[Array, "*slots C"]]:
        """A function from ``(head, features, x, V, groups)`` to the logits of one site in fp32 (N1). ``features``:
        those that the head reads. ``x``: the site's part of `head_inputs`, or None. ``groups``: for experts' sites,
        whose arrays have an axis of experts; there is then one row of logits for every slot.
        """
        ...

    def axes(self) -> Any:
        """Returns the logical axes of every array, in the structure of the function."""
        ...
