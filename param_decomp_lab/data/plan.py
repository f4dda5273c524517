"""Decides what to tokenize and how, before anything is read. A plan has everything that the written bytes depend on."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Literal

from param_decomp_lab.data.meta import Split
from param_decomp_lab.data.records import TEXT, Column
from param_decomp_lab.data.spans import FileSpan, Span
from param_decomp_lab.errors import UserError
from param_decomp_lab.safe_io.json_text import INTEGER
from param_decomp_lab.safe_io.printable import shortened

UNIT_BYTES = 1 << 24
"""Approximate bytes of text in a unit."""
LONGEST_ROW = 1 << 24
"""Longest row in tokens: beyond what any model reads, yet small enough that a few rows fit into memory."""
MOST_UNITS = 2048
"""The largest number of units of files that can be cut; a larger text gets larger units."""
FORMAT = 1
"""Version of the written format. Another version writes different bytes for the same text."""

Role = Literal["by hash", "train", "eval"]
"""The split of a unit's text: chosen by the hashes of its pieces, or one of the two."""


@dataclass(frozen=True)
class Settings:
    """``eval_fraction``: share of the text that is held out, if the evaluation has no text of its own. ``seed``:
    chooses the held-out text. ``tokens``, ``eval_tokens``: the most tokens of the training and of the evaluation split;
    without the latter, the text ends where the former is reached. ``row_starts``: for tokenized input, makes a row of
    the first ``seq_len`` ids of each input row, without joining rows. ``skip_bad_records``: counts and names records
    without a document instead of refusing them.

    Raises UserError for a number that is out of range.
    """

    seq_len: int = 512
    eval_fraction: float = 0.05
    seed: int = 0
    rows_per_shard: int = 65_536
    tokens: int | None = None
    eval_tokens: int | None = None
    column: Column = TEXT
    row_starts: bool = False
    # Not in the repr, because setup/named_text.py derives folder names from it and must find those of older runs.
    skip_bad_records: bool = field(default=False, repr=False)

    def __post_init__(self) -> None:
        for name, value, least in (
            ("seq_len", self.seq_len, 2),
            ("rows_per_shard", self.rows_per_shard, 1),
            ("seed", self.seed, 0),
            ("tokens", self.tokens, self.seq_len),
            ("eval_tokens", self.eval_tokens, self.seq_len),
        ):
            if value is not None and value < least:
                raise UserError(f"{name} must be at least {least}; it is {value}")
        if self.seq_len > LONGEST_ROW:
            raise UserError(f"seq_len must be at most {LONGEST_ROW:,}; it is {shortened(str(self.seq_len), 40)}")
        if self.seed >= INTEGER:
            raise UserError(f"seed must be below 2^64; it is {shortened(str(self.seed), 40)}")
        if not 0 < self.eval_fraction < 1:
            raise UserError(
                f"eval_fraction must lie between 0 and 1, as a share of the text; it is {self.eval_fraction}"
            )

    def most_rows(self, split: Split) -> int | None:
        """Returns the largest number of rows of a split; None without a limit."""
        tokens = self.tokens if split == "train" else self.eval_tokens
        return None if tokens is None else tokens // self.seq_len


@dataclass(frozen=True)
class Unit:
    """What one process tokenizes at a time. ``role``: its split."""

    spans: tuple[Span, ...]
    role: Role

    @property
    def size(self) -> int:
        """The approximate size in bytes."""
        return sum(span.size for span in self.spans)

    @property
    def splits(self) -> tuple[Split, ...]:
        return ("train", "eval") if self.role == "by hash" else (self.role,)


@dataclass(frozen=True)
class TokenizePlan:
    """``tokenizer``: `bytes`, or the path of a tokenizer.json; None where the input is tokenized already.
    ``tokenizer_hash``: the hash of its content. ``sources``: where the text is from, for people. ``bos``: the token id
    that rows and documents begin with; None without one.
    """

    units: tuple[Unit, ...]
    settings: Settings
    tokenizer: str | None
    tokenizer_hash: str
    sources: tuple[str, ...]
    bos: int | None = None

    @cached_property
    def options(self) -> dict[str, object]:
        """Returns everything except the text that the bytes depend on, for people to compare."""
        settings = asdict(self.settings)
        if not self.settings.skip_bad_records:
            del settings["skip_bad_records"]  # as in work begun by older versions
        begins = {} if self.bos is None else {"bos": self.bos}
        return {"format": FORMAT, **settings, "tokenizer": self.tokenizer_hash, **begins}

    @cached_property
    def inputs_hash(self) -> str:
        """A hash that differs if the text or its division into units does."""
        digest = hashlib.sha256()
        for unit in self.units:
            digest.update(f"\n{unit.role}\n".encode())
            for span in unit.spans:
                digest.update(f"{span.identity}\n".encode(errors="surrogateescape"))
        return digest.hexdigest()

    @property
    def hash(self) -> str:
        """A hash of the plan. Plans with equal hashes write equal bytes."""
        return hashlib.sha256(json.dumps([self.options, self.inputs_hash]).encode()).hexdigest()

    def is_needed(self, number: int, rows_before: Mapping[Split, int]) -> bool:
        """Whether rows of a unit are needed. ``rows_before``: rows of the units before it that are known so far."""
        return not self.is_enough(number, rows_before)

    def is_enough(self, number: int, rows: Mapping[Split, int]) -> bool:
        """Whether the limited splits of a unit have reached their limits with these ``rows``; False without limits."""
        limits = {split: self.settings.most_rows(split) for split in self.units[number].splits}
        found = [rows[split] >= limit for split, limit in limits.items() if limit is not None]
        return bool(found) and all(found)


def cut_units(spans: Sequence[FileSpan], role: Role, unit_bytes: int) -> list[Unit]:
    """Joins spans in order into units of at most about ``unit_bytes``."""
    units: list[Unit] = []
    held: list[Span] = []
    size = 0
    for span in spans:
        if held and size + span.size > unit_bytes:
            units.append(Unit(tuple(held), role))
            held, size = [], 0
        held.append(span)
        size += span.size
    return [*units, Unit(tuple(held), role)] if held else units


def unit_bytes(total: int) -> int:
    """Returns the size of a unit for a text of ``total`` bytes. It does not depend on the machine."""
    return max(UNIT_BYTES, total // MOST_UNITS)
