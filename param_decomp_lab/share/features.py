"""Feature files: what a page of graphs shows of a component, as circuit-tracer's and Neuronpedia's read them."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from param_decomp_lab.harvest.files.tables import IMPORTANCE_BINS
from param_decomp_lab.share.shared_run import SharedRun, rounded

EXAMPLES = {"top": "Where it matters most (largest λ · |a|)", "uniform": "Uniform sample of its firings"}
"""Names of the lists of examples, by the harvest's kind."""
PERCENTILES = 100


def feature_file(run: SharedRun, site: str, component: int, index: int, scan: str) -> dict[str, Any]:
    """The file of a component, as JSON values. ``index``: its number among the feature files of ``scan``. All values
    are λ. Raises UserError if the harvest does not have it."""
    row, weights = run.harvest.component(site, component), run.harvest.weights(site, component)
    examples = run.harvest.examples(site, component)
    lists: list[dict[str, Any]] = []
    for kind, name in EXAMPLES.items():
        shown = [run.shown(example) for example in examples if example.kind == kind]
        lists.append(
            {
                "quantile_name": name,
                "examples": [
                    {
                        "tokens": one.tokens, "tokens_acts_list": one.values, "train_token_ind": one.at,
                        "is_repeated_datapoint": False,
                    }
                    for one in shown
                ],
            }
        )  # fmt: skip
    histogram = filled(row["importance_histogram"])
    shown_most = max((value for one in lists for e in one["examples"] for value in e["tokens_acts_list"]), default=0.0)
    return {
        "transcoder_id": scan,
        "index": index,
        "examples_quantiles": lists,
        "top_logits": run.harvest.names(weights["promoted"]),
        "bottom_logits": run.harvest.names(weights["suppressed"]),
        # The range of the histogram and of the colours. λ of examples is rounded to 255ths.
        "act_min": 0.0,
        "act_max": rounded(max(len(histogram) / IMPORTANCE_BINS, shown_most)),
        "quantile_values": percentiles(histogram),
        "histogram": histogram,
        "activation_frequency": rounded(row["density"]),
    }


def filled(histogram: Sequence[int]) -> list[int]:
    """Counts of λ up to the last bin that has one; at least the first bin."""
    ends = np.flatnonzero(np.asarray(histogram))
    return [int(count) for count in histogram[: max(1, ends.max(initial=0) + 1)]]


def percentiles(histogram: Sequence[int]) -> list[float]:
    """The 1st to the 100th percentile of λ where a component fires, taken as uniform within each bin. All 0 where it
    fires nowhere."""
    running = np.concatenate([[0], np.cumsum(histogram)])
    if running[-1] == 0:
        return [0.0] * PERCENTILES
    edges = np.arange(len(running)) / IMPORTANCE_BINS
    counts = running[-1] * np.arange(1, PERCENTILES + 1) / PERCENTILES
    # Where a count is reached, and not where empty bins behind it end.
    reached = np.searchsorted(running, counts, side="left")
    below = running[reached - 1]
    inside = (counts - below) / (running[reached] - below)
    return [rounded(value) for value in (edges[reached - 1] + inside / IMPORTANCE_BINS).tolist()]
