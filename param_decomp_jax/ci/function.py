"""The interface of a CI function."""

from collections.abc import Callable
from typing import Any, ClassVar, Protocol, runtime_checkable

from jaxtyping import Array, Float

from param_decomp_jax.ci.inputs import SiteInputs
from param_decomp_jax.ci.taps import Reads
from param_decomp_jax.sharding.memory import MemoryPolicy


@runtime_checkable
class CIFunction(Protocol):
    """A trained pytree; ``heads`` holds what belongs to one site, by stack, with a leading layer axis."""

    heads: dict[str, Any]
    jointly: ClassVar[bool]
    """Whether it reads the inputs of sites in sums over them alone, so that they can be recomputed; others need them
    kept."""

    @property
    def boundaries(self) -> tuple[int, ...]:
        """The residual streams that features are made of in place of the inputs of sites, by the numbers of the blocks
        that they enter (C10); empty without taps."""
        ...

    def features(self, inputs: Reads, leading: tuple[int, ...], compute_dtype: Any, memory: MemoryPolicy) -> Any:
        """The features that heads share, from every site's clean input or from residual streams: of all sites, or
        `StackFeatures`; None for a layerwise function.

        ``leading``: axes of an activation before its last one.
        """
        ...

    def head_inputs(self, inputs: SiteInputs, numbers: dict[str, Array]) -> dict[str, Any]:
        """What heads read of their own sites, by stack; empty where they read features alone.

        ``numbers``: of the stacks of tables, the rows that are looked up (F7).
        """
        ...

    @property
    def logits(self) -> Callable[..., Float[Array, "*slots C"]]:
        """``(head, features, x, V, groups)`` to the logits of one site in fp32 (N1): from its head, the features that
        it reads, what it has of `head_inputs` (else None), and its V. ``groups``: of experts' sites, whose arrays have
        an axis of experts; then of every slot.
        """
        ...

    def axes(self) -> Any:
        """The logical axes of every array, in the structure of the function."""
        ...
