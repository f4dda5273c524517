"""Reads a file of another generation key by key, and records what becomes of its keys."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from param_decomp_lab.config.generations.tables import LACKING, NO_EFFECT
from param_decomp_lab.safe_io.printable import printable, shortened
from param_decomp_lab.schema.mistakes import Mistake
from param_decomp_lab.schema.spelling import nearest

Tree = dict[str, Any]


@dataclass(frozen=True)
class Lacking:
    """An unsupported key. ``instead``: a key of the wrapper that replaces it, if given."""

    mistake: Mistake
    instead: str | None = None


@dataclass
class Findings:
    """Records what becomes of the keys of a file.

    ``no_effect``: dotted keys without effect here, each with the reason in parentheses. ``notes``: what is added or has
    another meaning, one line each, starting with the key. ``lacking``: unsupported keys. ``origins``: for a dotted key
    of the current form, the key of the file that it comes from.
    """

    no_effect: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    lacking: list[Lacking] = field(default_factory=list)
    origins: dict[str, str] = field(default_factory=dict)

    def lack(self, key: str, why: str, instead: str | None = None) -> None:
        self.lacking.append(Lacking(Mistake(key, why), instead))


def shown(value: Any) -> str:
    """Formats a value for a message."""
    text = {None: "null", True: "true", False: "false"}[value] if value is None or isinstance(value, bool) else value
    return shortened(printable(str(text)), 60)


class Section:
    """A mapping of the file, whose keys are taken one by one.

    ``kind``: its name in the tables. A value that is not a mapping is a mistake, and is read as an empty mapping.
    """

    def __init__(self, raw: Any, path: str, kind: str, findings: Findings) -> None:
        self.path, self.kind, self.findings = path, kind, findings
        self._taken: set[str] = set()
        if not isinstance(raw, dict):
            findings.lack(path, f"should be a mapping, not {shown(raw)}")
        self._raw: Mapping[str, Any] = raw if isinstance(raw, dict) else {}

    def __contains__(self, key: str) -> bool:
        return self._raw.get(key) is not None

    def at(self, key: str) -> str:
        """Returns the dotted path of a key."""
        return f"{self.path}.{key}" if self.path else key

    def take(self, key: str, default: Any = None) -> Any:
        """Returns the value of a key; ``default`` if it is absent or null."""
        self._taken.add(key)
        value = self._raw.get(key)
        return default if value is None else value

    def keep(self, *keys: str) -> Tree:
        """Returns those of these keys that the file has, unchanged."""
        self._taken.update(keys)
        return {key: self._raw[key] for key in keys if key in self._raw}

    def keep_rest(self) -> Tree:
        """Returns, unchanged, all keys that were not taken and are in no table; the current schema validates them."""
        self._judge_by_tables()
        return self.keep(*(key for key in self._raw if key not in self._taken))

    def section(self, key: str, kind: str) -> "Section | None":
        """Returns the mapping at a key; None if it is absent or null."""
        value = self.take(key)
        return None if value is None else Section(value, self.at(key), kind, self.findings)

    def sections(self, key: str, kind: str) -> Iterator["Section"]:
        """Yields the mappings of the list at a key."""
        entries = self.take(key, [])
        if not isinstance(entries, list):
            self.findings.lack(self.at(key), f"should be a list, not {shown(entries)}")
            return
        for n, entry in enumerate(entries):
            yield Section(entry, f"{self.at(key)}.{n}", kind, self.findings)

    def lack(self, key: str, why: str, instead: str | None = None) -> None:
        """Records an unsupported key; ``why`` follows its value."""
        self._taken.add(key)
        value = self._raw.get(key)
        said = "is given" if isinstance(value, dict | list) else f"is {shown(value)}"
        self.findings.lack(self.at(key), f"{said}; {why}", instead)

    def close(self, *known: str) -> None:
        """Reports every key that was not taken. ``known``: further keys that the section could have."""
        self._judge_by_tables()
        for key in self._raw:
            if key not in self._taken:
                names = (*known, *self._taken, *NO_EFFECT.get(self.kind, {}), *LACKING.get(self.kind, {}))
                self.findings.lack(
                    self.at(key), f"unknown key '{shown(key)}'; {nearest(str(key), dict.fromkeys(names))}"
                )

    def _judge_by_tables(self) -> None:
        for key, why in NO_EFFECT.get(self.kind, {}).items():
            if key in self._raw and key not in self._taken:
                self._taken.add(key)
                if self._raw[key] is not None:
                    self.findings.no_effect.append(f"{self.at(key)} ({why})")
        for key, (why, harmless) in LACKING.get(self.kind, {}).items():
            if key in self._raw and key not in self._taken:
                self._taken.add(key)
                if self._raw[key] is not None and self._raw[key] not in harmless:
                    self.lack(key, why)
