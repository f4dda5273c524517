"""What people should know before something long is begun, in one form wherever it is told."""

from collections.abc import Iterable

from rich.console import Console
from rich.text import Text


def print_warnings(lines: Iterable[str], console: Console, label: str = "note", wrap: bool = False) -> None:
    """A line each, the same one only once. ``wrap``: broken where the console ends, as tables are."""
    for line in dict.fromkeys(lines):
        console.print(Text.assemble((f"{label}: ", "yellow"), line), soft_wrap=not wrap)
