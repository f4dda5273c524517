"""Every family of decoders against logits that others computed: `transformers`, or a definition in torch written by
somebody who had not read this code (tests/golden/families/README.md). Each fixture switches on all that is special."""

import dataclasses
import json
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from param_decomp_jax.masks import Sources
from param_decomp_jax.memory import PLAIN, MemoryPolicy
from param_decomp_jax.mesh import MeshShape, make_mesh
from param_decomp_jax.sites import Matrix, Sites
from param_decomp_jax.targets.architecture import UnsupportedConfig
from param_decomp_jax.targets.base import choose_sites
from param_decomp_jax.targets.plain_linears import UNTOUCHED
from param_decomp_jax.targets.registry import ARCHITECTURES, read_config
from param_decomp_jax.targets.transformer import Transformer
from param_decomp_lab.opening.forward import masked
from param_decomp_lab.run_folder.target_file import describe
from param_decomp_lab.weights.target_folder import load_target, read_architecture, save_target, weight_shardings
from tests.core import tiny

FAMILIES = Path(__file__).parent.parent / "golden" / "families"
NAMES = sorted(folder.name for folder in FAMILIES.iterdir() if (folder / "model.safetensors").is_file())
WITH_SLICES = [name for name in NAMES if name.startswith("gpt")]
FAST_ELSEWHERE = ("gemma2", "gpt_neox", "qwen3_moe")
"""With windows in some layers, a fused matrix head by head, runs of unlike layers."""


def golden(name: str) -> Any:
    return np.load(FAMILIES / name / "expected.npz")


def logits(target: Transformer, weights: Any, tokens: Any) -> jax.Array:
    return target.logits(weights, target.forward(weights, tokens, UNTOUCHED).output)


def close(ours: Any, theirs: np.ndarray, tolerance: float = 1e-4) -> None:
    np.testing.assert_allclose(np.asarray(ours, np.float32), theirs, rtol=0, atol=tolerance * np.abs(theirs).max())


def exact_factors(target: Transformer, weights: Any) -> Any:
    """Components that are the matrices: V = W, U = identity."""
    shapes = jax.eval_shape(lambda: tiny.init_components(jax.random.key(0), target.sites))
    found = target.site_weights(weights)
    return {
        name: dataclasses.replace(factors, V=found[name], U=jnp.broadcast_to(jnp.eye(factors.U.shape[-1]), factors.U.shape))
        for name, factors in shapes.items()
    }


def every_site(matrices: tuple[Matrix, ...], slices: bool) -> Sites:
    """All matrices that can be sites together: fused ones, or their slices."""
    fused = {m.part_of for m in matrices if m.part_of is not None}
    left_out = fused if slices else {m.name for m in matrices if m.part_of is not None}
    return choose_sites(matrices, {m.name: m.d_out for m in matrices if m.name not in left_out})


def with_every_matrix_replaced(name: str, slices: bool) -> tuple[jax.Array, jax.Array]:
    """Logits of the network, and with every matrix replaced by components that are exactly it (F1)."""
    architecture, weights = load_target(FAMILIES / name)
    target = architecture.target(every_site(architecture.matrices(), slices), PLAIN, jnp.float32)
    problem = tiny.problem((), target)
    ones = {s.name: Sources(jnp.ones((s.n_layers, 1, 1, s.C)), None) for s in target.sites.stacks}
    live = tuple(range(len(target.sites)))

    @jax.jit
    def both(weights: Any, tokens: Any, ci: Any) -> tuple[jax.Array, jax.Array]:
        own = exact_factors(target, weights)
        return logits(target, weights, tokens), masked(problem, own, ci, weights, tokens, ones, live, pinned=False)

    tokens = jnp.asarray(golden(name)["tokens"])
    ci = tiny.ruffled_state(problem, leading=tokens.shape).ci
    with jax.default_matmul_precision("highest"):
        return both(weights, tokens, ci)


@pytest.mark.parametrize("name", NAMES)
def test_logits_and_every_matrix_as_a_site(name: str) -> None:
    clean, replaced = with_every_matrix_replaced(name, slices=False)
    close(clean, golden(name)["logits"])
    close(replaced, golden(name)["logits"])
