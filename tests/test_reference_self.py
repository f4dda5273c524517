"""The NumPy reference against itself: finite differences, loops written out, and cases known by hand."""

import math
import re
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pytest

from tests import reference as ref
from tests.reference import Tree, Var, gradients, tree_leaves, tree_map, value

rng = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def _same_draws_whichever_tests_run() -> None:
    global rng
    rng = np.random.default_rng(1)


def normal(*shape: int) -> np.ndarray:
    return rng.normal(size=shape)


def uniform(*shape: int) -> np.ndarray:
    return rng.uniform(size=shape)


def dot(a: Tree, b: Tree) -> float:
    return sum(float((x * y).sum()) for x, y in zip(tree_leaves(a), tree_leaves(b), strict=True))


def assert_derivative(f: Callable[[Tree], ref.Num], tree: Tree, grads: Tree, tol: float = 1e-6) -> None:
    """Central differences of the scalar f, leaf by leaf along random directions, against `grads`."""
    leaves, flat = tree_leaves(tree), tree_leaves(grads)
    for i, (leaf, grad) in enumerate(zip(leaves, flat, strict=True)):
        assert grad.shape == leaf.shape
        direction, h = rng.normal(size=leaf.shape), 1e-5

        def at(sign: float, i: int = i, step: np.ndarray = h * direction) -> float:
            moved = iter([x + sign * step if j == i else x for j, x in enumerate(leaves)])
            return float(value(f(tree_map(lambda _: next(moved), tree))))

        numeric, exact = (at(1.0) - at(-1.0)) / (2 * h), float((grad * direction).sum())
        scale = np.abs(grad).max() * np.abs(direction).sum()
        assert abs(numeric - exact) <= tol * scale + 1e-9, (i, numeric, exact)


def check(f: Callable[[Tree], ref.Num], tree: Tree, tol: float = 1e-6) -> None:
    """The tape's gradient of the scalar f, and that an array in gives the same value out."""
    variables = tree_map(Var, tree)
    out = f(variables)
    assert isinstance(out, Var)
    assert not isinstance(f(tree), Var)
    np.testing.assert_allclose(out.value, f(tree), rtol=1e-14)
    assert_derivative(f, tree, gradients(out, variables), tol)


# ---- the tape ----

A, B, POSITIVE = normal(2, 3, 4), normal(3, 1), 0.5 + np.abs(normal(3, 4))
WEIGHT, RIGHT = normal(2, 3, 4), normal(2, 6)

OPERATIONS: dict[str, tuple[Callable, Tree]] = {
    "add": (lambda t: (WEIGHT * (t["a"] + t["b"] + 2.0 + WEIGHT)).sum(), {"a": A, "b": B}),
    "sub": (lambda t: (WEIGHT * (1.0 - t["a"] - t["b"] - WEIGHT)).sum(), {"a": A, "b": B}),
    "mul": (lambda t: (t["a"] * t["b"] * WEIGHT * t["a"]).sum(), {"a": A, "b": B}),
    "neg": (lambda t: (-t["a"] * WEIGHT).sum(), {"a": A}),
    "div": (lambda t: (WEIGHT / t["p"] + t["a"] / t["p"] / 3.0).sum(), {"a": A, "p": POSITIVE}),
    "pow": (lambda t: (t["p"] ** 0.4 + t["p"] ** -0.5 + t["p"] ** 2).sum(), {"p": POSITIVE}),
    "exp": (lambda t: (ref.exp(t["a"]) * WEIGHT).sum(), {"a": A}),
    "log": (lambda t: (ref.log(t["p"]) * WEIGHT).sum(), {"p": POSITIVE}),
    "erf": (lambda t: (ref.erf(t["a"]) * WEIGHT).sum(), {"a": A}),
    "sigmoid": (lambda t: (ref.sigmoid(t["a"]) * WEIGHT).sum(), {"a": A}),
    "relu": (lambda t: (ref.relu(t["a"]) * WEIGHT).sum(), {"a": A}),
    "gelu": (lambda t: (ref.gelu(t["a"]) * WEIGHT).sum(), {"a": A}),
    "log_softmax": (lambda t: (ref.log_softmax(t["a"]) * WEIGHT).sum(), {"a": A}),
    "matmul": (lambda t: ((t["a"] @ t["w"]) ** 2).sum(), {"a": A, "w": normal(4, 5)}),
    "matmul_batched": (lambda t: ((t["a"] @ t["w"]) ** 2).sum(), {"a": normal(5, 1, 2, 3), "w": normal(4, 3, 2)}),
    "matmul_mixed": (lambda t: ((WEIGHT @ t["w"]) @ RIGHT).sum(), {"w": normal(4, 2)}),
    "sum": (lambda t: (t["a"].sum(axis=(0, 2)) ** 2).sum() + (t["a"].sum(axis=1, keepdims=True) ** 2).sum(), {"a": A}),
    "mean": (lambda t: (t["a"].mean(axis=-1, keepdims=True) ** 2).mean(), {"a": A}),
    "shape": (lambda t: (t["a"].reshape(6, 4).swapaxes(0, 1) @ RIGHT.T).sum(), {"a": A}),
    "index": (lambda t: (t["a"][:, [0, 2, 0]] ** 2).sum() + (t["a"][..., None, 1:] ** 3).sum(), {"a": A}),
    "gather": (lambda t: (t["a"][np.array([[0, 1], [1, 1]])] ** 2).sum(), {"a": A}),
    "concatenate": (lambda t: (ref.concatenate([t["a"], WEIGHT, t["a"]], 1) ** 3).sum(), {"a": A}),
    "broadcast": (lambda t: (ref.broadcast_to(t["b"], (2, 3, 4)) * WEIGHT).sum(), {"b": B}),
    "rms_norm": (lambda t: (ref.rms_norm(t["a"], 1e-5) * WEIGHT).sum(), {"a": A}),
    "rotary": (lambda t: (ref.rotary(t["a"], ref.rope_frequencies(4, 100.0)) * WEIGHT).sum(), {"a": A}),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_tape(name: str) -> None:
    check(*OPERATIONS[name])


def test_stop_gradient_and_unused_leaves() -> None:
    x, unused = Var(A), Var(B)
    grads = gradients((x * value(x)).sum(), {"x": x, "unused": unused})
    np.testing.assert_array_equal(grads["x"], A)
    np.testing.assert_array_equal(grads["unused"], np.zeros(B.shape))


# ---- sites ----


def site(d_in: int = 4, d_out: int = 3, C: int = 5) -> dict[str, np.ndarray]:
    return {"W": normal(d_in, d_out), "V": normal(d_in, C) / 2, "U": normal(C, d_out) / 2}


def site_case() -> dict[str, np.ndarray]:
    route = np.array([[1.0, 0.0, 1.0], [0.0, 1.0, 1.0]])
    return {**site(), "x": normal(2, 3, 4), "mask": uniform(2, 3, 5), "delta": uniform(2, 3), "route": route}


def test_f1_is_f2_in_value_and_every_gradient() -> None:
    case = {**site_case(), "bias": normal(3)}
    outputs, weight = [], normal(2, 3, 3)
    for form in ref.masked_site, ref.masked_site_without_delta:
        variables = tree_map(Var, case)
        y = form(**variables)
        outputs.append((y.value, gradients((y * weight).sum(), variables)))
    np.testing.assert_allclose(outputs[0][0], outputs[1][0], atol=1e-13)
    for key in case:
        np.testing.assert_allclose(outputs[0][1][key], outputs[1][1][key], atol=1e-13)
    check(lambda t: (ref.masked_site(**t) ** 2).sum(), case)


def test_f1_at_one_position() -> None:
    c = site_case()
    y = ref.masked_site(**c)
    x, m, d = c["x"][1, 2], c["mask"][1, 2], c["delta"][1, 2]
    parts = sum(m[i] * (x @ c["V"][:, i]) * c["U"][i] for i in range(5))
    np.testing.assert_allclose(y[1, 2], parts + d * (x @ (c["W"] - c["V"] @ c["U"])))
    np.testing.assert_allclose(y[1, 0], c["x"][1, 0] @ c["W"])
    full = {**c, "mask": np.ones((2, 3, 5)), "delta": np.ones((2, 3))}
    np.testing.assert_allclose(ref.masked_site(**full), c["x"] @ c["W"])


# ---- causal importance ----

SIGMOIDS = ["normal", "hard", "leaky_hard", "upper_leaky_hard", "swish_hard", "two_sided_leaky_hard"]


@pytest.mark.parametrize("kind", SIGMOIDS)
@pytest.mark.parametrize("which", [ref.lower, ref.upper])
def test_squashing_derivatives_away_from_ties(kind: str, which: Callable) -> None:
    low = 0.05 if (which, kind) == (ref.lower, "leaky_hard") else -2.0
    z = np.linspace(low, 3.0, 38)
    check(lambda t: (which(t, kind) * np.linspace(-1, 1, 38)).sum(), z)


def test_c1() -> None:
    z = np.array([-1.0, -1.0, 0.0, 0.0, 0.5, 0.5, 1.0, 1.0, 2.0, 2.0])
    g = np.array([-1.0, 1.0] * 5)
    expected = [-0.01, 0.0, -0.01, 0.0, -1.0, 1.0, -1.0, 1.0, 0.0, 0.0]
    np.testing.assert_array_equal(ref.lower_leaky_vjp(z, g), expected)
    v = Var(z)
    lam = ref.lower(v, "leaky_hard")
    np.testing.assert_array_equal(lam.value, np.clip(z, 0, 1))
    np.testing.assert_array_equal(gradients((lam * g).sum(), v), expected)
    v = Var(-1.0)
    lam = ref.lower(v, "leaky_hard")  # the sign is that of the summed cotangent
    np.testing.assert_array_equal(gradients(lam * -3.0 + lam * 2.0, v), -0.01)


def test_c2_c3_values_and_ties() -> None:
    z = np.array([-1.0, 0.0, 0.25, 1.0, 3.0])
    np.testing.assert_allclose(ref.upper(z, "leaky_hard"), [0, 0, 0.25, 1, 1.02])
    np.testing.assert_array_equal(ref.upper_leaky_derivative(z), [0, 1, 1, 1, 0.01])
    np.testing.assert_array_equal(ref.hard_derivative(z), [0, 1, 1, 1, 0])
    np.testing.assert_array_equal(ref.upper(z, "hard"), ref.lower(z, "hard"))
    np.testing.assert_array_equal(ref.upper(z, "upper_leaky_hard"), ref.lower(z, "upper_leaky_hard"))
    np.testing.assert_allclose(ref.lower(np.array([0.0, 100.0, -800.0]), "normal"), [0.5, 1, 0])
    np.testing.assert_allclose(ref.upper(np.array([-9.0, 0.5, 9.0]), "swish_hard"), [0, 0.5, 1], atol=1e-12)


def layers(widths: list[int], C: int | None = None) -> list[dict[str, np.ndarray]]:
    lead = () if C is None else (C,)
    return [{"w": normal(*lead, i, o) / math.sqrt(i), "b": normal(*lead, o) / 3} for i, o in pairwise(widths)]


D_MODEL, HEADS = 8, 2
TRANSFORMER = {
    "fn_type": "global_shared_transformer",
    "simple_transformer_ci_cfg": {"d_model": D_MODEL, "n_blocks": 2, "attn_config": {"n_heads": HEADS}},
}


def ci_parameters(fn_type: str, widths: dict[str, int], C: dict[str, int]) -> Tree:
    total_in, total_C = sum(widths.values()), sum(C.values())
    match fn_type:
        case "mlp":
            return {s: layers([1, 3, 1], C[s]) for s in widths}
        case "vector_mlp":
            return {s: layers([widths[s], 3, 1], C[s]) for s in widths}
        case "shared_mlp":
            return {s: layers([widths[s], 6, C[s]]) for s in widths}
        case "global_shared_mlp":
            return layers([total_in, 6, 5, total_C])
        case "global_shared_transformer":
            square = {k: normal(D_MODEL, D_MODEL) / 3 for k in "qkvo"}
            return {
                "input": layers([total_in, D_MODEL])[0],
                "blocks": [{**square, "mlp": layers([D_MODEL, 12, D_MODEL])} for _ in range(2)],
                "head": layers([D_MODEL, total_C])[0],
            }
        case "chunkwise_transformer":
            return [ci_parameters("global_shared_transformer", {s: widths[s]}, {s: C[s]}) for s in widths]
    raise ValueError(fn_type)


BY_GROUP = {
    "fn_type": "chunkwise_transformer",
    "simple_transformer_ci_cfg": TRANSFORMER["simple_transformer_ci_cfg"],
    "groups": [["a"], ["b"]],
}
CI_CONFIGS = [{"fn_type": t} for t in ("mlp", "vector_mlp", "shared_mlp", "global_shared_mlp")] + [
    TRANSFORMER,
    BY_GROUP,
]


@pytest.mark.parametrize("config", CI_CONFIGS, ids=lambda c: c["fn_type"])
@pytest.mark.parametrize("lead", [(2, 3), (3,)])
def test_ci_functions(config: dict, lead: tuple[int, ...]) -> None:
    widths, C = {"a": 4, "b": 3}, {"a": 5, "b": 2}
    inputs = {s: normal(*lead, d) for s, d in widths.items()}
    tree = {
        "params": ci_parameters(config["fn_type"], widths, C),
        "inputs": inputs,
        "components": {s: {"V": normal(widths[s], C[s])} for s in widths},
    }
    weight = {s: normal(*lead, C[s]) for s in C}

    def f(t: Tree) -> ref.Num:
        logits = ref.ci_logits(config, t["params"], t["inputs"], t["components"])
        assert list(logits) == ["a", "b"]
        assert all(z.shape == (*lead, C[s]) for s, z in logits.items())
        return sum((z * weight[s]).sum() for s, z in logits.items())

    check(f, tree)
    variables = tree_map(Var, tree)
    to_V = gradients(f(variables), variables["components"])["a"]["V"]
    assert np.any(to_V != 0) == (config["fn_type"] == "mlp")  # C5


def readout_parameters(C: int) -> dict:
    return {name: normal(C) for name in ("s_plus", "a_plus", "b_plus", "s_minus", "a_minus", "b_minus", "b")}


def test_component_readout() -> None:
    """C7: by hand at four activations of one component, then around a function, with its gradients."""
    own = {"s_plus": 2.0, "a_plus": 0.5, "b_plus": 0.0, "s_minus": -3.0, "a_minus": 1.0, "b_minus": 0.5, "b": 7.0}
    own = {name: np.array([number]) for name, number in own.items()}
    # a h + b is 0.5, 1.5, 0, -1 on the one side; -0.5, -2.5, 0.5, 2.5 on the other.
    want = [2 * 0.5 - 3 * -0.005 + 7, 2 * 1.005 - 3 * -0.025 + 7, 0 - 3 * 0.5 + 7, 2 * -0.01 - 3 * 1.015 + 7]
    found = ref.component_readout(own, np.array([[1.0], [3.0], [0.0], [-2.0]]))
    np.testing.assert_allclose(found[:, 0], want, rtol=1e-14)

    widths, C = {"a": 4, "b": 3}, {"a": 5, "b": 2}
    inputs = {s: normal(2, 3, d) for s, d in widths.items()}
    tree = {
        "params": {
            "function": ci_parameters("shared_mlp", widths, C),
            "readout": {s: readout_parameters(C[s]) for s in C},
        },
        "components": {s: {"V": normal(widths[s], C[s])} for s in widths},
    }
    config = {"fn_type": "shared_mlp", "component_readout": True}
    weight = {s: normal(2, 3, C[s]) for s in C}

    def f(t: Tree) -> ref.Num:
        logits = ref.ci_logits(config, t["params"], inputs, t["components"])
        return sum((z * weight[s]).sum() for s, z in logits.items())

    check(f, tree)
    variables = tree_map(Var, tree)
    assert all(np.any(g != 0) for g in tree_leaves(gradients(f(variables), variables)["components"]))


def test_initial_readout() -> None:
    """C8: the scales are one over numpy's percentile, none is extreme, and nothing is added at the start."""
    h = normal(250, 4) * np.array([1.0, 1e-5, 0.0, 30.0])
    own = ref.initial_readout(h)
    q = np.percentile(np.abs(h), 99.9, axis=0)
    np.testing.assert_allclose(own["a_plus"], 1 / np.array([q[0], q[3] / 1000, q[3] / 1000, q[3]]), rtol=1e-12)
    np.testing.assert_array_equal(own["a_minus"], own["a_plus"])
    np.testing.assert_array_equal(ref.component_readout(own, h), 0.0)
    for nothing in (np.zeros((3, 4)), np.zeros((0, 4))):
        np.testing.assert_array_equal(ref.initial_readout(nothing)["a_plus"], 1.0)


def test_groups_have_transformers_of_their_own() -> None:
    """C6: a group's logits are those of its transformer on its own inputs, of these on what the patterns match."""
    widths, C = {"a": 4, "b": 3, "c": 5}, {"a": 5, "b": 2, "c": 4}
    inputs = {s: normal(2, 3, d) for s, d in widths.items()}
    assert ref.chunks_of_layers({"a": 0, "b": 0, "c": 3}, 1) == [["a", "b"], ["c"]]
    assert ref.chunks_of_layers({"a": 0, "b": 1, "c": 3}, 2) == [["a", "b"], ["c"]]
    config = BY_GROUP | {"groups": [["a", "b"], ["c"]], "input_patterns": ["[bc]"]}
    reads = {"b": 3}, {"c": 5}
    of_sites = {"a": 5, "b": 2}, {"c": 4}
    params = [ci_parameters("global_shared_transformer", *of) for of in zip(reads, of_sites, strict=True)]
    found = ref.chunkwise_ci(config, params, inputs, C)
    first = ref.transformer_ci(params[0], [inputs["b"]], HEADS, 10000.0)
    np.testing.assert_array_equal(np.concatenate([found["a"], found["b"]], axis=-1), first)
    np.testing.assert_array_equal(found["c"], ref.transformer_ci(params[1], [inputs["c"]], HEADS, 10000.0))
    with pytest.raises(AssertionError, match="nothing of"):
        ref.chunkwise_ci(config | {"input_patterns": ["b"]}, params, inputs, C)


def test_layerwise_mlps_are_one_per_component() -> None:
    x, V, scalar, vector = normal(2, 4), normal(4, 3), layers([1, 6, 1], 3), layers([4, 6, 1], 3)
    for c in range(3):
        own = [{k: a[c] for k, a in layer.items()} for layer in scalar]
        expected = ref.mlp(own, (x @ V[:, c])[:, None])[:, 0]
        np.testing.assert_allclose(ref.scalar_mlp_ci(scalar, x, V)[:, c], expected)
        own = [{k: a[c] for k, a in layer.items()} for layer in vector]
        np.testing.assert_allclose(ref.vector_mlp_ci(vector, x)[:, c], ref.mlp(own, x)[:, 0])


def loop_attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, n_heads: int, freq: np.ndarray, causal: bool):
    """Written out for one sequence, rotary by complex numbers."""
    T, hd = len(q), q.shape[1] // n_heads
    group = n_heads // (k.shape[1] // hd)

    def turned(x: np.ndarray, t: int) -> np.ndarray:
        return (x[: hd // 2] + 1j * x[hd // 2 :]) * np.exp(1j * t * freq)

    out = np.zeros(q.shape)
    for head in range(n_heads):
        mine, theirs = slice(head * hd, (head + 1) * hd), slice(head // group * hd, (head // group + 1) * hd)
        for t in range(T):
            last = t + 1 if causal else T
            scores = [(turned(q[t, mine], t) @ turned(k[s, theirs], s).conj()).real for s in range(last)]
            p = np.exp(np.array(scores) / math.sqrt(hd))
            out[t, mine] = (p / p.sum()) @ v[:last, theirs]
    return out


@pytest.mark.parametrize("causal", [True, False])
def test_attention_against_loops(causal: bool) -> None:
    q, k, v, freq = normal(2, 5, 16), normal(2, 5, 8), 2 * normal(2, 5, 8), ref.rope_frequencies(4, 50.0)
    out = ref.attention(q, k, v, 4, freq, causal)
    for b in range(2):
        np.testing.assert_allclose(out[b], loop_attention(q[b], k[b], v[b], 4, freq, causal))
    weight = normal(2, 5, 16) + 1
    check(lambda t: (ref.attention(*t, 4, freq, causal) * weight).sum(), [q, k, v])


def test_transformer_ci_written_out() -> None:
    xs = [normal(1, 3, 4) * 5, normal(1, 3, 3)]
    p = ci_parameters("global_shared_transformer", {"a": 4, "b": 3}, {"a": 5, "b": 2})

    def norm(x: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 2.0**-23)

    h = np.concatenate([norm(x) for x in xs], -1)[0] @ p["input"]["w"] + p["input"]["b"]
    for block in p["blocks"]:
        n = norm(h)
        q, k, v = n @ block["q"], n @ block["k"], n @ block["v"]
        h = h + loop_attention(q, k, v, HEADS, ref.rope_frequencies(4, 10000.0), False) @ block["o"]
        h = h + ref.mlp(block["mlp"], norm(h))
    expected = h @ p["head"]["w"] + p["head"]["b"]
    np.testing.assert_allclose(ref.transformer_ci(p, xs, HEADS, 10000.0)[0], expected)
    one = ref.transformer_ci(p, [x[:, 0] for x in xs], HEADS, 10000.0)
    np.testing.assert_allclose(one[:, None], ref.transformer_ci(p, [x[:, :1] for x in xs], HEADS, 10000.0))


# ---- masks, scopes, routing, live sets ----


def test_masks() -> None:
    lam, source = uniform(2, 3, 4), {"components": uniform(2, 3, 4), "delta": uniform(2, 3)}
    mask, delta = ref.site_masks(lam, source)
    np.testing.assert_allclose(mask, lam + (1 - lam) * source["components"])
    np.testing.assert_array_equal(delta, source["delta"])
    mask, delta = ref.site_masks(lam, ref.constant_source(0.0, (2, 3)))
    np.testing.assert_array_equal(mask, lam)
    np.testing.assert_array_equal(delta, np.zeros((2, 3)))
    np.testing.assert_allclose(ref.site_masks(lam, ref.constant_source(1.0, (2, 3)))[0], np.ones((2, 3, 4)))


@pytest.mark.parametrize(
    ("scope", "shape"),
    [
        ({"type": "single_source"}, (1, 1)),
        ({"type": "broadcast_across_batch"}, (1, 3)),
        ({"type": "repeat_across_batch", "n_sources": 2}, (2, 3)),
        ({"type": "per_batch_per_position"}, (4, 3)),
    ],
)
def test_persistent_scopes(scope: dict, shape: tuple[int, int]) -> None:
    lead = (4, 3)
    assert ref.persistent_scope_shape(scope, lead) == shape
    for trailing in (5,), ():
        source = normal(*shape, *trailing)
        full = ref.expand_scope(source, lead)
        assert full.shape == lead + trailing
        for row in range(4):
            for t in range(3):
                np.testing.assert_array_equal(full[row, t], source[row % shape[0], t % shape[1]])
    weight = normal(4, 3, 5)
    check(lambda t: (ref.expand_scope(t, lead) * weight).sum(), normal(*shape, 5))


def test_fresh_scopes() -> None:
    assert ref.fresh_scope_shape("shared_across_batch", (4, 3)) == (1, 1)
    assert ref.fresh_scope_shape("unique_per_datapoint", (4, 3)) == (4, 3)


def test_routing() -> None:
    scores, k = uniform(4, 2, 3), np.array([[1, 2, 3], [4, 1, 2]])
    routes = ref.uniform_k_subset(k, scores)
    np.testing.assert_array_equal(routes.sum(0), k)
    for b in range(2):
        for t in range(3):
            smallest = np.sort(scores[:, b, t])[: k[b, t]]
            np.testing.assert_array_equal(routes[:, b, t], np.isin(scores[:, b, t], smallest))
    np.testing.assert_array_equal(ref.uniform_k_subset(np.array([2]), np.zeros((3, 1)))[:, 0], [1, 1, 0])
    np.testing.assert_array_equal(ref.static_probability(np.array([0.0, 0.3, 0.29]), 0.3), [1, 0, 1])


def test_live_sets() -> None:
    sites = ("a", "b", "c", "d", "e")
    layerwise = [(s,) for s in sites]
    expected = {
        "UnmaskedReconLoss": [sites],
        "CIMaskedReconLoss": [sites],
        "CIMaskedReconSubsetLoss": [sites],
        "CIMaskedReconLayerwiseLoss": layerwise,
        "StochasticReconLoss": [sites] * 3,
        "StochasticReconSubsetLoss": [sites] * 3,
        "StochasticReconLayerwiseLoss": layerwise * 3,
        "ChunkwiseSubsetReconLoss": [("a", "b"), ("c", "d"), ("e",)] * 2,
        "PGDReconLoss": [sites],
        "PGDReconSubsetLoss": [sites],
        "PGDReconLayerwiseLoss": layerwise,
        "PersistentPGDReconLoss": [sites],
        "PersistentPGDReconSubsetLoss": [sites] * 2,
        "StochasticHiddenActsReconLoss": [sites] * 3,
        "CIHiddenActsReconLoss": [sites],
    }
    assert set(expected) == set(ref.RECONSTRUCTION)
    for name, lives in expected.items():
        assert ref.live_sets({"type": name, "sites_per_chunk": 2, "n_samples": 2}, sites, 3) == lives


# ---- errors and losses ----


def test_reconstruction_errors() -> None:
    clean, masked = normal(2, 3, 5), normal(2, 3, 5)
    by_hand = 0.0
    for c, m in zip(clean.reshape(6, 5), masked.reshape(6, 5), strict=True):
        p, q = np.exp(c) / np.exp(c).sum(), np.exp(m) / np.exp(m).sum()
        by_hand += (p * np.log(p / q)).sum() / 6
    np.testing.assert_allclose(ref.kl_error(clean, masked), by_hand)
    np.testing.assert_allclose(ref.mse_error(clean, masked), ((clean - masked) ** 2).sum() / 30)
    acts = {"a": normal(2, 4), "b": normal(2, 3)}
    other = {"a": acts["a"] + 1, "b": acts["b"] + 2}
    np.testing.assert_allclose(ref.hidden_acts_error(acts, other), (8 * 1 + 6 * 4) / 14)
    check(lambda t: ref.kl_error(clean, t), masked)
    check(lambda t: ref.mse_error(clean, t), masked)
    check(lambda t: ref.hidden_acts_error(acts, t), other)


def test_faithfulness() -> None:
    sites = {"a": site(4, 3, 5), "b": site(2, 6, 3)}
    weights = {s: x["W"] for s, x in sites.items()}
    components = {s: {"V": x["V"], "U": x["U"]} for s, x in sites.items()}
    squares = sum(((x["W"] - x["V"] @ x["U"]) ** 2).sum() for x in sites.values())
    np.testing.assert_allclose(ref.faithfulness(components, weights), squares / 24)
    check(lambda t: ref.faithfulness(t, weights), components)


@pytest.mark.parametrize(
    ("x", "nearest", "cut"),
    [
        (1 + 2.0**-8, 1.0, 1.0),
        (1 + 3 * 2.0**-8, 1 + 2.0**-6, 1 + 2.0**-7),
        (-0.1, -0.10009765625, -0.099609375),
    ],
)
def test_bfloat16_rounds_to_nearest_and_ties_to_even(x: float, nearest: float, cut: float) -> None:
    for scale in (1.0, 2.0**100, 2.0**-100):
        np.testing.assert_array_equal(ref.bfloat16(scale * np.array([x, 0.0])), scale * np.array([nearest, 0.0]))
        assert ref.significant(np.float64(scale * x), 8, np.trunc) == scale * cut


def in_two_parts(x: np.ndarray) -> np.ndarray:
    """x as the sum of the two bf16 numbers that N4 makes of it."""
    large = ref.bfloat16(x)
    return large + ref.bfloat16(x - large)


def test_split_product_leaves_out_the_product_of_the_second_parts() -> None:
    """N4."""
    V, U = in_two_parts(normal(5, 7)), in_two_parts(normal(7, 4))
    left_out = (V - ref.bfloat16(V)) @ (U - ref.bfloat16(U))
    for chunk in (1, 3, 7, 1024):
        np.testing.assert_allclose(ref.split_product(V, U, chunk), V @ U - left_out, rtol=0, atol=1e-14)
    assert np.all(np.abs(left_out) <= 2.0**-16 * (np.abs(V) @ np.abs(U)))


def test_only_the_large_product_is_in_chunks_and_sums_are_in_the_dtype_of_its_parts() -> None:
    """N4."""
    V, U = normal(5, 7), normal(7, 4)
    seen = []

    def product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        assert all(np.array_equal(x, ref.bfloat16(x)) for x in (a, b))
        seen.append(a.shape[1])
        return (a @ b).astype(np.float32)

    found = ref.split_product(V, U, chunk=3, product=product)
    assert seen == [3, 3, 1, 7, 7]
    assert found.dtype == np.float32
    V1, U1 = ref.bfloat16(V), ref.bfloat16(U)
    parts = [np.float32(V1[:, i : i + 3] @ U1[i : i + 3]) for i in (0, 3, 6)]
    small = np.float32(V1 @ ref.bfloat16(U - U1)) + np.float32(ref.bfloat16(V - V1) @ U1)
    np.testing.assert_array_equal(found, (parts[0] + parts[1] + parts[2]) + small)


def test_split_faithfulness() -> None:
    """N4: the value is that of the split products; the gradient multiplies delta, V and U in bf16."""
    x = site(4, 3, 5)
    W, components = x["W"], {"a": {"V": x["V"], "U": x["U"]}}
    d = W - ref.split_product(x["V"], x["U"])
    squares = partial(ref.split_squares, chunk=2)
    moving = tree_map(Var, components)
    loss = 3.0 * ref.faithfulness(moving, {"a": W}, squares)
    np.testing.assert_allclose(value(loss), 3 * np.mean(d * d))
    np.testing.assert_allclose(ref.faithfulness(components, {"a": W}, squares), np.mean(d * d))
    narrow, V1, U1 = (ref.bfloat16(y) for y in (d, x["V"], x["U"]))
    found = gradients(loss, moving)["a"]
    np.testing.assert_allclose(found["V"], -6 / d.size * narrow @ U1.T)
    np.testing.assert_allclose(found["U"], -6 / d.size * V1.T @ narrow)
    # Where nothing is rounded, it is L1.
    whole = tree_map(lambda y: np.round(4 * y), {"W": W, **components["a"]})
    exact = tree_map(Var, {"a": {name: whole[name] for name in "VU"}})
    grads = [gradients(ref.faithfulness(exact, {"a": whole["W"]}, s), exact) for s in (ref.delta_squares, squares)]
    tree_map(partial(np.testing.assert_allclose, rtol=1e-14), *grads)


def test_importance_minimality() -> None:
    ups = {"a": uniform(2, 3, 4), "b": uniform(2, 3, 2)}
    beta, p, eps, N = 0.7, 0.9, 1e-3, 6

    def penalty(u: ref.Num) -> ref.Num:
        return ref.lp_penalty(u, p, eps)

    by_hand = 0.0
    for u in ups.values():
        for c in range(u.shape[-1]):
            S = sum((u[b, t, c] + eps) ** p for b in range(2) for t in range(3))
            by_hand += S / N * (1 + beta * math.log2(1 + S))
    np.testing.assert_allclose(ref.importance_minimality(ups, penalty, beta), by_hand)
    plain, frequency = ref.importance_minimality(ups, penalty, 0.0), ref.importance_frequency(ups, penalty, N)
    np.testing.assert_allclose(plain + beta * frequency, by_hand)  # a = N, coeff_freq = coeff · beta
    np.testing.assert_allclose(ref.smooth_l0_penalty(np.array([0.0, 0.5, 1.0]), 0.5), [0, 0.5, 0.8])
    smooth = ref.penalty_of({"penalty": "smooth_l0", "gamma": {"start_val": 0.3}}, 0, 1)
    for psi in penalty, smooth:
        check(lambda t, psi=psi: ref.importance_minimality(t, psi, beta), ups)
        check(lambda t, psi=psi: ref.importance_frequency(t, psi, 100.0), ups)


def test_annealed_p() -> None:
    loss = {"pnorm": 2.0, "p_anneal_final_p": 0.4, "p_anneal_start_frac": 0.2, "p_anneal_end_frac": 0.7}
    values = [ref.annealed_p(loss, step, 100) for step in (0, 20, 45, 70, 99)]
    np.testing.assert_allclose(values, [2.0, 2.0, 1.2, 0.4, 0.4])
    assert ref.annealed_p({"pnorm": 2.0}, 99, 100) == 2.0


# ---- adversaries, optimisers, schedules ----


def test_fresh_attack() -> None:
    weight = np.array([1.0, -1.0, 0.0])
    out = ref.fresh_attack(lambda t: (t["s"] * weight).sum(), {"s": np.array([0.5, 0.5, 0.5])}, 0.3, 2)
    np.testing.assert_allclose(out["s"], [1.0, 0.0, 0.5])


def test_ascend() -> None:
    schedule = {"start_val": 0.1, "warmup_pct": 0.5}
    raw, g = {"s": np.array([0.5, 0.02, 0.99])}, {"s": np.array([3.0, -2.0, 1e-3])}
    adam = {"optimizer": {"type": "adam", "beta1": 0.5, "beta2": 0.99, "lr_schedule": schedule}}
    new, moments = ref.ascend(adam, raw, g, ref.zero_moments(raw), 5, 20)  # lr 0.05; first step = sign
    np.testing.assert_allclose(new["s"], [0.55, 0.0, 1.0], atol=1e-5)
    new, moments = ref.ascend(adam, new, g, moments, 5, 20)
    assert moments["count"] == 2
    np.testing.assert_allclose(moments["m"]["s"], 0.75 * g["s"])
    np.testing.assert_allclose(moments["v"]["s"], (0.01 + 0.99 * 0.01) * g["s"] ** 2)
    np.testing.assert_allclose(new["s"][0], 0.6, atol=1e-6)
    free = {**adam, "use_sigmoid_parameterization": True}
    np.testing.assert_allclose(
        ref.ascend(free, raw, g, ref.zero_moments(raw), 5, 20)[0]["s"], [0.55, -0.03, 1.04], atol=1e-5
    )
    np.testing.assert_allclose(ref.effective_sources(free, {"s": np.zeros(1)})["s"], [0.5])
    sign = {"optimizer": {"type": "sign", "lr_schedule": schedule}}
    np.testing.assert_allclose(ref.ascend(sign, raw, g, {}, 20, 20)[0]["s"], [0.6, 0.0, 1.0])


def test_schedules() -> None:
    warm = {"start_val": 2.0, "warmup_pct": 0.1, "final_val_frac": 0.1, "fn_type": "cosine"}
    assert [ref.schedule(warm, s, 100) for s in (0, 5, 10)] == [0.0, 1.0, 2.0]
    np.testing.assert_allclose(ref.schedule(warm, 99, 100), 0.2)
    linear = {"start_val": 1.0, "final_val_frac": 0.5, "fn_type": "linear"}
    np.testing.assert_allclose([ref.schedule(linear, s, 11) for s in (0, 5, 10)], [1.0, 0.75, 0.5])
    assert [ref.schedule({"start_val": 3.0}, s, 10) for s in (0, 9)] == [3.0, 3.0]
    assert ref.schedule(linear, 0, 1) == 1.0


def test_adamw_and_clip() -> None:
    p, grads = {"a": np.array([1.0, -2.0])}, [{"a": np.array([0.5, -4.0])}, {"a": np.array([1.0, 1.0])}]
    moments = ref.zero_moments(p)
    x, m, v = p["a"], 0.0, 0.0
    for t, g in enumerate(grads, 1):
        p, moments = ref.adamw(p, g, moments, 0.1, (0.8, 0.9), 0.01)
        m, v = 0.8 * m + 0.2 * g["a"], 0.9 * v + 0.1 * g["a"] ** 2
        x = x * (1 - 0.1 * 0.01) - 0.1 * (m / (1 - 0.8**t)) / (np.sqrt(v / (1 - 0.9**t)) + 1e-8)
        np.testing.assert_allclose(p["a"], x)
    g = {"a": np.array([3.0]), "b": [np.array([[4.0]])]}
    np.testing.assert_allclose(ref.clip_by_global_norm(g, 1.0)["b"][0], 4 / (5 + 1e-6))
    np.testing.assert_array_equal(ref.clip_by_global_norm(g, 6.0)["a"], [3.0])


def test_faithfulness_warmup_descends() -> None:
    s = site()
    components, weights = {"a": {"V": s["V"], "U": s["U"]}}, {"a": s["W"]}
    config = {"faithfulness_warmup_steps": 60, "faithfulness_warmup_lr": 0.02}
    after = ref.faithfulness_warmup(components, weights, config)
    assert ref.faithfulness(after, weights) < 0.1 * ref.faithfulness(components, weights)
    assert ref.faithfulness_warmup(components, weights, {}) is components


# ---- initial components from data ----

WIDE_AND_TALL = [(5, 8), (8, 5), (6, 6)]
"""d_in < d_out, d_in > d_out, and as large as each other."""


def start_of(d_in: int, d_out: int, C: int, rank: int | None = None, n: int = 40) -> tuple[np.ndarray, ...]:
    """W (of a rank, if given), n inputs that are not white, S, the drawn V, and the V and U of T6."""
    W = normal(d_in, d_out) if rank is None else normal(d_in, rank) @ normal(rank, d_out)
    x, drawn = normal(2, n // 2, d_in) @ normal(d_in, d_in), normal(d_in, C)
    S = ref.output_moment(x, W)
    start = ref.weighted_singular_vectors(W, S, drawn)
    return W, x.reshape(n, d_in), S, drawn, start["V"], start["U"]


@pytest.mark.parametrize("shape", WIDE_AND_TALL)
def test_initial_components_are_the_best_of_every_rank(shape: tuple[int, int]) -> None:
    """T6, B1: no k components have outputs nearer to the site's; r of them are the matrix."""
    r = min(shape)
    W, x, S, _, V, U = start_of(*shape, C=r)
    np.testing.assert_allclose(V @ U, W, atol=1e-12)
    s = np.linalg.svd(x @ W, compute_uv=False)
    for k in range(r):
        error = np.sum((x @ W - x @ V[:, :k] @ U[:k]) ** 2)
        assert error == pytest.approx(np.sum(s[k:] ** 2), rel=1e-9)
    # By another way, B1's own: singular vectors of M W.
    values, vectors = np.linalg.eigh(x.T @ x / len(x))
    root, inverse = ((vectors * values**power) @ vectors.T for power in (0.5, -0.5))
    A, sizes, B = np.linalg.svd(root @ W, full_matrices=False)
    for c in range(r):
        product = np.outer(inverse @ A[:, c] * sizes[c], B[c])
        np.testing.assert_allclose(np.outer(V[:, c], U[c]), product, atol=1e-9)
    # Eigenvectors of S with descending eigenvalues, in balance.
    lengths = np.linalg.norm(U, axis=1)
    u = U / lengths[:, None]
    np.testing.assert_allclose(u @ u.T, np.eye(r), atol=1e-12)
    np.testing.assert_allclose(u @ S @ u.T, np.diag(s[:r] ** 2), atol=1e-9 * s[0] ** 2)
    np.testing.assert_allclose(np.linalg.norm(V, axis=0), lengths, rtol=1e-12)
    assert np.all(np.max(U, axis=1) == np.max(np.abs(U), axis=1))


@pytest.mark.parametrize("shape", WIDE_AND_TALL)
def test_initial_components_fewer_and_more(shape: tuple[int, int]) -> None:
    """T6: fewer are the first; beyond r, and beyond the rank of W, V is the drawn one and U 0."""
    r = min(shape)
    W, _, S, drawn, V, U = start_of(*shape, C=r + 3)
    few = ref.weighted_singular_vectors(W, S, drawn[:, :2])
    np.testing.assert_array_equal(few["V"], V[:, :2])
    np.testing.assert_array_equal(few["U"], U[:2])
    np.testing.assert_allclose(V @ U, W, atol=1e-12)
    np.testing.assert_array_equal(V[:, r:], drawn[:, r:])
    assert not np.any(U[r:])
    for rank in (2, 0):
        W, _, _, drawn, V, U = start_of(*shape, C=r + 3, rank=rank)
        np.testing.assert_allclose(V @ U, W, atol=1e-12)
        np.testing.assert_array_equal(V[:, rank:], drawn[:, rank:])
        assert np.all(np.any(U, axis=1) == (np.arange(r + 3) < rank))


@pytest.mark.parametrize("shape", WIDE_AND_TALL)
def test_initial_components_from_few_positions(shape: tuple[int, int]) -> None:
    """T6: where S has a lower rank than W, what the positions do not show is still the matrix's."""
    W, x, _, _, V, U = start_of(*shape, C=min(shape), n=2)
    np.testing.assert_allclose(V @ U, W, atol=1e-12)
    np.testing.assert_allclose(x @ V[:, :2] @ U[:2], x @ W, atol=1e-9)


def test_initial_batches() -> None:
    shapes = [(100, 3), (5, 7)]
    assert [ref.initial_batches(shapes, n) for n in (1, 40, 79, 80, 81, 10**6)] == [80, 2, 2, 1, 1, 1]


# ---- Llama ----

ARCH = {"n_heads": 4, "n_kv_heads": 2, "head_dim": 4, "eps": 1e-5, "rope_theta": 100.0}
D, VOCAB, FF = 6, 9, 7
TOKENS = np.array([[1, 4, 2], [0, 8, 4]])
WIDTHS = {"q": (D, 16), "k": (D, 8), "v": (D, 8), "o": (16, D), "gate": (D, FF), "up": (D, FF), "down": (FF, D)}


def llama_weights(n_layers: int = 2) -> dict:
    norms = {"input_norm": 1 + 0.1 * normal(D), "post_norm": 1 - 0.1 * normal(D)}
    blocks = [
        {**{f"{k}_proj": (i + 1) * normal(*shape) / math.sqrt(shape[0]) for k, shape in WIDTHS.items()}, **norms}
        for i in range(n_layers)
    ]
    return {
        "embed": normal(VOCAB, D),
        "layers": blocks,
        "final_norm": 1 + 0.2 * normal(D),
        "head": normal(D, VOCAB),
    }


LLAMA = llama_weights()


def test_llama_written_out() -> None:
    w = LLAMA

    def norm(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * scale

    logits = ref.llama(w, TOKENS, lambda layer, kind, x, W: x @ W, **ARCH)
    for b in range(2):
        h = w["embed"][TOKENS[b]]
        for p in w["layers"]:
            x = norm(h, p["input_norm"])
            q, k, v = x @ p["q_proj"], x @ p["k_proj"], x @ p["v_proj"]
            h = h + loop_attention(q, k, v, 4, ref.rope_frequencies(4, 100.0), True) @ p["o_proj"]
            x = norm(h, p["post_norm"])
            gate = x @ p["gate_proj"]
            h = h + (gate / (1 + np.exp(-gate)) * (x @ p["up_proj"])) @ p["down_proj"]
        np.testing.assert_allclose(logits[b], norm(h, w["final_norm"]) @ w["head"])


def test_llama_calls_in_canonical_order_and_differentiates() -> None:
    w, calls = LLAMA, []
    ref.llama_target(w, TOKENS, **ARCH)(lambda module, x, W: (calls.append(module), x @ W)[1])
    kinds = ["q", "k", "v", "o", "gate", "up", "down"]
    assert calls == ["model.embed_tokens", *(ref.llama_site(i, kind) for i in range(2) for kind in kinds)]
    assert calls[8] == "model.layers.1.self_attn.q_proj"
    weight = normal(2, 3, VOCAB)
    check(lambda t: (ref.llama(t, TOKENS, lambda i, k, x, W: x @ W, **ARCH) * weight).sum(), w)


def test_llama3_rope_scaling() -> None:
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    plain = ref.rope_frequencies(16, 10000.0)
    scaled = ref.rope_frequencies(16, 10000.0, scaling)
    regimes = set()
    for f, g in zip(plain, scaled, strict=True):
        wave = 2 * math.pi / f
        if wave < 64 / 4.0:
            regimes.add("short")
            assert g == f
        elif wave > 64 / 1.0:
            regimes.add("long")
            assert g == f / 8
        else:
            regimes.add("middle")
            smooth = (64 / wave - 1.0) / (4.0 - 1.0)
            np.testing.assert_allclose(g, (1 - smooth) * f / 8 + smooth * f)
    assert regimes == {"short", "middle", "long"}


# ---- the training step ----

CHOSEN = [(0, "q"), (0, "o"), (0, "down"), (1, "k"), (1, "gate")]
SITES = [ref.llama_site(*x) for x in CHOSEN]
C = dict(zip(SITES, (4, 3, 5, 2, 6), strict=True))
SHAPES = {ref.llama_site(i, k): WIDTHS[k] for i, k in CHOSEN}
LEAD = TOKENS.shape
ADAM = {"type": "adam", "beta1": 0.5, "beta2": 0.99, "lr_schedule": {"start_val": 0.05}}
PERSISTENT = {
    "type": "PersistentPGDReconLoss",
    "coeff": 0.5,
    "scope": {"type": "repeat_across_batch", "n_sources": 1},
    "optimizer": ADAM,
    "n_warmup_steps": 0,
}
CHUNKWISE = {"type": "ChunkwiseSubsetReconLoss", "coeff": 0.7, "sites_per_chunk": 2, "n_samples": 2}
MINIMALITY = {"type": "ImportanceMinimalityLoss", "coeff": 0.03, "pnorm": 1.3, "beta": 0.5, "eps": 1e-6}
FAITHFUL = {"type": "FaithfulnessLoss", "coeff": 2.0}


def make_config(losses: list[dict], **changes: object) -> dict:
    return {
        "steps": 10,
        "n_mask_samples": 2,
        "sigmoid_type": "normal",  # differentiable, so that finite differences apply
        "ci_config": TRANSFORMER,
        "components_optimizer": {"lr_schedule": {"start_val": 0.01}, "grad_clip_norm": 0.05},
        "ci_fn_optimizer": {"lr_schedule": {"start_val": 0.02}, "weight_decay": 0.1},
        "loss_metrics": losses,
        **changes,
    }


def source(lead: tuple[int, ...], sites: list[str] = SITES, delta: bool = True) -> dict:
    return {s: {"components": uniform(*lead, C[s]), **({"delta": uniform(*lead)} if delta else {})} for s in sites}


class Case(NamedTuple):
    """A Llama and the sites that are chosen in it; their shapes and C are in SHAPES and C."""

    weights: dict
    sites: list[str]
    arch: dict

    def target(self) -> ref.Target:
        return ref.llama_target(self.weights, TOKENS, **self.arch)


DENSE = Case(LLAMA, SITES, ARCH)


def make_draws(config: dict, sites: list[str] = SITES) -> dict:
    draws = {}
    for loss in config["loss_metrics"]:
        if loss["type"] not in ref.RECONSTRUCTION:
            continue
        row, given = ref.RECONSTRUCTION[loss["type"]], []
        for live in ref.live_sets(loss, sites, config["n_mask_samples"]):
            draw: dict = {}
            if "Subset" in loss["type"]:
                k = rng.integers(1, len(live) + 1, LEAD)
                draw["routes"] = dict(zip(live, ref.uniform_k_subset(k, uniform(len(live), *LEAD)), strict=True))
            if row.source in ("stochastic", "fresh"):
                lead = (1, 1) if loss.get("mask_scope") == "shared_across_batch" else LEAD
                draw["sources"] = source(lead, list(live))
            given.append(draw)
        if loss["type"] == "PersistentPGDReconSubsetLoss":
            given += [{"routes": {s: coins(*LEAD) for s in sites}} for _ in range(loss["n_warmup_steps"])]
        draws[ref.term_name(loss)] = given
    return draws


def coins(*shape: int) -> np.ndarray:
    return ref.static_probability(uniform(*shape), 0.6)


def make_state(config: dict, sites: list[str] = SITES) -> dict:
    components = {s: {"V": normal(SHAPES[s][0], C[s]) / 2, "U": normal(C[s], SHAPES[s][1]) / 2} for s in sites}
    widths = {s: SHAPES[s][0] for s in sites}
    ci = ci_parameters(config["ci_config"]["fn_type"], widths, {s: C[s] for s in sites})
    bundles = {
        ref.term_name(loss): source(ref.persistent_scope_shape(loss["scope"], LEAD), sites)
        for loss in config["loss_metrics"]
        if loss["type"].startswith("Persistent")
    }
    return {
        "step": 3,
        "components": components,
        "ci": ci,
        "components_moments": ref.zero_moments(components),
        "ci_moments": ref.zero_moments(ci),
        "sources": bundles,
        "source_moments": {name: ref.zero_moments(bundle) for name, bundle in bundles.items()},
    }


def run(config: dict, state: dict, draws: dict, case: Case = DENSE) -> ref.StepResult:
    return ref.training_step(case.target(), ref.kl_error, case.sites, config, state, draws)


def assert_step_gradients(config: dict, tol: float = 1e-6) -> ref.StepResult:
    """Finite differences of the step's total in components, CI function and sources."""
    state, draws = make_state(config), make_draws(config)
    result = run(config, state, draws)
    trained = {k: state[k] for k in ("components", "ci", "sources")}
    coeffs = {ref.term_name(loss): loss["coeff"] for loss in config["loss_metrics"]}
    of_total = {
        name: tree_map(lambda g, c=coeffs[name]: c * g, grads) for name, grads in result.gradients["sources"].items()
    }
    grads = {**result.gradients, "sources": of_total}
    assert_derivative(lambda t: run(config, {**state, **t}, draws).total, trained, grads, tol)
    np.testing.assert_allclose(result.total, sum(coeffs[n] * term for n, term in result.terms.items()))
    return result


@pytest.mark.slow
@pytest.mark.parametrize("ci_config", CI_CONFIGS, ids=lambda c: c["fn_type"])
def test_step_gradients_by_ci_function(ci_config: dict) -> None:
    stochastic = {"type": "StochasticReconLoss", "coeff": 1.0}
    losses = [CHUNKWISE, PERSISTENT, MINIMALITY, FAITHFUL, stochastic]
    if "groups" in ci_config:
        ci_config = ci_config | {"groups": [[site] for site in SITES]}
    assert_step_gradients(make_config(losses, ci_config=ci_config))


PERSISTENT_NAMES = ["PersistentPGDReconLoss", "PersistentPGDReconSubsetLoss"]


COVERED_BY_OTHERS = {
    "StochasticReconLoss", "StochasticReconSubsetLoss", "StochasticReconLayerwiseLoss", "StochasticHiddenActsReconLoss",
    "PGDReconSubsetLoss", "PGDReconLayerwiseLoss",
}  # fmt: skip
"""Terms whose live sets, routing, sources and error are those of others."""


@pytest.mark.parametrize(
    ("name", "sigmoid_source"),
    [
        *((name, False) for name in ref.RECONSTRUCTION if name not in COVERED_BY_OTHERS),
        *(pytest.param(name, False, marks=pytest.mark.slow) for name in sorted(COVERED_BY_OTHERS)),
        ("PersistentPGDReconLoss", True),
        pytest.param("PersistentPGDReconSubsetLoss", True, marks=pytest.mark.slow),
    ],
)
def test_step_gradients_by_term(name: str, sigmoid_source: bool) -> None:
    loss = {
        **PERSISTENT,
        "type": name,
        "sites_per_chunk": 2,
        "n_samples": 2,
        "n_steps": 0,  # with more, components move the attack, which the loss holds fixed
        "step_size": 0.1,
        "use_sigmoid_parameterization": sigmoid_source,
    }
    assert_step_gradients(make_config([loss], ci_config={"fn_type": "shared_mlp"}))


@pytest.mark.parametrize("name", ["PGDReconLoss", "PGDReconSubsetLoss", "PGDReconLayerwiseLoss"])
@pytest.mark.parametrize("mask_scope", ["shared_across_batch", "unique_per_datapoint"])
def test_fresh_attack_raises_the_error_and_is_constant(name: str, mask_scope: str) -> None:
    loss = {"type": name, "coeff": 1.0, "n_steps": 3, "step_size": 0.2, "mask_scope": mask_scope}
    config = make_config([loss], ci_config={"fn_type": "shared_mlp"})
    state, draws = make_state(config), make_draws(config)
    attacked = run(config, state, draws)
    before = run(make_config([{**loss, "n_steps": 0}], ci_config={"fn_type": "shared_mlp"}), state, draws)
    assert attacked.total > before.total


def hand_warmed(config: dict, state: dict, routes: list[dict]) -> tuple[dict, dict]:
    """An ascent for each of these routes from the definition: the gradient of the error with all sites live."""
    loss = config["loss_metrics"][0]
    raw, moments = state["sources"][loss["type"]], state["source_moments"][loss["type"]]
    target = ref.llama_target(LLAMA, TOKENS, **ARCH)
    clean = ref.clean_pass(target, SITES)
    lam, _ = ref.causal_importance(config, state["ci"], clean.inputs, state["components"])
    for routed in routes:
        moving = tree_map(Var, raw)
        used = tree_map(ref.sigmoid, moving) if loss["use_sigmoid_parameterization"] else moving
        masks = {s: lam[s] + (1 - lam[s]) * used[s]["components"] for s in SITES}
        deltas = {s: used[s]["delta"] + np.zeros(LEAD) for s in SITES}
        output, _ = ref.masked_pass(target, state["components"], masks, deltas, routed)
        grads = gradients(ref.kl_error(clean.output, output), moving)
        raw, moments = ref.ascend(loss, raw, grads, moments, state["step"], config["steps"])
    return raw, moments


@pytest.mark.parametrize("name", PERSISTENT_NAMES)
@pytest.mark.parametrize("scope", ["single_source", "broadcast_across_batch", "per_batch_per_position"])
@pytest.mark.parametrize("sigmoid_source", [False, True])
def test_persistent_sources_warm_up_and_ascend(name: str, scope: str, sigmoid_source: bool) -> None:
    changes = {"n_warmup_steps": 2, "n_samples": 2, "use_sigmoid_parameterization": sigmoid_source}
    loss = {**PERSISTENT, "type": name, "scope": {"type": scope}, **changes}
    changes = {"ci_config": {"fn_type": "mlp"}, "sigmoid_type": "leaky_hard"}
    config, cold = make_config([loss, FAITHFUL], **changes), {**loss, "n_warmup_steps": 0}
    state, draws = make_state(config), make_draws(config)
    result = run(config, state, draws)
    routed = "Subset" in name
    raw, moments = hand_warmed(config, state, [draw["routes"] for draw in draws[name][2:]] if routed else [{}] * 2)
    warm = {**state, "sources": {name: raw}, "source_moments": {name: moments}}
    again = run(make_config([cold, FAITHFUL], **changes), warm, {name: draws[name][:2] if routed else draws[name]})
    assert result.state["source_moments"][name]["count"] == 3
    for a, b in zip(tree_leaves(result._asdict()), tree_leaves(again._asdict()), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-14)
    # A4: the term's own gradient, whatever the coefficient; one update from it.
    heavy = run(make_config([{**loss, "coeff": 50.0}, FAITHFUL], **changes), state, draws)
    own = result.gradients["sources"][name]
    for a, b in zip(tree_leaves(own), tree_leaves(heavy.gradients["sources"][name]), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10)
    last, _ = ref.ascend(loss, raw, own, moments, state["step"], config["steps"])
    for a, b in zip(tree_leaves(last), tree_leaves(result.state["sources"][name]), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-12)
        assert sigmoid_source or (a.min() >= 0 and a.max() <= 1)


def test_persistent_term_that_is_off_is_not_computed() -> None:
    config = make_config([{**PERSISTENT, "start_frac": 0.4}, FAITHFUL])
    state = make_state(config)
    off, on = run(config, state, {}), run(config, {**state, "step": 4}, {})
    assert list(off.terms) == ["FaithfulnessLoss"]
    assert set(on.terms) == {"FaithfulnessLoss", "PersistentPGDReconLoss"}
    assert off.state["source_moments"] == state["source_moments"]
    assert on.state["source_moments"]["PersistentPGDReconLoss"]["count"] == 1


def test_two_bundles_do_not_meet() -> None:
    second = {**PERSISTENT, "name": "second", "coeff": 3.0, "optimizer": {**ADAM, "type": "sign"}, "n_warmup_steps": 1}
    both, state = make_config([PERSISTENT, second]), make_state(make_config([PERSISTENT, second]))
    first = run(make_config([PERSISTENT]), state, {}).state["sources"]["PersistentPGDReconLoss"]
    together = run(both, state, {}).state["sources"]["PersistentPGDReconLoss"]
    for a, b in zip(tree_leaves(first), tree_leaves(together), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-10)


def test_step_updates_parameters_by_clipped_adamw() -> None:
    config = make_config([CHUNKWISE, PERSISTENT, MINIMALITY, FAITHFUL], sigmoid_type="leaky_hard")
    state, draws = make_state(config), make_draws(config)
    result = run(config, state, draws)
    assert result.state["step"] == 4
    grads = result.gradients["components"]
    factor = 0.05 / (math.sqrt(dot(grads, grads)) + 1e-6)
    assert factor < 1
    for s in SITES:
        g = grads[s]["V"] * factor
        expected = state["components"][s]["V"] - 0.01 * g / (np.abs(g) + 1e-8)
        np.testing.assert_allclose(result.state["components"][s]["V"], expected)
    p, g = state["ci"]["head"]["w"], result.gradients["ci"]["head"]["w"]
    expected = p - 0.02 * (0.1 * p + g / (np.abs(g) + 1e-8))
    np.testing.assert_allclose(result.state["ci"]["head"]["w"], expected)
    third = run(config, run(config, result.state, draws).state, draws)
    assert third.total < result.total
    assert third.state["components_moments"]["count"] == 3


def test_frequency_form_in_the_step() -> None:
    N = math.prod(LEAD)
    frequency = {"coeff": MINIMALITY["coeff"] * MINIMALITY["beta"], "reference_token_count": N}
    a = make_config([MINIMALITY])
    b = make_config([{**MINIMALITY, "frequency": frequency}])
    state = make_state(a)
    x, y = run(a, state, {}), run(b, state, {})
    np.testing.assert_allclose(x.total, y.total)
    assert list(y.terms) == ["ImportanceMinimalityLoss", "ImportanceMinimalityLoss/frequency"]
    for g, h in zip(tree_leaves(x.gradients["ci"]), tree_leaves(y.gradients["ci"]), strict=True):
        np.testing.assert_allclose(g, h, atol=1e-13)


def test_no_delta_component() -> None:
    config = make_config([{"type": "StochasticReconLoss", "coeff": 1.0}], n_mask_samples=1)
    state, draws = make_state(config), [{"sources": source(LEAD, delta=False)}]
    zero = [{"sources": {s: {**x, "delta": np.zeros(LEAD)} for s, x in draws[0]["sources"].items()}}]
    a = run(config, state, {"StochasticReconLoss": draws})
    b = run(config, state, {"StochasticReconLoss": zero})
    assert a.total == b.total


def test_toy_target_with_tied_weights() -> None:
    """TMS-like: linear2 = linear1 transposed, one trained pair, MSE, inputs without a sequence axis."""
    W, x, sites = normal(5, 2), uniform(4, 5), ["linear1", "linear2"]

    def target(linear: ref.Linear) -> ref.Num:
        return ref.gelu(linear("linear2", linear("linear1", x, W), W.T))

    losses = [FAITHFUL, {"type": "StochasticReconLoss", "coeff": 1.0}, {**MINIMALITY, "beta": 0.1}]
    shared = {"fn_type": "shared_mlp"}
    tied = make_config(losses, n_mask_samples=1, ci_config=shared, tied_weights=[sites])
    components = {"linear1": {"V": normal(5, 3), "U": normal(3, 2)}}
    ci = ci_parameters("shared_mlp", {"linear1": 5, "linear2": 2}, {"linear1": 3, "linear2": 3})
    state = {
        "step": 0,
        "components": components,
        "ci": ci,
        "components_moments": ref.zero_moments(components),
        "ci_moments": ref.zero_moments(ci),
        "sources": {},
        "source_moments": {},
    }
    draws = {
        "StochasticReconLoss": [{"sources": {s: {"components": uniform(4, 3), "delta": uniform(4)} for s in sites}}]
    }
    result = ref.training_step(target, ref.mse_error, sites, tied, state, draws)

    def total(c: Tree) -> float:
        return ref.training_step(target, ref.mse_error, sites, tied, {**state, "components": c}, draws).total

    assert_derivative(total, components, result.gradients["components"])
    views = {"linear2": {"V": components["linear1"]["U"].T, "U": components["linear1"]["V"].T}}
    both = {**components, **views}
    free = {**state, "components": both, "components_moments": ref.zero_moments(both)}
    config = make_config(losses, n_mask_samples=1, ci_config=shared)
    untied = ref.training_step(target, ref.mse_error, sites, config, free, draws)
    np.testing.assert_allclose(untied.terms["FaithfulnessLoss"], result.terms["FaithfulnessLoss"])
    added = untied.gradients["components"]["linear1"]["V"] + untied.gradients["components"]["linear2"]["U"].T
    np.testing.assert_allclose(result.gradients["components"]["linear1"]["V"], added)


def test_tied_faithfulness_warmup_trains_one_pair() -> None:
    """T3, T4: the loss it descends counts both sites."""
    weights = {"linear1": normal(5, 2), "linear2": normal(2, 5)}
    components = {"linear1": {"V": normal(5, 3), "U": normal(3, 2)}}
    tied = [["linear1", "linear2"]]

    def error(components: Tree) -> ref.Num:
        return ref.faithfulness(ref.tie(components, tied), weights)

    check(error, components)
    config = {"faithfulness_warmup_steps": 1, "faithfulness_warmup_lr": 0.01, "tied_weights": tied}
    after = ref.faithfulness_warmup(components, weights, config)
    moving = tree_map(Var, components)
    expected = tree_map(lambda p, g: p - 0.01 * np.sign(g), components, gradients(error(moving), moving))
    for a, b in zip(tree_leaves(after), tree_leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-7)


def test_tms_written_out() -> None:
    W1, W2, bias, x = normal(5, 2), normal(2, 5), normal(5), normal(4, 5)
    hidden = [normal(2, 2), normal(2, 2)]
    target = ref.tms_target({"linear1": W1, "hidden_layers": hidden, "linear2": W2, "bias": bias}, x)
    calls = []
    y = target(lambda module, x, W: (calls.append(module), x @ W)[1])
    assert calls == ["linear1", "hidden_layers.0", "hidden_layers.1", "linear2"]
    for row in range(4):
        h = hidden[1].T @ (hidden[0].T @ (W1.T @ x[row]))
        np.testing.assert_allclose(y[row], [max(0.0, W2[:, n] @ h + bias[n]) for n in range(5)])
    assert (y == 0).any()
    assert (y > 0).any()


@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("biases", [(), ("in_bias",), ("in_bias", "out_bias")])
def test_resid_mlp_written_out(activation: str, biases: tuple[str, ...]) -> None:
    embed, x, widths = normal(5, 6), normal(4, 5), {"in_bias": 3, "out_bias": 6}
    layers = [
        {"mlp_in": normal(6, 3), "mlp_out": normal(3, 6), **{name: normal(widths[name]) for name in biases}}
        for _ in range(2)
    ]
    target = ref.resid_mlp_target(embed, layers, x, activation)
    calls = []
    y = target(lambda module, x, W: (calls.append(module), x @ W)[1])
    assert calls == [f"layers.{i}.{kind}" for i in range(2) for kind in ("mlp_in", "mlp_out")]

    def act(z: float) -> float:
        return max(0.0, z) if activation == "relu" else z * 0.5 * (1 + math.erf(z / math.sqrt(2)))

    for row in range(4):
        residual = embed.T @ x[row]
        for p in layers:
            neurons = [act(z) for z in p["mlp_in"].T @ residual + p.get("in_bias", 0)]
            residual = residual + p["mlp_out"].T @ np.array(neurons) + p.get("out_bias", 0)
        np.testing.assert_allclose(y[row], embed @ residual)


def test_identity_sites() -> None:
    """A masked identity changes what its module reads, and what no other reads."""
    x, A, B = normal(3, 4), normal(4, 2), normal(4, 5)

    def target(linear: ref.Linear) -> ref.Num:
        return ref.concatenate([linear("a", x, A), linear("b", x, B)], axis=-1)

    extended = ref.with_identity_sites(target, ["a.pre_identity", "b"])
    clean = ref.clean_pass(extended, ["a.pre_identity", "b"])
    np.testing.assert_array_equal(clean.output, np.concatenate([x @ A, x @ B], axis=-1))
    np.testing.assert_array_equal(clean.weights["a.pre_identity"], np.eye(4))
    np.testing.assert_array_equal(clean.outputs["a.pre_identity"], x)
    V, U, mask, delta = normal(4, 3), normal(3, 4), uniform(3, 3), uniform(3)
    components, masks, deltas = ({"a.pre_identity": v} for v in ({"V": V, "U": U}, mask, delta))
    output, acts = ref.masked_pass(extended, components, masks, deltas, {})
    through = ((x @ V) * mask) @ U + delta[:, None] * (x - x @ V @ U)
    np.testing.assert_allclose(acts["a.pre_identity"], through)
    np.testing.assert_allclose(output, np.concatenate([through @ A, x @ B], axis=-1))


def test_a_site_that_is_not_live_is_exact() -> None:
    """F3, F4: no live site is the clean output to the last bit; components equal to W give it too."""
    target = ref.llama_target(LLAMA, TOKENS, **ARCH)
    clean = ref.clean_pass(target, SITES)
    np.testing.assert_array_equal(ref.masked_pass(target, {}, {}, {}, {})[0], clean.output)
    exact = {s: {"V": np.eye(SHAPES[s][0]), "U": clean.weights[s]} for s in SITES}
    ones = {s: np.ones((*LEAD, SHAPES[s][0])) for s in SITES}
    zero = {s: np.zeros(LEAD) for s in SITES}
    np.testing.assert_allclose(ref.masked_pass(target, exact, ones, zero, {})[0], clean.output)


# ---- evaluation ----


def test_ce_and_kl() -> None:
    config = make_config([])
    target, components = ref.llama_target(LLAMA, TOKENS, **ARCH), make_state(config)["components"]
    lam = {s: uniform(*LEAD, C[s]) for s in SITES}
    stochastic, random = source(LEAD), {s: uniform(*LEAD, C[s]) for s in SITES}
    out = ref.ce_and_kl(target, TOKENS, components, lam, stochastic, random, 0.5)
    assert len(out) == 18
    clean = ref.clean_pass(target, ()).output
    p = np.exp(clean) / np.exp(clean).sum(-1, keepdims=True)
    by_hand = -np.mean([np.log(p[b, t, TOKENS[b, t + 1]]) for b in range(2) for t in range(2)])
    np.testing.assert_allclose(ref.cross_entropy(clean, TOKENS), by_hand)
    assert out["ce_unrecovered_zero_masked"] == 1.0
    zero = {s: np.zeros(LEAD) for s in SITES}
    masked, _ = ref.masked_pass(target, components, {s: (x > 0.5) * 1.0 for s, x in lam.items()}, zero, {})
    np.testing.assert_allclose(out["kl_rounded_masked"], ref.kl_error(clean, masked))
    difference = ref.cross_entropy(masked, TOKENS) - by_hand
    np.testing.assert_allclose(out["ce_difference_rounded_masked"], difference)
    np.testing.assert_allclose(out["ce_unrecovered_rounded_masked"], difference / out["ce_difference_zero_masked"])
    exact = {s: {"V": np.eye(SHAPES[s][0]), "U": W} for s, W in ref.clean_pass(target, SITES).weights.items()}
    wide = {s: np.ones((*LEAD, SHAPES[s][0])) for s in SITES}
    full = {s: {"components": x, "delta": np.zeros(LEAD)} for s, x in wide.items()}
    perfect = ref.ce_and_kl(target, TOKENS, exact, wide, full, wide, 0.5)
    assert all(abs(perfect[f"kl_{n}"]) < 1e-12 for n in ("unmasked", "ci_masked", "stoch_masked", "random_masked"))


def test_l0() -> None:
    lam = {"l.0.q": np.array([[0.0, 0.2, 0.6], [0.0, 0.0, 1.0]]), "l.1.q": np.array([[0.3], [0.0]])}
    assert ref.l0(lam, 0.0) == {"l.0.q": 1.5, "l.1.q": 0.5}
    groups = {"all": ["l.0*", "*q"], "one": ["l.1.*"]}
    assert ref.l0(lam, 0.25, groups) == {"l.0.q": 1.0, "l.1.q": 0.5, "all": 1.5, "one": 0.5}


def test_toy_recovery() -> None:
    ci = np.array([[0.0, 1.0, 0.05], [0.95, 0.0, 0.2]])
    assert ref.identity_ci_error(ci, np.array([1, 0])) == 1
    assert ref.identity_ci_error(ci, np.array([0, 1])) == 5
    assert ref.dense_ci_error(ci, 2) == 1
    assert ref.dense_ci_error(ci, 3) == 1
    assert ref.dense_ci_error(ci, 1) == 2
    W = normal(4, 2)
    V, U = np.eye(4)[:, [2, 0, 3, 1]], 0.5 * W[[2, 0, 3, 1]]
    np.testing.assert_allclose(ref.mmcs_and_ml2r(W, -V, -U), (1.0, 0.5))
    np.testing.assert_allclose(ref.mmcs_and_ml2r(W, V, -U), (-1.0, 0.5))
    # The third component points exactly along feature 0, and is too short to count.
    V, U = np.eye(2)[:, [0, 1, 0]], np.array([[1.0, 0.1], [0.0, 1.0], [0.009, 0.0]])
    mmcs, ml2r = ref.mmcs_and_ml2r(np.eye(2), V, U)
    np.testing.assert_allclose((mmcs, ml2r), (0.5 / np.sqrt(1.01) + 0.5, 0.5 * np.sqrt(1.01) + 0.5))
    np.testing.assert_allclose(ref.mmcs_and_ml2r(np.eye(2), V[:, 1:], U[1:]), (0.5, 0.5))


# ---- mixtures of experts ----

E = 4
MIX = {"experts_per_token": 2, "normalised": False}
EXPERT_KINDS = ["gate", "up", "down"]


def mixture_layer(dense: dict, n_experts: int = E) -> dict:
    """The layer with experts of other random weights, and attention as in `dense`."""
    shapes = {f"{kind}_proj": WIDTHS[kind] for kind in EXPERT_KINDS}
    experts = {name: 2 * normal(n_experts, *shape) / math.sqrt(shape[0]) for name, shape in shapes.items()}
    return {**dense, **experts, "router": normal(D, n_experts)}


def expert_site(kind: str, expert: int, layer: int = 1) -> str:
    return ref.llama_site(layer, kind, expert)


# A dense layer with a site, a mixture with experts' up and down matrices as sites, a frozen mixture.
DENSE_DOWN, LAST_O, MIXTURE = ref.llama_site(0, "down"), ref.llama_site(2, "o"), "model.layers.1.mlp"
EXPERTS = [expert_site(kind, e) for kind in ("up", "down") for e in range(E)]
SHAPES |= {expert_site(kind, e): WIDTHS[kind] for kind in EXPERT_KINDS for e in range(E)} | {LAST_O: WIDTHS["o"]}
C |= {expert_site(kind, e): c for kind, c in zip(EXPERT_KINDS, (5, 4, 3), strict=True) for e in range(E)} | {LAST_O: 2}


def mixture_weights() -> dict:
    dense, first, second = llama_weights(3)["layers"]
    return {**llama_weights(0), "layers": [dense, mixture_layer(first), mixture_layer(second)]}


MOE = Case(mixture_weights(), [DENSE_DOWN, *EXPERTS, LAST_O], ARCH | MIX)
MOE_NORMALISED = MOE._replace(arch=MOE.arch | {"normalised": True})
both_weightings = pytest.mark.parametrize("case", [MOE, MOE_NORMALISED], ids=["all", "normalised"])


class Written(NamedTuple):
    """A forward written out: logits, the S of every (layer, b, t), and what {site: {(b, t): x}} reads there."""

    logits: np.ndarray
    S: dict[tuple[int, int, int], list[int]]
    reads: dict[str, dict[tuple[int, int], np.ndarray]]


def write_out(case: Case, apply: Callable, given: dict | None = None) -> Written:
    """The model of `case` by loops over positions and experts: only the experts of S are looked at.
    apply(site, (b, t), x [d_in], W) -> [d_out] multiplies; `given`: the S that is not the router's own."""
    w, T, S, reads, logits = case.weights, TOKENS.shape[1], {}, {}, []

    def norm(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * scale

    def read(site: str, at: tuple[int, int], x: np.ndarray, W: np.ndarray) -> np.ndarray:
        reads.setdefault(site, {})[at] = x
        return apply(site, at, x, W)

    def gated(layer: dict, x: np.ndarray, at: tuple[int, int], i: int, *expert: int) -> np.ndarray:
        def product(kind: str, x: np.ndarray) -> np.ndarray:
            return read(ref.llama_site(i, kind, *expert), at, x, layer[f"{kind}_proj"][expert])

        g = product("gate", x)
        return product("down", g / (1 + np.exp(-g)) * product("up", x))

    for b, row in enumerate(TOKENS):
        h = w["embed"][row]
        for i, layer in enumerate(w["layers"]):
            x = norm(h, layer["input_norm"])
            q, k, v = x @ layer["q_proj"], x @ layer["k_proj"], x @ layer["v_proj"]
            mixed = loop_attention(q, k, v, 4, ref.rope_frequencies(4, 100.0), True)
            h = h + [read(ref.llama_site(i, "o"), (b, t), mixed[t], layer["o_proj"]) for t in range(T)]
            x, update = norm(h, layer["post_norm"]), np.zeros((T, D))
            for t in range(T):
                if "router" not in layer:
                    update[t] = gated(layer, x[t], (b, t), i)
                    continue
                p = [math.exp(x[t] @ column) for column in layer["router"].T]
                own = sorted(sorted(range(len(p)), key=lambda e: -p[e])[: case.arch["experts_per_token"]])
                chosen = S[i, b, t] = (given or {}).get((i, b, t), own)
                total = sum(p[e] for e in chosen) if case.arch["normalised"] else sum(p)
                update[t] = sum(p[e] / total * gated(layer, x[t], (b, t), i, e) for e in chosen)
            h = h + update
        logits.append(norm(h, w["final_norm"]) @ w["head"])
    return Written(np.array(logits), S, reads)


@both_weightings
def test_mixture_written_out(case: Case) -> None:
    out, clean = write_out(case, lambda site, at, x, W: x @ W), ref.clean_pass(case.target(), case.sites)
    np.testing.assert_allclose(clean.output, out.logits)
    assert set(clean.chosen) == {MIXTURE}  # layer 2 has a mixture too, of which no matrix is a site
    assert set(clean.exists) == set(EXPERTS)
    for b, t in np.ndindex(*LEAD):
        assert list(np.flatnonzero(clean.chosen[MIXTURE][b, t])) == out.S[1, b, t]
        for s in case.sites:
            x = out.reads[s].get((b, t), np.zeros(SHAPES[s][0]))
            np.testing.assert_allclose(clean.inputs[s][b, t], x, atol=1e-14)
            np.testing.assert_allclose(clean.outputs[s][b, t], x @ clean.weights[s], atol=1e-13)
            assert s not in clean.exists or clean.exists[s][b, t] == ((b, t) in out.reads[s])
    calls: list[str] = []
    case.target()(lambda module, x, W: (calls.append(module), x @ W)[1])
    assert calls[12:24] == [expert_site(kind, e) for kind in EXPERT_KINDS for e in range(E)]
    assert calls[12] == "model.layers.1.mlp.experts.0.gate_proj"


def test_equal_router_logits() -> None:
    S = ref.top_k(np.array([[1.0, 2.0, 1.0, 2.0, 1.0], [0.0, 0.0, 0.0, 0.0, 0.0]]), 3)
    np.testing.assert_array_equal(S, [[1, 1, 0, 1, 0], [1, 1, 1, 0, 0]])
    w = ref.expert_weights(np.log([1.0, 2.0, 3.0, 4.0]), np.array([False, True, False, True]), False)
    np.testing.assert_allclose(w, [0, 0.2, 0, 0.4])
    w = ref.expert_weights(np.log([1.0, 2.0, 3.0, 4.0]), np.array([False, True, False, True]), True)
    np.testing.assert_allclose(w, [0, 1 / 3, 0, 2 / 3])


def masking(sites: list[str], route: bool = True) -> tuple[dict, dict, dict, dict]:
    """Random components, masks, deltas and routes."""
    components = {s: {"V": 2 * normal(SHAPES[s][0], C[s]), "U": 2 * normal(C[s], SHAPES[s][1])} for s in sites}
    masks, deltas = {s: uniform(*LEAD, C[s]) for s in sites}, {s: uniform(*LEAD) for s in sites}
    return components, masks, deltas, {s: ref.static_probability(uniform(*LEAD), 0.7) for s in sites} if route else {}


@both_weightings
@pytest.mark.parametrize("live", [MOE.sites, [DENSE_DOWN]], ids=["all_live", "no_expert_live"])
def test_masked_mixture_written_out(case: Case, live: list[str]) -> None:
    """X3: the clean S where experts are sites, live or not, with the weights of the pass itself."""
    components, masks, deltas, routes = masking(live)

    def apply(site: str, at: tuple[int, int], x: np.ndarray, W: np.ndarray) -> np.ndarray:
        if site not in live:
            return x @ W
        V, U, m, r = components[site]["V"], components[site]["U"], masks[site][at], routes[site][at]
        return r * (((x @ V) * m) @ U + deltas[site][at] * (x @ (W - V @ U))) + (1 - r) * (x @ W)

    clean = ref.clean_pass(case.target(), case.sites)
    plain = write_out(case, lambda site, at, x, W: x @ W)
    out = write_out(case, apply, {at: S for at, S in plain.S.items() if at[0] == 1})
    y, acts = ref.masked_pass(case.target(), components, masks, deltas, routes, clean.chosen)
    np.testing.assert_allclose(y, out.logits)
    assert list(acts) == live
    for b, t in np.ndindex(*LEAD):
        for s in live:
            x, W = out.reads[s].get((b, t)), clean.weights[s]
            expected = np.zeros(SHAPES[s][1]) if x is None else apply(s, (b, t), x, W)
            np.testing.assert_allclose(acts[s][b, t], expected, atol=1e-12)
    free = write_out(case, apply)  # the masks do change what the routers would choose, in both mixtures
    assert any(free.S[at] != S for at, S in plain.S.items() if at[0] == 1)
    assert any(out.S[at] != S for at, S in plain.S.items() if at[0] == 2)
    assert np.abs(free.logits - out.logits).max() > 1e-3


@both_weightings
def test_masked_mixture_differentiates(case: Case) -> None:
    """Through experts and routers, of the layer whose S is given and of the one that chooses."""
    components, masks, deltas, routes = masking(case.sites)
    chosen, weight = ref.clean_pass(case.target(), case.sites).chosen, normal(*LEAD, VOCAB)

    def f(t: Tree) -> ref.Num:
        target = ref.llama_target(t["weights"], TOKENS, **case.arch)
        return (ref.masked_pass(target, t["components"], t["masks"], t["deltas"], routes, chosen)[0] * weight).sum()

    tree = {"weights": case.weights, "components": components, "masks": masks, "deltas": deltas}
    check(f, tree, tol=1e-5)
    variables = tree_map(Var, tree)
    to_layers = gradients(f(variables), variables)["weights"]["layers"]
    assert all(np.abs(to_layers[i]["router"]).max() > 1e-3 for i in (1, 2))


@both_weightings
def test_masks_that_change_nothing(case: Case) -> None:
    """Delta 1 and masks 1 with any components; or V = W and U = 1, without a delta."""
    clean = ref.clean_pass(case.target(), case.sites)
    components, masks, _, _ = masking(case.sites)
    ones, on, off = tree_map(np.ones_like, masks), np.ones(LEAD), np.zeros(LEAD)
    exact = {s: {"V": W, "U": np.eye(W.shape[1])} for s, W in clean.weights.items()}
    wide = {s: np.ones((*LEAD, W.shape[1])) for s, W in clean.weights.items()}
    for factors, full, delta in (components, ones, on), (exact, wide, off):
        deltas = dict.fromkeys(case.sites, delta)
        for chosen in clean.chosen, {}:
            y, acts = ref.masked_pass(case.target(), factors, full, deltas, {}, chosen)
            np.testing.assert_allclose(y, clean.output, rtol=1e-9)
            for s in case.sites:
                np.testing.assert_allclose(acts[s], clean.outputs[s], atol=1e-10)


@pytest.mark.parametrize("config", CI_CONFIGS, ids=lambda c: c["fn_type"])
def test_importances_of_experts(config: dict) -> None:
    """X4, X5: zeros in where a site does not exist, zeros out there."""
    config = config | ({"groups": [[site] for site in MOE.sites]} if "groups" in config else {})
    clean, out = ref.clean_pass(MOE.target(), MOE.sites), write_out(MOE, lambda site, at, x, W: x @ W)
    state = make_state(make_config([], ci_config=config), MOE.sites)
    kinds = make_config([], ci_config=config, sigmoid_type="leaky_hard")
    lam, ups = ref.causal_importance(kinds, state["ci"], clean.inputs, state["components"], clean.exists)
    reads = {
        s: np.array([[out.reads[s].get((b, t), np.zeros(SHAPES[s][0])) for t in range(3)] for b in range(2)])
        for s in MOE.sites
    }
    logits = ref.ci_logits(config, state["ci"], reads, state["components"])
    for s in MOE.sites:
        for b, t in np.ndindex(*LEAD):
            there = (b, t) in out.reads[s]
            np.testing.assert_allclose(lam[s][b, t], ref.lower(logits[s][b, t], "leaky_hard") * there, atol=1e-12)
            np.testing.assert_allclose(ups[s][b, t], ref.upper(logits[s][b, t], "leaky_hard") * there, atol=1e-12)


def test_experts_in_the_losses() -> None:
    """X4, X7: sums over the positions where a site exists, f over all, errors per existing element."""
    clean, N = ref.clean_pass(MOE.target(), MOE.sites), math.prod(LEAD)
    ups = {s: uniform(*LEAD, C[s]) for s in MOE.sites}
    acts, beta, penalty = {s: y + normal(*y.shape) for s, y in clean.outputs.items()}, 0.7, lambda u: (u + 1e-2) ** 0.5
    minimality = frequency = squares = elements = 0.0
    for s in MOE.sites:
        there = [at for at in np.ndindex(*LEAD) if s not in EXPERTS or clean.exists[s][at]]
        assert s in EXPERTS or len(there) == N
        squares += sum(((acts[s][at] - clean.outputs[s][at]) ** 2).sum() for at in there)
        elements += len(there) * SHAPES[s][1]
        for c in range(C[s]):
            S = sum((ups[s][at][c] + 1e-2) ** 0.5 for at in there)
            minimality += S / N * (1 + beta * math.log2(1 + S))
            frequency += S / N * math.log2(1 + 50.0 * S / N)
    np.testing.assert_allclose(ref.importance_minimality(ups, penalty, beta, clean.exists), minimality)
    np.testing.assert_allclose(ref.importance_frequency(ups, penalty, 50.0, clean.exists), frequency)
    np.testing.assert_allclose(ref.hidden_acts_error(clean.outputs, acts, clean.exists), squares / elements)
    check(lambda t: ref.importance_minimality(t, penalty, beta, clean.exists), ups)
    check(lambda t: ref.hidden_acts_error(clean.outputs, t, clean.exists), acts)
    assert sum(n.sum() for n in clean.exists.values()) == 2 * 2 * N  # k of the experts, two kinds
    mixture, dense, last = MOE.weights["layers"][1], MOE.weights["layers"][0], MOE.weights["layers"][2]
    arrays = [mixture["up_proj"], mixture["down_proj"], dense["down_proj"], last["o_proj"]]
    squares, size = sum((W**2).sum() for W in arrays), sum(W.size for W in arrays)
    nothing = {s: {"V": np.zeros((n, 1)), "U": np.zeros((1, m))} for s in MOE.sites for n, m in [SHAPES[s]]}
    np.testing.assert_allclose(ref.faithfulness(nothing, clean.weights), squares / size)


EXPERT_LOSSES = [
    {"type": "StochasticReconSubsetLoss", "coeff": 0.7},
    {**PERSISTENT, "scope": {"type": "per_batch_per_position"}},
    {"type": "StochasticHiddenActsReconLoss", "coeff": 0.3},
    {**MINIMALITY, "frequency": {"coeff": 0.02, "reference_token_count": 40}},
    FAITHFUL,
]


def by_kind(tree: Tree, path: tuple[str, ...] = ()) -> Tree:
    """The tree with a label at each leaf: its part of the state and its site, experts of one kind having one label."""
    if isinstance(tree, dict):
        return {k: by_kind(v, (*path, k)) for k, v in tree.items()}
    if isinstance(tree, list):
        return [by_kind(x, path) for x in tree]
    return re.sub(r"\d+", "", "/".join([path[0], *(k for k in path if k in MOE.sites)]))


@pytest.mark.parametrize("ci_config", [TRANSFORMER, {"fn_type": "mlp"}], ids=lambda c: c["fn_type"])
def test_step_gradients_with_experts(ci_config: dict) -> None:
    """Finite differences as in `assert_step_gradients`, along one direction for all leaves of a label."""
    config = make_config(EXPERT_LOSSES, ci_config=ci_config, n_mask_samples=1)
    state, draws = make_state(config, MOE.sites), make_draws(config, MOE.sites)
    trained, grads = {k: state[k] for k in ("components", "ci", "sources")}, run(config, state, draws, MOE).gradients
    own = grads["sources"]["PersistentPGDReconLoss"]
    grads["sources"] = {"PersistentPGDReconLoss": tree_map(lambda g: PERSISTENT["coeff"] * g, own)}
    labels, directions = by_kind(trained), tree_map(lambda x: normal(*x.shape), trained)
    slopes = {label: np.zeros(()) for label in tree_leaves(labels)}
    for label, g, d in zip(*map(tree_leaves, (labels, grads, directions)), strict=True):
        slopes[label] = slopes[label] + (g * d).sum()

    def total(steps: dict[str, np.ndarray]) -> float:
        moved = tree_map(lambda label, x, d: x + steps[label] * d, labels, trained, directions)
        return run(config, {**state, **moved}, draws, MOE).total

    assert len(slopes) > 8
    assert_derivative(total, tree_map(np.zeros_like, slopes), slopes)


def test_step_terms_with_experts() -> None:
    """The step hands S and the existence of sites to every term."""
    config = make_config(EXPERT_LOSSES, ci_config={"fn_type": "shared_mlp"}, n_mask_samples=1)
    state, draws = make_state(config, MOE.sites), make_draws(config, MOE.sites)
    state["components"] = tree_map(lambda x: 4 * x, state["components"])  # enough to change what routers choose
    terms = run(config, state, draws, MOE).terms
    clean = ref.clean_pass(MOE.target(), MOE.sites)
    lam, ups = ref.causal_importance(config, state["ci"], clean.inputs, state["components"], clean.exists)

    def masked(sources: dict, routes: dict, chosen: dict) -> tuple[np.ndarray, dict]:
        masks = {s: lam[s] + (1 - lam[s]) * sources[s]["components"] for s in MOE.sites}
        deltas = {s: sources[s]["delta"] for s in MOE.sites}
        return ref.masked_pass(MOE.target(), state["components"], masks, deltas, routes, chosen)

    subset, hidden = draws["StochasticReconSubsetLoss"][0], draws["StochasticHiddenActsReconLoss"][0]
    error = ref.kl_error(clean.output, masked(**subset, chosen=clean.chosen)[0])
    np.testing.assert_allclose(terms["StochasticReconSubsetLoss"], error)
    assert abs(ref.kl_error(clean.output, masked(**subset, chosen={})[0]) - error) > 1e-3
    acts = masked(**hidden, routes={}, chosen=clean.chosen)[1]
    expected = ref.hidden_acts_error(clean.outputs, acts, clean.exists)
    np.testing.assert_allclose(terms["StochasticHiddenActsReconLoss"], expected)
    penalty = ref.penalty_of(MINIMALITY, 0, 1)
    expected = ref.importance_minimality(ups, penalty, 0.0, clean.exists)
    np.testing.assert_allclose(terms["ImportanceMinimalityLoss"], expected, rtol=1e-12)
    expected = ref.importance_frequency(ups, penalty, 40, clean.exists)
    np.testing.assert_allclose(terms["ImportanceMinimalityLoss/frequency"], expected, rtol=1e-12)


def renamed(tree: Tree, names: dict[str, str]) -> Tree:
    """The tree with other names of sites, wherever they are keys."""
    if isinstance(tree, dict):
        return {names.get(k, k): renamed(v, names) for k, v in tree.items()}
    return [renamed(x, names) for x in tree] if isinstance(tree, list) else tree


def assert_same_step(a: ref.StepResult, b: ref.StepResult, names: dict[str, str]) -> None:
    """b's is a's with its sites called by `names`."""
    expected, actual = renamed(a._asdict(), names), b._asdict()

    def compare(x: object, y: object) -> None:
        np.testing.assert_allclose(x, y, rtol=1e-8, atol=1e-12)

    assert set(expected["gradients"]["components"]) == set(actual["gradients"]["components"])
    tree_map(compare, expected, actual)


@pytest.mark.parametrize("normalised", [False, True])
@pytest.mark.parametrize("ci_config", [TRANSFORMER, {"fn_type": "vector_mlp"}], ids=lambda c: c["fn_type"])
def test_one_expert_is_a_dense_mlp(normalised: bool, ci_config: dict) -> None:
    kinds = [(0, "down"), *((1, kind) for kind in EXPERT_KINDS)]
    names = {ref.llama_site(1, kind): expert_site(kind, 0) for kind in EXPERT_KINDS}
    first, second = LLAMA["layers"]
    alone = {f"{kind}_proj": second[f"{kind}_proj"][None] for kind in EXPERT_KINDS} | {"router": normal(D, 1)}
    one = {"experts_per_token": 1, "normalised": normalised}
    moe = Case({**LLAMA, "layers": [first, {**second, **alone}]}, [], ARCH | one)
    moe = moe._replace(sites=[names.get(ref.llama_site(*x), ref.llama_site(*x)) for x in kinds])
    dense = DENSE._replace(sites=[ref.llama_site(*x) for x in kinds])
    back = {new: old for old, new in names.items()}
    losses = [*EXPERT_LOSSES, CHUNKWISE, {"type": "CIMaskedReconLayerwiseLoss", "coeff": 0.2}]
    losses.append({"type": "PGDReconLoss", "coeff": 0.4, "n_steps": 2, "step_size": 0.1})
    losses[1] = {**losses[1], "n_warmup_steps": 1}
    config = make_config(losses, ci_config=ci_config, sigmoid_type="leaky_hard", n_mask_samples=1)
    state, draws = make_state(config, moe.sites), make_draws(config, moe.sites)
    a, b = run(config, renamed(state, back), renamed(draws, back), dense), run(config, state, draws, moe)
    assert_same_step(a, b, names)
    lam = {s: uniform(*LEAD, C[s]) for s in moe.sites}
    stochastic, random = source(LEAD, moe.sites), {s: uniform(*LEAD, C[s]) for s in moe.sites}
    figures = [
        ref.ce_and_kl(
            case.target(), TOKENS, *(renamed(x, n) for x in (state["components"], lam, stochastic, random)), 0.5
        )
        for case, n in ((dense, back), (moe, {}))
    ]
    assert figures[0] == pytest.approx(figures[1], rel=1e-10)


def test_experts_in_another_order() -> None:
    """Permuted with the columns of the router, all that is theirs is permuted, and the rest is the same."""
    order = [2, 0, 3, 1]  # expert j is the former expert order[j]
    names = {expert_site(kind, e): expert_site(kind, j) for kind in EXPERT_KINDS for j, e in enumerate(order)}
    layers = [dict(layer) for layer in MOE.weights["layers"]]
    for layer in layers[1:]:
        layer |= {f"{kind}_proj": layer[f"{kind}_proj"][order] for kind in EXPERT_KINDS}
        layer["router"] = layer["router"][:, order]
    permuted = MOE._replace(weights={**MOE.weights, "layers": layers})
    config = make_config(EXPERT_LOSSES, ci_config={"fn_type": "shared_mlp"}, sigmoid_type="leaky_hard")
    state, draws = make_state(config, MOE.sites), make_draws(config, MOE.sites)
    a, b = run(config, state, draws, MOE), run(config, renamed(state, names), renamed(draws, names), permuted)
    assert_same_step(a, b, names)
    clean, other = (ref.clean_pass(case.target(), MOE.sites) for case in (MOE, permuted))
    np.testing.assert_array_equal(clean.chosen[MIXTURE][..., order], other.chosen[MIXTURE])
    lam = {s: uniform(*LEAD, C[s]) for s in MOE.sites}
    assert renamed(ref.l0(lam, 0.5), names) == ref.l0(renamed(lam, names), 0.5)


def forced(target: ref.MixtureTarget, S: np.ndarray) -> ref.MixtureTarget:
    """The target with S in place of what the router of layer 1 chooses."""

    def run(linear: ref.Linear, choose: ref.Choose) -> ref.Num:
        return target.run(linear, lambda mixture, own: choose(mixture, S if mixture == MIXTURE else own))

    return ref.MixtureTarget(run)


def test_experts_that_are_not_used_get_no_gradient() -> None:
    S = np.zeros((*LEAD, E), dtype=bool)
    S[0, :, [0, 2]] = S[1, :, [0, 1]] = True  # expert 3 is used nowhere, 1 and 2 in one row each
    target = forced(MOE._replace(weights={**MOE.weights, "layers": MOE.weights["layers"][:2]}).target(), S)
    sites = MOE.sites[:-1]
    config = make_config(EXPERT_LOSSES[:4], ci_config={"fn_type": "shared_mlp"})
    state, draws = make_state(config, sites), make_draws(config, sites)
    step = ref.training_step(target, ref.kl_error, sites, config, state, draws)
    to_sources = step.gradients["sources"]["PersistentPGDReconLoss"]
    for kind in "up", "down":
        for e in range(E):
            s, there = expert_site(kind, e), S[..., e]
            for part in "components", "ci":
                assert all(np.any(g != 0) == (e != 3) for g in tree_leaves(step.gradients[part][s]))
            assert np.all((to_sources[s]["components"] != 0) == there[..., None])
            assert np.all((to_sources[s]["delta"] != 0) == there)
    config = make_config([FAITHFUL], ci_config={"fn_type": "shared_mlp"})
    faithful = ref.training_step(target, ref.kl_error, sites, config, state, {})
    assert all(np.all(g != 0) for g in tree_leaves(faithful.gradients["components"][expert_site("up", 3)]))  # X7
    # The error at one position, in the last layer, is that of its own experts.
    config = make_config([EXPERT_LOSSES[1]], ci_config={"fn_type": "shared_mlp"})
    for at in np.ndindex(*LEAD):

        def error(clean: np.ndarray, masked: ref.Num, at: tuple[int, ...] = at) -> ref.Num:
            return ref.kl_error(clean[at], masked[at])

        step = ref.training_step(target, error, sites, config, state, {})
        for e in range(E):
            for part in "components", "ci":
                grads = step.gradients[part][expert_site("up", e)]
                assert all(np.any(g != 0) == S[at][e] for g in tree_leaves(grads))


def test_evaluation_with_experts() -> None:
    """X3 in the six maskings, and L0 over what exists."""
    components, masks, _, _ = masking(MOE.sites)
    clean = ref.clean_pass(MOE.target(), MOE.sites)
    lam = {s: m * clean.exists[s][..., None] if s in EXPERTS else m for s, m in masks.items()}
    out = ref.ce_and_kl(MOE.target(), TOKENS, components, lam, source(LEAD, MOE.sites), masks, 0.5)
    zero = dict.fromkeys(MOE.sites, np.zeros(LEAD))
    y, _ = ref.masked_pass(MOE.target(), components, masks, zero, {}, clean.chosen)
    np.testing.assert_allclose(out["kl_random_masked"], ref.kl_error(clean.output, y))
    np.testing.assert_allclose(out["kl_ci_masked"], out["kl_random_masked"])  # no mask is used where no site is
    free, _ = ref.masked_pass(MOE.target(), components, masks, zero, {})
    assert abs(ref.kl_error(clean.output, free) - out["kl_random_masked"]) > 1e-3
    counts = [sum((lam[s][at] > 0.5).sum() for s in EXPERTS) for at in np.ndindex(*LEAD)]
    np.testing.assert_allclose(ref.l0(lam, 0.5, {"experts": ["*.experts.*"]})["experts"], np.mean(counts))


def test_identity_before_an_expert() -> None:
    sites = [expert_site("up", 1) + ".pre_identity", expert_site("up", 1)]
    target = ref.with_identity_sites(MOE.target(), sites)
    clean = ref.clean_pass(target, sites)
    np.testing.assert_array_equal(clean.output, MOE.target()(lambda module, x, W: x @ W))
    np.testing.assert_array_equal(clean.exists[sites[0]], clean.chosen[MIXTURE][..., 1])
    np.testing.assert_array_equal(clean.outputs[sites[0]], clean.inputs[sites[1]])


# ---- attribution graphs ----


def random_components(target: ref.Target, sites: list[str]) -> dict:
    """3, 4 or 5 components of every site."""
    shapes: dict[str, tuple[int, ...]] = {}
    target(lambda module, x, W: (shapes.setdefault(module, W.shape), x @ W)[1])
    return {
        s: {"V": normal(shapes[s][0], 3 + i % 3), "U": normal(3 + i % 3, shapes[s][1])}
        for i, s in enumerate(sorted(sites, key=list(shapes).index))
    }


def resid_mlp(activation: str) -> ref.Target:
    layers = [
        {"mlp_in": normal(6, 3), "mlp_out": normal(3, 6), "in_bias": normal(3), "out_bias": normal(6)} for _ in range(2)
    ]
    return ref.resid_mlp_target(normal(4, 6), layers, normal(2, 4), activation)


def tms(bias: np.ndarray, n_hidden: int = 1) -> ref.Target:
    hidden = [normal(2, 2) for _ in range(n_hidden)]
    weights = {"linear1": normal(5, 2), "hidden_layers": hidden, "linear2": normal(2, 5), "bias": bias}
    return ref.tms_target(weights, uniform(2, 5))


EMBED = "model.embed_tokens"
TMS_SITES, MLP_SITES = ["linear1", "linear2"], [f"layers.{i}.mlp_{end}" for i in range(2) for end in ("in", "out")]
CUT_CASES: dict[str, Callable[[], tuple[ref.Target, list[str], str]]] = {
    "Llama": lambda: (ref.llama_target(LLAMA, TOKENS[:1], **ARCH), SITES, ref.LOGIT),
    "Llama, the embedding a site": lambda: (ref.llama_target(LLAMA, TOKENS[:1], **ARCH), [EMBED, *SITES], ref.LOGIT),
    "experts": lambda: (ref.llama_target(MOE.weights, TOKENS[:1], **MOE.arch), MOE.sites, ref.LOGIT),
    "TMS": lambda: (tms(normal(5)), TMS_SITES, ref.FEATURE),
    "ResidMLP": lambda: (resid_mlp("gelu"), MLP_SITES, ref.FEATURE),
    "identities": lambda: (
        ref.with_identity_sites(resid_mlp("relu"), [f"{MLP_SITES[2]}.pre_identity"]),
        [MLP_SITES[1], f"{MLP_SITES[2]}.pre_identity", MLP_SITES[2]],
        ref.FEATURE,
    ),
}
cut_cases = pytest.mark.parametrize("name", CUT_CASES)


def nodes_of(acts: dict[str, np.ndarray], output: np.ndarray, kind: str) -> list[ref.Node]:
    return [ref.Node(s, at[:-1], at[-1]) for s, a in [*acts.items(), (kind, output)] for at in np.ndindex(*a.shape)]


@cut_cases
def test_the_cut_network_is_the_clean_pass(name: str) -> None:
    """E1: at the leaves' own values, which are the activations and xΔ."""
    target, sites, _ = CUT_CASES[name]()
    components, clean = random_components(target, sites), ref.clean_pass(target, sites)
    components[sites[0]]["U"][1] = 0.0  # a component that was never used
    leaves, chosen = ref.cut_leaves(target, components)
    acts, output = ref.cut_pass(target, components, leaves, chosen)
    np.testing.assert_allclose(output, clean.output, atol=1e-12)
    assert list(acts) == list(components) == list(leaves["components"])
    for s, pair in components.items():
        x = np.eye(VOCAB)[TOKENS[:1]] if s == EMBED else clean.inputs[s]
        for c, (v, u) in enumerate(zip(pair["V"].T, pair["U"], strict=True)):
            np.testing.assert_allclose(acts[s][..., c], x @ v * math.sqrt(u @ u), atol=1e-12)
        np.testing.assert_allclose(leaves["components"][s], acts[s], atol=1e-12)
        written = leaves["deltas"][s] + (x @ pair["V"]) @ pair["U"]
        np.testing.assert_allclose(written, clean.outputs[s], atol=1e-12)
    assert ("embeddings" in leaves) == (EMBED not in sites)


def test_the_chosen_experts_are_constants() -> None:
    """E1: wherever the leaves are, in mixtures without sites too."""
    target, sites, _ = CUT_CASES["experts"]()
    components = random_components(target, sites)
    leaves, chosen = ref.cut_leaves(target, components)
    assert set(chosen) == {MIXTURE, "model.layers.2.mlp"}
    leaves["embeddings"] = normal(*leaves["embeddings"].shape)
    used = ref.cut_pass(target, components, leaves, chosen)
    assert np.abs(used[1] - ref.cut_pass(target, components, leaves)[1]).max() > 1e-3
    for s in EXPERTS:
        there = chosen[MIXTURE][..., ref.expert_of(s)[1]]
        np.testing.assert_array_equal(used[0][s].any(axis=-1), there)


@cut_cases
def test_every_edge_is_a_finite_difference(name: str) -> None:
    """E2, E3: ℓ · ∂a_t/∂ℓ is the slope of a_t as the leaf alone is scaled. Every pair of source and target."""
    target, sites, kind = CUT_CASES[name]()
    components = random_components(target, sites)
    leaves, chosen = ref.cut_leaves(target, components)
    start = ref.cut_pass(target, components, leaves, chosen)
    nodes, h = nodes_of(*start, kind), 1e-5

    def centred(output: np.ndarray) -> np.ndarray:
        return output - output.mean(axis=-1, keepdims=True) if kind == ref.LOGIT else output

    def flat(acts: dict[str, np.ndarray], output: np.ndarray) -> np.ndarray:
        return np.concatenate([a.ravel() for a in [*acts.values(), centred(output)]])

    def slope(scales: dict) -> np.ndarray:
        """Of every target. scales: like the leaves, in each leaf's shape or one that it broadcasts with."""

        def moved(by: float) -> np.ndarray:
            at = tree_map(lambda x, scale: x * (1 + by * scale), leaves, scales)
            return flat(*ref.cut_pass(target, components, at, chosen))

        return (moved(h) - moved(-h)) / (2 * h)

    found = [ref.attributions(target, components, node) for node in nodes]
    scale = np.abs(flat(*start)).max()

    def compare(part: str, key: str | None, shape: tuple[int, ...], got: list[np.ndarray], pad: int) -> None:
        for at in np.ndindex(*shape):
            one = np.zeros(shape)
            one[at] = 1.0
            scales = tree_map(lambda x: np.zeros(x.shape), leaves)
            spread = one.reshape(*shape, *[1] * pad)
            scales[part] = spread if key is None else scales[part] | {key: spread}
            np.testing.assert_allclose([g[at] for g in got], slope(scales), rtol=1e-5, atol=1e-6 * scale)

    for s in components:
        a = leaves["components"][s]
        compare("components", s, a.shape, [e.components[s] for e in found], 0)
        compare("deltas", s, a.shape[:-1], [e.deltas[s] for e in found], 1)
    if EMBED in sites:
        assert all(e.embeddings is None for e in found)
    else:
        into = leaves["embeddings"].shape[: None if kind == ref.FEATURE else -1]
        compare("embeddings", None, into, [e.embeddings for e in found], kind == ref.LOGIT)
    nothing, everything = (tree_map(lambda x, v=v: np.full(x.shape, v), leaves) for v in (0.0, 1.0))
    biases = slope({**nothing, "biases": everything["biases"]})
    np.testing.assert_allclose([e.biases for e in found], biases, rtol=1e-5, atol=1e-6 * scale)
    np.testing.assert_allclose([e.total() for e in found], slope(everything), rtol=1e-5, atol=1e-6 * scale)  # E4
    assert np.any(biases != 0) == (kind == ref.FEATURE)
    used = [s for s, a in leaves["components"].items() if a.any()]  # not every expert is
    assert len(used) > len(sites) / 2
    assert all(np.any([e.components[s] for e in found]) for s in used)


def test_edges_between_matrices_written_out() -> None:
    """E1, E2: two matrices in a row, the edge is ‖U1_c‖ (x · V1_c) Û1_c · V2_e ‖U2_e‖, and none passes a leaf."""
    W1, W2, W3, x = normal(4, 3), normal(3, 5), normal(5, 2), normal(2, 4)

    def target(linear: ref.Linear) -> ref.Num:
        return linear("c", linear("b", linear("a", x, W1), W2), W3)

    components = random_components(target, ["a", "b", "c"])
    (V1, U1), (V2, U2) = ((components[s]["V"], components[s]["U"]) for s in "ab")
    for e in range(4):
        edges = ref.attributions(target, components, ref.Node("b", (1,), e))
        want = [(x[1] @ V1[:, c]) * (U1[c] @ V2[:, e]) * np.linalg.norm(U2[e]) for c in range(3)]
        np.testing.assert_allclose(edges.components["a"], [[0, 0, 0], want])
        delta = x[1] @ (W1 - V1 @ U1) @ V2[:, e] * np.linalg.norm(U2[e])
        np.testing.assert_allclose(edges.deltas["a"], [0, delta], atol=1e-14)
        assert not any(edges.components[s].any() or edges.deltas[s].any() for s in "bc")
        assert edges.embeddings is None
    into_c = ref.attributions(target, components, ref.Node("c", (0,), 0))
    assert not into_c.components["a"].any()
    assert into_c.components["b"][0].all()
    output = ref.attributions(target, components, ref.Node(ref.FEATURE, (0,), 1))
    np.testing.assert_allclose(output.total(), (x[0] @ W1 @ W2 @ W3)[1])


def test_what_edges_pass_and_what_they_do_not() -> None:
    """In a Llama: a query reaches the output through o alone, later positions through attention, earlier ones never."""
    target = ref.llama_target(LLAMA, TOKENS[:1], **ARCH)
    components = random_components(target, SITES)
    q, o, down, k1, _ = SITES
    into_o, into_k = (ref.attributions(target, components, ref.Node(s, (0, 1), 0)) for s in (o, k1))
    assert into_o.components[q][0, 1].all()
    assert not into_o.components[q][0, [0, 2]].any()
    assert into_o.embeddings[0, :2].all()
    assert into_o.embeddings[0, 2] == 0
    assert not into_k.components[q].any()
    assert into_k.components[o][0, 1].all()
    assert into_k.components[down][0, 1].all()
    everywhere = ref.attributions(target, components, ref.Node(ref.LOGIT, (0, 2), 4))
    assert everywhere.components[k1][0].all()
    assert everywhere.biases == 0.0


@pytest.mark.parametrize("sites", [TMS_SITES, [*TMS_SITES, "hidden_layers.0"]])
def test_linear_networks_sum_to_the_activation(sites: list[str]) -> None:
    """E4: where no ReLU is at 0."""
    target = tms(np.full(5, 40.0))
    components = random_components(target, sites)
    acts, output = ref.cut_pass(target, components, *ref.cut_leaves(target, components))
    assert (output > 0).all()
    for node in nodes_of(acts, output, ref.FEATURE):
        edges = ref.attributions(target, components, node)
        np.testing.assert_allclose(edges.total(), ref.node_value(acts, output, node), rtol=1e-12)
        np.testing.assert_allclose(edges.biases, 40.0 if node.of == ref.FEATURE else 0.0)
        np.testing.assert_array_equal(edges.embeddings.any(), node.of == "linear1")


ROWS: dict[str, Callable[[], tuple[list[ref.Target], list[str]]]] = {
    "Llama": lambda: ([ref.llama_target(LLAMA, row[None], **ARCH) for row in TOKENS], [EMBED, *SITES]),
    "experts": lambda: ([ref.llama_target(MOE.weights, row[None], **MOE.arch) for row in TOKENS], MOE.sites),
    "TMS": lambda: ([tms(normal(5))], TMS_SITES),
}


@pytest.mark.parametrize("name", ["Llama", pytest.param("experts", marks=pytest.mark.slow), "TMS"])
def test_averages_are_edges_added_up(name: str) -> None:
    """E8 from E2, edge by edge; one component never matters, another never does anything."""
    rows, sites = ROWS[name]()
    components = random_components(rows[0], sites)
    components[sites[0]]["U"][1] = 0.0
    cut = [ref.cut_leaves(target, components) for target in rows]
    exists = [ref.existence(sites, chosen) for _, chosen in cut]
    acts = [leaves["components"] for leaves, _ in cut]
    lam = [{s: uniform(*x.shape) for s, x in own.items()} for own in acts]
    for own, there in zip(lam, exists, strict=True):
        own[sites[0]][..., 2] = 0.0
        own |= {s: own[s] * where[..., None] for s, where in there.items()}
    sums = [ref.edge_sums(*row) for row in zip(rows, [components] * len(rows), lam, strict=True)]
    found = ref.average_attributions(sums)
    assert set(found) == {(t, s) for t in sites for s in sites}
    for t in sites:
        everywhere = [(row, where) for row, own in enumerate(acts) for where in np.ndindex(*own[t].shape[:-1])]
        at = [(row, where) for row, where in everywhere if t not in exists[row] or exists[row][t][where]]
        for c in range(acts[0][t].shape[-1]):
            summed = {s: np.zeros(acts[0][s].shape[-1]) for s in sites}
            for row, where in at:
                edges = ref.attributions(rows[row], components, ref.Node(t, where, c)).components
                for s in sites:
                    summed[s] += (lam[row][s] * edges[s]).reshape(-1, len(summed[s])).sum(axis=0)
            usual = np.sqrt(np.mean([acts[row][t][(*where, c)] ** 2 for row, where in at]))
            for s in sites:
                weight = sum(own[s].reshape(-1, len(summed[s])).sum(axis=0) for own in lam)
                want = [x / (w * usual) if w * usual > 0 else 0.0 for x, w in zip(summed[s], weight, strict=True)]
                np.testing.assert_allclose(found[t, s][c], want, rtol=1e-10, atol=1e-13)
    assert sum(w.any() for w in found.values()) >= len(sites) - 1
    assert not any(found[t, sites[0]][:, [1, 2]].any() for t in sites)


def test_rests() -> None:
    target, sites, kind = CUT_CASES["Llama"]()
    edges = ref.attributions(target, random_components(target, sites), ref.Node(kind, (0, 2), 5))
    fires = {s: uniform(*w.shape) > 0.5 for s, w in edges.components.items()}
    firing, rests = ref.with_rests(edges, fires)
    for s, w in edges.components.items():
        for at in np.ndindex(1, 3):
            silent = [w[at][c] for c in range(w.shape[-1]) if not fires[s][at][c]]
            np.testing.assert_allclose(rests[s][at], edges.deltas[s][at] + sum(silent))
            np.testing.assert_array_equal(firing[s][at][~fires[s][at]], 0)
    total = sum(x.sum() for x in tree_leaves([firing, rests])) + edges.embeddings.sum() + edges.biases
    np.testing.assert_allclose(total, edges.total())


# Nodes 0 to 5 feed later ones, 6 and 7 are outputs; 0, 1 and 3 have no incoming edges.
def small_graph() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(weights by target and source, weights of biases, p)."""
    weights = np.tril(normal(8, 8), -1)
    weights[7, 6] = 0.0
    weights[[0, 1, 3]] = 0.0
    biases = np.where(weights.any(axis=1), normal(8), 0.0)
    return weights, biases, np.array([0, 0, 0, 0, 0, 0, 0.3, 0.1])


def test_influence_is_a_sum_over_paths() -> None:
    """E6."""
    weights, biases, p = small_graph()
    A = ref.influence_rows(weights, biases)
    for t in range(8):
        incoming = sum(abs(w) for w in weights[t]) + abs(biases[t])
        np.testing.assert_allclose(A[t], [abs(w) / incoming if incoming else 0.0 for w in weights[t]])
    assert (A.sum(axis=1) < 1).all()  # the biases have the rest

    def paths(t: int, s: int) -> float:
        return sum(A[t, m] * ((m == s) + paths(m, s)) for m in range(t))

    want = [0.75 * paths(6, s) + 0.25 * paths(7, s) for s in range(8)]
    np.testing.assert_allclose(ref.influence(A, p), want, rtol=1e-12)
    np.testing.assert_allclose(ref.influence(A, p), (p / 0.4) @ (np.linalg.inv(np.eye(8) - A) - np.eye(8)))
    assert ref.influence(A, p)[6:].tolist() == [0, 0]


def test_largest() -> None:
    scores = np.array([0.1, 0.5, 0.0, 0.3, 0.1])
    for share, kept in [(0.0, []), (0.4, [1]), (0.51, [1, 3]), (0.85, [0, 1, 3]), (1.0, [0, 1, 3, 4])]:
        assert np.flatnonzero(ref.largest(scores, share)).tolist() == kept
    # A share that is reached exactly takes no more.
    np.testing.assert_array_equal(ref.largest(np.array([[2.0, 1.0], [1.0, 4.0]]), 0.75), [[1, 0], [0, 1]])
    assert not ref.largest(np.zeros(3), 0.9).any()


@pytest.mark.parametrize("shares", [(0.8, 0.98), (0.5, 0.6), (1.0, 1.0)])
def test_prune(shares: tuple[float, float]) -> None:
    """E7, written out: the nodes, then the edges between them, one after another until their share is reached."""
    weights, biases, p = small_graph()
    A = ref.influence_rows(weights, biases)
    of_node = ref.influence(A, p)
    pruned = ref.prune(A, p, *shares)

    def until(scores: dict, share: float) -> list:
        kept: list = []
        for key in sorted((k for k in scores if scores[k] > 0), key=lambda k: -scores[k]):
            if sum(scores[k] for k in kept) >= share * sum(scores.values()) - 1e-12:
                break
            kept.append(key)
        return kept

    nodes = sorted([*until(dict(enumerate(of_node)), shares[0]), 6, 7])
    assert np.flatnonzero(pruned.nodes).tolist() == nodes
    at = of_node + np.array([0, 0, 0, 0, 0, 0, 0.75, 0.25])
    scores = {(t, s): at[t] * A[t, s] for t in nodes for s in nodes}
    edges = until(scores, shares[1])
    assert sorted(map(tuple, np.argwhere(pruned.edges).tolist())) == sorted(edges)
    left_out = sum(of_node[n] for n in range(8) if n not in nodes) / of_node.sum()
    np.testing.assert_allclose(pruned.influence, left_out, atol=1e-12)
    np.testing.assert_allclose(pruned.scores, 1 - sum(scores[e] for e in edges) / sum(scores.values()), atol=1e-12)


# ---- importances of one prompt ----


def lowering_case(name: str, outputs: list[int] | None) -> tuple[ref.Decomposition, Tree, Callable[[], Tree]]:
    """(the model, lambda_0, a function that draws sources); away from 0 and 1, for finite differences."""
    target, sites, kind = CUT_CASES[name]()
    if kind == ref.FEATURE:
        target = ref.tms_target(
            {"linear1": normal(5, 2), "hidden_layers": [], "linear2": normal(2, 5), "bias": normal(5)}, uniform(1, 5)
        )
    components = random_components(target, sites)
    clean = ref.clean_pass(target, sites)
    at = 1 if kind == ref.LOGIT else None
    start = {
        s: (0.3 + 0.4 * uniform(*clean.inputs[s].shape[:-1], pair["U"].shape[0]))
        * clean.exists.get(s, np.ones(1))[..., None]
        for s, pair in components.items()
    }

    def draw() -> Tree:
        shape = {s: lam.shape for s, lam in start.items()}
        return {
            s: {"components": 0.2 + 0.6 * uniform(*n), "delta": 0.2 + 0.6 * uniform(*n[:-1])} for s, n in shape.items()
        }

    error = partial(ref.prompt_error, at=at, outputs=outputs)
    return ref.Decomposition(target, error, clean, components, start), start, draw


@pytest.mark.parametrize("outputs", [None, [3, 1]], ids=["r1", "outputs"])
@pytest.mark.parametrize("name", ["Llama", pytest.param("experts", marks=pytest.mark.slow), "TMS"])
def test_a_step_of_lowering(name: str, outputs: list[int] | None) -> None:
    """O2 to O4: gradients by finite differences, the error and the new state written out."""
    model, start, draw = lowering_case(name, outputs)
    random, lam = draw(), tree_map(lambda x: 0.8 * x, start)
    minimality = {"pnorm": 1.6, "p_anneal_final_p": 0.5, "p_anneal_start_frac": 0.0, "eps": 1e-3}
    weights, allowed = {"ci": 0.3, "random": -0.4, "attack": -2.995}, {"ci": 0.7, "random": 0.05, "attack": 9.0}
    moments = ref.zero_moments(lam)
    state = ref.Lowering(lam, moments, draw(), weights)
    settings = {"lr": 0.05, "step_size": 0.3, "step": 2, "total": 10}

    def lowered(lower: Tree, attack: Tree) -> ref.Lowered:
        at = ref.Lowering(lower, moments, attack, weights)
        return ref.lower_once(model, start, minimality, allowed, at, random, **settings)

    got = lowered(state.lower, state.attack)
    moving = {"lower": state.lower, "attack": state.attack}

    def loss(t: Tree) -> ref.Num:  # a lambda of 0 stays there: psi has no gradient
        return lowered(tree_map(lambda x, old: x * (old > 0), t["lower"], lam), t["attack"]).loss

    assert_derivative(loss, moving, got.gradients)
    sizes = [
        sum(((x[s] + 1e-3) ** p).sum() for s in x) for x, p in ((lam, 1.6 + (0.5 - 1.6) * 0.2), (start, 1.6))
    ]  # psi of this step, and of the first
    priced = sum(math.exp(weights[r]) * got.errors[r] / allowed[r] for r in ref.READINGS)
    np.testing.assert_allclose(got.loss, sizes[0] / sizes[1] + priced)
    for r, sources in ("ci", None), ("random", random), ("attack", state.attack):
        delta = {s: np.zeros(x.shape[:-1]) if sources is None else sources[s]["delta"] for s, x in lam.items()}
        u = {s: 0.0 if sources is None else sources[s]["components"] for s in lam}
        masks = {s: x + (1 - x) * u[s] for s, x in lam.items()}
        y, _ = ref.masked_pass(model.target, model.components, masks, delta, {}, model.clean.chosen)
        clean, masked = model.clean.output[0], y[0]
        if name != "TMS":
            clean, masked = clean[1], masked[1]
        if outputs is not None:
            if name != "TMS":
                clean, masked = clean - clean.mean(), masked - masked.mean()
            want = sum((masked[k] - clean[k]) ** 2 for k in outputs) / 2
        elif name == "TMS":
            want = ((masked - clean) ** 2).mean()
        else:
            p, q = (np.exp(x) / np.exp(x).sum() for x in (clean, masked))
            want = (p * np.log(p / q)).sum()
        np.testing.assert_allclose(got.errors[r], want, rtol=1e-10)
        ratio = want / allowed[r] - 1
        np.testing.assert_allclose(got.state.weights[r], max(weights[r] + 0.05 * max(-1.0, min(1.0, ratio)), -3.0))
    assert got.state.weights["attack"] == -3.0
    for s in lam:  # Adam's first step is the sign
        g = got.gradients["lower"][s]
        np.testing.assert_allclose(
            got.state.lower[s], np.clip(lam[s] - 0.05 * g / (np.abs(g) + 1e-8), 0, 1), atol=1e-12
        )
        for part in "components", "delta":
            g, old = got.gradients["attack"][s][part], state.attack[s][part]
            np.testing.assert_allclose(got.state.attack[s][part], np.clip(old + 0.3 * np.sign(g), 0, 1))


def test_judged_errors() -> None:
    """O2, O4: a mean over draws, the largest of the attacks, each from its own start."""
    model, _, draw = lowering_case("Llama", None)
    draws, starts = [draw(), draw()], [draw(), draw(), draw()]
    found = ref.judged_errors(model, draws, starts, 0.1, 2)
    np.testing.assert_allclose(found["random"], np.mean([ref.reading_error(model, one) for one in draws]))
    ends = [ref.fresh_attack(partial(ref.reading_error, model), one, 0.1, 2) for one in starts]
    errors = [ref.reading_error(model, one) for one in ends]
    assert found["attack"] == max(errors) > min(errors)
    assert all(e > ref.reading_error(model, one) for e, one in zip(errors, starts, strict=True))
    assert ref.allowed_errors({"ci": 1e-4, "random": 0.1}, 2.0, True) == {"ci": 1e-3, "random": 0.2}
    assert ref.allowed_errors({"ci": 1e-4}, 2.0, False) == {"ci": 2e-4}


def test_pairs_of_the_largest_sum() -> None:
    cosines = np.array([[0.9, 0.8, 0.1], [0.8, 0.1, 0.3]])
    assert ref.assigned_pairs(cosines) == [(0, 1), (1, 0)]  # 1.6, though the largest cosine is in neither
    assert ref.assigned_pairs(cosines.T) == [(0, 1), (1, 0)]
    assert ref.mutual_pairs(cosines) == [(0, 0)]
    V, U = normal(5, 3), normal(3, 4)
    np.testing.assert_allclose(np.diag(ref.similarity(V, U, -2 * V, -U)), 1)
    np.testing.assert_allclose(np.diag(ref.similarity(V, U, -V, U)), -1)
    cos = dot(V[:, 0], V[:, 1]) * dot(U[0], U[1])
    lengths = math.prod(np.linalg.norm(x) for x in (V[:, 0], V[:, 1], U[0], U[1]))
    assert ref.similarity(V, U, V, U)[0, 1] == pytest.approx(cos / lengths)
    fires = np.array([True, True, False, False])
    assert ref.firing_overlap(fires, np.array([False, True, True, False])) == pytest.approx(1 / 3)
    assert ref.firing_overlap(fires & False, fires & False) == 0
