"""From a prompt as a person gives it to its attribution graph."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from param_decomp_lab.errors import UserError
from param_decomp_lab.graph.build import GraphRequest, Prompt, build_graph, find_outputs
from param_decomp_lab.graph.graph import Graph, Optimized
from param_decomp_lab.graph.incoming import Incoming
from param_decomp_lab.graph.optimize import OptimizeRequest, optimize
from param_decomp_lab.runs.prompt import read_output, read_prompt


class GraphProgress(Protocol):
    """Told how far a graph is."""

    def followed(self, components: int, left: float) -> None:
        """Components followed, and the share of influence that ends in others."""

    def optimized(self, steps: int, of: int, firing: int) -> None:
        """Steps of the optimisation done, how many there are, components that fire in the best importances so far."""


def graph_of_prompt(
    run: Any,
    prompt: Any,
    target: str | int | Sequence[str | int] | None,
    optimize_with: Mapping[str, Any] | bool,
    progress: GraphProgress | None,
    options: Mapping[str, Any],
) -> Graph:
    """`Run.graph`."""
    values, ids = read_prompt(run, prompt) if isinstance(prompt, str) else (np.asarray(prompt), None)
    if values.ndim != 1:
        raise UserError(f"a graph takes one row of inputs, not {list(values.shape)}")
    of_text = run.is_language_model
    if ids is None:
        ids = values.tolist() if of_text else np.flatnonzero(values).tolist()
    wanted = None
    if target is not None:
        chosen = [target] if isinstance(target, str | int) else list(target)
        wanted = tuple(read_output(run, t) if isinstance(t, str) else int(t) for t in chosen)
    request = GraphRequest(outputs=wanted, **options)
    how = None
    if optimize_with is not False:
        how = OptimizeRequest(**(optimize_with if isinstance(optimize_with, Mapping) else {}))
    if of_text:
        names = tuple(run.names(ids))
        text = "".join(names) if run.text is None else run.text.text(ids)
    else:
        names = (" ".join(f"{i}={values[i]:g}" for i in ids) or "nothing",)
        text, ids = names[0], []
    if isinstance(prompt, str):
        text = prompt
    about = Prompt(run.id, run.step, text, names, tuple(map(int, ids)), lambda i: run.names([i])[0])

    batch, _ = run.as_batch(values)
    incoming = Incoming(run, batch, request.threshold)
    outputs = find_outputs(incoming, request, of_text)
    optimized: Optimized | None = None
    if how is not None:
        result = optimize(
            run, batch, incoming.importances, outputs.row if of_text else None, tuple(outputs.numbers.tolist()),
            request.threshold, how, None if progress is None else progress.optimized,
        )  # fmt: skip
        optimized = result.found
        incoming = Incoming(run, batch, request.threshold, result.importances)
    return build_graph(incoming, about, request, outputs, optimized, None if progress is None else progress.followed)
