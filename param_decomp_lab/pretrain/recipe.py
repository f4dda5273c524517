"""The recipe of a pretrained model: all that decides its weights, as a YAML file says it. Toys: ``toy_recipe``."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from param_decomp_jax.nn.rotary import Llama3Scaling
from param_decomp_jax.targets.architecture import UnsupportedConfig
from param_decomp_jax.targets.gpt import GPTConfig, Part
from param_decomp_jax.targets.llama import LlamaConfig
from param_decomp_jax.targets.registry import ARCHITECTURES as REGISTERED
from param_decomp_jax.targets.registry import read_config
from param_decomp_jax.targets.transformer_config import TransformerConfig
from param_decomp_lab.errors import UserError
from param_decomp_lab.pretrain.optimizer import OptimizerRecipe
from param_decomp_lab.pretrain.toy_recipe import TOYS, ToyRecipe
from param_decomp_lab.safe_io.yaml_text import read_mapping
from param_decomp_lab.schema.mistakes import ConfigSource, Mistake, Wrong, rule_error
from param_decomp_lab.schema.spelling import nearest
from param_decomp_lab.schema.strict import (
    Count,
    LayerCount,
    ListOf,
    Natural,
    NonNegative,
    PathText,
    Positive,
    Strict,
    Width,
    rule,
    validate,
)

LANGUAGE_MODELS = ("llama", "gpt", "family")
ARCHITECTURES = (*LANGUAGE_MODELS, *TOYS)


class RopeScalingRecipe(Strict):
    """The frequency scaling of Llama 3.1."""

    factor: Positive
    low_freq_factor: Positive
    high_freq_factor: Positive
    original_max_position_embeddings: Width


class LlamaRecipe(Strict):
    """The architecture; the vocabulary comes from the data. ``head_dim``: null for d_model / n_heads. ``init_std``:
    standard deviation of the initial matrices; the usual 0.02 is for wide models, a narrow one learns faster from a
    larger one (at d_model 64, 400 steps: held-out cross-entropy 1.97 from 0.02, 1.65 from 0.08)."""

    architecture: Literal["llama"]
    d_model: Width
    n_layers: LayerCount
    n_heads: Width
    n_kv_heads: Width
    head_dim: Width | None = None
    d_mlp: Width
    rms_norm_eps: Positive = 1e-5
    rope_theta: Positive = 10000.0
    rope_scaling: RopeScalingRecipe | None = None
    tied: bool = False
    init_std: Positive = 0.02

    @rule
    def _key_heads(self) -> Iterator[Wrong]:
        if self.n_heads % self.n_kv_heads:
            yield "n_kv_heads", f"must divide n_heads ({self.n_heads}), not {self.n_kv_heads}"

    @rule
    def _width_of_heads(self) -> Iterator[Wrong]:
        if self.head_dim is None and self.d_model % self.n_heads:
            yield "n_heads", f"must divide d_model ({self.d_model}), not {self.n_heads}; or give a head_dim"
        elif (self.head_dim or self.d_model // self.n_heads) % 2:
            yield "head_dim", "must be even, for the rotary embedding"

    def config(self, vocab_size: int) -> LlamaConfig:
        scaling = Llama3Scaling(**self.rope_scaling.model_dump()) if self.rope_scaling else None
        return LlamaConfig(
            vocab_size=vocab_size,
            d_model=self.d_model,
            n_layers=self.n_layers,
            n_heads=self.n_heads,
            n_kv_heads=self.n_kv_heads,
            head_dim=self.head_dim or self.d_model // self.n_heads,
            d_mlp=self.d_mlp,
            norm_eps=self.rms_norm_eps,
            rope_theta=self.rope_theta,
            rope_scaling=scaling,
            tied=self.tied,
        )


class GPTRecipe(Strict):
    """The architecture; rows of the data are as long as it reads. ``vocab_size``: null for the data's.
    ``dropout``: share of what a block adds to the residual stream that is dropped in training."""

    architecture: Literal["gpt"]
    vocab_size: Width | None = None
    d_model: Width
    n_layers: LayerCount
    n_heads: Width
    d_mlp: Width
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    norm_eps: Positive = 1e-5
    init_std: Positive = 0.02

    @rule
    def _heads(self) -> Iterator[Wrong]:
        if self.d_model % self.n_heads:
            yield "n_heads", f"must divide d_model ({self.d_model}), not {self.n_heads}"

    def config(self, n_positions: int, vocab_size: int | None) -> GPTConfig:
        """``vocab_size``: of the data, if there is data. Raises UserError unless the recipe's is at least as large, or
        where neither says how large it is."""
        own = self.vocab_size or vocab_size
        if own is None:
            raise UserError("model.vocab_size: is required where there is no data")
        if vocab_size is not None and own < vocab_size:
            raise UserError(f"model.vocab_size: is {own}, but the data has token ids up to {vocab_size - 1}")
        return GPTConfig(
            vocab_size=own,
            n_positions=n_positions,
            d_model=self.d_model,
            n_layers=self.n_layers,
            n_heads=self.n_heads,
            d_mlp=self.d_mlp,
            dropout=self.dropout,
            norm_eps=self.norm_eps,
        )


class FamilyRecipe(Strict):
    """Any decoder that can be decomposed.

    ``config``: its `config.json`; ``model_type`` says the family. Vocabulary and longest sequence come from the data.
    ``router_aux_loss_coef``: of the load-balancing loss of experts (`balance.py`).
    """

    architecture: Literal["family"]
    config: dict[str, Any]
    init_std: Positive = 0.02
    router_aux_loss_coef: NonNegative = 0.0

    @rule
    def _readable(self) -> Iterator[Wrong]:
        try:
            config = self.family(vocab_size=1, n_positions=1)
        except UnsupportedConfig as error:
            yield "config", str(error)
            return
        if self.router_aux_loss_coef and config.experts is None:
            yield "router_aux_loss_coef", "is of experts, and this model has none"

    def family(self, vocab_size: int, n_positions: int) -> TransformerConfig:
        """The architecture for data with this vocabulary, in rows of this length. UnsupportedConfig for a ``config``
        that cannot be trained."""
        names = (("max_position_embeddings", "n_positions"), ("n_ctx",), ("block_size",))  # of one setting, each
        lengths = {key: n_positions for keys in names if not set(keys) & self.config.keys() for key in keys}
        known = [kind.name for kind in REGISTERED.values() if issubclass(kind, TransformerConfig)]
        if self.config.get("model_type") not in known:
            given = self.config.get("model_type")
            raise UnsupportedConfig(f"model_type is {given!r}; what can be trained is {', '.join(known)}")
        found = read_config(lengths | {"vocab_size": vocab_size} | self.config)
        assert isinstance(found, TransformerConfig)
        return found


class EvalRecipe(Strict):
    """Held-out cross-entropy, on the same ``batches`` batches every ``every`` steps and after the last."""

    every: Count
    batches: Count


def _parts(remat: Any) -> Any:
    given = remat if isinstance(remat, list | tuple) else [remat]
    valid = ("mlp", "attention") if given is remat else ("none", "block")
    if not given or any(part not in valid for part in given) or len(set(given)) < len(given):
        raise rule_error(("", f"should be none, block, or a list of mlp and attention, not {remat!r}"))
    return remat


def _folder(data: Any) -> Any:
    if isinstance(data, dict):
        raise rule_error(
            ("", f"should be a folder that `pd data tokenize` wrote; a mapping is for toys ({', '.join(TOYS)})")
        )
    return data


class PretrainRecipe(Strict):
    """``data``: a folder that `pd data tokenize` wrote. ``out``: the folder to make. Both are relative to the current
    folder.

    ``layers``: scan compiles faster, unroll runs faster on a small model. ``dtype``: of activations and matrix
    products; weights and moments are in fp32. ``softmax_dtype``: of attention's. ``remat``: what keeps its input alone
    and is made again in the backward. ``micro_batches``: parts of the batch, one after the other.
    """

    model: Annotated[LlamaRecipe | GPTRecipe | FamilyRecipe, Field(discriminator="architecture")]
    data: Annotated[PathText, BeforeValidator(_folder)]
    out: PathText
    steps: Count
    batch_size: Count
    optimizer: OptimizerRecipe
    eval: EvalRecipe
    seed: Natural = 0
    layers: Literal["scan", "unroll"] = "scan"
    dtype: Literal["float32", "bfloat16"] = "float32"
    softmax_dtype: Literal["float32", "bfloat16"] = "float32"
    remat: Annotated[Literal["none", "block"] | ListOf[Literal["mlp", "attention"]], BeforeValidator(_parts)] = "none"
    micro_batches: Count = 1
    log_every: Count = 50

    @property
    def recomputed(self) -> frozenset[Part]:
        """``remat`` as a set."""
        if isinstance(self.remat, tuple):
            return frozenset(self.remat)
        return frozenset({"block"}) if self.remat == "block" else frozenset()

    @property
    def knobs_at_default(self) -> tuple[str, ...]:
        """Keys younger than some folders that a recipe without them made, and which say nothing here."""
        knobs = ("dtype", "softmax_dtype", "remat", "micro_batches")
        return tuple(key for key in knobs if getattr(self, key) == type(self).model_fields[key].default)

    @rule
    def _equal_parts(self) -> Iterator[Wrong]:
        if self.batch_size % self.micro_batches:
            yield "micro_batches", f"must divide batch_size ({self.batch_size}), not {self.micro_batches}"

    @rule
    def _parts_of_a_gpt(self) -> Iterator[Wrong]:
        if isinstance(self.remat, tuple) and not isinstance(self.model, GPTRecipe):
            yield "remat", "should be none or block; parts of a layer are for model.architecture gpt"

    @rule
    def _softmax_of_a_gpt(self) -> Iterator[Wrong]:
        if self.softmax_dtype != "float32" and not isinstance(self.model, GPTRecipe):
            yield "softmax_dtype", "should be float32; others are for model.architecture gpt"

    @classmethod
    def _refusal(cls, key: str) -> str:
        if key == "tries":
            return f"'tries' is for toys ({', '.join(TOYS)}); remove it"
        return super()._refusal(key)


def read_recipe(path: str | Path) -> PretrainRecipe | ToyRecipe:
    """The recipe in a YAML file. Raises UserError that lists everything wrong with it, each key with what would be
    right."""
    return parse_recipe(read_mapping(Path(path), "the recipe"), str(path))


def parse_recipe(raw: dict[str, Any], where: str) -> PretrainRecipe | ToyRecipe:
    """As `read_recipe`, from parsed YAML. ``where``: its origin, for errors."""
    place, model = ConfigSource(where), raw.get("model")
    if not isinstance(model, dict):
        return validate(PretrainRecipe, raw, place)
    match model.get("architecture"):
        case None:
            message = f"is required: one of {', '.join(ARCHITECTURES)}"
        case architecture if architecture in LANGUAGE_MODELS:
            return validate(PretrainRecipe, raw, place)
        case architecture if architecture in TOYS:
            return validate(ToyRecipe, raw, place)
        case architecture:
            message = f"unknown architecture {architecture!r}; {nearest(str(architecture), ARCHITECTURES)}"
    raise place.error([Mistake("model.architecture", message)])
