"""The console that every command prints with."""

from typing import Any

from rich.console import Console
from rich.text import Text

from param_decomp_lab.untrusted.printable import printable


class PlainConsole(Console):
    """Prints strings as they are: paths and names are no markup and no emoji codes, and their control characters become
    visible. Styles are given as `rich.text.Text`."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(printable(text, len(text)), **options)
