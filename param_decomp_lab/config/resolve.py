"""Loads a wrapper and its schema file as one validated configuration; saves, reads and compares configurations."""

import json
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

from pydantic import BaseModel

from param_decomp_lab.config.checks import infer_toy, method_mistakes, warnings, wrapper_mistakes
from param_decomp_lab.config.generations import Translation, translate
from param_decomp_lab.config.method_schema import (
    LanguageModelFile,
    LanguageModelTarget,
    MethodFile,
    ToyFile,
    ToyTarget,
    UndecidedFile,
)
from param_decomp_lab.config.overrides import Override, apply_those_that_fit, override_source, read_overrides
from param_decomp_lab.config.wrapper import Experiment, Wrapper
from param_decomp_lab.errors import Unread, UserError
from param_decomp_lab.safe_io.printable import first_few
from param_decomp_lab.safe_io.yaml_text import DuplicateKeys, dump_yaml, read_mapping
from param_decomp_lab.schema.mistakes import SHOWN_MISTAKES, ConfigSource, Mistake
from param_decomp_lab.schema.strict import NO_MEANING, Strict, parse, spelling


class ConfigError(UserError):
    """Lists everything that is wrong with a configuration, one mistake per line.

    ``lines``: the mistakes. ``config``: what could be read of the configuration, to check it further
    (`strict.as_far_as_read`); None if a file could not be read, or does not say for which kind of target it is.
    """

    def __init__(self, lines: Sequence[str], config: "RunConfig | None" = None) -> None:
        self.lines, self.config = tuple(dict.fromkeys(lines)), config
        super().__init__("\n".join(first_few(self.lines, SHOWN_MISTAKES)))


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
        """Returns lines to print before a run starts: `warnings`, and the `ignored` keys."""
        return (
            *self.warnings,
            *([f"accepted, without effect here: {', '.join(self.ignored)}"] if self.ignored else ()),
        )

    def with_run_id(self, run_id: str) -> "RunConfig":
        """Returns a copy with ``run_id`` set."""
        return replace(self, wrapper=self.wrapper.model_copy(update={"run_id": run_id}))

    def with_overrides(self, overrides: Sequence[str]) -> "RunConfig":
        """Returns a copy with `--set` assignments applied; relative paths refer to the current folder."""
        assignments, wrong = read_overrides(overrides)
        wrapper, method = self.wrapper.model_dump(mode="json"), self.method.model_dump(mode="json")
        if any(override.path[0] == "memory" for override in assignments):
            del wrapper["remat_recon_forwards"]  # follows from the preset
        if any(override.path == ("memory", "preset") for override in assignments):
            # Otherwise, the explicit settings of the old preset would override those of the new one.
            wrapper["memory"] = {key: wrapper["memory"][key] for key in ("state_dtypes", "optimizers")}
        for_wrapper, for_method = _by_file(assignments)
        place = "{} of the run's config.yaml".format
        sources = (
            override_source(Path(place("wrapper")), for_wrapper),
            override_source(Path(place("torch")), for_method),
        )
        wrapper, unfit = apply_those_that_fit(wrapper, for_wrapper)
        method, unfit_too = apply_those_that_fit(method, for_method)
        read_wrapper = _read_wrapper(wrapper, sources[0], Path.cwd())
        config = _configuration(read_wrapper, method, *sources, before=[*wrong, *unfit, *unfit_too])
        return replace(config, ignored=self.ignored)

    def to_yaml(self) -> str:
        """Returns the whole configuration as one YAML document with all defaults; `from_yaml` reads it back equal."""
        parts = {"wrapper": self.wrapper.model_dump(mode="json"), "torch": self.method.model_dump(mode="json")}
        return dump_yaml({**parts, "ignored": list(self.ignored), "notes": list(self.warnings)})

    @classmethod
    def from_yaml(cls, path: Path) -> "RunConfig":
        """Reads the configuration that a run saved."""
        return cls.from_mapping(read_mapping(path, "the configuration of a run"), str(path))

    @classmethod
    def from_mapping(cls, raw: dict[str, Any], where: str) -> "RunConfig":
        """Like `from_yaml`, from parsed YAML. ``where``: its origin, for errors."""
        for key in ("wrapper", "torch"):
            if not isinstance(raw.get(key), dict):
                raise UserError(f"{where}: {key}: is required; a run's config.yaml has wrapper and torch")
        sources = ConfigSource(f"{where}: wrapper"), ConfigSource(f"{where}: torch")
        wrapper, mistakes = parse(Wrapper, raw["wrapper"])
        read_wrapper = _ReadWrapper(wrapper, tuple(map(sources[0].line, mistakes)))
        config = _configuration(read_wrapper, raw["torch"], *sources)
        return replace(config, ignored=tuple(raw.get("ignored", ())))


def load_config(
    path: Path, overrides: Sequence[str] = (), read: Callable[[Path, str], dict[str, Any]] = read_mapping
) -> RunConfig:
    """Loads the wrapper ``path`` and its schema file, with `--set` assignments such as `pd.steps=100` applied.

    ``path`` can itself be a schema file, which then gets a wrapper with only a `run_name`. A schema file can be any of
    the original project's (`generations`); its further keys become the wrapper's, unless the wrapper has them.

    Raises a ConfigError that lists all mistakes in both files and in the assignments.

    ``read``: reads a file; its result is not modified. Parsing the files takes nearly all of the time, so pass
    `functools.cache(read_mapping)` to load the same files repeatedly with other assignments.
    """
    assignments, wrong = read_overrides(overrides)
    for_wrapper, for_method = _by_file(assignments)
    try:
        raw = _mapping(read, path, "the wrapper", wrong)
    except UserError as error:
        raise ConfigError([*wrong, str(error)]) from error
    is_alone = _is_schema_file(raw)
    if is_alone:
        raw = {"torch_config": path.name}
    wrapper_source = override_source(path, for_wrapper)
    implied = _implied(path, {}, is_alone=is_alone)
    wrapper, wrong_in_wrapper = _wrapper(raw, implied, for_wrapper, wrapper_source)
    try:
        method = _mapping(read, wrapper.model.torch_config, f"torch_config of {path}", wrong)
        if "torch_config" in method and "pd" not in method:
            named = f"{wrapper.model.torch_config}: is a wrapper; torch_config should name a schema file"
            raise UserError(named)
    except Unread:
        raise ConfigError([*wrong, *wrong_in_wrapper, *wrapper.lines]) from None
    except UserError as error:
        raise ConfigError([*wrong, *wrong_in_wrapper, *wrapper.lines, str(error)]) from error
    translation = translate(method)
    if translation.wrapper:
        implied = _implied(path, translation.wrapper, is_alone=is_alone)
        if is_alone:
            wrapper_source = replace(wrapper_source, origins=translation.origins)
        wrapper, wrong_in_wrapper = _wrapper(raw, implied, for_wrapper, wrapper_source)
    method, unfit = apply_those_that_fit(translation.method, for_method)
    source = override_source(wrapper.model.torch_config, for_method)
    source = replace(source, origins=translation.origins)
    lacking = translation.mistakes({*raw, *(override.path[0] for override in for_wrapper)})
    in_file = ConfigSource(source.file)  # unsupported keys are the file's own
    before = [*wrong, *wrong_in_wrapper, *map(in_file.line, lacking), *unfit]
    config = _configuration(wrapper, method, wrapper_source, source, before, {mistake.key for mistake in lacking})
    return _with_notes(config, translation)


def _is_schema_file(raw: dict[str, Any]) -> bool:
    return "pd" in raw and "torch_config" not in raw


@dataclass(frozen=True)
class RawConfig:
    """A wrapper and its schema file in the current form, not validated. Paths are relative to the folder of the
    wrapper. ``translation``: that of the schema file.
    """

    wrapper: dict[str, Any]
    method: dict[str, Any]
    translation: Translation


def read_raw(path: Path) -> RawConfig:
    """Returns what `load_config` reads before it validates. Raises UserError for a file that cannot be read."""
    raw = read_mapping(path, "the wrapper")
    is_alone = _is_schema_file(raw)
    if is_alone:
        translation, raw = translate(raw), {"torch_config": path.name}
    else:
        schema = path.parent / Path(str(raw["torch_config"])).expanduser()
        translation = translate(read_mapping(schema, "the schema file"))
    implied = _implied(path, translation.wrapper, is_alone=is_alone)
    kept = {key: value for key, value in implied.items() if not _is_replaced(key, set(raw), set())}
    if "data" in kept:
        kept["data"] = {key: os.path.relpath(folder, path.parent) for key, folder in kept["data"].items()}
    return RawConfig(kept | raw, translation.method, translation)


def _implied(path: Path, wrapper: dict[str, Any], *, is_alone: bool) -> dict[str, Any]:
    """Returns the keys of the wrapper that the schema file ``path`` implies. A schema file alone needs a name."""
    return {"run_name": path.stem, **wrapper} if is_alone else wrapper


def _with_notes(config: RunConfig, translation: Translation) -> RunConfig:
    """Returns ``config`` with the notes of its translation."""
    if translation.is_as_it_was:
        return config
    form = f"has the form of {translation.title}; `pd configs convert` writes today's"
    notes = (f"{config.wrapper.torch_config.name}: {form}", *translation.notes, *config.warnings)
    return replace(config, ignored=(*translation.no_effect, *config.ignored), warnings=notes)


_REPLACED_BY: dict[str, tuple[str, ...]] = {
    "target": ("target",),
    "memory": ("remat_recon_forwards",),
    "init_components": ("init_from",),
}
"""For keys of the wrapper that a schema file implies: the assignments that replace them instead of refining them."""


def _wrapper(
    raw: dict[str, Any], implied: dict[str, Any], overrides: Sequence[Override], source: ConfigSource
) -> "tuple[_ReadWrapper, list[str]]":
    """Reads the wrapper ``raw`` with the assignments applied, and returns what is wrong with these. ``implied``: values
    of keys that the wrapper lacks.
    """
    given = {*raw, *(override.path[0] for override in overrides)}
    assigned = {override.path[0] for override in overrides}
    kept = {key: value for key, value in implied.items() if not _is_replaced(key, given, assigned)}
    raw, unfit = apply_those_that_fit(kept | raw, overrides)
    return _read_wrapper(raw, source, Path(source.file).parent), unfit


def _is_replaced(key: str, given: set[str], assigned: set[str]) -> bool:
    by = _REPLACED_BY.get(key, ())
    return any(other in (assigned if other == key else given) for other in by)


def _mapping(read: Callable[[Path, str], dict[str, Any]], path: Path, what: str, wrong: list[str]) -> dict[str, Any]:
    """Returns what ``read`` reads. Keys that are given twice are added to ``wrong``."""
    try:
        return read(path, what)
    except DuplicateKeys as error:
        if not isinstance(error.value, dict):
            raise
        wrong.append(str(error))
        return error.value


def _by_file(assignments: Sequence[Override]) -> tuple[list[Override], list[Override]]:
    """Returns the assignments to keys of the wrapper, and those to keys of the schema file."""
    return (
        [override for override in assignments if override.is_for_wrapper],
        [override for override in assignments if not override.is_for_wrapper],
    )


@dataclass(frozen=True)
class _ReadWrapper:
    """A wrapper as far as it could be read, and what is wrong with it."""

    model: Wrapper
    lines: tuple[str, ...] = ()


def _read_wrapper(raw: object, source: ConfigSource, folder: Path) -> _ReadWrapper:
    """Reads a wrapper whose paths are relative to ``folder``."""
    wrapper, mistakes = parse(Wrapper, raw)
    wrapper = wrapper.relative_to(folder)
    return _ReadWrapper(wrapper if mistakes else wrapper.resolved(), tuple(map(source.line, mistakes)))


def _configuration(
    wrapper: _ReadWrapper,
    raw: dict[str, Any],
    wrapper_source: ConfigSource,
    method_source: ConfigSource,
    before: Sequence[str] = (),
    lacking: Collection[str] = (),
) -> RunConfig:
    """Validates a wrapper with its schema file. ``before``: mistakes found so far. ``lacking``: keys of the file that
    were left out. Raises a ConfigError that lists everything.
    """
    schema, undecided = _schema(wrapper.model, raw)
    found, mistakes = parse(schema, raw)
    method = cast(MethodFile, found)  # an `UndecidedFile` is refused below
    mistakes = [mistake for mistake in mistakes if not _follows(method_source.key_in_file(mistake.key), lacking)]
    lines = [*before, *wrapper.lines, *map(method_source.line, (*undecided, *mistakes))]
    lines += map(wrapper_source.line, wrapper_mistakes(wrapper.model, method))
    lines += map(method_source.line, method_mistakes(wrapper.model, method))
    if lines:
        raise ConfigError(lines, None if isinstance(found, UndecidedFile) else RunConfig(wrapper.model, method))
    ignored = tuple(key for key, given in _without_meaning(method) if given)
    return RunConfig(wrapper.model, method, ignored, warnings(wrapper.model, method))


def _follows(key: str, lacking: Collection[str]) -> bool:
    """Whether a mistake at ``key`` follows only from keys that were left out."""
    return any(left_out == key or left_out.startswith(f"{key}.") for left_out in lacking)


_Schema = type[LanguageModelFile] | type[ToyFile] | type[UndecidedFile]


def _schema(wrapper: Wrapper, raw: dict[str, Any]) -> tuple[_Schema, list[Mistake]]:
    """Returns the schema that the file follows. A toy is named by the wrapper, or inferred from its module patterns."""
    target = _section(raw, "target")
    if isinstance(target, dict) and spelling(LanguageModelTarget, target, "spec") is not None:
        return LanguageModelFile, []
    try:
        is_named = wrapper.experiment is not None
    except Unread:  # the name of the toy is wrong, but it is a toy
        is_named = True
    if is_named or infer_toy(_patterns(_section(raw, "pd"))) is not None:
        return ToyFile, []
    if isinstance(target, dict) and spelling(ToyTarget, target, "run_path") is not None:
        advice = "give the wrapper experiment: tms or resid_mlp"
        wrong = f"match the modules of both toys or of neither; {advice}"
        return UndecidedFile, [Mistake("pd.decomposition_targets", wrong)]
    otherwise = "a toy is inferred from its patterns, or named by the wrapper's experiment: tms or resid_mlp"
    return UndecidedFile, [Mistake("target.spec", f"is required for a language model; {otherwise}")]


def _section(raw: dict[str, Any], name: str) -> Any:
    """Returns a section of a schema file that is not validated yet; None if it is missing."""
    key = spelling(LanguageModelFile, raw, name)
    return None if key is None else raw[key]


def _patterns(pd: Any) -> list[str]:
    """Returns the module patterns of a `pd` section that is not validated yet."""
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
    """Returns the differences from ``old`` to ``new``, as lines `key: old -> new` with keys as `--set` takes them.

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
    """Yields every key of a nested value, as `--set` takes it, with its value as JSON."""
    below = f"{key}." if key else ""
    if isinstance(value, dict) and value:
        for name, item in value.items():
            yield from flat_keys(item, f"{below}{name}")
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        for n, item in enumerate(value):
            yield from flat_keys(item, f"{below}{n}")
    else:
        yield key, json.dumps(value, ensure_ascii=False)
