"""Converts a configuration to the types of the core (`param_decomp_jax`); rule ids refer to docs/semantics.md."""

from collections.abc import Sequence

from param_decomp_jax import ci
from param_decomp_jax.method import losses, optim, recon, state
from param_decomp_jax.method.muon import Muon
from param_decomp_jax.nn.split_product import DeltaProduct
from param_decomp_jax.sharding.memory import MemoryPolicy
from param_decomp_lab.config.checks import term_names
from param_decomp_lab.config.loss_schema import Loss, PersistentAdversary, ReconLoss
from param_decomp_lab.config.memory import OptimizerName
from param_decomp_lab.config.method_schema import (
    AdamWConfig,
    AnyCI,
    ChunkwiseCI,
    GlobalCI,
    InputTap,
    LayerwiseCI,
    MuonConfig,
    ResidualBoundaries,
    RuntimeConfig,
    TransformerCIConfig,
)
from param_decomp_lab.config.resolve import RunConfig
from param_decomp_lab.config.term_maker import TermMaker, core_schedule, core_value
from param_decomp_lab.metrics import Metric
from param_decomp_lab.schema.site_names import PREFIXES
from param_decomp_lab.schema.strict import all_read


def decomposition(config: RunConfig) -> state.Decomposition:
    """Returns the core's description of a run, without its sites and target."""
    pd = config.method.pd
    terms = zip(pd.loss_metrics, term_names(pd.loss_metrics), strict=True)
    return state.Decomposition(
        seed=pd.seed,
        steps=pd.steps,
        batch_size=pd.batch_size,
        squashing=pd.sigmoid_type,
        use_delta=pd.use_delta_component,
        ci=_ci(pd.ci_config),
        terms=tuple(term(loss, name, config) for loss, name in terms),
        components_optimizer=_optimizer(
            pd.components_optimizer, config.wrapper.memory.optimizers.components, config.method.runtime
        ),
        ci_optimizer=_optimizer(pd.ci_fn_optimizer, config.wrapper.memory.optimizers.ci_fn, config.method.runtime),
        warmup=state.FaithfulnessWarmup(
            # Components from another run were already warmed up there.
            steps=pd.faithfulness_warmup_steps if config.wrapper.init_from is None else 0,
            lr=pd.faithfulness_warmup_lr,
            weight_decay=pd.faithfulness_warmup_weight_decay,
            product=delta_product(config),
        ),
        compute_dtype="bfloat16" if config.method.runtime.autocast_bf16 else "float32",
        memory=_memory(config),
    )


def _memory(config: RunConfig) -> MemoryPolicy:
    memory = config.wrapper.memory
    assert memory.preset is not None, "a resolved configuration has a preset"
    return memory.policy(memory.preset)


def delta_product(config: RunConfig) -> DeltaProduct:
    """Returns how V U is computed in Δ (N4)."""
    usual: DeltaProduct = "split" if config.method.runtime.autocast_bf16 else "fp32"
    return config.wrapper.numerics.delta or usual


def measured_terms(metrics: Sequence[Loss | Metric], config: RunConfig) -> list[losses.Term | None]:
    """Returns the terms of an evaluation's metrics, under the names by which they are logged; None for a metric without
    a term.
    """
    names = iter(term_names(tuple(metric for metric in metrics if isinstance(metric, Loss))))
    return [term(m, next(names), config) if isinstance(m, Loss) else m.term() for m in metrics]


def term(loss: Loss, name: str, config: RunConfig) -> losses.Term:
    """Returns the term of a LOSS (the table of section 5, L1, L2). A metric has no coefficient, so its term has
    coefficient 1.
    """
    pd, coeff = config.method.pd, 1.0 if loss.coeff is None else core_value(loss.coeff)
    delta = delta_product(config)
    return loss.term(TermMaker(name, coeff, pd.steps, pd.n_mask_samples, pd.sampling, delta, _beside(loss)))


def _beside(loss: Loss) -> recon.Beside | None:
    """Returns what R6 compares beside the output."""
    own = loss.hidden_acts_reconstruction if isinstance(loss, ReconLoss) else None
    if own is None:
        return None
    objective = loss.adversary_objective if isinstance(loss, PersistentAdversary) else "output"
    return recon.Beside(core_value(own.coeff), own.points, objective)


def _optimizer(config: AdamWConfig | MuonConfig, name: OptimizerName, runtime: RuntimeConfig) -> optim.Optimizer:
    schedule = core_schedule(config.lr_schedule)
    if isinstance(config, MuonConfig):
        return Muon(
            schedule,
            beta=config.beta,
            consistent_rms=config.consistent_rms,
            weight_decay=config.weight_decay,
            clip_norm=config.grad_clip_norm,
            n_iterations=config.ns_steps,
            dtype=config.ns_dtype or ("bfloat16" if runtime.autocast_bf16 else "float32"),
        )
    settings = (schedule, config.betas, config.weight_decay, config.grad_clip_norm)
    match name:
        case "adamw":
            return optim.AdamW(*settings)
        case "lion":
            return optim.Lion(*settings)
        case "adafactor":
            return optim.Adafactor(*settings)


def _taps(config: InputTap | None) -> ci.Taps | None:
    match config:
        case None:
            return None
        case ResidualBoundaries(residual_boundaries=offsets):
            return ci.Taps(all_read(offsets))
        case _:
            return ci.Taps(config)


def _transformer(config: TransformerCIConfig, taps: ci.Taps | None = None) -> ci.GlobalTransformer:
    attention = config.attn_config
    return ci.GlobalTransformer(
        d_model=config.d_model,
        n_blocks=config.n_blocks,
        mlp_hidden=config.mlp_hidden,
        n_heads=attention.n_heads,
        max_len=attention.max_len,
        rope_base=attention.rope_base,
        causal=attention.causal,
        n_kv_heads=attention.n_kv_heads,
        mlp_type=config.mlp_type,
        learned_norm_scale=config.learned_norm_scale,
        taps=taps,
    )


def _ci(config: AnyCI) -> ci.CIConfig:
    function = ci_function(config)
    return ci.ComponentReadout(function) if config.component_readout else function


def ci_function(config: AnyCI) -> ci.FunctionConfig:
    """Returns the CI function of a `ci_config`, without its readout, for a target that is not known yet (`ci.Taps`)."""
    match config:
        case LayerwiseCI():
            return ci.LayerwiseMLP(config.fn_type, config.hidden_dims)
        case GlobalCI(fn_type="global_shared_mlp", hidden_dims=hidden):
            assert hidden is not None
            return ci.GlobalMLP(hidden, _taps(config.input_tap))
        case GlobalCI(fn_type="global_shared_transformer", simple_transformer_ci_cfg=transformer):
            assert transformer is not None
            return _transformer(transformer, _taps(config.input_tap))
        case ChunkwiseCI(input_patterns=patterns):
            return ci.ChunkwiseTransformer(
                _transformer(config.simple_transformer_ci_cfg),
                config.layers_per_chunk,
                None if patterns is None else ci.InputPatterns(patterns, PREFIXES),
                _taps(config.input_tap),
            )
        case _:
            raise AssertionError(f"not a CI function: {config}")
