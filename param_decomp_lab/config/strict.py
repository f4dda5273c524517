"""Base classes of the configuration: frozen models that refuse unknown keys, and errors that say how to fix them."""

import difflib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic import Strict as Strictness
from pydantic_core import ErrorDetails, PydanticCustomError

from param_decomp_lab.errors import UserError
from param_decomp_lab.safe_io.paths import home_mistake, path_mistake
from param_decomp_lab.safe_io.printable import first_few, printable, shortened

Item = TypeVar("Item")
ListOf = Annotated[tuple[Item, ...], Strictness(False)]  # a YAML list; its items stay strict
Count = Annotated[int, Field(ge=1, lt=2**31)]  # counters are int32 on the device
# A file of a few bytes must not ask for gigabytes. As in `param_decomp_jax/targets/architecture.py`, which imports JAX.
LayerCount = Annotated[int, Field(ge=1, le=4096)]
Width = Annotated[int, Field(ge=1, le=1 << 24)]  # of an array
Natural = Annotated[int, Field(ge=0, lt=2**31)]
Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]

SHOWN_MISTAKES = 40
"""Mistakes that a message lists at most."""
NO_MEANING = object()
"""Marks a key of the torch schema that is accepted and listed by `pd check`, but has no effect."""


class Strict(BaseModel):
    """Base class of a mapping in the configuration. Ints are accepted as floats; nothing else is converted."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    later: ClassVar[frozenset[str]] = frozenset()
    """Keys planned for a later release: refused by name until then."""

    @model_validator(mode="before")
    @classmethod
    def _known_keys(cls, raw: Any) -> Any:
        if isinstance(raw, dict):
            unknown = [str(key) for key in raw if key not in cls.model_fields]
            if unknown:
                # Looking for the nearest valid key of thousands takes minutes.
                some = [shortened(key, 200) for key in unknown[: SHOWN_MISTAKES - 1]]
                shown = [(key, cls._refusal(key)) for key in some]
                rest = len(unknown) - len(shown)
                raise rule_error(*shown, *([("", f"and {rest:,} more unknown keys")] if rest else ()))
        return raw

    @classmethod
    def _refusal(cls, key: str) -> str:
        if key in cls.later:
            return f"'{key}' is not supported yet; remove it"
        return f"unknown key '{key}'; {nearest(key, cls.model_fields)}"


def nearest(wrong: str, valid: Iterable[str]) -> str:
    """The text `did you mean 'x'? (valid: …)` with the valid name most similar to ``wrong``."""
    names = sorted(valid)
    assert names
    (best,) = difflib.get_close_matches(wrong, names, n=1, cutoff=0.0)
    return f"did you mean '{best}'? (valid: {', '.join(names)})"


def rule_error(*mistakes: tuple[str, str]) -> PydanticCustomError:
    """The error that a validator raises, from pairs of a key (relative to the model; "" for itself) and a message."""
    text = "; ".join(f"{key}: {message}" if key else message for key, message in mistakes)
    return PydanticCustomError("rule", "{text}", {"text": text, "mistakes": mistakes})


def check_path(text: str) -> str:
    """``text``, if it can be a path; for validators, which turn the error into a mistake of the key."""
    wrong = path_mistake(text) or home_mistake(text)
    if wrong:
        raise rule_error(("", f"{printable(text, 200)} {wrong}"))
    return text


def expanded_path(path: Path) -> Path:
    """As `check_path`, with `~` expanded."""
    return Path(check_path(str(path))).expanduser()


PathText = Annotated[str, AfterValidator(check_path)]


@dataclass(frozen=True)
class Mistake:
    """A mistake in the configuration: dotted path of the key, and a message that says how to fix it."""

    key: str
    message: str


@dataclass(frozen=True)
class ConfigSource:
    """Origin of a configuration: a file, and the `--set` assignments (dotted path, text) applied to it."""

    file: str
    assignments: tuple[tuple[str, str], ...] = ()

    def error(self, mistakes: Sequence[Mistake]) -> UserError:
        """An error that lists the mistakes, one per line; of very many, the first."""
        return UserError("\n".join(first_few(map(self.line, mistakes), SHOWN_MISTAKES)))

    def line(self, mistake: Mistake) -> str:
        """One line: file, the last assignment that affects the key (if any), key, message."""
        texts = [text for path, text in self.assignments if _touches(path, mistake.key)]
        by = f" with --set {texts[-1]}" if texts else ""
        key = f"{mistake.key}: " if mistake.key else ""
        return f"{self.file}{by}: {key}{mistake.message}"


def _touches(path: str, key: str) -> bool:
    return bool(key) and (path == key or path.startswith(f"{key}.") or key.startswith(f"{path}."))


Model = TypeVar("Model", bound=Strict)


def validate(model: type[Model], raw: object, source: ConfigSource) -> Model:
    """``raw`` as a ``model``. UserError listing all mistakes if it is not valid."""
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
    """Pydantic's location without the tags of unions, which are not keys of the file."""
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
