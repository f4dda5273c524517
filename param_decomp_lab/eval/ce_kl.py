"""`eval/ce_kl/*`: how much of a language model's prediction survives each way of masking."""

from collections.abc import Mapping
from dataclasses import replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from param_decomp_jax.components import Components
from param_decomp_jax.masks import Constant, ConstantSources, SourceKind, Stochastic, StochasticSources
from param_decomp_jax.numerics import kl_divergence
from param_decomp_jax.recon import Scene, run_masked
from param_decomp_jax.targets.llama import Llama

MASKINGS = ("unmasked", "ci_masked", "rounded_masked", "stoch_masked", "random_masked", "zero_masked")


def next_token_ce(logits: Float[Array, "B T vocab"], tokens: Int[Array, "B T"]) -> Float[Array, ""]:
    """Mean cross-entropy of the next token in nats, over positions 0 … T − 2."""
    log_p = jax.nn.log_softmax(logits[:, :-1])
    return -jnp.mean(jnp.take_along_axis(log_p, tokens[:, 1:, None], axis=-1))


def ce_and_kl(
    target: Llama,
    scene: Scene,
    components: Components,
    importances: dict[str, Float[Array, "layers B T C"]],
    key: PRNGKeyArray,
    sampling: Stochastic,
    rounding_threshold: float,
) -> dict[str, Float[Array, ""]]:
    """``kl_<masking>`` against the clean output over all positions, and ``ce_<masking>``, ``ce_target``, of one batch.

    All maskings but ``stoch_masked`` have the delta path off.
    """
    live = tuple(range(len(target.sites)))
    of_stochastic, of_random = jax.random.split(key)
    nothing = jax.tree.map(jnp.zeros_like, importances)
    rounded = jax.tree.map(lambda x: (x > rounding_threshold).astype(x.dtype), importances)
    on, off = ConstantSources(Constant(1.0)), ConstantSources(Constant(0.0))
    sources: dict[str, tuple[dict[str, Array], SourceKind]] = {
        "unmasked": (nothing, on),
        "ci_masked": (importances, off),
        "rounded_masked": (rounded, off),
        "stoch_masked": (importances, StochasticSources(sampling, of_stochastic, scene.use_delta)),
        "random_masked": (nothing, StochasticSources(replace(sampling, sampling="continuous"), of_random, False)),
        "zero_masked": (nothing, off),
    }
    clean = target.logits(scene.weights, scene.clean.output)
    measured = {"ce_target": next_token_ce(clean, scene.inputs)}
    for masking in MASKINGS:
        masked = run_masked(scene, live, components, *sources[masking])
        logits = target.logits(scene.weights, masked.output)
        measured[f"kl_{masking}"] = jnp.mean(kl_divergence(clean, logits))
        measured[f"ce_{masking}"] = next_token_ce(logits, scene.inputs)
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
