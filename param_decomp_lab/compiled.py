"""Loops over arrays, compiled (Numba)."""

from typing import Any

from numba import njit


def compiled(loop: Any) -> Any:
    """The loop without the interpreter and its lock, so that several run side by side."""
    settings = {"nogil": True, "error_model": "numpy"}
    try:
        return njit(cache=True, **settings)(loop)
    except RuntimeError:  # neither this folder nor the home can be written: it is compiled again in each process
        return njit(**settings)(loop)
