"""The recipe of a pretrained model: all that decides its weights, as a YAML file says it. Toys: ``toy_recipe``."""

from pathlib import Path
from typing import Any, Literal, Self

from pydantic import field_validator, model_validator

from param_decomp_jax.targets.llama import LlamaConfig, RopeScaling
from param_decomp_lab.config.strict import Count, Natural, Place, Positive, Problem, Strict, broken, nearest, validate
from param_decomp_lab.config.yaml_io import read_mapping
from param_decomp_lab.pretrain.optimizer import OptimizerRecipe
from param_decomp_lab.pretrain.toy_recipe import TOYS, ToyRecipe

ARCHITECTURES = ("llama", *TOYS)


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

    @field_validator("data", mode="before")
    @classmethod
    def _folder(cls, data: Any) -> Any:
        if isinstance(data, dict):
            raise broken(
                ("", f"should be a folder that `pd data tokenize` wrote; a mapping is for toys ({', '.join(TOYS)})")
            )
        return data

    @classmethod
    def _refusal(cls, key: str) -> str:
        if key == "tries":
            return f"'tries' is for toys ({', '.join(TOYS)}); remove it"
        return super()._refusal(key)


def read_recipe(path: str | Path) -> PretrainRecipe | ToyRecipe:
    """The recipe in a YAML file. Raises UserError that lists everything wrong with it, each key with what would be
    right."""
    raw, place = read_mapping(Path(path), "the recipe"), Place(str(path))
    model = raw.get("model")
    if not isinstance(model, dict):
        return validate(PretrainRecipe, raw, place)
    match model.get("architecture"):
        case None:
            message = f"is required: one of {', '.join(ARCHITECTURES)}"
        case "llama":
            return validate(PretrainRecipe, raw, place)
        case architecture if architecture in TOYS:
            return validate(ToyRecipe, raw, place)
        case architecture:
            message = f"unknown architecture {architecture!r}; {nearest(str(architecture), ARCHITECTURES)}"
    raise place.error([Problem("model.architecture", message)])
