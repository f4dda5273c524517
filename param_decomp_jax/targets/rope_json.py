"""The rotary embedding of a `config.json`, under every name that its settings have had.

Version 5 of transformers keeps them in the object ``rope_parameters``, version 4 the scaling in ``rope_scaling`` and
the rest beside it; older files have ``type`` in place of ``rope_type``, and those of GPT-NeoX ``rotary_emb_base`` and
``rotary_pct``. A file often holds two spellings of a setting. The value that transformers 5 would take is read, and
whatever else the file says about the same setting must agree with it; otherwise UnsupportedConfig names both keys.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import log
from typing import Any

from param_decomp_jax.nn.rotary import LinearScaling, Llama3Scaling, RopeScaling, YarnScaling
from param_decomp_jax.targets.architecture import UnsupportedConfig
from param_decomp_jax.targets.config_json import ConfigJson, as_number, same_value, shown
from param_decomp_jax.targets.transformer_config import TransformerConfig

DEFAULT_THETA = 10_000.0
"""The base of the rotary embedding in transformers if ``config.json`` does not give one."""
OBJECTS = ("rope_scaling", "rope_parameters")
"""The objects that hold the settings. If both are given, transformers reads only the first."""
THETA_KEYS = ("rope_theta", "rotary_emb_base")
SHARE_KEYS = ("partial_rotary_factor", "rotary_pct")
ORIGINAL = "original_max_position_embeddings"
KNOWN_TYPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class Rope:
    """A rotary embedding. ``theta``: the base. ``scaling``: that of the frequencies. ``share``: the share of a head's
    dimensions that are rotated."""

    theta: float
    scaling: RopeScaling | None
    share: float


def read_rope(c: ConfigJson, longest: int, theta_key: str = "rope_theta", share: float | None = None) -> Rope:
    """Returns the rotary embedding. ``longest``: the model's longest sequence. ``theta_key``: the key of the base
    outside the objects. ``share``: the family's default for the share of rotated dimensions, which is read under
    GPT-NeoX's key if it is outside the object. With None all dimensions are rotated, and another share is refused.

    Raises UnsupportedConfig, with the keys, for two spellings that disagree, parameters for each kind of layer, a
    scaling that is not supported, and numbers that are missing or null.
    """
    if c.raw.get("rope_local_base_freq") is not None:
        raise UnsupportedConfig("rope_local_base_freq is given; a base of their own for some layers is not supported")
    objects = {key: _object(c, key) for key in OBJECTS if c.raw.get(key)}
    readings = {key: _Reading(c, key, found, longest, theta_key, share) for key, found in objects.items()}
    if not readings:
        return _Reading(c, OBJECTS[1], {}, longest, theta_key, share).rope
    if len(readings) == 2:
        _refuse_two(*readings.values())
    return next(iter(readings.values())).rope


def _object(c: ConfigJson, key: str) -> dict[str, Any]:
    value = c.raw[key]
    if not isinstance(value, dict):
        raise UnsupportedConfig(f"{key}: should be an object, not {shown(value)}")
    for inner, entry in value.items():
        if isinstance(entry, dict):
            raise UnsupportedConfig(
                f"{key}.{inner:.60} holds parameters for one kind of layer; in a {c.title} all layers turn alike"
            )
    return value


class _Reading:
    """What one of the two objects says, together with the keys outside of it. ``place``: its key."""

    def __init__(
        self, c: ConfigJson, place: str, found: Mapping[str, Any], longest: int, theta_key: str, share: float | None
    ) -> None:
        self.c, self.place, self.found = c, place, found
        self.said: dict[str, Any] = {}
        """What was read, by the name of the setting."""
        kind = self._one("rope_type", ("rope_type", "type"), (), "default")
        theta = self._number("rope_theta", ("rope_theta",), (theta_key,), DEFAULT_THETA, THETA_KEYS)
        own = SHARE_KEYS[0] if share is None else SHARE_KEYS[1]
        # A null beside the object counts as a missing key, except in GPT-NeoX, whose class has another name for it.
        beside = () if share is None and c.raw.get(own) is None else (own,)
        turning = self._number(SHARE_KEYS[0], SHARE_KEYS[:1], beside, 1.0 if share is None else share, SHARE_KEYS)
        if share is None and turning != 1:
            given = next(n for n, v in self._given(SHARE_KEYS[:1], SHARE_KEYS) if v is not None)
            raise UnsupportedConfig(f"{given} is {turning}; in a {c.title} all dimensions of a head turn")
        self.longest = longest
        scaling = self._scaling(kind)
        self.said["rope_type"] = kind
        self.said |= {} if scaling is None else asdict(scaling)
        self.rope = Rope(theta, scaling, turning)

    # ---- spellings ----

    def _given(self, inside: tuple[str, ...], beside: tuple[str, ...]) -> list[tuple[str, Any]]:
        """Returns what the file holds under these keys, in the object and beside it."""
        own = [(f"{self.place}.{key}", self.found[key]) for key in inside if key in self.found]
        return own + [(key, self.c.raw[key]) for key in beside if key in self.c.raw]

    def _one(
        self, name: str, inside: tuple[str, ...], beside: tuple[str, ...], default: Any, also: tuple[str, ...] = ()
    ) -> Any:
        """Returns the value of the first of these keys that the file has; all others must agree with it. ``beside``:
        keys beside the object. ``also``: keys beside it that transformers does not read there, but which mean the
        same."""
        read = self._given(inside, beside)
        first, value = read[0] if read else (None, default)
        if first is not None and value is None:
            raise UnsupportedConfig(f"{first} is null; leave it out, or give it a value")
        for other, said in read[1:] + [pair for pair in self._given((), also) if pair not in read]:
            if said is not None and not same_value(said, value):
                missing = f"{self.place} has no {name}, which means {shown(default)}"
                raise UnsupportedConfig(
                    f"{other} is {shown(said)}, but "
                    f"{missing if first is None else f'{first} is {shown(value)}'}: keep the right one of the two"
                )
        self.said[name] = value
        return value

    def _number(
        self, name: str, inside: tuple[str, ...], beside: tuple[str, ...], default: float, also: tuple[str, ...] = ()
    ) -> float:
        """Returns a positive number under one of these keys."""
        value = as_number(name, self._one(name, inside, beside, default, also))
        if value <= 0:
            raise UnsupportedConfig(f"{name}: should be a positive number, not {value}")
        self.said[name] = value
        return value

    # ---- scalings ----

    def _scaling(self, kind: Any) -> RopeScaling | None:
        match kind:
            case "default":
                return None
            case "linear":
                return LinearScaling(self._needed("factor"))
            case "llama3":
                return Llama3Scaling(
                    factor=self._needed("factor"),
                    low_freq_factor=self._needed("low_freq_factor"),
                    high_freq_factor=self._needed("high_freq_factor"),
                    original_max_position_embeddings=self._original(),
                )
            case "yarn":
                return self._yarn()
        known = f"{', '.join(map(repr, KNOWN_TYPES[:-1]))} and {KNOWN_TYPES[-1]!r}"
        raise UnsupportedConfig(f"the rotary scaling {kind!r:.60} is not supported; only {known} are")

    def _needed(self, key: str) -> float:
        if self.found.get(key) is None:
            raise UnsupportedConfig(
                f"{self.place} lacks the key '{key}', which the scaling {self.said['rope_type']!r} has"
            )
        return self._optional(key, 0.0)

    def _optional(self, key: str, default: float) -> float:
        """Returns a positive number; a null counts as a missing key."""
        given = self.found.get(key)
        value = as_number(f"{self.place}.{key}", default if given is None else given)
        if value <= 0:
            raise UnsupportedConfig(f"{self.place}.{key}: should be a positive number, not {value}")
        return value

    def _original(self) -> int:
        """Returns the number of positions of the first training. transformers prefers the key beside the object to the
        one in it."""
        beside, inside = self._given((), (ORIGINAL,)), self._given((ORIGINAL,), ())
        read = beside + inside
        if not read:
            return self.longest
        (first, value), others = read[0], read[1:]
        for other, said in others:
            if not same_value(said, value):
                raise UnsupportedConfig(
                    f"{first} is {shown(value)}, but {other} is {shown(said)}: keep the right one of the two"
                )
        number = as_number(first, value)
        if number <= 0 or number != int(number):
            raise UnsupportedConfig(f"{first}: should be a positive whole number, not {number}")
        return int(number)

    def _yarn(self) -> YarnScaling:
        original = self._original()
        if "factor" in self.found and self.found["factor"] is None:
            factor = self.longest / original  # transformers does this for a null, but not for a missing key
        else:
            factor = self._needed("factor")

        def magnitude(scale: float) -> float:
            return 1.0 if factor <= 1 else 0.1 * scale * log(factor) + 1.0

        default = magnitude(1.0)
        if self.found.get("mscale") and self.found.get("mscale_all_dim"):
            default = magnitude(self._optional("mscale", 1.0)) / magnitude(self._optional("mscale_all_dim", 1.0))
        return YarnScaling(
            factor=factor,
            original_max_position_embeddings=original,
            attention_factor=self._optional("attention_factor", default),
            beta_fast=self._optional("beta_fast", 32.0),
            beta_slow=self._optional("beta_slow", 1.0),
            truncate=bool(self.found.get("truncate", True)),
        )


def _refuse_two(first: _Reading, second: _Reading) -> None:
    """Raises UnsupportedConfig unless both objects describe the same embedding."""
    if first.rope == second.rope:
        return
    name = next(key for key in {**first.said, **second.said} if first.said.get(key) != second.said.get(key))
    parts = [
        f"{reading.place} has {name} {shown(reading.said[name])}"
        if name in reading.said
        else f"{reading.place} has none"
        for reading in (first, second)
    ]
    raise UnsupportedConfig(f"{' and '.join(parts)}: keep the right one of the two objects")


def rope_keys(config: TransformerConfig, theta_key: str = "rope_theta") -> dict[str, Any]:
    """Returns the keys of the rotary embedding, for transformers 4 and 5 alike."""
    scaling = None if config.rope_scaling is None else asdict(config.rope_scaling)
    partial = {} if config.rotary_dim is None else {"partial_rotary_factor": config.turning / config.head_dim}
    parameters = {"rope_theta": config.rope_theta, **(scaling or {"rope_type": "default"}), **partial}
    return {theta_key: config.rope_theta, "rope_scaling": scaling, "rope_parameters": parameters}
