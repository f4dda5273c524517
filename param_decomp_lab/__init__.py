"""The laboratory: everything with a file, a network, a terminal or a person at its other end.

For scripts and notebooks: `from param_decomp_lab import load_run` opens a run.
"""

from typing import TYPE_CHECKING, Any

from param_decomp_lab.version import __version__

if TYPE_CHECKING:
    from param_decomp_lab.opening import load_run as load_run

__all__ = ["__version__", "load_run"]


def __getattr__(name: str) -> Any:
    # On demand: `pd --help` and the configuration need no JAX.
    if name == "load_run":
        from param_decomp_lab.opening import load_run

        return load_run
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
