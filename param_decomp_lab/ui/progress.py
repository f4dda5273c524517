"""How far a command has come."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

Report = Callable[[str, int, int], None]
"""Gets what is being done, how much of it is done, and how much there is at most."""


@contextmanager
def progress(console: Console) -> Iterator[Report]:
    """A bar on a terminal; elsewhere a line for each thing that begins."""
    if not console.is_terminal:
        said: set[str] = set()

        def say(what: str, done: int, total: int) -> None:
            del done, total
            if what not in said:
                said.add(what)
                console.print(f"{what} …", highlight=False, soft_wrap=True)

        yield say
        return
    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("reading", total=None)

        def show(what: str, done: int, total: int) -> None:
            bar.update(task, description=what, completed=done, total=total)

        yield show
