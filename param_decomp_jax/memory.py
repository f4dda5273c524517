"""The memory policy: how a step is laid out in time so that it needs less memory, with the same numbers."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax


@dataclass(frozen=True)
class MemoryPolicy:
    """Choices that may change memory and time, never a number beyond floating-point reassociation.

    ``layers``: one scanned body for alike layers, or the layers written out one after the other.
    ``recompute_layers``: a layer of a reconstruction forward keeps only its input and is run again in the backward.
    ``donate``: the step reuses the buffers of the state it is given.
    """

    layers: Literal["scan", "unroll"] = "scan"
    recompute_layers: bool = False
    donate: bool = True

    def over_layers(self, body: Callable[[Any, Any], tuple[Any, Any]], carry: Any, xs: Any) -> tuple[Any, Any]:
        """``lax.scan(body, carry, xs)``, as this policy would have it; one layer alone may change the carry's shape."""
        if self.recompute_layers:
            body = jax.checkpoint(body)
        n_layers = jax.tree.leaves(xs)[0].shape[0]
        if self.layers == "scan" and n_layers > 1:
            return lax.scan(body, carry, xs)
        ys = []
        for row in range(n_layers):
            carry, y = body(carry, jax.tree.map(lambda x, row=row: x[row], xs))
            ys.append(y)
        return carry, jax.tree.map(lambda *rows: jnp.stack(rows), *ys)


PLAIN = MemoryPolicy()
