"""Feature files: what the page of a graph shows of a component, as Anthropic's and circuit-tracer's pages read it."""

from typing import Any

from param_decomp_lab.share.shared_run import SharedRun, rounded

QUANTILES = {"top": "Where it matters most (largest λ)", "uniform": "Uniform sample of its firings"}
"""Names of the groups of examples, by the harvest's kind."""


def feature_file(run: SharedRun, site: str, component: int, index: int) -> dict[str, Any]:
    """The file of a component, as JSON values. ``index``: its number among the feature files. Token values are λ.
    Raises UserError if the harvest does not have it."""
    examples = run.harvest.examples(site, component)
    weights = run.harvest.weights(site, component)
    quantiles = []
    values = [0.0]
    for kind, name in QUANTILES.items():
        shown = [run.shown(example) for example in examples if example.kind == kind]
        values += [value for one in shown for value in one.values]
        quantiles.append(
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
    return {
        "index": index,
        "examples_quantiles": quantiles,
        "top_logits": run.words(weights["promoted"]),
        "bottom_logits": run.words(weights["suppressed"]),
        "act_min": rounded(min(values)),
        "act_max": rounded(max(values)),
    }
