"""Defines the torch schema, key for key (docs/configuration.md), with the rules that need no other file."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag
from pydantic import Strict as Strictness

from param_decomp_lab.config.loss_parts import Scheduled
from param_decomp_lab.config.loss_schema import TrainingLoss
from param_decomp_lab.config.metric_schema import Measured
from param_decomp_lab.schema.mistakes import Wrong, rule_error, shown
from param_decomp_lab.schema.spelling import nearest_alike
from param_decomp_lab.schema.strict import (
    NO_MEANING,
    Count,
    Fraction,
    LayerCount,
    ListOf,
    Natural,
    NonNegative,
    Positive,
    Strict,
    Width,
    all_read,
    rule,
)

Beta = Annotated[float, Field(ge=0, lt=1)]
Text = Annotated[str, Field(min_length=1)]
FILE_BUILDERS = ("parquet", "arrow", "json", "text")
"""Values of ``dataset_name`` that stand for the files of ``data_files``, in that format."""
SquashingName = Literal["normal", "hard", "leaky_hard", "upper_leaky_hard", "swish_hard", "two_sided_leaky_hard"]


class DecompositionTarget(Strict):
    module_pattern: Text
    C: Width


class LayerwiseCI(Strict):
    mode: Literal["layerwise"]
    fn_type: Literal["mlp", "vector_mlp", "shared_mlp"]
    hidden_dims: ListOf[Width]
    component_readout: bool = False

    @classmethod
    def _refusal(cls, key: str) -> str:
        if key == "input_tap":
            return "goes with mode: global and mode: chunkwise; a layerwise function reads its site's input. Remove it"
        return super()._refusal(key)

    @rule
    def _hidden(self) -> Iterator[Wrong]:
        if not self.hidden_dims and self.fn_type != "shared_mlp":
            needed = f"{self.fn_type} needs at least one hidden layer; only shared_mlp may have none"
            yield "hidden_dims", f"is empty; {needed}"


class AttentionConfig(Strict):
    n_heads: Width
    max_len: Width = 2048
    rope_base: Positive = 10000.0
    causal: bool = False
    n_kv_heads: Width | None = None

    @rule
    def _key_heads(self) -> Iterator[Wrong]:
        if self.n_kv_heads is not None and self.n_heads % self.n_kv_heads:
            yield "n_kv_heads", f"must divide n_heads ({self.n_heads}), not {self.n_kv_heads}"


class TransformerCIConfig(Strict):
    """The CI transformer. C9 explains ``mlp_type``, ``learned_norm_scale``, and ``causal`` and ``n_kv_heads`` of its
    attention.
    """

    d_model: Width
    n_blocks: LayerCount
    mlp_hidden_dim: Annotated[ListOf[Width], Field(min_length=1)] | None = None
    mlp_type: Literal["gelu", "swiglu"] = "gelu"
    learned_norm_scale: bool = False
    attn_config: AttentionConfig

    @rule
    def _heads(self) -> Iterator[Wrong]:
        heads = self.attn_config.n_heads
        if self.d_model % heads:
            yield "d_model", f"is {self.d_model}, not a multiple of attn_config.n_heads ({heads})"
        elif self.d_model // heads % 2:
            size = self.d_model // heads
            yield "d_model", f"gives heads of width {size}; rotary embedding needs an even width"

    @property
    def mlp_hidden(self) -> tuple[int, ...]:
        """Returns the hidden widths of the MLP; null means one layer of 4 · d_model."""
        return self.mlp_hidden_dim or (4 * self.d_model,)


def _not_removed(fn_type: Any) -> Any:
    if fn_type == "global_reverse_residual":
        raise rule_error(("", REVERSE_RESIDUAL_IS_GONE))
    return fn_type


class ResidualBoundaries(Strict):
    residual_boundaries: Annotated[ListOf[Natural], Field(min_length=1)]

    @rule
    def _in_order(self) -> Iterator[Wrong]:
        for n, (one, next_) in enumerate(pairwise(all_read(self.residual_boundaries))):
            if next_ <= one:
                yield f"residual_boundaries.{n + 1}", f"is {next_}, not above {one}; the offsets must increase"


def _tap_form(raw: Any) -> str:
    return "offsets" if isinstance(raw, dict | ResidualBoundaries) else "name"


def _named_tap(raw: Any) -> Any:
    if raw not in ("first_block_resid", "all_block_resids"):
        forms = "'first_block_resid', 'all_block_resids' or {residual_boundaries: [offsets]}"
        raise rule_error(("", f"should be {forms}, not {shown(raw)}"))
    return raw


InputTap = Annotated[
    Annotated[Literal["first_block_resid", "all_block_resids"], BeforeValidator(_named_tap), Tag("name")]
    | Annotated[ResidualBoundaries, Tag("offsets")],
    Discriminator(_tap_form),
]
"""What a CI function reads instead of the inputs of sites (C10)."""


class GlobalCI(Strict):
    """A CI function for all sites. Each ``fn_type`` has its own key (`_KEY_OF`), and refuses that of the other."""

    mode: Literal["global"]
    fn_type: Annotated[Literal["global_shared_mlp", "global_shared_transformer"], BeforeValidator(_not_removed)]
    hidden_dims: Annotated[ListOf[Width], Field(min_length=1)] | None = None
    simple_transformer_ci_cfg: TransformerCIConfig | None = None
    input_tap: InputTap | None = None
    component_readout: bool = False

    @classmethod
    def _is_dropped(cls, key: Any, value: Any) -> bool:
        """Whether to ignore a key: files of the torch schema write null for the keys of `global_reverse_residual`."""
        return key in _KEYS_THAT_ARE_GONE and value is None

    @classmethod
    def _refusal(cls, key: str) -> str:
        if key in _KEYS_THAT_ARE_GONE:
            return "was for fn_type: global_reverse_residual, which was removed; remove it"
        return super()._refusal(key)

    @rule
    def _own_key(self) -> Iterator[Wrong]:
        needed = _KEY_OF[self.fn_type]
        if getattr(self, needed) is None:
            yield needed, f"is required with fn_type: {self.fn_type}"

    @rule
    def _no_other_key(self) -> Iterator[Wrong]:
        for key in _KEY_OF.values():
            if key != _KEY_OF[self.fn_type] and getattr(self, key) is not None:
                yield key, f"has no effect with fn_type: {self.fn_type}; remove it or set it to null"


_KEY_OF = {"global_shared_mlp": "hidden_dims", "global_shared_transformer": "simple_transformer_ci_cfg"}
_KEYS_THAT_ARE_GONE = frozenset(
    ("d_resid_ci_fn", "block_groups", "reader_hidden_dims", "transition_attn_config", "transition_hidden_dim")
)
REVERSE_RESIDUAL_IS_GONE = (
    "global_reverse_residual was removed: the PyTorch project deleted its own in April 2026, and the function here was "
    "another one, without norms before readers and transitions. Take global_shared_transformer, or mode: chunkwise "
    "with fn_type: chunkwise_transformer; commit e2e245b opens runs that were made with it"
)


class ChunkwiseCI(Strict):
    """A transformer for each group of sites (C6)."""

    mode: Literal["chunkwise"]
    fn_type: Literal["chunkwise_transformer"]
    layers_per_chunk: Count = 1
    input_patterns: Annotated[ListOf[Text], Field(min_length=1)] | None = None
    input_tap: InputTap | None = None
    simple_transformer_ci_cfg: TransformerCIConfig
    component_readout: bool = False

    @rule
    def _one_choice(self) -> Iterator[Wrong]:
        if self.input_tap is not None and self.input_patterns is not None:
            yield "input_patterns", "has no effect with input_tap, which is read in place of inputs; remove either"


AnyCI = LayerwiseCI | GlobalCI | ChunkwiseCI


class AdamWConfig(Strict):
    """T1."""

    type: Literal["adamw"] = "adamw"
    lr_schedule: Scheduled[NonNegative]
    weight_decay: NonNegative = 0.0
    betas: Annotated[tuple[Beta, Beta], Strictness(False)] = (0.9, 0.999)
    grad_clip_norm: Positive | None = None


class MuonConfig(Strict):
    """T7. ``ns_dtype``: the dtype of Newton-Schulz (N5); null: bfloat16 with `autocast_bf16`, else float32."""

    type: Literal["muon"]
    lr_schedule: Scheduled[NonNegative]
    beta: Beta = 0.95
    consistent_rms: Positive | None = 0.2
    weight_decay: NonNegative = 0.0
    grad_clip_norm: Positive | None = None
    ns_steps: Annotated[int, Field(ge=1, le=100)] = 5
    ns_dtype: Literal["float32", "bfloat16"] | None = None


def _adamw_unless_said(raw: Any) -> Any:
    """Returns a mapping without a `type`, or with a misspelled one, as AdamW's: for a long time, files had no other
    optimiser.
    """
    if isinstance(raw, dict) and not any(isinstance(key, str) and nearest_alike(key, ["type"]) for key in raw):
        return {**raw, "type": "adamw"}
    return raw


OptimizerConfig = Annotated[AdamWConfig | MuonConfig, Field(discriminator="type"), BeforeValidator(_adamw_unless_said)]


class PDConfig(Strict):
    """The `pd` section: the method. ``batch_size`` is global; ``n_mask_samples``: draws per stochastic loss."""

    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    n_mask_samples: Count
    sampling: Literal["continuous", "binomial"] = "continuous"
    sigmoid_type: SquashingName = "leaky_hard"
    use_delta_component: bool = True
    tied_weights: ListOf[Annotated[tuple[Text, Text], Strictness(False)]] | None = None
    decomposition_targets: ListOf[DecompositionTarget]
    identity_decomposition_targets: ListOf[DecompositionTarget] | None = None
    ci_config: Annotated[AnyCI, Field(discriminator="mode")]
    components_optimizer: OptimizerConfig
    ci_fn_optimizer: OptimizerConfig
    steps: Count
    batch_size: Count
    faithfulness_warmup_steps: Natural = 0
    faithfulness_warmup_lr: NonNegative = 0.001
    faithfulness_warmup_weight_decay: NonNegative = 0.0
    loss_metrics: Annotated[ListOf[TrainingLoss], Field(min_length=1)]

    @rule
    def _something_to_decompose(self) -> Iterator[Wrong]:
        if not self.decomposition_targets and not self.identity_decomposition_targets:
            yield "decomposition_targets", "needs at least 1 item, here or as identity_decomposition_targets"


class RuntimeConfig(Strict):
    autocast_bf16: bool = True
    device: Annotated[str, NO_MEANING] = "cuda"
    dp: Annotated[Count | None, NO_MEANING] = None


class CadenceConfig(Strict):
    train_log_every: Count
    save_every: Count | None = None
    keep_last_n_checkpoints: Count | None = None


class EvalConfig(Strict):
    batch_size: Count
    n_steps: Count
    every: Count
    slow_every: Count
    slow_on_first_step: bool = True
    metrics: ListOf[Measured] = ()

    @rule
    def _slow_is_also_fast(self) -> Iterator[Wrong]:
        if self.slow_every % self.every:
            yield "slow_every", f"is {self.slow_every}; it must be a multiple of every ({self.every})"


class WandbConfig(Strict):
    project: Text
    entity: Text | None = None


class HubSpec(Strict):
    """``model_name``: hub id or local folder."""

    kind: Literal["hf"]
    model_class: Text
    model_name: Text


class PretrainedSpec(Strict):
    """``run_path``: the path of a run of the PyTorch project, on wandb or on this machine."""

    kind: Literal["pretrained"]
    model_class: Text
    run_path: Text


class LanguageModelTarget(Strict):
    """``weights_dtype``: null keeps the weights as they are stored."""

    spec: Annotated[HubSpec | PretrainedSpec, Field(discriminator="kind")]
    output_extract: Annotated[int | str | None, NO_MEANING] = "logits"
    weights_dtype: Literal["float32", "bfloat16"] | None = None


class LanguageModelData(Strict):
    """``dataset_name``: a data set of the hub, a local folder, or one of `FILE_BUILDERS` for the files of
    ``data_files``.
    """

    dataset_name: Text
    data_files: Text | None = None
    revision: Text | None = None
    tokenizer_name: Text
    column_name: Text
    max_seq_len: Width = 512
    train_split: Text = "train"
    eval_split: Text = "test"
    is_tokenized: bool = False
    streaming: Annotated[bool, NO_MEANING] = False
    buffer_size: Annotated[int, NO_MEANING] = 1000
    shuffle_each_epoch: bool = True

    @property
    def of_files(self) -> bool:
        """Whether it names files rather than a data set."""
        return self.dataset_name in FILE_BUILDERS

    @property
    def is_in_rows(self) -> bool:
        """Whether its files already are rows of tokens, which are read in place."""
        return self.dataset_name in ("parquet", "arrow") and self.column_name == "input_ids" and self.is_tokenized


class ToyTarget(Strict):
    """``run_path``: null if the wrapper gives the target."""

    run_path: Text | None = None


class ToyData(Strict):
    feature_probability: Fraction
    data_generation_type: Literal["at_least_zero_active", "exactly_one_active"] = "at_least_zero_active"


class _MethodFile(Strict):
    pd: PDConfig
    runtime: RuntimeConfig = RuntimeConfig()
    cadence: CadenceConfig
    eval: EvalConfig | None = None
    wandb: WandbConfig | None = None


class LanguageModelFile(_MethodFile):
    """A schema file whose target has a ``spec``."""

    target: LanguageModelTarget
    data: LanguageModelData


class ToyFile(_MethodFile):
    """A schema file for TMS or ResidMLP."""

    target: ToyTarget
    data: ToyData


MethodFile = LanguageModelFile | ToyFile


class UndecidedFile(_MethodFile):
    """A schema file that says neither what is decomposed nor on which data. Its other parts are checked, and then it is
    refused.
    """

    target: Any = None
    data: Any = None
