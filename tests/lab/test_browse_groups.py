"""The browser's pages of groups: order, links, the tree of merges, and what is damaged or not there."""

import os
import re
import shutil
from collections.abc import Iterator, Sequence
from html import unescape
from pathlib import Path

import numpy as np
import pytest
from starlette.testclient import TestClient

from param_decomp_lab.browse.dendrogram import LEAF, MOST_LEAVES, dendrogram
from param_decomp_lab.cluster.cluster import cluster
from param_decomp_lab.cluster.request import ClusterRequest
from param_decomp_lab.harvest.files import Groups, Harvest
from param_decomp_lab.harvest.files.averages import AVERAGES, AverageOptions, write_averages
from tests.lab.in_time import in_time
from tests.lab.test_browse import LLAMA, MARKUP, TOY, base, client, links, only_harvest


@pytest.fixture(scope="module")
def grouped(harvested: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of both runs, whose harvests have groups: the language model's of firings that are made up, in which
    components 0 and 1, 2 to 4, and so on act together through the sites."""
    folder = tmp_path_factory.mktemp("grouped") / "runs"
    shutil.copytree(harvested, folder, ignore=shutil.ignore_patterns("ckpts"))
    act_together(Harvest(only_harvest(folder)))
    for run in (LLAMA, TOY):
        cluster(Harvest(only_harvest(folder, run)), ClusterRequest(alpha=0.5, seeds=2))
    return folder


@pytest.fixture
def mine(grouped: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(grouped, tmp_path / "runs"))


@pytest.fixture(scope="module")
def shown(grouped: Path) -> Iterator[TestClient]:
    with client(grouped) as found:
        yield found


def act_together(harvest: Harvest) -> None:
    """Makes up the firings of a harvest: components 0 and 1, 2 to 4, and so on act together through the sites."""
    rng = np.random.default_rng(0)
    C = sum(site.C for site in harvest.plan.sites)
    group = np.searchsorted(np.cumsum(np.arange(2, 40)), np.arange(C), side="right")
    group[-2:] = [100, 101]
    shares = rng.uniform(0.02, 0.1, 102)
    together = rng.random((102, harvest.n_sampled)) < shares[:, None]
    fires = together[rng.permutation(group)]
    fires[:, 0] = True
    np.save(harvest.folder / "components_ends.npy", np.concatenate([[0], np.cumsum(fires.sum(1))]))
    np.save(harvest.folder / "components_members.npy", np.nonzero(fires)[1].astype(np.int32))
    np.save(harvest.folder / "components_negative.npy", np.zeros(fires.sum(), np.int8))


def groups_of(folder: Path, run: str = LLAMA) -> Groups:
    return Harvest(only_harvest(folder, run)).groups


def test_groups_in_every_order(shown: TestClient, grouped: Path) -> None:
    groups, address = groups_of(grouped), f"{base(grouped)}/groups"
    several = np.flatnonzero(groups.sizes > 1)
    assert 1 < len(several) <= 50  # of one page
    values = {"": groups.sizes, "density": groups.densities, "sites": groups.n_sites, "number": np.arange(len(groups))}
    for sort, value in values.items():
        for order, sign in (("", -1), ("up", 1)):
            page = shown.get(address, params={"sort": sort, "order": order})
            assert page.status_code == 200
            rows = [int(n) for n in re.findall(rf'<th scope="row" class="num"><a href="{address}/(\d+)">', page.text)]
            assert sorted(rows) == several.tolist()
            assert np.all(np.diff(sign * value[rows]) >= 0)
    assert shown.get(address, params={"sort": "color"}).status_code == 400
    harvest_page = shown.get(base(grouped))
    assert address in links(harvest_page)


def test_a_group_names_its_members_and_each_of_them_the_group(shown: TestClient, grouped: Path) -> None:
    groups = groups_of(grouped)
    page = shown.get(f"{base(grouped)}/groups/0")
    members = groups.members(0)
    assert len(members) <= 50
    addresses = {f"{base(grouped)}/sites/{site}/{c}" for site, c in members}
    assert {link for link in links(page) if "/sites/" in link} == addresses
    for table in ("Members", "Common tokens"):
        assert table in page.text
    for member in list(addresses)[:2]:
        of_member = shown.get(member)
        assert f"{base(grouped)}/groups/0" in links(of_member)
        assert len(links(of_member) & (addresses - {member})) >= min(12, len(members) - 1)
    alone = np.flatnonzero(groups.sizes == 1)
    if len(alone):
        [(site, c)] = groups.members(int(alone[0]))
        assert (
            "None: no other component fires with it often enough" in shown.get(f"{base(grouped)}/sites/{site}/{c}").text
        )
        assert "<svg" not in shown.get(f"{base(grouped)}/groups/{alone[0]}").text


def test_pages_are_small_and_keep_the_policy(shown: TestClient, grouped: Path) -> None:
    for run in (LLAMA, TOY):
        for n in range(0, len(groups_of(grouped, run)), 7):
            page = shown.get(f"{base(grouped, run)}/groups/{n}")
            assert page.status_code == 200
            assert int(page.headers["content-length"]) <= 50_000
            assert "default-src 'none'" in page.headers["content-security-policy"]
            assert page.text.count("<h1>") == 1
            assert " style=" not in page.text
            assert "<script>" not in page.text


def test_what_is_not_there(shown: TestClient, grouped: Path) -> None:
    for number in ("99999", "-1", "x", "0.5", "1" * 30):
        assert shown.get(f"{base(grouped)}/groups/{number}").status_code == 404
    assert shown.get(f"{base(grouped)}/groups", params={"page": "900"}).status_code == 200
    assert shown.get(f"{base(grouped)}/groups", params={"page": "x"}).status_code == 404


def test_a_harvest_without_groups_says_how_to_make_them(harvested: Path) -> None:
    with client(harvested) as found:
        address = f"{base(harvested, TOY)}/groups"
        assert "pd cluster" in found.get(address).text
        assert found.get(f"{address}/0").status_code == 404


def test_labels_are_text(mine: Path) -> None:
    with client(mine) as found:
        site, c = groups_of(mine).members(0)[0]
        done = found.post(f"{base(mine)}/sites/{site}/{c}/label", data={"text": MARKUP, "author": MARKUP})
        assert done.status_code == 303
        for address in ("groups", "groups/0"):
            text = found.get(f"{base(mine)}/{address}").text
            assert "<script>alert" not in text
            assert "<img" not in text
            assert MARKUP[:20] in unescape(text)


def test_damaged_groups_leave_the_components_readable(mine: Path) -> None:
    groups = groups_of(mine)
    site, c = groups.members(0)[0]
    (groups.folder / "merges.parquet").write_bytes(b"nothing")
    with client(mine) as found:
        component = found.get(f"{base(mine)}/sites/{site}/{c}")
        assert component.status_code == 200
        assert "the groups are damaged" in component.text
        for address in ("groups", "groups/0"):
            page = found.get(f"{base(mine)}/{address}")
            assert page.status_code == 400
            assert "the groups are damaged" in page.text


def ask(folder: Path, pages: Sequence[str]) -> list[int]:
    """The status of each page."""
    with client(folder) as browser:
        return [browser.get(page).status_code for page in pages]


def test_a_pipe_in_place_of_any_file_is_not_waited_for(mine: Path) -> None:
    """Each file of the harvest, of its groups and its averages in turn: whoever asks for a page gets one."""
    opened = Harvest(only_harvest(mine))
    (site, c), *_ = groups_of(mine).members(0)
    options = AverageOptions(rows=1, largest=1, least_firings=1)
    edges = [np.zeros(1, kind) for kind in (np.int32, np.int32, np.float32)]
    write_averages(opened.folder / AVERAGES / options.name, options, 1, edges)
    here = f"{base(mine)}/sites/{site}"
    pages = ("/", base(mine), here, f"{here}?search=e", f"{here}/{c}", f"{base(mine)}/groups", f"{base(mine)}/groups/0")
    others = {f"{number}.parquet" for number in opened.sites.values()} - {f"{opened.sites[site]}.parquet"}
    files = [path for path in opened.folder.rglob("*") if path.is_file() and path.name not in others]
    assert {"edges.parquet", "merges.parquet", "firings.npy", "rows.parquet"} <= {path.name for path in files}
    for file in files:
        aside = file.rename(file.with_name("aside"))
        os.mkfifo(file)
        answers = in_time(lambda: ask(mine, pages), str(file))
        assert set(answers) <= {200, 400, 404}, (file, answers)
        aside.rename(file)


def test_groups_made_meanwhile_are_shown(mine: Path) -> None:
    with client(mine) as found:
        assert "α = 0.5" in found.get(f"{base(mine)}/groups").text
        cluster(Harvest(only_harvest(mine)), ClusterRequest(alpha=2, seeds=1))
        assert "α = 2)" in found.get(f"{base(mine)}/groups").text
        cluster(Harvest(only_harvest(mine)), ClusterRequest(alpha=0.5, seeds=2))  # again: these are the newest now
        assert "α = 0.5" in found.get(f"{base(mine)}/groups").text


# ---- the tree ----


def chain(n: int) -> list[dict[str, int]]:
    """Component after component joins one group; each time a tenth less is active together."""
    return [
        {
            "node": n + m,
            "first": m + 1,
            "second": n + m - 1 if m else 0,
            "active": 1000,
            "together": max(0, 900 - m),
        }
        for m in range(n - 1)
    ]


@pytest.mark.parametrize("n", [2, 5, MOST_LEAVES, MOST_LEAVES + 1, 1000])
def test_a_tree_has_every_leaf_once_and_says_what_it_leaves_out(n: int) -> None:
    tree = dendrogram(range(n), chain(n), 5000)
    assert len(tree.leaves) == min(n, MOST_LEAVES)
    assert sum(leaf.members for leaf in tree.leaves) == n
    assert [leaf.y for leaf in tree.leaves] == [LEAF * (k + 0.5) for k in range(len(tree.leaves))]
    assert len(tree.branches) == len(tree.leaves) - 1
    assert tree.merged == (n - 1) - len(tree.branches)
    for branch in tree.branches:
        assert branch.top < branch.bottom
        assert max(branch.top_from, branch.bottom_from) <= branch.x <= 100
    assert max(branch.x for branch in tree.branches) == pytest.approx(100 - (900 - (n - 2)) / 10 if n < 900 else 100)


def test_a_merge_never_stands_before_its_parts() -> None:
    merges = [
        {"node": 3, "first": 0, "second": 1, "active": 10, "together": 2},
        {"node": 4, "first": 3, "second": 2, "active": 10, "together": 9},
    ]
    tree = dendrogram(range(3), merges, 100)
    assert [branch.x for branch in tree.branches] == [80, 80]
    assert [leaf.members for leaf in tree.leaves] == [1, 1, 1]


def test_a_group_of_one_has_no_tree() -> None:
    assert not dendrogram([7], [], 100).branches
