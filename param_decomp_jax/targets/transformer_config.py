"""A decoder described by data: everything in which the families of this folder differ is a field here.

A family is a subclass in a file of its own (of `transformer.py:Family`). It maps a `config.json` to these fields, gives
the names of its tensors, and says what it refuses.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from itertools import groupby
from typing import Any, ClassVar, Literal

from param_decomp_jax.decomposition.sites import Matrix, Units
from param_decomp_jax.nn.rotary import LinearScaling, Llama3Scaling, Pairs, RopeScaling, YarnScaling
from param_decomp_jax.targets.architecture import Architecture, Tensors, TokenInputs, UnsupportedConfig
from param_decomp_jax.targets.plain_linears import EXPERT_KINDS
from param_decomp_jax.targets.points import Point, points_of_layers

Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]
EMBED = "embed"
QKV, SLICES = "qkv_proj", ("q_proj", "k_proj", "v_proj")
ATTENTION = (*SLICES, "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
KINDS = (*ATTENTION, *MLP)
"""The matrices of a layer, in the order in which they are applied."""
READS = {
    "qkv_proj": "attn_in", "q_proj": "attn_in", "k_proj": "attn_in", "v_proj": "attn_in", "o_proj": "attn_out",
    "gate_proj": "mlp_in", "up_proj": "mlp_in", "down_proj": "mlp_hidden",
    "experts.gate_proj": "mlp_in", "experts.up_proj": "mlp_in", "experts.down_proj": "mlp_hidden",
}  # fmt: skip


@dataclass(frozen=True)
class Experts:
    """A mixture of ``n`` experts, each a gated MLP of width ``d_mlp``. A token takes ``per_token`` of them.

    ``normalised``: whether their weights are divided by their sum. ``dense_layers``: the numbers of the layers that
    have an ordinary MLP instead.
    """

    n: int
    per_token: int
    d_mlp: int
    normalised: bool
    dense_layers: tuple[int, ...] = ()


@dataclass(frozen=True)
class TransformerConfig(Architecture):
    """The sizes and kinds of a decoder.

    ``norm``: RMSNorm, RMSNorm with its weight + 1 as scale, or LayerNorm with a bias. ``norms``: before each block,
    after it (on what it adds), or both. ``parallel``: attention and MLP read the same residual stream, each through a
    norm of its own. ``rope_theta``: the base; None means a table of ``learned_positions`` instead. ``rotary_dim``: how
    many of a head's first dimensions are rotated (None: all). ``qk_norm``: whether queries and keys are normalised, in
    each head or over all of them. ``biases``: the kinds of matrices that have one. ``fused``: whether the file keeps q,
    k and v in one matrix, one after the other or head by head. ``window``: how far back the layers of ``window_layers``
    read; it has no effect if that is empty. ``query_scale``: the factor of scores, None for ``head_dim^-½``;
    ``scale_by_layer`` divides it by the layer's number, counted from 1. ``clip``: the largest absolute value of
    queries, keys and values. ``attention_cap``, ``logit_cap``: x becomes ``cap · tanh(x / cap)``. ``embed_scale``: the
    factor of embeddings. ``gated``: ``act(gate) · up``, else ``act(up)``. ``tied``: whether the unembedding is the
    embedding. ``max_positions``: the longest sequence; None in old runs, which did not keep it.
    """

    vocab_size: int
    d_model: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    d_mlp: int
    norm_eps: float = 1e-5
    rope_theta: float | None = 10000.0
    rope_scaling: RopeScaling | None = None
    tied: bool = False
    # Not part of what the network computes: two configurations that differ only in it are the same target.
    max_positions: int | None = field(default=None, compare=False)
    norm: Literal["rms", "rms_plus_one", "layer"] = "rms"
    norms: Literal["before", "after", "around"] = "before"
    parallel: bool = False
    learned_positions: int | None = None
    rotary_dim: int | None = None
    rotary_pairs: Pairs = "half"
    qk_norm: Literal["head", "all"] | None = None
    biases: tuple[str, ...] = ()
    fused: Literal["blocks", "heads"] | None = None
    window: int | None = None
    window_layers: tuple[int, ...] = ()
    query_scale: float | None = None
    scale_by_layer: bool = False
    clip: float | None = None
    attention_cap: float | None = None
    logit_cap: float | None = None
    embed_scale: float = 1.0
    activation: Activation = "silu"
    gated: bool = True
    experts: Experts | None = None

    names: ClassVar[Mapping[str, str]]
    """The module of every array (a matrix, a norm, ``embed``, …) in files; ``{}`` is the layer's number."""
    transposed: ClassVar[bool] = True
    """Whether files keep matrices ``[d_out, d_in]``."""

    def __post_init__(self) -> None:
        """Raises UnsupportedConfig for sizes that do not fit together, and for numbers that lead to NaN or nonsense."""
        check_numbers(self)
        if self.n_heads % self.n_kv_heads:
            raise UnsupportedConfig(
                f"the number of key heads, {self.n_kv_heads}, does not divide that of the heads, {self.n_heads}"
            )
        if self.rope_theta is not None and (self.turning % 2 or not 0 < self.turning <= self.head_dim):
            raise UnsupportedConfig(
                f"the rotary embedding turns {self.turning} of a head's {self.head_dim} dimensions; it should be an "
                "even number of them"
            )
        for name, layers in (("window_layers", self.window_layers), ("dense_layers", self.dense_layers)):
            if any(not 0 <= layer < self.n_layers for layer in layers):
                raise UnsupportedConfig(f"{name}: {layers} are not all layers from 0 to {self.n_layers - 1}")

    @property
    def turning(self) -> int:
        """The number of dimensions of a head that the rotary embedding rotates."""
        return self.head_dim if self.rotary_dim is None else self.rotary_dim

    @property
    def dense_layers(self) -> tuple[int, ...]:
        """The layers without experts."""
        return () if self.experts is None else self.experts.dense_layers

    @property
    def inputs(self) -> TokenInputs:
        return TokenInputs(self.vocab_size, self.max_positions)

    # ---- matrices ----

    def matrix_shape(self, kind: str) -> tuple[int, int]:
        """Returns ``(d_in, d_out)`` of a kind of matrix."""
        d, q, kv = self.d_model, self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim
        m = 0 if self.experts is None else self.experts.d_mlp
        return {
            "qkv_proj": (d, q + 2 * kv), "q_proj": (d, q), "k_proj": (d, kv), "v_proj": (d, kv), "o_proj": (q, d),
            "gate_proj": (d, self.d_mlp), "up_proj": (d, self.d_mlp), "down_proj": (self.d_mlp, d),
            **dict(zip(EXPERT_KINDS, ((d, m), (d, m), (m, d)), strict=True)),
        }[kind]  # fmt: skip

    def faces(self, kind: str) -> Units | None:
        """Returns the units that a kind of matrix faces (L7). The fused matrix of queries, keys and values faces none;
        its slices do."""
        d_in, d_out = self.matrix_shape(kind)
        match kind.removeprefix("experts."):
            case "q_proj":
                return Units("attention_head", "output", self.n_heads)
            case "k_proj" | "v_proj":
                return Units("attention_head", "output", self.n_kv_heads, self.n_heads // self.n_kv_heads)
            case "o_proj":
                return Units("attention_head", "input", self.n_heads)
            case "gate_proj" | "up_proj":
                return Units("neuron", "output", d_out)
            case "down_proj":
                return Units("neuron", "input", d_in)
            case _:
                return None

    @cached_property
    def attention_kinds(self) -> tuple[str, ...]:
        """The kinds of the matrices of attention as they are kept."""
        return ATTENTION if self.fused is None else (QKV, "o_proj")

    @cached_property
    def mlp_kinds(self) -> tuple[str, ...]:
        """The matrices of an ordinary MLP."""
        return MLP if self.gated else MLP[1:]

    @classmethod
    def module_name(cls, layer: int, kind: str) -> str:
        """Returns the module of a matrix without the files' prefix: ``layers.18.mlp.up_proj``."""
        return cls.names[kind].format(layer).removeprefix(cls.prefix)

    def matrices(self) -> tuple[Matrix, ...]:
        name, shape = self.module_name(-1, EMBED), (self.vocab_size, self.d_model)
        table = Matrix(name, -1, EMBED, "embedding", *shape, group=-1, lookup=True)
        return (table, *(m for run, layers in enumerate(self.runs()) for n in layers for m in self._of_layer(n, run)))

    def _of_layer(self, layer: int, run: int) -> Iterator[Matrix]:
        mlp = self.mlp_kinds if self.has_mlp(layer) else ()
        yield from self._dense((*self.attention_kinds, *mlp), layer, run)
        if self.experts is not None and not mlp:
            for kind in EXPERT_KINDS:
                shape, stored = self.matrix_shape(kind), self.names[kind]
                for e in range(self.experts.n):
                    name = stored.format(layer, e).removeprefix(self.prefix)
                    yield Matrix(name, layer, kind, READS[kind], *shape, group=run, expert=e, faces=self.faces(kind))

    def attention_matrices(self) -> tuple[Matrix, ...]:
        """The matrices as in `Architecture`, without going through the experts, of which there may be many."""
        runs = ((run, layer) for run, layers in enumerate(self.runs()) for layer in layers)
        found = (m for run, layer in runs for m in self._dense(self.attention_kinds, layer, run))
        return tuple(matrix for matrix in found if matrix.faces is not None)

    def _dense(self, kinds: Sequence[str], layer: int, run: int) -> Iterator[Matrix]:
        """Yields a layer's matrices of these kinds, each with its slices, without those of experts."""
        for kind in kinds:
            name = self.module_name(layer, kind)
            faces = self.faces(kind)
            yield Matrix(name, layer, kind, READS[kind], *self.matrix_shape(kind), group=run, faces=faces)
            for part in SLICES if kind == QKV else ():
                shape, faces = self.matrix_shape(part), self.faces(part)
                yield Matrix(
                    f"{name}.{part[0]}", layer, part, READS[part], *shape, group=run, part_of=name, faces=faces
                )

    @property
    def residual_width(self) -> int:
        return self.d_model

    def points(self) -> tuple[Point, ...]:
        return points_of_layers(self.n_layers, ("resid_pre", "attn_out", "mlp_out", "resid_post"))

    def has_mlp(self, layer: int) -> bool:
        """Returns whether the layer has an ordinary MLP, not experts."""
        return self.experts is None or layer in self.dense_layers

    def runs(self) -> list[tuple[int, ...]]:
        """Returns runs of neighbouring layers that all have experts, or all have none."""
        return [tuple(layers) for _, layers in groupby(range(self.n_layers), self.has_mlp)]

    # ---- weights ----

    def weight_shapes(self) -> dict[str, Any]:
        d, n = self.d_model, self.n_layers
        shapes: dict[str, Any] = {
            "embed": (self.vocab_size, d),
            "layers": self._norm_shapes(n) | self._matrix_shapes(self.attention_kinds, n),
            "norm": (d,),
        }
        if self.norm == "layer":
            shapes["norm_bias"] = (d,)
        if self.learned_positions is not None:
            shapes["positions"] = (self.learned_positions, d)
        if not self.tied:
            shapes["head"] = (d, self.vocab_size)
        mlp = self._matrix_shapes(self.mlp_kinds, n - self.n_expert_layers)
        if self.experts is None:
            shapes["layers"] |= mlp
            return shapes
        if self.dense_layers:
            shapes["dense"] = mlp
        e = self.experts
        leading = (self.n_expert_layers, e.n)
        matrices = {kind: (*leading, *self.matrix_shape(kind)) for kind in EXPERT_KINDS}
        shapes["experts"] = {"router": (self.n_expert_layers, d, e.n), **matrices}
        return shapes

    @property
    def n_expert_layers(self) -> int:
        return 0 if self.experts is None else self.n_layers - len(self.dense_layers)

    def _matrix_shapes(self, kinds: tuple[str, ...], n: int) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {kind: (n, *self.matrix_shape(kind)) for kind in kinds}
        return shapes | {f"{k}_bias": (n, self.matrix_shape(k)[1]) for k in kinds if k in self.biases}

    def _norm_shapes(self, n: int) -> dict[str, tuple[int, ...]]:
        names = {
            "before": ("input_norm", "post_norm"),
            "after": ("attention_out_norm", "mlp_out_norm"),
            "around": ("input_norm", "attention_out_norm", "post_norm", "mlp_out_norm"),
        }[self.norms]
        shapes: dict[str, tuple[int, ...]] = dict.fromkeys(names, (n, self.d_model))
        if self.norm == "layer":
            shapes |= {f"{name}_bias": (n, self.d_model) for name in names}
        heads = {"head": (1, 1), "all": (self.n_heads, self.n_kv_heads)}
        for name, count in zip(("q_norm", "k_norm"), heads.get(self.qk_norm or "", ()), strict=False):
            shapes[name] = (n, count * self.head_dim)
        return shapes

    def tensors(self) -> dict[str, Any]:
        """Returns tensor names in the structure of `weight_shapes`: ``<module>.weight``, and ``<module>.bias`` for
        biases."""
        layers = {
            "layers": tuple(range(self.n_layers)),
            "dense": self.dense_layers,
            "experts": tuple(n for n in range(self.n_layers) if not self.has_mlp(n)),
        }

        def tensor(name: str, numbers: tuple[int, ...] | None, is_matrix: bool) -> Tensors:
            array = name.removesuffix("_bias")
            ending = ".weight" if array == name else ".bias"
            stored = self.names[array] + ending
            return Tensors(
                (stored,) if numbers is None else tuple(stored.format(n) for n in numbers),
                stacked=numbers is not None,
                transposed=is_matrix and self.transposed,
            )

        found: dict[str, Any] = {}
        for name, shape in self.weight_shapes().items():
            if not isinstance(shape, dict):
                # An unembedding is a Linear in every family, even if the layers' matrices are kept as they are used.
                found[name] = (
                    Tensors((self.names["head"] + ".weight",), transposed=True)
                    if name == "head"
                    else tensor(name, None, False)
                )
            elif name == "experts":
                found[name] = {kind: self._expert_tensors(kind, layers[name]) for kind in shape}
            else:
                found[name] = {kind: tensor(kind, layers[name], len(of) == 3) for kind, of in shape.items()}
        return found

    @property
    def tied_tensors(self) -> tuple[str, str] | None:
        return (f"{self.names[EMBED]}.weight", f"{self.names['head']}.weight") if self.tied else None

    def untied(self) -> "TransformerConfig":
        return replace(self, tied=False)

    def _expert_tensors(self, kind: str, numbers: tuple[int, ...]) -> Tensors:
        assert self.experts is not None
        stored = self.names[kind] + ".weight"
        if kind == "router":
            return Tensors(tuple(stored.format(n) for n in numbers), True, True)
        names = tuple(stored.format(n, e) for n in numbers for e in range(self.experts.n))
        return Tensors(names, stacked=True, transposed=True, per_layer=self.experts.n)

    # ---- the rest of an architecture ----

    def describe(self) -> str:
        width = f"{self.n_layers} layers of width {self.d_model:,}, MLP {self.d_mlp:,}"
        kv = f" ({self.n_kv_heads} kv)" if self.fused is None else ""
        parts = [f"{self.title}, {width}, {self.n_heads} heads{kv}, vocabulary {self.vocab_size:,}"]
        if self.window is not None:
            where = f" in {len(self.window_layers)} layers" if len(self.window_layers) < self.n_layers else ""
            parts.append(f"window {self.window:,}{where}")
        if self.experts is not None:
            e = self.experts
            where = f" in {self.n_expert_layers} layers" if self.dense_layers else ""
            parts.append(f"{e.n} experts of width {e.d_mlp:,}{where}, {e.per_token} a token")
        return ", ".join(parts)

    @classmethod
    def from_fields(cls, raw: Mapping[str, Any]) -> "TransformerConfig":
        given = dict(raw)
        if "rms_norm_eps" in given:  # old runs, from when Llama was the only family, have it
            given["norm_eps"] = given.pop("rms_norm_eps")
        known = {f.name for f in fields(cls)}
        if unknown := given.keys() - known:
            raise UnsupportedConfig(f"unknown keys: {', '.join(sorted(unknown))}")
        for name, value in given.items():
            if isinstance(value, list):
                given[name] = tuple(value)
        if scaling := given.get("rope_scaling"):
            kinds = {"llama3": Llama3Scaling, "linear": LinearScaling, "yarn": YarnScaling}
            given["rope_scaling"] = kinds[scaling.get("rope_type", "llama3")](**scaling)
        if experts := given.get("experts"):
            given["experts"] = Experts(**{**experts, "dense_layers": tuple(experts["dense_layers"])})
        return cls(**given)


def check_numbers(config: TransformerConfig) -> None:
    """Raises UnsupportedConfig for numbers with which positions, norms or attention become NaN or nonsense."""
    positive = {name: getattr(config, name) for name in (
        "rope_theta", "query_scale", "clip", "attention_cap", "logit_cap", "embed_scale", "window",
    )}  # fmt: skip
    if config.rope_scaling is not None:
        positive |= {f"rope_scaling.{name}": value for name, value in asdict(config.rope_scaling).items()}
    if config.experts is not None:
        e = config.experts
        positive |= {"experts.n": e.n, "experts.per_token": e.per_token, "experts.d_mlp": e.d_mlp}
        if e.per_token > e.n:
            raise UnsupportedConfig(f"a token takes {e.per_token} experts, but there are {e.n}")
    for name, value in positive.items():
        if type(value) in (int, float) and not (math.isfinite(value) and value > 0):
            raise UnsupportedConfig(f"{name}: should be a positive number, not {value}")
    if not (math.isfinite(config.norm_eps) and config.norm_eps >= 0):
        raise UnsupportedConfig(f"norm_eps: should be a number of at least 0, not {config.norm_eps}")
    if isinstance(scaling := config.rope_scaling, Llama3Scaling):
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        if low >= high:
            raise UnsupportedConfig(
                f"rope_scaling.high_freq_factor: should be above low_freq_factor, {low}, not {high}"
            )
