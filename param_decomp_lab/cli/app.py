"""All commands of `pd`, in the order of its help. Exit status 0 success, 1 failed, 2 bad input, 3 does not fit, 75
preempted and saved."""

import errno
import sys

import typer
from rich.text import Text

from param_decomp_lab.cli import data, weights
from param_decomp_lab.cli.check import check
from param_decomp_lab.cli.configs import configs
from param_decomp_lab.cli.demo import demo
from param_decomp_lab.cli.eval import evaluate
from param_decomp_lab.cli.export import export
from param_decomp_lab.cli.fit import fit
from param_decomp_lab.cli.launch import launch
from param_decomp_lab.cli.pretrain import pretrain
from param_decomp_lab.cli.probe import probe
from param_decomp_lab.cli.profile import profile
from param_decomp_lab.cli.report import report
from param_decomp_lab.cli.runs import runs
from param_decomp_lab.cli.train import train
from param_decomp_lab.cli.wandb import send
from param_decomp_lab.display.console import PlainConsole
from param_decomp_lab.errors import CannotTell, CannotWrite, NonFiniteLoss, UserError
from param_decomp_lab.reading.printable import shortened

app = typer.Typer(
    no_args_is_help=True, add_completion=False, rich_markup_mode="markdown", pretty_exceptions_enable=False,
    help="Parameter decomposition: take a trained network's matrices apart into rank-one components.",
)  # fmt: skip
app.command()(demo)
app.command()(configs)
app.command()(train)
app.command()(launch)
app.command()(check)
app.command()(probe)
app.command()(profile)
app.command()(fit)
app.command()(pretrain)
app.add_typer(data.app, name="data")
app.add_typer(weights.app, name="weights")
app.command()(report)
app.command("wandb")(send)
app.command()(runs)
app.command("eval")(evaluate)
app.command()(export)


def main() -> None:
    """Entry point: a user's mistake is one message and status 2, never a traceback."""
    try:
        app()
    except UserError as error:
        _fail(str(error), 2)
    except (NonFiniteLoss, CannotTell, CannotWrite) as error:
        _fail(str(error), 1)
    except OSError as error:
        where = "" if error.filename is None else f"{error.filename}: "
        _fail(f"{where}{error.strerror or error}", 2 if error.errno == errno.ENAMETOOLONG else 1)
    except MemoryError:
        _fail("out of memory", 1)
    sys.exit(0)


def _fail(message: str, status: int) -> None:
    said = Text.assemble(("error:", "bold red"), f" {shortened(message)}")
    PlainConsole(stderr=True).print(said, soft_wrap=True)
    raise SystemExit(status)
