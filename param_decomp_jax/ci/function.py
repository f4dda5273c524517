"""What a CI function is."""

from typing import Any, Protocol, runtime_checkable

from jaxtyping import Array, Float

from param_decomp_jax.memory import MemoryPolicy


@runtime_checkable
class CIFunction(Protocol):
    """A trained pytree; ``heads`` holds what belongs to one site, by stack, with a leading layer axis."""

    heads: dict[str, Any]

    def features(self, inputs: dict[str, Array], compute_dtype: Any, memory: MemoryPolicy) -> Any:
        """What the heads share, from every stack's clean inputs ``[layers, …, d_in]`` in canonical stack order."""
        ...

    @staticmethod
    def logits(
        head: Any, features: Any, x: Float[Array, "*n d_in"] | None, V: Float[Array, "d_in C"]
    ) -> Float[Array, "*n C"]:
        """Logits of one site in fp32 (N1), from its head, the shared features, its clean input (None where features are
        shared) and its V."""
        ...

    def axes(self) -> Any:
        """The logical axes of every array, in the structure of the function."""
        ...
