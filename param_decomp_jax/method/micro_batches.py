"""Micro-batches: parts of a batch that run in sequence, each with its rows of the clean pass, λ and streams."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from param_decomp_jax.ci import ImportanceReader, LazyLogits, Logits, StackFeatures
from param_decomp_jax.method.clean_pass import CleanPass
from param_decomp_jax.method.masked import Stream
from param_decomp_jax.method.masks import Bundle, GivenSources, given_parts, tile, with_given_parts
from param_decomp_jax.sharding.mesh import constrain, split_blocks


class BatchArrays(NamedTuple):
    """The arrays whose first axis is the batch. ``routes``: by stream."""

    inputs: Any
    output: Any
    reference: Any
    at: Any
    features: Any
    routes: list[Array | None]


class LayeredRows(NamedTuple):
    """The arrays whose second axis is the batch, after the layers. ``features``: `StackFeatures`, None for others.
    ``bundles``: the given sources of each stream."""

    records: Any
    points: Any
    head_inputs: Any
    logits: Any
    features: Any
    bundles: list[list[Bundle | None]]


BatchRows = tuple[BatchArrays, LayeredRows]
"""All arrays of a batch that have a batch axis; None for what has no rows of its own."""


def sum_over_parts(
    function: Callable[[CleanPass, ImportanceReader, Sequence[Stream]], Any],
    clean_pass: CleanPass,
    reader: ImportanceReader,
    streams: Sequence[Stream],
    n: int,
) -> Any:
    """Returns the sum of ``function`` over ``n`` equal parts of the batch. Only one part's intermediates exist at a
    time.

    A part takes some rows of every device's own share, so no data moves. Gradients of what the parts share add up.
    """
    rows, layered = _batch_rows(clean_pass, reader, streams)
    parts = (
        jax.tree.map(lambda x: split_blocks(x, 0, n, "batch"), rows),
        jax.tree.map(lambda x: split_blocks(x, 1, n, "batch"), layered),
    )

    @jax.checkpoint
    def part_result(part: BatchRows) -> Any:
        rows, layered = part
        own = (
            jax.tree.map(lambda x: constrain(x, "batch"), rows),
            jax.tree.map(lambda x: constrain(x, None, "batch"), layered),
        )
        return function(*_with_rows(clean_pass, reader, streams, own))

    shapes = jax.eval_shape(part_result, jax.tree.map(lambda x: x[0], parts))
    start = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    total, _ = lax.scan(lambda total, part: (jax.tree.map(jnp.add, total, part_result(part)), None), start, parts)
    return total


def _batch_rows(clean_pass: CleanPass, reader: ImportanceReader, streams: Sequence[Stream]) -> BatchRows:
    outputs = reader.outputs
    features = outputs.features if isinstance(outputs, LazyLogits) else None
    by_stack = isinstance(features, StackFeatures)
    rows = BatchArrays(
        inputs=clean_pass.inputs,
        output=clean_pass.forward.output,
        reference=clean_pass.reference,
        at=clean_pass.at,
        features=None if by_stack else features,
        routes=[stream.routes for stream in streams],
    )
    layered = LayeredRows(
        records=dict(clean_pass.forward.records),
        points=clean_pass.points,
        head_inputs=reader.head_inputs,
        logits=outputs.by_stack if isinstance(outputs, Logits) else None,
        features=features if by_stack else None,
        bundles=[[_bundle_by_row(own, reader) for own in given_parts(stream.sources)] for stream in streams],
    )
    return rows, layered


def _bundle_by_row(sources: GivenSources, reader: ImportanceReader) -> Bundle | None:
    """Returns given sources with a row for every batch row; None if all rows share one. The rows are the second axis of
    experts' sources, too, followed by that of experts."""
    bundle = _experts_behind_rows(sources.bundle, reader, 1, 2)
    if all(x.shape[1] == 1 for x in jax.tree.leaves(bundle)):
        return None
    return jax.tree.map(lambda x: jax.vmap(lambda row: tile(row, sources.batch))(x), bundle)


def _experts_behind_rows(bundle: Bundle, reader: ImportanceReader, source: int, destination: int) -> Bundle:
    return {
        name: jax.tree.map(lambda x: jnp.moveaxis(x, source, destination), own) if name in reader.chosen else own
        for name, own in bundle.items()
    }


def _with_rows(
    clean_pass: CleanPass, reader: ImportanceReader, streams: Sequence[Stream], part: BatchRows
) -> tuple[CleanPass, ImportanceReader, Sequence[Stream]]:
    """Returns clean pass, reader and streams with the rows of a part in place of the whole batch's. The clean pass then
    lacks the inputs of sites, because the CI function has already run."""
    rows, layered = part
    batch = rows.at.shape[0]
    forward = clean_pass.forward._replace(output=rows.output, records=layered.records)
    own: dict[str, Any] = {"inputs": rows.inputs, "reference": rows.reference, "at": rows.at, "batch": batch}
    clean_pass = replace(clean_pass, forward=forward, site_inputs={}, points=layered.points, **own)
    outputs = reader.outputs
    features = rows.features if layered.features is None else layered.features
    logits = Logits(layered.logits) if isinstance(outputs, Logits) else LazyLogits(features, outputs.heads)

    def stream_part(stream: Stream, routes: Array | None, bundles: list[Bundle | None]) -> Stream:
        parts = [
            GivenSources(given.bundle if own is None else _experts_behind_rows(own, reader, 2, 1), batch)
            for given, own in zip(given_parts(stream.sources), bundles, strict=True)
        ]
        return Stream(stream.live, with_given_parts(stream.sources, parts), routes, stream.points)

    new = [stream_part(*each) for each in zip(streams, rows.routes, layered.bundles, strict=True)]
    return clean_pass, replace(reader, outputs=logits, head_inputs=layered.head_inputs, chosen=clean_pass.chosen), new
