"""Loads a wrapper and its schema file as one validated configuration; saves, reads and compares configurations."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel

from param_decomp_lab.config.checks import infer_toy, method_mistakes, warnings, wrapper_mistakes
from param_decomp_lab.config.method_schema import LanguageModelFile, MethodFile, ToyFile
from param_decomp_lab.config.overrides import apply_overrides, override_source, parse_overrides
from param_decomp_lab.config.strict import NO_MEANING, ConfigSource, Mistake, Strict, validate
from param_decomp_lab.config.wrapper import Experiment, Wrapper
from param_decomp_lab.errors import UserError
from param_decomp_lab.safe_io.yaml_text import dump_yaml, read_mapping


@dataclass(frozen=True)
class RunConfig:
    """The complete, validated configuration of a run.

    ``wrapper``: with paths relative to the current folder and the memory preset chosen. ``method``: the schema file.
    ``ignored``: dotted keys that were given but have no effect here. ``warnings``: settings that are valid but
    probably unintended.
    """

    wrapper: Wrapper
    method: MethodFile
    ignored: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def experiment(self) -> Experiment | Literal["language_model"]:
        if isinstance(self.method, LanguageModelFile):
            return "language_model"
        pd = self.method.pd
        targets = (*pd.decomposition_targets, *(pd.identity_decomposition_targets or ()))
        experiment = self.wrapper.experiment or infer_toy([target.module_pattern for target in targets])
        assert experiment is not None
        return experiment

    @property
    def notes(self) -> tuple[str, ...]:
        """Lines to print before a run starts: `warnings`, and the `ignored` keys."""
        return (
            *self.warnings,
            *([f"accepted, without effect here: {', '.join(self.ignored)}"] if self.ignored else ()),
        )

    def with_run_id(self, run_id: str) -> "RunConfig":
        """A copy with ``run_id`` set."""
        return replace(self, wrapper=self.wrapper.model_copy(update={"run_id": run_id}))

    def with_overrides(self, overrides: Sequence[str]) -> "RunConfig":
        """A copy with `--set` assignments applied; relative paths refer to the current folder."""
        assignments = parse_overrides(overrides)
        wrapper, method = self.wrapper.model_dump(mode="json"), self.method.model_dump(mode="json")
        if any(override.path[0] == "memory" for override in assignments):
            del wrapper["remat_recon_forwards"]  # follows from the preset
        if any(override.path == ("memory", "preset") for override in assignments):
            # The explicit settings of the old preset would override those of the new one.
            wrapper["memory"] = {key: wrapper["memory"][key] for key in ("state_dtypes", "optimizers")}
        for_wrapper = [override for override in assignments if override.is_for_wrapper]
        for_method = [override for override in assignments if not override.is_for_wrapper]
        sources = [override_source(Path(f"{part} of the run's config.yaml"), own) for part, own in
                  (("wrapper", for_wrapper), ("torch", for_method))]  # fmt: skip
        resolved = (
            validate(Wrapper, apply_overrides(wrapper, for_wrapper), sources[0]).relative_to(Path.cwd()).resolved()
        )
        config = _configuration(resolved, apply_overrides(method, for_method), *sources)
        return replace(config, ignored=self.ignored)

    def to_yaml(self) -> str:
        """The whole configuration as one YAML document with all defaults; `from_yaml` reads it back equal."""
        parts = {"wrapper": self.wrapper.model_dump(mode="json"), "torch": self.method.model_dump(mode="json")}
        return dump_yaml({**parts, "ignored": list(self.ignored), "notes": list(self.warnings)})

    @classmethod
    def from_yaml(cls, path: Path) -> "RunConfig":
        """Reads the configuration that a run saved."""
        return cls.from_mapping(read_mapping(path, "the configuration of a run"), str(path))

    @classmethod
    def from_mapping(cls, raw: dict[str, Any], where: str) -> "RunConfig":
        """As `from_yaml`, from parsed YAML. ``where``: its origin, for errors."""
        for key in ("wrapper", "torch"):
            if not isinstance(raw.get(key), dict):
                raise UserError(f"{where}: {key}: is required; a run's config.yaml has wrapper and torch")
        sources = ConfigSource(f"{where}: wrapper"), ConfigSource(f"{where}: torch")
        config = _configuration(validate(Wrapper, raw["wrapper"], sources[0]), raw["torch"], *sources)
        return replace(config, ignored=tuple(raw.get("ignored", ())))


def load_config(
    path: Path, overrides: Sequence[str] = (), read: Callable[[Path, str], dict[str, Any]] = read_mapping
) -> RunConfig:
    """Loads the wrapper ``path`` and its schema file, with `--set` assignments such as `pd.steps=100` applied.

    ``read``: reads a file; nothing of what it returns is modified. Parsing the files is nearly all of the time: who
    loads them again and again with other assignments gives `functools.cache(read_mapping)`.
    """
    assignments = parse_overrides(overrides)
    for_wrapper = [override for override in assignments if override.is_for_wrapper]
    for_method = [override for override in assignments if not override.is_for_wrapper]

    raw = read(path, "the wrapper")
    if "pd" in raw:
        raise UserError(f"{path}: is a schema file; write a wrapper with torch_config: {path.name} and a run_name")
    wrapper_source = override_source(path, for_wrapper)
    wrapper = validate(Wrapper, apply_overrides(raw, for_wrapper), wrapper_source).relative_to(path.parent).resolved()

    method = apply_overrides(read(wrapper.torch_config, f"torch_config of {path}"), for_method)
    return _configuration(wrapper, method, wrapper_source, override_source(wrapper.torch_config, for_method))


def _configuration(
    wrapper: Wrapper, raw: dict[str, Any], wrapper_source: ConfigSource, method_source: ConfigSource
) -> RunConfig:
    method = validate(_schema(wrapper, raw, method_source), raw, method_source)
    found = [wrapper_source.line(problem) for problem in wrapper_mistakes(wrapper, method)]
    found += [method_source.line(problem) for problem in method_mistakes(wrapper, method)]
    if found:
        raise UserError("\n".join(found))
    ignored = tuple(key for key, given in _without_meaning(method) if given)
    return RunConfig(wrapper, method, ignored, warnings(wrapper, method))


def _schema(
    wrapper: Wrapper, raw: dict[str, Any], method_source: ConfigSource
) -> type[LanguageModelFile] | type[ToyFile]:
    """The schema that the file follows. A toy is named by the wrapper, or inferred from its module patterns."""
    target = raw.get("target")
    if isinstance(target, dict) and "spec" in target:
        return LanguageModelFile
    if wrapper.experiment is None and infer_toy(_patterns(raw.get("pd"))) is None:
        if isinstance(target, dict) and "run_path" in target:
            advice = "give the wrapper experiment: tms or resid_mlp"
            raise method_source.error(
                [Mistake("pd.decomposition_targets", f"match the modules of both toys or of neither; {advice}")]
            )
        otherwise = "a toy is inferred from its patterns, or named by the wrapper's experiment: tms or resid_mlp"
        raise method_source.error([Mistake("target.spec", f"is required for a language model; {otherwise}")])
    return ToyFile


def _patterns(pd: Any) -> list[str]:
    """Module patterns of a `pd` section that is not validated yet."""
    sections = ("decomposition_targets", "identity_decomposition_targets")
    lists = [pd.get(key) for key in sections] if isinstance(pd, dict) else []
    entries = [entry for found in lists if isinstance(found, list) for entry in found]
    return [str(entry.get("module_pattern")) for entry in entries if isinstance(entry, dict)]


def _without_meaning(model: BaseModel, above: str = "") -> Iterator[tuple[str, bool]]:
    """Yields the dotted keys marked `NO_MEANING`, and whether each was given."""
    for key, value in model:
        if isinstance(value, Strict):
            yield from _without_meaning(value, f"{above}{key}.")
        elif NO_MEANING in type(model).model_fields[key].metadata:
            yield f"{above}{key}", key in model.model_fields_set and value is not None


def difference(old: RunConfig, new: RunConfig) -> list[str]:
    """The differences from ``old`` to ``new``, as lines `key: old -> new` with keys as `--set` takes them.

    The run id, the path of the schema file and the keys without effect are not compared.
    """
    before, after = _leaves(old), _leaves(new)
    keys = [*before, *(key for key in after if key not in before)]
    absent = "(absent)"
    changes = [(key, before.get(key, absent), after.get(key, absent)) for key in keys]
    return [f"{key}: {was} -> {now}" for key, was, now in changes if was != now]


def _leaves(config: RunConfig) -> dict[str, str]:
    excluded = {"run_id", "torch_config"} | {key for key, _ in _without_meaning(config.method)}
    parts = (config.wrapper.model_dump(mode="json"), config.method.model_dump(mode="json"))
    return {key: text for part in parts for key, text in flat_keys(part) if key not in excluded}


def flat_keys(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Every key of a nested value, as `--set` takes it, with its value as JSON."""
    below = f"{key}." if key else ""
    if isinstance(value, dict) and value:
        for name, item in value.items():
            yield from flat_keys(item, f"{below}{name}")
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        for n, item in enumerate(value):
            yield from flat_keys(item, f"{below}{n}")
    else:
        yield key, json.dumps(value, ensure_ascii=False)
