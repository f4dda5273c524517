"""Converts a configuration to the types of the core (`param_decomp_jax`); rule ids refer to docs/semantics.md."""

from typing import Literal, assert_never

from param_decomp_jax import adversary, ci, losses, masks, optim, recon, routing, schedules, state
from param_decomp_jax.memory import MemoryPolicy
from param_decomp_lab.config import loss_schema as schema
from param_decomp_lab.config.checks import term_names
from param_decomp_lab.config.memory import OptimizerName
from param_decomp_lab.config.method_schema import (
    AnyCI,
    ChunkwiseCI,
    GlobalCI,
    LayerwiseCI,
    OptimizerConfig,
    PDConfig,
    TransformerCIConfig,
)
from param_decomp_lab.config.metric_schema import CIHiddenActsReconLoss
from param_decomp_lab.config.resolve import RunConfig
from param_decomp_lab.config.site_patterns import PREFIXES

Sources = masks.Stochastic | masks.Constant | adversary.FreshAttack | adversary.PersistentAttack


def decomposition(config: RunConfig) -> state.Decomposition:
    """The core's description of a run, without its sites and target."""
    pd = config.method.pd
    terms = zip(pd.loss_metrics, term_names(pd.loss_metrics), strict=True)
    return state.Decomposition(
        seed=pd.seed,
        steps=pd.steps,
        batch_size=pd.batch_size,
        squashing=pd.sigmoid_type,
        use_delta=pd.use_delta_component,
        ci=_ci(pd.ci_config),
        terms=tuple(term(loss, name, pd) for loss, name in terms),
        components_optimizer=_optimizer(pd.components_optimizer, config.wrapper.memory.optimizers.components),
        ci_optimizer=_optimizer(pd.ci_fn_optimizer, config.wrapper.memory.optimizers.ci_fn),
        warmup=state.FaithfulnessWarmup(
            # Components that come from another run have been warmed up there.
            steps=pd.faithfulness_warmup_steps if config.wrapper.init_from is None else 0,
            lr=pd.faithfulness_warmup_lr,
            weight_decay=pd.faithfulness_warmup_weight_decay,
        ),
        compute_dtype="bfloat16" if config.method.runtime.autocast_bf16 else "float32",
        memory=_memory(config),
    )


def _memory(config: RunConfig) -> MemoryPolicy:
    memory = config.wrapper.memory
    assert memory.preset is not None, "a resolved configuration has a preset"
    return memory.policy(memory.preset)


def term(loss: schema.AnyLoss | CIHiddenActsReconLoss, name: str, pd: PDConfig) -> losses.Term:
    """The term of a LOSS (the table of section 5, L1, L2). A metric has no coefficient: its term has 1."""
    coeff = 1.0 if isinstance(loss, CIHiddenActsReconLoss) or loss.coeff is None else loss.coeff
    stochastic = masks.Stochastic(pd.sampling)
    everywhere, draws = routing.Everywhere(), pd.n_mask_samples

    def all_sites(
        sources: Sources,
        routes: routing.Routing = everywhere,
        n_samples: int = 1,
        error: Literal["output", "hidden_acts"] = "output",
    ) -> recon.Reconstruction:
        return recon.Reconstruction(name, coeff, recon.AllSites(), routes, sources, n_samples, error)

    def each_site(sources: Sources, n_samples: int = 1) -> recon.Reconstruction:
        return recon.Reconstruction(name, coeff, recon.EachSite(), everywhere, sources, n_samples)

    match loss:
        case schema.FaithfulnessLoss():
            return losses.Faithfulness(name, coeff)
        case schema.ImportanceMinimalityLoss():
            return _importance_minimality(loss, name, coeff)
        case schema.UnmaskedReconLoss():
            return all_sites(masks.Constant(1.0))
        case schema.CIMaskedReconLoss():
            return all_sites(masks.Constant(0.0))
        case schema.CIMaskedReconSubsetLoss():
            return all_sites(masks.Constant(0.0), _routing(loss.routing))
        case schema.CIMaskedReconLayerwiseLoss():
            return each_site(masks.Constant(0.0))
        case CIHiddenActsReconLoss():
            return all_sites(masks.Constant(0.0), error="hidden_acts")
        case schema.StochasticReconLoss():
            return all_sites(stochastic, n_samples=draws)
        case schema.StochasticReconSubsetLoss():
            return all_sites(stochastic, _routing(loss.routing), draws)
        case schema.StochasticReconLayerwiseLoss():
            return each_site(stochastic, draws)
        case schema.StochasticHiddenActsReconLoss():
            return all_sites(stochastic, n_samples=draws, error="hidden_acts")
        case schema.ChunkwiseSubsetReconLoss():
            chunks = recon.Chunks(loss.sites_per_chunk)
            return recon.Reconstruction(name, coeff, chunks, _routing(loss.routing), stochastic, loss.n_samples)
        case schema.PGDReconLoss():
            return all_sites(_fresh(loss))
        case schema.PGDReconSubsetLoss():
            return all_sites(_fresh(loss), _routing(loss.routing))
        case schema.PGDReconLayerwiseLoss():
            return each_site(_fresh(loss))
        case schema.PersistentPGDReconLoss():
            return all_sites(_persistent(loss))  # R5: routed everywhere, so computed once whatever n_samples is
        case schema.PersistentPGDReconSubsetLoss():
            return all_sites(_persistent(loss), _routing(loss.routing), loss.n_samples)
        case _:
            assert_never(loss)


def _importance_minimality(
    loss: schema.ImportanceMinimalityLoss, name: str, coeff: float
) -> losses.ImportanceMinimality:
    frequency = None
    if loss.frequency is not None:
        frequency = losses.Frequency(loss.frequency.coeff, loss.frequency.reference_token_count)
    if loss.gamma is not None:
        penalty: losses.Lp | losses.SmoothL0 = losses.SmoothL0(_schedule(loss.gamma))
    else:
        final = loss.pnorm if loss.p_anneal_final_p is None else loss.p_anneal_final_p
        anneal = schedules.Anneal(loss.pnorm, final, loss.p_anneal_start_frac, loss.p_anneal_end_frac)
        penalty = losses.Lp(anneal, loss.eps)
    return losses.ImportanceMinimality(name, coeff, penalty, loss.beta, frequency)


def _routing(config: schema.Routing) -> routing.UniformKSubset | routing.StaticProbability:
    match config:
        case schema.UniformKSubsetRouting():
            return routing.UniformKSubset()
        case schema.StaticProbabilityRouting(p=p):
            return routing.StaticProbability(p)
        case _:
            assert_never(config)


def _fresh(loss: schema.FreshPGD) -> adversary.FreshAttack:
    return adversary.FreshAttack(loss.init, loss.step_size, loss.n_steps, loss.mask_scope)


def _persistent(loss: schema.PersistentPGD) -> adversary.PersistentAttack:
    return adversary.PersistentAttack(
        optimizer=_ascent(loss.optimizer),
        scope=_scope(loss.scope),
        sigmoid=loss.use_sigmoid_parameterization,
        n_warmup_steps=loss.n_warmup_steps,
        start_frac=loss.start_frac,
    )


def _ascent(config: schema.AdamConfig | schema.SignConfig) -> adversary.AdamAscent | adversary.SignAscent:
    schedule = _schedule(config.lr_schedule)
    match config:
        case schema.AdamConfig():
            return adversary.AdamAscent(schedule, config.beta1, config.beta2, config.eps)
        case schema.SignConfig():
            return adversary.SignAscent(schedule)
        case _:
            assert_never(config)


def _scope(config: schema.Scope) -> adversary.Scope:
    match config:
        case schema.SingleSourceScope():
            return adversary.SingleSource()
        case schema.BroadcastAcrossBatchScope():
            return adversary.BroadcastAcrossBatch()
        case schema.RepeatAcrossBatchScope(n_sources=n):
            return adversary.RepeatAcrossBatch(n)
        case schema.PerBatchPerPositionScope():
            return adversary.PerBatchPerPosition()
        case _:
            assert_never(config)


def _schedule(config: schema.ScheduleConfig) -> schedules.Schedule:
    return schedules.Schedule(config.start_val, config.fn_type, config.warmup_pct, config.final_val_frac)


def _optimizer(config: OptimizerConfig, name: OptimizerName) -> optim.Optimizer:
    settings = (_schedule(config.lr_schedule), config.betas, config.weight_decay, config.grad_clip_norm)
    match name:
        case "adamw":
            return optim.AdamW(*settings)
        case "lion":
            return optim.Lion(*settings)
        case "adafactor":
            return optim.Adafactor(*settings)


def _transformer(config: TransformerCIConfig) -> ci.GlobalTransformer:
    attention = config.attn_config
    return ci.GlobalTransformer(
        d_model=config.d_model,
        n_blocks=config.n_blocks,
        mlp_hidden=config.mlp_hidden,
        n_heads=attention.n_heads,
        max_len=attention.max_len,
        rope_base=attention.rope_base,
    )


def _ci(config: AnyCI) -> ci.CIConfig:
    function = ci_function(config)
    return ci.ComponentReadout(function) if config.component_readout else function


def ci_function(config: AnyCI) -> ci.FunctionConfig:
    """The CI function of a `ci_config`, without its readout."""
    match config:
        case LayerwiseCI():
            return ci.LayerwiseMLP(config.fn_type, config.hidden_dims)
        case GlobalCI(fn_type="global_shared_mlp", hidden_dims=hidden):
            assert hidden is not None
            return ci.GlobalMLP(hidden)
        case GlobalCI(fn_type="global_shared_transformer", simple_transformer_ci_cfg=transformer):
            assert transformer is not None
            return _transformer(transformer)
        case ChunkwiseCI(input_patterns=patterns):
            return ci.ChunkwiseTransformer(
                _transformer(config.simple_transformer_ci_cfg),
                config.layers_per_chunk,
                None if patterns is None else ci.InputPatterns(patterns, PREFIXES),
            )
        case _:
            raise AssertionError(f"not a CI function: {config}")
