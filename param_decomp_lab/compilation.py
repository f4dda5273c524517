"""Functions as compiled programs: loops over arrays by Numba, functions on the devices by XLA.

Either library is imported when it is asked for: each takes a second.
"""

from functools import cache
from typing import Any


def compiled(loop: Any) -> Any:
    """A loop over arrays without the interpreter and its lock, so that several run side by side (Numba)."""
    from numba import njit

    settings = {"nogil": True, "error_model": "numpy"}
    try:
        return njit(cache=True, **settings)(loop)
    except RuntimeError:  # neither this folder nor the home can be written: it is compiled again in each process
        return njit(**settings)(loop)


@cache
def jitted(function: Any, static: tuple[int, ...] = (0,)) -> Any:
    """A function compiled by XLA and waited for, so that one program runs at a time: two at once, with collectives, can
    wait for each other on the devices of a CPU. ``static``: numbers of the arguments that it is compiled for."""
    import jax

    program = jax.jit(function, static_argnums=static)
    return lambda *arguments: jax.block_until_ready(program(*arguments))
