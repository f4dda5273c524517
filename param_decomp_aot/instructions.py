"""Maps the instructions of a compiled program to their origin in our code."""

import re
from collections import deque

from param_decomp_aot.hlo import COMPUTATION, INSTRUCTION, instruction

_FAR = 64
"""The most instructions to search for an origin."""

_HEADING = re.compile(r"^[A-Z]\w+$")
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_MADE_UP = re.compile(r"^[a-z][a-z_-]*(\.\d+)+$")
"""The names that XLA gives to operations of its own: ``broadcast.333``."""

_FRAME = re.compile(r"stack_frame_id=(\d+)")
_CALLED = re.compile(r"(?:calls|to_apply)=%?([^\s,}]+)")
_OPCODE = re.compile(r"(?:^|\s)([a-z][\w-]*)\(")
_NAMED = re.compile(r"%([^\s,(){}]+)")
_TABLES = {
    "FileNames": re.compile(r'^(\d+) "(.*)"$'),
    "FileLocations": re.compile(r"^(\d+) \{file_name_id=(\d+) .*?\bline=(\d+)"),
    "StackFrames": re.compile(r"^(\d+) \{file_location_id=(\d+)"),
}


class Instructions:
    """The instructions of a program (HLO as XLA dumps it), by name."""

    def __init__(self, program: str) -> None:
        """Parses a program. Raises ValueError if the text has no instruction."""
        self._definition: dict[str, str] = {}
        self._root_of: dict[str, str] = {}
        self._arguments: set[str] = set()
        self._origin: dict[str, tuple[str, str]] = {}
        self._tables: dict[str, dict[str, tuple[str, ...]]] = {name: {} for name in _TABLES}
        computation = heading = ""
        entry = False
        for line in program.splitlines():
            if found := INSTRUCTION.match(line):
                root, name, definition = found.groups()
                self._definition.setdefault(name, definition)
                if root:
                    self._root_of[computation] = name
                if entry and " parameter(" in definition:
                    self._arguments.add(name)
            elif _HEADING.match(line):
                heading = line
            elif heading in _TABLES and (row := _TABLES[heading].match(line)):
                self._tables[heading][row[1]] = row.groups()[1:]
            elif found := COMPUTATION.match(line):
                entry, computation, heading = found[1] is not None, found[2], ""
        if not self._definition:
            raise ValueError("not the text of a program: no instruction in it")

    def is_argument(self, name: str) -> bool:
        """Returns whether an instruction is an argument of the whole program."""
        return name in self._arguments

    def opcode(self, name: str) -> str | None:
        """Returns what an instruction does (``fusion``, ``while``); None if the program has no such instruction."""
        found = _OPCODE.search(self._definition.get(name, ""))
        return None if found is None else found[1]

    def origin(self, name: str) -> tuple[str, str]:
        """Returns the scope and the source line of an instruction, empty if unknown. An argument's scope is its name.

        Instructions that the compiler inserted without metadata (a copy, a collective's start, gradients concatenated
        for one all-reduce) get the origin of the nearest instruction that they call or read.
        """
        if name not in self._origin:
            self._origin[name] = self._find_origin(name)
        return self._origin[name]

    def _find_origin(self, name: str) -> tuple[str, str]:
        nearest, seen = deque([name]), {name}
        while nearest and len(seen) < _FAR:
            looked_at = nearest.popleft()
            definition = self._definition.get(looked_at, "")
            scope = _OP_NAME.search(definition)
            if scope and (self.is_argument(looked_at) or not _MADE_UP.match(scope[1])):
                return scope[1].replace("\\'", "'"), self._source(definition)
            called = [self._root_of[c] for c in _CALLED.findall(definition) if c in self._root_of]
            # What follows the operands (a loop's body, control dependencies) is not an origin.
            read = instruction(looked_at, definition).operands if definition else ()
            # For a part of a tuple, %x#1, this is the tuple.
            for other in (*called, *(operand.partition("#")[0] for operand in read)):
                if other not in seen:
                    seen.add(other)
                    nearest.append(other)
        return "", ""

    def _source(self, definition: str) -> str:
        frame = _FRAME.search(definition)
        if frame is None or frame[1] not in self._tables["StackFrames"]:
            return ""
        file, number = self._tables["FileLocations"][self._tables["StackFrames"][frame[1]][0]]
        return f"{self._tables['FileNames'][file][0]}:{number}"
