"""The console of all commands: names and messages from outside reach the terminal as text alone."""

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from param_decomp_lab.reading.printable import printable


class PlainConsole(Console):
    """Takes no markup in what it prints, and shows control characters in it as escapes; give a `style`, or a `Text`."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            # What rich itself sends to the terminal stays.
            yield segment if segment.control else Segment(printable(segment.text), segment.style)
