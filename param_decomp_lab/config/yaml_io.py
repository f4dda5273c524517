"""Reads and writes YAML: accepts floats such as 5e-5, refuses duplicate keys, reports errors with file and line."""

import re
from pathlib import Path
from typing import Any

import yaml

from param_decomp_lab.errors import UserError

# In PyYAML's YAML 1.1 a float needs both a dot and a signed exponent: to it `5e-5` and `1.0e6` are strings.
_FLOAT = re.compile(r"[-+]?(?:\d[\d_]*\.?[\d_]*|\.\d[\d_]*)[eE][-+]?\d+$")


class _Loader(yaml.SafeLoader):
    """A safe loader with YAML 1.2's floats that refuses duplicate keys."""

    def compose_mapping_node(self, anchor: dict[Any, yaml.Node]) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                line = key.start_mark.line + 1
                if key.value in lines:
                    raise UserError(
                        f"{self.name}, line {line}: the key '{key.value}' is given twice "
                        f"(first on line {lines[key.value]}); keep one of the two"
                    )
                lines[key.value] = line
        return node


class _Dumper(yaml.SafeDumper):
    """Quotes the strings that `_Loader` would read as floats."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


for _class in (_Loader, _Dumper):
    _class.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))


def parse_yaml(text: str, name: str) -> Any:
    """Parses a YAML text. ``name``: of the text, for errors."""
    try:
        loader = _Loader(text)
        loader.name = name
        return loader.get_single_data()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f", line {mark.line + 1}" if mark else ""
        raise UserError(f"{name}{line}: not valid YAML: {error.problem or error.context}") from error
    except (yaml.YAMLError, ValueError) as error:
        raise UserError(f"{name}: not valid YAML: {error}") from error


def read_mapping(path: Path, what: str) -> dict[str, Any]:
    """Reads the mapping in the YAML file ``path``. ``what``: description of the file, for errors."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: cannot read {what}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: cannot read {what}: not UTF-8 text ({error.reason} at byte {error.start})") from error
    value = parse_yaml(text, str(path))
    if not isinstance(value, dict):
        found = "empty" if value is None else f"a {type(value).__name__}"
        raise UserError(f"{path}: {what} should be a mapping of keys to values; this file is {found}")
    return value


def dump_yaml(value: object) -> str:
    """YAML text that ``parse_yaml`` reads back equal. ASCII only: PyYAML treats U+0085 as a line break."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, width=120, default_flow_style=False)
