"""Jinja templates beside the module that fills them in; a value that is missing is an error, never a gap."""

from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined


def templates_beside(module: str, *, html: bool = True) -> Environment:
    """``module``: its ``__file__``. Text that is not ``html`` is not escaped, and keeps its last newline."""
    return Environment(
        loader=FileSystemLoader(Path(module).parent),
        autoescape=html,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=not html,
    )
