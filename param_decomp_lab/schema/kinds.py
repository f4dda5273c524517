"""Mappings of several kinds, which their key `type` tells apart, in tables to which kinds can be added.

A table has the models by `type`. In contrast to a union of pydantic's it is looked up when a mapping is validated, so
a model that is registered later is known everywhere.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar, get_args

from pydantic import ValidationInfo, ValidatorFunctionWrapHandler, WrapValidator
from pydantic_core import PydanticKnownError

from param_decomp_lab.schema.strict import Strict

KEY = "type"
Kind = TypeVar("Kind", bound=Strict)


def registered(table: dict[str, type[Kind]]) -> Callable[[type[Kind]], type[Kind]]:
    """A decorator that adds a model to ``table``. Fails by assertion for a `type` that the table has already."""

    def add(model: type[Kind]) -> type[Kind]:
        name = type_of(model)
        assert name not in table, f"two models have the type {name}"
        table[name] = model
        return model

    return add


def type_of(model: type[Strict]) -> str:
    """The one value that the key `type` of a model can have."""
    (name,) = get_args(model.model_fields[KEY].annotation)
    assert isinstance(name, str)
    return name


def by_type(*tables: Mapping[str, type[Strict]]) -> WrapValidator:
    """Validates a mapping as that model of ``tables`` which its `type` names."""

    def validator(raw: Any, _: ValidatorFunctionWrapHandler, info: ValidationInfo) -> Strict:
        known = {name: model for table in tables for name, model in table.items()}
        if isinstance(raw, Strict) and type(raw) in known.values():
            return raw
        if not isinstance(raw, dict):
            raise PydanticKnownError("model_attributes_type")
        if KEY not in raw:
            raise PydanticKnownError("union_tag_not_found", {"discriminator": f"'{KEY}'"})
        name = raw[KEY]
        if not isinstance(name, str) or name not in known:
            tags = ", ".join(f"'{tag}'" for tag in known)
            wrong = {"discriminator": f"'{KEY}'", "tag": str(name), "expected_tags": tags}
            raise PydanticKnownError("union_tag_invalid", wrong)
        return known[name].model_validate(raw, context=info.context)

    return WrapValidator(validator)
