"""A run that takes seconds: a random Llama, a little text, every kind of state; and `pd` in processes of its own."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import yaml

from param_decomp_jax.targets.llama import LlamaConfig, init_weights
from param_decomp_lab.data.tokenize import tokenize_files
from param_decomp_lab.weights.hf_llama import save_llama

ARCHITECTURE = LlamaConfig(
    vocab_size=256, d_model=16, n_layers=2, n_heads=2, n_kv_heads=1, head_dim=8, d_mlp=24, tied=True
)
SEQ_LEN, BATCH, STEPS = 16, 8, 12
SITES = {"layers.0.mlp.up_proj": 20, "layers.0.mlp.down_proj": 12, "layers.1.mlp.up_proj": 20, "layers.1.mlp.down_proj": 12}
Tree = dict[str, Any]

LOSSES: list[Tree] = [
    {"type": "FaithfulnessLoss", "coeff": 100.0},
    {"type": "ImportanceMinimalityLoss", "coeff": 1e-3, "pnorm": 2.0, "beta": 0.2, "eps": 1e-6,
     "p_anneal_start_frac": 0.0, "p_anneal_final_p": 0.5},
    {"type": "ChunkwiseSubsetReconLoss", "coeff": 1.0, "sites_per_chunk": 2, "routing": {"type": "uniform_k_subset"}},
    {"type": "PersistentPGDReconLoss", "coeff": 0.5, "n_warmup_steps": 1, "scope": {"type": "broadcast_across_batch"},
     "optimizer": {"type": "adam", "beta1": 0.5, "beta2": 0.99, "lr_schedule": {"start_val": 0.02, "warmup_pct": 0.2}}},
    {"type": "PersistentPGDReconSubsetLoss", "coeff": 0.5, "start_frac": 0.3, "use_sigmoid_parameterization": True,
     "scope": {"type": "per_batch_per_position"}, "routing": {"type": "static_probability", "p": 0.5},
     "optimizer": {"type": "adam", "lr_schedule": {"start_val": 0.1}}},
]  # fmt: skip
METRICS: list[Tree] = [
    {"type": "CEandKLLosses", "rounding_threshold": 0.0},
    {"type": "CI_L0", "groups": {"first": ["layers.0.*"], "everything": ["*"]}},
    {"type": "CI_L0", "groups": None, "ci_alive_threshold": 0.5},
    {"type": "PGDReconLoss", "init": "random", "step_size": 0.1, "n_steps": 3, "mask_scope": "shared_across_batch"},
    {"type": "CIHiddenActsReconLoss"},
    {"type": "CIHistograms", "n_batches_accum": 1},
    {"type": "CIMeanPerComponent"},
    {"type": "ComponentActivationDensity", "ci_alive_threshold": 0.1},
]


def torch_file() -> Tree:
    """The schema file, without the places of target and data, which the wrapper gives."""
    cosine = {"fn_type": "cosine", "final_val_frac": 0.1, "warmup_pct": 0.2}
    return {
        "pd": {
            "n_mask_samples": 1,
            "ci_config": {
                "mode": "global",
                "fn_type": "global_shared_transformer",
                "simple_transformer_ci_cfg": {
                    "d_model": 16, "n_blocks": 1, "mlp_hidden_dim": [16], "attn_config": {"n_heads": 2, "max_len": SEQ_LEN}
                },
            },
            "decomposition_targets": [
                {"module_pattern": "model.layers.*.mlp.up_proj", "C": 20},
                {"module_pattern": "layers.*.mlp.down_proj", "C": 12},
            ],
            "components_optimizer": {"lr_schedule": {"start_val": 0.01, **cosine}, "grad_clip_norm": 0.1},
            "ci_fn_optimizer": {"lr_schedule": {"start_val": 0.01}, "weight_decay": 0.01},
            "steps": STEPS,
            "batch_size": BATCH,
            "faithfulness_warmup_steps": 60,
            "faithfulness_warmup_lr": 0.01,
            "loss_metrics": LOSSES,
        },
        "runtime": {"autocast_bf16": False},
        "cadence": {"train_log_every": 1, "save_every": 4, "keep_last_n_checkpoints": 2},
        "eval": {"batch_size": BATCH, "n_steps": 2, "every": 6, "slow_every": 12, "metrics": METRICS},
        "target": {"spec": {"kind": "hf", "model_class": "transformers.LlamaForCausalLM", "model_name": "tiny"}},
        "data": {"dataset_name": "parquet", "tokenizer_name": "bytes", "column_name": "input_ids", "is_tokenized": True,
                 "max_seq_len": SEQ_LEN},
    }  # fmt: skip


@dataclass(frozen=True)
class Tiny:
    """What all tiny runs share: ``folder`` with `target/`, `data/`, and the two files of the configuration."""

    folder: Path
    compiled: Path

    @classmethod
    def make(cls, folder: Path, compiled: Path) -> "Tiny":
        save_llama(folder / "target", ARCHITECTURE, jax.jit(init_weights, static_argnums=1)(jax.random.key(0), ARCHITECTURE))
        (folder / "text").mkdir()
        for n in range(20):
            text = "".join(f"{n} times {m} makes {n * m}.\n" for m in range(50))
            (folder / "text" / f"{n}.txt").write_text(text)
        tokenize_files([folder / "text"], folder / "data", seq_len=SEQ_LEN, eval_fraction=0.2)
        tiny = cls(folder, compiled)
        tiny.write()
        return tiny

    @property
    def config(self) -> Path:
        return self.folder / "wrapper.yaml"

    def write(self) -> None:
        wrapper = {"torch_config": "torch.yaml", "run_name": "tiny", "target": {"folder": "target"}}
        wrapper["data"] = {"train": "data/train", "eval": "data/eval"}
        self.config.write_text(yaml.safe_dump(wrapper))
        (self.folder / "torch.yaml").write_text(yaml.safe_dump(torch_file()))

    def environment(self, devices: int = 1) -> dict[str, str]:
        """Of a `pd` process: programs are compiled once for all of them."""
        return {
            **os.environ,
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
            "JAX_PLATFORMS": "cpu",
            "JAX_COMPILATION_CACHE_DIR": str(self.compiled),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "0",
            "WANDB_MODE": "disabled",
            "COLUMNS": "200",
        }
