"""SAEs and transcoders, to compare a decomposition with: their latents and their outputs (B6)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from param_decomp_jax.analysis.baselines import cross_entropy_of, largest
from param_decomp_jax.analysis.hooks import Hook, activation, output_with
from param_decomp_jax.method.step import Problem
from param_decomp_jax.nn.numerics import wide
from param_decomp_jax.targets.base import Weights
from param_decomp_jax.targets.plain_linears import UNTOUCHED

Encoder = Literal["standard", "jumprelu", "topk", "gated"]
Normalization = Literal["none", "constant_norm_rescale", "layer_norm"]
Tensors = Mapping[str, Array]
"""The tensors of a dictionary with C latents: ``W_enc [d_in, C]``, ``W_dec [C, d_out]``, ``b_dec [d_out]``, and ``b_enc
[C]``. A gated dictionary has ``b_gate``, ``b_mag`` and ``r_mag [C]`` instead of ``b_enc``; JumpReLU also has
``threshold [C]``, a skip connection ``W_skip [d_out, d_in]``."""


@dataclass(frozen=True)
class Dictionary:
    """What an SAE or a transcoder computes (B6), without its tensors.

    ``reads``, ``writes``: the same hook for an SAE. ``k``: the number of latents of a top-k encoder. ``centered``:
    whether the mean of what it reads is subtracted first.
    """

    encoder: Encoder
    reads: Hook
    writes: Hook
    normalization: Normalization = "none"
    subtracts_b_dec: bool = False
    k: int | None = None
    centered: bool = False

    @property
    def is_transcoder(self) -> bool:
        return self.reads != self.writes

    def read(self, x: Float[Array, "*n d_in"]) -> Float[Array, "*n d_in"]:
        """Returns the activation as the encoder takes it, in fp32 or wider."""
        x = wide(x)
        return x - jnp.mean(x, axis=-1, keepdims=True) if self.centered else x

    def latents(self, tensors: Tensors, x: Float[Array, "*n d_in"]) -> Float[Array, "*n C"]:
        """Returns the latents f. ``x``: as returned by `read`."""
        scale, shift = self._scale_and_shift(x)
        eps = 1e-5 if self.normalization == "layer_norm" else 0.0
        read = (x - shift) / (scale + eps)
        if self.subtracts_b_dec:
            read = read - tensors["b_dec"]
        projected = read @ tensors["W_enc"]
        if self.encoder == "gated":
            magnitude = jax.nn.relu(projected * jnp.exp(tensors["r_mag"]) + tensors["b_mag"])
            return jnp.where(projected + tensors["b_gate"] > 0, magnitude, 0)
        z = projected + tensors["b_enc"]
        match self.encoder:
            case "standard":
                return jax.nn.relu(z)
            case "jumprelu":
                return jnp.where(z > tensors["threshold"], jax.nn.relu(z), 0)
            case "topk":
                assert self.k is not None
                values, numbers = jax.lax.top_k(z, self.k)
                return jnp.put_along_axis(jnp.zeros_like(z), numbers, jax.nn.relu(values), axis=-1, inplace=False)

    def output(self, tensors: Tensors, x: Float[Array, "*n d_in"], f: Float[Array, "*n C"]) -> Float[Array, "*n d_out"]:
        """Returns the output y. ``x``: as returned by `read`."""
        y = f @ tensors["W_dec"] + tensors["b_dec"]
        if self.is_transcoder:
            return y + x @ tensors["W_skip"].T if "W_skip" in tensors else y
        scale, shift = self._scale_and_shift(x)
        return y * scale + shift

    def _scale_and_shift(self, x: Float[Array, "*n d_in"]) -> tuple[Float[Array, "*n 1"], Float[Array, "*n 1"]]:
        """Returns the scale and the shift that turn the normalised activation back into ``x``."""
        of_none = jnp.zeros_like(x[..., :1])
        match self.normalization:
            case "none":
                return of_none + 1, of_none
            case "constant_norm_rescale":
                return jnp.linalg.norm(x, axis=-1, keepdims=True) / x.shape[-1] ** 0.5, of_none
            case "layer_norm":
                return jnp.std(x, axis=-1, ddof=1, keepdims=True), jnp.mean(x, axis=-1, keepdims=True)


def fewer(tensors: Tensors, f: Float[Array, "*n C"], k: int) -> Float[Array, "*n C"]:
    """Returns f with only the latents of the k largest ``f_j ‖W_dec,j‖`` at each position (B6); the others are 0."""
    sizes = f * jnp.linalg.norm(tensors["W_dec"], axis=-1)
    return f * largest({"f": sizes[None]}, k)["f"][0].astype(f.dtype)


class ReplacedErrors(NamedTuple):
    """L0, and R1 and the next token's cross-entropy with a dictionary's output in place of the activation."""

    l0: Float[Array, ""]
    error: Float[Array, ""]
    cross_entropy: Float[Array, ""]


def active(f: Float[Array, "*n C"]) -> Int[Array, "*n"]:
    """Returns the number of latents above 0 at each position."""
    return jnp.sum(f > 0, axis=-1, dtype=jnp.int32)


def most_active(
    problem: Problem, dictionary: Dictionary, tensors: Tensors, weights: Weights, inputs: Array
) -> Int[Array, ""]:
    """Returns the largest number of latents above 0 at any position of the clean pass."""
    return jnp.max(active(read_and_encode(problem, dictionary, tensors, weights, inputs)[1]))


def read_and_encode(
    problem: Problem, dictionary: Dictionary, tensors: Tensors, weights: Weights, inputs: Array
) -> tuple[Float[Array, "B T d_in"], Float[Array, "B T C"]]:
    """Returns what a dictionary reads in the clean pass, and its latents."""
    target: Any = problem.target
    x = dictionary.read(activation(target, weights, inputs, dictionary.reads))
    return x, dictionary.latents(tensors, x)


def replaced_errors(
    problem: Problem,
    dictionary: Dictionary,
    tensors: Tensors,
    weights: Weights,
    inputs: Array,
    x: Float[Array, "B T d_in"],
    f: Float[Array, "B T C"],
) -> ReplacedErrors:
    """Returns errors with the dictionary's output for the latents ``f`` of ``x`` in place of the activation that it
    writes."""
    target: Any = problem.target
    reference = target.reference(weights, target.forward(weights, inputs, UNTOUCHED).output)
    y = dictionary.output(tensors, x, f)
    output = output_with(target, weights, inputs, dictionary.writes, y)
    return ReplacedErrors(
        jnp.mean(wide(active(f).astype(x.dtype))),
        target.errors(weights, reference, [output])[0],
        cross_entropy_of(problem, weights, inputs, output),
    )
