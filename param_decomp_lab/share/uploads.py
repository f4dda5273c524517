"""Components as Neuronpedia's API takes them (`/api/feature/upload-batch`), as its Python client sends them."""

from collections.abc import Mapping, Sequence
from typing import Any

from param_decomp_lab.harvest.files.labels import Label
from param_decomp_lab.share.firings import shown_firings
from param_decomp_lab.share.shared_run import SharedRun, rounded

MOST_FEATURES = 128
"""Features in one request."""
MOST_LOGITS = 20
"""Tokens in each of the lists of raised and of lowered ones."""


def upload_batch(
    run: SharedRun, site: str, numbers: Sequence[int], edits: Mapping[int, Label], model: str, source: str
) -> dict[str, Any]:
    """The body of a request for components of a site, as JSON values."""
    features = [_feature(run, site, number, edits.get(number)) for number in numbers]
    return {"modelId": model, "source": source, "features": features}


def _feature(run: SharedRun, site: str, number: int, edit: Label | None) -> dict[str, Any]:
    weights = run.harvest.weights(site, number)
    # Methods and models of explanations are those that Neuronpedia knows; ours are not among them.
    labels = [{"text": edit.text, "methodName": None, "modelName": None}] if edit is not None and edit.text else []
    return {
        "index": number,
        "density": rounded(run.harvest.component(site, number)["density"]),
        "topLogits": _logits(run, weights["promoted"], weights["promoted_logits"]),
        "bottomLogits": _logits(run, weights["suppressed"], weights["suppressed_logits"]),
        "explanations": labels,
        "activations": [
            {
                "tokens": firing.shown.tokens,
                "values": firing.shown.values,
                "quantileMin": firing.low,
                "quantileMax": firing.high,
                "quantileFraction": firing.share,
            }
            for firing in shown_firings(run, site, number)
        ],
    }


def _logits(run: SharedRun, tokens: Sequence[int], values: Sequence[float]) -> list[dict[str, Any]]:
    pairs = zip(run.harvest.names(tokens), values, strict=True)
    return [{"token": token, "value": rounded(value)} for token, value in list(pairs)[:MOST_LOGITS]]
