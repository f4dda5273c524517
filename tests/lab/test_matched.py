"""Components of two runs matched one to one: against the plain mathematics of `tests/reference.py`, against runs whose
partners are known, and what cannot be matched."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from param_decomp_lab import load_run
from param_decomp_lab.errors import UserError
from param_decomp_lab.harvest.files import Harvest
from param_decomp_lab.harvest.files.overlap import nearest_by_firing, overlap, pair_overlaps, same_rows
from param_decomp_lab.matching import pairs as matching
from param_decomp_lab.matching.pairs import Fired, pairs_of
from param_decomp_lab.matching.result import MatchedPairs
from param_decomp_lab.opening import Run
from param_decomp_lab.runs.checkpoints.store import Checkpoints
from tests import reference as ref
from tests.lab.planted_harvest import SITES as PLANTED_SITES
from tests.lab.planted_harvest import THRESHOLD, Planted, plant
from tests.lab.planted_harvest import C as PLANTED
from tests.lab.tiny_run import EARLY, SITES
from tests.lab.turned_run import Turned, turned

LLAMA, TOY = "p-00000001", "p-00000002"


def drawn(seed: int, n: int, m: int) -> tuple[Fired, Fired]:
    """Random components, of which the first of the two resemble each other, with any sign and size."""
    rng = np.random.default_rng(seed)
    one = Fired(rng.standard_normal((6, n)), rng.standard_normal((n, 4)))
    V, U = rng.standard_normal((6, m)), rng.standard_normal((m, 4))
    for k in range(min(n, m) // 2):
        size = rng.choice([-2.0, 0.5])
        V[:, -1 - k] = size * (one.V[:, k] + 0.3 * V[:, -1 - k])
        U[-1 - k] = size * (one.U[k] + 0.3 * U[-1 - k])
    return one, Fired(V, U)


def check_pairs(found: MatchedPairs, one: Fired, other: Fired, expected: list[tuple[int, int]]) -> None:
    cosines = ref.similarity(one.V, one.U, other.V, other.U)
    assert sorted(zip(found.one.tolist(), found.other.tolist(), strict=True)) == sorted(expected)
    assert found.similarity == pytest.approx([cosines[pair] for pair in zip(found.one, found.other, strict=True)])
    assert (np.diff(found.similarity) <= 0).all()
    for i, j, V, U in zip(found.one, found.other, found.cos_V, found.cos_U, strict=True):
        v, w = one.V[:, i], other.V[:, j]
        assert pytest.approx(v @ w / np.sqrt((v @ v) * (w @ w))) == V
        assert pytest.approx(cosines[i, j]) == V * U


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 6), st.integers(1, 6), st.integers(0, 10**6))
def test_an_assignment(n: int, m: int, seed: int) -> None:
    one, other = drawn(seed, n, m)
    found = pairs_of(one, other)
    assert found.assigned
    check_pairs(found, one, other, ref.assigned_pairs(ref.similarity(one.V, one.U, other.V, other.U)))


@pytest.mark.parametrize("at_once", [1, 40, 1 << 23])
def test_with_too_many_those_nearest_to_each_other(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matching, "ASSIGNED", 8)
    monkeypatch.setattr(matching, "AT_ONCE", at_once)
    for n, m in ((9, 4), (5, 12), (20, 20)):
        one, other = drawn(n, n, m)
        found = pairs_of(one, other)
        assert not found.assigned
        assert 0 < len(found.one) < max(n, m)
        check_pairs(found, one, other, ref.mutual_pairs(ref.similarity(one.V, one.U, other.V, other.U)))


@pytest.mark.parametrize("n", [(0, 3), (3, 0), (0, 0)])
def test_nothing_fires(n: tuple[int, int]) -> None:
    one, other = drawn(0, 3, 3)
    found = pairs_of(Fired(one.V[:, : n[0]], one.U[: n[0]]), Fired(other.V[:, : n[1]], other.U[: n[1]]))
    assert len(found.one) == len(found.similarity) == 0


# ---- where both fire ----


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Planted:
    return plant(tmp_path_factory.mktemp("planted") / "p-00000001")


def fires_at_sampled(planted: Planted) -> dict[str, np.ndarray]:
    """Whether each component fires, by site: [sampled positions, C]."""
    rows, positions = planted.harvest.sampled_positions
    return {site: lam[rows, positions] > THRESHOLD for site, lam in planted.importances.items()}


def test_firing_overlap(planted: Planted) -> None:
    harvest, fires = planted.harvest, fires_at_sampled(planted)
    rng = np.random.default_rng(0)
    site = PLANTED_SITES[1]
    one, other = rng.permutation(PLANTED)[:9], rng.permutation(PLANTED)[:9]
    expected = [ref.firing_overlap(fires[site][:, i], fires[site][:, j]) for i, j in zip(one, other, strict=True)]
    assert len(set(expected)) > 7
    assert pair_overlaps(harvest, Harvest(planted.folder), site, one, other) == pytest.approx(expected)
    for number in (0, PLANTED - 2):
        everything = [
            (name, n, ref.firing_overlap(fires[site][:, number], fires[name][:, n]))
            for name in PLANTED_SITES
            for n in range(PLANTED)
        ]
        everything.sort(key=lambda row: -row[2])
        found = nearest_by_firing(harvest, site, number, Harvest(planted.folder), 7)
        assert [f.jaccard for f in found] == pytest.approx([row[2] for row in everything[:7]])
        assert found[0] == (site, number, 1.0)
        assert overlap(harvest, site, number, harvest, *everything[3][:2]) == pytest.approx(everything[3][2])


@pytest.mark.parametrize("limit", ["overlap.PLACES", "reading.MOST_MEMBERS"])
def test_a_component_that_fires_very_often(planted: Planted, limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chosen at a sample of its firings, and of fewer where many others fire; the values are those of all."""
    monkeypatch.setattr(f"param_decomp_lab.harvest.files.{limit}", 50)
    fires = fires_at_sampled(planted)
    for found in nearest_by_firing(planted.harvest, PLANTED_SITES[0], 0, planted.harvest, 5):
        expected = ref.firing_overlap(fires[PLANTED_SITES[0]][:, 0], fires[found.site][:, found.number])
        assert found.jaccard == pytest.approx(expected)


def test_the_same_rows(planted: Planted, tmp_path: Path) -> None:
    again, others = plant(tmp_path / "again"), plant(tmp_path / "others", seed=1)
    assert same_rows(planted.harvest, again.harvest)
    assert not same_rows(planted.harvest, others.harvest)
    for name, column in (("rows", "row"), ("positions", "position")):
        file = again.folder / f"{name}.parquet"
        whole, table = file.read_bytes(), pq.read_table(file)
        values = table[column].to_pylist()
        if name == "rows":
            values[-1][-1] = (values[-1][-1] + 1) % 50
        else:
            values[-1] = (values[-1] + 1) % 64
        made = pa.array(values, table.schema.field(column).type)
        pq.write_table(table.set_column(table.schema.get_field_index(column), column, made), file)
        assert not same_rows(planted.harvest, again.harvest), name
        file.write_bytes(whole)
    assert same_rows(planted.harvest, again.harvest)


# ---- runs ----


@pytest.fixture(scope="module")
def run(harvested: Path) -> Run:
    return load_run(harvested / LLAMA, devices=1)


@pytest.fixture
def other(harvested: Path, monkeypatch: pytest.MonkeyPatch) -> Turned:
    return turned(load_run(harvested / LLAMA, devices=1), monkeypatch)


def test_partners_are_found(run: Run, other: Turned) -> None:
    """Whatever their numbers, sizes and signs; those that never fire are left out."""
    found = run.matched(other.run)
    assert list(found.sites) == list(run.sites) == list(SITES)
    assert found.missing == ((), ())
    assert found.same_rows
    table = found.table.to_pylist()
    for row, (site, pairs) in zip(table, found.sites.items(), strict=True):
        fires = np.flatnonzero(run.harvest.components(site)["firings"].to_numpy() > 0)
        assert pairs.firing == (len(fires), len(fires))
        assert sorted(pairs.one.tolist()) == fires.tolist()
        partner, sign = other.partner[site], other.sign[site]
        assert pairs.other.tolist() == partner[pairs.one].tolist()
        assert (pairs.similarity > 0.9).all()
        assert pairs.flipped.tolist() == (sign[pairs.one] < 0).tolist()
        assert pairs.share() == pairs.share(0.5) == 1
        assert pairs.random_mean < 0.7 * pairs.mean
        assert pairs.jaccard == pytest.approx(
            [overlap(run.harvest, site, i, run.harvest, site, j) for i, j in zip(pairs.one, pairs.other, strict=True)]
        )
        assert row["site"] == site
        assert row["above_0.9"] == 1
        assert row["random_above_0.5"] == pytest.approx((pairs.random > 0.5).sum() / len(fires))
        assert row["jaccard"] == pytest.approx(np.mean(pairs.jaccard))
        assert pairs.table.column_names[:3] == ["component", "other", "similarity"]
    assert len({int(n) for pairs in found.sites.values() for n in pairs.flipped}) == 2
    assert found.table.num_rows == len(SITES)
    assert f"{len(pairs.one)} pairs, 100% above 0.9" in repr(found)
    [only] = run.matched(other.run, sites="layers.1.mlp.up_proj").sites
    assert only == "layers.1.mlp.up_proj"


def test_a_component_that_fires_in_one_alone(run: Run, other: Turned, monkeypatch: pytest.MonkeyPatch) -> None:
    site = "layers.0.mlp.up_proj"
    theirs = Harvest(run.harvest.folder)
    components, quiet = theirs.components, int(other.partner[site][4])

    def without(name: str, columns: list[str]) -> pa.Table:
        values = components(name, columns)["firings"].to_numpy().copy()
        values[quiet] = 0
        return pa.table({"firings": values})

    monkeypatch.setattr(theirs, "components", without)
    other.run.harvest = theirs
    pairs = run.matched(other.run, sites=site).sites[site]
    assert pairs.firing[0] == pairs.firing[1] + 1 == len(pairs.one) + 1
    assert quiet not in pairs.other
    assert pairs.pair_of(4) is None
    assert pairs.share() == pytest.approx(np.sum(pairs.similarity > 0.9) / pairs.firing[1])


def test_sites_of_one_run_alone(run: Run, other: Turned, monkeypatch: pytest.MonkeyPatch) -> None:
    first, *rest = SITES
    theirs = Harvest(run.harvest.folder)
    monkeypatch.setattr(theirs, "sites", {name: number for name, number in theirs.sites.items() if name != first})
    other.run.harvest = theirs
    found = run.matched(other.run)
    assert list(found.sites) == rest
    assert found.missing == ((first,), ())
    assert other.run.matched(run).missing == ((), (first,))
    with pytest.raises(UserError, match=rf"no site is in both harvests: {LLAMA} has {first}, {LLAMA} has layers"):
        run.matched(other.run, sites=first)


def test_what_cannot_be_compared(run: Run, other: Turned, harvested: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    toy = load_run(harvested / TOY, devices=1)
    for ask in (lambda: run.matched(toy), lambda: run.nearest(next(iter(SITES)), 0, other=toy)):
        with pytest.raises(UserError, match=r"different targets \(llama, tms\)"):
            ask()
    monkeypatch.setattr(Checkpoints, "inputs", lambda self, step: {"target": "ab"})
    assert run.matched(other.run).sites
    prints = iter(["ab", "cd", "", "cd"])
    monkeypatch.setattr(Checkpoints, "inputs", lambda self, step: {"target": next(prints)})
    with pytest.raises(UserError, match="the same sizes but different weights"):
        run.matched(other.run)
    assert run.matched(other.run).sites  # one of the two did not record them


def test_harvests_of_other_rows(run: Run, other: Turned, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = Harvest(run.harvest.folder)
    monkeypatch.setattr(Harvest, "rows_digest", property(id))
    other.run.harvest = theirs
    found = run.matched(other.run)
    assert not found.same_rows
    assert all(site.jaccard is None for site in found.sites.values())
    assert found.table["jaccard"].null_count == len(SITES)


@pytest.mark.parametrize("side", ["U", "V", "both"])
def test_nearest_components_of_another_run(run: Run, harvested: Path, side: str) -> None:
    """In an earlier checkpoint, of which one component is no nearer to itself than to others for certain."""
    earlier = load_run(harvested / LLAMA, EARLY, devices=1)
    for site, number in (("layers.0.mlp.down_proj", 3), ("layers.1.mlp.up_proj", 7)):
        V, U = run.factors(site)
        everything = []
        for name in SITES:
            same_kind = name.rpartition(".")[2] == site.rpartition(".")[2]
            down = site.endswith("down_proj")
            reads = same_kind and (not down or name == site)
            writes = same_kind and (down or name == site)
            if not {"both": reads and writes, "U": writes, "V": reads}[side]:
                continue
            V2, U2 = earlier.factors(name)
            cos = np.ones(V2.shape[1])
            for wanted, mine, theirs in (("V", V[:, number], V2.T), ("U", U[number], U2)):
                if side in (wanted, "both"):
                    cos *= theirs @ mine / np.linalg.norm(theirs, axis=1) / np.linalg.norm(mine)
            everything += [(name, n, x) for n, x in enumerate(cos.tolist())]
        everything.sort(key=lambda row: -abs(row[2]))
        found = run.nearest(site, number, side, most=6, other=earlier)
        assert [f[:2] for f in found] == [row[:2] for row in everything[:6]]
        assert [f.cosine for f in found] == pytest.approx([row[2] for row in everything[:6]], abs=1e-6)
