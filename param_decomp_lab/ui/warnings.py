"""Warnings and notes printed before a run starts, in the same form for every command."""

from collections.abc import Iterable

from rich.console import Console
from rich.text import Text

from param_decomp_lab.safe_io.printable import printable


def print_warnings(lines: Iterable[str], console: Console, label: str = "note", wrap: bool = False) -> None:
    """Prints each distinct line once, after ``label``. ``wrap``: wrap lines at the width of the console."""
    for line in dict.fromkeys(lines):
        console.print(Text.assemble((f"{label}: ", "yellow"), printable(line)), soft_wrap=not wrap)
