"""Reads a file of another generation key by key, and gathers what becomes of its keys."""

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
    """A key that cannot be honoured. ``instead``: a key of the wrapper that stands in for it where it is given."""

    mistake: Mistake
    instead: str | None = None


@dataclass
class Findings:
    """What becomes of the keys of a file.

    ``no_effect``: dotted keys that do not matter here, each with the reason in parentheses. ``notes``: what is supplied
    or has another meaning, one line each, starting with the key. ``lacking``: what cannot be honoured. ``origins``:
    for a dotted key of today's form, the key of the file that it comes from.
    """

    no_effect: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    lacking: list[Lacking] = field(default_factory=list)
    origins: dict[str, str] = field(default_factory=dict)

    def lack(self, key: str, why: str, instead: str | None = None) -> None:
        self.lacking.append(Lacking(Mistake(key, why), instead))


def shown(value: Any) -> str:
    """A value for a message."""
    text = {None: "null", True: "true", False: "false"}[value] if value is None or isinstance(value, bool) else value
    return shortened(printable(str(text)), 60)


class Section:
    """A mapping of the file, of which keys are taken one by one.

    ``kind``: under which it stands in the tables. A value that is not a mapping is a mistake, and read as an empty one.
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
        """The dotted path of a key."""
        return f"{self.path}.{key}" if self.path else key

    def take(self, key: str, default: Any = None) -> Any:
        """The value of a key, ``default`` where it is absent or null."""
        self._taken.add(key)
        value = self._raw.get(key)
        return default if value is None else value

    def keep(self, *keys: str) -> Tree:
        """These keys as they are, those that the file has."""
        self._taken.update(keys)
        return {key: self._raw[key] for key in keys if key in self._raw}

    def keep_rest(self) -> Tree:
        """All keys that nothing has taken and that no table knows, as they are: today's schema judges them."""
        self._judge_by_tables()
        return self.keep(*(key for key in self._raw if key not in self._taken))

    def section(self, key: str, kind: str) -> "Section | None":
        """The mapping at a key; None where it is absent or null."""
        value = self.take(key)
        return None if value is None else Section(value, self.at(key), kind, self.findings)

    def sections(self, key: str, kind: str) -> Iterator["Section"]:
        """The mappings of a list."""
        entries = self.take(key, [])
        if not isinstance(entries, list):
            self.findings.lack(self.at(key), f"should be a list, not {shown(entries)}")
            return
        for n, entry in enumerate(entries):
            yield Section(entry, f"{self.at(key)}.{n}", kind, self.findings)

    def lack(self, key: str, why: str, instead: str | None = None) -> None:
        """A key that cannot be honoured; ``why`` follows its value."""
        self._taken.add(key)
        value = self._raw.get(key)
        said = "is given" if isinstance(value, dict | list) else f"is {shown(value)}"
        self.findings.lack(self.at(key), f"{said}; {why}", instead)

    def close(self, *known: str) -> None:
        """Judges every key that nothing has taken. ``known``: keys that the section could have besides."""
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
