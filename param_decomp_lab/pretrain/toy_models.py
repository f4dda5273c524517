"""What training needs to know of each toy: how it starts, what of it is trained, what it should say, what it lost."""

from dataclasses import dataclass, field
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from param_decomp_jax.decomposition.sites import Sites
from param_decomp_jax.nn.numerics import mean_squared_error
from param_decomp_jax.sharding.memory import MemoryPolicy
from param_decomp_jax.targets.features import SparseFeatures
from param_decomp_jax.targets.plain_linears import UNTOUCHED
from param_decomp_jax.targets.resid_mlp import ResidMLP
from param_decomp_jax.targets.tms import TMS
from param_decomp_lab.pretrain.toy_recipe import ResidMLPRecipe, TMSRecipe, ToyRecipe
from param_decomp_lab.weights.target_folder import Weights

PROBE = 0.75
"""Value at which features are probed one at a time, as in section 11."""

UNROLLED = MemoryPolicy(layers="unroll")


@dataclass(frozen=True)
class Examination:
    """A trained toy. ``loss``: on fresh inputs; ``unexplained``: that over the variance of the label. ``lost``:
    features that the toy does not represent. ``figures``: more, by name."""

    loss: float
    unexplained: float
    lost: tuple[int, ...]
    figures: dict[str, float] = field(default_factory=dict)


class Toy(Protocol):
    """A toy as training sees it: its weights are made of a part that is trained and a part that stays as it starts."""

    @property
    def features(self) -> SparseFeatures: ...

    def init(self, key: PRNGKeyArray) -> tuple[Weights, Weights]:
        """The part that is trained, and the fixed one."""
        ...

    def weights(self, trained: Weights, fixed: Weights) -> Weights:
        """Both parts in the structure that the target takes."""
        ...

    def outputs(self, weights: Weights, inputs: Float[Array, "B n"]) -> Float[Array, "B n"]: ...

    def label(self, inputs: Float[Array, "B n"]) -> Float[Array, "B n"]:
        """What the outputs should be."""
        ...

    def examine(self, weights: Weights, inputs: Float[Array, "B n"]) -> Examination:
        """What became of it, judged on ``inputs`` and on one feature at a time."""
        ...


def make_toy(recipe: ToyRecipe) -> Toy:
    n, probability, generation = (
        recipe.model.n_features,
        recipe.data.feature_probability,
        recipe.data.data_generation_type,
    )
    match recipe.model:
        case TMSRecipe() as model:
            return TMSToy(model, SparseFeatures(n, probability, 0.0, generation))
        case ResidMLPRecipe() as model:
            return ResidMLPToy(model, SparseFeatures(n, probability, -1.0, generation))


@dataclass(frozen=True)
class TMSToy:
    """Trained: linear1, the bias, and linear2 unless it is tied. Label ``|x|``."""

    model: TMSRecipe
    features: SparseFeatures

    def init(self, key: PRNGKeyArray) -> tuple[Weights, Weights]:
        """Xavier-normal matrices, a bias of zeros."""
        n, h, layers = self.model.n_features, self.model.n_hidden, self.model.n_hidden_layers
        of_first, of_hidden, of_last = jax.random.split(key, 3)
        std = (2 / (n + h)) ** 0.5
        trained: Weights = {"linear1": std * jax.random.normal(of_first, (n, h)), "bias": jnp.zeros(n)}
        if not self.model.tied:
            trained["linear2"] = std * jax.random.normal(of_last, (h, n))
        match self.model.hidden_init:
            case None:
                return trained, {}
            case "identity":
                return trained, {"hidden_layers": jnp.tile(jnp.eye(h), (layers, 1, 1))}
            case "random":
                return trained, {"hidden_layers": h**-0.5 * jax.random.normal(of_hidden, (layers, h, h))}

    def weights(self, trained: Weights, fixed: Weights) -> Weights:
        return {"linear2": trained["linear1"].T, **trained, **fixed}

    def outputs(self, weights: Weights, inputs: Float[Array, "B n"]) -> Float[Array, "B n"]:
        output: Array = TMS(self.model.config(), Sites(()), UNROLLED).forward(weights, inputs, UNTOUCHED).output
        return output

    def label(self, inputs: Float[Array, "B n"]) -> Float[Array, "B n"]:
        return jnp.abs(inputs)

    def examine(self, weights: Weights, inputs: Float[Array, "B n"]) -> Examination:
        """A feature is lost if, alone at 0.75, its own output stays below half of that, or if its size is below half of
        the largest. The size is that of its row of linear1 and its column of linear2 (their geometric mean), which are
        the same if tied; without it a feature would seem represented whose bias alone is large.

        The two groups lie far apart. 5-2 (20 seeds) and 40-10 (10 seeds) represent all their features, with outputs of
        0.58 to 0.74 and sizes within 3 % of each other. Of the features of 31 tied models in two dimensions that cannot
        hold them all, or hardly (6 to 9 features, and 5 at probabilities of 0.1 to 0.5), the lost ones have outputs of
        at most 0.25 and sizes of at most 0.35 of the largest, the others outputs from 0.53 and sizes from 0.92.
        """
        loss, unexplained = _errors(self, weights, inputs)
        outputs = _probe(self, weights, PROBE)
        own = np.diag(outputs)
        rows, columns = np.linalg.norm(weights["linear1"], axis=1), np.linalg.norm(weights["linear2"], axis=0)
        sizes = np.sqrt(rows * columns)
        lost = np.flatnonzero((own < PROBE / 2) | (sizes < sizes.max() / 2))
        others = outputs[~np.eye(len(own), dtype=bool)]
        figures = {
            "smallest_output": own.min(),
            "smallest_size_of_largest": float(sizes.min()) / float(sizes.max()),
            "largest_output_of_another": others.max(initial=0),
        }
        return Examination(loss, unexplained, _numbers(lost), _rounded(figures))


@dataclass(frozen=True)
class ResidMLPToy:
    """Trained: the layers; the embedding stays as it is drawn. Label x + act(x)."""

    model: ResidMLPRecipe
    features: SparseFeatures

    def init(self, key: PRNGKeyArray) -> tuple[Weights, Weights]:
        """Normal matrices with standard deviation d_in^(-1/2), biases of zeros, embedding rows of unit norm."""
        n, d, m, layers = self.model.n_features, self.model.d_embed, self.model.d_mlp, self.model.n_layers
        of_embed, of_in, of_out = jax.random.split(key, 3)
        embed = jax.random.normal(of_embed, (n, d))
        trained = {
            "mlp_in": d**-0.5 * jax.random.normal(of_in, (layers, d, m)),
            "mlp_out": m**-0.5 * jax.random.normal(of_out, (layers, m, d)),
        }
        if self.model.in_bias:
            trained["in_bias"] = jnp.zeros((layers, m))
        if self.model.out_bias:
            trained["out_bias"] = jnp.zeros((layers, d))
        return trained, {"embed": embed / jnp.linalg.norm(embed, axis=1, keepdims=True)}

    def weights(self, trained: Weights, fixed: Weights) -> Weights:
        return {**fixed, "layers": trained}

    def outputs(self, weights: Weights, inputs: Float[Array, "B n"]) -> Float[Array, "B n"]:
        output: Array = ResidMLP(self.model.config(), Sites(()), UNROLLED).forward(weights, inputs, UNTOUCHED).output
        return output

    def label(self, inputs: Float[Array, "B n"]) -> Float[Array, "B n"]:
        return inputs + self._act(inputs)

    def _act(self, x: Float[Array, "*n"]) -> Float[Array, "*n"]:
        return jax.nn.relu(x) if self.model.activation == "relu" else jax.nn.gelu(x, approximate=False)

    def examine(self, weights: Weights, inputs: Float[Array, "B n"]) -> Examination:
        """A feature is lost if, alone at 0.75, the layers add less than a quarter of act(0.75) to its own output.

        Half as many neurons as features cannot add all of it: with 1, 2 and 3 layers they add 0.34 to 0.57 of 0.75, in
        one heap without a gap, and leave 8 % of the label's variance unexplained (24 % without the layers).
        """
        loss, unexplained = _errors(self, weights, inputs)
        without = {**weights, "layers": jax.tree.map(jnp.zeros_like, weights["layers"])}
        added = np.diag(_probe(self, weights, PROBE) - _probe(self, without, PROBE))
        lost = np.flatnonzero(added < float(self._act(jnp.asarray(PROBE))) / 4)
        figures = {
            "smallest_added": added.min(),
            "largest_added": added.max(),
            "unexplained_without_layers": _errors(self, without, inputs)[1],
        }
        return Examination(loss, unexplained, _numbers(lost), _rounded(figures))


def _errors(toy: Toy, weights: Weights, inputs: Float[Array, "B n"]) -> tuple[float, float]:
    """The loss, and the loss over the variance of the label."""
    label = toy.label(inputs)
    loss = float(mean_squared_error(label, toy.outputs(weights, inputs)))
    return loss, loss / max(float(jnp.var(label)), float(np.finfo(np.float32).tiny))


def _probe(toy: Toy, weights: Weights, value: float) -> Float[np.ndarray, "n n"]:
    """Row j: the outputs while feature j alone is on."""
    return np.asarray(toy.outputs(weights, value * jnp.eye(toy.features.n_features)))


def _numbers(features: np.ndarray) -> tuple[int, ...]:
    return tuple(int(feature) for feature in features)


def _rounded(figures: dict[str, np.floating | float]) -> dict[str, float]:
    return {name: round(float(value), 4) for name, value in figures.items()}
