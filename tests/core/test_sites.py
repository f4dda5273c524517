"""Sites: canonical order, and the stacks and segments that they form."""

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from param_decomp_jax.decomposition.sites import PRE_IDENTITY, Matrix, Site, Sites, Units
from param_decomp_jax.targets.architecture import Architecture
from param_decomp_jax.targets.base import choose_sites
from param_decomp_jax.targets.gpt import GPTConfig
from param_decomp_jax.targets.llama import LlamaConfig, module_name
from param_decomp_jax.targets.registry import read_config
from param_decomp_jax.targets.resid_mlp import ResidMLPConfig
from param_decomp_jax.targets.tms import TMSConfig
from param_decomp_jax.targets.transformer_config import KINDS

CONFIG = LlamaConfig(vocab_size=5, d_model=8, n_layers=12, n_heads=2, n_kv_heads=1, head_dim=4, d_mlp=6)


def of(*layers: dict[str, int]) -> Sites:
    """Sites by layer: kind to C. An empty layer has none."""
    chosen = {module_name(n, kind): C for n, layer in enumerate(layers) for kind, C in layer.items()}
    return choose_sites(CONFIG.matrices(), chosen)


def spans(sites: Sites) -> list[tuple[int, int]]:
    return [(segment.first, segment.stop) for segment in sites.segments]


def test_canonical_order_whatever_the_order_given() -> None:
    """Section 1: by layer number (10 after 9), then by the order of application."""
    names = tuple(matrix.name for matrix in CONFIG.matrices())
    assert names[:8] == (
        "embed_tokens", "layers.0.self_attn.q_proj", "layers.0.self_attn.k_proj", "layers.0.self_attn.v_proj",
        "layers.0.self_attn.o_proj", "layers.0.mlp.gate_proj", "layers.0.mlp.up_proj", "layers.0.mlp.down_proj",
    )  # fmt: skip
    assert [int(name.split(".")[1]) for name in names[1:]] == sorted(list(range(12)) * 7)
    shuffled = np.random.default_rng(0).permutation(names)
    sites = choose_sites(CONFIG.matrices(), {str(name): 3 for name in shuffled})
    assert tuple(site.name for site in sites.all) == names


def test_shapes_and_shared_inputs() -> None:
    """Section 1: `x @ W`; sites that multiply the same activation say so."""
    sites = of(dict.fromkeys(KINDS, 3))
    shapes = {site.kind: (site.d_in, site.d_out) for site in sites.all}
    assert shapes == {
        "q_proj": (8, 8), "k_proj": (8, 4), "v_proj": (8, 4), "o_proj": (8, 8),
        "gate_proj": (8, 6), "up_proj": (8, 6), "down_proj": (6, 8),
    }  # fmt: skip
    reads = [site.reads for site in sites.all]
    assert reads == ["attn_in"] * 3 + ["attn_out"] + ["mlp_in"] * 2 + ["mlp_hidden"]


def test_alike_layers_are_one_stack_per_kind() -> None:
    sites = of(*[{"q_proj": 4, "up_proj": 6}] * 3)
    assert spans(sites) == [(0, 3)]
    q, up = sites.stacks
    assert (q.name, q.sites, q.C, q.d_in, q.d_out) == ("layers.0-2.self_attn.q_proj", (0, 2, 4), 4, 8, 8)
    assert (up.name, up.sites, up.C, up.d_in, up.d_out) == ("layers.0-2.mlp.up_proj", (1, 3, 5), 6, 8, 6)
    assert q.layers == range(3)
    assert q.n_layers == 3


@pytest.mark.parametrize(
    ("layers", "want"),
    [
        ([{"q_proj": 4}, {"q_proj": 5}], [(0, 1), (1, 2)]),
        ([{"q_proj": 4}, {"q_proj": 4, "up_proj": 4}, {"q_proj": 4, "up_proj": 4}], [(0, 1), (1, 3)]),
        ([{"q_proj": 4}, {"k_proj": 4}], [(0, 1), (1, 2)]),
        ([{"q_proj": 4}, {}, {"q_proj": 4}], [(0, 1), (2, 3)]),
        ([{}, {}, {"q_proj": 4}, {"q_proj": 4}], [(2, 4)]),
        ([{"q_proj": 4, "up_proj": 6}, {"q_proj": 6, "up_proj": 4}], [(0, 1), (1, 2)]),
        ([], []),
    ],
    ids=["other C", "more kinds", "other kind", "gap", "late start", "C exchanged", "none"],
)
def test_segments(layers: list[dict[str, int]], want: list[tuple[int, int]]) -> None:
    assert spans(of(*layers)) == want


def test_other_shape_or_input_splits() -> None:
    def site(layer: int, reads: str = "x", d_in: int = 4, d_out: int = 5) -> Site:
        return Site(f"layers.{layer}.a", layer, "a", reads, d_in, d_out, 3)

    assert len(Sites((site(0), site(1))).segments) == 1
    for other in (site(1, reads="y"), site(1, d_in=6), site(1, d_out=6)):
        assert len(Sites((site(0), other)).segments) == 2


def test_another_group_of_layers_splits() -> None:
    """Matrices that are alike but for the group of layers (`UniformLayers`) they are in."""
    sites = choose_sites(
        [Matrix(f"layers.{n}.a", n, "a", "x", 4, 5, group=n // 2) for n in range(4)],
        {f"layers.{n}.a{end}": 3 for n in range(4) for end in ("", PRE_IDENTITY)},
    )
    assert spans(sites) == [(0, 2), (2, 4)]
    assert [stack.name for stack in sites.stacks][2:] == [f"layers.2-3.a{PRE_IDENTITY}", "layers.2-3.a"]


def test_a_stack_of_one_has_its_sites_name() -> None:
    sites = of({"q_proj": 4}, {"q_proj": 5}, {"q_proj": 5})
    assert [stack.name for stack in sites.stacks] == ["layers.0.self_attn.q_proj", "layers.1-2.self_attn.q_proj"]


def test_names_without_a_layer_number() -> None:
    """Toy targets: `linear1`."""
    sites = Sites((Site("linear1", 0, "linear1", "x", 5, 2, 7), Site("linear2", 1, "linear2", "h", 2, 5, 7)))
    assert [stack.name for stack in sites.stacks] == ["linear1", "linear2"]


def test_only_the_first_number_of_a_name_is_the_layer() -> None:
    sites = Sites(tuple(Site(f"layers.{n}.heads.0.q", n, "q", "x", 2, 2, 2) for n in range(2)))
    assert [stack.name for stack in sites.stacks] == ["layers.0-1.heads.0.q"]


def test_mistakes_are_refused() -> None:
    a, b = of({"q_proj": 4}, {"q_proj": 4}).all
    with pytest.raises(AssertionError, match="twice"):
        Sites((a, a))
    with pytest.raises(AssertionError, match="canonical"):
        Sites((b, a))
    with pytest.raises(AssertionError, match="not matrices"):
        choose_sites(CONFIG.matrices(), {"layers.12.mlp.up_proj": 3})


def test_unstack() -> None:
    sites = of({"q_proj": 4, "up_proj": 6}, {"q_proj": 4, "up_proj": 6}, {"q_proj": 5})
    # In the rows of every stack stand the canonical numbers of its sites.
    arrays = {stack.name: np.array(stack.sites) for stack in sites.stacks}
    rows = sites.unstack(arrays)
    assert list(rows) == [site.name for site in sites.all]
    assert list(rows.values()) == [0, 1, 2, 3, 4]
    assert len(sites) == 5


layer_forms = st.dictionaries(st.sampled_from(KINDS), st.integers(1, 2), max_size=3)


@given(st.lists(layer_forms, max_size=CONFIG.n_layers))
def test_stacks_partition_the_sites(layers: list[dict[str, int]]) -> None:
    sites = of(*layers)
    members = sorted(n for stack in sites.stacks for n in stack.sites)
    assert members == list(range(len(sites.all)))
    assert len({stack.name for stack in sites.stacks}) == len(sites.stacks)
    for n, (site, (stack, row)) in enumerate(zip(sites.all, sites.stack_rows, strict=True)):
        assert stack.sites[row] == n
        assert stack.layers[row] == site.layer
        assert (stack.kind, stack.reads, stack.d_in, stack.d_out, stack.C) == (
            site.kind, site.reads, site.d_in, site.d_out, site.C,
        )  # fmt: skip


@given(st.lists(layer_forms, max_size=CONFIG.n_layers))
def test_segments_are_runs_of_alike_layers_and_no_run_is_cut(layers: list[dict[str, int]]) -> None:
    sites = of(*layers)
    decomposed = [n for n, layer in enumerate(layers) if layer]
    assert [n for first, stop in spans(sites) for n in range(first, stop)] == decomposed
    for segment in sites.segments:
        kinds = {stack.kind: stack.C for stack in segment.stacks}
        assert all(layers[n] == kinds for n in range(segment.first, segment.stop))
        assert all(list(stack.layers) == list(range(segment.first, segment.stop)) for stack in segment.stacks)
        assert [KINDS.index(stack.kind) for stack in segment.stacks] == sorted(map(KINDS.index, kinds))
    for a, b in pairwise(sites.segments):
        assert a.stop < b.first or layers[a.first] != layers[b.first]


def test_units_that_matrices_face() -> None:
    """L7: heads and neurons, on the side of the nonlinearity; nothing before an identity or at the embedding."""
    found = {matrix.kind: matrix.faces for matrix in CONFIG.matrices()}
    assert found == {
        "embed": None,
        "q_proj": Units("attention_head", "output", 2), "k_proj": Units("attention_head", "output", 1, 2),
        "v_proj": Units("attention_head", "output", 1, 2), "o_proj": Units("attention_head", "input", 2),
        "gate_proj": Units("neuron", "output", 6), "up_proj": Units("neuron", "output", 6),
        "down_proj": Units("neuron", "input", 6),
    }  # fmt: skip
    names = {module_name(0, "q_proj"): 3, module_name(0, "o_proj") + PRE_IDENTITY: 3, module_name(0, "o_proj"): 3}
    sites = choose_sites(CONFIG.matrices(), names)
    assert [site.faces for site in sites.all] == [found["q_proj"], None, found["o_proj"]]
    assert [stack.faces for stack in sites.stacks] == [site.faces for site in sites.all]


FAMILIES = Path(__file__).parents[1] / "golden" / "families"


def small_architectures() -> list[Architecture]:
    files = (folder / "config.json" for folder in sorted(FAMILIES.iterdir()))
    return [
        *(read_config(json.loads(file.read_text())) for file in files if file.is_file()),
        GPTConfig(vocab_size=5, n_positions=4, d_model=8, n_layers=1, n_heads=2, d_mlp=6),
        ResidMLPConfig(n_features=3, d_embed=4, d_mlp=5, n_layers=2),
        TMSConfig(n_features=4, n_hidden=2),
    ]


def test_units_of_all_architectures() -> None:
    """L7: of every matrix but tables, whole fused ones and those of a TMS; blocks that divide the side."""
    seen = set()
    for architecture in small_architectures():
        for matrix in architecture.matrices():
            units = matrix.faces
            seen.add(matrix.kind)
            assert (units is None) == (matrix.lookup or matrix.kind == "qkv_proj" or architecture.name == "tms"), matrix
            if units is not None:
                width = matrix.d_out if units.side == "output" else matrix.d_in
                assert width % units.n == 0
                assert (units.kind == "neuron") == (width == units.n)
                assert units.multiplier == 1 or matrix.kind in ("k_proj", "v_proj")
    assert {"qkv_proj", "k_proj", "experts.up_proj", "mlp_in", "linear1"} <= seen
