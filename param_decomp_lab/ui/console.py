"""The console that every command prints with."""

import os
from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from param_decomp_lab.safe_io.printable import printable

WIDTH = 150
"""Width of a wide table if that of the terminal is unknown (output to a file or pipe)."""


class PlainConsole(Console):
    """Prints what it is given as it is: paths and names are not markup or emoji codes, and their control characters
    become visible. Give a ``style``, or a `rich.text.Text`."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(printable(text, len(text)), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """What is given as a `Text`, too. What rich itself sends to the terminal stays."""
        for segment in super().render(renderable, options):
            text = segment.text
            yield segment if segment.control else Segment(printable(text, len(text)), segment.style)


def wide_console() -> PlainConsole:
    """For tables of many columns: as wide as the terminal, or `WIDTH`."""
    console = PlainConsole()
    known = console.is_terminal or "COLUMNS" in os.environ
    return console if known else PlainConsole(width=WIDTH)
