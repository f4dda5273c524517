"""The one style of table that all commands print, and tables in Markdown."""

from collections.abc import Iterable, Iterator

from rich import box
from rich.table import Table


def plain_table(title: str, *columns: tuple[str, str]) -> Table:
    """An empty table. ``columns``: heading, and ``left``, ``right``, or ``wrap`` (left-aligned, lines may wrap)."""
    table = Table(
        title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False, min_width=len(title)
    )
    for name, kind in columns:
        wraps = kind == "wrap"
        table.add_column(
            name,
            justify="right" if kind == "right" else "left",
            no_wrap=not wraps,
            overflow="fold" if wraps else "ellipsis",
        )
    return table


def markdown_table(columns: str, rows: Iterable[Iterable[object]]) -> Iterator[str]:
    """Its lines; that of a row is made when it is asked for. ``columns``: as the page has them, with bars between."""
    yield f"| {columns} |"
    yield "|---" * (columns.count("|") + 1) + "|"
    for cells in rows:
        yield f"| {' | '.join(map(str, cells))} |"
