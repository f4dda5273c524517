"""Builds a graph: follows the nodes of largest influence first, until little is left, and prunes what it found."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from param_decomp_lab.errors import UserError
from param_decomp_lab.graph.find_behind import find_behind
from param_decomp_lab.graph.graph import Edge, Graph, Node, Optimized, Shares
from param_decomp_lab.graph.incoming import Incoming
from param_decomp_lab.graph.influence import IncomingEdges, Pruned, influence, prune

Progress = Callable[[int, float], None]
"""Told the number of components followed, and the share of influence that ends in others."""


@dataclass(frozen=True)
class GraphRequest:
    """How a graph is made. ``outputs``: numbers of tokens or features; None for the most likely tokens, to
    ``output_share`` of probability, at most ``most_outputs`` (of a toy: its largest outputs, all told as many).
    ``position``: of the outputs; -1 is the last. ``threshold``: a component fires where λ is above it.
    ``nodes_share``, ``edges_share``: E7. ``most_nodes``: kept at most. ``most_followed``: components whose incoming
    edges are computed at most; fewer where less than ``unfollowed`` of influence ends in the others."""

    outputs: tuple[int, ...] | None = None
    position: int = -1
    threshold: float = 0.0
    nodes_share: float = 0.8
    edges_share: float = 0.98
    most_nodes: int = 2000
    most_followed: int = 2000
    unfollowed: float = 0.01
    output_share: float = 0.95
    most_outputs: int = 10

    def __post_init__(self) -> None:
        for name in ("nodes_share", "edges_share", "output_share"):
            if not 0 < getattr(self, name) <= 1:
                raise UserError(f"{name}: {getattr(self, name)} should be above 0 and at most 1")
        for name in ("most_nodes", "most_followed", "most_outputs"):
            if getattr(self, name) < 1:
                raise UserError(f"{name}: {getattr(self, name)} should be at least 1")
        if not 0 <= self.unfollowed < 1:
            raise UserError(f"unfollowed: {self.unfollowed} should be from 0 to below 1")


@dataclass(frozen=True)
class Prompt:
    """What a graph is about: the run and its step, and the row of inputs. ``tokens``: a name of each position.
    ``ids``: token ids; empty for a toy. ``name``: of an output by its number."""

    run: str
    step: int
    text: str
    tokens: tuple[str, ...]
    ids: tuple[int, ...]
    name: Callable[[int], str]

    @property
    def of_text(self) -> bool:
        return bool(self.ids)


class FollowedOutputs(NamedTuple):
    """What a graph leads to. ``row``: their position. ``predictions``: all outputs there. ``numbers``: those followed.
    ``probability``: the model's, of each; ``chosen``: divided by their sum."""

    row: int
    predictions: Float[np.ndarray, " n"]
    numbers: Int[np.ndarray, " O"]
    probability: Float[np.ndarray, " O"]
    chosen: Float[np.ndarray, " O"]


def find_outputs(incoming: Incoming, request: GraphRequest, of_text: bool) -> FollowedOutputs:
    """Raises UserError for a position or an output that is not there."""
    predictions = incoming.predictions()
    row = _position(request.position, len(predictions))
    return FollowedOutputs(row, predictions[row], *_outputs(predictions[row], request, of_text))


def build_graph(
    incoming: Incoming,
    prompt: Prompt,
    request: GraphRequest,
    outputs: FollowedOutputs,
    optimized: Optimized | None = None,
    progress: Progress | None = None,
) -> Graph:
    """The attribution graph of a row of inputs (E1 to E7, E10). ``optimized``: how the importances were, if they
    were."""
    chosen = outputs.chosen
    found = incoming.of_outputs(outputs.row, outputs.numbers)
    weights, deltas, followed = [found.weights], [found.delta], np.zeros(0, int)
    sites = np.asarray(incoming.firing.site)
    leads_nowhere = np.asarray([site.lookup for site in incoming.sites.all])[sites]  # what reads tokens alone
    n = len(incoming.firing)
    while True:
        rows = IncomingEdges(np.concatenate(weights), followed, sites[followed], chosen)
        shares = rows.shares
        values = influence(shares, followed, sites[followed], chosen)
        waiting = values[:n].copy()
        waiting[followed] = 0
        waiting[leads_nowhere] = 0
        left = float(waiting.sum())
        if progress is not None:
            progress(len(followed), left)
        room = min(incoming.at_once, request.most_followed - len(followed))
        if room <= 0 or left <= request.unfollowed:
            break
        best = np.argsort(-waiting, kind="stable")[:room]
        best = best[waiting[best] > 0]
        found = incoming.of_components(best)
        weights.append(found.weights)
        deltas.append(found.delta)
        followed = np.concatenate([followed, best])
    kept = prune(rows, values, request.nodes_share, request.edges_share, request.most_nodes)
    ends = _ends(incoming, shares, values, rows, np.concatenate(deltas), left)
    return _assemble(incoming, prompt, request, rows, values, kept, ends, outputs, optimized)


def _position(position: int, length: int) -> int:
    if not -length <= position < length:
        raise UserError(f"position {position}: the inputs have {length} positions, 0 to {length - 1}")
    return position % length


def _outputs(
    predictions: Float[np.ndarray, " n"], request: GraphRequest, of_text: bool
) -> tuple[Int[np.ndarray, " O"], Float[np.ndarray, " O"], Float[np.ndarray, " O"]]:
    """Numbers of the outputs, the model's probabilities of them, and these divided by their sum (E6)."""
    if of_text:
        shifted = np.exp(predictions.astype(np.float64) - predictions.max())
        probability = shifted / shifted.sum()
    else:
        size = np.abs(predictions.astype(np.float64))
        probability = size / max(size.sum(), np.finfo(np.float64).tiny)
    if request.outputs is not None:
        numbers = np.asarray(request.outputs, int)
        if not numbers.size:
            raise UserError("outputs: give at least one")
        wrong = numbers[(numbers < 0) | (numbers >= len(predictions))]
        if wrong.size:
            raise UserError(f"output {wrong[0]}: they go from 0 to {len(predictions) - 1}")
        if len(set(numbers.tolist())) < len(numbers):
            raise UserError("outputs: one is given twice")
    else:
        order = np.argsort(-probability, kind="stable")
        enough = int(np.searchsorted(np.cumsum(probability[order]), request.output_share)) + 1
        numbers = order[: min(enough, request.most_outputs)]
    own = probability[numbers]
    total = own.sum()
    return numbers, own, own / total if total > 0 else np.full(len(own), 1 / len(own))


def _ends(
    incoming: Incoming,
    shares: np.ndarray,
    values: Float[np.ndarray, " N"],
    rows: IncomingEdges,
    deltas: Float[np.ndarray, "R r"],
    not_followed: float,
) -> dict[str, float]:
    """Where influence ends (`graph.py:Shares`)."""
    layout = incoming.layout
    first = layout.components
    rests = slice(first, first + len(layout.rest_site))
    embeddings = slice(rests.stop, rests.stop + layout.embeddings)
    of_row = np.concatenate([rows.probability, values[rows.node]])
    total = np.abs(rows.weights).sum(axis=1, keepdims=True)
    # Of a rest's edge at most the whole is the delta's, whose sign may be the other's.
    size = np.minimum(np.abs(deltas), np.abs(rows.weights[:, rests]))
    of_deltas = np.divide(size, total, out=np.zeros_like(size), where=total > 0)
    components = values[: layout.components].copy()
    components[rows.node] = 0
    return {
        # Components of the embedding are where a text begins, as embeddings are.
        "embeddings": float(values[embeddings].sum() + components.sum() - not_followed),
        "rests": float(values[rests].sum()),
        "deltas": float(of_row @ of_deltas.sum(axis=1)),
        "biases": float(values[-1]),
        "not_followed": not_followed,
    }


def _assemble(
    incoming: Incoming,
    prompt: Prompt,
    request: GraphRequest,
    rows: IncomingEdges,
    values: Float[np.ndarray, " N"],
    kept: Pruned,
    ends: dict[str, float],
    outputs: FollowedOutputs,
    optimized: Optimized | None,
) -> Graph:
    position, predictions, numbers, probability, _ = outputs
    mean = predictions.mean() if prompt.of_text else 0.0
    nodes = [
        Node("output", "", position, int(number), float(predictions[number] - mean), 0.0, float(share), float(p))
        for number, share, p in zip(numbers, rows.probability, probability, strict=True)
    ]
    n_outputs = len(nodes)
    place = {int(node): n_outputs + k for k, node in enumerate(kept.nodes)}
    nodes += [_node(incoming, prompt, int(node), float(values[node])) for node in kept.nodes]
    shares = rows.shares
    edges = []
    for row, source in kept.edges:
        target = int(row) if row < n_outputs else place[int(rows.node[row - n_outputs])]
        edges.append(Edge(place[int(source)], target, float(rows.weights[row, source]), float(shares[row, source])))
    rests = find_behind(incoming, rows, values, kept, outputs.row, numbers)
    of_kept = Shares(kept.nodes_share, kept.edges_share, **ends)
    return Graph(
        prompt.run, prompt.step, prompt.text, prompt.tokens, prompt.ids, request.threshold,
        len(incoming.firing), len(rows.node), of_kept, tuple(nodes), tuple(edges),
        {int(n): prompt.name(int(n)) for n in numbers}, optimized, rests,
    )  # fmt: skip


def _node(incoming: Incoming, prompt: Prompt, node: int, value: float) -> Node:
    """``node``: its number in the `SourceOrder`."""
    firing, layout = incoming.firing, incoming.layout
    names = [site.name for site in incoming.sites.all]
    if node < layout.components:
        site, position, number = names[firing.site[node]], int(firing.position[node]), int(firing.number[node])
        return Node(
            "component", site, position, number, float(firing.activation[node]), float(firing.importance[node]), value
        )
    node -= layout.components
    if node < len(layout.rest_site):
        return Node("rest", names[layout.rest_site[node]], int(layout.rest_position[node]), -1, 0.0, 0.0, value)
    node -= len(layout.rest_site)
    if node < layout.embeddings:
        if prompt.of_text:
            return Node("embedding", "", node, prompt.ids[node], 0.0, 0.0, value)
        return Node("embedding", "", 0, node, 0.0, 0.0, value)
    return Node("biases", "", -1, -1, 0.0, 0.0, value)
