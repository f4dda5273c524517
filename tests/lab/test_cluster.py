"""Groups: against the plain mathematics of `tests/reference.py`, planted ones, and what `pd cluster` writes."""

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from param_decomp_lab import load_run
from param_decomp_lab.cluster.activity import Activity
from param_decomp_lab.cluster.agreement import agreement
from param_decomp_lab.cluster.cluster import cluster
from param_decomp_lab.cluster.cost import grouping_cost
from param_decomp_lab.cluster.loops import numbering_part, own_part
from param_decomp_lab.cluster.merging import History, Merger
from param_decomp_lab.cluster.request import ClusterRequest
from param_decomp_lab.errors import UserError
from param_decomp_lab.harvest.files import Harvest
from param_decomp_lab.harvest.files.plan import HarvestPlan, PlannedSite
from param_decomp_lab.harvest.files.tables import FIRINGS_FILE, PLAN_FILE, POSITIONS_FILE
from tests import reference
from tests.lab.tiny_run import pd_here

dense = st.tuples(st.integers(1, 24), st.integers(1, 9)).flatmap(
    lambda shape: arrays(bool, shape, elements=st.booleans())
)
alphas = st.sampled_from([0.0, 0.25, 1.0, 3.0])


def activity_of(active: np.ndarray) -> Activity:
    """Of a dense matrix [N, C]."""
    component, position = np.nonzero(active.T)
    ends = np.searchsorted(component, np.arange(active.shape[1] + 1))
    return Activity(ends, position.astype(np.int32), len(active))


def planted(
    sizes: list[int], n_positions: int, density: float, noise: float, seed: int
) -> tuple[np.ndarray, list[int]]:
    """Components of which each group's fire together, and each alone, or not at all, at a share ``noise``."""
    rng = np.random.default_rng(seed)
    columns = [rng.random(n_positions) < density for _ in sizes]
    active = np.stack([c for c, size in zip(columns, sizes, strict=True) for _ in range(size)], axis=1)
    silent, spurious = rng.random(active.shape) < noise, rng.random(active.shape) < noise * density
    return (active & ~silent) | spurious, np.repeat(np.arange(len(sizes)), sizes).tolist()


def labels_of(history: History, n: int) -> np.ndarray:
    label = np.arange(n)
    members = {i: [i] for i in range(n)}
    for m, (a, b) in enumerate(zip(history.first.tolist(), history.second.tolist(), strict=True)):
        members[n + m] = members.pop(a) + members.pop(b)
        label[members[n + m]] = n + m
    return np.unique(label, return_inverse=True)[1]


@settings(max_examples=30)
@given(dense, alphas, st.randoms(use_true_random=False))
def test_the_change_by_the_formula_is_that_of_the_cost(active: np.ndarray, alpha: float, random: object) -> None:
    C = active.shape[1]
    groups = [[c] for c in range(C)]
    rng = np.random.default_rng(random.getrandbits(32))  # type: ignore[attr-defined]
    while len(groups) > 1:
        k = len(groups)
        i, j = rng.choice(k, 2, replace=False).tolist()
        on = reference.group_activity(active, groups)
        n, ranks = on.sum(0), np.asarray([len(g) for g in groups])
        before = reference.grouping_cost(active, groups, alpha)
        assert grouping_cost(n, ranks, len(active), alpha) == pytest.approx(before, abs=1e-12)
        own = own_part(n[i], ranks[i], n[j], ranks[j], int((on[:, i] & on[:, j]).sum()), np.log2(k - 1), alpha)
        change = (numbering_part(int(n.sum()), k) + own) / len(active)
        groups = reference.merged(groups, i, j)
        assert change == pytest.approx(reference.grouping_cost(active, groups, alpha) - before, abs=1e-9)


@settings(max_examples=30)
@given(dense, alphas, st.sampled_from([0.0, 0.0, 2.0]), st.integers(0, 3))
def test_every_merge_is_the_best_one_or_a_drawn_candidate(
    active: np.ndarray, alpha: float, draw: float, seed: int
) -> None:
    active = active[:, active.any(0)]
    n, N = active.shape[1], len(active)
    if not n:
        return
    merger = Merger(activity_of(active), alpha, near=0.0)
    history = merger.merge(merger.find_pairs(), seed, draw)
    nodes = {i: [i] for i in range(n)}

    def own_parts() -> dict[tuple[int, int], float]:
        names, groups = list(nodes), list(nodes.values())
        return {
            (names[i], names[j]): reference.own_part(active, groups, i, j, alpha)
            for i in range(len(names))
            for j in range(i + 1, len(names))
        }

    for m, (a, b) in enumerate(zip(history.first.tolist(), history.second.tolist(), strict=True)):
        own = own_parts()
        mine = own[min(a, b), max(a, b)]
        assert mine < 1e-9
        assert draw > 0 or mine <= min(own.values()) + 1e-9
        before = reference.grouping_cost(active, list(nodes.values()), alpha)
        on = active[:, nodes[a]].any(1), active[:, nodes[b]].any(1)
        assert (on[0] | on[1]).sum() == history.active[m]
        assert (on[0] & on[1]).sum() == history.together[m]
        nodes[n + m] = nodes.pop(a) + nodes.pop(b)
        change = reference.grouping_cost(active, list(nodes.values()), alpha) - before
        assert history.change[m] == pytest.approx(change, abs=1e-9)
        assert change < 1e-9
    assert all(value > -1e-9 for value in own_parts().values())
    assert N  # positions were there


@settings(max_examples=30)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=2, max_size=12))
def test_agreement(pairs: list[tuple[int, int]]) -> None:
    one, other = zip(*pairs, strict=True)
    found = agreement(np.asarray(one), np.asarray(other))
    assert found.adjusted_rand == pytest.approx(reference.adjusted_rand(one, other))
    mine = reference.kept_pairs(one)
    expected = len(mine & reference.kept_pairs(other)) / len(mine) if mine else 1.0
    assert found.kept == pytest.approx(expected)
    assert agreement(np.asarray(one), np.asarray(one)) == (1.0, 1.0)


@pytest.mark.parametrize("draw", [0.0, 4.0])
def test_planted_groups_of_any_density_are_found(draw: float) -> None:
    """Rare groups beside frequent ones: by the whole change, those that never fire together would be merged as well."""
    sizes = [1, 2, 3, 5, 8] * 8
    parts = [planted(sizes, 20_000, density, 0.1, seed) for seed, density in enumerate((0.002, 0.01, 0.05))]
    active = np.concatenate([part[0] for part in parts], axis=1)
    truth = np.concatenate([np.asarray(part[1]) + 100 * n for n, part in enumerate(parts)])
    merger = Merger(activity_of(active), 1.0)
    history = merger.merge(merger.find_pairs(), 0, draw)
    assert agreement(labels_of(history, len(truth)), truth).adjusted_rand > 0.99
    rare, rarer = (np.flatnonzero(truth == n)[:1] for n in (0, 5))
    by_numbering = reference.grouping_cost(
        active, reference.merged([[c] for c in range(len(truth))], rare[0], rarer[0]), 1
    )
    assert by_numbering < reference.grouping_cost(active, [[c] for c in range(len(truth))], 1)


def test_seeds_break_ties_and_are_repeatable() -> None:
    active, _ = planted([2, 2, 3, 4], 3000, 0.05, 0.2, 0)
    merger = Merger(activity_of(active), 1.0)
    pairs = merger.find_pairs()
    first, again, drawn = (merger.merge(pairs, seed, 5.0) for seed in (3, 3, 4))
    assert all(np.array_equal(x, y) for x, y in zip(first, again, strict=True))
    assert any(not np.array_equal(x, y) for x, y in zip(first, drawn, strict=True))


# ---- files, reading, command ----


def written(folder: Path, active: np.ndarray, sites: dict[str, int]) -> Harvest:
    """What of a harvest is read to find groups: its plan, and what fires at each of its positions [N, C]."""
    planned = tuple(PlannedSite(name, n, C, 1, 1) for n, (name, C) in enumerate(sites.items()))
    plan = HarvestPlan(
        "p-00000001", 0, "made up", len(active), len(active), 1, "features", 3, planned, 0.0, 0, 64, 1, 0, 64, 1
    )  # fmt: skip
    folder.mkdir(parents=True)
    (folder / PLAN_FILE).write_text(json.dumps(asdict(plan)))
    pq.write_table(pa.table({"row": np.arange(len(active))}), folder / POSITIONS_FILE)
    np.save(folder / FIRINGS_FILE, active.sum(0))
    for name, matrix in (("positions", active), ("components", active.T)):
        np.save(folder / f"{name}_ends.npy", np.concatenate([[0], np.cumsum(matrix.sum(1))]))
        np.save(folder / f"{name}_members.npy", np.nonzero(matrix)[1].astype(np.int32))
    return Harvest(folder)


@pytest.fixture
def two_sites(tmp_path: Path) -> tuple[Harvest, np.ndarray]:
    """Three groups over two sites, one component of its own, one that never fires: components 0, 1, 5 and 6; 2 and 7;
    3 and 8; 9; 4."""
    rng = np.random.default_rng(0)
    columns = rng.random((4000, 4)) < [0.02, 0.05, 0.1, 0.03]
    active = np.zeros((4000, 10), bool)
    for component, column in {0: 0, 1: 0, 5: 0, 6: 0, 2: 1, 7: 1, 3: 2, 8: 2, 9: 3}.items():
        active[:, component] = columns[:, column] & (rng.random(4000) < 0.9)
    return written(tmp_path / "p-00000001" / "harvests" / "step-0-00000000", active, {"in": 5, "out": 5}), active


def test_groups_are_read_as_they_were_found(two_sites: tuple[Harvest, np.ndarray]) -> None:
    harvest, active = two_sites
    with pytest.raises(UserError, match="pd cluster"):
        _ = harvest.groups
    cluster(harvest, ClusterRequest(seeds=2))
    groups = Harvest(harvest.folder).groups
    assert [groups.members(g) for g in range(len(groups))] == [
        [("in", 0), ("in", 1), ("out", 0), ("out", 1)],
        [("in", 3), ("out", 3)],
        [("in", 2), ("out", 2)],
        [("out", 4)],
    ]
    assert groups.sizes.tolist() == [4, 2, 2, 1]
    assert groups.n_sites.tolist() == [2, 2, 2, 1]
    assert groups.group_of("out", 1) == 0
    assert groups.group_of("in", 4) is None
    numbers = [[0, 1, 5, 6], [3, 8], [2, 7], [9]]
    np.testing.assert_allclose(groups.densities, [active[:, n].any(1).mean() for n in numbers])
    np.testing.assert_allclose(groups.member_densities(0), active[:, numbers[0]].mean(0))
    alone = [[c] for c in range(10) if c != 4]
    assert groups.cost_before == pytest.approx(reference.grouping_cost(active, alone, 1.0))
    assert groups.cost == pytest.approx(reference.grouping_cost(active, numbers, 1.0))
    leaves, merges = groups.merges_of(0)
    assert len(leaves) == 4
    assert len(merges) == 3
    assert merges[-1]["active"] == active[:, numbers[0]].any(1).sum()
    with pytest.raises(UserError, match="groups 0 to 3"):
        groups.members(4)


def test_other_points_of_the_history(two_sites: tuple[Harvest, np.ndarray]) -> None:
    harvest, active = two_sites
    groups = cluster(harvest)
    for k in range(4, 10):
        cut = groups.cut(k)
        assert len(cut) == k
        members = [[harvest.index.number_of(*m) for m in cut.members(g)] for g in range(k)]
        assert cut.cost == pytest.approx(reference.grouping_cost(active, members, 1.0))
        np.testing.assert_allclose(cut.densities, [active[:, m].any(1).mean() for m in members])
    for k in (3, 10):
        with pytest.raises(UserError, match="from 9 groups to 4"):
            groups.cut(k)


def test_the_command(two_sites: tuple[Harvest, np.ndarray]) -> None:
    harvest, _ = two_sites
    run = harvest.folder.parent.parent
    first = pd_here("cluster", run, "--seeds", "2")
    assert first.status == 0, first
    assert "9 components in 4 groups, 3 of them with several members (8 components)" in first.out
    assert "1 of 10 components" in first.out
    folder = Path(first.out.split()[-1])
    assert folder.parent == harvest.folder / "clusters"
    again = pd_here("cluster", harvest.folder, "--seeds", "2")
    assert "counting" not in again.out
    assert again.out.split()[-1] == str(folder)
    rare = pd_here("cluster", run, "--min-density", "0.04", "--harvest", harvest.folder.name)
    assert "4 components in 2 groups" in rare.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--harvest", "other"), "has no harvest 'other'; it has step-0-00000000"),
        (("--alpha", "-1"), "--alpha: should be"),
        (("--alpha", "nan"), "--alpha: should be"),
        (("--seeds", "0"), "--seeds: should be"),
        (("--min-density", "1"), "--min-density: should be"),
        (("--min-density", "0.9"), "lower --min-density"),
        (("--draw", "-2"), "--draw: should be"),
    ],
)
def test_wrong_arguments(two_sites: tuple[Harvest, np.ndarray], arguments: tuple[str, ...], message: str) -> None:
    run = two_sites[0].folder.parent.parent
    outcome = pd_here("cluster", run, *arguments)
    assert outcome.status == 2
    assert message in " ".join(outcome.err.split())


def test_a_run_without_a_harvest(tmp_path: Path) -> None:
    for folder, message in ((tmp_path, f"make one with `pd harvest {tmp_path}`"), (tmp_path / "no", "not a folder")):
        outcome = pd_here("cluster", folder)
        assert outcome.status == 2
        assert message in " ".join(outcome.err.split())


def damage_json(folder: Path) -> None:
    about = json.loads((folder / "clusters.json").read_text())
    (folder / "clusters.json").write_text(json.dumps({**about, "seed": 99}))


def damage_cycle(folder: Path) -> None:
    table = pq.read_table(folder / "merges.parquet")
    first = table["first"].to_numpy().copy()
    first[0] = len(first) + 9
    pq.write_table(table.set_column(0, "first", pa.array(first, pa.int32())), folder / "merges.parquet")


def damage_twice(folder: Path) -> None:
    table = pq.read_table(folder / "merges.parquet")
    pq.write_table(table.set_column(0, "first", table["second"]), folder / "merges.parquet")


def damage_components(folder: Path) -> None:
    table = pq.read_table(folder / "components.parquet")
    far = pa.array(table["component"].to_numpy() + 10**6, pa.int32())
    pq.write_table(table.set_column(0, "component", far), folder / "components.parquet")


def damage_columns(folder: Path) -> None:
    pq.write_table(pa.table({"first": [1]}), folder / "merges.parquet")


def damage_bytes(folder: Path) -> None:
    (folder / "components.parquet").write_bytes(b"PAR1 nothing")


def damage_gone(folder: Path) -> None:
    (folder / "merges.parquet").unlink()


@pytest.mark.parametrize(
    "damage",
    [damage_json, damage_cycle, damage_twice, damage_components, damage_columns, damage_bytes, damage_gone],
)
def test_damaged_groups_are_one_message(two_sites: tuple[Harvest, np.ndarray], damage: Callable[[Path], None]) -> None:
    groups = cluster(two_sites[0], ClusterRequest(seeds=1))
    damage(groups.folder)
    with pytest.raises(UserError, match="damaged"):
        _ = two_sites[0].groups


def test_a_damaged_harvest_is_one_message(two_sites: tuple[Harvest, np.ndarray]) -> None:
    file = two_sites[0].folder / "components_members.npy"
    members = np.load(file)
    members[1] = members[0]
    np.save(file, members)
    with pytest.raises(UserError, match="the harvest is damaged"):
        cluster(Harvest(two_sites[0].folder))


def test_a_toy_run_has_groups(harvested: Path, tmp_path: Path) -> None:
    """From a run to its groups, with a real harvest; a group has the positions where any of its members fires."""
    run = Path(shutil.copytree(harvested / "p-00000002", tmp_path / "p-00000002"))
    outcome = pd_here("cluster", run, "--seeds", "1")
    assert outcome.status == 0, outcome
    opened = load_run(run, devices=1)
    groups = opened.groups
    assert groups.folder == Path(outcome.out.split()[-1])
    harvest = opened.harvest
    inputs = np.stack([harvest.row(n) for n in range(harvest.plan.rows)])
    importances = opened.causal_importances(inputs)
    members = groups.members(0)
    fires = np.stack([np.asarray(importances[site])[:, c] > 0 for site, c in members], axis=1)
    assert harvest.n_sampled == len(inputs)
    assert groups.densities[0] == pytest.approx(fires.any(1).mean())
