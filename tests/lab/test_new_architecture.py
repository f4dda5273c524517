"""docs/development.md, "A new target", followed to the letter: an architecture that is not part of the project, and the
GPT of `pd pretrain`, are registered, checked, decomposed, opened and exported through the same commands as a Llama."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jaxtyping import Array, Float, Int

from param_decomp_jax.decomposition.sites import Matrix, Sites
from param_decomp_jax.nn.fused_kl import Head
from param_decomp_jax.nn.numerics import matmul_wide
from param_decomp_jax.sharding.memory import PLAIN, MemoryPolicy
from param_decomp_jax.sharding.mesh import gather
from param_decomp_jax.targets.architecture import Architecture, Tensors, TokenInputs
from param_decomp_jax.targets.base import LayerLinears, Weights
from param_decomp_jax.targets.decoder import Decoder
from param_decomp_jax.targets.gpt import GPTConfig
from param_decomp_jax.targets.registry import ARCHITECTURES
from param_decomp_lab.weights.target_folder import save_target
from tests.lab.tiny_run import SEQ_LEN, Tiny, pd_here
from tests.lab.whole_path import from_a_folder_to_an_export, random_weights

# --8<-- the file that somebody adds to `targets/`


@dataclass(frozen=True)
class AveragesConfig(Architecture):
    """Each layer adds a ReLU layer of the mean of the tokens so far."""

    vocab_size: int
    d_model: int
    n_layers: int
    n_positions: int

    name = "averages"
    title = "Averages"
    model_classes = ("AveragesModel",)

    @property
    def inputs(self) -> TokenInputs:
        return TokenInputs(self.vocab_size, self.n_positions)

    def matrices(self) -> tuple[Matrix, ...]:
        d, layers = self.d_model, range(self.n_layers)
        kinds = (("inward", "mean", d, 2 * d), ("outward", "hidden", 2 * d, d))
        return tuple(Matrix(f"h.{i}.{kind}", i, kind, reads, *shape) for i in layers for kind, reads, *shape in kinds)

    def weight_shapes(self) -> dict[str, Any]:
        d, n = self.d_model, self.n_layers
        return {"embed": (self.vocab_size, d), "layers": {"inward": (n, d, 2 * d), "outward": (n, 2 * d, d)}}

    def tensors(self) -> dict[str, Any]:
        def stacked(kind: str) -> Tensors:
            return Tensors(tuple(f"h.{i}.{kind}.weight" for i in range(self.n_layers)), stacked=True, transposed=True)

        return {"embed": Tensors(("wte",)), "layers": {kind: stacked(kind) for kind in ("inward", "outward")}}

    def target(self, sites: Sites, memory: MemoryPolicy = PLAIN, compute_dtype: Any = jnp.float32) -> "Averages":
        return Averages(self, sites, memory, compute_dtype)

    def describe(self) -> str:
        return f"Averages, {self.n_layers} layers of width {self.d_model}"


@dataclass(frozen=True)
class Averages(Decoder):
    architecture: AveragesConfig

    def embed(self, weights: Weights, tokens: Int[Array, "B T"]) -> Float[Array, "B T d"]:
        return self.look_up(weights["embed"], tokens)

    def layer(self, x: Float[Array, "B T d"], w: Mapping[str, Array], linear: LayerLinears) -> Float[Array, "B T d"]:
        mean = jnp.cumsum(x, axis=1) / jnp.arange(1, x.shape[1] + 1)[:, None]
        return x + linear("outward", jax.nn.relu(linear("inward", mean, w["inward"])), w["outward"])

    def head(self, weights: Weights, dtype: Any) -> Head:
        return Head(_product, gather(weights["embed"], self.frozen, dtype).T)


def _product(table: Float[Array, "d vocab"], hidden: Float[Array, "*n d"]) -> Float[Array, "*n vocab"]:
    return matmul_wide(hidden, table)


# --8<-- the end of that file

AVERAGES = AveragesConfig(vocab_size=256, d_model=12, n_layers=2, n_positions=64)
GPT = GPTConfig(vocab_size=256, n_positions=64, d_model=12, n_layers=2, n_heads=2, d_mlp=20)
CASES = {
    "averages": (AVERAGES, "somewhere.AveragesModel", "h.*.inward", "h.1.outward"),
    "gpt": (GPT, "GPT", "layers.*.mlp_in", "layers.1.o_proj"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_from_a_folder_to_an_export(case: str, tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    architecture, model_class, pattern, other = CASES[case]
    monkeypatch.setitem(ARCHITECTURES, architecture.name, type(architecture))
    targets = ((pattern, 16), (other, 8))
    from_a_folder_to_an_export(architecture, random_weights(architecture), model_class, targets, tiny, tmp_path)


def test_rows_longer_than_the_positions(tiny: Tiny, tmp_path: Path) -> None:
    architecture = GPTConfig(vocab_size=256, n_positions=8, d_model=4, n_layers=1, n_heads=1, d_mlp=4)
    save_target(tmp_path, architecture, random_weights(architecture))
    settings = (
        f"target.folder={tmp_path}",
        "target.spec.model_class=GPT",
        "pd.decomposition_targets=[{module_pattern: '*mlp_in', C: 4}]",
    )
    outcome = pd_here("check", tiny.config, *(word for setting in settings for word in ("--set", setting)))
    assert outcome.status == 2
    assert f"data.max_seq_len: is {SEQ_LEN}, but the target takes at most 8 tokens" in outcome.err
