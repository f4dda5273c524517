"""Summarizes the resolved ``config.yaml`` in a few readable lines. Any key may be missing, since old runs have old
keys.
"""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from math import inf, isfinite
from typing import Any

from pydantic import TypeAdapter, ValidationError

from param_decomp_lab.config.loss_parts import Scheduled, ScheduleLike, bounds
from param_decomp_lab.schema.site_names import matches_module
from param_decomp_lab.schema.strict import Positive
from param_decomp_lab.ui.numbers import exact, number

PER_POSITION = "a mask for each position"
SCOPES = {
    "shared_across_batch": "one mask for the batch",
    "per_row": "a mask for each row",
    "unique_per_datapoint": PER_POSITION,
}
"""By `mask_scope`, what a fresh attack finds a mask for: where λ is the same, the mask is too."""

_PNORM: TypeAdapter[ScheduleLike] = TypeAdapter(Scheduled[Positive])


@dataclass(frozen=True)
class LossTerm:
    """A loss term as configured: the name it is logged under, its coefficient, everything else in one line."""

    name: str
    kind: str
    coeff: float | None
    details: str


def method_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The torch-schema document within the resolved configuration (or the whole, if it is one itself)."""
    inner = config.get("torch")
    return inner if isinstance(inner, Mapping) else config


def loss_terms(config: Mapping[str, Any]) -> list[LossTerm]:
    """The terms of the loss, under the names they are logged with: ``name``, else the class, else ``<class>_2``."""
    terms: list[LossTerm] = []
    for entry in _list(config, "pd", "loss_metrics"):
        kind = str(entry.get("type", "?"))
        name = str(entry.get("name") or kind)
        taken = {term.name for term in terms}
        suffix = 2
        unique = name
        while unique in taken:
            unique, suffix = f"{name}_{suffix}", suffix + 1
        rest = {
            key: value for key, value in entry.items() if key not in {"type", "coeff", "name"} and value is not None
        }
        coeff = entry.get("coeff")
        if not _is_number(coeff):
            rest |= {"coeff": coeff} if coeff is not None else {}
            coeff = None
        terms.append(LossTerm(unique, kind, float(coeff) if coeff is not None else None, one_line(rest)))
    return terms


def attack_steps(config: Mapping[str, Any], name: str) -> int | None:
    """Returns the ascent steps of the evaluation's fresh attack that is logged as ``name``."""
    steps = _attack(config, name).get("n_steps")
    return steps if isinstance(steps, int) else None


def attack_scope(config: Mapping[str, Any], name: str) -> str:
    """Returns what the evaluation's fresh attack that is logged as ``name`` finds masks for; "" if nobody says."""
    return SCOPES.get(str(_attack(config, name).get("mask_scope")), "")


def attack_name(config: Mapping[str, Any], name: str) -> str:
    """Returns what the fresh attack logged as ``name`` is called: `attack, one mask for the batch`."""
    own = "" if name == "PGDReconLoss" else f" ({name})"
    scope = attack_scope(config, name)
    return f"attack{own}, {scope}" if scope else f"attack{own}"


def _attack(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Counts entries without a name as `config.checks.term_names` does, since several may have one class."""
    unnamed: dict[str, int] = {}
    for entry in _list(config, "eval", "metrics"):
        logged = entry.get("name")
        if logged is None:
            kind = str(entry.get("type"))
            count = unnamed[kind] = unnamed.get(kind, 0) + 1
            logged = kind if count == 1 else f"{kind}_{count}"
        if logged == name and "n_steps" in entry:
            return entry
    return {}


def least_p(config: Mapping[str, Any]) -> float:
    """`ImportanceMinimalityLoss.least_p` of a configuration that may be an old one; infinity without such a term."""
    given: list[Any] = []
    for entry in _list(config, "pd", "loss_metrics"):
        if entry.get("type") == "ImportanceMinimalityLoss" and entry.get("penalty", "lp") == "lp":
            with suppress(ValidationError):
                given.append(bounds(_PNORM.validate_python(entry.get("pnorm")))[0])
            if entry.get("p_anneal_start_frac", 1) != 1:
                given.append(entry.get("p_anneal_final_p"))
    return min((float(p) for p in given if _is_number(p)), default=inf)


def component_counts(config: Mapping[str, Any], names: Iterable[str]) -> dict[str, int]:
    """Returns C for those ``names`` that one of the configured patterns matches, with or without ``model.``."""
    counts: dict[str, int] = {}
    patterns = _list(config, "pd", "decomposition_targets")
    identities = _list(config, "pd", "identity_decomposition_targets")
    for name in names:
        module, _, suffix = name.partition(".pre_identity")
        is_identity = name.endswith(".pre_identity") and not suffix
        for entry in identities if is_identity else patterns:
            pattern = str(entry.get("module_pattern", ""))
            if matches_module(pattern, module.removeprefix("model.")) and _is_number(entry.get("C")):
                counts[name] = int(entry["C"])
                break
    return counts


def overview(config: Mapping[str, Any], n_sites: int, last_step: int | None) -> list[tuple[str, str]]:
    """Returns labels and values of what people want to know first: model, sites, sizes, optimisers, layout."""
    patterns = _list(config, "pd", "decomposition_targets")
    sites = ", ".join(f"{entry.get('module_pattern')} (C = {_count(entry.get('C'))})" for entry in patterns)
    mode = get(config, "pd", "ci_config", "fn_type")
    transformer = get(config, "pd", "ci_config", "simple_transformer_ci_cfg")
    hidden = get(config, "pd", "ci_config", "hidden_dims")
    tap = get(config, "pd", "ci_config", "input_tap")
    readout = "component readout" if get(config, "pd", "ci_config", "component_readout") else ""
    reads = f"reads {one_line(tap)}" if tap else ""
    parts = (mode, one_line(transformer or {}), f"hidden {hidden}" if hidden else "", reads, readout)
    ci = " ".join(str(part) for part in parts if part)
    steps = get(config, "pd", "steps")
    reached = _count(steps) + (f" (last logged step {last_step:,})" if last_step is not None else "")
    evaluation = method_part(config).get("eval")
    rows: list[tuple[str, Any]] = [
        ("Model", _model(config)),
        ("Data", _data(config)),
        ("Sites", (f"{n_sites}: " if n_sites else "") + sites if sites else None),
        ("CI function", ci or None),
        ("Squashing", get(config, "pd", "sigmoid_type")),
        ("Delta component", get(config, "pd", "use_delta_component")),
        ("Sampling", get(config, "pd", "sampling")),
        ("Steps", reached if steps is not None else None),
        ("Batch", get(config, "pd", "batch_size")),
        ("Seed", get(config, "pd", "seed")),
        ("Components' optimiser", get(config, "pd", "components_optimizer")),
        ("CI function's optimiser", get(config, "pd", "ci_fn_optimizer")),
        ("Faithfulness warm-up", get(config, "pd", "faithfulness_warmup_steps")),
        (
            "Evaluation",
            {k: v for k, v in evaluation.items() if k != "metrics"} if isinstance(evaluation, Mapping) else None,
        ),
        ("Mesh", config.get("mesh")),
        ("Memory", config.get("memory")),
        ("Numbers", get(config, "runtime")),
    ]
    return [(label, one_line(value)) for label, value in rows if value not in (None, "", {}, [])]


def get(config: Mapping[str, Any], *path: str) -> Any:
    """The value at ``path`` in the torch-schema part, None if any key on the way is missing."""
    value: Any = method_part(config)
    for key in path:
        if not isinstance(value, Mapping):
            return None
        value = value.get(key)
    return value


def one_line(value: Any) -> str:
    """A configuration value on one line: ``key value`` pairs with commas, nested ones in brackets, nulls left out."""
    match value:
        case bool():
            return "yes" if value else "no"
        case Mapping():
            pairs = [(key, item) for key, item in value.items() if item is not None and item != {} and item != []]
            return ", ".join(
                f"{key} ({one_line(item)})" if isinstance(item, Mapping) else f"{key} {one_line(item)}"
                for key, item in pairs
            )
        case list() | tuple():
            return ", ".join(f"({one_line(item)})" if isinstance(item, Mapping) else one_line(item) for item in value)
        case int() | float():
            return exact(value)
        case _:
            return str(value)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)


def _count(value: Any) -> str:
    """Formats a number, or whatever else is in its place."""
    return number(value) if value is None or _is_number(value) else one_line(value)


def _model(config: Mapping[str, Any]) -> Any:
    wrapper = config.get("target")
    if isinstance(wrapper, Mapping) and (wrapper.get("folder") or wrapper.get("pretrain")):
        recipe = wrapper.get("pretrain")
        return wrapper.get("folder") or (recipe.get("out") if isinstance(recipe, Mapping) else recipe)
    for path in (("spec", "model_name"), ("spec", "run_path"), ("run_path",)):
        found = get(config, "target", *path)
        if found:
            return found
    return config.get("experiment")


def _data(config: Mapping[str, Any]) -> Any:
    wrapper = config.get("data")
    if isinstance(wrapper, Mapping) and wrapper:
        return wrapper
    data = get(config, "data")
    if isinstance(data, Mapping):
        wanted = (
            "dataset_name",
            "data_files",
            "tokenizer_name",
            "max_seq_len",
            "feature_probability",
            "data_generation_type",
        )
        return {key: data[key] for key in wanted if key in data}
    return None


def _list(config: Mapping[str, Any], *path: str) -> list[Mapping[str, Any]]:
    value = get(config, *path)
    return [entry for entry in value if isinstance(entry, Mapping)] if isinstance(value, list) else []
