"""Functions as compiled programs (XLA), called one at a time."""

from functools import cache
from typing import Any

import jax


@cache
def jitted(function: Any, static: tuple[int, ...] = (0,)) -> Any:
    """The function compiled, and waited for: two programs at once, with collectives, can wait for each other on the
    devices of a CPU. ``static``: numbers of the arguments that it is compiled for."""
    compiled = jax.jit(function, static_argnums=static)
    return lambda *arguments: jax.block_until_ready(compiled(*arguments))
