"""Lists what the keys of the original project's files mean here, by the section that they are in.

A key that is in neither table is translated by the module of its section, or passed on to today's schema.
"""

from collections.abc import Mapping
from typing import Any

_TARGETED = "targeted decomposition is not supported; remove it, or decompose on all data"
_COMPILER = "XLA's flags are this project's own"
_MEMORY = "the wrapper's memory decides"

NO_EFFECT: Mapping[str, Mapping[str, str]] = {
    "pd": {"type": "the only kind there is"},
    "runtime": {
        "device": "JAX chooses",
        "sequence_sharding": "the mesh decides where arrays lie",
        "remat_ci_fn": _MEMORY,
        "scan_unroll": _MEMORY,
        "ascend_replicate": _MEMORY,
        "sequence_recon_entries": _MEMORY,
        "use_fused_kl": _MEMORY,
        "fused_kl": _MEMORY,
        "compiler_options": _COMPILER,
        "compilation_cache_dir": "the cache has its own place",
        "launch_env": "pd launch sets the environment",
        "profiling": "pd profile measures",
    },
    "cadence": {"dense_log_phase": "logged every train_log_every steps"},
    "wandb": {"metric_schema": "metrics have this project's keys"},
    "target": {
        "output_extract": "the output is the logits",
        "attention_implementation": _MEMORY,
        "output_edge": _MEMORY,
        "expert_implementation": "for experts; this target has none",
    },
    "optimizer": {"impl": "the sums are the same"},
    "attention": {"implementation": _MEMORY},
    "toy": {"init_bias_to_zero": "only where training begins"},
}
"""For each section and key without effect here: the reason."""

LACKING: Mapping[str, Mapping[str, tuple[str, tuple[Any, ...]]]] = {
    "": {
        "prompts": (_TARGETED, ()),
        "nontarget": (_TARGETED, ()),
    },
    "pd": {"ci_scaled_weight_decay": (_TARGETED, ())},
    "runtime": {
        "gather_fp8": ("weights are not gathered in fp8 here; set it to false", (False,)),
        "autocast_bf16": ("bf16 is the only choice in files of this form", (True,)),
    },
    "ci": {
        "component_conditioning": ("this function is not the component readout (C7) here; set it to null", ()),
    },
    "loss": {
        "source_dtype": ("sources are float32 here; set it to float32", ("float32",)),
    },
    "metric": {
        "source_dtype": ("sources are float32 here; set it to float32", ("float32",)),
        "density_heatmap_n_bins": ("there is no density heat map; set it to null", ()),
    },
    "unit_kinds": {"deltanet_head": ("no target here has such heads; set it to null", ())},
    "toy": {
        "fixed_identity_embedding": ("embeddings are random here; set it to false", (False,)),
    },
    "toy_pretrain": {
        "label_type": ("the label is act_plus_resid here", ("act_plus_resid",)),
        "loss_type": ("the loss is on the output here (readoff)", ("readoff",)),
        "use_trivial_label_coeffs": ("labels have the coefficients 1 here; set it to true", (True,)),
        "importance_val": ("features count equally here; set it to 1.0", (1.0,)),
    },
}
"""For each section and unsupported key: what to do about it, and the values that request nothing (null is always one).
"""

TYPES: Mapping[str, str] = {
    "SmoothL0ImportanceMinimalityLoss": "ImportanceMinimalityLoss",
    "MergedStochasticPGDReconLoss": "MergedStochasticSubsetPPGDReconLoss",
}
"""The current names of losses that had other names."""

LACKING_TYPES: Mapping[str, str] = {
    "CIMaskedAttnPatternsReconLoss": "attention patterns are not compared here",
    "StochasticAttnPatternsReconLoss": "attention patterns are not compared here",
    "ArithmeticCIGrid": "evaluation on a grid of sums is not supported",
    "WellTemperedness": "an evaluation does not ablate single components",
    "RouterDivergence": "routers are not compared here",
    "UnmaskedNoDeltaReconLoss": _TARGETED,
}
"""Losses and metrics that are unsupported, with the reason."""

MATRICES: Mapping[str, Mapping[str, str]] = {
    "glu_transformer": {
        "q": "model.layers.{layer}.self_attn.q_proj",
        "k": "model.layers.{layer}.self_attn.k_proj",
        "v": "model.layers.{layer}.self_attn.v_proj",
        "o": "model.layers.{layer}.self_attn.o_proj",
        "gate": "model.layers.{layer}.mlp.gate_proj",
        "up": "model.layers.{layer}.mlp.up_proj",
        "down": "model.layers.{layer}.mlp.down_proj",
    },
    "simple_mlp": {
        "q_proj": "h.{layer}.attn.q_proj",
        "k_proj": "h.{layer}.attn.k_proj",
        "v_proj": "h.{layer}.attn.v_proj",
        "o_proj": "h.{layer}.attn.o_proj",
        "c_fc": "h.{layer}.mlp.c_fc",
        "down_proj": "h.{layer}.mlp.down_proj",
    },
}
"""For each kind of ``decomposition.sites``: the modules of its matrices."""

PERSISTENT_SCOPES: Mapping[str, str] = {
    "c": "single_source",
    "sc": "broadcast_across_batch",
    "bc": "per_batch",
    "bsc": "per_batch_per_position",
    "single_mask": "single_source",
    "batch_invariant": "repeat_across_batch",
    "unique_per_batch_per_token": "per_batch_per_position",
}
"""Shapes of persistent sources by their earlier names."""
FRESH_SCOPES: Mapping[str, str] = {
    "c": "shared_across_batch",
    "bc": "per_row",
    "bsc": "unique_per_datapoint",
}
"""Shapes of the sources of a fresh attack by their earlier names."""

ASCENTS: Mapping[str, str] = {"momentum_sgd": "momentum"}
OBJECTIVES: Mapping[str, str] = {"e2e": "output"}
