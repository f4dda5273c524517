"""The attention heads in which components lie, what the heads read, and pairs of components that make them read it."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from jaxtyping import Float

from param_decomp_jax.analysis.heads import SCORES, attention_pattern, head_scores, query_key
from param_decomp_jax.decomposition.sites import Site, Units
from param_decomp_jax.targets.decoder import Decoder
from param_decomp_lab.errors import UserError
from param_decomp_lab.runs.inputs import Inputs
from param_decomp_lab.runs.opened import OpenedRun

AT_ONCE = 1 << 12
"""Components whose contributions are computed together."""
PARTNER = {"q_proj": "k_proj", "k_proj": "q_proj"}


@dataclass(frozen=True)
class Heads:
    """In which heads of its layer the components of a site lie (H1).

    ``norm``: of the part of U, or of V at a site that reads heads, in each head. ``side``: which of them. ``served``:
    the query heads of each head, 1 unless queries share keys and values. Of one component, arrays have no axis C.
    """

    site: str
    layer: int
    side: Literal["U", "V"]
    served: int
    norm: Float[np.ndarray, "*C heads"]

    @property
    def share(self) -> Float[np.ndarray, "*C heads"]:
        """Shares of the squared norm, which add up to 1; all are 0 for a vector of zeros."""
        squares = self.norm**2
        whole = squares.sum(axis=-1, keepdims=True)
        return np.divide(squares, whole, out=np.zeros_like(squares), where=whole > 0)


@dataclass(frozen=True)
class HeadScores:
    """What the query heads of every layer read on some text (H3): means of attention, from 0 to 1.

    ``previous``: the token before; ``duplicate``: earlier tokens that are the same; ``induction``: tokens that followed
    those; ``first``: the first position. NaN where a text has no such position. ``chance``: by score, that of a head
    that reads all positions up to its own alike. ``positions``: by score, how many count.
    """

    previous: Float[np.ndarray, "layers heads"]
    duplicate: Float[np.ndarray, "layers heads"]
    induction: Float[np.ndarray, "layers heads"]
    first: Float[np.ndarray, "layers heads"]
    chance: dict[str, float]
    positions: dict[str, int]

    def by_head(self, heads: Heads) -> dict[str, Float[np.ndarray, " heads"]]:
        """The scores of the heads of a site, by name; of a key head the mean over the query heads that read it."""
        return {name: getattr(self, name)[heads.layer].reshape(-1, heads.served).mean(axis=1) for name in SCORES}

    def of(self, heads: Heads) -> dict[str, Float[np.ndarray, "*C"]]:
        """The scores of components, by name: those of their heads, weighted by their shares (H4)."""
        return {name: heads.share @ scores for name, scores in self.by_head(heads).items()}


class Partner(NamedTuple):
    """A component of the other site that adds much to the scores of head ``head`` (H2, by the weights).

    ``contributions``: at the distances 0, 1, … between query and key.
    """

    head: int
    site: str
    number: int
    contributions: tuple[float, ...]


class HeadPrograms:
    """The functions of a target's attention, compiled once per shape of inputs."""

    def __init__(self, target: Any) -> None:
        self.scores = jax.jit(partial(head_scores, target))
        self.pattern = jax.jit(partial(attention_pattern, target), static_argnums=(2,))
        self.query_key = jax.jit(partial(query_key, target), static_argnums=(1, 4))


def heads_of(run: OpenedRun, site: str, component: int | None = None) -> Heads:
    """The heads of a site's components, or of one. Raises UserError for a site that is not cut into heads, and for an
    unknown site or component."""
    where, units = _faced(run, site)
    side: Literal["U", "V"] = "U" if units.side == "output" else "V"
    if component is None:
        vectors = run.directions(where.name, side)
    else:
        found = run.component(where.name, component)
        vectors = found.U if side == "U" else found.V
    by_head = vectors.astype(np.float64).reshape(*vectors.shape[:-1], units.n, -1)
    return Heads(where.name, where.layer, side, units.multiplier, np.linalg.norm(by_head, axis=-1))


def head_scores_of(run: OpenedRun, programs: HeadPrograms, inputs: Inputs) -> HeadScores:
    """H3 on a text or token ids. Raises UserError for a target without attention, and for inputs that do not fit."""
    _check_attention(run)
    batch, _ = run.as_batch(inputs)
    with jax.set_mesh(run.mesh):
        found = jax.device_get(programs.scores(run.weights, batch))
    counts = np.where(found.counts > 0, found.counts, np.nan).astype(np.float64)
    scores = found.sums.astype(np.float64) / counts[:, None]
    by_name = {name: scores[:, n] for n, name in enumerate(SCORES)}
    chance = dict(zip(SCORES, (found.chance / counts).tolist(), strict=True))
    positions = dict(zip(SCORES, found.counts.tolist(), strict=True))
    return HeadScores(**by_name, chance=chance, positions=positions)


def attention_of(
    run: OpenedRun, programs: HeadPrograms, inputs: Inputs, layer: int
) -> Float[np.ndarray, "*B heads T T"]:
    """The attention of one layer. Raises UserError as `head_scores_of`, and for a layer that is not there."""
    _check_attention(run)
    layers = run.target.architecture.n_layers
    if not 0 <= layer < layers:
        raise UserError(f"layers go from 0 to {layers - 1}, and there is no layer {layer}")
    batch, single = run.as_batch(inputs)
    with jax.set_mesh(run.mesh):
        found = np.asarray(programs.pattern(run.weights, batch, layer))
    return found[0] if single else found


def partners_of(
    run: OpenedRun, programs: HeadPrograms, site: str, component: int, most: int = 12, distances: int = 2
) -> list[list[Partner]]:
    """For every query head, the components of the layer's `k_proj` (of a component of `k_proj`: of its `q_proj`) that
    have the largest query-key contribution by the weights with one component, at any of the distances below
    ``distances``.

    Raises UserError for another kind of site, where the other matrix is not decomposed, and for an unknown component.
    """
    other = _partner_site(run, site)
    if distances < 1:
        raise UserError(f"distances: there should be at least 1, not {distances}")
    mine = run.component(site, component)
    blocks = []
    for first in range(0, other.C, AT_ONCE):
        V, U = run.factors_of(other.name, slice(first, first + AT_ONCE))
        sizes = mine.norm * np.linalg.norm(V, axis=0) * np.linalg.norm(U, axis=1)
        blocks.append(_kappa(run, programs, mine.site, mine.U, U, distances) * sizes)
    found = np.concatenate(blocks, axis=-1)
    largest = np.abs(found).max(axis=0)
    return [
        [
            Partner(head, other.name, int(n), tuple(found[:, head, n].tolist()))
            for n in np.argsort(-largest[head], kind="stable")[:most]
        ]
        for head in range(found.shape[1])
    ]


def contributions_on(
    run: OpenedRun, programs: HeadPrograms, inputs: Inputs, site: str, component: int, others: Sequence[int]
) -> Float[np.ndarray, "others heads T T"]:
    """What a component and some of the other site add to the scores of every query head, from position t to s, on one
    row of text (H2): 0 for s > t. Raises UserError as `partners_of`, and for inputs that are not a single row."""
    other = _partner_site(run, site)
    batch, single = run.as_batch(inputs)
    if not single:
        raise UserError(f"inputs should be a text or token ids [T], not {list(batch.shape)}")
    T = batch.shape[1]
    mine, theirs = run.component(site, component), [run.component(other.name, n) for n in others]
    if not theirs:
        return np.zeros((0, _faced(run, site)[1].n, T, T))
    kappa = _kappa(run, programs, mine.site, mine.U, np.stack([x.U for x in theirs]), T)
    found = run.activations(inputs, [mine.site, other.name])
    of_mine = np.asarray(found[mine.site], np.float64)[:, component]
    of_theirs = np.asarray(found[other.name], np.float64)[:, list(others)]
    q, k = (of_mine[:, None], of_theirs) if run.sites[mine.site].kind == "q_proj" else (of_theirs, of_mine[:, None])
    t, s = np.arange(T)[:, None], np.arange(T)[None, :]
    by_distance = kappa[np.maximum(t - s, 0)].transpose(3, 2, 0, 1)
    products = q.T[:, None, :, None] * k.T[:, None, None, :]
    return np.where(s <= t, by_distance * products, 0.0)


def _kappa(
    run: OpenedRun,
    programs: HeadPrograms,
    site: str,
    mine: Float[np.ndarray, " d_mine"],
    theirs: Float[np.ndarray, "n d_theirs"],
    distances: int,
) -> Float[np.ndarray, "distances heads n"]:
    """κ of H2 of one row of U with rows of the other site's; 0 where one of the two is 0."""
    where = run.sites[site]
    one, many = _unit(mine[None]), _unit(theirs)
    q, k = (one, many) if where.kind == "q_proj" else (many, one)
    with jax.set_mesh(run.mesh):
        found = np.asarray(programs.query_key(run.weights, where.layer, q, k, distances), np.float64)
    return found.reshape(*found.shape[:2], -1)


def _unit(rows: Float[np.ndarray, "n d"]) -> Float[np.ndarray, "n d"]:
    rows = rows.astype(np.float32)
    sizes = np.linalg.norm(rows, axis=1, keepdims=True)
    return np.divide(rows, sizes, out=np.zeros_like(rows), where=sizes > 0)


def _faced(run: OpenedRun, name: str) -> tuple[Site, Units]:
    """A site that is cut into heads, and how."""
    site = run.sites.get(name.removeprefix("model.").removesuffix(".weight"))
    if site is None:
        run.component(name, 0)  # which says what is wrong with the name
        raise AssertionError(name)
    if not is_cut_into_heads(site):
        raise UserError(
            f"{site.name} is not cut into attention heads; matrices of queries, keys, values and outputs are"
        )
    assert site.faces is not None
    return site, site.faces


def is_cut_into_heads(site: Site) -> bool:
    """Whether a side of the site's matrix is cut into attention heads (H1)."""
    return site.faces is not None and site.faces.kind == "attention_head"


def partner_site(run: OpenedRun, name: str) -> Site | None:
    """The layer's `k_proj`, of a `k_proj` its `q_proj`; None for other sites, and where it is not decomposed."""
    site, _ = _faced(run, name)
    kind = PARTNER.get(site.kind)
    return next((other for other in run.sites.values() if (other.layer, other.kind) == (site.layer, kind)), None)


def _partner_site(run: OpenedRun, name: str) -> Site:
    site, other = _faced(run, name)[0], partner_site(run, name)
    if site.kind not in PARTNER:
        raise UserError(f"{site.name} has neither queries nor keys; give a q_proj or k_proj")
    if other is None:
        raise UserError(f"the layer's {PARTNER[site.kind]} is not decomposed, so {site.name} has no partners")
    return other


def _check_attention(run: OpenedRun) -> None:
    if not (run.architecture.attention_matrices() and isinstance(run.target, Decoder)):
        raise UserError("this target has no attention heads")
