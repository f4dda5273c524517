"""`eval/ce_kl/*`: how much of a language model's prediction survives each way of masking."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from param_decomp_lab.metrics.base import METRICS, Metric
from param_decomp_lab.schema.kinds import registered
from param_decomp_lab.schema.strict import Fraction
from param_decomp_lab.ui.numbers import exact

if TYPE_CHECKING:
    from jaxtyping import Array, Float, PRNGKeyArray

    from param_decomp_jax.ci.squash import Squash
    from param_decomp_jax.method.clean_pass import CleanPass, DecomposedBatch
    from param_decomp_jax.method.masks import SourceKind, Stochastic
    from param_decomp_jax.targets.decoder import Decoder
    from param_decomp_lab.metrics.batch import Batch
    from param_decomp_lab.metrics.snapshot import Snapshot

MASKINGS = {
    "unmasked": "all masks 1",
    "ci_masked": "masks are the causal importances λ",
    "rounded_masked": "masks are λ, rounded at the threshold",
    "stoch_masked": "random masks between λ and 1",
    "random_masked": "random masks between 0 and 1",
    "zero_masked": "all masks 0",
}
"""The maskings in the order of the table, with descriptions."""

MEASURES = ("kl", "ce_difference", "ce_unrecovered")
"""The numbers that are logged for each masking."""


@registered(METRICS)
class CEandKLLosses(Metric):
    type: Literal["CEandKLLosses"]
    rounding_threshold: Fraction

    needs = "text"
    usual: ClassVar = {"rounding_threshold": 0.0}
    meanings: ClassVar = {
        "eval/ce_kl/kl_": "divergence from the target's prediction, nats per position",
        "eval/ce_kl/ce_difference_": "cross-entropy minus the target's, nats per token",
        "eval/ce_kl/ce_unrecovered_": "the ce difference as a share of the zero-masked one",
        "eval/ce_kl/ce_target": "cross-entropy of the target itself, nats per token",
    }

    def describe(self) -> str:
        return f"six maskings, rounded at {exact(self.rounding_threshold)}"

    def measure(self, batch: Batch) -> dict[str, Float[Array, ""]]:
        from param_decomp_jax.targets.decoder import Decoder

        assert isinstance(batch.target, Decoder), "cross-entropy is of a language model"
        return ce_and_kl(batch.target, batch, batch.metrics_key, batch.sampling, self.rounding_threshold)

    def row(self, means: Any, snapshot: Snapshot) -> dict[str, float]:
        """Returns KLs, CE differences, and the share of CE not recovered."""
        means = {name: float(value) for name, value in means.items()}
        target, zero = means["ce_target"], means["ce_zero_masked"]
        row = {"eval/ce_kl/ce_target": target}
        for masking in MASKINGS:
            lost = means[f"ce_{masking}"] - target
            row[f"eval/ce_kl/kl_{masking}"] = means[f"kl_{masking}"]
            row[f"eval/ce_kl/ce_difference_{masking}"] = lost
            # If zero masking does not hurt a target, there is nothing to recover.
            row[f"eval/ce_kl/ce_unrecovered_{masking}"] = lost / (zero - target) if zero != target else float("nan")
        return row


def ce_and_kl(
    target: Decoder,
    batch: DecomposedBatch,
    key: PRNGKeyArray,
    sampling: Stochastic,
    rounding_threshold: float,
) -> dict[str, Float[Array, ""]]:
    """Computes ``kl_<masking>`` against the clean output over all positions, and ``ce_<masking>`` and ``ce_target``,
    for one batch.

    All maskings except ``stoch_masked`` leave out Δ.
    """
    import jax
    import jax.numpy as jnp

    from param_decomp_jax.method.masked import Stream
    from param_decomp_jax.method.masks import Constant, ConstantSources, StochasticSources
    from param_decomp_jax.method.recon import run_masked

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
        [masked] = run_masked(batch.with_squash(squash), [Stream(live, sources)]).forwards
        measured[f"kl_{masking}"], measured[f"ce_{masking}"] = kl_and_ce(target, clean_pass, masked.output)
    return measured


def kl_and_ce(
    target: Decoder, clean_pass: CleanPass, hidden: "Float[Array, 'B T d']"
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Returns the mean KL from the clean prediction over all positions, and the mean cross-entropy of the next token
    over positions 0 … T − 2, both in nats, for the prediction from ``hidden``. Computes the logits of both passes for
    as many tokens at a time as a training step does.
    """
    import jax
    import jax.numpy as jnp

    from param_decomp_jax.nn.numerics import kl_divergence
    from param_decomp_jax.sharding.mesh import constrain, join_blocks, split_blocks
    from param_decomp_jax.sharding.remat import token_blocks

    memory = target.memory
    n_blocks = token_blocks(hidden.shape[:-1], memory.vocabulary_block if memory.recomputes("vocabulary") else None)

    def of_block(block: tuple[Array, Array, Array]) -> tuple[Array, Array]:
        clean, masked, following = block
        logits = target.logits(clean_pass.weights, masked)
        log_p = jnp.take_along_axis(jax.nn.log_softmax(logits), following[..., None], axis=-1)[..., 0]
        return kl_divergence(target.logits(clean_pass.weights, clean), logits), -log_p

    following = jnp.roll(clean_pass.inputs, -1, axis=1)
    blocks = [
        constrain(split_blocks(x, 1, n_blocks, "seq"), None, "batch")
        for x in (clean_pass.forward.output, hidden, following)
    ]
    kl, ce = (join_blocks(x, 1, "seq") for x in jax.lax.map(of_block, tuple(blocks)))
    return jnp.mean(kl), jnp.mean(ce[:, :-1])
