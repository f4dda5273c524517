"""The interface of a CI function."""

from typing import Any, ClassVar, Protocol, runtime_checkable

from jaxtyping import Array, Float

from param_decomp_jax.ci.inputs import CIInputs
from param_decomp_jax.grouped import Groups
from param_decomp_jax.memory import MemoryPolicy


@runtime_checkable
class CIFunction(Protocol):
    """A trained pytree; ``heads`` holds what belongs to one site, by stack, with a leading layer axis."""

    heads: dict[str, Any]
    jointly: ClassVar[bool]
    """Whether it reads the inputs of sites in sums over them, so that they can be recomputed; others need them kept."""

    def features(self, inputs: CIInputs, leading: tuple[int, ...], compute_dtype: Any, memory: MemoryPolicy) -> Any:
        """The features that heads share, from every site's clean input: of all sites, or `StackFeatures`; None for a
        layerwise function.

        ``leading``: axes of an activation before its last one.
        """
        ...

    @staticmethod
    def logits(
        head: Any,
        features: Any,
        x: Float[Array, "*n d_in"] | None,
        V: Float[Array, "*experts d_in C"],
        groups: Groups | None = None,
    ) -> Float[Array, "*slots C"]:
        """Logits of one site in fp32 (N1), from its head, the features that it reads, its clean input (None where there
        are features) and its V. ``groups``: of experts' sites, whose arrays have an axis of experts; then of every
        slot.
        """
        ...

    def axes(self) -> Any:
        """The logical axes of every array, in the structure of the function."""
        ...
