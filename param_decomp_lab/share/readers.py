"""The pages that graphs are written for, and what each of them needs of a graph's metadata.

What they do with the fields was read in circuit-tracer 0.5.0 (`frontend/assets`) and in Neuronpedia's web application
(`components/provider/graph-provider.tsx`, `app/[modelId]/graph/utils.ts`); docs/sharing.md says it in words.
"""

import re
from dataclasses import dataclass
from typing import Any

from param_decomp_lab.errors import UserError
from param_decomp_lab.graph import Graph

OTHER_FEATURES = (
    *("gemma-2-2b", "gemma-3-4b-it", "gemma-3-27b-it", "qwen3-1.7b", "qwen3-4b"),
    "jackl-circuits-runs-1-4-sofa-v3_0",
)
"""Models of which Neuronpedia's page shows features from a place of its own, unless a graph names a source set."""
OTHER_FEATURES_WITHOUT_ADDRESS = ("gpt2-small",)
"""The same, unless a graph names an address of feature files."""
SOURCE_SET = re.compile("[A-Za-z0-9]+(-[A-Za-z0-9]+)*")


@dataclass(frozen=True)
class CircuitTracer:
    """circuit-tracer's own page, whose data folder is the one that is made."""


@dataclass(frozen=True)
class Neuronpedia:
    """``model``: the id of a model there. Examples of a component come from ``features_url``, the address of the hosted
    folder `features`, or from ``source_set``, whose sources have been uploaded; both may be empty. Raises UserError for
    what the page would show wrongly."""

    model: str
    features_url: str = ""
    source_set: str = ""

    def __post_init__(self) -> None:
        refuse_model(self.model)
        if self.source_set:
            refuse_source_set(self.source_set)
        if self.source_set and self.features_url:
            raise UserError(
                "--features-url and --source-set: Neuronpedia's page reads no feature file of a graph that names a "
                "source set; give one of the two"
            )
        if self.source_set:
            return
        elsewhere = "its page would show features of another decomposition; give --source-set"
        if self.model in OTHER_FEATURES:
            raise UserError(f"--model {self.model}: Neuronpedia has features of this model, and {elsewhere}")
        if self.model in OTHER_FEATURES_WITHOUT_ADDRESS and not self.features_url:
            raise UserError(
                f"--model {self.model}: Neuronpedia knows features of this model, and {elsewhere} or --features-url"
            )


Reader = CircuitTracer | Neuronpedia


def refuse_model(model: str) -> None:
    """Raises UserError for what cannot be the id of a model."""
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]*", model):
        raise UserError(f"--model {model}: use letters, digits, dots, hyphens and underscores")


def refuse_source_set(name: str) -> None:
    """Raises UserError for a name that Neuronpedia refuses: it takes no underscores."""
    if not SOURCE_SET.fullmatch(name):
        raise UserError(f"--source-set {name}: Neuronpedia takes letters and digits, and hyphens between them")


def reader_metadata(reader: Reader, features: str) -> dict[str, Any]:
    """The fields of a graph's metadata by which its page finds feature files. ``features``: their folder's name."""
    match reader:
        case CircuitTracer():
            # Plain JSON is read only where `scan` begins with `./`; the page's server has the folder under `/data/`.
            return {"scan": f"./data/features/{features}", "transcoder_list": [], "schema_version": 1}
        case Neuronpedia(model, features_url, source_set):
            # A version of 1, or the name of a source set, comes before the address of feature files.
            if source_set:
                found = {"schema_version": 1, "feature_details": {"neuronpedia_source_set": source_set}}
            elif features_url:
                url = f"{features_url.rstrip('/')}/{features}"
                found = {"feature_details": {"feature_json_base_url": url}}
            else:
                found = {}
            return {"scan": model, "transcoder_list": [], **found}


def refuse_unshown(graph: Graph, slug: str, reader: Reader) -> None:
    """Raises UserError for a graph that the page cannot draw."""
    if not graph.outputs:
        raise UserError(f"graph {slug} has no outputs, which a page of graphs begins with; make it again")
    inside = any(node.kind in ("component", "rest") for node in graph.nodes)
    if isinstance(reader, Neuronpedia) and not inside:
        raise UserError(
            f"graph {slug} has neither components nor residual errors, and Neuronpedia's page opens no graph without a "
            "layer; make it again with a larger share of influence, `pd graph --nodes`"
        )
