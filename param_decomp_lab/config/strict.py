"""What every part of the configuration is made of: frozen models without unknown keys, and errors people can act on."""

import difflib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic import Strict as Strictness
from pydantic_core import ErrorDetails, PydanticCustomError

from param_decomp_lab.errors import UserError

Item = TypeVar("Item")
ListOf = Annotated[tuple[Item, ...], Strictness(False)]  # a YAML list; its items stay strict
Count = Annotated[int, Field(ge=1, lt=2**31)]  # counters are int32 on the device
Natural = Annotated[int, Field(ge=0, lt=2**31)]
Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]

NO_MEANING = object()
"""Marks a key (n) of the torch schema: accepted, listed by `pd check`, without effect."""


class Strict(BaseModel):
    """A mapping of the configuration. An int will do for a float; nothing else is converted."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    later: ClassVar[frozenset[str]] = frozenset()
    """Keys that a later release brings: refused by name until then."""

    @model_validator(mode="before")
    @classmethod
    def _known_keys(cls, raw: Any) -> Any:
        if isinstance(raw, dict):
            mistakes = [(str(key), cls._refusal(str(key))) for key in raw if key not in cls.model_fields]
            if mistakes:
                raise rule_error(*mistakes)
        return raw

    @classmethod
    def _refusal(cls, key: str) -> str:
        if key in cls.later:
            return f"'{key}' is not supported yet; remove it"
        return f"unknown key '{key}'; {nearest(key, cls.model_fields)}"


def nearest(wrong: str, valid: Iterable[str]) -> str:
    """`did you mean 'x'? (valid: …)`, however far off ``wrong`` is."""
    names = sorted(valid)
    assert names
    (best,) = difflib.get_close_matches(wrong, names, n=1, cutoff=0.0)
    return f"did you mean '{best}'? (valid: {', '.join(names)})"


def rule_error(*mistakes: tuple[str, str]) -> PydanticCustomError:
    """A validator's error: pairs of a key (below the value at hand; "" for itself) and what is wrong with it."""
    text = "; ".join(f"{key}: {message}" if key else message for key, message in mistakes)
    return PydanticCustomError("rule", "{text}", {"text": text, "mistakes": mistakes})


@dataclass(frozen=True)
class Mistake:
    """One mistake: dotted path of the key, and what is wrong and what would be right."""

    key: str
    message: str


@dataclass(frozen=True)
class ConfigSource:
    """Where configuration came from: a file, and the `--set` assignments (dotted path, text) made on it."""

    file: str
    assignments: tuple[tuple[str, str], ...] = ()

    def error(self, mistakes: Sequence[Mistake]) -> UserError:
        """All mistakes, one line each."""
        return UserError("\n".join(map(self.line, mistakes)))

    def line(self, mistake: Mistake) -> str:
        """File, the last assignment that touches the key if there is one, key, message."""
        texts = [text for path, text in self.assignments if _touches(path, mistake.key)]
        by = f" with --set {texts[-1]}" if texts else ""
        key = f"{mistake.key}: " if mistake.key else ""
        return f"{self.file}{by}: {key}{mistake.message}"


def _touches(path: str, key: str) -> bool:
    return bool(key) and (path == key or path.startswith(f"{key}.") or key.startswith(f"{path}."))


Model = TypeVar("Model", bound=Strict)


def validate(model: type[Model], raw: object, source: ConfigSource) -> Model:
    """``raw`` as a ``model``, or a UserError that lists everything wrong with it."""
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        found = [mistake for details in error.errors() for mistake in _mistakes(details, raw)]
        raise source.error(found) from None


def _mistakes(details: ErrorDetails, raw: object) -> Iterator[Mistake]:
    missing = details["type"] == "missing"
    path = list(_path(details["loc"][:-1] if missing else details["loc"], raw))
    context = details.get("ctx", {})
    if details["type"] == "rule":
        for key, message in context["mistakes"]:
            yield Mistake(".".join([*path, key] if key else path), message)
    elif missing:
        yield Mistake(".".join([*path, str(details["loc"][-1])]), "is required")
    else:
        yield Mistake(".".join(path), _message(details, context))


def _path(location: tuple[int | str, ...], raw: object) -> Iterator[str]:
    """Pydantic's location without the tags of unions, which are no keys of the file."""
    for part in location:
        inside = range(len(raw)) if isinstance(raw, list) else raw if isinstance(raw, dict) else ()
        if part in inside:
            raw = raw[part]  # type: ignore[index]
            yield str(part)


def _message(details: ErrorDetails, context: dict[str, Any]) -> str:
    given = details["input"]
    text = json.dumps(given) if given is None or isinstance(given, bool) else repr(given)  # null, true, false
    shown = text if len(text) <= 60 else f"{text[:57]}..."
    match details["type"]:
        case "union_tag_invalid":
            tags = [tag.strip().strip("'") for tag in context["expected_tags"].split(",")]
            return f"unknown {context['discriminator']} '{context['tag']}'; {nearest(str(context['tag']), tags)}"
        case "union_tag_not_found":
            return f"{context['discriminator'].strip(chr(39))} is required, to say which kind this is; got {shown}"
        case "too_short":
            return f"needs at least {context['min_length']} item(s), not {context['actual_length']}"
        case "too_long":
            return f"takes at most {context['max_length']} item(s), not {context['actual_length']}"
        case "tuple_type":
            return f"should be a list, not {shown}"
        case "model_type" | "model_attributes_type" | "dict_type":
            return f"should be a mapping, not {shown}"
        case "path_type":
            return f"should be a path, not {shown}"
        case "string_type":
            return f"should be a string, not {shown}: put it in quotes if it is meant as text"
        case _:
            message = details["msg"].replace("Input should be", "should be").replace("String should", "should")
            return f"{message}, not {shown}"
