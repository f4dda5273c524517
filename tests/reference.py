"""The math of `semantics.md`, sections 1-8, 11-13 and 15-19, N4 and N5, in NumPy float64, the tests' yardstick.

Nothing here is drawn: batches, sources, routes and uniform numbers are inputs. Every function takes
`Var` (differentiable) or `ndarray` and answers in kind, so one definition serves values and exact
gradients. Rule ids (F1, C2, ...) are those of `semantics.md`. `...` in a shape stands for the
leading axes of an activation, `(batch, seq)` or `(batch,)`; `lead` is their sizes, N their product.
"""

import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray
Tree = Any  # nested dicts and lists with arrays or Vars at the leaves

# ---- Reverse-mode tape ----


class Var:
    """A float64 array that remembers how it was made: `parents` holds (input, vjp) pairs."""

    __array_ufunc__ = None  # ndarray (op) Var is answered by Var's reflected operator

    def __init__(self, value: Any, parents: Sequence[tuple["Var", Callable]] = ()) -> None:
        self.value = np.asarray(value, dtype=np.float64)
        self.parents = parents

    shape = property(lambda self: self.value.shape)
    ndim = property(lambda self: self.value.ndim)

    def __add__(self, other: "Num") -> "Num":
        a, b = value(self), value(other)
        return custom(
            a + b,
            (self, lambda g: unbroadcast(g, a.shape)),
            (other, lambda g: unbroadcast(g, b.shape)),
        )

    def __mul__(self, other: "Num") -> "Num":
        a, b = value(self), value(other)
        return custom(
            a * b,
            (self, lambda g: unbroadcast(g * b, a.shape)),
            (other, lambda g: unbroadcast(g * a, b.shape)),
        )

    def __matmul__(self, other: "Num") -> "Num":
        return matmul(self, other)

    def __rmatmul__(self, other: Array) -> "Num":
        return matmul(other, self)

    def __pow__(self, p: float) -> "Num":
        return custom(self.value**p, (self, lambda g: g * p * self.value ** (p - 1)))

    __radd__ = __add__
    __rmul__ = __mul__

    def __neg__(self) -> "Num":
        return self * -1.0

    def __sub__(self, other: "Num") -> "Num":
        return self + other * -1.0

    def __rsub__(self, other: Array) -> "Num":
        return self * -1.0 + other

    def __truediv__(self, other: "Num") -> "Num":
        return self * (other**-1.0 if isinstance(other, Var) else 1.0 / np.asarray(other))

    def __rtruediv__(self, other: Array) -> "Num":
        return self**-1.0 * other

    def __getitem__(self, index: Any) -> "Num":
        def vjp(g: Array) -> Array:
            out = np.zeros(self.shape)
            np.add.at(out, index, g)
            return out

        return custom(self.value[index], (self, vjp))

    def sum(self, axis: int | tuple[int, ...] | None = None, keepdims: bool = False) -> "Num":
        kept = self.value.sum(axis=axis, keepdims=True).shape
        return custom(
            self.value.sum(axis=axis, keepdims=keepdims),
            (self, lambda g: np.broadcast_to(g.reshape(kept), self.shape)),
        )

    def mean(self, axis: int | tuple[int, ...] | None = None, keepdims: bool = False) -> "Num":
        out = self.sum(axis, keepdims)
        return out * (out.value.size / self.value.size)

    def reshape(self, *shape: int) -> "Num":
        return custom(self.value.reshape(*shape), (self, lambda g: g.reshape(self.shape)))

    def swapaxes(self, i: int, j: int) -> "Num":
        return custom(self.value.swapaxes(i, j), (self, lambda g: g.swapaxes(i, j)))


Num = Var | Array


def value(x: Num) -> Array:
    """The float64 array itself; as a step of the math it is the stop-gradient."""
    return x.value if isinstance(x, Var) else np.asarray(x, dtype=np.float64)


def custom(result: Array, *inputs: tuple[Num, Callable[[Array], Array]]) -> Num:
    """A node with value `result` and one vjp (cotangent -> cotangent) per input."""
    parents = [(x, vjp) for x, vjp in inputs if isinstance(x, Var)]
    return Var(result, parents) if parents else result


def unbroadcast(g: Array, shape: tuple[int, ...]) -> Array:
    """Sum a cotangent over the axes along which its array was broadcast."""
    g = g.sum(axis=tuple(range(g.ndim - len(shape))))
    return g.sum(axis=tuple(i for i, n in enumerate(shape) if n == 1), keepdims=True)


def matmul(x: Num, y: Num) -> Num:
    a, b = value(x), value(y)
    return custom(
        a @ b,
        (x, lambda g: unbroadcast(g @ b.swapaxes(-1, -2), a.shape)),
        (y, lambda g: unbroadcast(a.swapaxes(-1, -2) @ g, b.shape)),
    )


def exp(x: Num) -> Num:
    out = np.exp(value(x))
    return custom(out, (x, lambda g: g * out))


def log(x: Num) -> Num:
    return custom(np.log(value(x)), (x, lambda g: g / value(x)))


def erf(x: Num) -> Num:
    v = value(x)
    out = np.vectorize(math.erf, otypes=[np.float64])(v)
    return custom(out, (x, lambda g: g * (2.0 / math.sqrt(math.pi)) * np.exp(-v * v)))


def sigmoid(x: Num) -> Num:
    out = 0.5 + 0.5 * np.tanh(0.5 * value(x))
    return custom(out, (x, lambda g: g * out * (1.0 - out)))


def relu(x: Num) -> Num:
    """Derivative 0 at 0."""
    return custom(np.maximum(value(x), 0.0), (x, lambda g: g * (value(x) > 0)))


def log_softmax(x: Num) -> Num:
    """Over the last axis, shifted by the maximum."""
    shifted = value(x) - value(x).max(axis=-1, keepdims=True)
    out = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return custom(out, (x, lambda g: g - np.exp(out) * g.sum(axis=-1, keepdims=True)))


def concatenate(xs: Sequence[Num], axis: int) -> Num:
    def vjp(lo: int, hi: int) -> Callable[[Array], Array]:
        return lambda g: g.take(range(lo, hi), axis=axis)

    ends = np.cumsum([0] + [x.shape[axis] for x in xs])
    inputs = [(x, vjp(lo, hi)) for x, lo, hi in zip(xs, ends[:-1], ends[1:], strict=True)]
    return custom(np.concatenate([value(x) for x in xs], axis=axis), *inputs)


def broadcast_to(x: Num, shape: tuple[int, ...]) -> Num:
    return custom(np.broadcast_to(value(x), shape), (x, lambda g: unbroadcast(g, x.shape)))


def tree_map(f: Callable, tree: Tree, *rest: Tree) -> Tree:
    if isinstance(tree, dict):
        return {k: tree_map(f, v, *(r[k] for r in rest)) for k, v in tree.items()}
    if isinstance(tree, list):
        return [tree_map(f, *vs) for vs in zip(tree, *rest, strict=True)]
    return f(tree, *rest)


def tree_leaves(tree: Tree) -> list:
    leaves: list = []
    tree_map(leaves.append, tree)
    return leaves


def gradients(loss: Var, tree: Tree) -> Tree:
    """d loss / d leaf for every Var of `tree`; cotangents are summed over all uses of a node
    before its vjp runs (which C1 needs, its derivative depends on their sign)."""
    order: list[Var] = []
    seen: set[int] = set()
    stack = [(loss, False)]
    while stack:
        node, done = stack.pop()
        if done:
            order.append(node)
        elif id(node) not in seen:
            seen.add(id(node))
            stack += [(node, True)] + [(parent, False) for parent, _ in node.parents]
    cotangent = {id(loss): np.ones(loss.shape)}
    for node in reversed(order):
        for parent, vjp in node.parents:
            cotangent[id(parent)] = cotangent.get(id(parent), 0.0) + vjp(cotangent[id(node)])
    return tree_map(lambda x: cotangent.get(id(x), np.zeros(x.shape)), tree)


# ---- Section 2: sites ----


def delta_component(W: Num, V: Num, U: Num) -> Num:
    """Delta = W - VU, `[d_in, d_out]`."""
    return W - V @ U


def masked_site(
    x: Num, W: Num, V: Num, U: Num, mask: Num, delta: Num, route: Num, bias: Num | None = None, added: Num | None = None
) -> Num:
    """F1: x `[..., d_in]`, mask `[..., C]`, delta and route `[...]` -> `[..., d_out]`. F8: added `[..., C]`."""
    through = (x @ V) * mask if added is None else (x @ V) * mask + added
    decomposed = through @ U + delta[..., None] * (x @ delta_component(W, V, U))
    y = route[..., None] * decomposed + (1.0 - route[..., None]) * (x @ W)
    return y if bias is None else y + bias


def masked_site_without_delta(
    x: Num, W: Num, V: Num, U: Num, mask: Num, delta: Num, route: Num, bias: Num | None = None
) -> Num:
    """F2: the same function as F1, without forming Delta."""
    g = route[..., None] * (mask - delta[..., None])
    a = 1.0 - route * (1.0 - delta)
    y = a[..., None] * (x @ W) + ((x @ V) * g) @ U
    return y if bias is None else y + bias


def tie(components: dict, tied_weights: Sequence[Sequence[str]] | None) -> dict:
    """T4: adds to the stored pairs, for every tied [s1, s2], V2 = U1^T and U2 = V1^T as views."""
    views = {
        s2: {"V": components[s1]["U"].swapaxes(0, 1), "U": components[s1]["V"].swapaxes(0, 1)}
        for s1, s2 in tied_weights or []
    }
    return {**components, **views}


# ---- Section 12: where the site of an expert exists ----

NO_EXPERTS: Mapping[str, Array] = MappingProxyType({})


def expert_of(module: str) -> tuple[str, int] | None:
    """(mixture, number of the expert) of an expert's matrix, None for any other matrix."""
    found = re.match(r"(.+)\.experts\.(\d+)\.", module)
    return (found[1], int(found[2])) if found else None


def existence(sites: Iterable[str], chosen: Mapping[str, Array]) -> dict[str, Array]:
    """X3: {expert's site: bool `[...]`} from the S of every mixture, bool `[..., E]`. The other sites, which exist
    everywhere, have no entry."""
    experts = {s: found for s in sites if (found := expert_of(s))}
    return {s: chosen[mixture][..., expert] for s, (mixture, expert) in experts.items()}


def where_it_exists(x: Num, site: str, exists: Mapping[str, Array]) -> Num:
    """X4: x `[..., d]` at the n positions where the site exists, `[n, d]`; x itself for a site without an entry."""
    return x[exists[site]] if site in exists else x


# ---- Section 3: causal importance ----

ALPHA = 0.01  # C1, C2
BETA = 10.0  # C3, swish_hard
FP32_EPS = float(np.finfo(np.float32).eps)


def lower_leaky_vjp(z: Array, g: Array) -> Array:
    """C1: the cotangent of z for the cotangent g of lambda; the tie z = 0 is in the lower branch."""
    below = np.where(g < 0, ALPHA * g, 0.0)
    return np.where(z <= 0, below, np.where(z <= 1, g, 0.0))


def hard(z: Array) -> Array:
    return np.clip(z, 0.0, 1.0)


def hard_derivative(z: Array) -> Array:
    """C3: 1 on the closed interval [0, 1]."""
    return np.where((z >= 0) & (z <= 1), 1.0, 0.0)


def upper_leaky(z: Array) -> Array:
    """C2."""
    return np.where(z > 1, 1.0 + ALPHA * (z - 1.0), hard(z))


def upper_leaky_derivative(z: Array) -> Array:
    """C2: 0 for z < 0, 1 on the closed interval [0, 1], alpha above."""
    return np.where(z > 1, ALPHA, hard_derivative(z))


def two_sided_leaky(z: Array) -> Array:
    """C3: alpha z below 0, z on [0, 1], 1 + alpha (z - 1) above."""
    return np.where(z < 0, ALPHA * z, upper_leaky(z))


def two_sided_leaky_derivative(z: Array) -> Array:
    """C3: 1 on the closed interval [0, 1], alpha outside."""
    return np.where(hard_derivative(z) > 0, 1.0, ALPHA)


def normal_derivative(z: Array) -> Array:
    return sigmoid(z) * sigmoid(-z)


def swish_hard(z: Array) -> Array:
    """C3: 1/2 + d(u - 1/2) - s(u) + s(u + 1/2) - d(u), u = z - 1/2."""

    def s(x: Array) -> Array:
        return x * sigmoid(BETA * x)

    def d(x: Array) -> Array:
        return x * sigmoid(-BETA * x)

    u = z - 0.5
    return 0.5 + d(u - 0.5) - s(u) + s(u + 0.5) - d(u)


def swish_hard_derivative(z: Array) -> Array:
    """C3: with s'(x) = sig(bx) + bx sig(bx) sig(-bx) and d'(x) = 1 - s'(x)."""

    def s(x: Array) -> Array:
        return sigmoid(BETA * x) + BETA * x * sigmoid(BETA * x) * sigmoid(-BETA * x)

    u = z - 0.5
    return (1.0 - s(u - 0.5)) - s(u) + s(u + 0.5) - (1.0 - s(u))


UPPER: dict[str, tuple[Callable[[Array], Array], Callable[[Array], Array]]] = {
    "normal": (sigmoid, normal_derivative),
    "hard": (hard, hard_derivative),
    "leaky_hard": (upper_leaky, upper_leaky_derivative),
    "upper_leaky_hard": (upper_leaky, upper_leaky_derivative),
    "swish_hard": (swish_hard, swish_hard_derivative),
    "two_sided_leaky_hard": (two_sided_leaky, two_sided_leaky_derivative),
}


def upper(z: Num, sigmoid_type: str) -> Num:
    """C2, C3: upsilon(z), any shape."""
    function, derivative = UPPER[sigmoid_type]
    return custom(function(value(z)), (z, lambda g: g * derivative(value(z))))


def lower(z: Num, sigmoid_type: str) -> Num:
    """C1, C3: lambda(z), any shape; differs from upsilon for `leaky_hard` only."""
    if sigmoid_type != "leaky_hard":
        return upper(z, sigmoid_type)
    return custom(hard(value(z)), (z, lambda g: lower_leaky_vjp(value(z), g)))


def gelu(x: Num) -> Num:
    """C4: exact."""
    return 0.5 * x * (1.0 + erf(x * math.sqrt(0.5)))


def rms_norm(x: Num, eps: float) -> Num:
    """Weightless, over the last axis."""
    return x * ((x * x).mean(axis=-1, keepdims=True) + eps) ** -0.5


def affine(layer: dict, x: Num) -> Num:
    """`{w [d_in, d_out], b [d_out]}`, or one such layer per component: `{w [C, d_in, d_out],
    b [C, d_out]}` with x `[..., C or 1, 1, d_in]`."""
    w, b = layer["w"], layer["b"]
    return x @ w + (b.reshape(b.shape[0], 1, b.shape[1]) if w.ndim == 3 else b)


def hidden_layer(layer: dict, x: Num) -> Num:
    """C4: affine + GELU; C9: of `{gate, up}`, both affine, silu of the gate times up."""
    if "gate" not in layer:
        return gelu(affine(layer, x))
    gate = affine(layer["gate"], x)
    return gate * sigmoid(gate) * affine(layer["up"], x)


def mlp(layers: list[dict], x: Num) -> Num:
    """C4, C9: the hidden layers, and a last one that is only affine."""
    for layer in layers[:-1]:
        x = hidden_layer(layer, x)
    return affine(layers[-1], x)


def scalar_mlp_ci(layers: list[dict], x: Num, V: Num) -> Num:
    """C4 `mlp`, C5: component c's own MLP on x·V[:, c], V not detached.
    Layers `{w [C, d_in, d_out], b [C, d_out]}`, first d_in and last d_out 1 -> `[..., C]`."""
    inner = x @ V
    return mlp(layers, inner.reshape(*inner.shape, 1, 1)).reshape(*inner.shape)


def vector_mlp_ci(layers: list[dict], x: Num) -> Num:
    """C4 `vector_mlp`: component c's own MLP on x. Layers as in `scalar_mlp_ci`, first d_in d."""
    out = mlp(layers, x.reshape(*x.shape[:-1], 1, 1, x.shape[-1]))
    return out.reshape(*out.shape[:-2])


def rope_frequencies(head_dim: int, base: float, scaling: Mapping[str, float] | None = None) -> Array:
    """`[head_dim / 2]`: base^(-2i/head_dim), optionally with Llama 3's scaling of long waves."""
    freq = base ** (-np.arange(0, head_dim, 2) / head_dim)
    if scaling is None:
        return freq
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] * freq / (2.0 * np.pi)
    keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return keep * freq + (1.0 - keep) * freq / scaling["factor"]


def rotary(x: Num, freq: Array) -> Num:
    """Rotate-half: x `[..., T, head_dim]`, position t by the angles t · freq."""
    half = x.shape[-1] // 2
    angle = np.arange(x.shape[-2])[:, None] * np.concatenate([freq, freq])
    rotated = concatenate([-x[..., half:], x[..., :half]], axis=-1)
    return x * np.cos(angle) + rotated * np.sin(angle)


def attention(q: Num, k: Num, v: Num, n_heads: int, freq: Array, causal: bool) -> Num:
    """q `[B, T, n_heads·hd]`, k and v `[B, T, n_kv·hd]` (query head h reads key head
    h // (n_heads / n_kv)) -> `[B, T, n_heads·hd]`."""
    B, T, width = q.shape
    head_dim = width // n_heads
    n_kv = k.shape[-1] // head_dim
    q, k, v = (x.reshape(B, T, -1, head_dim).swapaxes(1, 2) for x in (q, k, v))
    q, k = rotary(q, freq), rotary(k, freq)
    group = np.arange(n_heads) // (n_heads // n_kv)
    scores = q @ k[:, group].swapaxes(-1, -2) * head_dim**-0.5
    if causal:
        scores = scores + np.where(np.tril(np.ones((T, T))) > 0, 0.0, -np.inf)
    return (exp(log_softmax(scores)) @ v[:, group]).swapaxes(1, 2).reshape(B, T, width)


def transformer_ci(params: dict, xs: Iterable[Num], n_heads: int, rope_base: float, causal: bool = False) -> Num:
    """C4 `global_shared_transformer`, C9: the sites' inputs `[..., d_s]` -> `[..., sum of C]`.
    `{input {w, b}, blocks [{q, o: [d_model, d_model], k, v: [d_model, n_kv_heads · head width], mlp [{w, b}, ...]}],
    head {w, b}}`; with SwiGLU the hidden layers of mlp are {gate {w, b}, up {w, b}}; a block with learned norm scales
    has `norms {attn [d_model], mlp [d_model]}`."""
    x = concatenate([rms_norm(x, FP32_EPS) for x in xs], axis=-1)
    lead = x.shape[:-1]
    h = affine(params["input"], x if len(lead) == 2 else x.reshape(lead[0], 1, x.shape[-1]))
    freq = rope_frequencies(h.shape[-1] // n_heads, rope_base)
    for block in params["blocks"]:
        scales = block.get("norms", {"attn": 1.0, "mlp": 1.0})
        n = rms_norm(h, FP32_EPS) * scales["attn"]
        mixed = attention(n @ block["q"], n @ block["k"], n @ block["v"], n_heads, freq, causal)
        h = h + mixed @ block["o"]
        h = h + mlp(block["mlp"], rms_norm(h, FP32_EPS) * scales["mlp"])
    logits = affine(params["head"], h)
    return logits.reshape(*lead, logits.shape[-1])


def attention_settings(ci_config: dict) -> dict:
    """Those of `transformer_ci`, from the configuration."""
    own = ci_config["simple_transformer_ci_cfg"]["attn_config"]
    rope_base, causal = own.get("rope_base", 10000.0), own.get("causal", False)
    return {"n_heads": own["n_heads"], "rope_base": rope_base, "causal": causal}


def chunks_of_layers(layers: Mapping[str, int], layers_per_chunk: int) -> list[list[str]]:
    """C6: the groups of sites, from every site's layer in canonical order."""
    with_sites = sorted(set(layers.values()))
    starts = range(0, len(with_sites), layers_per_chunk)
    chunks = [with_sites[start : start + layers_per_chunk] for start in starts]
    return [[s for s, layer in layers.items() if layer in chunk] for chunk in chunks]


NO_POINTS: Mapping[str, Array] = MappingProxyType({})


def tap_boundaries(input_tap: str | dict, sites: Iterable[str]) -> list[int]:
    """C10: the l of every resid(l) that a group of these sites reads."""
    blocks = sorted({int(found[1]) for s in sites if (found := re.search(r"(?:^|\.)layers\.(\d+)\.", s))})
    assert blocks, f"no block has a site among {list(sites)}"
    match input_tap:
        case "first_block_resid":
            return blocks[:1]
        case "all_block_resids":
            return blocks
        case {"residual_boundaries": [_, *_] as offsets}:
            assert all(a < b for a, b in itertools.pairwise([-1, *offsets])), "offsets: from 0, distinct, increasing"
            return [blocks[0] + offset for offset in offsets]
    raise ValueError(input_tap)


def read_by_group(
    ci_config: dict, sites: Sequence[str], inputs: Mapping[str, Num], points: Mapping[str, Array]
) -> list[Num]:
    """C4, C6, C10: what the one function of these sites reads, `[..., d]` each, not normalised."""
    tap, patterns = ci_config.get("input_tap"), ci_config.get("input_patterns")
    if tap is not None:
        assert not patterns, "a tap takes the place of the inputs that patterns choose from"
        return [value(points[f"resid.{boundary}"]) for boundary in tap_boundaries(tap, sites)]
    read = [inputs[s] for s in sites if any(fnmatch(s, p) for p in patterns or ["*"])]
    assert read, f"nothing of {sites} is read"
    return read


def chunkwise_ci(
    ci_config: dict,
    params: list,
    inputs: dict[str, Num],
    n_components: dict[str, int],
    points: Mapping[str, Array] = NO_POINTS,
) -> dict:
    """C6 `chunkwise_transformer`: logits `[..., C_s]` per site. `groups` of the configuration: the sites of each group.
    params: of every group, those of `transformer_ci`; `points` as in `function_logits`."""
    settings = attention_settings(ci_config)
    logits: dict[str, Num] = {}
    for group, own in zip(ci_config["groups"], params, strict=True):
        joint = transformer_ci(own, read_by_group(ci_config, group, inputs, points), **settings)
        ends = np.cumsum([0] + [n_components[s] for s in group])
        logits |= {s: joint[..., lo:hi] for s, lo, hi in zip(group, ends[:-1], ends[1:], strict=True)}
    return {s: logits[s] for s in inputs}


def component_readout(own: dict, h: Num) -> Num:
    """C7: what is added to the logits, `[..., C]`, for h = xV `[..., C]`. own: {s_plus, a_plus, b_plus, s_minus,
    a_minus, b_minus, b}, each `[C]`."""
    plus = upper(own["a_plus"] * h + own["b_plus"], "two_sided_leaky_hard")
    minus = upper(own["a_minus"] * -h + own["b_minus"], "two_sided_leaky_hard")
    return own["s_plus"] * plus + own["s_minus"] * minus + own["b"]


def percentile(sorted_values: Array, share: float) -> float:
    """C8: of n values in order, the one with number share (n - 1), between two of them in proportion."""
    at = share * (len(sorted_values) - 1)
    below = math.floor(at)
    above = min(below + 1, len(sorted_values) - 1)
    return float(sorted_values[below] + (at - below) * (sorted_values[above] - sorted_values[below]))


def initial_readout(h: Array) -> dict[str, Array]:
    """C8: the seven vectors of a site with h `[n, C]` at the n positions of the batch of step 0 where it exists."""
    C = h.shape[-1]
    q = np.array([percentile(np.sort(np.abs(h[:, c])), 0.999) if len(h) else 0.0 for c in range(C)])
    scale = 1.0 / np.maximum(q, q.max() / 1000.0) if q.max() > 0 else np.ones(C)
    zeros = {name: np.zeros(C) for name in ("s_plus", "b_plus", "s_minus", "b_minus", "b")}
    return zeros | {"a_plus": scale, "a_minus": scale.copy()}


def ci_logits(
    ci_config: dict,
    params: Tree,
    inputs: dict[str, Num],
    components: dict,
    reads: Mapping[str, Num] | None = None,
    points: Mapping[str, Array] = NO_POINTS,
) -> dict:
    """C4, C6, C7, C10: logits `[..., C_s]` per site. params and points as in `function_logits`; with a component
    readout params are {function: those, readout: {site: see `component_readout`}}. `reads`: what the sites multiply, if
    it is not `inputs` (F7)."""
    if not ci_config.get("component_readout"):
        return function_logits(ci_config, params, inputs, components, points)
    logits = function_logits(ci_config, params["function"], inputs, components, points)
    reads = inputs if reads is None else reads
    return {s: f + component_readout(params["readout"][s], reads[s] @ components[s]["V"]) for s, f in logits.items()}


def function_logits(
    ci_config: dict,
    params: Tree,
    inputs: dict[str, Num],
    components: dict,
    points: Mapping[str, Array] = NO_POINTS,
) -> dict:
    """C4, C6, C10: logits `[..., C_s]` per site. `inputs`: clean activations in canonical order (F5), zeros where a
    site does not exist (X5); so the logits of a layerwise function mean nothing there. `points`: what `clean_points`
    gives, of which a tap reads the residuals; the values of `inputs` are then not read.
    Layerwise `params`: {site: layers}; global: a layer list, the transformer's dict or that of the blocks; chunkwise: a
    transformer's dict for each group."""
    match ci_config["fn_type"]:
        case "mlp":
            return {s: scalar_mlp_ci(params[s], x, components[s]["V"]) for s, x in inputs.items()}
        case "vector_mlp":
            return {s: vector_mlp_ci(params[s], x) for s, x in inputs.items()}
        case "shared_mlp":
            return {s: mlp(params[s], x) for s, x in inputs.items()}
        case "global_shared_mlp":
            joint = mlp(params, concatenate(read_by_group(ci_config, list(inputs), inputs, points), axis=-1))
        case "global_shared_transformer":
            read = read_by_group(ci_config, list(inputs), inputs, points)
            joint = transformer_ci(params, read, **attention_settings(ci_config))
        case "chunkwise_transformer":
            n_components = {s: components[s]["V"].shape[1] for s in inputs}
            return chunkwise_ci(ci_config, params, inputs, n_components, points)
    ends = np.cumsum([0] + [components[s]["V"].shape[1] for s in inputs])
    return {s: joint[..., lo:hi] for s, lo, hi in zip(inputs, ends[:-1], ends[1:], strict=True)}


def causal_importance(
    config: dict,
    params: Tree,
    inputs: dict[str, Num],
    components: dict,
    exists: Mapping[str, Array] = NO_EXPERTS,
    reads: Mapping[str, Num] | None = None,
    points: Mapping[str, Array] = NO_POINTS,
) -> tuple[dict, dict]:
    """C1-C7, C9, C10, X4: ({site: lambda}, {site: upsilon}) `[..., C_s]`, 0 where a site does not exist; `config` as in
    `training_step`, `exists` as in `existence`, `reads` as in `ci_logits`, `points` as in `function_logits`."""
    logits = ci_logits(config["ci_config"], params, inputs, components, reads, points)
    kind = config.get("sigmoid_type", "leaky_hard")

    def squashed(function: Callable[[Num, str], Num]) -> dict:
        values = {s: function(z, kind) for s, z in logits.items()}
        return {s: v * exists[s][..., None] if s in exists else v for s, v in values.items()}

    return squashed(lower), squashed(upper)


# ---- Section 4: masks. A site's source is {components [..., C], delta [...]}; no delta key: delta = 0 ----


def component_mask(lam: Num, source: Num) -> Num:
    """M1."""
    return lam + (1.0 - lam) * source


def expand_scope(source: Num, lead: tuple[int, ...]) -> Num:
    """A2: `[n, 1 or T, ...]` -> `lead + ...`; source i serves rows i, i + n, ..."""
    copies, rest = divmod(lead[0], source.shape[0])
    assert rest == 0, "the number of sources must divide the batch"
    tiled = concatenate([source] * copies, axis=0)
    return broadcast_to(tiled, lead + source.shape[len(lead) :])


def constant_source(v: float, lead: tuple[int, ...]) -> dict[str, Array]:
    """M3: every component's source is v, delta is 0."""
    return {"components": np.full((*lead, 1), v)}


def site_masks(lam: Num, source: dict[str, Num]) -> tuple[Num, Num]:
    """M1, M2, M5: (mask `[..., C]`, delta `[...]`) from lambda `[..., C]` and a source."""
    lead = lam.shape[:-1]
    mask = component_mask(lam, expand_scope(source["components"], lead))
    return mask, expand_scope(source["delta"], lead) if "delta" in source else np.zeros(lead)


# ---- Section 5: reconstruction ----


def kl_error(clean: Array, masked: Num) -> Num:
    """R1, language model: logits `[..., vocab]` -> sum of KL(clean || masked) over N."""
    log_p, log_q = log_softmax(clean), log_softmax(masked)
    n_positions = math.prod(clean.shape[:-1])
    return (np.exp(log_p) * (log_p - log_q)).sum() / n_positions


def mse_error(clean: Array, masked: Num) -> Num:
    """R1, toy model: mean over all elements."""
    return ((masked - clean) ** 2).mean()


def hidden_acts_error(clean: dict[str, Array], masked: dict[str, Num], exists: Mapping[str, Array] = NO_EXPERTS) -> Num:
    """R2, X4: site outputs; squared differences over the number of elements, all sites together, where they exist."""
    differences = [where_it_exists(masked[s] - clean[s], s, exists) for s in masked]
    return sum((d**2).sum() for d in differences) / sum(value(d).size for d in differences)


def uniform_k_subset(k: Array, scores: Array) -> Array:
    """R3: k `[...]` in {1..n}, scores `[n, ...]` -> routes `[n, ...]`: 1 at the k smallest scores
    of each position (equal scores: the earlier site first)."""
    rank = np.argsort(np.argsort(scores, axis=0, kind="stable"), axis=0, kind="stable")
    return (rank < k).astype(np.float64)


def static_probability(u: Array, p: float) -> Array:
    """R3: u ~ U[0, 1) of any shape -> route 1 with probability p."""
    return (u < p).astype(np.float64)


class Row(NamedTuple):
    """A row of the table of section 5: live sets, source kind, draws per step, R2's exception."""

    live: str
    source: str
    samples: str = "one"
    hidden_acts: bool = False


RECONSTRUCTION: dict[str, Row] = {
    "UnmaskedReconLoss": Row("all", "ones"),
    "CIMaskedReconLoss": Row("all", "zeros"),
    "CIMaskedReconSubsetLoss": Row("all", "zeros"),
    "CIMaskedReconLayerwiseLoss": Row("each", "zeros"),
    "StochasticReconLoss": Row("all", "stochastic", "n_mask_samples"),
    "StochasticReconSubsetLoss": Row("all", "stochastic", "n_mask_samples"),
    "StochasticReconLayerwiseLoss": Row("each", "stochastic", "n_mask_samples"),
    "ChunkwiseSubsetReconLoss": Row("chunks", "stochastic", "n_samples"),
    "PGDReconLoss": Row("all", "fresh"),
    "PGDReconSubsetLoss": Row("all", "fresh"),
    "PGDReconLayerwiseLoss": Row("each", "fresh"),
    "PersistentPGDReconLoss": Row("all", "persistent"),  # R5: routed everywhere, computed once
    "PersistentPGDReconSubsetLoss": Row("all", "persistent", "n_samples"),
    "StochasticHiddenActsReconLoss": Row("all", "stochastic", "n_mask_samples", True),
    "CIHiddenActsReconLoss": Row("all", "zeros", hidden_acts=True),
}


MERGED: dict[str, Row] = {  # A8, A9
    "MergedStochasticSubsetPPGDReconLoss": Row("all", "merged"),
    "MergedStochasticSubsetPooledPPGDReconLoss": Row("all", "merged"),
}
ROWS = RECONSTRUCTION | MERGED
KEPT = ("persistent", "merged")  # whose sources are in the state


def chunks(sites: Sequence[str], size: int) -> list[tuple[str, ...]]:
    """R4: consecutive groups in canonical order, the last one possibly smaller."""
    return [tuple(sites[i : i + size]) for i in range(0, len(sites), size)]


def live_sets(loss: dict, sites: Sequence[str], n_mask_samples: int) -> list[tuple[str, ...]]:
    """The live sites of each forward of a schema loss; its length is the number of forwards.
    Draws are the outer loop, sites or chunks the inner one."""
    row = ROWS[loss["type"]]
    sizes = {"all": len(sites), "each": 1, "chunks": loss.get("sites_per_chunk")}
    draws = {"one": 1, "n_mask_samples": n_mask_samples, "n_samples": loss.get("n_samples", 1)}
    return chunks(sites, sizes[row.live]) * draws[row.samples]


Linear = Callable[[str, Num, Array], Num]  # (module, x, W) -> y
Target = Callable[[Linear], Num]  # the target on a fixed batch, every x @ W done by the argument
Choose = Callable[[str, Array], Array]  # (mixture, the S of its own router) -> the S it uses, both bool [..., E]
Hold = Callable[[str, Array], Num]  # (FEATURES or a bias, its own value) -> the value it uses
See = Callable[[str, Num], Any]  # told (point, activation) at every point of R6
FEATURES = "features"


@dataclass(frozen=True)
class MixtureTarget:
    """A `Target` that may have mixtures of experts (section 12). Called as any other, each uses its own choice."""

    run: Callable[..., Num]  # of (Linear, Choose), and See if it has points

    def __call__(self, linear: Linear) -> Num:
        return self.run(linear, lambda mixture, own: own)


@dataclass(frozen=True)
class ToyTarget:
    """A `Target` whose features and biases can be leaves (E1). Called as any other, it uses its own."""

    run: Callable[..., Num]  # of (Linear, Hold), and See if it has points

    def __call__(self, linear: Linear) -> Num:
        return self.run(linear, lambda name, own: own)


def run_target(
    target: Target,
    linear: Linear,
    choose: Choose,
    hold: Hold = lambda name, own: own,
    see: See | None = None,
) -> Num:
    watching = () if see is None else (see,)
    if isinstance(target, MixtureTarget):
        return target.run(linear, choose, *watching)
    return target.run(linear, hold, *watching) if isinstance(target, ToyTarget) else target(linear)


PRE_IDENTITY = ".pre_identity"
EMBEDDING = "embed_tokens"


def with_identity_sites(target: Target, sites: Iterable[str]) -> Target:
    """The same network with a matrix `<module>.pre_identity`, the identity, put before every module for which `sites`
    names one: it multiplies what the module reads, and the module (no other) reads its product."""
    modules = {s.removesuffix(PRE_IDENTITY) for s in sites if s.endswith(PRE_IDENTITY)}

    def extended(linear: Linear) -> Linear:
        def apply(module: str, x: Num, W: Array) -> Num:
            if module in modules:
                x = linear(module + PRE_IDENTITY, x, np.eye(W.shape[0]))
            return linear(module, x, W)

        return apply

    if isinstance(target, MixtureTarget | ToyTarget):
        return replace(target, run=lambda linear, *hooks: target.run(extended(linear), *hooks))
    return lambda linear: target(extended(linear))


class Clean(NamedTuple):
    """What the clean pass leaves: output, and {site: what the CI function reads}, {site: x @ W}, {site: W}, {site: x};
    of the activations, zeros where a site does not exist. Of experts, besides (X3): `exists`, {expert's site: bool
    [...]}, and `chosen`, {mixture with such sites: S, bool [..., E]}."""

    output: Array
    inputs: dict[str, Array]
    outputs: dict[str, Array]
    weights: dict[str, Array]
    reads: dict[str, Array]
    exists: Mapping[str, Array] = NO_EXPERTS
    chosen: Mapping[str, Array] = NO_EXPERTS


def clean_pass(target: Target, sites: Sequence[str]) -> Clean:
    """F4, F5, X3: the forward with no live site, recorded at the sites."""
    seen: dict[str, tuple[Array, Array, Array, Array]] = {}
    every_choice: dict[str, Array] = {}

    def linear(module: str, x: Array, W: Array) -> Array:
        y = x @ W
        seen[module] = (y if module.endswith(EMBEDDING) else x, y, W, x)  # F7
        return y

    def choose(mixture: str, own: Array) -> Array:
        every_choice[mixture] = own
        return own

    output = run_target(target, linear, choose)
    with_sites = {found[0] for s in sites if (found := expert_of(s))}
    chosen = {mixture: S for mixture, S in every_choice.items() if mixture in with_sites}
    records = ({s: seen[s][i] for s in sites} for i in range(4))
    return Clean(output, *records, exists=existence(sites, chosen), chosen=chosen)


def clean_points(target: Target) -> dict[str, Array]:
    """R6, C10: {point: activation `[..., d]`} of the clean pass."""
    seen: dict[str, Array] = {}
    run_target(target, lambda module, x, W: x @ W, lambda mixture, own: own, see=seen.__setitem__)
    return seen


def masked_pass(
    target: Target,
    components: dict,
    masks: dict,
    deltas: dict,
    routes: dict,
    chosen: Mapping[str, Array] = NO_EXPERTS,
    see: See | None = None,
    added: Mapping[str, Num] | None = None,
) -> tuple[Num, dict[str, Num]]:
    """F1, F3, X3, F8: the sites in `masks` are live, all other modules compute x @ W. No entry in `routes`:
    routed everywhere; no entry in `chosen`: the mixture chooses by itself. -> (output, {live site: its output})."""
    outputs: dict[str, Num] = {}

    def linear(module: str, x: Num, W: Array) -> Num:
        if module not in masks:
            return x @ W
        V, U, m, delta = components[module]["V"], components[module]["U"], masks[module], deltas[module]
        route = routes.get(module, np.ones(m.shape[:-1]))
        outputs[module] = masked_site(x, W, V, U, m, delta, route, added=(added or {}).get(module))
        return outputs[module]

    return run_target(target, linear, lambda mixture, own: chosen.get(mixture, own), see=see), outputs


class Forward(NamedTuple):
    """One forward of a reconstruction term: live sites, {site: route}, {site: source}."""

    live: tuple[str, ...]
    routes: dict[str, Array]
    sources: dict[str, dict[str, Num]]


@dataclass(frozen=True)
class Decomposition:
    """All that a reconstruction error is a function of, sources and routes apart."""

    target: Target
    error: Callable[[Array, Num], Num]
    clean: Clean
    components: dict[str, dict[str, Num]]
    lower: dict[str, Num]

    def detached(self) -> "Decomposition":
        """The same with components and lambda under stop-gradient (A1, A3)."""
        components, lower_ci = tree_map(value, self.components), tree_map(value, self.lower)
        return replace(self, components=components, lower=lower_ci)


class Beside(NamedTuple):
    """R6: the points beside the output, and the coefficient at this step."""

    coeff: float
    points: tuple[str, ...]


def beside_output(loss: dict, step: int, total: int) -> Beside | None:
    """R6: of a reconstruction term."""
    own = loss.get("hidden_acts_reconstruction")
    return None if own is None else Beside(schedule(own["coeff"], step, total), tuple(own["points"]))


def forward_errors(
    model: Decomposition, forward: Forward, hidden_acts: bool = False, beside: Beside | None = None
) -> dict[str, Num]:
    """R1, R2, R6: of one forward, {sum, output, each point}."""
    pairs = {s: site_masks(model.lower[s], forward.sources[s]) for s in forward.live}
    masks, deltas = ({s: pair[i] for s, pair in pairs.items()} for i in range(2))
    seen: dict[str, Num] = {}
    output, acts = masked_pass(
        model.target,
        model.components,
        masks,
        deltas,
        forward.routes,
        model.clean.chosen,
        seen.__setitem__ if beside else None,
    )
    if hidden_acts:
        return {"sum": hidden_acts_error(model.clean.outputs, acts, model.clean.exists)}
    of_output = model.error(model.clean.output, output)
    if beside is None:
        return {"sum": of_output}
    clean = clean_points(model.target)
    errors = {p: ((seen[p] - clean[p]) ** 2).sum() / (clean[p] ** 2).sum() for p in beside.points}
    return {"sum": of_output + beside.coeff * sum(errors.values()) / len(errors), "output": of_output, **errors}


def forward_error(
    model: Decomposition, forward: Forward, hidden_acts: bool = False, beside: Beside | None = None
) -> Num:
    """R1, R2, R6: the error of one forward."""
    return forward_errors(model, forward, hidden_acts, beside)["sum"]


def mean_errors(
    model: Decomposition, forwards: Sequence[Forward], hidden_acts: bool = False, beside: Beside | None = None
) -> dict[str, Num]:
    """Section 5, R6: means over all forwards of what `forward_errors` gives."""
    errors = [forward_errors(model, f, hidden_acts, beside) for f in forwards]
    return {part: sum(e[part] for e in errors) / len(errors) for part in errors[0]}


def reconstruction_term(
    model: Decomposition, coeff: float, forwards: Sequence[Forward], hidden_acts: bool = False
) -> Num:
    """Section 5: coefficient × mean over all forwards of their error."""
    return coeff * mean_errors(model, forwards, hidden_acts)["sum"]


# ---- Section 6: the other two losses ----


def delta_squares(W: Array, V: Num, U: Num) -> Num:
    """L1: the sum of squares of a site's delta."""
    d = delta_component(W, V, U)
    return (d * d).sum()


def faithfulness(components: dict, weights: dict[str, Array], squares: Callable[..., Num] = delta_squares) -> Num:
    """L1. `squares` of (W, V, U): `split_squares` for the products of N4."""
    total = sum(squares(W, components[s]["V"], components[s]["U"]) for s, W in weights.items())
    return total / sum(W.size for W in weights.values())


def relative_faithfulness(components: dict, weights: dict[str, Array]) -> Num:
    """L5: the mean over sites of the delta's squares over those of W."""
    shares = [delta_squares(W, components[s]["V"], components[s]["U"]) / (W * W).sum() for s, W in weights.items()]
    return sum(shares) / len(shares)


def significant(x: Array, bits: int, whole: Callable[[Array], Array] = np.rint) -> Array:
    """x with `bits` significant binary digits, rounded to nearest, ties to even; `np.trunc` rounds towards zero. The
    exponent has no bounds."""
    fraction, exponent = np.frexp(x)
    return np.ldexp(whole(np.ldexp(fraction, bits)), exponent - bits)


def bfloat16(x: Array) -> Array:
    """x rounded to bfloat16, in float64."""
    return significant(x, 8)


Product = Callable[[Array, Array], Array]


def split_product(V: Array, U: Array, chunk: int = 2048, product: Product = np.matmul) -> Array:
    """N4: V1 U1 + (V1 U2 + V2 U1), `[d_in, d_out]`. `product` multiplies two bf16 matrices, exactly by default. If it
    accumulates as a device does and returns float32, its results are added up in float32."""
    V1, U1 = bfloat16(V), bfloat16(U)
    V2, U2 = bfloat16(V - V1), bfloat16(U - U1)
    chunks = range(0, V.shape[1], chunk)
    large = sum(product(V1[:, i : i + chunk], U1[i : i + chunk]) for i in chunks)
    return large + (product(V1, U2) + product(V2, U1))


def squares_by(
    VU: Array,
    W: Array,
    V: Num,
    U: Num,
    narrow: Callable[[Array], Array] = bfloat16,
    product: Product = np.matmul,
) -> Num:
    """`delta_squares` with VU in place of V U. The gradient multiplies delta, V and U, each through `narrow`."""
    d = value(W.astype(VU.dtype) - VU)
    return custom(
        (d * d).sum(),
        (V, lambda g: -2.0 * g * value(product(narrow(d), narrow(value(U)).T))),
        (U, lambda g: -2.0 * g * value(product(narrow(value(V)).T, narrow(d)))),
    )


def split_squares(W: Array, V: Num, U: Num, chunk: int = 2048, product: Product = np.matmul) -> Num:
    """N4: `delta_squares` by products of bf16 matrices; `chunk` and `product` as in `split_product`."""
    return squares_by(split_product(value(V), value(U), chunk, product), W, V, U, product=product)


def lp_penalty(u: Num, p: float, eps: float) -> Num:
    """L2: eps inside the power."""
    return (u + eps) ** p


def smooth_l0_penalty(u: Num, gamma: float) -> Num:
    """L2."""
    return u * u / (u * u + gamma**2)


def component_sums(upper_ci: Num, penalty: Callable[[Num], Num]) -> Num:
    """L2: S_c `[C]`, the sum of the penalty over all leading axes of upsilon `[..., C]`."""
    return penalty(upper_ci).sum(axis=tuple(range(upper_ci.ndim - 1)))


def importance_minimality(
    upper_ci: dict, penalty: Callable[[Num], Num], beta: float, exists: Mapping[str, Array] = NO_EXPERTS
) -> Num:
    """L2, L3, X4: sum of f_c · (1 + beta · log2(1 + S_c)); f_c = S_c / N, with N the number of all positions."""
    term: Num = np.zeros(())
    for s, u in upper_ci.items():
        S = component_sums(where_it_exists(u, s, exists), penalty)
        f = S / math.prod(u.shape[:-1])
        term = term + (f * (1.0 + beta / math.log(2.0) * log(1.0 + S))).sum()
    return term


def frequencies(
    upper_ci: dict, penalty: Callable[[Num], Num], exists: Mapping[str, Array] = NO_EXPERTS
) -> dict[str, Num]:
    """L2, X4: f, `[C]` of each site."""
    sums = {s: component_sums(where_it_exists(u, s, exists), penalty) for s, u in upper_ci.items()}
    return {s: S / math.prod(upper_ci[s].shape[:-1]) for s, S in sums.items()}


def frequency_cost(f: Num, a: float) -> Num:
    """L6: Phi of each component."""
    return f * log(1.0 + a * f) / math.log(2.0)


def importance_frequency(
    upper_ci: dict, penalty: Callable[[Num], Num], a: float, exists: Mapping[str, Array] = NO_EXPERTS
) -> Num:
    """L2, X4, the batch-size-invariant form: sum of f_c · log2(1 + a · f_c)."""
    return sum(frequency_cost(f, a).sum() for f in frequencies(upper_ci, penalty, exists).values())


def moved_means(means: dict[str, Array], f: dict[str, Num], halflife: float) -> dict[str, Array]:
    """L6: E of each site after a batch with frequencies f."""
    d = 2.0 ** (-1.0 / halflife)
    return {s: d * value(E) + (1.0 - d) * value(f[s]) for s, E in means.items()}


def importance_frequency_of_means(
    f: dict[str, Num], means: dict[str, Array], a: float, halflife: float, step: int
) -> Num:
    """L6: sum of Phi(f^), with Phi'(f^) as the gradient to f. `means`: E of this step, this batch's f in it."""
    term: Num = np.zeros(())
    for s, E in means.items():
        mean = E / (1.0 - 2.0 ** (-(step + 1) / halflife))
        slope = np.log2(1.0 + a * mean) + a * mean / ((1.0 + a * mean) * math.log(2.0))
        term = term + custom(value(frequency_cost(mean, a).sum()), (f[s], lambda g, slope=slope: g * slope))
    return term


def annealed_p(loss: dict, step: int, total: int) -> float:
    """L4, T8."""
    start, end = loss.get("p_anneal_start_frac", 1.0), loss.get("p_anneal_end_frac", 1.0)
    p, final, frac = schedule(loss["pnorm"], step, total), loss.get("p_anneal_final_p"), step / total
    if final is None or frac < start:
        return p
    return final if frac >= end else p + (final - p) * (frac - start) / (end - start)


def penalty_of(loss: dict, step: int, total: int) -> Callable[[Num], Num]:
    """L2, L4: psi at this step; with `normalize_at_one` over its value at 1."""
    if loss.get("penalty", "lp") == "smooth_l0":
        penalty = partial(smooth_l0_penalty, gamma=schedule(loss["gamma"], step, total))
    else:
        penalty = partial(lp_penalty, p=annealed_p(loss, step, total), eps=loss.get("eps", 1e-12))
    if not loss.get("normalize_at_one", False):
        return penalty
    return lambda u: penalty(u) / penalty(np.ones(()))


class Units(NamedTuple):
    """L7: the units that a matrix faces: `side` output or input, `kind` neuron or attention_head; `n` equal contiguous
    blocks of that side; `multiplier`: m."""

    side: str
    kind: str
    n: int
    multiplier: float = 1.0


NO_UNITS: Mapping[str, Units] = MappingProxyType({})


def faced_units(weights: Mapping[str, Array], n_heads: int = 1, n_kv_heads: int = 1) -> dict[str, Units]:
    """L7: of sites with these W, by name, as a Llama or a ResidMLP has them; the others have no entry."""

    def of_site(site: str, W: Array) -> Units | None:
        match site.rpartition(".")[2]:
            case "q_proj":
                return Units("output", "attention_head", n_heads)
            case "o_proj":
                return Units("input", "attention_head", n_heads)
            case "k_proj" | "v_proj":
                return Units("output", "attention_head", n_kv_heads, n_heads / n_kv_heads)
            case "gate_proj" | "up_proj" | "mlp_in":
                return Units("output", "neuron", W.shape[1])
            case "down_proj" | "mlp_out":
                return Units("input", "neuron", W.shape[0])
        return None

    return {s: units for s, W in weights.items() if (units := of_site(s, W))}


def soft_counts(vectors: Num, units: Units, threshold: float, normalize_at_one: bool) -> Num:
    """L7: vectors `[C, d]`, each component's on the side that faces units -> `[C]`."""
    squares = (vectors * vectors).reshape(vectors.shape[0], units.n, -1).sum(axis=-1)
    total = squares.sum(axis=-1, keepdims=True)
    shares = squares / (total + (value(total) == 0))
    soft = (shares / (shares + threshold / units.n)).sum(axis=-1) * units.multiplier
    return soft * (1.0 + threshold / units.n) if normalize_at_one else soft


def nonlinearity_locality(
    components: dict,
    units: Mapping[str, Units],
    coefficients: Mapping[str, float | None],
    threshold: float,
    normalize_at_one: bool = False,
) -> Num:
    """L7. `units`: those of the sites that face any; `coefficients`: w by kind."""
    term: Num = np.zeros(())
    for kind, w in coefficients.items():
        facing = {s: u for s, u in units.items() if u.kind == kind}
        if w is None or not facing:
            continue
        sides = {
            s: components[s]["U"] if u.side == "output" else components[s]["V"].swapaxes(0, 1)
            for s, u in facing.items()
        }
        counts = [soft_counts(sides[s], u, threshold, normalize_at_one) for s, u in facing.items()]
        term = term + w * sum(c.sum() for c in counts) / sum(c.shape[0] for c in counts)
    return term


# ---- Section 7: adversaries ----


def fresh_scope_shape(mask_scope: str, lead: tuple[int, ...]) -> tuple[int, ...]:
    """A1: leading shape of a fresh source."""
    return {
        "shared_across_batch": (1,) * len(lead),
        "unique_per_datapoint": lead,
        "per_row": (lead[0], *(1,) * (len(lead) - 1)),
    }[mask_scope]


def persistent_scope_shape(scope: dict, lead: tuple[int, ...]) -> tuple[int, ...]:
    """A2: leading shape of a persistent source."""
    return {
        "single_source": (1,) * len(lead),
        "broadcast_across_batch": (1, *lead[1:]),
        "repeat_across_batch": (scope.get("n_sources"), *lead[1:]),
        "per_batch_per_position": lead,
        "per_batch": (lead[0], *(1,) * (len(lead) - 1)),
    }[scope["type"]]


def pool_shape(pool: dict, lead: tuple[int, ...]) -> tuple[int, ...]:
    """A9: leading shape of a pooled source."""
    return (pool["size_per_batch_element"], lead[0], *(1,) * (len(lead) - 1))


def fresh_attack(error: Callable[[Tree], Num], sources: Tree, step_size: float, n_steps: int) -> Tree:
    """A1: n_steps sign ascents of `error(sources)` from the given init; the result is constant."""
    for _ in range(n_steps):
        moving = tree_map(Var, sources)
        g = gradients(error(moving), moving)
        sources = tree_map(lambda s, d: np.clip(s + step_size * np.sign(d), 0, 1), sources, g)
    return sources


def effective_sources(loss: dict, raw: Tree) -> Tree:
    """A5: sigmoid(raw), or raw itself in the clip parameterisation."""
    return tree_map(sigmoid, raw) if loss.get("use_sigmoid_parameterization", False) else raw


def used_sources(loss: dict, raw: Tree, draw: dict) -> Tree:
    """A5, A9: what masks are made of; of a pool, the particle that each row drew, `draw["particle"]` int `[B]`."""
    sources = effective_sources(loss, raw)
    if "pool" not in loss:
        return sources
    chosen = (draw["particle"], np.arange(len(draw["particle"])))
    return tree_map(lambda s: s[chosen], sources)


def drawn_particle(u: Array, n: int) -> Array:
    """A9: u ~ U[0, 1) `[B]` -> int `[B]`."""
    return np.floor(n * u).astype(int)


def adversarial_rows(u: Array, adv_fraction: dict | float, step: int, total: int) -> Array:
    """A8: u ~ U[0, 1) `[B]` -> bool `[B]`."""
    return u < schedule(adv_fraction, step, total)


def by_row(adversarial: Array, x: Num, y: Num) -> Num:
    """A8: x `[B, ...]` in the adversarial rows, y in the others."""
    rows = np.reshape(adversarial, (-1, *(1,) * (x.ndim - 1))).astype(np.float64)
    return rows * x + (1.0 - rows) * y


def merged_forward(model: "Decomposition", sources: Tree, draw: dict) -> Forward:
    """A8: `sources`: those of the adversarial rows; `draw`: {adversarial, and routes and sources of the others}."""
    rows, routes, merged_sources = draw["adversarial"], {}, {}
    for s, lam in model.lower.items():
        lead = lam.shape[:-1]
        routes[s] = by_row(rows, np.ones(lead), draw.get("routes", {}).get(s, np.ones(lead)))
        own, drawn = sources[s], draw["sources"][s]
        merged_sources[s] = {part: by_row(rows, expand_scope(own[part], lead), drawn[part]) for part in own}
    return Forward(tuple(model.lower), routes, merged_sources)


def ascend(loss: dict, raw: Tree, grads: Tree, moments: dict, step: int, total: int) -> tuple[Tree, dict]:
    """A5, A7: one update of a persistent bundle, -> (raw, moments). Momentum's v is the v of the moments."""
    opt = loss["optimizer"]
    lr = schedule(opt["lr_schedule"], step, total)
    if opt["type"] == "sign":
        direction = tree_map(np.sign, grads)
    elif opt["type"] == "sgd":
        direction = grads
    elif opt["type"] == "momentum":
        direction = tree_map(lambda v, g: opt["momentum"] * value(v) + g, moments["v"], grads)
        moments = moments | {"v": direction}
    else:
        betas, eps = (opt.get("beta1", 0.9), opt.get("beta2", 0.999)), opt.get("eps", 1e-8)
        direction, moments = adam_direction(grads, moments, betas, eps)
    raw = tree_map(lambda s, d: value(s) + lr * d, raw, direction)
    if not loss.get("use_sigmoid_parameterization", False):
        raw = tree_map(hard, raw)
    return raw, moments


def term_is_on(loss: dict, step: int, total: int) -> bool:
    """A6."""
    return step / total >= loss.get("start_frac", 0.0)


# ---- Section 8: optimisers, schedules, the training step ----


def schedule(config: dict | float, step: int, total: int) -> float:
    """T8, T2: a number, `{max_val, points}`, or `{start_val, warmup_pct, final_val_frac, fn_type}`, at a step."""
    if not isinstance(config, Mapping):
        return float(config)
    if "points" in config:
        return config["max_val"] * knots(config["points"], min(step / (total - 1), 1.0) if total > 1 else 0.0)
    start, f = config["start_val"], config.get("final_val_frac", 1.0)
    warmup = int(config.get("warmup_pct", 0.0) * total)
    if step < warmup:
        return start * step / warmup
    t = (step - warmup) / max(1, total - warmup - 1)
    match config.get("fn_type", "constant"):
        case "constant":
            return start
        case "linear":
            return start * (f + (1.0 - f) * (1.0 - t))
        case "cosine":
            return start * (f + (1.0 - f) * 0.5 * (1.0 + math.cos(math.pi * t)))


def knots(points: Sequence[dict], t: float) -> float:
    """T8: frac(t), for points `{at, frac, interp}`."""
    for left, right in itertools.pairwise(points):
        if left["at"] <= t < right["at"]:
            u = (t - left["at"]) / (right["at"] - left["at"])
            share = {"linear": u, "cosine": (1.0 - math.cos(math.pi * u)) / 2.0, "hold": 0.0}
            return left["frac"] + (right["frac"] - left["frac"]) * share[right.get("interp", "linear")]
    return points[-1]["frac"]


def global_norm(grads: Tree) -> float:
    return math.sqrt(sum(float((g * g).sum()) for g in tree_leaves(grads)))


def clip_by_global_norm(grads: Tree, max_norm: float) -> Tree:
    """Section 8, step 5: times min(1, max_norm / (norm + 1e-6))."""
    factor = min(1.0, max_norm / (global_norm(grads) + 1e-6))
    return tree_map(lambda g: g * factor, grads)


def zero_moments(params: Tree) -> dict:
    """Adam's state before the first update: {m, v, count}."""
    zeros = tree_map(lambda p: np.zeros(np.shape(p)), params)
    return {"m": zeros, "v": zeros, "count": 0}


def adam_direction(grads: Tree, moments: dict, betas: Sequence[float], eps: float) -> tuple[Tree, dict]:
    """m̂ / (sqrt(v̂) + eps) with bias correction, -> (direction, moments)."""
    b1, b2 = betas
    m = tree_map(lambda m, g: b1 * value(m) + (1.0 - b1) * g, moments["m"], grads)
    v = tree_map(lambda v, g: b2 * value(v) + (1.0 - b2) * g * g, moments["v"], grads)
    count = moments["count"] + 1
    c1, c2 = 1.0 - b1**count, 1.0 - b2**count
    direction = tree_map(lambda m, v: m / c1 / (np.sqrt(v / c2) + eps), m, v)
    return direction, {"m": m, "v": v, "count": count}


def adamw(
    params: Tree,
    grads: Tree,
    moments: dict,
    lr: float,
    betas: Sequence[float] = (0.9, 0.999),
    weight_decay: float = 0.0,
) -> tuple[Tree, dict]:
    """T1, -> (params, moments)."""
    direction, moments = adam_direction(grads, moments, betas, eps=1e-8)
    return tree_map(lambda p, d: p - lr * weight_decay * p - lr * d, params, direction), moments


def matrices(params: Tree, key: str = "") -> Tree:
    """T7: true for the leaves that are matrices, or stacks of them along a first axis of components. Those under the
    key `b` are biases, one of each component in `mlp` and `vector_mlp`."""
    if isinstance(params, dict):
        return {k: matrices(own, k) for k, own in params.items()}
    if isinstance(params, list):
        return [matrices(own, key) for own in params]
    return key != "b" and np.ndim(params) > 1


def newton_schulz(d: Array, n_steps: int, narrow: Callable[[Array], Array] = lambda x: x) -> Array:
    """T7, N5: X of d `[..., rows, columns]`, each matrix by itself. `narrow` rounds d, and what products read and
    give."""

    def product(x: Array, y: Array) -> Array:
        return narrow(narrow(x) @ narrow(y))

    d = narrow(d)
    X = narrow(d / (np.linalg.norm(d, axis=(-2, -1), keepdims=True) + 1e-8))
    is_tall = d.shape[-2] > d.shape[-1]
    X = X.swapaxes(-2, -1) if is_tall else X
    a, b, c = 3.4445, -4.775, 2.0315
    for _ in range(n_steps):
        A = product(X, X.swapaxes(-2, -1))
        X = narrow(a * X + product(b * A + c * product(A, A), X))
    return X.swapaxes(-2, -1) if is_tall else X


def muon_scale(shape: tuple[int, ...], consistent_rms: float | None) -> float:
    """T7: s of a matrix `[..., rows, columns]`."""
    rows, columns = shape[-2:]
    if consistent_rms is None:
        return math.sqrt(max(1.0, columns / rows))
    return consistent_rms * math.sqrt(max(rows, columns))


def muon(optimizer: dict, params: Tree, grads: Tree, moments: dict, lr: float) -> tuple[Tree, dict]:
    """T7, N5, -> (params, moments). The moments are Adam's, {m, v, count}, but v of a matrix is not used and stays."""
    beta, n = optimizer.get("beta", 0.95), moments["count"] + 1
    narrow = bfloat16 if optimizer.get("ns_dtype") == "bfloat16" else np.asarray
    n_steps, decay = optimizer.get("ns_steps", 5), optimizer.get("weight_decay", 0.0)
    is_matrix = matrices(params)
    others, adams = adamw(params, grads, moments, lr)

    def averaged(m: Array, g: Array) -> Array:
        return beta * value(m) + (1.0 - beta) * g

    def moved(W: Array, m: Array, g: Array) -> Array:
        d = beta * m / (1.0 - beta ** (n + 1)) + (1.0 - beta) * g / (1.0 - beta**n)
        s = muon_scale(W.shape, optimizer.get("consistent_rms", 0.2))
        return W - lr * (s * newton_schulz(d, n_steps, narrow) + decay * W)

    m = tree_map(lambda yes, m, g, own: averaged(m, g) if yes else own, is_matrix, moments["m"], grads, adams["m"])
    v = tree_map(lambda yes, v, own: v if yes else own, is_matrix, moments["v"], adams["v"])
    params = tree_map(lambda yes, W, m, g, own: moved(W, m, g) if yes else own, is_matrix, params, m, grads, others)
    return params, {"m": m, "v": v, "count": n}


def optimise(optimizer: dict, params: Tree, grads: Tree, moments: dict, step: int, total: int) -> tuple[Tree, dict]:
    """Section 8, step 5, T1, T2, T7: one `components_optimizer` or `ci_fn_optimizer` update."""
    if optimizer.get("grad_clip_norm") is not None:
        grads = clip_by_global_norm(grads, optimizer["grad_clip_norm"])
    lr = schedule(optimizer["lr_schedule"], step, total)
    if optimizer.get("type", "adamw") == "muon":
        return muon(optimizer, params, grads, moments, lr)
    betas, decay = optimizer.get("betas", (0.9, 0.999)), optimizer.get("weight_decay", 0.0)
    return adamw(params, grads, moments, lr, betas, decay)


def faithfulness_warmup(components: dict, weights: dict[str, Array], config: dict) -> dict:
    """T3: the components after `faithfulness_warmup_steps` steps of AdamW on L1 alone."""
    moments = zero_moments(components)
    lr = config.get("faithfulness_warmup_lr", 1e-3)
    decay = config.get("faithfulness_warmup_weight_decay", 0.0)
    for _ in range(config.get("faithfulness_warmup_steps", 0)):
        moving = tree_map(Var, components)
        loss = faithfulness(tie(moving, config.get("tied_weights")), weights)
        grads = gradients(loss, moving)
        components, moments = adamw(components, grads, moments, lr, weight_decay=decay)
    return components


def output_moment(x: Array, W: Array) -> Array:
    """T6: S `[d_out, d_out]` of a site at x `[..., d_in]`; the S of several batches add up."""
    y = (x @ W).reshape(-1, W.shape[1])
    return y.T @ y


def weighted_singular_vectors(W: Array, S: Array, drawn: Array) -> dict[str, Array]:
    """T6: {V `[d_in, C]`, U `[C, d_out]`} at the start; `drawn` is the V that was drawn. Of a W of rank below r, the
    components beyond its rank are those whose V is 0."""
    _, sizes, rows = np.linalg.svd(W, full_matrices=False)
    basis = rows[sizes > 1e-12 * sizes[0]]  # of the row space of W
    values, vectors = np.linalg.eigh(basis @ S @ basis.T)
    V, U = np.array(drawn, np.float64), np.zeros((drawn.shape[1], W.shape[1]))
    for c, n in enumerate(np.argsort(-values)[: len(U)]):
        u = vectors[:, n] @ basis
        u = u * np.sign(u[np.argmax(np.abs(u))])
        v = W @ u
        length = math.sqrt(np.linalg.norm(v))
        V[:, c], U[c] = v / length, u * length
    return {"V": V, "U": U}


def nonlinearity_aligned(
    W: Array, side: str, C: int, order: Sequence[int] | Array, coordinate_orders: Mapping[int, Array] | Array
) -> dict[str, Array]:
    """T9: {V `[d_in, C]`, U `[C, d_out]`} at the start. `side`: as in `Units`. `order` `[n]`: the coordinates of that
    side in a random order, not used where C = n. `coordinate_orders` `[n, o]`: for each coordinate, the elements of the
    other side in a random order, used where C > n."""
    of_coordinate = W.T if side == "output" else W  # row u: w_u
    n, o = of_coordinate.shape
    assert n * o >= C, "a component would be empty"
    if n >= C:
        coordinates = list(range(n)) if n == C else list(order[:C])
        one_hot, others = np.eye(n)[coordinates], of_coordinate[coordinates]
    else:
        q, r = divmod(C, n)
        one_hot, others, c = np.zeros((C, n)), np.zeros((C, o)), 0
        for place, u in enumerate(order):
            count = q + 1 if place < r else q
            for j, element in enumerate(coordinate_orders[u]):
                others[c + j * count // o, element] = of_coordinate[u, element]
            one_hot[c : c + count, u] = 1.0
            c += count
    return {"V": others.T, "U": one_hot} if side == "output" else {"V": one_hot.T, "U": others}


def initial_batches(shapes: Iterable[tuple[int, int]], positions: int) -> int:
    """T6: batches of `positions` each that are counted, for all sites' (d_in, d_out)."""
    return math.ceil(16 * max(min(shape) for shape in shapes) / positions)


def term_name(loss: dict) -> str:
    return loss.get("name") or loss["type"]


def split_draws(
    loss: dict, sites: Sequence[str], n_mask_samples: int, draws: list[dict] | None
) -> tuple[list[dict], list[dict]]:
    """The draws of a term's forwards, and (A3) those of its warm-up ascents; of one that draws nothing, `{}` each."""
    n, n_ascents = len(live_sets(loss, sites, n_mask_samples)), loss.get("n_warmup_steps", 0)
    forwards, ascents = (draws or [{}] * n)[:n], (draws or [])[n:]
    if loss["type"] != "PersistentPGDReconSubsetLoss":
        assert not ascents, "only ascents on subsets draw"
        if "pool" in loss:  # A9: one particle a step
            return forwards, [{"particle": forwards[0]["particle"]}] * n_ascents
        return forwards, [{}] * n_ascents
    assert len(ascents) == n_ascents, "a draw for every ascent"
    return forwards, ascents


def ascends_sum(loss: dict) -> bool:
    """R6: whether the term's kept sources climb the sum, or the output's error alone."""
    return {"output": False, "term": True}[loss.get("adversary_objective", "output")]


def warm_up_sources(
    model: Decomposition, loss: dict, raw: Tree, moments: dict, draws: list[dict], step: int, total: int
) -> tuple[Tree, dict]:
    """A3, R6: an ascent before the loss for each of `draws`, which routes it, all sites live; `model` detached."""
    beside = beside_output(loss, step, total) if ascends_sum(loss) else None
    for draw in draws:
        moving = tree_map(Var, raw)
        forward = Forward(tuple(raw), draw.get("routes", {}), used_sources(loss, moving, draw))
        grads = gradients(forward_error(model, forward, beside=beside), moving)
        raw, moments = ascend(loss, raw, grads, moments, step, total)
    return raw, moments


def forwards_of(
    model: Decomposition,
    loss: dict,
    n_mask_samples: int,
    draws: list[dict] | None,
    persistent: Tree,
    beside: Beside | None = None,
) -> list[Forward]:
    """Section 5's table: the forwards of a term, its fresh attacks (A1) made. `model` detached, `draws` as in
    `training_step`, `persistent` the term's own bundle of raw sources, `beside` what attacks climb besides."""
    kind = ROWS[loss["type"]].source

    def forward(live: tuple[str, ...], draw: dict) -> Forward:
        routes = draw.get("routes", {})
        match kind:
            case "ones" | "zeros":
                v = float(kind == "ones")
                sources = {s: constant_source(v, model.lower[s].shape[:-1]) for s in live}
            case "stochastic":
                sources = draw["sources"]
            case "fresh":
                sources = fresh_attack(
                    lambda moving: forward_error(model, Forward(live, routes, moving), beside=beside),
                    draw["sources"],
                    loss["step_size"],
                    loss["n_steps"],
                )
            case "persistent":
                sources = effective_sources(loss, persistent)
            case "merged":
                return merged_forward(model, used_sources(loss, persistent, draw), draw)
        return Forward(live, routes, sources)

    lives = live_sets(loss, tuple(model.lower), n_mask_samples)
    return [forward(live, draw) for live, draw in zip(lives, draws or [{}] * len(lives), strict=True)]


def next_frequency_means(
    losses: list[dict], upper_ci: dict, exists: Mapping[str, Array], state: dict, total: int
) -> dict[str, dict[str, Array]]:
    """L6: {term: E after this step's batch} of the terms that have one."""
    means = {}
    for loss in losses:
        halflife = (loss.get("frequency") or {}).get("ema_halflife_steps")
        if halflife is not None:
            f, name = frequencies(upper_ci, penalty_of(loss, state["step"], total), exists), term_name(loss)
            means[name] = moved_means(state["frequency_means"][name], f, halflife)
    return means


def loss_terms(
    model: Decomposition,
    upper_ci: dict,
    losses: list[dict],
    forwards: dict[str, list[Forward]],
    step: int,
    total: int,
    means: Mapping[str, dict[str, Array]] = MappingProxyType({}),
    units: Mapping[str, Units] = NO_UNITS,
) -> dict[str, tuple[float, Num]]:
    """{term: (coefficient, value without it)}; L2's frequency part is the term `<name>/frequency`, with its own.
    What is only logged has the coefficient 0: `<name>/frequency_batch` (L6), `<name>/output` and `<name>/<point>` (R6).
    `means`: {term: E of this step} (L6); `units`: see `faced_units` (L7)."""
    terms: dict[str, tuple[float, Num]] = {}
    exists = model.clean.exists
    for loss in losses:
        name, coeff = term_name(loss), schedule(loss["coeff"], step, total)
        if loss["type"] == "FaithfulnessLoss":
            measure = {"entries": faithfulness, "per_site": relative_faithfulness}[loss.get("normalize", "entries")]
            terms[name] = coeff, measure(model.components, model.clean.weights)
        elif loss["type"] == "NonlinearityLocalityLoss":
            threshold, at_one = schedule(loss["relative_threshold"], step, total), loss.get("normalize_at_one", False)
            kinds = loss["unit_kind_coefficients"]
            terms[name] = coeff, nonlinearity_locality(model.components, units, kinds, threshold, at_one)
        elif loss["type"] == "ImportanceMinimalityLoss":
            penalty, frequency = penalty_of(loss, step, total), loss.get("frequency")
            beta = loss["beta"] if frequency is None else 0.0
            terms[name] = coeff, importance_minimality(upper_ci, penalty, beta, exists)
            if frequency is not None:
                a, halflife = frequency["reference_token_count"], frequency.get("ema_halflife_steps")
                part = importance_frequency(upper_ci, penalty, a, exists)
                if halflife is not None:
                    terms[f"{name}/frequency_batch"] = 0.0, part
                    f = frequencies(upper_ci, penalty, exists)
                    part = importance_frequency_of_means(f, means[name], a, halflife, step)
                terms[f"{name}/frequency"] = schedule(frequency["coeff"], step, total), part
        else:
            hidden_acts = ROWS[loss["type"]].hidden_acts
            errors = mean_errors(model, forwards[name], hidden_acts, beside_output(loss, step, total))
            terms[name] = coeff, errors.pop("sum")
            terms |= {f"{name}/{part}": (0.0, error) for part, error in errors.items()}
    return terms


class StepResult(NamedTuple):
    """`terms`: values without their coefficients, and what is only logged (`loss_terms`); `gradients`: {components, ci,
    sources}, before clipping, those of the sources of their term's own error (A4)."""

    state: dict
    total: float
    terms: dict[str, float]
    gradients: dict[str, Tree]


def training_step(
    target: Target,
    error: Callable[[Array, Num], Num],
    sites: Sequence[str],
    config: dict,
    state: dict,
    draws: dict[str, list[dict]],
    units: Mapping[str, Units] = NO_UNITS,
) -> StepResult:
    """Section 8: one step. `target`: the target on this step's batch; `error`: `kl_error` or `mse_error`; `sites`: in
    canonical order; `config`: the schema's `pd` section; `units`: see `faced_units`, for L7.

    state: {step: int,
            components {site: {V, U}} (of a tied pair only s1), ci: see `ci_logits`,
            components_moments and ci_moments {m, v, count} (`zero_moments`),
            sources {term: {site: {components [lead.., C], delta [lead..]}}} raw (A2, A5),
            source_moments {term: {m, v, count}},
            frequency_means {term: {site: [C]}} (L6), if there is such a term}
    draws: {term: [{routes {site: [...]}, sources {site: {components, delta}}} per forward]}, in
            the order of `live_sets`, and after them, of a persistent term on subsets, one per warm-up
            ascent; sources are the draw (stochastic) or init (fresh PGD), no routes means
            everywhere; a term that draws nothing needs no entry. A merged term has one,
            {routes, sources, adversarial bool [B]}, and a pooled one `particle` int [B] in it (A8, A9).
    """
    step, total_steps = state["step"], config["steps"]
    losses = [loss for loss in config["loss_metrics"] if term_is_on(loss, step, total_steps)]
    recon = {term_name(loss): loss for loss in losses if loss["type"] in ROWS}
    persistent = {name: loss for name, loss in recon.items() if ROWS[loss["type"]].source in KEPT}

    clean = clean_pass(target, sites)
    trained = tree_map(Var, {"components": state["components"], "ci": state["ci"]})
    components = tie(trained["components"], config.get("tied_weights"))
    points = NO_POINTS if config["ci_config"].get("input_tap") is None else clean_points(target)
    lower_ci, upper_ci = causal_importance(
        config, trained["ci"], clean.inputs, components, clean.exists, clean.reads, points
    )
    model = Decomposition(target, error, clean, components, lower_ci)

    sources, source_moments = dict(state["sources"]), dict(state["source_moments"])
    drawn = {name: split_draws(loss, sites, config["n_mask_samples"], draws.get(name)) for name, loss in recon.items()}
    for name, loss in persistent.items():
        sources[name], source_moments[name] = warm_up_sources(
            model.detached(), loss, sources[name], source_moments[name], drawn[name][1], step, total_steps
        )
    trained["sources"] = tree_map(Var, sources)
    forwards = {
        name: forwards_of(
            model.detached(),
            loss,
            config["n_mask_samples"],
            drawn[name][0],
            trained["sources"].get(name),
            beside_output(loss, step, total_steps),
        )
        for name, loss in recon.items()
    }

    means = next_frequency_means(losses, upper_ci, clean.exists, state, total_steps)
    terms = loss_terms(model, upper_ci, losses, forwards, step, total_steps, means, units)
    total = sum(coeff * term for coeff, term in terms.values())
    grads = gradients(total, trained)

    for name, loss in persistent.items():
        objective = terms[name] if ascends_sum(loss) else terms.get(f"{name}/output", terms[name])
        own = gradients(objective[1], trained["sources"][name])  # A4, R6, whatever the coefficient
        grads["sources"][name] = own
        sources[name], source_moments[name] = ascend(loss, sources[name], own, source_moments[name], step, total_steps)
    new = {"step": step + 1, "sources": sources, "source_moments": source_moments}
    if means:
        new["frequency_means"] = means
    for part, optimizer in ("components", "components_optimizer"), ("ci", "ci_fn_optimizer"):
        params = tree_map(value, state[part])
        moments = state[f"{part}_moments"]
        new[part], new[f"{part}_moments"] = optimise(config[optimizer], params, grads[part], moments, step, total_steps)
    values = {name: float(value(term)) for name, (_, term) in terms.items()}
    return StepResult(new, float(value(total)), values, grads)


# ---- The tiny Llama ----

LLAMA_MODULES = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}


def llama_site(layer: int, kind: str, expert: int | None = None) -> str:
    """The module's name in a Hugging Face checkpoint; `expert` for the matrices of a mixture (Qwen3-MoE, OLMoE)."""
    if kind == "embed":
        return f"model.{EMBEDDING}"
    module = LLAMA_MODULES[kind]
    if expert is not None:
        module = module.replace("mlp.", f"mlp.experts.{expert}.")
    return f"model.layers.{layer}.{module}"


def top_k(logits: Array, k: int) -> Array:
    """X1: logits `[..., E]` -> S, true for the k largest (of equal ones, those with the lower number)."""
    order = np.argsort(-logits, axis=-1, kind="stable")
    return np.argsort(order, axis=-1) < k


def expert_weights(logits: Num, S: Array, normalised: bool) -> Num:
    """X1: w `[..., E]`, 0 outside S."""
    w = exp(log_softmax(logits)) * S
    return w / w.sum(axis=-1, keepdims=True) if normalised else w


def mixture(
    weights: dict,
    x: Num,
    project: Callable[[str, Num, int], Num],
    choose: Callable[[Array], Array],
    *,
    experts_per_token: int,
    normalised: bool,
) -> Num:
    """X1-X3: x `[..., d]` -> `[..., d]`. weights: router [d, E]; `project(kind, x, expert)` multiplies by an expert's
    matrix, `choose` makes of the router's own S the one that is used. An expert reads zeros at the positions that do
    not use it; its matrices give zeros there, and nothing comes back from there in the backward pass."""
    logits = x @ weights["router"]
    S = choose(top_k(value(logits), experts_per_token))
    w = expert_weights(logits, S, normalised)
    experts = range(S.shape[-1])
    read = [x * S[..., e, None] for e in experts]
    gate = [project("gate", read[e], e) for e in experts]
    up = [project("up", read[e], e) for e in experts]
    down = [project("down", gate[e] * sigmoid(gate[e]) * up[e], e) for e in experts]
    return sum(w[..., e, None] * down[e] for e in experts)


def llama(
    weights: dict,
    tokens: Array,
    linear: Callable[..., Num],
    *,
    n_heads: int,
    n_kv_heads: int,
    head_dim: int,
    eps: float,
    rope_theta: float,
    rope_scaling: Mapping[str, float] | None = None,
    experts_per_token: int = 1,
    normalised: bool = False,
    choose: Choose = lambda mixture, own: own,
    hooked: Callable[[int, str, Num], Num] = lambda layer, hook, x: x,
) -> Num:
    """tokens `[B, T]` -> logits `[B, T, vocab]`. weights: embed [vocab, d], layers [{q_proj, k_proj,
    v_proj, o_proj, gate_proj, up_proj, down_proj [d_in, d_out], input_norm, post_norm [d]}],
    final_norm [d], head [d, vocab]. Every projection is `linear(layer, kind, x, W)`, kind in
    q, k, v, o, gate, up, down (the canonical order); F7: the embedding is the one of layer -1, of kind embed.

    A layer with a `router` [d, E] has a mixture named `model.layers.{i}.mlp` in place of its MLP (section 12). Its
    gate_proj, up_proj and down_proj are [E, d_in, d_out], and every product is `linear(layer, kind, x, W, expert)`,
    first gate of all experts, then up, then down. `experts_per_token` is k; `normalised` as in X1.

    B6: `hooked(layer, hook, x)` gives what takes the place of the activation x at a hook, by TransformerLens' name."""
    freq = rope_frequencies(head_dim, rope_theta, rope_scaling)
    h = linear(-1, "embed", np.eye(weights["embed"].shape[0])[tokens], weights["embed"])
    for i, layer in enumerate(weights["layers"]):

        def project(kind: str, x: Num, *expert: int, i: int = i, layer: dict = layer) -> Num:
            return linear(i, kind, x, layer[f"{kind}_proj"][expert], *expert)

        h = hooked(i, "hook_resid_pre", h)
        x = rms_norm(h, eps) * layer["input_norm"]
        q, k, v = project("q", x), project("k", x), project("v", x)
        assert (q.shape[-1], k.shape[-1]) == (n_heads * head_dim, n_kv_heads * head_dim)
        h = h + hooked(i, "hook_attn_out", project("o", attention(q, k, v, n_heads, freq, causal=True)))
        h = hooked(i, "hook_resid_mid", h)
        x = hooked(i, "ln2.hook_normalized", rms_norm(hooked(i, "hook_mlp_in", h), eps)) * layer["post_norm"]
        x = hooked(i, "mlp.hook_in", x)
        if "router" in layer:
            choose_here = partial(choose, f"model.layers.{i}.mlp")
            y = mixture(layer, x, project, choose_here, experts_per_token=experts_per_token, normalised=normalised)
        else:
            gate, up = project("gate", x), project("up", x)
            y = project("down", gate * sigmoid(gate) * up)
        h = h + hooked(i, "hook_mlp_out", hooked(i, "mlp.hook_out", y))
        h = hooked(i, "hook_resid_post", h)
    return rms_norm(h, eps) * weights["final_norm"] @ weights["head"]


LLAMA_POINTS = {
    "hook_resid_pre": ("resid", 0),
    "hook_resid_post": ("resid", 1),  # before the next layer
    "hook_attn_out": ("attn", 0),
    "hook_mlp_out": ("mlp", 0),
}


def llama_target(
    weights: dict, tokens: Array, hooked: Callable[[int, str, Num], Num] = lambda layer, hook, x: x, **arch: Any
) -> MixtureTarget:
    """The Llama on these tokens, its projections named by `llama_site`."""

    def run(linear: Linear, choose: Choose, see: See = lambda point, x: None) -> Num:
        def seen(layer: int, hook: str, x: Num) -> Num:
            x = hooked(layer, hook, x)
            if hook in LLAMA_POINTS:
                kind, further = LLAMA_POINTS[hook]
                see(f"{kind}.{layer + further}", x)
            return x

        def by_kind(layer: int, kind: str, x: Num, W: Num, expert: int | None = None) -> Num:
            return linear(llama_site(layer, kind, expert), x, W)

        return llama(weights, tokens, by_kind, choose=choose, hooked=seen, **arch)

    return MixtureTarget(run)


# ---- The toy models ----


def tms_target(weights: dict, features: Array) -> ToyTarget:
    """features `[B, n]` -> `[B, n]`: ReLU(h W2 + b), where h is x W1 through the hidden layers, which have neither
    bias nor activation. weights: linear1 [n, h], hidden_layers [[h, h], ...], linear2 [h, n], bias [n]."""

    def run(linear: Linear, hold: Hold) -> Num:
        h = linear("linear1", hold(FEATURES, features), weights["linear1"])
        for i, W in enumerate(weights["hidden_layers"]):
            h = linear(f"hidden_layers.{i}", h, W)
        return relu(linear("linear2", h, weights["linear2"]) + hold("bias", weights["bias"]))

    return ToyTarget(run)


def resid_mlp_target(embed: Array, layers: Sequence[dict], features: Array, activation: str) -> ToyTarget:
    """features `[B, n]` -> `[B, n]`: into the residual stream by embed `[n, d]` and out of it by its transpose.
    layers: {mlp_in [d, m], mlp_out [m, d], optional in_bias [m], out_bias [d]}; activation relu or gelu (exact)."""
    act = {"relu": relu, "gelu": gelu}[activation]

    def run(linear: Linear, hold: Hold, see: See = lambda point, x: None) -> Num:
        def bias(layer: int, name: str) -> Num | float:
            return hold(f"layers.{layer}.{name}", layers[layer][name]) if name in layers[layer] else 0.0

        residual = hold(FEATURES, features) @ embed
        for i, layer in enumerate(layers):
            hidden = linear(f"layers.{i}.mlp_in", residual, layer["mlp_in"]) + bias(i, "in_bias")
            update = linear(f"layers.{i}.mlp_out", act(hidden), layer["mlp_out"]) + bias(i, "out_bias")
            see(f"resid.{i}", residual)
            residual = residual + update
        see(f"resid.{len(layers)}", residual)
        return residual @ embed.T

    return ToyTarget(run)


# ---- Section 11: evaluation ----


def cross_entropy(logits: Array, tokens: Array) -> float:
    """Of the next token, mean over positions 0 .. T - 2. logits `[B, T, vocab]`, tokens `[B, T]`."""
    log_p = log_softmax(logits[:, :-1])
    return float(-np.take_along_axis(log_p, tokens[:, 1:, None], axis=-1).mean())


def ce_and_kl(
    target: Target,
    tokens: Array,
    components: dict,
    lower_ci: dict[str, Array],
    stochastic: dict[str, dict[str, Array]],
    random_masks: dict[str, Array],
    rounding_threshold: float,
) -> dict[str, float]:
    """`kl_*`, `ce_difference_*`, `ce_unrecovered_*` (no key prefix) for the six maskings.
    `stochastic`: a source per site; `random_masks`: U[0, 1) draws `[..., C]`, the mask itself."""
    zero_delta = {s: np.zeros(lam.shape[:-1]) for s, lam in lower_ci.items()}
    stoch = {s: site_masks(lam, stochastic[s]) for s, lam in lower_ci.items()}
    rounded = {s: (lam > rounding_threshold).astype(float) for s, lam in lower_ci.items()}
    maskings = {
        "unmasked": (tree_map(np.ones_like, lower_ci), zero_delta),
        "ci_masked": (lower_ci, zero_delta),
        "rounded_masked": (rounded, zero_delta),
        "stoch_masked": tuple({s: pair[i] for s, pair in stoch.items()} for i in range(2)),
        "random_masked": (random_masks, zero_delta),
        "zero_masked": (tree_map(np.zeros_like, lower_ci), zero_delta),
    }
    clean = clean_pass(target, tuple(lower_ci))
    outputs = {
        name: masked_pass(target, components, masks, deltas, {}, clean.chosen)[0]
        for name, (masks, deltas) in maskings.items()
    }
    target_ce = cross_entropy(clean.output, tokens)
    differences = {name: cross_entropy(y, tokens) - target_ce for name, y in outputs.items()}
    out = {f"kl_{name}": float(kl_error(clean.output, y)) for name, y in outputs.items()}
    for name, difference in differences.items():
        out[f"ce_difference_{name}"] = difference
        out[f"ce_unrecovered_{name}"] = difference / differences["zero_masked"]
    return out


def l0(lower_ci: dict[str, Array], threshold: float, groups: dict[str, list[str]] | None = None) -> dict[str, float]:
    """Mean number per position of components with lambda above the threshold, per site and summed
    over the sites that match any pattern of a group (no key prefix). X4: lambda is 0 where a site does not exist, and
    the mean is over all positions."""
    per_site = {s: float((lam > threshold).sum(axis=-1).mean()) for s, lam in lower_ci.items()}
    grouped = {
        name: sum(n for s, n in per_site.items() if any(fnmatch(s, p) for p in patterns))
        for name, patterns in (groups or {}).items()
    }
    return per_site | grouped


def routed_shares(exists: dict[str, Array]) -> dict[str, float]:
    """X4: {expert: share of the positions that take it}, from {expert's site: bool `[...]`}."""
    return {site.rpartition(".")[0]: float(own.mean()) for site, own in exists.items()}


def identity_ci_error(ci: Array, component_of_feature: Array) -> int:
    """ci `[features, C]` and the (Hungarian) matching, `[features]`: off-diagonal entries > 0.1
    plus diagonal entries < 0.9; the entries of unmatched components are off-diagonal."""
    diagonal = np.zeros(ci.shape, dtype=bool)
    diagonal[np.arange(len(ci)), component_of_feature] = True
    return int((~diagonal & (ci > 0.1)).sum() + (diagonal & (ci < 0.9)).sum())


def dense_ci_error(ci: Array, k: int) -> int:
    """ci `[features, C]`, columns by descending total: those of the first k without an entry
    >= 0.9, plus the entries > 0.1 in the rest."""
    by_total = ci[:, np.argsort(-ci.sum(axis=0), kind="stable")]
    missing = (by_total[:, :k].max(axis=0) < 0.9).sum()
    return int(missing + (by_total[:, k:] > 0.1).sum())


def mmcs_and_ml2r(W: Array, V: Array, U: Array) -> tuple[float, float]:
    """TMS `linear1`: W `[n, h]` without a row of zeros, V `[n, C]`, U `[C, h]` -> (MMCS, ML2R)."""
    best = []
    for j, row in enumerate(W):
        length = np.linalg.norm(row)
        versions = [V[j, c] * U[c] for c in range(len(U))]
        pairs = [
            (float(v @ row / (np.linalg.norm(v) * length)), float(np.linalg.norm(v) / length))
            for v in versions
            if np.linalg.norm(v) >= length / 100
        ]
        best.append(max(pairs, key=lambda pair: pair[0], default=(0.0, 0.0)))
    cosines, ratios = zip(*best, strict=True)
    return sum(cosines) / len(W), sum(ratios) / len(W)


# ---- Section 13: attribution graphs ----


def activations(x: Num, V: Array, U: Array) -> Num:
    """E1: a `[..., C]` of x `[..., d_in]`."""
    return (x @ V) * np.linalg.norm(U, axis=-1)


def directions(U: Array) -> Array:
    """E1: the rows of U `[C, d_out]`, each of length 1; a row of zeros, of which a is 0 too, stays."""
    lengths = np.linalg.norm(U, axis=-1, keepdims=True)
    return U / np.where(lengths > 0, lengths, 1.0)


def cut_leaves(target: Target, components: dict) -> tuple[dict, dict[str, Array]]:
    """E1: the leaves by what they are on the clean pass, and the S of every mixture, {mixture: bool `[..., E]`}.
    Every site is one of `components`.

    leaves: {components {site: a [..., C]}, deltas {site: x Delta [..., d_out]}, embeddings: of a Llama
            [B, T, d] (no such entry where the embedding is a site), of a `ToyTarget` its features [B, n],
            biases {name: the bias}}"""
    leaves: dict[str, Tree] = {"components": {}, "deltas": {}, "biases": {}}
    chosen: dict[str, Array] = {}

    def linear(module: str, x: Array, W: Array) -> Array:
        if module in components:
            V, U = components[module]["V"], components[module]["U"]
            leaves["components"][module] = activations(x, V, U)
            leaves["deltas"][module] = x @ delta_component(W, V, U)
        elif module.endswith(EMBEDDING):
            leaves["embeddings"] = x @ W
        return x @ W

    def choose(mixture: str, own: Array) -> Array:
        chosen[mixture] = own
        return own

    def hold(name: str, own: Array) -> Array:
        if name == FEATURES:
            leaves["embeddings"] = own
        else:
            leaves["biases"][name] = own
        return own

    run_target(target, linear, choose, hold)
    return leaves, chosen


def cut_pass(
    target: Target, components: dict, leaves: dict, chosen: Mapping[str, Array] = NO_EXPERTS
) -> tuple[dict[str, Num], Num]:
    """E1: the cut network on these leaves -> ({site: a `[..., C]`}, output). No entry in `chosen`: the mixture chooses
    by itself."""
    acts: dict[str, Num] = {}

    def linear(module: str, x: Num, W: Array) -> Num:
        if module in components:
            V, U = components[module]["V"], components[module]["U"]
            acts[module] = activations(x, V, U)
            return leaves["components"][module] @ directions(U) + leaves["deltas"][module]
        return leaves["embeddings"] if module.endswith(EMBEDDING) else x @ W

    def hold(name: str, own: Array) -> Num:
        return leaves["embeddings"] if name == FEATURES else leaves["biases"][name]

    output = run_target(target, linear, lambda mixture, own: chosen.get(mixture, own), hold)
    return acts, output


LOGIT, FEATURE = "logit", "feature"


class Node(NamedTuple):
    """E3: at the position `at`, component `index` of the site `of`; or an output, of LOGIT or FEATURE."""

    of: str
    at: tuple[int, ...]
    index: int


def node_value(acts: Mapping[str, Num], output: Num, node: Node) -> Num:
    """E3: a_t, a scalar."""
    if node.of == LOGIT:
        return output[(*node.at, node.index)] - output[node.at].mean()
    return (output if node.of == FEATURE else acts[node.of])[(*node.at, node.index)]


class Edges(NamedTuple):
    """E2: the weights of all edges into one target. `embeddings`: of a Llama [B, T], of a `ToyTarget` [B, n], None
    where the embedding is a site or cannot be a leaf. A site that comes after the target has zeros."""

    components: dict[str, Array]  # {site: [..., C]}
    deltas: dict[str, Array]  # {site: [...]}
    embeddings: Array | None
    biases: float

    def total(self) -> float:
        """E4."""
        embeddings = [] if self.embeddings is None else [self.embeddings]
        return self.biases + sum(float(w.sum()) for w in tree_leaves([self.components, self.deltas, embeddings]))


def attributions(target: Target, components: dict, node: Node) -> Edges:
    """E2, E3: the edges into `node`."""
    at_clean, chosen = cut_leaves(target, components)
    leaves = tree_map(Var, at_clean)
    a = node_value(*cut_pass(target, components, leaves, chosen), node)
    # What reads no leaf (a component of the embedding) is an array.
    slopes = gradients(a if isinstance(a, Var) else Var(a), leaves)
    weights = tree_map(lambda leaf, slope: leaf * slope, at_clean, slopes)
    embeddings = weights.get("embeddings")
    if embeddings is not None and not isinstance(target, ToyTarget):
        embeddings = embeddings.sum(axis=-1)
    deltas = {s: w.sum(axis=-1) for s, w in weights["deltas"].items()}
    biases = sum(float(w.sum()) for w in weights["biases"].values())
    return Edges(weights["components"], deltas, embeddings, biases)


class EdgeSums(NamedTuple):
    """E8, of one row. `edges`: {(site of t, site of s): [C_t, C_s]}, of any two sites, the sums over the positions of s
    of lambda_s · l_s · dA_t/dl_s; by site: `importances` [C] and `squares` [C], the sums of lambda and of a^2 over the
    positions at which the site exists, and `positions`, their number."""

    edges: dict[tuple[str, str], Array]
    importances: dict[str, Array]
    squares: dict[str, Array]
    positions: dict[str, int]


def edge_sums(target: Target, components: dict, lower_ci: Mapping[str, Array]) -> EdgeSums:
    """E8: `target` on a batch of one row, lambda `[1, ..., C]` by site."""
    at_clean, chosen = cut_leaves(target, components)
    exists = existence(components, chosen)
    leaves = tree_map(Var, at_clean)
    acts, _ = cut_pass(target, components, leaves, chosen)
    there = {s: exists.get(s, np.ones(a.shape[:-1], dtype=bool)) for s, a in acts.items()}

    def into(t: str, c: int) -> dict[str, Array]:
        """Of the sources at every site, `[C_s]`."""
        A = where_it_exists(acts[t], t, exists)[..., c].sum()
        slopes = gradients(A if isinstance(A, Var) else Var(A), leaves["components"])
        at_each = {s: lower_ci[s] * at_clean["components"][s] * slopes[s] for s in acts}
        return {s: at_each[s][there[s]].sum(axis=0) for s in acts}

    rows = {t: [into(t, c) for c in range(a.shape[-1])] for t, a in acts.items()}
    return EdgeSums(
        {(t, s): np.stack([row[s] for row in rows[t]]) for t in acts for s in acts},
        {s: lower_ci[s][there[s]].sum(axis=0) for s in acts},
        {s: (value(a)[there[s]] ** 2).sum(axis=0) for s, a in acts.items()},
        {s: int(own.sum()) for s, own in there.items()},
    )


def average_attributions(rows: Sequence[EdgeSums]) -> dict[tuple[str, str], Array]:
    """E8: {(site of t, site of s): [C_t, C_s]}; 0 where a component never matters or never does anything."""

    def total(part: str) -> dict:
        return {key: sum(getattr(row, part)[key] for row in rows) for key in getattr(rows[0], part)}

    edges, importances, squares, positions = map(total, EdgeSums._fields)
    usual = {s: np.sqrt(squares[s] / max(positions[s], 1)) for s in squares}
    scales = {(t, s): np.outer(usual[t], importances[s]) for t, s in edges}
    return {key: np.divide(w, scales[key], out=np.zeros(w.shape), where=scales[key] > 0) for key, w in edges.items()}


def with_rests(edges: Edges, fires: Mapping[str, Array]) -> tuple[dict[str, Array], dict[str, Array]]:
    """E5: ({site: `[..., C]`} from the components that fire, 0 elsewhere; {site: `[...]`} from the rests).
    fires: {site: bool `[..., C]`}."""
    firing = {s: w * fires[s] for s, w in edges.components.items()}
    rests = {s: edges.deltas[s] + (w * ~fires[s]).sum(axis=-1) for s, w in edges.components.items()}
    return firing, rests


class RestParts(NamedTuple):
    """E10: the parts of one rest. `components` [C]: of those that do not fire there, 0 elsewhere."""

    components: Array
    delta: float


def rest_parts(
    kept: Sequence[tuple[Edges, float]], fires: Mapping[str, Array], site: str, at: tuple[int, ...]
) -> RestParts:
    """E10: of the rest of `site` at the position `at`. `kept`: of each target to which an edge of it is kept, all edges
    into the target, and its influence (of an output, its p)."""
    parts, delta = np.zeros(fires[site].shape[-1]), 0.0
    for edges, own in kept:
        firing, rests = with_rests(edges, fires)
        embeddings = [] if edges.embeddings is None else [edges.embeddings]
        size = abs(edges.biases) + sum(float(np.abs(w).sum()) for w in tree_leaves([firing, rests, embeddings]))
        factor = own * np.sign(rests[site][at]) / size
        parts += factor * edges.components[site][at] * ~fires[site][at]
        delta += factor * float(edges.deltas[site][at])
    return RestParts(parts, delta)


def influence_rows(weights: Array, biases: Array) -> Array:
    """E6: A `[n, n]`, by target and source, from the weights of the edges between nodes `[n, n]` and of those from the
    biases `[n]`. The rows of nodes without incoming edges are 0."""
    sums = np.abs(weights).sum(axis=1) + np.abs(biases)
    return np.abs(weights) / np.where(sums > 0, sums, 1.0)[:, None]


def influence(A: Array, p: Array) -> Array:
    """E6: `[n]`. p `[n]`: the probabilities of the outputs, 0 for other nodes; of any sum."""
    p = p / p.sum()
    return sum(p @ np.linalg.matrix_power(A, k) for k in range(1, len(A) + 1))


def largest(scores: Array, share: float) -> Array:
    """E7: bool, the fewest of the largest scores that have this share of their sum; of equal ones, the first."""
    order = np.argsort(-scores, axis=None, kind="stable")
    sums = np.cumsum(scores.flat[order])
    before = np.concatenate([[0.0], sums[:-1]])
    kept = np.zeros(scores.size, dtype=bool)
    kept[order] = before < share * sums[-1]
    return kept.reshape(scores.shape)


class Pruned(NamedTuple):
    """`nodes` bool [n] and `edges` bool [n, n], by target and source: those kept. `influence`: the share of all
    influence that the nodes left out had; `scores`: that of the scores of edges between kept nodes."""

    nodes: Array
    edges: Array
    influence: float
    scores: float


def prune(A: Array, p: Array, node_share: float = 0.8, edge_share: float = 0.98) -> Pruned:
    """E7. Outputs (p > 0) are kept."""
    of_node = influence(A, p)
    nodes = largest(of_node, node_share) | (p > 0)
    scores = (of_node + p / p.sum())[:, None] * A * np.outer(nodes, nodes)
    edges = largest(scores, edge_share) & (scores > 0)
    while (dead := nodes & (p == 0) & ~edges.any(axis=0)).any():  # by target and source: nothing leads on from these
        nodes, edges = nodes & ~dead, edges & ~dead[:, None]
    return Pruned(
        nodes, edges, float(of_node[~nodes].sum() / of_node.sum()), float(scores[~edges].sum() / scores.sum())
    )


# ---- Section 15: groups ----

Grouping = Sequence[Sequence[int]]
"""The members of each group."""


def group_activity(active: Array, groups: Grouping) -> Array:
    """G1: components' activity `[N, C]` -> groups' `[N, k]`, both bool."""
    return np.stack([active[:, list(members)].any(axis=1) for members in groups], axis=1)


def grouping_cost(active: Array, groups: Grouping, alpha: float) -> float:
    """G2: bits at a position."""
    shares, k = group_activity(active, groups).mean(axis=0), len(groups)
    return sum(float(s) * (math.log2(k) + alpha * len(members)) for s, members in zip(shares, groups, strict=True))


def merged(groups: Grouping, i: int, j: int) -> Grouping:
    return [*(g for n, g in enumerate(groups) if n not in (i, j)), [*groups[i], *groups[j]]]


def own_part(active: Array, groups: Grouping, i: int, j: int, alpha: float) -> float:
    """G4: the change of the cost, computed from the two groupings, without the numbering part."""
    change = grouping_cost(active, merged(groups, i, j), alpha) - grouping_cost(active, groups, alpha)
    k = len(groups)
    return change - float(group_activity(active, groups).mean(axis=0).sum()) * math.log2((k - 1) / k)


def kept_pairs(labels: Sequence[int]) -> set[tuple[int, int]]:
    """G7: the pairs of components that a grouping keeps together."""
    n = len(labels)
    return {(i, j) for i in range(n) for j in range(i + 1, n) if labels[i] == labels[j]}


def adjusted_rand(one: Sequence[int], other: Sequence[int]) -> float:
    """G7: (pairs in both - expected) / (mean of the pairs in each - expected)."""
    mine, theirs, n = kept_pairs(one), kept_pairs(other), len(one)
    expected = len(mine) * len(theirs) / (n * (n - 1) / 2)
    most = (len(mine) + len(theirs)) / 2
    return 1.0 if most == expected else (len(mine & theirs) - expected) / (most - expected)


# ---- Section 16: importances of one prompt ----

READINGS = ("ci", "random", "attack")


def prompt_error(clean: Array, masked: Num, at: int | None, outputs: Sequence[int] | None = None) -> Num:
    """O2: of a batch of one row, at the position `at`; of a toy, which has none, at None. `outputs`: those whose values
    are to be kept; None: R1."""
    if outputs is None:
        return mse_error(clean, masked) if at is None else kl_error(clean[0, at], masked[0, at])
    nodes = [Node(FEATURE, (0,), k) if at is None else Node(LOGIT, (0, at), k) for k in outputs]
    differences = [node_value({}, masked, node) - node_value({}, clean, node) for node in nodes]
    return sum(d**2 for d in differences) / len(nodes)


def reading_error(model: Decomposition, sources: Tree | None) -> Num:
    """O2: `model` has `prompt_error`. sources {site: {components, delta}}; None: those of the reading `ci`."""
    own = {s: constant_source(0.0, lam.shape[:-1]) for s, lam in model.lower.items()} if sources is None else sources
    return forward_error(model, Forward(tuple(model.lower), {}, own))


def judged_errors(
    model: Decomposition, draws: Sequence[Tree], starts: Sequence[Tree], step_size: float, n_steps: int
) -> dict[str, float]:
    """O2, to judge importances. `draws`: the sources of `random`; `starts`: where each attack begins."""
    model = model.detached()
    found = [fresh_attack(partial(reading_error, model), start, step_size, n_steps) for start in starts]
    return {
        "ci": float(reading_error(model, None)),
        "random": sum(float(reading_error(model, draw)) for draw in draws) / len(draws),
        "attack": max(float(reading_error(model, sources)) for sources in found),
    }


def allowed_errors(of_start: Mapping[str, float], multiple: float, is_kl: bool) -> dict[str, float]:
    """O4: b_r, from the errors that the start has when it is judged."""
    return {r: max(multiple * e, 0.001 if is_kl else 0.0) for r, e in of_start.items()}


def importances_size(lower_ci: Mapping[str, Num], penalty: Callable[[Num], Num]) -> Num:
    """O3: the sum of psi over all components and positions, without a gradient where lambda is 0."""

    def of_site(lam: Num) -> Num:
        free = value(lam) > 0
        return (penalty(lam) * free).sum() + (penalty(value(lam)) * ~free).sum()

    return sum(map(of_site, lower_ci.values()))


def lowering_loss(
    model: Decomposition,
    start_size: float,
    penalty: Callable[[Num], Num],
    weights: Mapping[str, float],
    allowed: Mapping[str, float],
    random: Tree,
    attack: Tree,
) -> tuple[Num, dict[str, Num]]:
    """O3: (the loss, {reading: e_r}) of lambda, `model.lower`. `start_size`: the sum of psi over lambda_0; `weights`:
    w_r by reading; `random` and `attack`: the sources of the two."""
    errors = {r: reading_error(model, own) for r, own in zip(READINGS, (None, random, attack), strict=True)}
    priced = sum(math.exp(weights[r]) / allowed[r] * errors[r] for r in READINGS)
    return importances_size(model.lower, penalty) / start_size + priced, errors


class Lowering(NamedTuple):
    """O3, O4: lambda, Adam's moments of it, the sources of the reading `attack`, and w_r by reading."""

    lower: dict[str, Array]
    moments: dict
    attack: Tree
    weights: dict[str, float]


class Lowered(NamedTuple):
    """`gradients` of the loss: {lower, attack}."""

    state: Lowering
    loss: float
    errors: dict[str, float]
    gradients: dict[str, Tree]


def lower_once(
    model: Decomposition,
    start: Mapping[str, Array],
    minimality: dict,
    allowed: Mapping[str, float],
    state: Lowering,
    random: Tree,
    *,
    lr: float,
    step_size: float,
    step: int,
    total: int,
) -> Lowered:
    """O3, O4: a step of the descent. `model`: whose lambda is not read; `minimality`: L2's entry in the schema;
    `random`: the sources of that reading in this step."""
    moving = {"lower": tree_map(Var, state.lower), "attack": tree_map(Var, state.attack)}
    at_lower = replace(model, components=tree_map(value, model.components), lower=moving["lower"])
    penalty = penalty_of(minimality, step, total)
    start_size = importances_size(start, penalty_of(minimality, 0, total))
    loss, errors = lowering_loss(at_lower, start_size, penalty, state.weights, allowed, random, moving["attack"])
    grads = gradients(loss, moving)
    direction, moments = adam_direction(grads["lower"], state.moments, (0.9, 0.99), 1e-8)
    lower_ci = tree_map(lambda x, d: np.clip(x - lr * d, 0, 1), state.lower, direction)
    attack = tree_map(lambda x, g: np.clip(x + step_size * np.sign(g), 0, 1), state.attack, grads["attack"])
    found = {r: float(value(e)) for r, e in errors.items()}
    excess = {r: float(np.clip(found[r] / allowed[r] - 1, -1, 1)) for r in found}
    weights = {r: max(w + 0.05 * excess[r], -3.0) for r, w in state.weights.items()}
    return Lowered(Lowering(lower_ci, moments, attack, weights), float(value(loss)), found, grads)


# ---- Section 17: baselines; SAEs and transcoders in place of an activation ----


def selected_error(
    target: Target, error: Callable[[Array, Num], Num], components: dict, masks: Mapping[str, Num]
) -> Num:
    """B4: R1 with the masks as they are, `[..., C]` by site. Every site is one of `components`; deltas are off."""
    off = {s: np.zeros(m.shape[:-1]) for s, m in masks.items()}
    output, _ = masked_pass(target, components, dict(masks), off, {})
    return error(clean_pass(target, list(masks)).output, output)


def part_scores(
    target: Target, error: Callable[[Array, Num], Num], components: dict, on: Mapping[str, Array], n_points: int = 2
) -> dict[str, Array]:
    """B2: {site: - integral of dR1/dm_c, `[..., C]`} along the masks that are 1 where `on`, t elsewhere."""
    scores = {s: np.zeros(own.shape) for s, own in on.items()}
    for i in range(n_points):
        masks = {s: Var(np.where(own, 1.0, (i + 0.5) / n_points)) for s, own in on.items()}
        slopes = gradients(selected_error(target, error, components, masks), masks)
        scores = {s: scores[s] - slopes[s] / n_points for s in scores}
    return scores


def choice_by_gradient(
    target: Target, error: Callable[[Array, Num], Num], components: dict, lead: tuple[int, ...], k: int
) -> dict[str, Array]:
    """B2: {site: bool `[..., C]`}, the k parts that are on."""
    on = {s: np.zeros((*lead, own["V"].shape[1]), dtype=bool) for s, own in components.items()}
    n = 0
    while n < k:
        scores = part_scores(target, error, components, on)
        joining = min(max(1, n // 8), k - n)
        for s, own in on.items():
            order = np.argsort(np.where(own, np.inf, -scores[s]), axis=-1, kind="stable")
            np.put_along_axis(own, order[..., :joining], True, axis=-1)
        n += joining
    return on


def matched(measure: Callable[[Array], Array], n_rows: int, l0: float) -> Array:
    """B5: what is expected of `measure`, means over rows, if every row draws how many parts it has on. It is given
    these numbers, k `[rows]`. All ways in which they can fall out are gone through."""
    found, share = 0.0, l0 - math.floor(l0)
    for larger in itertools.product((False, True), repeat=n_rows):
        probability = math.prod(share if x else 1 - share for x in larger)
        if probability > 0:
            k = np.where(larger, math.ceil(l0), math.floor(l0))
            found = found + probability * measure(np.maximum(k, 1))
    return np.asarray(found)


class Normalised(NamedTuple):
    """B6: x~, and the inverse."""

    x: Array
    back: Callable[[Array], Array]


def normalised(x: Array, how: str) -> Normalised:
    """B6: x `[..., d_in]`; `how`: `normalize_activations`."""
    if how == "constant_norm_rescale":
        factor = math.sqrt(x.shape[-1]) / np.linalg.norm(x, axis=-1, keepdims=True)
        return Normalised(x * factor, lambda y: y / factor)
    if how == "layer_norm":
        mu = x.mean(axis=-1, keepdims=True)
        sigma = x.std(axis=-1, ddof=1, keepdims=True)
        return Normalised((x - mu) / (sigma + 1e-5), lambda y: y * sigma + mu)
    assert how == "none"
    return Normalised(x, lambda y: y)


def dictionary_latents(config: dict, tensors: dict[str, Array], x: Array) -> Array:
    """B6: f `[..., d_sae]`. `config`, `tensors`: what SAELens writes; x: centred where it has to be."""
    architecture = config["architecture"].removesuffix("_transcoder").removesuffix("_skip")
    W_enc, lengths = tensors["W_enc"], np.linalg.norm(tensors["W_dec"], axis=-1)
    read = normalised(x, config["normalize_activations"]).x
    if config["apply_b_dec_to_input"]:
        read = read - tensors["b_dec"]
    pi = read @ W_enc
    if architecture == "gated":
        magnitude = np.maximum(pi * np.exp(tensors["r_mag"]) + tensors["b_mag"], 0)
        return magnitude * (pi + tensors["b_gate"] > 0)
    z = pi + tensors["b_enc"]
    if architecture == "jumprelu":
        return np.maximum(z, 0) * (z > tensors["threshold"])
    if architecture == "topk":
        if config.get("rescale_acts_by_decoder_norm", False):
            z = z * lengths
        return np.maximum(z, 0) * top_k(z, config["k"])
    assert architecture in ("standard", "transcoder", "skip"), architecture
    return np.maximum(z, 0)


def dictionary_output(config: dict, tensors: dict[str, Array], x: Array, f: Array) -> Array:
    """B6: y `[..., d_out]`."""
    W_dec = tensors["W_dec"]
    if config.get("rescale_acts_by_decoder_norm", False):
        W_dec = W_dec / np.linalg.norm(W_dec, axis=-1, keepdims=True)
    y = f @ W_dec + tensors["b_dec"]
    if "transcoder" not in config["architecture"]:
        return normalised(x, config["normalize_activations"]).back(y)
    return y + x @ tensors["W_skip"].T if "skip" in config["architecture"] else y


def fewer_latents(config: dict, tensors: dict[str, Array], f: Array, k: int) -> Array:
    """B6: f with the k largest f_j ||W_dec,j|| at each position, of equal ones those with the lower numbers."""
    lengths = np.linalg.norm(tensors["W_dec"], axis=-1)
    if config.get("rescale_acts_by_decoder_norm", False):
        lengths = np.ones_like(lengths)
    return np.where(top_k(f * lengths, k), f, 0)


# ---- Section 18: runs beside each other ----


def similarity(V: Array, U: Array, other_V: Array, other_U: Array) -> Array:
    """Cosines of the matrices V[:, i] U[i] with other_V[:, j] other_U[j], flattened: [n, m]."""
    one, other = (np.einsum("di,ie->ide", *x).reshape(x[1].shape[0], -1) for x in ((V, U), (other_V, other_U)))
    return one @ other.T / np.linalg.norm(one, axis=1)[:, None] / np.linalg.norm(other, axis=1)


def assigned_pairs(cosines: Array) -> list[tuple[int, int]]:
    """P5: pairs of rows and columns of the largest sum, as many as there are of the fewer; all subsets are tried."""
    if cosines.shape[0] > cosines.shape[1]:
        return sorted((i, j) for j, i in assigned_pairs(cosines.T))
    # By the columns that are taken: the best sum of the first rows, and its pairs.
    best: dict[frozenset[int], tuple[float, list[tuple[int, int]]]] = {frozenset(): (0.0, [])}
    for i, row in enumerate(cosines):
        longer: dict[frozenset[int], tuple[float, list[tuple[int, int]]]] = {}
        for taken, (total, pairs) in best.items():
            for j in set(range(len(row))) - taken:
                found = total + row[j], [*pairs, (i, j)]
                longer[taken | {j}] = max(longer.get(taken | {j}, found), found)
        best = longer
    return max(best.values())[1]


def mutual_pairs(cosines: Array) -> list[tuple[int, int]]:
    """P5 with too many components: those of which each is the other's most similar."""
    return [(i, j) for i, j in np.ndindex(*cosines.shape) if cosines[i, j] == cosines[i].max() == cosines[:, j].max()]


def firing_overlap(one: Array, other: Array) -> float:
    """P6 of where two components fire, [positions] each."""
    either = (one | other).sum()
    return float((one & other).sum() / either) if either else 0.0


# ---- Section 19: attention heads ----


def head_shares(vectors: Array, n_heads: int) -> Array:
    """H1 of `vectors` [C, heads * d]: [C, heads]."""
    squares = np.asarray(vectors, np.float64) ** 2
    whole = squares.sum(axis=1, keepdims=True)
    by_head = squares.reshape(len(squares), n_heads, -1).sum(axis=2)
    return np.divide(by_head, whole, out=np.zeros_like(by_head), where=whole > 0)


def turned(x: Array, position: int, freq: Array | None) -> Array:
    """A head's query or key x [d] at a position: complex numbers of the two halves turn; freq [d / 2], None turns
    nothing."""
    if freq is None:
        return x
    a, b = np.split(np.asarray(x, np.float64), 2)
    z = (a + 1j * b) * np.exp(1j * position * freq)
    return np.concatenate([z.real, z.imag])


def kappa(u_q: Array, u_k: Array, n_heads: int, n_kv: int, distance: int, freq: Array | None = None) -> Array:
    """H2's kappa [heads] of two rows of U."""
    queries = (u_q / np.linalg.norm(u_q)).reshape(n_heads, -1)
    keys = (u_k / np.linalg.norm(u_k)).reshape(n_kv, -1)
    found = [turned(q, distance, freq) @ keys[h * n_kv // n_heads] for h, q in enumerate(queries)]
    return np.array(found) / math.sqrt(queries.shape[1])


def query_key(q: tuple[Array, Array], k: tuple[Array, Array], kappas: Array) -> Array:
    """H2 by the weights: (V, U) of two components, and their kappas."""
    return math.prod(float(np.linalg.norm(x)) for x in (*q, *k)) * kappas


def query_key_on_text(a_q: Array, a_k: Array, kappas: Sequence[Array]) -> Array:
    """H2 on a text [heads, T, T]: activations (E1) of the two components, and kappa at every distance below T."""
    T = len(a_q)
    found = np.zeros((len(kappas[0]), T, T))
    for t in range(T):
        for s in range(t + 1):
            found[:, t, s] = a_q[t] * a_k[s] * kappas[t - s]
    return found


def attention_pattern(q: Array, k: Array, n_heads: int, n_kv: int, freq: Array | None = None) -> Array:
    """Causal attention [heads, T, T] of queries [T, heads * d] and keys [T, n_kv * d]."""
    T, d = len(q), q.shape[1] // n_heads
    pattern = np.zeros((n_heads, T, T))
    for h in range(n_heads):
        g = h * n_kv // n_heads
        for t in range(T):
            query = turned(q[t, h * d : (h + 1) * d], t, freq)
            scores = [query @ turned(k[s, g * d : (g + 1) * d], s, freq) / math.sqrt(d) for s in range(t + 1)]
            weights = np.exp(np.array(scores) - max(scores))
            pattern[h, t, : t + 1] = weights / weights.sum()
    return pattern


def head_scores(patterns: Array, tokens: Array) -> dict[str, Array]:
    """H3 of patterns [B, heads, T, T] on tokens [B, T]: by name, [heads]; NaN where no position counts."""
    reads: dict[str, Callable[[Array, int, int], bool]] = {
        "previous": lambda x, t, s: s == t - 1,
        "duplicate": lambda x, t, s: s < t and x[s] == x[t],
        "induction": lambda x, t, s: 0 < s < t and x[s - 1] == x[t],
        "first": lambda x, t, s: s == 0 and t > 0,
    }
    found = {}
    for name, counts in reads.items():
        sums = []
        for pattern, row in zip(patterns, tokens, strict=True):
            for t in range(len(row)):
                read = [s for s in range(t + 1) if counts(row, t, s)]
                if read:
                    sums.append(pattern[:, t, read].sum(axis=1))
        found[name] = np.mean(sums, axis=0) if sums else np.full(patterns.shape[1], np.nan)
    return found


def component_scores(shares: Array, of_query_heads: Array) -> Array:
    """H4: shares [C, heads or key heads], scores [heads]: [C]."""
    return shares @ of_query_heads.reshape(shares.shape[1], -1).mean(axis=1)
