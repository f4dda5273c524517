"""Trains a small SAE or transcoder on a run's own model and text, in SAELens' format, to compare with the run.

    python -m experiments.evidence.train_dictionary runs/p-1a2b3c4d saes/resid_post_2 \\
        --at blocks.2.hook_resid_post --k 32
    python -m experiments.evidence.train_dictionary runs/p-1a2b3c4d saes/transcoder_2 --at blocks.2.mlp.hook_in \\
        --to blocks.2.hook_mlp_out --sparsity 0.01

With `--to` it is a transcoder (ReLU, with an L1 penalty on its latents times the lengths of their decoder vectors),
without it a top-k SAE. Trained with Adam on the mean squared error, on rows of the text that the run was trained on.
Meant for the demos, where it takes a minute or two: dead latents are not revived.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from param_decomp_jax.analysis.attribution import for_attribution
from param_decomp_jax.analysis.dictionaries import Dictionary, Encoder
from param_decomp_jax.analysis.hooks import Hook, activation
from param_decomp_lab import load_run
from param_decomp_lab.data.batches import epoch_order
from param_decomp_lab.opening import Run
from param_decomp_lab.weights.safetensors_files import save_tensors

LR = 3e-3


def hook_of(text: str) -> Hook:
    _, layer, name = text.split(".", 2)
    return Hook(int(layer), name)


def train(
    run: Run, dictionary: Dictionary, n_latents: int, steps: int, rows: int, sparsity: float, seed: int
) -> tuple[dict[str, np.ndarray], float, float]:
    """Returns the tensors, and, over the last 50 batches, the share of the variance that they do not explain, and
    L0."""
    target: Any = for_attribution(run.problem).target
    rng = np.random.default_rng(seed)
    d = target.architecture.d_model
    W_dec = rng.standard_normal((n_latents, d)).astype(np.float32)
    W_dec /= np.linalg.norm(W_dec, axis=-1, keepdims=True)
    tensors = {
        "W_enc": jnp.asarray(W_dec.T.copy()),
        "W_dec": jnp.asarray(W_dec),
        "b_enc": jnp.zeros(n_latents),
        "b_dec": jnp.zeros(d),
    }
    optimizer = optax.adam(optax.cosine_decay_schedule(LR, steps))

    def loss(tensors: Any, x: jax.Array, y: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        f = dictionary.latents(tensors, x)
        off = jnp.mean(jnp.sum((dictionary.output(tensors, x, f) - y) ** 2, axis=-1))
        variance = jnp.mean(jnp.sum((y - jnp.mean(y, axis=(0, 1))) ** 2, axis=-1))
        penalty = jnp.mean(f @ jnp.linalg.norm(tensors["W_dec"], axis=-1))
        l0 = jnp.mean(jnp.sum(f > 0, axis=-1))
        return off / variance + sparsity * penalty / jnp.sqrt(variance), (off / variance, l0)

    @jax.jit
    def step(tensors: Any, state: Any, weights: Any, tokens: jax.Array) -> tuple[Any, Any, tuple[jax.Array, jax.Array]]:
        x = dictionary.read(activation(target, weights, tokens, dictionary.reads))
        y = x if not dictionary.is_transcoder else activation(target, weights, tokens, dictionary.writes)
        gradients, measured = jax.grad(loss, has_aux=True)(tensors, x, y)
        updates, state = optimizer.update(gradients, state)
        return optax.apply_updates(tensors, updates), state, measured

    data, state, last = run.resolved.train_rows, optimizer.init(tensors), []
    order = np.concatenate([epoch_order(seed, epoch, len(data)) for epoch in range(1 + steps * rows // len(data))])
    with jax.set_mesh(run.mesh):
        for n in range(steps):
            tokens = run.as_batch(data.rows(order[n * rows : (n + 1) * rows]))[0]
            tensors, state, measured = step(tensors, state, run.weights, tokens)
            last.append(measured)
            if (n + 1) % 500 == 0:
                print(
                    f"{n + 1} of {steps}: unexplained {float(measured[0]):.4f}, L0 {float(measured[1]):.1f}", flush=True
                )
    unexplained, l0 = np.mean(jax.device_get(last[-50:]), axis=0).tolist()
    return {name: np.ascontiguousarray(x) for name, x in tensors.items()}, unexplained, l0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--at", required=True, help="hook to read")
    parser.add_argument("--to", help="hook to write, for a transcoder")
    parser.add_argument("--k", type=int, default=32, help="latents on at each position, for an SAE")
    parser.add_argument("--sparsity", type=float, default=0.01, help="weight of the penalty, for a transcoder")
    parser.add_argument("--latents", type=int, default=512)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--rows", type=int, default=32, help="rows of text in a batch")
    parser.add_argument("--seed", type=int, default=0)
    a = parser.parse_args()
    run, reads = load_run(a.run), hook_of(a.at)
    encoder: Encoder = "standard" if a.to else "topk"
    dictionary = Dictionary(
        encoder, reads, hook_of(a.to) if a.to else reads, subtracts_b_dec=not a.to, k=None if a.to else a.k
    )
    sparsity = a.sparsity if a.to else 0.0
    tensors, unexplained, l0 = train(run, dictionary, a.latents, a.steps, a.rows, sparsity, a.seed)
    d, C = tensors["W_enc"].shape
    metadata: dict[str, Any] = {
        "sae_lens_version": "6.54.12",
        "sae_lens_training_version": None,
        "model_name": str(run.name),
    }
    metadata |= {"hook_name": a.at, "prepend_bos": False}
    config: dict[str, Any] = {"d_in": d, "d_sae": C, "dtype": "float32", "device": "cpu"}
    config |= {"apply_b_dec_to_input": not a.to, "normalize_activations": "none", "reshape_activations": "none"}
    if a.to:
        config |= {"architecture": "transcoder", "d_out": d, "metadata": {**metadata, "hook_name_out": a.to}}
    else:
        config |= {"architecture": "topk", "k": a.k, "metadata": metadata}
    a.out.mkdir(parents=True)
    save_tensors(tensors, a.out / "sae_weights.safetensors")
    (a.out / "cfg.json").write_text(json.dumps(config))
    print(f"{a.out}: unexplained {unexplained:.4f}, L0 {l0:.1f}")


if __name__ == "__main__":
    main()
