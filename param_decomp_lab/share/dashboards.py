"""Components as SAEDashboard writes features for Neuronpedia, in batches of `NeuronpediaDashboardBatch`.

A batch has no place for explanations: they are in a file of their own, with the columns of Neuronpedia's table.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from param_decomp_lab.harvest.files.labels import BY_MODEL, Label
from param_decomp_lab.harvest.files.tables import IMPORTANCE_BINS
from param_decomp_lab.share.firings import shown_firings
from param_decomp_lab.share.shared_run import SharedRun, rounded

EMPTY_LISTS = (
    *("neuron_alignment_indices", "neuron_alignment_values", "neuron_alignment_l1"),
    *("correlated_neurons_indices", "correlated_neurons_l1", "correlated_neurons_pearson"),
    *("correlated_features_indices", "correlated_features_l1", "correlated_features_pearson"),
    *("logits_hist_data_bar_heights", "logits_hist_data_bar_values", "decoder_weights_dist", "vector"),
)
"""Fields of a feature that no harvest knows."""
EDGES = [n / IMPORTANCE_BINS for n in range(IMPORTANCE_BINS + 1)]
CENTRES = [rounded((low + high) / 2) for low, high in pairwise(EDGES)]


def dashboard_batch(
    run: SharedRun, site: str, layer: int, numbers: Sequence[int], model: str, source_set: str
) -> dict[str, Any]:
    """A batch of components of a site, as JSON values."""
    return {
        "model_id": model,
        "layer": layer,
        "sae_set": source_set,
        "sae_id_suffix": None,
        "features": [_feature(run, site, number) for number in numbers],
    }


def explanation(number: int, edit: Label) -> dict[str, Any]:
    """A label. ``authorName`` is ours, as Neuronpedia knows its own users only."""
    by_model = edit.author.endswith(BY_MODEL)
    return {
        "index": number,
        "description": edit.text,
        "authorName": edit.author,
        "typeName": None,
        "explanationModelName": edit.author.removesuffix(BY_MODEL) if by_model else None,
        "createdAt": edit.time,
    }


def _feature(run: SharedRun, site: str, number: int) -> dict[str, Any]:
    plan = run.harvest.plan
    row, weights = run.harvest.component(site, number), run.harvest.weights(site, number)
    return {
        "feature_index": number,
        "frac_nonzero": rounded(row["density"]),
        "pos_str": run.harvest.names(weights["promoted"]),
        "pos_values": [rounded(value) for value in weights["promoted_logits"]],
        "neg_str": run.harvest.names(weights["suppressed"]),
        "neg_values": [rounded(value) for value in weights["suppressed_logits"]],
        "freq_hist_data_bar_values": CENTRES,
        "freq_hist_data_bar_heights": list(row["importance_histogram"]),
        **{name: [] for name in EMPTY_LISTS},
        "n_prompts_total": plan.rows,
        "n_tokens_in_prompt": plan.length,
        "dataset": Path(plan.data).name,  # without the folders of this machine
        "activations": list(_activations(run, site, number)),
    }


def _activations(run: SharedRun, site: str, number: int) -> Iterator[dict[str, Any]]:
    for firing in shown_firings(run, site, number):
        yield {
            "bin_min": firing.low,
            "bin_max": firing.high,
            "bin_contains": firing.share,
            "tokens": firing.shown.tokens,
            "values": firing.shown.values,
            "qualifying_token_index": firing.shown.at,
        }
