"""The training step and its parts, as `docs/semantics.md` defines them."""

from param_decomp_jax.method.adversary import (
    AdamAscent,
    BroadcastAcrossBatch,
    FreshAttack,
    PerBatchPerPosition,
    PersistentAttack,
    RepeatAcrossBatch,
    SignAscent,
    SingleSource,
)
from param_decomp_jax.method.clean_pass import CleanPass, DecomposedBatch
from param_decomp_jax.method.inspection import (
    loss_and_gradients,
    stack_sites,
    step_draws,
    term_loss_and_gradients,
    unstack_sites,
)
from param_decomp_jax.method.locality import NonlinearityLocality
from param_decomp_jax.method.losses import Faithfulness, Frequency, ImportanceMinimality, Lp, SmoothL0, Term
from param_decomp_jax.method.masks import Constant, Sources, Stochastic
from param_decomp_jax.method.optim import AdamW, Optimizer
from param_decomp_jax.method.recon import AllSites, Beside, Chunks, EachSite, ForwardDraws, Reconstruction, run_masked
from param_decomp_jax.method.routing import Everywhere, StaticProbability, UniformKSubset
from param_decomp_jax.method.state import Decomposition, FaithfulnessWarmup, State, init_state
from param_decomp_jax.method.state_sharding import state_shardings
from param_decomp_jax.method.step import Problem, run_clean_pass, step_outcome, training_step

__all__ = [
    "AdamAscent", "AdamW", "AllSites", "Beside", "BroadcastAcrossBatch", "Chunks", "CleanPass", "Constant",
    "DecomposedBatch", "Decomposition", "EachSite", "Everywhere", "Faithfulness", "FaithfulnessWarmup", "ForwardDraws",
    "Frequency", "FreshAttack", "ImportanceMinimality", "Lp", "NonlinearityLocality", "Optimizer",
    "PerBatchPerPosition", "PersistentAttack", "Problem", "Reconstruction", "RepeatAcrossBatch", "SignAscent",
    "SingleSource", "SmoothL0", "Sources", "State", "StaticProbability", "Stochastic", "Term", "UniformKSubset",
    "init_state", "loss_and_gradients", "run_clean_pass", "run_masked", "stack_sites", "state_shardings", "step_draws",
    "step_outcome", "term_loss_and_gradients", "training_step", "unstack_sites",
]  # fmt: skip
