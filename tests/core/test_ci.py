"""CI functions (C4, C5, C9): logits and gradients against the reference, and how they are initialised."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from param_decomp_jax.ci import (
    ChunkwiseTransformer,
    CIConfig,
    GlobalMLP,
    GlobalTransformer,
    ImportanceReader,
    InputPatterns,
    LayerwiseMLP,
    Logits,
    init_ci,
    per_component,
    run_ci_function,
    scalar_mlp,
)  # fmt: skip
from param_decomp_jax.ci.affine import Affine, apply_mlp, init_mlp
from param_decomp_jax.ci.inputs import KeptInputs
from param_decomp_jax.decomposition.components import Factors
from param_decomp_jax.decomposition.sites import Site, Sites
from param_decomp_jax.sharding.memory import INTERMEDIATES, PLAIN, MemoryPolicy
from param_decomp_jax.sharding.mesh import is_axes
from tests import reference as ref
from tests.cases import slow_but
from tests.core import tiny

RNG = np.random.default_rng(0)
LAYERS: dict[int, list[tuple[str, int, int, int]]] = {
    0: [("a", 5, 3, 4), ("b", 3, 6, 2)],
    1: [("a", 5, 3, 4), ("b", 3, 6, 2)],
    2: [("a", 5, 3, 6)],
    4: [("c", 7, 2, 3)],
}
"""Kind, d_in, d_out, C: three segments; layers 0 and 1 are alike, layer 3 has no site."""
SITES = Sites(
    tuple(Site(f"layers.{n}.{kind}", n, kind, kind, *sizes) for n, layer in LAYERS.items() for kind, *sizes in layer)
)
SMALL = GlobalTransformer(8, 2, (6,), n_heads=2, max_len=8, rope_base=50.0)
CONFIGS: dict[str, CIConfig] = {
    "mlp": LayerwiseMLP("mlp", (3,)),
    "vector_mlp": LayerwiseMLP("vector_mlp", (3, 4)),
    "shared_mlp": LayerwiseMLP("shared_mlp", (6, 5)),
    "global_shared_mlp": GlobalMLP((6, 5)),
    "global_shared_transformer": SMALL,
    # Two alike groups of one layer, whose `a` is not read, then two that are like no other.
    "chunkwise_transformer": ChunkwiseTransformer(SMALL, 1, InputPatterns(("*.[bc]", "layers.2.a"))),
    "with options": tiny.WITH_OPTIONS,
}
LEADS = {"sequence": (2, 5), "no sequence": (3,)}
LAZY = MemoryPolicy(save=frozenset(INTERMEDIATES) - {"logits", "ci"}, component_block=2)
"""Logits only where they are read, for one or two components at a time."""


def components() -> Any:
    def normal(*shape: int) -> jax.Array:
        return jax.device_put(RNG.normal(size=shape).astype(np.float32))

    return {s.name: Factors(normal(s.n_layers, s.d_in, s.C), normal(s.n_layers, s.C, s.d_out)) for s in SITES.stacks}


def ci_of(config: CIConfig) -> Any:
    """With numbers that are special in nothing, biases too."""
    shapes = jax.eval_shape(lambda: init_ci(config, jax.random.key(0), SITES))
    return jax.tree.map(lambda x: jax.device_put((RNG.normal(size=x.shape) / 2).astype(x.dtype)), shapes)


def inputs_of(lead: tuple[int, ...]) -> Any:
    """Of different sizes: the transformer's norms have something to do."""
    return {
        s.name: jax.device_put(((1 + 3 * n) * RNG.normal(size=(s.n_layers, *lead, s.d_in))).astype(np.float32))
        for n, s in enumerate(SITES.stacks)
    }


def cotangents_of(lead: tuple[int, ...]) -> Any:
    return {s.name: jax.device_put(RNG.normal(size=(s.n_layers, *lead, s.C)).astype(np.float32)) for s in SITES.stacks}


def logits_of(ci: Any, components: Any, inputs: Any, dtype: Any, memory: MemoryPolicy = PLAIN) -> Any:
    """Of every site at once; what is lazy is read component by component."""
    leading = next(iter(inputs.values())).shape[1:-1]
    read = ci.head_inputs(inputs, {})
    ci_outputs = run_ci_function(ci, KeptInputs(inputs), leading, components, dtype, memory, head_inputs=read)
    assert isinstance(ci_outputs, Logits) == (memory is PLAIN)
    if isinstance(ci_outputs, Logits):
        return ci_outputs.by_stack
    reader = ImportanceReader.from_ci_function(ci, ci_outputs, jnp.zeros_like, read, len(leading), dtype)
    found = per_component(reader, components, SITES, memory, lambda z, _: jnp.moveaxis(z, -1, 0))
    return {name: jnp.moveaxis(z, 1, -1) for name, z in found.items()}


@partial(jax.jit, static_argnums=4)
def core(ci: Any, components: Any, inputs: Any, cotangents: Any, memory: MemoryPolicy = PLAIN) -> Any:
    """Logits, and gradients of Σ logits · cotangents for CI function and components."""

    def logits(*args: Any) -> Any:
        return logits_of(*args, inputs, next(iter(inputs.values())).dtype, memory)

    value, backward = jax.vjp(logits, ci, components)
    return value, backward(cotangents)


def by_site(arrays: Any) -> Any:
    return ref.tree_map(tiny.array, SITES.unstack(arrays))


def assert_like_reference(
    config: CIConfig,
    ci: Any,
    components: Any,
    inputs: Any,
    cotangents: Any,
    tolerance: float,
    memory: MemoryPolicy = PLAIN,
) -> None:
    got, (of_ci, of_components) = core(ci, components, inputs, cotangents, memory)
    trained = ref.tree_map(
        ref.Var, {"ci": tiny.ref_ci(ci, SITES), "components": tiny.ref_components(components, SITES)}
    )
    schema = tiny.schema_ci(config, SITES)
    want = ref.ci_logits(schema, trained["ci"], by_site(inputs), trained["components"])
    weights = by_site(cotangents)
    gradients = ref.gradients(sum((z * weights[site]).sum() for site, z in want.items()), trained)
    tiny.assert_alike(ref.tree_map(ref.value, want), by_site(got), tolerance)
    # C5, C7: of the components it is V that `mlp` and a readout read, and no other function reads any.
    reads_V = schema["fn_type"] == "mlp" or "component_readout" in schema
    assert (np.linalg.norm(gradients["components"]["layers.0.a"]["V"]) > 0) == reads_V
    tiny.assert_alike(gradients["components"], tiny.ref_components(of_components, SITES), tolerance)
    tiny.assert_alike(gradients["ci"], tiny.ref_ci(of_ci, SITES), tolerance)


SEQUENCES = GlobalTransformer | ChunkwiseTransformer
"""CI functions to which a sequence is more than a larger batch."""


@pytest.mark.parametrize(
    ("config", "lead"),
    [
        pytest.param(config, LEADS[of], id=f"{name}-{of}", marks=marks)
        for name, config in CONFIGS.items()
        for of, marks in (
            ("sequence", ()),
            ("no sequence", pytest.mark.slow if isinstance(config, SEQUENCES) else ()),
        )
    ],
)
def test_logits_and_gradients(config: CIConfig, lead: tuple[int, ...]) -> None:
    args = (ci_of(config), components(), inputs_of(lead), cotangents_of(lead))
    if len(lead) == 2:
        assert_like_reference(config, *args, 1e-5)
    # Once in float64 is enough where a sequence is only a larger batch.
    if len(lead) == 1 or isinstance(config, SEQUENCES):
        with jax.enable_x64(True):
            assert_like_reference(config, *tiny.to_float64(args), 1e-9)


@pytest.mark.parametrize("name", slow_but(("mlp", "chunkwise_transformer"), CONFIGS))
def test_lazy_logits_in_blocks_of_components(name: str) -> None:
    """Blocks that cut C in two, in three, into single components, and not at all."""
    config = CONFIGS[name]
    args = (ci_of(config), components(), inputs_of(LEADS["sequence"]), cotangents_of(LEADS["sequence"]))
    with jax.enable_x64(True):
        assert_like_reference(config, *tiny.to_float64(args), 1e-9, LAZY)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_axes_describe_every_array(config: CIConfig) -> None:
    """One name per axis. What a component's logit is made from alone is split by component; matrices are cast (N1)."""
    ci = ci_of(config)
    axes = ci.axes()
    described, structure = jax.tree.flatten(axes, is_leaf=is_axes)
    assert structure == jax.tree.structure(ci)
    for (path, x), of in zip(jax.tree_util.tree_leaves_with_path(ci), described, strict=True):
        name = jax.tree_util.keystr(path)
        assert len(of.names) == x.ndim, name
        assert of.product == (not name.endswith(".b") and ".norms" not in name), name
    for stack in SITES.stacks:
        heads = jax.tree.leaves(ci.heads[stack.name])
        axis = [of.at("component") for of in jax.tree.leaves(axes.heads[stack.name], is_leaf=is_axes)]
        alone = 2 if isinstance(config, LayerwiseMLP) and config.kind == "shared_mlp" else len(heads)
        assert [n is not None for n in axis] == [False] * (len(heads) - alone) + [True] * alone
        assert all(x.shape[n] == stack.C for x, n in zip(heads, axis, strict=True) if n is not None)


@pytest.mark.parametrize("case", slow_but([((3,), 2)], [((3,), 1), ((3,), 2), ((3,), 3), ((), 2), ((3, 4), 2)]))
def test_scalar_mlps_in_blocks(case: tuple[tuple[int, ...], int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of as many components as fit and divide C, one at least; with any number of hidden layers."""
    hidden, fitting = case
    config, lead = LayerwiseMLP("mlp", hidden), LEADS["sequence"]
    args = (ci_of(config), components(), inputs_of(lead), cotangents_of(lead))
    monkeypatch.setattr(scalar_mlp, "BLOCK", fitting * 2 * 5 * max((1, *hidden)) + 1)
    core.clear_cache()
    text = core.lower(*args).as_text()
    assert text.count("stablehlo.while") > 0
    assert_like_reference(config, *args, 1e-5)
    core.clear_cache()


def changes_by_the_last_site(config: CIConfig) -> dict[str, np.ndarray]:
    """By site and position, how far its logits move when the last site's input moves at row 0's last position."""
    lead = LEADS["sequence"]
    ci, of_components, inputs, zero = ci_of(config), components(), inputs_of(lead), cotangents_of(lead)
    before, _ = core(ci, of_components, inputs, zero)
    last = SITES.stacks[-1].name
    after, _ = core(ci, of_components, {**inputs, last: inputs[last].at[:, 0, -1].add(1.0)}, zero)
    return by_site(jax.tree.map(lambda a, b: jnp.abs(a - b).sum(axis=-1), before, after))


def test_the_transformer_looks_both_ways_and_at_all_sites() -> None:
    """C4: bidirectional; every site's logits depend on every site's input at every position of its own row."""
    for site, change in changes_by_the_last_site(CONFIGS["global_shared_transformer"]).items():
        assert np.all(change[0] > 1e-6), site
        assert np.all(change[1] == 0), site


def test_causal_attention_looks_back() -> None:
    """C9: no position's logits depend on a later one's input."""
    for site, change in changes_by_the_last_site(CONFIGS["with options"]).items():
        assert change[0, -1] > 1e-6, site
        assert np.count_nonzero(change) == 1, site


def test_groups_do_not_look_at_each_other() -> None:
    """C6: the last site is its layer's only one."""
    for site, change in changes_by_the_last_site(CONFIGS["chunkwise_transformer"]).items():
        assert np.all(change[1] == 0), site
        assert np.all(change[0] > 1e-6) if site.endswith(".c") else np.all(change[0] == 0), site


def test_the_global_mlp_looks_at_all_sites_and_one_position() -> None:
    """C4."""
    for site, change in changes_by_the_last_site(CONFIGS["global_shared_mlp"]).items():
        assert change[0, -1] > 1e-6, site
        assert np.count_nonzero(change) == 1, site


@pytest.mark.parametrize("memory", [PLAIN, LAZY], ids=["all at once", "lazy"])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_logits_are_wide_under_bf16(config: CIConfig, memory: MemoryPolicy) -> None:
    """N1: products take bf16, logits are fp32."""
    logits = jax.eval_shape(
        lambda *args: logits_of(*args, jnp.bfloat16, memory), ci_of(config), components(), inputs_of((2, 5))
    )
    assert {x.dtype for x in jax.tree.leaves(logits)} == {jnp.dtype(jnp.float32)}
    assert {name: x.shape for name, x in logits.items()} == {s.name: (s.n_layers, 2, 5, s.C) for s in SITES.stacks}


def test_rotary_frequencies_are_no_parameters() -> None:
    """C4: every leaf is a weight or a bias."""
    config = CONFIGS["global_shared_transformer"]
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(ci_of(config))]
    stacks = len(SITES.stacks)
    # Projection and bias; q, k, v, o and two affine layers for all blocks; an affine head per stack.
    assert len(paths) == stacks + 1 + 4 + 2 * 2 + 2 * stacks
    ends = {path.split(".")[-1] for path in paths if not path.startswith(".project")}
    assert ends == {"W", "b", "q", "k", "v", "o"}


@pytest.mark.parametrize("name", ["global_shared_transformer", "chunkwise_transformer"])
def test_sequences_beyond_max_len_are_refused(name: str) -> None:
    ci = ci_of(CONFIGS[name])
    with pytest.raises(AssertionError, match="max_len"):
        jax.eval_shape(lambda *args: logits_of(*args, jnp.float32), ci, components(), inputs_of((1, 9)))


# ---- MLPs ----


def test_gelu_is_exact() -> None:
    """C4: by erf; the tanh approximation is off by up to 5e-4. None after the last layer."""
    identity = Affine(jnp.eye(1), jnp.zeros(1))
    x = jnp.linspace(-4, 4, 81)[:, None]
    want = ref.gelu(tiny.array(x))
    np.testing.assert_allclose(apply_mlp((identity, identity), x), want, atol=1e-6)
    assert np.abs(jax.nn.gelu(x) - want).max() > 1e-4
    np.testing.assert_allclose(apply_mlp((identity,), x), x, rtol=1e-6)


# ---- initial values ----


def assert_normal(x: Any, std: float) -> None:
    """Mean 0 and this standard deviation, within five standard errors."""
    x = tiny.array(x)
    assert abs(x.mean()) < 5 * std / x.size**0.5
    assert abs(x.std() / std - 1) < 5 / (2 * x.size) ** 0.5


def assert_mlp(mlp: Any, fan_in: tuple[int, ...]) -> None:
    """C4: gain √2 into a hidden layer, 1 into the output, biases zero."""
    gains = [2**0.5] * (len(mlp) - 1) + [1.0]
    for layer, gain, n in zip(mlp, gains, fan_in, strict=True):
        assert_normal(layer.W, gain / n**0.5)
        assert not np.any(layer.b)


WIDE = Sites(
    tuple(
        Site(f"layers.{n}.{kind}", n, kind, kind, d_in, 4, C)
        for n, kind, d_in, C in [(0, "a", 40, 30), (1, "a", 40, 30), (2, "b", 24, 50)]
    )
)
initialise = partial(jax.jit, static_argnums=(0, 2))(init_ci)
KEY = jax.random.key(5, impl="threefry2x32")


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_all_is_learned_in_float32(config: CIConfig) -> None:
    """With 64-bit JAX, too (N1)."""
    with jax.enable_x64(True):
        shapes = jax.eval_shape(partial(init_ci, config, sites=SITES), KEY)
    assert {x.dtype for x in jax.tree.leaves(shapes)} == {jnp.float32.dtype}


def test_initial_mlp() -> None:
    assert_mlp(jax.jit(init_mlp, static_argnums=(1, 2))(KEY, (), (50, 80, 60, 40)), (50, 80, 60))


def test_initial_layerwise_functions() -> None:
    shared = initialise(LayerwiseMLP("shared_mlp", (70,)), KEY, WIDE)
    scalar = initialise(LayerwiseMLP("mlp", (20,)), KEY, WIDE)
    vector = initialise(LayerwiseMLP("vector_mlp", (20,)), KEY, WIDE)
    for stack in WIDE.stacks:
        n = stack.n_layers
        assert [layer.W.shape for layer in shared.heads[stack.name]] == [(n, stack.d_in, 70), (n, 70, stack.C)]
        assert_mlp(shared.heads[stack.name], (stack.d_in, 70))
        shapes = [(n, stack.C, 1, 20), (n, stack.C, 20, 1)]
        assert [layer.W.shape for layer in scalar.heads[stack.name]] == shapes
        assert_mlp(scalar.heads[stack.name], (1, 20))
        shapes = [(n, stack.C, stack.d_in, 20), (n, stack.C, 20, 1)]
        assert [layer.W.shape for layer in vector.heads[stack.name]] == shapes
        assert_mlp(vector.heads[stack.name], (stack.d_in, 20))
        for own in scalar, vector:  # every component has its own
            assert np.unique(own.heads[stack.name][0].W[..., 0, 0]).size == n * stack.C


def assert_joint(layer: Any, gain: float) -> None:
    """The fan-in is the width of the concatenation; every site has rows of its own."""
    width = sum(site.d_in for site in WIDE.all)
    for stack in WIDE.stacks:
        assert_normal(layer.rows[stack.name], gain / width**0.5)
    two = layer.rows[WIDE.stacks[0].name]
    assert not np.array_equal(two[0], two[1])
    assert not np.any(layer.b)


def test_initial_global_mlp() -> None:
    """C4: gain √2 into every hidden layer, 1 into the heads."""
    ci: Any = initialise(GlobalMLP((60, 70, 50)), KEY, WIDE)
    assert_joint(ci.first, 2**0.5)
    for layer, fan_in, width in zip(ci.middle, (60, 70), (70, 50), strict=True):
        assert layer.W.shape == (fan_in, width)
        assert_normal(layer.W, (2 / fan_in) ** 0.5)
        assert not np.any(layer.b)
    for stack in WIDE.stacks:
        assert ci.heads[stack.name].W.shape == (stack.n_layers, 50, stack.C)
        assert_mlp((ci.heads[stack.name],), (50,))


def test_initial_transformer() -> None:
    """C4: gain √2 into the projection, 1 into the heads; attention is uniform."""
    d = 64
    config = GlobalTransformer(d_model=d, n_blocks=2, mlp_hidden=(96,), n_heads=4)
    ci: Any = initialise(config, KEY, WIDE)
    assert_joint(ci.project, 2**0.5)
    for stack in WIDE.stacks:
        assert_mlp((ci.heads[stack.name],), (d,))
    a = WIDE.stacks[0].name
    assert not np.array_equal(ci.heads[a].W[0], ci.heads[a].W[1])
    assert_mlp(ci.blocks.mlp, (d, 96))
    bound = d**-0.5
    for name in "qkvo":
        x = tiny.array(getattr(ci.blocks, name))
        assert x.shape == (2, d, d)
        assert 0.999 * bound < np.abs(x).max() <= bound * (1 + 1e-6)
        assert abs(x.mean()) < 5 * bound / 3**0.5 / x.size**0.5
        assert x.std() == pytest.approx(bound / 3**0.5, rel=0.02)
    assert not np.array_equal(ci.blocks.q, ci.blocks.k)
    assert ci.blocks.norms is None


def test_initial_transformer_with_options() -> None:
    """C9: gate and up are two maps into a hidden layer; keys and values are as wide as their heads; norms have 1."""
    d = 64
    config = GlobalTransformer(d, 2, (96, 80), 4, n_kv_heads=2, mlp_type="swiglu", learned_norm_scale=True)
    blocks: Any = initialise(config, KEY, WIDE).blocks  # type: ignore[attr-defined]
    *hidden, last = blocks.mlp
    for layer, fan_in, width in zip(hidden, (d, 96), (96, 80), strict=True):
        assert layer.gate.W.shape == layer.up.W.shape == (2, fan_in, width)
        assert not np.array_equal(layer.gate.W, layer.up.W)
        for own in (layer.gate, layer.up):
            assert_mlp((own, last), (fan_in, 80))
    for name, width in zip("qkvo", (d, 32, 32, d), strict=True):
        x = tiny.array(getattr(blocks, name))
        assert x.shape == (2, d, width)
        assert x.std() == pytest.approx((3 * d) ** -0.5, rel=0.02)
    for x in (blocks.norms.attn, blocks.norms.mlp):
        assert x.shape == (2, d)
        assert np.all(x == 1)


@pytest.mark.parametrize(
    "config",
    [
        LayerwiseMLP("shared_mlp", (3,)), LayerwiseMLP("mlp", (3,)), LayerwiseMLP("vector_mlp", (3,)),
        GlobalMLP((4, 3)), pytest.param(GlobalTransformer(4, 1, (), n_heads=1), marks=pytest.mark.slow),
    ],
    ids=lambda config: getattr(config, "kind", type(config).__name__),
)  # fmt: skip
def test_initial_weights_do_not_depend_on_stacking(config: CIConfig) -> None:
    """M4 for the weights: what belongs to one site is its own draw, whatever it is stacked with."""

    def of_sites(*layers: int) -> tuple[int, Any]:
        sites = Sites(tuple(Site(f"layers.{n}.a", n, "a", "x", 6, 4, 5) for n in layers))
        ci = tiny.ref_ci(initialise(config, KEY, sites), sites)
        by_site = list(ci.values()) if isinstance(config, LayerwiseMLP) else ci
        return len(sites.stacks), by_site

    (one, stacked), (two, apart) = of_sites(0, 1), of_sites(0, 2)
    assert (one, two) == (1, 2)
    tiny.assert_alike(stacked, apart, 1e-6)
