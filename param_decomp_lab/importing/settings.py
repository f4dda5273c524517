"""Translates the configuration of a run of the PyTorch project to a schema file.

A run of May or June 2026 has nearly a schema file (`pd`, `runtime`, `cadence`, `target`, `data`, `eval`); an older one
has a flat file. Keys that only training needed and that have no counterpart are left out and listed. Keys that define
the decomposition (sites, C, CI function, squashing) must be readable, or the run is refused.
"""

import json
from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from param_decomp_lab.config.generations.tables import PERSISTENT_SCOPES
from param_decomp_lab.config.method_schema import LanguageModelFile, ToyFile
from param_decomp_lab.errors import UserError
from param_decomp_lab.safe_io.printable import printable
from param_decomp_lab.schema.mistakes import ConfigSource, Mistake
from param_decomp_lab.schema.strict import parse

Tree = dict[str, Any]

_SECTIONS = ("pd", "runtime", "cadence", "target", "data", "eval")
_LISTS = ("pd.loss_metrics", "eval.metrics")
"""Lists from which single entries can be left out."""
_STAND_INS: Mapping[str, Any] = {
    "eval": None,
    "pd.loss_metrics": [{"type": "FaithfulnessLoss", "coeff": 1.0}],
    "pd.components_optimizer": {"lr_schedule": {"start_val": 1e-3}},
    "pd.ci_fn_optimizer": {"lr_schedule": {"start_val": 1e-3}},
    "cadence": {"train_log_every": 100},
}
"""Replacements for sections that are not needed to open a run, if these are missing or unreadable."""
_NEEDED = ("pd.ci_config.", "pd.decomposition_targets.", "pd.identity_decomposition_targets.")
"""Sections in which every key must be known."""
_SCOPES = {**PERSISTENT_SCOPES, "per_batch": "per_batch_per_position"}
"""Scopes of persistent sources by their earlier names."""
_TOYS = ("tms", "resid_mlp")


@dataclass(frozen=True)
class Translated:
    """A translated configuration. ``method``: the schema file. ``experiment``: the toy, if the file names it.
    ``left_out``: what was left out of the file, one line each.
    """

    method: Tree
    experiment: str | None
    left_out: tuple[str, ...]


def translate(raw: Mapping[str, Any], where: str) -> Translated:
    """Translates the configuration ``raw`` of a run to a schema file. ``where``: its place, for errors.

    Raises a UserError that lists everything that must be readable and is not.
    """
    given = deepcopy(dict(raw))
    if "pd" in given:
        method, experiment = {key: given[key] for key in _SECTIONS if key in given}, None
        left_out = [str(key) for key in given if key not in _SECTIONS]
    else:
        flat = _Flat(given)
        method, experiment = _from_flat(flat, where)
        left_out = list(flat.left)
    for entries in _LISTS:
        found = _get(method, entries)
        if isinstance(found, list):
            found[:] = map(_entry, found)
    target = method.get("target")
    schema = LanguageModelFile if isinstance(target, Mapping) and "spec" in target else ToyFile
    while True:
        _, mistakes = parse(schema, method)
        if not mistakes:
            return Translated(method, experiment, tuple(left_out))
        gone = _leave_out(method, mistakes)
        if not gone:
            raise ConfigSource(where).error(mistakes)
        left_out += [line for line in gone.values() if line]


def _leave_out(method: Tree, mistakes: Iterable[Mistake]) -> dict[str, str]:
    """Removes from ``method`` what is unreadable and not needed. Returns the removed values by key; "" for a null."""
    gone: dict[str, str] = {}
    for mistake in mistakes:
        place = _place(mistake, method)
        if place and place not in gone:
            gone[place] = f"{mistake.key}: {mistake.message}"
            above, _, name = place.rpartition(".")
            parent = _get(method, above)
            if isinstance(parent, list):
                gone[place] += f"; this {parent[int(name)]['type']} is left out"
                parent[int(name)] = None
            elif place in _STAND_INS:
                parent[name] = deepcopy(_STAND_INS[place])
                gone[place] += f"; {place} is {json.dumps(parent[name])} instead"
            elif parent.pop(name) is None:
                gone[place] = ""
    for entries in _LISTS:  # last, so that entries keep their indices until then
        found = _get(method, entries)
        if isinstance(found, list):
            found[:] = [entry for entry in found if entry is not None]
    return gone


def _place(mistake: Mistake, method: Tree) -> str:
    """Returns the key to remove for a mistake; "" if none can be removed."""
    key = mistake.key
    section, _, name = key.rpartition(".")
    parent = _get(method, section)
    is_unknown = "unknown key" in mistake.message and isinstance(parent, dict) and name in parent
    if is_unknown and parent[name] is None:
        return key
    for entries in _LISTS:
        number = key.removeprefix(f"{entries}.").partition(".")[0]
        if number.isdecimal() and isinstance(_get(method, f"{entries}.{number}"), dict):
            return f"{entries}.{number}"
    if is_unknown and not key.startswith(_NEEDED):
        return key
    return next((place for place in _STAND_INS if f"{key}.".startswith(f"{place}.")), "")


def _get(tree: Any, key: str) -> Any:
    """Returns the value at a dotted key; None if it is missing."""
    for part in key.split(".") if key else ():
        if isinstance(tree, list) and part.isdecimal() and int(part) < len(tree):
            tree = tree[int(part)]
        else:
            tree = tree.get(part) if isinstance(tree, dict) else None
    return tree


def _mapping(value: Any) -> Tree:
    """Returns ``value``, or {} if it is not a mapping, which the schema refuses."""
    return value if isinstance(value, dict) else {}


def _entry(entry: Any) -> Tree:
    """Returns a loss or metric with its current names."""
    if not isinstance(entry, dict):
        return {"type": str(entry)}
    found = {**entry, **_mapping(entry.get("extra_init_kwargs"))}
    found.pop("extra_init_kwargs", None)
    found = {"type": found.pop("classname", found.get("type")), **found}
    if found["type"] == "ImportanceMinimalityLoss":
        found["pnorm"] = found.pop("pnorm_1", found.get("pnorm"))
        found.pop("pnorm_2", None)
        found["beta"] = found.get("beta") or 0
    scope, optimizer = found.get("scope"), found.get("optimizer")
    if isinstance(scope, dict):
        found["scope"] = {"n_sources" if key == "n_masks" else key: value for key, value in scope.items()}
        found["scope"]["type"] = _SCOPES.get(str(scope.get("type")), scope.get("type"))
    if isinstance(optimizer, dict) and "lr_schedule" not in optimizer:
        rate = optimizer.pop("step_size", optimizer.pop("lr", None))
        optimizer["lr_schedule"] = {"start_val": rate}
    return found


class _Flat:
    """A flat file, from which keys are taken; the remaining ones are `left`."""

    def __init__(self, raw: Tree) -> None:
        self._raw, self._taken = raw, set[str]()

    def take(self, *names: str, default: Any = None) -> Any:
        """Returns the value of the first of these keys that has one; takes all of them."""
        self._taken |= set(names)
        return next((self._raw[name] for name in names if self._raw.get(name) is not None), default)

    def some(self, **keys: str) -> Tree:
        """Returns a section with those of these keys that the file has."""
        found = {key: self.take(name) for key, name in keys.items()}
        return {key: value for key, value in found.items() if value is not None}

    @property
    def left(self) -> list[str]:
        return [str(key) for key, value in self._raw.items() if key not in self._taken and value is not None]


def _from_flat(flat: _Flat, where: str) -> tuple[Tree, str | None]:
    """Returns a schema file with what the flat file has, and the toy that the file names."""
    task = _mapping(flat.take("task_config"))
    name = task.get("task_name")
    if name not in ("lm", *_TOYS):
        raise UserError(
            f"{where}: task_config.task_name: is {printable(repr(name), 80)}; runs of lm, {' and '.join(_TOYS)} can be "
            "imported"
        )
    method: Tree = {"pd": _pd(flat), "cadence": flat.some(train_log_every="train_log_freq", save_every="save_freq")}
    # Files have all keys of their version, so one without this key is older than autocast; the same holds below.
    method["runtime"] = {"autocast_bf16": flat.take("autocast_bf16", default=False)}
    evaluation = flat.some(
        batch_size="eval_batch_size",
        n_steps="n_eval_steps",
        every="eval_freq",
        slow_every="slow_eval_freq",
        slow_on_first_step="slow_eval_on_first_step",
        metrics="eval_metric_configs",
    )
    method["eval"] = evaluation or None
    kind, place = flat.take("pretrained_model_class"), flat.take("pretrained_model_name", "pretrained_model_path")
    extract = flat.take("output_extract", "pretrained_model_output_attr")
    tokenizer = flat.take("tokenizer_name", default=task.get("tokenizer_name") or place)
    if name in _TOYS:
        keys = ("feature_probability", "data_generation_type")
        return {**method, "target": {"run_path": place}, "data": {k: task[k] for k in keys if k in task}}, name
    of_hub = str(kind).startswith("transformers.")
    spec = {"kind": "hf", "model_name": place} if of_hub else {"kind": "pretrained", "run_path": place}
    method["target"] = {"spec": {**spec, "model_class": kind}, "output_extract": extract}
    renamed = {"train_data_split": "train_split", "eval_data_split": "eval_split"}
    data = {renamed.get(key, key): value for key, value in task.items() if key != "task_name" and value is not None}
    method["data"] = {"column_name": "text", **data, "tokenizer_name": tokenizer}
    return method, None


def _pd(flat: _Flat) -> Tree:
    """Returns the section `pd` with what the flat file has."""
    names = (
        "seed", "n_mask_samples", "sampling", "sigmoid_type", "steps", "batch_size", "tied_weights",
        "faithfulness_warmup_steps", "faithfulness_warmup_lr", "faithfulness_warmup_weight_decay",
    )  # fmt: skip
    C = flat.take("C")

    def targets(key: str, patterns: str) -> list[Tree] | None:
        given, older = flat.take(key), flat.take(patterns)
        return [{"module_pattern": pattern, "C": C} for pattern in older] if isinstance(older, list) else given

    return {
        "n_mask_samples": 1,
        **flat.some(**{name: name for name in names}),
        "use_delta_component": flat.take("use_delta_component", default=False),
        "decomposition_targets": targets("module_info", "target_module_patterns"),
        "identity_decomposition_targets": targets("identity_module_info", "identity_module_patterns"),
        "ci_config": _ci_config(flat),
        **_optimizers(flat),
        "loss_metrics": flat.take("loss_metric_configs", default=[]),
    }


def _ci_config(flat: _Flat) -> Any:
    older = flat.take("ci_fn_type", "gate_type", default="vector_mlp")
    hidden, is_global = flat.take("ci_fn_hidden_dims", "gate_hidden_dims", default=[8]), flat.take("use_global_ci")
    given = flat.take("ci_config")
    if given is not None:
        return given
    kind = "shared_mlp" if older == "layerwise_global_mlp" else str(older)
    mode = "global" if is_global or kind.startswith("global_") else "layerwise"
    return {"mode": mode, "fn_type": kind, "hidden_dims": hidden}


def _optimizers(flat: _Flat) -> Tree:
    schedule, rate, warmup = flat.take("lr_schedule"), flat.take("lr"), flat.take("lr_warmup_pct", default=0.0)
    clip = flat.take("grad_clip_norm")
    if isinstance(schedule, str):  # its cosine ended at 0
        constant = {} if schedule == "constant" else {"final_val_frac": 0.0}
        schedule = {"start_val": rate, "warmup_pct": warmup, "fn_type": schedule, **constant}
    found = {}
    for part, older in (
        ("components_optimizer", "grad_clip_norm_components"),
        ("ci_fn_optimizer", "grad_clip_norm_ci_fns"),
    ):
        given, own_clip = flat.take(part), flat.take(older, default=clip)
        found[part] = given or {"lr_schedule": schedule, "grad_clip_norm": own_clip}
        if str(_mapping(found[part]).get("type")).lower() == "adamw":
            del found[part]["type"]
    return found
