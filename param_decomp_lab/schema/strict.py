"""Base classes of the configuration: frozen models that refuse unknown keys, and errors that say how to fix them.

`parse` finds all mistakes of a file at once. A part that is wrong leaves an `Unreadable` where its value would be, and
everything else is checked: a rule that needs the value of a part that is wrong is left out.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, TypeVar, Union, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    ModelWrapValidatorHandler,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)
from pydantic import Strict as Strictness
from pydantic_core import CoreSchema
from pydantic_core.core_schema import with_info_wrap_validator_function

from param_decomp_lab.errors import Unread
from param_decomp_lab.safe_io.paths import home_mistake, path_mistake
from param_decomp_lab.safe_io.printable import printable, shortened
from param_decomp_lab.schema.mistakes import (
    REQUIRED,
    SHOWN_MISTAKES,
    ConfigSource,
    Mistake,
    Wrong,
    mistakes_of,
    rule_error,
    tag_key,
    tags,
)
from param_decomp_lab.schema.spelling import nearest, nearest_alike

NO_MEANING = object()
"""Marks a key of the torch schema that is accepted and listed by `pd check`, but has no effect."""


@dataclass(frozen=True)
class Unreadable:
    """Stands for a value that could not be read. ``mistakes``: why, with keys relative to the value."""

    mistakes: tuple[Mistake, ...]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise Unread(name)

    def __iter__(self) -> Iterator[Any]:
        raise Unread

    def __len__(self) -> int:
        raise Unread


def _or_unreadable(raw: Any, handler: ValidatorFunctionWrapHandler, info: ValidationInfo) -> Any:
    """The validated value; an `Unreadable`, if mistakes are being collected and there are some."""
    if not isinstance(info.context, _Findings):
        return handler(raw)
    if isinstance(raw, Unreadable):
        return raw
    try:
        return handler(raw)
    except ValidationError as error:
        kind = _kind_that_is_meant(error, raw)
        if kind is None:
            return Unreadable(tuple(mistakes_of(error, raw)))
        model = _or_unreadable(raw | kind, handler, info)
        if isinstance(model, Strict) and not kind.keys().isdisjoint(raw):
            info.context.of(model).wrong[:0] = [(mistake.key, mistake.message) for mistake in mistakes_of(error, raw)]
        return model


def _kind_that_is_meant(error: ValidationError, raw: Any) -> dict[str, Any] | None:
    """The key that says of which kind a mapping is, with the right value, where key or value is misspelled."""
    details = error.errors()[0]
    if error.error_count() > 1 or details["loc"] or not isinstance(raw, dict):
        return None
    context = details.get("ctx", {})
    match details["type"]:
        case "union_tag_invalid":
            meant = nearest_alike(str(context["tag"]), tags(context))
            return None if meant is None else {tag_key(context): meant}
        case "union_tag_not_found":
            key = tag_key(context)
            given = [other for other in raw if isinstance(other, str) and nearest_alike(other, [key]) is not None]
            return {key: raw[given[0]]} if given else None
        case _:
            return None


Item = TypeVar("Item")
ListOf = Annotated[tuple[Annotated[Item, WrapValidator(_or_unreadable)], ...], Strictness(False)]
"""A YAML list; its items stay strict."""
Count = Annotated[int, Field(ge=1, lt=2**31)]  # counters are int32 on the device
# A file of a few bytes must not ask for gigabytes. As in `param_decomp_jax/targets/architecture.py`, which imports JAX.
LayerCount = Annotated[int, Field(ge=1, le=4096)]
Width = Annotated[int, Field(ge=1, le=1 << 24)]  # of an array
Natural = Annotated[int, Field(ge=0, lt=2**31)]
Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]

Check = TypeVar("Check", bound=Callable[[Any], Iterator[Wrong]])


def rule(check: Check) -> Check:
    """Marks a method of a `Strict` that yields what is wrong between the model's keys, each with a message.

    A model may have several. Each runs as soon as the values that it asks for were read.
    """
    check.__dict__["is_rule"] = True
    return check


class Strict(BaseModel):
    """Base class of a mapping in the configuration. Ints are accepted as floats; nothing else is converted.

    What is wrong between keys is said by methods marked `rule`, and not by pydantic's `model_validator(mode="after")`,
    which does not run when a key is wrong by itself. Field validators go into the annotation (`Annotated`).
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    later: ClassVar[frozenset[str]] = frozenset()
    """Keys planned for a later release: refused by name until then."""

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        decorators = cls.__pydantic_decorators__
        assert not [found for found in decorators.model_validators.values() if found.info.mode == "after"]

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """The model's schema, in which every field is wrapped in `_or_unreadable`.

        The keys that say which model of a union is meant are not: pydantic takes no wrapped ones, and these are right
        where their model was chosen.
        """
        schema = handler(source)
        inner: Any = handler.resolve_ref_schema(schema)
        while inner["type"] != "model-fields":
            inner = inner["schema"]
        for name, part in inner["fields"].items():
            if not _is_tag(cls.model_fields[name].annotation):
                part = part["schema"] if part["schema"]["type"] == "default" else part
                if part["schema"].get("function", {}).get("function") is not _or_unreadable:
                    part["schema"] = with_info_wrap_validator_function(_or_unreadable, part["schema"])
        return schema

    @model_validator(mode="wrap")
    @classmethod
    def _model(cls, raw: Any, handler: ModelWrapValidatorHandler[Self], info: ValidationInfo) -> Self:
        findings = info.context
        if not isinstance(findings, _Findings):
            unknown = cls._unknown_keys(raw) if isinstance(raw, dict) else {}
            if unknown:
                raise rule_error(*unknown.items())
            known = {key: raw[key] for key in raw if key in cls.model_fields} if isinstance(raw, dict) else raw
            return _obeying(handler(known))
        if not isinstance(raw, dict):
            return handler(raw)
        unknown = cls._unknown_keys(raw)
        spellings = _misspelled(cls, raw)
        known = {key: value for key, value in raw.items() if isinstance(key, str) and key in cls.model_fields}
        known |= {key: raw[given] for key, given in spellings.items()}
        known = _in_place(cls, raw, known)
        for key, info_of_key in cls.model_fields.items():
            if info_of_key.is_required() and not _is_tag(info_of_key.annotation):
                known.setdefault(key, Unreadable((Mistake("", REQUIRED),)))
        model = handler(known)
        unread = {key: value for key, value in model.__dict__.items() if isinstance(value, Unreadable)}
        for key in unread:
            del model.__dict__[key]
        findings.add(model, _Finding(model, unknown, unread, spellings, list(broken_rules(model))))
        return model

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Only called for what a model does not have: values that could not be read."""
            if name in type(self).model_fields:
                raise Unread(name)
            return super().__getattr__(name)

    @classmethod
    def _unknown_keys(cls, raw: dict[Any, Any]) -> dict[str, str]:
        """Messages by unknown key; of thousands, whose nearest names take minutes to find, for the first."""
        refused = {str(key): key for key in raw if key not in cls.model_fields and not cls._is_dropped(key, raw[key])}
        some = [shortened(key, 200) for key in list(refused)[: SHOWN_MISTAKES - 1]]
        rest = len(refused) - len(some)
        return {key: cls._refusal(key) for key in some} | ({"": f"and {rest:,} more unknown keys"} if rest else {})

    @classmethod
    def _is_dropped(cls, key: Any, value: Any) -> bool:
        """Whether an unknown key is passed over."""
        return False

    @classmethod
    def _refusal(cls, key: str) -> str:
        if key in cls.later:
            return f"'{key}' is not supported yet; remove it"
        return f"unknown key '{key}'; {nearest(key, cls.model_fields)}"


def _is_tag(annotation: Any) -> bool:
    """Whether a field can have one value only."""
    return get_origin(annotation) is Literal and len(get_args(annotation)) == 1


def broken_rules(model: Strict) -> Iterator[Wrong]:
    """What the rules of a model find wrong. A rule that needs a value that could not be read is left out."""
    for check in _rules(type(model)):
        yield from as_far_as_read(check, model)


@cache
def _rules(model: type[Strict]) -> tuple[Callable[[Any], Iterator[Wrong]], ...]:
    """The rules of a model and of those it derives from, in the order in which they are written."""
    rules: dict[str, Callable[[Any], Iterator[Wrong]]] = {}
    for owner in reversed(model.__mro__):
        rules |= {name: found for name, found in vars(owner).items() if getattr(found, "is_rule", False)}
    return tuple(rules.values())


Found = TypeVar("Found")


def as_far_as_read(check: Callable[..., Iterable[Found]], *given: Any) -> Iterator[Found]:
    """What ``check`` yields until it asks for a value that could not be read."""
    try:
        yield from check(*given)
    except Unread:
        return


def all_read(items: Iterable[Item]) -> tuple[Item, ...]:
    """The items of a list, for what needs them all. `Unread` if one could not be read."""
    found = tuple(items)
    if any(isinstance(item, Unreadable) for item in found):
        raise Unread
    return found


Obeying = TypeVar("Obeying", bound=Strict)


def _obeying(model: Obeying) -> Obeying:
    wrong = list(broken_rules(model))
    if wrong:
        raise rule_error(*wrong)
    return model


def rule_here(check: Callable[[Any], Iterator[Wrong]]) -> AfterValidator:
    """A rule for the models at one place of the file, as part of that place's annotation (`Annotated`)."""

    def validator(model: Any, info: ValidationInfo) -> Any:
        wrong = list(as_far_as_read(check, model))
        if wrong and isinstance(info.context, _Findings):
            info.context.of(model).wrong.extend(wrong)
        elif wrong:
            raise rule_error(*wrong)
        return model

    return AfterValidator(validator)


@dataclass
class _Finding:
    """What is wrong in a model. ``unknown``: messages by key. ``unread``: values by field. ``spellings``: keys of the
    file by field, where they differ. ``wrong``: broken rules."""

    model: Strict
    unknown: dict[str, str] = field(default_factory=dict)
    unread: dict[str, Unreadable] = field(default_factory=dict)
    spellings: dict[str, str] = field(default_factory=dict)
    wrong: list[Wrong] = field(default_factory=list)


class _Findings:
    """What one validation has found, by model. It is the context of the validation."""

    def __init__(self) -> None:
        self._by_model: dict[int, _Finding] = {}
        """By the id of a model, which stays its own while `_Finding` holds the model."""

    def add(self, model: Strict, finding: _Finding) -> None:
        self._by_model[id(model)] = finding

    def of(self, model: Strict) -> _Finding:
        return self._by_model.setdefault(id(model), _Finding(model))

    def mistakes(self, root: Any) -> list[Mistake]:
        """All mistakes below ``root``, in the order of the schema, each once."""
        misplaced: set[str] = set()
        found = list(self._below(root, "", (), misplaced))
        return list(dict.fromkeys(m for m in found if m.message != REQUIRED or m.key not in misplaced))

    def _below(
        self, value: Any, path: str, above: tuple[tuple[str, type[Strict]], ...], misplaced: set[str]
    ) -> Iterator[Mistake]:
        """Yields the mistakes of ``value``. ``above``: the sections around it, outermost first, with their paths.

        Adds to ``misplaced`` the paths of keys that the file has elsewhere, and that are not missing besides.
        """
        match value:
            case Unreadable(mistakes=mistakes):
                yield from (mistake.below(path) for mistake in mistakes)
            case Strict() if id(value) in self._by_model:
                finding, sections = self._by_model[id(value)], (*above, (path, type(value)))
                for key, message in finding.unknown.items():
                    place = _place_of(key, sections, value)
                    if place is not None:
                        misplaced.add(_joined(place, key))
                        where = f"in {place}" if place else "at the top level of the file"
                        message = f"unknown key '{key}'; it belongs {where}: check its indentation"
                    yield Mistake(key, message).below(path)
                for name in type(value).model_fields:
                    inner = finding.unread[name] if name in finding.unread else value.__dict__[name]
                    below = _joined(path, finding.spellings.get(name, name))
                    yield from self._below(inner, below, sections, misplaced)
                yield from (Mistake(key, message).below(path) for key, message in finding.wrong)
            case tuple():
                for n, item in enumerate(value):
                    yield from self._below(item, _joined(path, str(n)), above, misplaced)
            case dict():
                for key, item in value.items():
                    yield from self._below(item, _joined(path, str(key)), above, misplaced)


def _joined(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _place_of(key: str, sections: tuple[tuple[str, type[Strict]], ...], found: Strict) -> str | None:
    """The section to which a key belongs that is unknown in the last of ``sections``: one around it, or one within it.

    None for a key that belongs to none of them, or that is more likely a misspelled one. ``found``: the last section
    as it was read; where it has a number, a key has no place.
    """
    path, own = sections[-1]
    if nearest_alike(key, own.model_fields) is not None:
        return None
    values = found.__dict__
    within = [(_joined(path, name), model) for name, model in _sections(own) if not isinstance(values.get(name), float)]
    places = [place for place, model in (*reversed(sections[:-1]), *within) if key in model.model_fields]
    return places[0] if places else None


def _in_place(model: type[Strict], raw: dict[Any, Any], known: dict[str, Any]) -> dict[str, Any]:
    """``known``, the values by field, with those of misplaced keys: what belongs to the sections of ``model`` in these,
    and what is in these but belongs to ``model`` itself."""
    found = dict(known)
    left = {key: value for key, value in raw.items() if isinstance(key, str) and key not in model.model_fields}
    for section, inner in _sections(model):
        own = found.get(section)
        if not (own is None or isinstance(own, dict)):
            continue
        theirs = [key for key in left if key in inner.model_fields and nearest_alike(key, model.model_fields) is None]
        moved = {key: left.pop(key) for key in theirs}
        if moved:
            found[section] = moved | (own or {})
        if isinstance(own, dict):
            outer = [key for key in own if key not in inner.model_fields and key in model.model_fields]
            above = {key: own[key] for key in outer if nearest_alike(key, inner.model_fields) is None}
            found = above | found
    return found


def _sections(model: type[Strict]) -> Iterator[tuple[str, type[Strict]]]:
    """Yields the fields that are mappings, and their models."""
    for name, info in model.model_fields.items():
        for kind in _alternatives(info.annotation):
            if isinstance(kind, type) and issubclass(kind, Strict):
                yield name, kind


def _alternatives(annotation: Any) -> Iterator[Any]:
    if get_origin(annotation) is Annotated:
        yield from _alternatives(get_args(annotation)[0])
    elif get_origin(annotation) in (Union, UnionType):
        for part in get_args(annotation):
            yield from _alternatives(part)
    else:
        yield annotation


def _misspelled(model: type[Strict], raw: dict[Any, Any]) -> dict[str, str]:
    """By field that is not given: the unknown key that is probably meant."""
    absent = [name for name in model.model_fields if name not in raw]
    found: dict[str, str] = {}
    for given in [key for key in raw if isinstance(key, str) and key not in model.model_fields][:SHOWN_MISTAKES]:
        meant = nearest_alike(given, absent)
        if meant is not None:
            found.setdefault(meant, given)
    return found


def spelling(model: type[Strict], raw: dict[Any, Any], name: str) -> str | None:
    """The key of ``raw`` that is the field ``name``, or is probably meant to be. None if there is none."""
    return name if name in raw else _misspelled(model, raw).get(name)


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


Model = TypeVar("Model", bound=Strict)


def validate(model: type[Model], raw: object, source: ConfigSource) -> Model:
    """``raw`` as a ``model``. UserError listing all mistakes if it is not valid."""
    found, mistakes = parse(model, raw)
    if mistakes:
        raise source.error(mistakes)
    return found


def parse(model: type[Model], raw: object) -> tuple[Model, list[Mistake]]:
    """``raw`` as a ``model``, and all mistakes in it.

    Where there are mistakes, what could be read is there; to ask for the rest raises `Unread` (`as_far_as_read`).
    """
    with suppress(ValidationError):
        return model.model_validate(raw), []  # several times as fast, for those who read a file again and again
    findings = _Findings()
    try:
        found: Any = model.model_validate(raw, context=findings)
    except ValidationError as error:
        found = Unreadable(tuple(mistakes_of(error, raw)))
    return found, findings.mistakes(found)
