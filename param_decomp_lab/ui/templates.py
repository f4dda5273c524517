"""Jinja templates stored beside the module that renders them; an undefined variable is an error."""

from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined


def templates_beside(module: str, *, html: bool = True) -> Environment:
    """An environment for the templates in the folder of ``module`` (a ``__file__``), and for the shared `base.css`.

    ``html``: escape values. Otherwise nothing is escaped, and a template keeps its trailing newline.
    """
    return Environment(
        loader=FileSystemLoader([Path(module).parent, Path(__file__).parent]),
        autoescape=html,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=not html,
    )
