"""`--set a.b=c`: overrides single keys of the wrapper or the schema file before validation."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from param_decomp_lab.config.method_schema import LanguageModelFile
from param_decomp_lab.config.wrapper import DataFolders, TargetSource, Wrapper
from param_decomp_lab.errors import UserError
from param_decomp_lab.safe_io.printable import shortened
from param_decomp_lab.safe_io.yaml_text import parse_yaml
from param_decomp_lab.schema.mistakes import ConfigSource
from param_decomp_lab.schema.spelling import nearest
from param_decomp_lab.schema.strict import Strict

# `data` and `target` are keys of both files; these are the wrapper's part of them.
_SHARED: dict[str, type[Strict]] = {"data": DataFolders, "target": TargetSource}


@dataclass(frozen=True)
class Override:
    """One `--set` assignment: key path, value, and its original text."""

    path: tuple[str, ...]
    value: Any
    text: str

    @property
    def is_for_wrapper(self) -> bool:
        """Whether the key is the wrapper's: `data.train` is, `data.max_seq_len` is the schema file's."""
        first, *rest = self.path
        if first in _SHARED:
            return not rest or rest[0] in _SHARED[first].model_fields
        return first in Wrapper.model_fields


def parse_overrides(texts: Iterable[str]) -> tuple[Override, ...]:
    """Parses assignments, whose values are YAML. Raises a UserError that lists those that cannot be parsed."""
    parsed, wrong = read_overrides(texts)
    if wrong:
        raise UserError("\n".join(wrong))
    return parsed


def read_overrides(texts: Iterable[str]) -> tuple[tuple[Override, ...], list[str]]:
    """Like `parse_overrides`, but returns the assignments that can be parsed, and what is wrong with the others."""
    parsed, wrong = [], []
    for text in texts:
        try:
            parsed.append(_parse(text))
        except UserError as error:
            wrong.append(str(error))
    return tuple(parsed), wrong


def _parse(given: str) -> Override:
    key, equals, value = given.partition("=")
    text = shortened(given, 200)  # for messages
    path = tuple(key.strip().split("."))
    if not equals or "" in path:
        raise UserError(f"--set {text}: should be key=value with a dotted key, such as pd.steps=100")
    if path[0] not in Wrapper.model_fields and path[0] not in LanguageModelFile.model_fields:
        names = {*Wrapper.model_fields, *LanguageModelFile.model_fields}
        raise UserError(f"--set {text}: unknown key '{path[0]}'; {nearest(path[0], names)}")
    return Override(path, parse_yaml(value, f"--set {text}"), text)


def apply_overrides(raw: dict[str, Any], overrides: Iterable[Override]) -> dict[str, Any]:
    """Returns a copy of ``raw`` with the assignments applied in order; ``raw`` is not modified (YAML aliases share
    parts).

    Raises a UserError that lists the assignments that do not fit.
    """
    applied, wrong = apply_those_that_fit(raw, overrides)
    if wrong:
        raise UserError("\n".join(wrong))
    return applied


def apply_those_that_fit(raw: dict[str, Any], overrides: Iterable[Override]) -> tuple[dict[str, Any], list[str]]:
    """Like `apply_overrides`, but applies the assignments that fit, and also returns what is wrong with the others."""
    wrong = []
    for override in overrides:
        try:
            raw = _replaced(raw, override.path, override)
        except UserError as error:
            wrong.append(str(error))
    return raw, wrong


def _replaced(node: Any, path: tuple[str, ...], override: Override) -> Any:
    if not path:
        return override.value
    key, *rest = path
    if isinstance(node, list):
        if not key.isdecimal() or int(key) >= len(node):
            have = f"0 to {len(node) - 1}" if node else "none, it is empty"
            raise UserError(f"--set {override.text}: '{key}' is not an index of this list (valid: {have})")
        place = int(key)
        return [_replaced(item, tuple(rest), override) if n == place else item for n, item in enumerate(node)]
    above = ".".join(override.path[: len(override.path) - len(path)])
    if node is None and key.isdecimal():
        raise UserError(f"--set {override.text}: the file has no list {above}; set {above} itself")
    if node is None:  # a section that was absent or null
        node = {}
    if not isinstance(node, dict):
        raise UserError(f"--set {override.text}: {above} is {node!r}, which has no keys; set {above} itself")
    return {**node, key: _replaced(node.get(key), tuple(rest), override)}


def override_source(file: Path, overrides: Sequence[Override]) -> ConfigSource:
    """Names ``file`` and the assignments applied to it, for error messages."""
    return ConfigSource(str(file), tuple((".".join(override.path), override.text) for override in overrides))
