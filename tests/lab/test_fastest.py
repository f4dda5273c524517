"""The search of `pd fit --for speed`, in made-up worlds and by the layouts that it makes of a configuration."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from param_decomp_jax.sharding.memory import ONE_CARD
from param_decomp_lab.config import load_config
from param_decomp_lab.config.core_specs import decomposition
from param_decomp_lab.errors import UserError
from param_decomp_lab.probe.fastest import LayoutChoice, Space, fastest
from param_decomp_lab.probe.fit import FitRequest, fit, own_config, report, valid_spaces
from param_decomp_lab.probe.search import SearchPoint, Variant, best
from param_decomp_lab.probe.vary import parse_vary

CONFIGS = Path(__file__).parents[2] / "configs"
NINE_LAYERS = CONFIGS / "llama8b_l18-26_9layer_chunkwise.yaml"
LAYER_18 = CONFIGS / "llama8b_l18.yaml"


def answered(kind: Variant, batch: int, peak: float, seconds: float, pool: float) -> SearchPoint:
    """What `pd probe` might say of a run."""
    answer = {
        "verdict": "fits" if peak <= pool else "does_not_fit",
        "peak_gib": peak,
        "pool_gib": pool,
        "capacity_gib": 1.2 * pool,
        "gpu": "b200",
        "tokens_per_step": 8 * batch,
        "step_s": seconds,
        "roofline_s": {"arithmetic": 0.25 * seconds, "network": 0.75 * seconds, "overlapping": 0.75 * seconds},
        "bytes_moved": {"memory": 0, "within_node": 2**30, "between_nodes": 0},
        "collectives": {"all-gather, within nodes": {"count": 7}},
        "matmul_flops": 10**15,
        "largest_part": "training step",
        "limit_bound": False,
        "notes": [],
    }
    return SearchPoint(kind, batch, answer)


@st.composite
def worlds(draw: st.DrawFn) -> tuple[list[list[tuple[float, float]]], float]:
    """For each choice GiB and seconds of its levels, the latter falling as the former grow; and a pool."""
    choices = []
    for _ in range(draw(st.integers(1, 5))):
        n = draw(st.integers(2, 3))
        gib = sorted(draw(st.lists(st.integers(0, 50), min_size=n, max_size=n)))
        seconds = sorted(draw(st.lists(st.integers(1, 50), min_size=n, max_size=n)), reverse=True)
        choices.append([(float(g), float(s)) for g, s in zip(gib, seconds, strict=True)])
    return choices, draw(st.floats(1, 150))


def search_in(
    world: Sequence[Sequence[tuple[float, float]]], pool: float
) -> tuple[list[SearchPoint], SearchPoint | None]:
    choices = tuple(
        LayoutChoice(f"c{i}", tuple((f"{level}", ((f"c{i}", level),)) for level in range(len(levels))))
        for i, levels in enumerate(world)
    )
    space = Space("mesh", choices, tuple(len(levels) - 1 for levels in world), 8, tuple)

    def ask_all(kinds: Sequence[Variant]) -> list[SearchPoint]:
        parts = [[world[int(key[1:])][level] for key, level in kind.settings] for kind in kinds]
        sums = [(10 + sum(gib for gib, _ in part), 10 + sum(s for _, s in part)) for part in parts]
        return [answered(kind, 8, *each, pool) for kind, each in zip(kinds, sums, strict=True)]

    points = fastest([space], ask_all)
    return points, best(points, "speed")


@given(worlds())
def test_what_fits_is_found(made: tuple[list[list[tuple[float, float]]], float]) -> None:
    """Wherever anything fits, with few questions, none of them twice; and in the order of time."""
    world, pool = made
    points, chosen = search_in(world, pool)
    assert (chosen is not None) == (10 + sum(levels[0][0] for levels in world) <= pool)
    assert len({point.kind for point in points}) == len(points)
    assert [point.step_s for point in points] == sorted(point.step_s for point in points)
    if 10 + sum(levels[-1][0] for levels in world) <= pool:
        assert chosen is points[0]
        assert len(points) == 1  # the first layout is the fastest: nothing else is asked


def test_what_is_found_is_nearly_the_fastest() -> None:
    """Choices like those of a run: 4 groups held, 4 intermediates saved, blocks."""
    world = [
        [(0, 900), (6, 300), (46, 0)], [(0, 300), (2, 90), (13, 0)], [(0, 200), (2, 60), (15, 0)], [(0, 4), (1, 0)],
        [(0, 60), (8, 0)], [(0, 90), (10, 0)], [(0, 30), (4, 0)], [(0, 80), (24, 0)], [(0, 12), (9, 0)],
    ]  # fmt: skip
    for pool in (25.0, 45.0, 60.0, 90.0, 110.0, 130.0):
        points, chosen = search_in(world, pool)
        sums = [[sum(each) for each in zip(*levels, strict=True)] for levels in itertools.product(*world)]
        least = min(10 + seconds for gib, seconds in sums if 10 + gib <= pool)
        assert chosen is not None
        assert chosen.step_s <= 1.05 * least, (pool, chosen.step_s, least)
        assert len(points) <= 40


def test_a_slower_mesh_is_left_alone() -> None:
    choice = LayoutChoice("c", (("less", (("c", 0),)), ("more", (("c", 1),))))
    spaces = [Space(name, (choice,), (1,), 8, tuple) for name in ("slow", "quick", "unknown")]
    asked: list[str] = []

    def ask_all(kinds: Sequence[Variant]) -> list[SearchPoint]:
        asked.extend(kind.name for kind in kinds)
        return [
            SearchPoint(kind, 8, None, "the compiler gave up")
            if kind.name.startswith("unknown")
            else answered(kind, 8, 50 if kind.name.endswith("more") else 5, {"s": 30, "q": 10}[kind.name[0]], 20)
            for kind in kinds
        ]

    points = fastest(spaces, ask_all)
    assert asked == ["slow; more", "quick; more", "unknown; more", "quick; less"]
    chosen = best(points, "speed")
    assert chosen is not None
    assert chosen.kind.name == "quick; less"


def test_layouts_of_a_configuration() -> None:
    """On 8 nodes: one fsdp axis, or a replica on each node, or twice the least tensor axis."""
    request = FitRequest(NINE_LAYERS, (), "b200", 64, 8, (), "speed")
    found = valid_spaces(request, own_config(request), {})
    assert [space.name for space in found] == ["fsdp 64", "replica 8 × fsdp 8", "fsdp 32 × tensor 2"]
    first = found[0].kind(found[0].begin)
    assert first.name == "fsdp 64"
    mesh = {"replica": 1, "fsdp": 64, "tensor": 1, "nodes": 8}
    assert dict(first.settings) == {"mesh": mesh, "memory.preset": "fast", "remat_recon_forwards": True}
    levels = [0] * len(found[0].begin)
    leanest = dict(found[0].kind(levels).settings)
    assert leanest["memory.held"] == {}
    assert leanest["memory.recompute"] == ["attention", "site_outputs", "attack_outputs", "deltas"]
    assert (leanest["memory.component_block"], leanest["memory.micro_batches"]) == (4096, 2)
    by_node = [
        1 if choice.name == "memory.held.ci" else n for choice, n in zip(found[0].choices, found[0].begin, strict=True)
    ]
    assert found[0].kind(by_node).name == "fsdp 64; CI by node"
    held = {"components": "device", "ci": "node", "sources": "device", "target": "device"}
    assert dict(found[0].kind(by_node).settings)["memory.held"] == held
    but_heads = [
        2 if choice.name == "memory.held.ci" else n for choice, n in zip(found[0].choices, found[0].begin, strict=True)
    ]
    assert found[0].kind(but_heads).name == "fsdp 64; CI by node, its heads by device"
    assert dict(found[0].kind(but_heads).settings)["memory.held"] == {**held, "heads": "device"}


def test_one_gpu_begins_with_everything_kept_and_layers_written_out() -> None:
    request = FitRequest(LAYER_18, (), "h200", 1, 1, (), "speed")
    [space] = valid_spaces(request, own_config(request), {})
    first = dict(space.kind(space.begin).settings)
    assert (first["memory.preset"], first["remat_recon_forwards"]) == ("one_card", False)
    assert first["memory.micro_batches"] == 1, "the file has 2"
    assert first.keys() == {"mesh", "memory.preset", "memory.micro_batches", "remat_recon_forwards"}

    def settings_with(name: str, level: int) -> dict[str, Any]:
        levels = [level if c.name == name else n for c, n in zip(space.choices, space.begin, strict=True)]
        return dict(space.kind(levels).settings)

    assert settings_with("memory.layers", 0)["memory.layers"] == "scan"
    assert settings_with("memory.save.logits", 0)["memory.recompute"] == ["logits"]
    for n, choice in enumerate(space.choices):
        kind = space.kind([0 if m == n else level for m, level in enumerate(space.begin)])
        policy = decomposition(load_config(request.path, request.sets(kind, space.batch))).memory
        assert (policy == ONE_CARD) == (choice.levels[0] == choice.levels[space.begin[n]])


def test_what_is_set_is_no_choice() -> None:
    def names(n_gpus: int, *overrides: str, vary: Sequence[str] = ()) -> dict[str, list[str]]:
        request = FitRequest(LAYER_18, overrides, "b200", n_gpus, 8, (), "speed")
        found = valid_spaces(request, own_config(request), parse_vary(vary))
        return {space.name: [choice.name for choice in space.choices] for space in found}

    one_node = names(8)
    assert list(one_node) == ["fsdp 8", "fsdp 4 × tensor 2"]
    assert "memory.micro_batches" in one_node["fsdp 8"]
    assert "memory.micro_batches" not in names(8, "memory.micro_batches=2")["fsdp 8"]
    assert not any(name.startswith("memory.held") for name in names(8, "memory.held={ci: device}")["fsdp 8"])
    assert list(names(8, "mesh={fsdp: 4, tensor: 2}")) == ["fsdp 4 × tensor 2"]
    lean = names(8, "memory.preset=lean")
    assert {name.rpartition(".")[0] for choices in lean.values() for name in choices} == {"memory.held"}
    several = names(8, vary=["memory=lean,balanced", "mesh=1x8x1", "pd.seed=1,2"])
    assert list(several) == ["fsdp 8, lean", "fsdp 8, balanced"]
    assert several["fsdp 8, lean"][-1] == "pd.seed"
    varied = names(8, vary=["memory.component_block=2048,null", "memory.held={ci: device},{}"])["fsdp 8"]
    assert varied.count("memory.component_block") == varied.count("memory.held") == 1
    assert not any(name.startswith("memory.held.") for name in varied)
    alone = names(1)
    assert list(alone) == ["one GPU"]
    assert not any(name.startswith("memory.held") for name in alone["one GPU"])
    with pytest.raises(UserError, match="--for batch"):
        names(8, vary=["batch=8,16"])
    with pytest.raises(UserError, match="cannot be divided among 64 GPUs"):
        names(64, "pd.batch_size=12")


def test_from_question_to_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step that is fastest does not fit; of those that do the chosen one is written as a configuration, with the
    table in its head. After the minutes nothing new is asked."""

    def probe(request: FitRequest, kind: Variant, batch: int, options: Sequence[str]) -> SearchPoint:
        settings = dict(kind.settings)
        config = load_config(request.path, request.sets(kind, batch))
        held = config.wrapper.memory.held if "memory.held" in settings else dict.fromkeys("abcd", "device")
        n = sum(by == "device" for by in held.values())
        return answered(kind, batch, 40 * n, 9 - n + 10 * (settings["mesh"]["replica"] > 1), 130)

    monkeypatch.setattr("param_decomp_lab.probe.fit._probe_point", probe)
    request = FitRequest(NINE_LAYERS, (), "b200", 64, 8, (), "speed")
    found = fit(request, (), Console(quiet=True))
    assert found.best is not None
    assert found.best.peak_gib == 120
    assert found.best.step_s == 6
    out = tmp_path / "fitted.yaml"
    assert report(request, found, out, Console(quiet=True))
    text = out.read_text()
    (line,) = (line for line in text.splitlines() if "→" in line)
    assert found.best.kind.name in line
    assert "120.0" in line
    written = yaml.safe_load(text)
    assert sorted(written["memory"]["held"].values()).count("device") == 3
    assert written["mesh"] == {"replica": 1, "fsdp": 64, "tensor": 1, "nodes": 8}
    assert load_config(out).method.pd.batch_size == load_config(NINE_LAYERS).method.pd.batch_size
    assert out.with_suffix(".png").stat().st_size > 10_000
    over = fit(replace(request, minutes=0.0), (), Console(quiet=True))
    assert (over.points, over.best) == ([], None)
    assert not report(request, over, tmp_path / "none.yaml", Console(quiet=True))
