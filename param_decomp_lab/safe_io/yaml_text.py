"""Reads and writes YAML: accepts floats such as 5e-5, refuses duplicate keys, reports errors with file and line.

Input comes from outside, so its size, depth and number of nodes are limited (see `safe_io`).
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from param_decomp_lab.errors import UserError
from param_decomp_lab.safe_io.files import SETTINGS_BYTES, read_text
from param_decomp_lab.safe_io.json_text import DEPTH, INTEGER, has_surrogates
from param_decomp_lab.safe_io.printable import first_few, printable, shortened

NODES = 100_000
"""The most values that a document may have, including those that aliases repeat."""

# In PyYAML's YAML 1.1 a float needs both a dot and a signed exponent: without one of them, `5e-5` and `1.0e6` are
# strings.
_FLOAT = re.compile(r"[-+]?(?:\d[\d_]*(?:\.[\d_]*)?|\.\d[\d_]*)[eE][-+]?\d+$")


class DuplicateKeys(UserError):
    """Raised for keys that are given twice in one mapping. ``value``: the document, with the last value of each such
    key.
    """

    def __init__(self, lines: Sequence[str], value: Any) -> None:
        super().__init__("\n".join(first_few(lines)))
        self.value = value


class _Loader(yaml.SafeLoader):
    """A safe loader with YAML 1.2's floats that refuses duplicate keys and documents that are too large or too deep."""

    def __init__(self, text: str, name: str) -> None:
        super().__init__(text)
        self.name = name
        self.duplicates: dict[int, str] = {}
        """For each line with a key that its mapping already has: the error message."""
        self._depth = 0
        self._sizes: dict[yaml.Node, tuple[int, int]] = {}
        """The size of each finished node, with its aliases written out: how many nodes, and how many levels."""

    def error(self, line: int, message: str) -> UserError:
        return UserError(f"{self.name}, line {line}: {message}")

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        line = self.peek_event().start_mark.line + 1
        if self.check_event(yaml.AliasEvent):
            node = super().compose_node(parent, index)
            if node not in self._sizes:
                raise self.error(line, "an alias refers to the value that contains it")
            return node
        self._depth += 1
        if self._depth > DEPTH:
            raise self.error(line, f"nested more than {DEPTH} levels deep")
        node = super().compose_node(parent, index)
        self._depth -= 1
        assert node is not None
        parts: list[yaml.Node] = []
        if isinstance(node, yaml.SequenceNode):
            parts = node.value
        elif isinstance(node, yaml.MappingNode):
            parts = [part for pair in node.value for part in pair]
        sizes = [self._sizes[part] for part in parts]
        count, levels = 1 + sum(count for count, _ in sizes), 1 + max((levels for _, levels in sizes), default=0)
        if count > NODES:
            raise self.error(line, f"more than {NODES:,} values, counting what aliases (*name) repeat")
        if levels > DEPTH:
            raise self.error(line, f"nested more than {DEPTH} levels deep, with its aliases (*name)")
        self._sizes[node] = count, levels
        return node

    def compose_mapping_node(self, anchor: dict[Any, yaml.Node]) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                line = key.start_mark.line + 1
                if key.value in lines:
                    name, first = shortened(key.value, 200), lines[key.value]
                    twice = f"the key '{name}' is given twice (first on line {first}); keep one of the two"
                    self.duplicates[line] = str(self.error(line, twice))
                lines.setdefault(key.value, line)
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        # PyYAML's scalar constructors do not wrap their own errors: `!!bool abc` raises a KeyError.
        try:
            value = super().construct_object(node, deep)
        except (ValueError, KeyError, AttributeError, IndexError, TypeError, OverflowError) as error:
            kind = node.tag.rpartition(":")[2]
            given = f" '{shortened(node.value, 80)}'" if isinstance(node, yaml.ScalarNode) else ""
            raise self.error(node.start_mark.line + 1, f"not valid YAML:{given} cannot be read as {kind}") from error
        if isinstance(value, int) and not -INTEGER < value < INTEGER:
            raise self.error(node.start_mark.line + 1, f"the number {shortened(str(node.value), 40)} is too large")
        if isinstance(value, str) and has_surrogates(value):
            raise self.error(node.start_mark.line + 1, f"not valid text: {printable(value, 80)}")
        return value


class _Dumper(yaml.SafeDumper):
    """Quotes the strings that `_Loader` would read as floats."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


for _class in (_Loader, _Dumper):
    _class.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))


def parse_yaml(text: str, name: str) -> Any:
    """Parses a YAML text. ``name``: what errors call the text.

    Raises UserError for text that is not valid YAML, is nested more than `DEPTH` levels deep, or has more than `NODES`
    values with its aliases expanded, so functions that walk over the result need no limits of their own. Raises
    DuplicateKeys if duplicate keys are the only mistake.
    """
    name = shortened(name, 1000)
    try:
        loader = _Loader(text, name)
        value = loader.get_single_data()
        if loader.duplicates:
            raise DuplicateKeys([loader.duplicates[line] for line in sorted(loader.duplicates)], value)
        return value
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f", line {mark.line + 1}" if mark else ""
        raise UserError(
            f"{name}{line}: not valid YAML: {printable(error.problem or error.context or '', 400)}"
        ) from error
    except (yaml.YAMLError, ValueError) as error:
        raise UserError(f"{name}: not valid YAML: {printable(str(error), 400)}") from error


def read_mapping(path: Path, what: str, limit: int = SETTINGS_BYTES) -> dict[str, Any]:
    """Reads the mapping in the YAML file ``path``. ``what``: description of the file, for errors; ``limit``: its size
    in bytes. Raises UserError as `parse_yaml` does."""
    value = parse_yaml(read_text(path, what, limit), str(path))
    if not isinstance(value, dict):
        found = "empty" if value is None else f"a {type(value).__name__}"
        raise UserError(f"{path}: {what} should be a mapping of keys to values; this file is {found}")
    return value


def dump_yaml(value: object) -> str:
    """YAML text that ``parse_yaml`` reads back equal. ASCII only: PyYAML treats U+0085 as a line break."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, width=120, default_flow_style=False)
