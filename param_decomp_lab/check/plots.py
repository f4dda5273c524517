"""Plots curves in the terminal with braille characters, two by four dots each."""

from collections.abc import Sequence

_BLANK = 0x2800
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
"""Bits of the dots of a braille character, by column from top to bottom."""


def curve(values: Sequence[float | None], height: int) -> list[str]:
    """Lines of braille, ``height`` of them and half as wide as there are values, from 0 up to the greatest value.

    None is left blank. Neighbours far apart are joined.
    """
    top = max((value for value in values if value is not None), default=0.0)
    levels = [None if v is None else _level(v, top, 4 * height - 1) for v in values]
    cells = [[_BLANK] * -(-len(values) // 2) for _ in range(height)]
    before = None
    for x, level in enumerate(levels):
        if level is not None:
            between = (level,) if before is None else _joined(before, level)
            for y in between:
                row, dot = divmod(4 * height - 1 - y, 4)
                cells[row][x // 2] |= _DOTS[x % 2][dot]
        before = level
    return ["".join(map(chr, row)) for row in cells]


def _level(value: float, top: float, highest: int) -> int:
    return round(highest * value / top) if top > 0 else 0


def _joined(before: int, level: int) -> range:
    """The levels from just after ``before`` to ``level``."""
    if level > before:
        return range(before + 1, level + 1)
    return range(level, before) if level < before else range(level, level + 1)
