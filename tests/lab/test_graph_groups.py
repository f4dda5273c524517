"""Groups of components as nodes of graphs, and as selections."""

import numpy as np
import pytest

from param_decomp_jax.decomposition.sites import Site
from param_decomp_lab.errors import UserError
from param_decomp_lab.graph.graph import Edge, Graph, Node, Shares, merge_groups
from param_decomp_lab.opening.selection import selected

GROUPS = {("a", 0): 4, ("a", 1): 4, ("b", 0): 4, ("a", 2): 5}
NODES = (
    Node("output", "", 1, 9, 2.0, 0.0, 1.0, 0.5),
    Node("component", "a", 1, 0, 1.0, 0.5, 0.3),
    Node("component", "b", 1, 0, 1.0, 0.9, 0.1),
    Node("component", "a", 0, 1, 1.0, 0.7, 0.2),
    Node("component", "a", 1, 2, 1.0, 0.7, 0.05),
    Node("embedding", "", 0, 7, 0.0, 0.0, 0.02),
)
EDGES = (
    Edge(1, 0, 2.0, 0.5), Edge(2, 0, -0.5, 0.1), Edge(1, 2, 3.0, 0.9), Edge(3, 1, 1.0, 0.4), Edge(3, 2, 1.0, 0.1),
    Edge(5, 1, 0.5, 0.6), Edge(4, 0, 0.1, 0.02),
)  # fmt: skip
GRAPH = Graph(
    "p-1", 3, "x y", ("x", "y"), (7, 8), 0.0, 9, 3, Shares(1, 1, 0.5, 0.1, 0.0, 0.1, 0.0), NODES, EDGES, {9: "z"}
)


def test_members_at_one_position_are_one_node() -> None:
    found = merge_groups(GRAPH, lambda *component: GROUPS.get(component))
    assert [node.id for node in found.nodes] == ["output:9@1", "group:4@1", "a:1@0", "a:2@1", "embedding:7@0"]
    group = found.node("group:4@1")
    assert group.members == ("a:0@1", "b:0@1")
    assert (group.site, group.influence, group.importance) == ("a", pytest.approx(0.4), 0.9)
    into = {node.id: (edge.weight, edge.share) for node, edge in found.into(group)}
    # Shares of each member's, weighted by influence: 0.3 and 0.1 of 0.4. What is within the group is gone.
    assert into == {
        "a:1@0": (2.0, pytest.approx(0.4 * 0.75 + 0.1 * 0.25)), "embedding:7@0": (0.5, pytest.approx(0.6 * 0.75))
    }  # fmt: skip
    out = {node.id: (edge.weight, edge.share) for node, edge in found.out_of(group)}
    assert out == {"output:9@1": (1.5, pytest.approx(0.6))}


def test_files(tmp_path: object) -> None:
    found = merge_groups(GRAPH, lambda *component: GROUPS.get(component))
    assert Graph.from_json(found.to_json(), "here").nodes[1].members == found.nodes[1].members
    assert "members" not in GRAPH.to_json()["nodes"]


class Groups:
    """As much of `harvest_files.Groups` as a selection reads."""

    def __len__(self) -> int:
        return 6

    def members(self, group: int) -> list[tuple[str, int]]:
        return [component for component, own in GROUPS.items() if own == group]


SITES = {name: Site(name, 0, name, "x", 2, 2, C=3) for name in ("a", "b")}


def chosen(selection: object) -> dict[str, set[tuple[int, int]]]:
    found = selected(selection, SITES, 2, groups=lambda: Groups())  # type: ignore[arg-type, return-value]
    return {name: set(zip(*map(np.ndarray.tolist, np.nonzero(mask)), strict=True)) for name, mask in found.items()}


def test_selections() -> None:
    everywhere = {"a": {(0, 0), (1, 0), (0, 1), (1, 1)}, "b": {(0, 0), (1, 0)}}
    assert chosen("group:4") == everywhere
    assert chosen(["group:4@1", "b:2@0"]) == {"a": {(1, 0), (1, 1)}, "b": {(1, 0), (0, 2)}}
    found = merge_groups(GRAPH, lambda *component: GROUPS.get(component))
    assert chosen(found.node("group:4@1")) == {"a": {(1, 0)}, "b": {(1, 0)}}
    with pytest.raises(UserError, match="groups go from 0 to 5"):
        chosen("group:6")
    with pytest.raises(UserError, match="selected one by one"):
        selected("group:4", SITES, 2)
    for entry in (f"group:{'9' * 5000}", f"a:{'9' * 5000}", f"a:0@{'9' * 5000}"):  # more digits than int() takes
        with pytest.raises(UserError, match="should be SITE:NUMBER"):
            chosen(entry)
