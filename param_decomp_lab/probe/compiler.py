"""Checks whether the versions of JAX and of its GPU compiler match."""

from importlib.metadata import PackageNotFoundError, version

from param_decomp_aot import JAX_VERSION
from param_decomp_lab.errors import UserError

PARTS = ("jax-cuda13-plugin", "jax-cuda13-pjrt", "jax-cuda12-plugin", "jax-cuda12-pjrt")
"""The packages of JAX's CUDA plugins. Each release of JAX works only with those of its own version."""


def refuse_another_version() -> None:
    """Raises UserError if a part of the CUDA plugin has another version than JAX. Missing parts are not an error.

    Call it before JAX starts, which would print a traceback and continue with half of such a plugin.
    """
    jax = version("jaxlib")
    others = [f"{part} {found}" for part in PARTS if (found := installed(part)) not in (None, jax)]
    if others:
        raise UserError(
            f"compiling for GPUs needs JAX's CUDA plugin of JAX's own version, but JAX is {jax} and what is "
            f"installed is {' and '.join(others)}; to have both in {JAX_VERSION}: pip install 'param-decomp[probe]'"
        )


def installed(package: str) -> str | None:
    """Returns the version of a package; None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
