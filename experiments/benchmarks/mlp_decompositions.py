"""Decompositions of a Llama's MLPs for measurements: chunks of stochastic masks and a persistent adversary.

The losses are those of the published 27-site decomposition of Llama-3.1-8B; sizes can be chosen. `goals_table.py`
compiles them for GPUs that are not present.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from param_decomp_aot.flops import Flops, matmul_flops
from param_decomp_jax.analysis.importances import read_batch
from param_decomp_jax.ci import GlobalTransformer
from param_decomp_jax.decomposition.schedules import Anneal, Schedule
from param_decomp_jax.method.adversary import AdamAscent, BroadcastAcrossBatch, PersistentAttack
from param_decomp_jax.method.losses import Faithfulness, ImportanceMinimality, Lp
from param_decomp_jax.method.masks import Stochastic
from param_decomp_jax.method.optim import AdamW
from param_decomp_jax.method.recon import AllSites, Chunks, Reconstruction
from param_decomp_jax.method.routing import Everywhere, UniformKSubset
from param_decomp_jax.method.state import Decomposition, init_state
from param_decomp_jax.method.state_sharding import state_shardings
from param_decomp_jax.method.step import Problem, training_step
from param_decomp_jax.nn.rotary import Llama3Scaling
from param_decomp_jax.sharding.memory import BALANCED, LEAN, PLAIN, PUBLISHED, MemoryPolicy
from param_decomp_jax.sharding.mesh import whole
from param_decomp_jax.sharding.placement import batch_sharding, shardings, with_shardings
from param_decomp_jax.targets.base import choose_sites
from param_decomp_jax.targets.llama import LlamaConfig, module_name
from param_decomp_jax.targets.transformer import Transformer
from param_decomp_lab.metrics.ce_kl import ce_and_kl

LLAMA_8B = LlamaConfig(
    128256, 4096, 32, 32, 8, 128, 14336, rope_theta=500000.0, rope_scaling=Llama3Scaling(8.0, 1.0, 4.0, 8192)
)
LARGE_CI = GlobalTransformer(d_model=4096, n_blocks=4, mlp_hidden=(16384,), n_heads=64)
SMALL, SMALL_CI = LlamaConfig(4096, 512, 8, 8, 2, 64, 1024), GlobalTransformer(512, 2, (2048,), 8)

POLICIES: Mapping[str, MemoryPolicy] = {"plain": PLAIN, "balanced": BALANCED, "lean": LEAN, "published": PUBLISHED}


@dataclass(frozen=True)
class MLPs:
    """A decomposition whose sites are the three MLP matrices of ``layers``, with ``C`` components each. ``batch``: the
    number of rows of the global batch."""

    batch: int
    layers: range
    sites_per_chunk: int = 9
    C: int = 49152
    seq: int = 2048
    model: LlamaConfig = LLAMA_8B
    ci: GlobalTransformer = LARGE_CI
    compute_dtype: Literal["float32", "bfloat16", "float64"] = "bfloat16"


def problem_of(of: MLPs, policy: MemoryPolicy) -> Problem:
    """Returns the decomposition for which the goals are set: chunks of stochastic masks and a persistent adversary, in
    bf16."""
    chosen = {
        module_name(layer, kind): of.C for layer in of.layers for kind in ("gate_proj", "up_proj", "down_proj")
    }  # fmt: skip
    attack = PersistentAttack(AdamAscent(Schedule(0.01), 0.5, 0.99), BroadcastAcrossBatch(), n_warmup_steps=2)
    terms = (
        Faithfulness("FaithfulnessLoss", 1e5, "split"),
        ImportanceMinimality("ImportanceMinimalityLoss", 5e-6, Lp(Anneal(2.0, 2.0), 1e-12), beta=0.2),
        Reconstruction(
            "ChunkwiseSubsetReconLoss", 1.5, Chunks(of.sites_per_chunk), UniformKSubset(), Stochastic()
        ),
        Reconstruction("PersistentPGDReconLoss", 0.5, AllSites(), Everywhere(), attack),
    )  # fmt: skip
    decomposition = Decomposition(
        seed=0,
        steps=100_000,
        batch_size=of.batch,
        squashing="leaky_hard",
        use_delta=True,
        ci=of.ci,
        terms=terms,
        components_optimizer=AdamW(Schedule(1e-4), clip_norm=0.01),
        ci_optimizer=AdamW(Schedule(5e-5)),
        compute_dtype=of.compute_dtype,
        memory=policy,
    )
    return Problem(
        decomposition, Transformer(of.model, choose_sites(of.model.matrices(), chosen), policy, jnp.bfloat16)
    )


def weights_of(model: LlamaConfig) -> Any:
    """Returns the shapes of the frozen weights, in bf16."""
    return jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16),
        model.weight_shapes(),
        is_leaf=lambda x: isinstance(x, tuple),
    )


def step_of(problem: Problem, of: MLPs, mesh: Mesh) -> tuple[Any, tuple[Any, ...]]:
    """Returns the jitted step and its abstract arguments, placed on the mesh as a run places them."""
    spec, sites = problem.decomposition, problem.target.sites
    state = jax.eval_shape(lambda: init_state(spec, sites, (of.batch, of.seq)))
    places = state_shardings(mesh, spec, state)
    state = with_shardings(state, places)
    weights = weights_of(of.model)
    weights = with_shardings(weights, shardings(mesh, problem.target.weight_axes(weights), weights))
    tokens = jax.ShapeDtypeStruct((of.batch, of.seq), jnp.int32)
    tokens = with_shardings(tokens, batch_sharding(mesh, tokens.shape))
    step = jax.jit(
        partial(training_step, problem),
        donate_argnums=(0,) if spec.memory.donate else (),
        out_shardings=(places, whole(mesh)),
        compiler_options=spec.memory.compiler_options,
    )
    return step, (state, weights, tokens)


def init_of(problem: Problem, of: MLPs, mesh: Mesh) -> tuple[Any, tuple[Any, ...]]:
    """Returns the jitted function that makes the state, and its arguments."""
    spec, sites = problem.decomposition, problem.target.sites
    init = partial(init_state, spec, sites, (of.batch, of.seq))
    return jax.jit(init, out_shardings=state_shardings(mesh, spec, jax.eval_shape(init))), ()


def eval_of(problem: Problem, of: MLPs, mesh: Mesh) -> tuple[Any, tuple[Any, ...]]:
    """Returns the jitted evaluation of a language model and its arguments: six maskings, their KL and cross-entropy.
    Nothing is donated."""

    def evaluate(state: Any, weights: Any, tokens: Any) -> Any:
        batch = read_batch(problem, state.learned, weights, tokens)
        target, key = problem.target, jax.random.key(0)
        assert isinstance(target, Transformer)
        return ce_and_kl(target, batch, key, Stochastic(), 0.0)

    _, arguments = step_of(problem, of, mesh)
    return jax.jit(evaluate, out_shardings=whole(mesh)), arguments


def flops_of(of: MLPs, policy: MemoryPolicy) -> Flops:
    """Returns the FLOPs of the whole step. It is traced without a mesh, which gives the same arithmetic outside of
    `shard_map`."""
    problem = problem_of(of, policy)
    shapes = jax.eval_shape(lambda: init_state(problem.decomposition, problem.target.sites, (of.batch, of.seq)))
    weights = weights_of(of.model)
    tokens = jax.ShapeDtypeStruct((of.batch, of.seq), jnp.int32)
    return matmul_flops(jax.make_jaxpr(partial(training_step, problem))(shapes, weights, tokens))
