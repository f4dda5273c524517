"""All commands of `pd`, in the order of its help. Exit status 0 success, 1 failed, 2 bad input, 3 does not fit, 75
preempted and saved."""

import errno
import os
import platform
import sys
from collections.abc import Callable
from functools import wraps
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from param_decomp_lab.cli import data, share, weights
from param_decomp_lab.cli.browse import browse
from param_decomp_lab.cli.check import check
from param_decomp_lab.cli.claim import claim
from param_decomp_lab.cli.cluster import cluster
from param_decomp_lab.cli.compare import compare
from param_decomp_lab.cli.configs import configs
from param_decomp_lab.cli.demo import demo
from param_decomp_lab.cli.eval import evaluate
from param_decomp_lab.cli.export import export
from param_decomp_lab.cli.fit import fit
from param_decomp_lab.cli.graph import graph
from param_decomp_lab.cli.harvest import harvest
from param_decomp_lab.cli.import_run import import_run
from param_decomp_lab.cli.label import label
from param_decomp_lab.cli.launch import launch
from param_decomp_lab.cli.pretrain import pretrain
from param_decomp_lab.cli.probe import probe
from param_decomp_lab.cli.profile import profile
from param_decomp_lab.cli.report import report
from param_decomp_lab.cli.runs import runs
from param_decomp_lab.cli.train import train
from param_decomp_lab.cli.wandb import send
from param_decomp_lab.errors import CannotFetch, CannotTell, CannotWrite, NonFiniteLoss, UserError
from param_decomp_lab.folders import FULL_ERRORS
from param_decomp_lab.safe_io.paths import path_mistake
from param_decomp_lab.safe_io.printable import printable, shortened
from param_decomp_lab.ui.console import PlainConsole
from param_decomp_lab.version import __version__

app = typer.Typer(
    no_args_is_help=True, rich_markup_mode="markdown", pretty_exceptions_enable=False
)  # fmt: skip


def _show_version(asked: bool) -> None:
    if not asked:
        return
    from param_decomp_lab.runs.folder import commit_of_the_code

    commit = commit_of_the_code()
    python, jax = platform.python_version(), version("jax")
    print(f"param-decomp {__version__}{f', commit {commit}' if commit else ''}")
    print(f"Python {python}, JAX {jax}, {platform.platform()}")
    raise typer.Exit


@app.callback()
def _options(
    show_version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit."),
    ] = False,
) -> None:
    """Parameter decomposition: take a trained network's matrices apart into rank-one components."""


PANELS: dict[str, dict[str, Callable[..., None] | typer.Typer]] = {
    "Start": {"demo": demo, "configs": configs, "data": data.app, "weights": weights.app, "pretrain": pretrain},
    "Plan": {"check": check, "probe": probe, "fit": fit},
    "Train": {"train": train, "launch": launch, "profile": profile, "import": import_run},
    "Measure": {"runs": runs, "report": report, "eval": evaluate, "claim": claim, "compare": compare},
    "Look": {"harvest": harvest, "browse": browse, "graph": graph, "cluster": cluster, "label": label},
    "Share": {"share": share.app, "export": export, "wandb": send},
}
"""The commands by name, in the panels and the order of `pd --help`."""

for _panel, _commands in PANELS.items():
    for _name, _command in _commands.items():
        if isinstance(_command, typer.Typer):
            app.add_typer(_command, name=_name, rich_help_panel=_panel)
        else:
            app.command(_name, rich_help_panel=_panel)(_command)


def _check_paths(command: Callable[..., None]) -> Callable[..., None]:
    """The command, which refuses every path that cannot be one before it does any work."""

    @wraps(command)  # typer reads the signature
    def checked(**arguments: Any) -> None:
        for name, value in arguments.items():
            for path in value if isinstance(value, list) else [value]:
                wrong = path_mistake(str(path)) if isinstance(path, Path) else ""
                if wrong:
                    raise UserError(f"{name}: {printable(str(path), 200)} {wrong}")
        command(**arguments)

    return checked


for _group in (app, data.app, weights.app, share.app):
    for _registered in _group.registered_commands:
        assert _registered.callback is not None
        _registered.callback = _check_paths(_registered.callback)


def main() -> None:
    """Entry point: a user's mistake is one message and status 2, never a traceback; a machine that has no room left is
    one message and status 1."""
    try:
        try:
            app()
        finally:
            sys.stdout.flush()  # here, where an error is a message; when Python exits it would be a traceback
    except BrokenPipeError:  # the reader, such as `head`, has enough
        _drop_output()
        raise SystemExit(1) from None
    except UserError as error:
        _fail(str(error), 2)
    except (NonFiniteLoss, CannotFetch, CannotTell, CannotWrite) as error:
        _fail(str(error), 1)
    except OSError as error:
        message, status = _what_the_system_refuses(error)
        if not message:
            raise
        _drop_output()
        _fail(message, status)
    except Exception as error:
        if not isinstance(error, MemoryError) and "RESOURCE_EXHAUSTED" not in str(error):
            raise
        _fail(f"not enough memory: {shortened(str(error), 300) or 'the system gives no more'}", 1)
    sys.exit(0)


def _drop_output() -> None:
    """Drops what is printed and not written yet, and cannot be: else Python tries once more when it exits."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _what_the_system_refuses(error: OSError) -> tuple[str, int]:
    """The message for an error of the system that no command has dealt with, and the exit status; "" for one that says
    nothing about what the user or the machine could do otherwise."""
    name = f": {error.filename}" if error.filename is not None else ""
    if error.errno == errno.ENAMETOOLONG:
        return f"the name is too long for a file{shortened(name, 300)}; choose a shorter one", 2
    if error.errno in (*FULL_ERRORS, errno.EROFS):
        then = (
            "free some space and start again" if error.errno in FULL_ERRORS else "start again on a writable file system"
        )
        return f"nothing more can be written{name} ({error.strerror}); {then}", 1
    try:
        os.getcwd()
    except OSError:
        return "the current folder no longer exists; cd to one that does", 2
    return "", 1


def _fail(message: str, status: int) -> None:
    text = Text.assemble(("error:", "bold red"), f" {printable(message)}")
    PlainConsole(stderr=True).print(text, soft_wrap=True, highlight=False)
    raise SystemExit(status)
