"""The recipe of a pretrained model: everything that decides its weights, as a YAML file says it."""

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from param_decomp_jax.schedules import Schedule
from param_decomp_jax.targets.llama import LlamaConfig, RopeScaling
from param_decomp_lab.config.strict import (
    Count,
    Fraction,
    Natural,
    NonNegative,
    Place,
    Positive,
    Strict,
    broken,
    validate,
)
from param_decomp_lab.config.yaml_io import read_mapping


class RopeScalingRecipe(Strict):
    """The frequency scaling of Llama 3.1."""

    factor: Positive
    low_freq_factor: Positive
    high_freq_factor: Positive
    original_max_position_embeddings: Count


class LlamaRecipe(Strict):
    """The architecture; the vocabulary comes from the data. ``head_dim``: null for d_model / n_heads. ``init_std``:
    standard deviation of the initial matrices; the usual 0.02 is for wide models, a narrow one learns faster from a
    larger one (at d_model 64, 400 steps: held-out cross-entropy 1.97 from 0.02, 1.65 from 0.08)."""

    architecture: Literal["llama"]
    d_model: Count
    n_layers: Count
    n_heads: Count
    n_kv_heads: Count
    head_dim: Count | None = None
    d_mlp: Count
    rms_norm_eps: Positive = 1e-5
    rope_theta: Positive = 10000.0
    rope_scaling: RopeScalingRecipe | None = None
    tied: bool = False
    init_std: Positive = 0.02

    @model_validator(mode="after")
    def _heads(self) -> Self:
        if self.n_heads % self.n_kv_heads:
            raise broken(("n_kv_heads", f"must divide n_heads ({self.n_heads}), not {self.n_kv_heads}"))
        if self.head_dim is None and self.d_model % self.n_heads:
            raise broken(("n_heads", f"must divide d_model ({self.d_model}), not {self.n_heads}; or give a head_dim"))
        if (self.head_dim or self.d_model // self.n_heads) % 2:
            raise broken(("head_dim", "must be even, for the rotary embedding"))
        return self

    def config(self, vocab_size: int) -> LlamaConfig:
        scaling = RopeScaling(**self.rope_scaling.model_dump()) if self.rope_scaling else None
        return LlamaConfig(
            vocab_size=vocab_size,
            d_model=self.d_model,
            n_layers=self.n_layers,
            n_heads=self.n_heads,
            n_kv_heads=self.n_kv_heads,
            head_dim=self.head_dim or self.d_model // self.n_heads,
            d_mlp=self.d_mlp,
            rms_norm_eps=self.rms_norm_eps,
            rope_theta=self.rope_theta,
            rope_scaling=scaling,
            tied=self.tied,
        )


class OptimizerRecipe(Strict):
    """AdamW. ``weight_decay`` acts on matrices, not on norms. ``warmup_pct``: share of the steps spent rising to
    ``lr``. ``final_val_frac``: last learning rate over ``lr``. ``clip_norm``: on the global gradient norm, or null."""

    lr: Positive
    schedule: Literal["constant", "linear", "cosine"] = "cosine"
    warmup_pct: Fraction = 0.05
    final_val_frac: Fraction = 0.1
    weight_decay: NonNegative = 0.1
    betas: tuple[Fraction, Fraction] = Field(default=(0.9, 0.95), strict=False)
    clip_norm: Positive | None = 1.0

    @model_validator(mode="after")
    def _constant(self) -> Self:
        if self.schedule == "constant" and self.final_val_frac != 1.0:
            raise broken(("final_val_frac", "must be 1.0 with a constant schedule"))
        return self

    def learning_rate(self) -> Schedule:
        return Schedule(self.lr, self.schedule, self.warmup_pct, self.final_val_frac)


class EvalRecipe(Strict):
    """Held-out cross-entropy, on the same ``batches`` batches every ``every`` steps and after the last."""

    every: Count
    batches: Count


class PretrainRecipe(Strict):
    """``data``: a folder that `pd data tokenize` wrote. ``out``: the folder to make, in the Hugging Face layout; both
    relative to the current folder. ``layers``: scan compiles faster, unroll runs faster on a small model."""

    model: LlamaRecipe
    data: str
    out: str
    steps: Count
    batch_size: Count
    optimizer: OptimizerRecipe
    eval: EvalRecipe
    seed: Natural = 0
    layers: Literal["scan", "unroll"] = "scan"
    log_every: Count = 50


def read_recipe(path: str | Path) -> PretrainRecipe:
    """The recipe in a YAML file. Raises UserError that lists everything wrong with it, each key with what would be
    right."""
    return validate(PretrainRecipe, read_mapping(Path(path), "the recipe"), Place(str(path)))
