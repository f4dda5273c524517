"""`eval/ce_kl/*`: how much of a language model's prediction survives each way of masking."""

from collections.abc import Mapping
from dataclasses import replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from param_decomp_jax.ci.squash import Squash
from param_decomp_jax.method.clean_pass import CleanPass, DecomposedBatch
from param_decomp_jax.method.masked import Stream
from param_decomp_jax.method.masks import Constant, ConstantSources, SourceKind, Stochastic, StochasticSources
from param_decomp_jax.method.recon import run_masked
from param_decomp_jax.nn.numerics import kl_divergence
from param_decomp_jax.sharding.mesh import constrain, cut, uncut
from param_decomp_jax.sharding.remat import token_blocks
from param_decomp_jax.targets.decoder import Decoder

MASKINGS = ("unmasked", "ci_masked", "rounded_masked", "stoch_masked", "random_masked", "zero_masked")


def kl_and_ce(
    target: Decoder, clean_pass: CleanPass, hidden: Float[Array, "B T d"]
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Of what is predicted from ``hidden``, in nats: mean KL from the clean prediction, over all positions; mean
    cross-entropy of the next token, over positions 0 … T − 2.

    Logits of as many tokens at a time as in a training step, both passes'.
    """
    memory = target.memory
    n_blocks = token_blocks(hidden.shape[:-1], memory.vocabulary_block if memory.recomputes("vocabulary") else None)

    def of_block(block: tuple[Array, Array, Array]) -> tuple[Array, Array]:
        clean, masked, following = block
        logits = target.logits(clean_pass.weights, masked)
        log_p = jnp.take_along_axis(jax.nn.log_softmax(logits), following[..., None], axis=-1)[..., 0]
        return kl_divergence(target.logits(clean_pass.weights, clean), logits), -log_p

    following = jnp.roll(clean_pass.inputs, -1, axis=1)
    blocks = [
        constrain(cut(x, 1, n_blocks, "seq"), None, "batch") for x in (clean_pass.forward.output, hidden, following)
    ]
    kl, ce = (uncut(x, 1, "seq") for x in jax.lax.map(of_block, tuple(blocks)))
    return jnp.mean(kl), jnp.mean(ce[:, :-1])


def ce_and_kl(
    target: Decoder,
    batch: DecomposedBatch,
    key: PRNGKeyArray,
    sampling: Stochastic,
    rounding_threshold: float,
) -> dict[str, Float[Array, ""]]:
    """``kl_<masking>`` against the clean output over all positions, and ``ce_<masking>``, ``ce_target``, of one batch.

    All maskings but ``stoch_masked`` have the delta path off.
    """
    live = tuple(range(len(target.sites)))
    of_stochastic, of_random = jax.random.split(key)
    clean_pass, lower = batch.clean_pass, batch.reader.squash
    on, off = ConstantSources(Constant(1.0)), ConstantSources(Constant(0.0))
    maskings: dict[str, tuple[Squash, SourceKind]] = {
        "unmasked": (jnp.zeros_like, on),
        "ci_masked": (lower, off),
        "rounded_masked": (lambda z: (lower(z) > rounding_threshold).astype(z.dtype), off),
        "stoch_masked": (lower, StochasticSources(sampling, of_stochastic, clean_pass.use_delta)),
        "random_masked": (
            jnp.zeros_like,
            StochasticSources(replace(sampling, sampling="continuous"), of_random, False),
        ),
        "zero_masked": (jnp.zeros_like, off),
    }
    measured = {"ce_target": kl_and_ce(target, clean_pass, clean_pass.forward.output)[1]}
    for masking in MASKINGS:
        squash, sources = maskings[masking]
        [masked], _ = run_masked(batch.with_squash(squash), [Stream(live, sources)])
        measured[f"kl_{masking}"], measured[f"ce_{masking}"] = kl_and_ce(target, clean_pass, masked.output)
    return measured


def ce_kl_metrics(means: Mapping[str, float]) -> dict[str, float]:
    """From means over batches to `eval/ce_kl/*`: KLs, CE differences, and the share of CE not recovered."""
    target, zero = means["ce_target"], means["ce_zero_masked"]
    metrics = {"eval/ce_kl/ce_target": target}
    for masking in MASKINGS:
        lost = means[f"ce_{masking}"] - target
        metrics[f"eval/ce_kl/kl_{masking}"] = means[f"kl_{masking}"]
        metrics[f"eval/ce_kl/ce_difference_{masking}"] = lost
        # A target that zero masking does not hurt has nothing to recover.
        metrics[f"eval/ce_kl/ce_unrecovered_{masking}"] = lost / (zero - target) if zero != target else float("nan")
    return metrics
