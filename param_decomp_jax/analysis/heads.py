"""What attention heads read, and what pairs of components add to their scores (section 19)."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from param_decomp_jax.sharding.memory import MemoryPolicy
from param_decomp_jax.targets.base import Weights
from param_decomp_jax.targets.decoder import Decoder
from param_decomp_jax.targets.plain_linears import PlainLayer, frozen_axes

SEEN = "pattern"
"""The name of the record of a layer's attention."""
SCORES = ("previous", "duplicate", "induction", "first")
"""The scores of H3, in order."""


@dataclass
class _ReadingLayer(PlainLayer):
    """Records what ``read`` computes from the layer's attention."""

    read: Callable[[Array], Array] = field(default=lambda pattern: pattern)

    def see_pattern(self, pattern: Float[Array, "B heads T T"]) -> None:
        self.records[SEEN] = self.read(pattern)


@dataclass(frozen=True)
class _ReadingLinears:
    """Applies every matrix as it is, and records ``read`` of the attention of all layers, or of one layer, which is
    then a scan of its own."""

    memory: MemoryPolicy
    read: Callable[[Array], Array]
    only: int | None = None

    def scan_boundaries(self) -> frozenset[int]:
        return frozenset() if self.only is None else frozenset({self.only, self.only + 1})

    def join(self, layer: int, x: Any) -> Any:
        return x

    def slices(self, first: int, stop: int) -> Any:
        return None

    def layer(self, first: int, stop: int, slice_: Any) -> PlainLayer:
        if self.only not in (None, first):
            return PlainLayer(frozen_axes(self.memory))
        return _ReadingLayer(frozen_axes(self.memory), read=self.read)


def attention_pattern(
    target: Decoder, weights: Weights, tokens: Int[Array, "B T"], layer: int
) -> Float[Array, "B heads T T"]:
    """Returns how much every position attends to every other in one layer of the clean pass. The last axis adds up to
    1."""
    reading = _ReadingLinears(target.memory, lambda pattern: pattern, layer)
    return target.forward(weights, tokens, reading).records[layer][SEEN][0]


class ScoreSums(NamedTuple):
    """H3 on some rows of inputs. ``sums``: summed attention, by score as in `SCORES`. ``chance``: the same for a head
    that attends equally to all positions up to its own. ``counts``: the number of positions that count. A score is a
    sum divided by its count."""

    sums: Float[Array, "layers scores heads"]
    chance: Float[Array, " scores"]
    counts: Int[Array, " scores"]


def head_scores(target: Decoder, weights: Weights, tokens: Int[Array, "B T"]) -> ScoreSums:
    """Returns the sums of H3 for the heads of every layer."""
    reads = _reads(tokens)

    def read(pattern: Float[Array, "B heads T T"]) -> Float[Array, "scores heads"]:
        wanted = reads.astype(pattern.dtype)
        return jnp.einsum("sBtu,Bhtu->sh", wanted, pattern, precision=jax.lax.Precision.HIGHEST)

    records = target.forward(weights, tokens, _ReadingLinears(target.memory, read)).records
    sums = jnp.concatenate([own[SEEN] for first, own in sorted(records.items()) if first >= 0])
    alike = 1 / jnp.arange(1, tokens.shape[1] + 1, dtype=sums.dtype)[:, None]
    chance = jnp.sum(jnp.where(reads, alike, 0), axis=(1, 2, 3))
    return ScoreSums(sums, chance, jnp.sum(jnp.any(reads, axis=-1), axis=(1, 2)))


def _reads(tokens: Int[Array, "B T"]) -> Bool[Array, "scores B T T"]:
    """Returns whether position t's attention to s belongs to a score, indexed [t, s]."""
    T = tokens.shape[1]
    t, s = jnp.arange(T)[:, None], jnp.arange(T)[None, :]
    same = tokens[:, :, None] == tokens[:, None, :]
    follows = jnp.pad(same, ((0, 0), (0, 0), (1, 0)))[:, :, :T]  # the token at s − 1 equals that at t
    previous, first = (jnp.broadcast_to(x, same.shape) for x in (s == t - 1, (s == 0) & (t > 0)))
    return jnp.stack([previous, same & (s < t), follows & (s < t), first])


def query_key(
    target: Decoder,
    weights: Weights,
    layer: int,
    q: Float[Array, "n d_q"],
    k: Float[Array, "m d_k"],
    distances: int,
) -> Float[Array, "distances heads n m"]:
    """Returns what each pair of a vector among a layer's queries and one among its keys adds to the scores of its
    heads, at the distances 0, 1, … between query and key (κ of H2, for rows of U of length 1)."""
    queries, keys = target.queries_and_keys(
        weights, layer, jnp.broadcast_to(q[:, None], (len(q), distances, q.shape[-1])), k[:, None]
    )
    n, D, heads, d = queries.shape
    groups = queries.reshape(n, D, keys.shape[2], -1, d)
    found = jnp.einsum("nDkgd,mkd->Dkgnm", groups, keys[:, 0], precision=jax.lax.Precision.HIGHEST) * d**-0.5
    return found.reshape(D, heads, n, len(k))
