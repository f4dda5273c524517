"""Where arrays lie and what is kept: the mesh, the memory policy, and how both are carried out."""

from typing import TYPE_CHECKING, Any

from param_decomp_jax.sharding.memory import BALANCED, FAST, LEAN, PLAIN, PUBLISHED, MemoryPolicy

if TYPE_CHECKING:
    from param_decomp_jax.sharding.mesh import Axes as Axes
    from param_decomp_jax.sharding.mesh import MeshShape as MeshShape
    from param_decomp_jax.sharding.mesh import make_mesh as make_mesh
    from param_decomp_jax.sharding.placement import batch_sharding as batch_sharding
    from param_decomp_jax.sharding.placement import shardings as shardings

__all__ = [
    "BALANCED", "FAST", "LEAN", "PLAIN", "PUBLISHED", "Axes", "MemoryPolicy", "MeshShape", "batch_sharding",
    "make_mesh", "shardings",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    # Imported on demand, because configurations with memory policies are read without JAX.
    if name in __all__:
        from param_decomp_jax.sharding import mesh, placement

        return getattr(mesh if hasattr(mesh, name) else placement, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
