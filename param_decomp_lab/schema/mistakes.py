"""Mistakes in a configuration: where they are, what is said of them, and how pydantic's errors are put into words."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

from param_decomp_lab.errors import UserError
from param_decomp_lab.safe_io.printable import first_few
from param_decomp_lab.schema.spelling import nearest

SHOWN_MISTAKES = 40
"""Mistakes that a message lists at most."""
REQUIRED = "is required"

Wrong = tuple[str, str]
"""A broken rule: the key, relative to the model ("" for the model itself), and a message that says how to fix it."""


@dataclass(frozen=True)
class Mistake:
    """A mistake in the configuration: dotted path of the key, and a message that says how to fix it."""

    key: str
    message: str

    def below(self, path: str) -> "Mistake":
        """The same mistake, with its key relative to the parent of ``path``."""
        return Mistake(".".join(part for part in (path, self.key) if part), self.message)


@dataclass(frozen=True)
class ConfigSource:
    """Origin of a configuration: a file, and the `--set` assignments (dotted path, text) applied to it.

    ``origins``: of a file in another form, what its keys are by today's, the longest first.
    """

    file: str
    assignments: tuple[tuple[str, str], ...] = ()
    origins: tuple[tuple[str, str], ...] = ()

    def error(self, mistakes: Iterable[Mistake]) -> UserError:
        """An error that lists the mistakes, one per line; of very many, the first."""
        return UserError("\n".join(first_few(map(self.line, mistakes), SHOWN_MISTAKES)))

    def line(self, mistake: Mistake) -> str:
        """One line: file, the last assignment that affects the key (if any), key, message."""
        texts = [text for path, text in self.assignments if _touches(path, mistake.key)]
        by = f" with --set {texts[-1]}" if texts else ""
        given = mistake.key if texts else self.key_in_file(mistake.key)
        key = f"{given}: " if given else ""
        return f"{self.file}{by}: {key}{mistake.message}"

    def key_in_file(self, key: str) -> str:
        """What a key of today's form is called in the file."""
        for ours, theirs in self.origins:
            if key == ours or key.startswith(f"{ours}."):
                return theirs + key[len(ours) :]
        return key


def _touches(path: str, key: str) -> bool:
    return bool(key) and (path == key or path.startswith(f"{key}.") or key.startswith(f"{path}."))


def rule_error(*mistakes: Wrong) -> PydanticCustomError:
    """The error that a validator raises, from pairs of a key (relative to the model; "" for itself) and a message."""
    text = "; ".join(f"{key}: {message}" if key else message for key, message in mistakes)
    return PydanticCustomError("rule", "{text}", {"text": text, "mistakes": mistakes})


def mistakes_of(error: ValidationError, raw: object) -> Iterator[Mistake]:
    """The mistakes that a validation of ``raw`` has found, with keys relative to it."""
    for details in error.errors():
        missing = details["type"] == "missing"
        path = list(_path(details["loc"][:-1] if missing else details["loc"], raw))
        context = details.get("ctx", {})
        if details["type"] == "rule":
            for key, message in context["mistakes"]:
                yield Mistake(".".join([*path, key] if key else path), message)
        elif missing:
            yield Mistake(".".join([*path, str(details["loc"][-1])]), REQUIRED)
        else:
            yield Mistake(".".join(path), _message(details, context))


def _path(location: tuple[int | str, ...], raw: object) -> Iterator[str]:
    """Pydantic's location without the tags of unions, which are not keys of the file."""
    for part in location:
        inside = range(len(raw)) if isinstance(raw, list) else raw if isinstance(raw, dict) else ()
        if part in inside:
            raw = raw[part]  # type: ignore[index]
            yield str(part)


def shown(given: object) -> str:
    """A value of the file as a message has it."""
    text = json.dumps(given) if given is None or isinstance(given, bool) else repr(given)  # null, true, false
    return text if len(text) <= 60 else f"{text[:57]}..."


def _message(details: ErrorDetails, context: dict[str, Any]) -> str:
    given = shown(details["input"])
    match details["type"]:
        case "union_tag_invalid":
            return (
                f"unknown {context['discriminator']} '{context['tag']}'; {nearest(str(context['tag']), tags(context))}"
            )
        case "union_tag_not_found":
            return f"{tag_key(context)} is required, to say which kind this is; got {given}"
        case "too_short":
            return f"needs at least {context['min_length']} item(s), not {context['actual_length']}"
        case "too_long":
            return f"takes at most {context['max_length']} item(s), not {context['actual_length']}"
        case "tuple_type":
            return f"should be a list, not {given}"
        case "model_type" | "model_attributes_type" | "dict_type":
            return f"should be a mapping, not {given}"
        case "path_type":
            return f"should be a path, not {given}"
        case "string_type":
            return f"should be a string, not {given}: put it in quotes if it is meant as text"
        case _:
            message = details["msg"].replace("Input should be", "should be").replace("String should", "should")
            return f"{message}, not {given}"


def tag_key(context: dict[str, Any]) -> str:
    """The key that says of which kind a mapping is."""
    return str(context["discriminator"]).strip("'")


def tags(context: dict[str, Any]) -> list[str]:
    return [tag.strip().strip("'") for tag in context["expected_tags"].split(",")]
