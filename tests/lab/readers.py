"""Modules of tools that read what `pd share` writes, without what these tools need themselves.

circuit-tracer and sae-dashboard are installed without their dependencies (`make` does so), torch among them, which the
`__init__` of each imports. Their modules of formats need none of them: a package is put in place without being run.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import module_from_spec, spec_from_file_location
from inspect import signature
from pathlib import Path
from types import ModuleType
from typing import Any

from pydantic import BaseModel, ConfigDict, create_model

DISTRIBUTIONS = {"circuit_tracer": "circuit-tracer", "sae_dashboard": "sae-dashboard"}
GRAPH_MODELS = "circuit_tracer.frontend.graph_models"
FEATURE_MODELS = "circuit_tracer.frontend.feature_models"
LOCAL_SERVER = "circuit_tracer.frontend.local_server"
DASHBOARD = "sae_dashboard.neuronpedia.neuronpedia_dashboard"


def installed(package: str) -> Path:
    """The folder of the package, which is looked into and not imported."""
    name = DISTRIBUTIONS[package]
    try:
        return Path(str(distribution(name).locate_file(package)))
    except PackageNotFoundError as error:
        raise RuntimeError(f"install it with `pip install --no-deps {name}`, as make does") from error


def reader_module(name: str) -> ModuleType:
    """The module of this name, loaded anew; nothing of its package stays in `sys.modules`."""
    with _not_run(name.partition(".")[0]):
        return import_module(name)


@contextmanager
def _not_run(package: str) -> Iterator[None]:
    def those() -> list[str]:
        return [name for name in sys.modules if name == package or name.startswith(f"{package}.")]

    before = {name: sys.modules.pop(name) for name in those()}
    folder = installed(package)
    spec = spec_from_file_location(package, folder / "__init__.py", submodule_search_locations=[str(folder)])
    assert spec is not None
    sys.modules[package] = module_from_spec(spec)
    try:
        yield
    finally:
        for name in those():
            del sys.modules[name]
        sys.modules.update(before)


def read_graph(value: dict[str, Any]) -> Any:
    """circuit-tracer's `Model` of a graph. Raises pydantic's error for another type or a missing field."""
    models = reader_module(GRAPH_MODELS)
    for link in value["links"]:
        models.Link.model_validate(link, strict=True)
    return models.Model.model_validate(value, strict=True)


def read_feature(value: dict[str, Any]) -> Any:
    """circuit-tracer's `Model` of a feature file. Raises also for a field that it does not have."""
    model = reader_module(FEATURE_MODELS).Model
    assert value.keys() == model.model_fields.keys()
    return model.model_validate(value, strict=True)


def read_batch(value: dict[str, Any]) -> Any:
    """SAEDashboard's batch of features. Raises for a field that it does not have, and for other types than its
    annotations say, which it does not look at itself."""
    dashboard = reader_module(DASHBOARD)
    batch = dashboard.NeuronpediaDashboardBatch(**value)
    _as_annotated(dashboard.NeuronpediaDashboardBatch, value)
    for feature in value["features"]:
        _as_annotated(dashboard.NeuronpediaDashboardFeature, feature)
        for activation in feature["activations"]:
            _as_annotated(dashboard.NeuronpediaDashboardActivation, activation)
    return batch


def _as_annotated(kind: type, value: dict[str, Any]) -> None:
    fields: dict[str, Any] = {
        name: (parameter.annotation, None)
        for name, parameter in signature(kind).parameters.items()
        if name in value
    }  # fmt: skip
    model: type[BaseModel] = create_model(kind.__name__, __config__=ConfigDict(strict=True, extra="forbid"), **fields)
    model.model_validate(value)


def dropped_by_circuit_tracer(value: dict[str, Any]) -> set[str]:
    """Ids of the nodes that its page does not draw (`attribution_graph/util-cg.js`, `formatData`): those below the
    threshold, and those that share layer, number and token with so many others that they are more than two thirds of
    the tokens."""
    metadata = value["metadata"]
    alike: dict[tuple[Any, ...], list[str]] = {}
    dropped = set()
    for node in value["nodes"]:
        alike.setdefault((node["layer"], node["feature"], node["ctx_idx"]), []).append(node["node_id"])
        kept = node["feature_type"] in ("embedding", "logit") or node["influence"] <= metadata["node_threshold"]
        if metadata["node_threshold"] and not kept and node["node_id"] not in value["qParams"]["pinnedIds"]:
            dropped.add(node["node_id"])
    most = len(metadata["prompt_tokens"]) * 2 / 3
    return dropped.union(*(ids for ids in alike.values() if len(ids) > most))


def features_in_neuronpedia(value: dict[str, Any]) -> str:
    """Where its page takes the components of a graph from (`components/provider/graph-provider.tsx`, `getGraph`): a
    source set, an address, or nowhere, which are the cases that are ours."""
    metadata = value["metadata"]
    details = metadata.get("feature_details", {})
    if metadata.get("schema_version") == 1 or details.get("neuronpedia_source_set"):
        return f"source set {details.get('neuronpedia_source_set')}"
    # Where a source set is named at all, examples of other kinds are not shown (`graphModelHasNpDashboards`).
    if details.get("feature_json_base_url") and "neuronpedia_source_set" not in details:
        return str(details["feature_json_base_url"])
    return "nowhere"


def has_layer_in_neuronpedia(value: dict[str, Any]) -> bool:
    """Whether its page opens a graph (`formatCLTGraphData`): it refuses one whose largest layer is 0, or none."""
    layers = [int(node["layer"]) for node in value["nodes"] if node["feature_type"] != "logit" and node["layer"] != "E"]
    return max(layers, default=0) > 0
