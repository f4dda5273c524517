"""What a network's configuration alone says about it, and everything that the rest of the program asks of an
architecture.

An architecture is one file of this folder: a frozen dataclass of sizes that is an `Architecture`, and the `Target` that
it makes. `registry.py` lists the architectures; nothing else names one.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass
from math import isfinite
from typing import Any, ClassVar, Literal, TypeVar, get_args, get_origin, get_type_hints

import jax

from param_decomp_jax.decomposition.sites import Matrix, Sites
from param_decomp_jax.sharding.memory import MemoryPolicy
from param_decomp_jax.sharding.mesh import Axes
from param_decomp_jax.targets.base import Target
from param_decomp_jax.targets.points import Point

A = TypeVar("A")


class UnsupportedConfig(ValueError):
    """A configuration that an architecture does not support. The message names the key and what would be right."""


@dataclass(frozen=True)
class TokenInputs:
    """Inputs are token ids ``[B, T]`` below ``vocab_size``; T is at most ``longest`` (None: no limit is known)."""

    vocab_size: int
    longest: int | None


@dataclass(frozen=True)
class FeatureInputs:
    """Inputs are sparse features ``[B, n_features]``, an active one U[``low``, 1)."""

    n_features: int
    low: float


@dataclass(frozen=True)
class Tensors:
    """Where safetensors files keep an array of the weights.

    ``names``: the name of one tensor or, if ``stacked``, of one tensor per layer; of ``per_layer`` tensors per layer if
    the array has an axis of experts after that of layers. ``transposed``: whether tensors are stored as ``[d_out,
    d_in]``.
    """

    names: tuple[str, ...]
    stacked: bool = False
    transposed: bool = False
    per_layer: int | None = None


class Architecture(ABC):
    """The sizes of a network. A subclass is a frozen dataclass; its fields are what a run's `target.json` keeps."""

    name: ClassVar[str]
    """The key of the registry: `model_type` (for toys, `architecture`) in `config.json`."""
    title: ClassVar[str]
    """The name for people: ``Llama``."""
    experiment: ClassVar[str] = "language_model"
    """The name of a run that decomposes it in a configuration."""
    model_classes: ClassVar[tuple[str, ...]] = ()
    """Classes that a schema file's `target.spec.model_class` may name, without their module."""
    published: ClassVar[Mapping[str, "Architecture"]] = {}
    """The sizes of published models by hub id, or by wandb run, for use without their `config.json`."""
    published_dtype: ClassVar[str] = "bfloat16"
    """The dtype in which published models are stored."""
    prefix: ClassVar[str] = ""
    """A prefix that the tensor names in a file may have, all or none of them."""
    unread_tensors: ClassVar[tuple[str, ...]] = ()
    """Patterns (fnmatch) of tensors that files may hold besides those of `tensors` and that follow from the
    configuration: masks, rotary frequencies. They never include a matrix that training could change (see
    `tied_tensors`)."""
    other_names: ClassVar[Mapping[str, str]] = {}
    """Other names that files may have for tensors, by their names here."""

    @property
    @abstractmethod
    def inputs(self) -> TokenInputs | FeatureInputs:
        """What the network reads."""

    @abstractmethod
    def matrices(self) -> tuple[Matrix, ...]:
        """Every matrix that can be a site, in canonical order."""

    def attention_matrices(self) -> tuple[Matrix, ...]:
        """The matrices with one side divided into attention heads (H1)."""
        faced = ((matrix, matrix.faces) for matrix in self.matrices())
        return tuple(matrix for matrix, units in faced if units is not None and units.kind == "attention_head")

    def points(self) -> tuple[Point, ...]:
        """The activations that losses can compare in addition to the output (R6), in order; none without a residual
        stream."""
        return ()

    @property
    def residual_width(self) -> int | None:
        """The width of the residual stream; None without one."""
        return None

    @abstractmethod
    def weight_shapes(self) -> dict[str, Any]:
        """Returns the shape of every array, in the structure of the weights."""

    @abstractmethod
    def tensors(self) -> dict[str, Any]:
        """Returns the `Tensors` of every array, in the structure of the weights."""

    @property
    def tied_tensors(self) -> tuple[str, str] | None:
        """The names of two tensors that are one matrix in this network, the one in `tensors` first; None without such a
        pair. A file may hold either or both. If it holds two that differ, the network is `untied`."""
        return None

    def untied(self) -> "Architecture":
        """Returns the same network with a separate matrix for each of `tied_tensors`."""
        raise NotImplementedError(f"{self.title} has no tied tensors")

    @abstractmethod
    def target(self, sites: Sites, memory: MemoryPolicy, compute_dtype: Any) -> Target:
        """Returns the network with these sites. ``compute_dtype``: as in N1."""

    @abstractmethod
    def describe(self) -> str:
        """Returns one line for people: kind and sizes."""

    def weight_axes(self) -> dict[str, Any]:
        """Returns the logical axes of every array, in the structure of the weights. Matrices are split by output."""
        return axes_by_name(self.weight_shapes(), lambda name: "norm" not in name and "bias" not in name)

    @classmethod
    def from_config(cls, raw: Mapping[str, Any]) -> "Architecture":
        """Returns the architecture that a `config.json` describes; by default it reads the fields of the dataclass.
        Raises UnsupportedConfig, with the key's name, for what is missing, wrong or not supported."""
        return read_fields(cls, {key: value for key, value in raw.items() if key not in ("model_type", "architecture")})

    def to_config(self, dtype: str, eos_token_id: int | None) -> dict[str, Any]:
        """Returns the `config.json` from which `from_config` makes this architecture again. ``dtype``: that of the
        stored weights. ``eos_token_id``: for programs that generate text."""
        return {"model_type": self.name, **asdict(self)}  # type: ignore[call-overload]

    @classmethod
    def from_fields(cls, raw: Mapping[str, Any]) -> "Architecture":
        """Returns the architecture with these fields, as JSON has them (`dataclasses.asdict`). Raises UnsupportedConfig
        for others."""
        return read_fields(cls, raw)


LARGEST = {"n_layers": 4096, "n_hidden_layers": 4096}
"""The most layers that an architecture may have: each needs names, records and a part of a program."""
WIDEST = 1 << 24
"""The largest value of all other sizes, such as widths and vocabularies."""


def check_sizes(architecture: Architecture) -> None:
    """Raises UnsupportedConfig unless every size is a whole number that a network can have, and every other number is
    finite. A file of a few bytes must not make the program ask for gigabytes."""
    kinds = get_type_hints(type(architecture))
    for field in fields(architecture):  # type: ignore[arg-type]
        value, least = getattr(architecture, field.name), field.metadata.get("least", 1)
        if kinds[field.name] is int and type(value) is not int:
            raise UnsupportedConfig(f"{field.name}: should be a whole number, not {value!r}")
        parts = asdict(value) if is_dataclass(value) and not isinstance(value, type) else {field.name: value}
        for name, number in parts.items():
            most = LARGEST.get(name, WIDEST)
            if type(number) is int and not least <= number <= most:
                raise UnsupportedConfig(f"{name}: should be a whole number from {least} to {most:,}, not {number:,}")
            if type(number) is float and not isfinite(number):
                raise UnsupportedConfig(f"{name}: should be a finite number, not {number}")


def is_shape(x: object) -> bool:
    """Returns whether ``x`` is a leaf of `Architecture.weight_shapes`."""
    return isinstance(x, tuple)


def axes_by_name(shapes: Any, is_split: Callable[[str], bool]) -> Any:
    """Returns the logical axes of arrays. The last axis is split if ``is_split`` says so for the array's name."""

    def axes(path: tuple[Any, ...], shape: tuple[int, ...]) -> Axes:
        return Axes((*(None,) * (len(shape) - 1), "split" if is_split(path[-1].key) else None))

    return jax.tree_util.tree_map_with_path(axes, shapes, is_leaf=is_shape)


def read_fields(cls: type[A], raw: Mapping[str, Any]) -> A:
    """Returns a dataclass of numbers, switches and choices from a mapping that has exactly its fields.

    Whole numbers must be at least 1, or what the field's metadata gives as ``least``. Raises UnsupportedConfig.
    """
    known = {field.name: field for field in fields(cls)}  # type: ignore[arg-type]
    types = get_type_hints(cls)
    for key in raw:
        if key not in known:
            raise UnsupportedConfig(f"unknown key {key!r}; the keys are {', '.join(known)}")
    for key, field in known.items():
        if key not in raw and field.default is MISSING:
            raise UnsupportedConfig(f"{key}: is required")
    return cls(**{key: _checked(key, value, types[key], known[key].metadata) for key, value in raw.items()})


def _checked(key: str, value: Any, kind: Any, metadata: Mapping[str, Any]) -> Any:
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            raise UnsupportedConfig(f"{key}: should be one of {', '.join(get_args(kind))}, not {value!r}")
        return value
    if kind is int:
        least = metadata.get("least", 1)
        if type(value) is not int or value < least:
            raise UnsupportedConfig(f"{key}: should be a whole number of at least {least}, not {value!r}")
        return value
    if kind is bool:
        if type(value) is not bool:
            raise UnsupportedConfig(f"{key}: should be true or false, not {value!r}")
        return value
    assert kind is float, f"{key}: a field of type {kind}"
    low, high = metadata.get("range", (0.0, float("inf")))
    if type(value) not in (int, float) or not low <= value < high:
        raise UnsupportedConfig(f"{key}: should be a number in [{low}, {high}), not {value!r}")
    return float(value)
