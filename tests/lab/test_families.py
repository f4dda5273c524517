"""Every family of decoders against logits that others computed: `transformers`, or a definition in torch written by
somebody who had not read this code (tests/golden/families/README.md). Each fixture switches on all that is special."""

import dataclasses
import json
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from param_decomp_jax.decomposition.components import init_components
from param_decomp_jax.decomposition.sites import Matrix, Sites
from param_decomp_jax.method.masks import Sources
from param_decomp_jax.method.state import Learned
from param_decomp_jax.sharding.by_layer import ByLayer, is_by_layer
from param_decomp_jax.sharding.memory import PLAIN, MemoryPolicy
from param_decomp_jax.sharding.mesh import MeshShape, make_mesh
from param_decomp_jax.targets.architecture import UnsupportedConfig
from param_decomp_jax.targets.base import choose_sites
from param_decomp_jax.targets.gpt import GPTConfig
from param_decomp_jax.targets.plain_linears import UNTOUCHED
from param_decomp_jax.targets.registry import ARCHITECTURES, read_config
from param_decomp_jax.targets.resid_mlp import ResidMLPConfig
from param_decomp_jax.targets.tms import TMSConfig
from param_decomp_jax.targets.transformer import Transformer
from param_decomp_lab.runs.checkpoints.fingerprints import fingerprint
from param_decomp_lab.runs.checkpoints.store import flatten
from param_decomp_lab.runs.forward import masked
from param_decomp_lab.schema import site_names
from param_decomp_lab.weights.recorded_target import describe
from param_decomp_lab.weights.target_folder import (
    load_target,
    read_architecture,
    save_target,
    training_shapes,
    training_shardings,
)
from tests.core import tiny as tiny_core
from tests.lab.tiny_run import Tiny
from tests.lab.whole_path import from_a_folder_to_an_export

FAMILIES = Path(__file__).parent.parent / "golden" / "families"
NAMES = sorted(folder.name for folder in FAMILIES.iterdir() if (folder / "model.safetensors").is_file())
FUSED = [name for name in NAMES if name.startswith("gpt")]
TRICKY = ("gemma2", "gpt_neox", "qwen3_moe")
"""With windows in some layers, a fused matrix head by head, runs of unlike layers."""


def golden(name: str) -> Any:
    return np.load(FAMILIES / name / "expected.npz")


def logits(target: Transformer, weights: Any, tokens: Any) -> jax.Array:
    return target.logits(weights, target.forward(weights, tokens, UNTOUCHED).output)


def close(ours: Any, theirs: np.ndarray, tolerance: float = 1e-4) -> None:
    np.testing.assert_allclose(np.asarray(ours, np.float32), theirs, rtol=0, atol=tolerance * np.abs(theirs).max())


def exact_factors(target: Transformer, weights: Any) -> Any:
    """Components that are the matrices: V = W, U = identity."""
    shapes = jax.eval_shape(lambda: init_components(jax.random.key(0), target.sites))
    found = target.site_weights(weights)
    return {
        name: dataclasses.replace(
            factors, V=found[name], U=jnp.broadcast_to(jnp.eye(factors.U.shape[-1]), factors.U.shape)
        )
        for name, factors in shapes.items()
    }


def every_site(matrices: tuple[Matrix, ...], slices: bool) -> Sites:
    """All matrices that can be sites together: fused ones, or their slices."""
    fused = {m.part_of for m in matrices if m.part_of is not None}
    left_out = fused if slices else {m.name for m in matrices if m.part_of is not None}
    return choose_sites(matrices, {m.name: m.d_out for m in matrices if m.name not in left_out})


def with_every_matrix_replaced(name: str, slices: bool) -> tuple[jax.Array, jax.Array]:
    """Logits of the network, and with every matrix replaced by components that are exactly it (F1)."""
    architecture, weights = load_target(FAMILIES / name)
    target = architecture.target(every_site(architecture.matrices(), slices), PLAIN, jnp.float32)
    problem = tiny_core.problem((), target)
    ones = {s.name: Sources(jnp.ones((*s.lead, 1, 1, s.C)), None) for s in target.sites.stacks}
    live = tuple(range(len(target.sites)))

    @jax.jit
    def both(weights: Any, tokens: Any, ci: Any) -> tuple[jax.Array, jax.Array]:
        own = exact_factors(target, weights)
        return logits(target, weights, tokens), masked(
            problem, Learned(own, ci), weights, tokens, ones, live, pinned=False
        )

    tokens = jnp.asarray(golden(name)["tokens"])
    ci = tiny_core.ruffled_state(problem, leading=tokens.shape).ci
    with jax.default_matmul_precision("highest"):
        return both(weights, tokens, ci)


def slow_unless(names: tuple[str, ...]) -> Any:
    """Parametrised by fixture; the others are slow tests."""
    return pytest.mark.parametrize(
        "name", [pytest.param(name, marks=[] if name in names else pytest.mark.slow) for name in NAMES]
    )


def test_patterns_know_the_prefixes_of_all_families() -> None:
    assert set(site_names.PREFIXES) == {kind.prefix for kind in ARCHITECTURES.values()} - {""}


def test_names_say_which_matrices_have_attention_heads() -> None:
    """`pd browse` goes by the names; the architectures know. A new one may need another name in `site_names.py`."""
    known = [next(iter(kind.published.values())) for kind in ARCHITECTURES.values() if kind.published]
    known += [read_config(json.loads((FAMILIES / name / "config.json").read_text())) for name in NAMES]
    known.append(GPTConfig(vocab_size=8, n_positions=4, d_model=4, n_layers=1, n_heads=2, d_mlp=4))
    assert {type(architecture) for architecture in known} >= {*ARCHITECTURES.values()} - {TMSConfig, ResidMLPConfig}
    for architecture in known:
        with_heads = {matrix.name for matrix in architecture.attention_matrices()}
        assert with_heads, architecture
        for matrix in architecture.matrices():
            assert site_names.has_attention_heads(matrix.name) == (matrix.name in with_heads), matrix.name


@pytest.mark.parametrize("name", NAMES)
def test_logits(name: str) -> None:
    architecture, weights = load_target(FAMILIES / name)
    target = architecture.target(Sites(()), PLAIN, jnp.float32)
    with jax.default_matmul_precision("highest"):
        close(jax.jit(partial(logits, target))(weights, golden(name)["tokens"]), golden(name)["logits"])


@slow_unless(("gpt_neox",))
def test_every_matrix_as_a_site(name: str) -> None:
    clean, replaced = with_every_matrix_replaced(name, slices=False)
    close(clean, golden(name)["logits"])
    close(replaced, golden(name)["logits"])


@pytest.mark.parametrize("name", [n if n == "gpt_neox" else pytest.param(n, marks=pytest.mark.slow) for n in FUSED])
def test_slices_of_fused_matrices_as_sites(name: str) -> None:
    _, replaced = with_every_matrix_replaced(name, slices=True)
    close(replaced, golden(name)["logits"])


@pytest.mark.parametrize("name", ["qwen3_moe"])
def test_written_out_layers_have_arrays_of_their_own(name: str) -> None:
    """With the same numbers and the same fingerprints as stacked; a dense layer comes before those with experts."""
    architecture = read_architecture(FAMILIES / name)
    target = architecture.target(Sites(()), MemoryPolicy(layers="unroll"), jnp.float32)
    where = training_shardings(make_mesh(MeshShape(tensor=2)), target)
    _, stacked = load_target(FAMILIES / name)
    _, weights = load_target(FAMILIES / name, shardings=where)
    of_each = flatten(weights, is_leaf=is_by_layer)
    assert of_each.keys() == flatten(stacked).keys()
    for path, x in flatten(stacked).items():
        found = of_each[path]
        assert isinstance(found, ByLayer) == (path.split("/")[0] in ("layers", "dense", "experts"))
        np.testing.assert_array_equal(jnp.stack(found.layers) if isinstance(found, ByLayer) else found, x)
        assert fingerprint(found) == fingerprint(x)
    described = jax.tree.map(lambda x: (x.shape, x.sharding), training_shapes(architecture, jnp.float32, where))
    assert described == jax.tree.map(lambda x: (x.shape, x.sharding), weights)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_unrolled_on_eight_devices_in_bfloat16_and_blocked(name: str) -> None:
    mesh = make_mesh(MeshShape(replica=2, fsdp=2, tensor=2))
    architecture = read_architecture(FAMILIES / name)
    unrolled = architecture.target(Sites(()), MemoryPolicy(layers="unroll", attention="blocked"), jnp.float32)
    _, weights = load_target(FAMILIES / name, shardings=training_shardings(mesh, unrolled))
    tokens, expected = golden(name)["tokens"], golden(name)["logits"]
    with jax.set_mesh(mesh), jax.default_matmul_precision("highest"):
        close(jax.jit(partial(logits, unrolled))(weights, tokens), expected)
    rounded = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), load_target(FAMILIES / name)[1])
    in_bf16 = jax.jit(partial(logits, architecture.target(Sites(()), PLAIN, jnp.bfloat16)))(rounded, tokens)
    assert in_bf16.dtype == jnp.float32
    # A token may take another expert where two are almost equally likely.
    assert np.median(np.abs(in_bf16 - expected)) < 0.02 * np.abs(expected).max()


@pytest.mark.parametrize("name", NAMES)
def test_saved_and_read_again(name: str, tmp_path: Path) -> None:
    """As a folder, in the keys of transformers 4, and in a run's `target.json`."""
    architecture, weights = load_target(FAMILIES / name)
    save_target(tmp_path, architecture, weights, eos_token_id=1)
    again, same = load_target(tmp_path)
    assert again == architecture
    jax.tree.map(np.testing.assert_array_equal, same, weights)
    published = FAMILIES / name / "config_published.json"
    if published.is_file():
        assert read_config(json.loads(published.read_text())) == architecture
    kept = json.loads(json.dumps(describe(architecture)))
    assert ARCHITECTURES[kept.pop("architecture")].from_fields(kept) == architecture
    assert architecture.title in architecture.describe()


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("mistral", {"num_key_value_heads": 3}, "key heads, 3, does not divide that of the heads, 4"),
        ("mistral", {"sliding_window": -1}, "window: should be a positive number, not -1"),
        ("mistral", {"hidden_act": "tanh"}, "hidden_act is 'tanh'; what can be loaded is silu, "),
        ("mistral", {"rope_parameters": {"rope_type": "longrope"}}, "rotary scaling 'longrope' is not supported"),
        ("llama_yarn", {"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters lacks the key 'factor'"),
        ("llama_linear", {"rope_parameters": {"rope_type": "linear", "factor": 0}}, "factor: should be a positive"),
        ("qwen2", {"use_sliding_window": 1}, "use_sliding_window: should be true or false, not 1"),
        ("qwen2", {"layer_types": ["linear_attention"] * 3}, "layer_types: should say sliding_attention or full_att"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention is True; only False can be loaded"),
        ("gpt2", {"n_head": 0}, "n_head: should be a whole number of at least 1"),
        ("gpt_neox", {"rotary_pct": 9.0, "rope_parameters": ...}, "turns 144 of a head's 16 dimensions"),
        ("gemma2", {"attn_logit_softcapping": -5.0}, "attn_logit_softcapping: should be a positive number"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
        ("olmoe", {"num_experts_per_tok": 9}, "a token takes 9 experts, but there are 8"),
        ("olmoe", {"clip_qkv": "x"}, "clip_qkv: should be a number, not 'x'"),
        ("qwen3_moe", {"mlp_only_layers": [-1]}, "mlp_only_layers: should be a list of layers' numbers"),
        ("qwen3_moe", {"mlp_only_layers": "1"}, "mlp_only_layers: should be a list"),
        ("llama_simple_mlp_half", {"use_grouped_query_attention": False}, "only the grouped form can be loaded"),
        ("starcoder2", {"sliding_window": 0}, "window: should be a positive number, not 0"),
        ("starcoder2", {"use_bias": 1}, "use_bias: should be true or false, not 1"),
        ("olmo2", {"quantization_config": {"bits": 4}}, "quantized"),
    ],
)
def test_refused_by_key_and_value(name: str, changes: dict[str, Any], message: str) -> None:
    raw = json.loads((FAMILIES / name / "config.json").read_text()) | changes
    with pytest.raises(UnsupportedConfig, match=message):
        read_config({key: value for key, value in raw.items() if value is not ...})


def test_windows_longer_than_the_rows_cost_nothing() -> None:
    """No mask but the causal one: the program is that of a Mistral without windows."""
    architecture, weights = load_target(FAMILIES / "mistral")
    tokens = jnp.asarray(golden("mistral")["tokens"])
    programs = [
        str(jax.make_jaxpr(partial(logits, a.target(Sites(()), PLAIN, jnp.float32)))(weights, tokens))
        for a in (dataclasses.replace(architecture, window=100), architecture)
    ]
    assert programs[0].count(" lt ") < programs[1].count(" lt ")


def for_every_byte(name: str) -> tuple[Any, Any]:
    """The golden model with room for 256 tokens and rows of 64."""
    architecture, weights = load_target(FAMILIES / name)
    longer = {"learned_positions": 64} if architecture.learned_positions is not None else {}
    bigger = dataclasses.replace(architecture, vocab_size=256, max_positions=64, **longer)
    rng = np.random.default_rng(0)

    def grown(x: Any, shape: tuple[int, ...]) -> Any:
        more = rng.normal(0, 0.3, shape).astype(np.float32)
        more[tuple(map(slice, x.shape))] = x
        return jnp.asarray(more)

    return bigger, jax.tree.map(grown, weights, bigger.weight_shapes())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("qwen3_moe", ("q_proj", "up_proj", "down_proj")),
        *(pytest.param(name, None, marks=pytest.mark.slow, id=name) for name in NAMES),
    ],
)
def test_decomposed_opened_and_exported(name: str, kinds: tuple[str, ...] | None, tiny: Tiny, tmp_path: Path) -> None:
    """All matrices of attention and MLP and all experts of one layer, and of a fused one its slices; or those of
    these ``kinds`` alone, each of which is a stack to compile."""
    architecture, weights = for_every_byte(name)
    matrices = architecture.matrices()
    last = max(m.layer for m in matrices)
    fused = {m.part_of for m in matrices}
    wanted = {m.name for m in matrices if kinds is None or m.name.endswith(kinds)}
    own = [m.name for m in matrices if m.layer == last and m.name not in fused and m.name in wanted]
    model_class = architecture.model_classes[0]
    targets = [(site, 6) for site in own]
    from_a_folder_to_an_export(architecture, weights, model_class, targets, tiny, tmp_path)
