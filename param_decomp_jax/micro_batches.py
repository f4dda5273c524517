"""A batch in parts, one after the other: what of a scene, a judgement and streams has rows, and what they all share."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from param_decomp_jax.ci import Judge, Lazy, Logits
from param_decomp_jax.masked import Stream
from param_decomp_jax.masks import Bundle, GivenSources, tile
from param_decomp_jax.mesh import constrain, cut
from param_decomp_jax.scene import Scene


class Rows(NamedTuple):
    """The arrays with a batch axis: the first one of ``rows``, the second one of ``layered`` (behind the layers)."""

    rows: Any
    layered: Any


def sum_over_parts(
    of: Callable[[Scene, Judge, Sequence[Stream]], Any], scene: Scene, judge: Judge, streams: Sequence[Stream], n: int
) -> Any:
    """The sum of ``of`` over ``n`` equal parts of the batch; only one part's intermediates exist at a time.

    A part has the rows of every device's own share, so nothing moves. Gradients of what the parts share add up.
    """
    whole = _rows(scene, judge, streams)
    parts = Rows(
        jax.tree.map(lambda x: cut(x, 0, n, "batch"), whole.rows),
        jax.tree.map(lambda x: cut(x, 1, n, "batch"), whole.layered),
    )

    @jax.checkpoint
    def of_part(part: Rows) -> Any:
        own = Rows(
            jax.tree.map(lambda x: constrain(x, "batch"), part.rows),
            jax.tree.map(lambda x: constrain(x, None, "batch"), part.layered),
        )
        return of(*_with_rows(scene, judge, streams, own))

    shapes = jax.eval_shape(of_part, jax.tree.map(lambda x: x[0], parts))
    start = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    total, _ = lax.scan(lambda total, part: (jax.tree.map(jnp.add, total, of_part(part)), None), start, parts)
    return total


def _rows(scene: Scene, judge: Judge, streams: Sequence[Stream]) -> Rows:
    judgement = judge.judgement
    return Rows(
        rows=(
            scene.inputs,
            scene.clean.output,
            scene.at,
            judgement.features if isinstance(judgement, Lazy) else None,
            [stream.routes for stream in streams],
        ),
        layered=(
            dict(scene.clean.records),
            scene.site_inputs,
            judgement.by_stack if isinstance(judgement, Logits) else None,
            [_bundle_by_row(stream) for stream in streams],
        ),
    )


def _bundle_by_row(stream: Stream) -> Bundle | None:
    """Given sources with a row for every batch row; None where all rows share one, or none is given."""
    sources = stream.sources
    if not isinstance(sources, GivenSources):
        return None
    if all(x.shape[1] == 1 for x in jax.tree.leaves(sources.bundle)):
        return None
    return jax.tree.map(lambda x: jax.vmap(lambda row: tile(row, sources.batch))(x), sources.bundle)


def _with_rows(
    scene: Scene, judge: Judge, streams: Sequence[Stream], part: Rows
) -> tuple[Scene, Judge, Sequence[Stream]]:
    inputs, output, at, features, routes = part.rows
    records, site_inputs, logits, bundles = part.layered
    batch = at.shape[0]
    clean = scene.clean._replace(output=output, records=records)
    scene = replace(scene, inputs=inputs, clean=clean, at=at, site_inputs=site_inputs, batch=batch)
    judgement = Logits(logits) if isinstance(judge.judgement, Logits) else Lazy(features, judge.judgement.heads)

    def of_stream(stream: Stream, routes: Array | None, bundle: Bundle | None) -> Stream:
        sources = stream.sources
        if isinstance(sources, GivenSources):
            sources = GivenSources(sources.bundle if bundle is None else bundle, batch)
        return Stream(stream.live, sources, routes)

    now = [of_stream(*of) for of in zip(streams, routes, bundles, strict=True)]
    return scene, replace(judge, judgement=judgement, inputs=site_inputs), now
