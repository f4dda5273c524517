"""Micro-batches: the parts of a batch one after the other, each with its rows of the clean pass, λ and streams."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from param_decomp_jax.ci import ImportanceReader, LazyLogits, Logits
from param_decomp_jax.clean_pass import CleanPass
from param_decomp_jax.masked import Stream
from param_decomp_jax.masks import Bundle, GivenSources, tile
from param_decomp_jax.mesh import constrain, cut


class Rows(NamedTuple):
    """The arrays with a batch axis: the first one of ``rows``, the second one of ``layered`` (behind the layers)."""

    rows: Any
    layered: Any


def sum_over_parts(
    function: Callable[[CleanPass, ImportanceReader, Sequence[Stream]], Any],
    clean_pass: CleanPass,
    reader: ImportanceReader,
    streams: Sequence[Stream],
    n: int,
) -> Any:
    """The sum of ``function`` over ``n`` equal parts of the batch; only one part's intermediates exist at a time.

    A part has the rows of every device's own share, so nothing moves. Gradients of what the parts share add up.
    """
    whole = _rows(clean_pass, reader, streams)
    parts = Rows(
        jax.tree.map(lambda x: cut(x, 0, n, "batch"), whole.rows),
        jax.tree.map(lambda x: cut(x, 1, n, "batch"), whole.layered),
    )

    @jax.checkpoint
    def part_result(part: Rows) -> Any:
        own = Rows(
            jax.tree.map(lambda x: constrain(x, "batch"), part.rows),
            jax.tree.map(lambda x: constrain(x, None, "batch"), part.layered),
        )
        return function(*_with_rows(clean_pass, reader, streams, own))

    shapes = jax.eval_shape(part_result, jax.tree.map(lambda x: x[0], parts))
    start = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    total, _ = lax.scan(lambda total, part: (jax.tree.map(jnp.add, total, part_result(part)), None), start, parts)
    return total


def _rows(clean_pass: CleanPass, reader: ImportanceReader, streams: Sequence[Stream]) -> Rows:
    outputs = reader.outputs
    return Rows(
        rows=(
            clean_pass.inputs,
            clean_pass.forward.output,
            clean_pass.at,
            outputs.features if isinstance(outputs, LazyLogits) else None,
            [stream.routes for stream in streams],
        ),
        layered=(
            dict(clean_pass.forward.records),
            clean_pass.site_inputs,
            outputs.by_stack if isinstance(outputs, Logits) else None,
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
    clean_pass: CleanPass, reader: ImportanceReader, streams: Sequence[Stream], part: Rows
) -> tuple[CleanPass, ImportanceReader, Sequence[Stream]]:
    inputs, output, at, features, routes = part.rows
    records, site_inputs, logits, bundles = part.layered
    batch = at.shape[0]
    forward = clean_pass.forward._replace(output=output, records=records)
    clean_pass = replace(clean_pass, inputs=inputs, forward=forward, at=at, site_inputs=site_inputs, batch=batch)
    ci_outputs = Logits(logits) if isinstance(reader.outputs, Logits) else LazyLogits(features, reader.outputs.heads)

    def stream_part(stream: Stream, routes: Array | None, bundle: Bundle | None) -> Stream:
        sources = stream.sources
        if isinstance(sources, GivenSources):
            sources = GivenSources(sources.bundle if bundle is None else bundle, batch)
        return Stream(stream.live, sources, routes)

    now = [stream_part(*own) for own in zip(streams, routes, bundles, strict=True)]
    return clean_pass, replace(reader, outputs=ci_outputs, site_inputs=site_inputs), now
