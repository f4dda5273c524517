"""Whether JAX and its compiler for GPUs go together."""

from importlib.metadata import PackageNotFoundError, version

from param_decomp_aot import JAX_VERSION
from param_decomp_lab.errors import UserError

PARTS = ("jax-cuda13-plugin", "jax-cuda13-pjrt", "jax-cuda12-plugin", "jax-cuda12-pjrt")
"""The packages of JAX's CUDA plugins. Each release of JAX takes those of its own version alone."""


def refuse_another_version() -> None:
    """UserError where a part of the CUDA plugin is of another version than JAX. Nothing is said where none is there.

    To be asked before JAX starts: it would print a traceback, and go on with half of such a plugin.
    """
    jax = version("jaxlib")
    others = [f"{part} {found}" for part in PARTS if (found := installed(part)) not in (None, jax)]
    if others:
        raise UserError(
            f"compiling for GPUs needs JAX's CUDA plugin of JAX's own version, but JAX is {jax} and what is "
            f"installed is {' and '.join(others)}; to have both in {JAX_VERSION}: pip install 'param-decomp[probe]'"
        )


def installed(package: str) -> str | None:
    """The version of an installed package, None where it is not."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
