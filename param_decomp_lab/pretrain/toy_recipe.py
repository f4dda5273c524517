"""The recipe of a toy target."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from param_decomp_jax.targets.resid_mlp import ResidMLPConfig
from param_decomp_jax.targets.tms import TMSConfig
from param_decomp_lab.config.method_schema import ToyData
from param_decomp_lab.pretrain.optimizer import OptimizerRecipe
from param_decomp_lab.schema.mistakes import Wrong, rule_error
from param_decomp_lab.schema.strict import Count, LayerCount, Natural, PathText, Strict, Width, rule

TOYS = ("tms", "resid_mlp")


class TMSRecipe(Strict):
    """The keys of `TMSConfig`, and how to make one. ``hidden_init``: what the hidden layers are, which are never
    trained; for a model that has some. ``random``: normal with standard deviation n_hidden^(-1/2). ``tied``: linear2 is
    the transpose of linear1."""

    architecture: Literal["tms"]
    n_features: Width
    n_hidden: Width
    n_hidden_layers: Annotated[int, Field(ge=0, le=4096)] = 0
    hidden_init: Literal["identity", "random"] | None = None
    tied: bool = True

    @rule
    def _hidden(self) -> Iterator[Wrong]:
        if self.n_hidden_layers and self.hidden_init is None:
            yield "hidden_init", "is required with hidden layers: identity or random"
        if not self.n_hidden_layers and self.hidden_init is not None:
            yield "hidden_init", "has no effect without hidden layers; remove it, or give n_hidden_layers"

    def config(self) -> TMSConfig:
        return TMSConfig(self.n_features, self.n_hidden, self.n_hidden_layers)


class ResidMLPRecipe(Strict):
    """The keys of `ResidMLPConfig`. ``d_mlp``: neurons of each layer."""

    architecture: Literal["resid_mlp"]
    n_features: Width
    d_embed: Width
    d_mlp: Width
    n_layers: LayerCount
    activation: Literal["relu", "gelu"] = "relu"
    in_bias: bool = False
    out_bias: bool = False

    def config(self) -> ResidMLPConfig:
        return ResidMLPConfig(
            self.n_features, self.d_embed, self.d_mlp, self.n_layers, self.activation, self.in_bias, self.out_bias
        )


def _no_folder(data: Any) -> Any:
    if isinstance(data, str):
        raise rule_error(
            ("", f"a toy draws its data: should be a mapping like {{feature_probability: 0.05}}, not {data!r}")
        )
    return data


class ToyRecipe(Strict):
    """``out``: the folder to make, relative to the current folder. ``tries``: how many seeds, from ``seed`` on, are
    tried until one gives a model in which no feature is lost."""

    model: Annotated[TMSRecipe | ResidMLPRecipe, Field(discriminator="architecture")]
    data: Annotated[ToyData, BeforeValidator(_no_folder)]
    out: PathText
    steps: Count
    batch_size: Count
    optimizer: OptimizerRecipe
    seed: Natural = 0
    tries: Count = 10
    log_every: Count = 100

    @rule
    def _something_active(self) -> Iterator[Wrong]:
        if self.data.feature_probability == 0 and self.data.data_generation_type == "at_least_zero_active":
            yield "data.feature_probability", "must be above 0, or no feature is ever active"

    @classmethod
    def _refusal(cls, key: str) -> str:
        if key in ("eval", "layers", "dtype", "softmax_dtype", "remat", "micro_batches"):
            return f"'{key}' is for language models (architecture llama, gpt) and has no meaning for a toy; remove it"
        return super()._refusal(key)
