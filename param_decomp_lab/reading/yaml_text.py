"""Reads and writes YAML: accepts floats such as 5e-5, refuses duplicate keys, reports errors with file and line.

What is read is bounded in depth and in size, also of what aliases repeat: a few lines of them can stand for billions of
values.
"""

import re
from pathlib import Path
from typing import Any

import yaml

from param_decomp_lab.errors import UserError
from param_decomp_lab.reading.files import read_text
from param_decomp_lab.reading.json_text import MAX_DEPTH, is_unencodable

MAX_VALUES = 20_000
"""Keys and values of a file, those that aliases repeat counted each time; a configuration has hundreds."""
MAX_CHARACTERS = 1 << 19
MAX_DIGITS = 1000
"""Of a whole number. One that is only too large for its key is refused with the range of that."""

# In PyYAML's YAML 1.1 a float needs both a dot and a signed exponent: to it `5e-5` and `1.0e6` are strings.
_FLOAT = re.compile(r"[-+]?(?:\d[\d_]*(?:\.[\d_]*)?|\.\d[\d_]*)[eE][-+]?\d+$")


class _Loader(yaml.SafeLoader):
    """A safe loader with YAML 1.2's floats that refuses duplicate keys, and more than a file of people's holds."""

    def __init__(self, text: str, name: str) -> None:
        super().__init__(text)
        self.name = name
        self._depth = 0
        self._sizes: dict[yaml.Node, tuple[int, int]] = {}
        """Values and levels in each node that is complete, with what its aliases stand for."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event = self.peek_event()
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise self._refused(f"nested deeper than {MAX_DEPTH} levels", event.start_mark)
        node = super().compose_node(parent, index)
        self._depth -= 1
        assert node is not None
        if isinstance(event, yaml.AliasEvent):
            if node not in self._sizes:
                raise self._refused("an alias for what it is a part of", event.start_mark)
            return node
        inside = [self._sizes[part] for part in _parts(node)]
        size, levels = 1 + sum(size for size, _ in inside), 1 + max((levels for _, levels in inside), default=0)
        if size > MAX_VALUES:
            raise self._refused(f"more than {MAX_VALUES:,} values, with what aliases repeat", event.start_mark)
        if levels > MAX_DEPTH:
            raise self._refused(f"nested deeper than {MAX_DEPTH} levels, by aliases", event.start_mark)
        self._sizes[node] = size, levels
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        if node.tag == "tag:yaml.org,2002:int" and len(str(node.value)) > MAX_DIGITS:
            raise self._refused(f"a number of {len(node.value)} digits", node.start_mark)
        try:
            value = super().construct_object(node, deep)
        except (ValueError, LookupError, AttributeError, OverflowError, TypeError) as error:
            # `!!bool maybe`, `!!timestamp soon`: PyYAML's constructors take the text to be what the tag says.
            kind = node.tag.rpartition(":")[2]
            raise self._refused(f"{node.value!r:.60} is no {kind}", node.start_mark) from error
        if isinstance(value, str) and is_unencodable(value):
            raise self._refused("half of a surrogate pair, which is no text", node.start_mark)
        return value

    def _refused(self, why: str, mark: Any) -> UserError:
        return UserError(f"{self.name}, line {mark.line + 1}: not accepted: {why}")

    def compose_mapping_node(self, anchor: dict[Any, yaml.Node]) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                line = key.start_mark.line + 1
                if key.value in lines:
                    raise UserError(
                        f"{self.name}, line {line}: the key '{key.value:.200}' is given twice "
                        f"(first on line {lines[key.value]}); keep one of the two"
                    )
                lines[key.value] = line
        return node


def _parts(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return [part for pair in node.value for part in pair]
    return list(node.value) if isinstance(node, yaml.SequenceNode) else []


class _Dumper(yaml.SafeDumper):
    """Quotes the strings that `_Loader` would read as floats."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


for _class in (_Loader, _Dumper):
    _class.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))


def parse_yaml(text: str, name: str) -> Any:
    """Parses a YAML text. ``name``: of the text, for errors."""
    if len(text) > MAX_CHARACTERS:
        raise UserError(f"{name}: not accepted: more than {MAX_CHARACTERS:,} characters")
    try:
        return _Loader(text, name).get_single_data()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f", line {mark.line + 1}" if mark else ""
        raise UserError(f"{name}{line}: not valid YAML: {error.problem or error.context}") from error
    except yaml.reader.ReaderError as error:
        what = (
            f"the character U+{error.character:04X}" if isinstance(error.character, int) else "bytes that are no text"
        )
        raise UserError(f"{name}: not valid YAML: {what} at position {error.position + 1}") from error
    except (yaml.YAMLError, ValueError) as error:
        raise UserError(f"{name}: not valid YAML: {error}") from error


def read_mapping(path: Path, what: str) -> dict[str, Any]:
    """Reads the mapping in the YAML file ``path``. ``what``: description of the file, for errors."""
    value = parse_yaml(read_text(path, what), str(path))
    if not isinstance(value, dict):
        found = "empty" if value is None else f"a {type(value).__name__}"
        raise UserError(f"{path}: {what} should be a mapping of keys to values; this file is {found}")
    return value


def dump_yaml(value: object) -> str:
    """YAML text that ``parse_yaml`` reads back equal. ASCII only: PyYAML treats U+0085 as a line break."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, width=120, default_flow_style=False)
