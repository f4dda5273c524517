"""`pd demo`."""

import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer
from rich.console import Console

from param_decomp_lab.cli.options import Overrides
from param_decomp_lab.errors import UserError
from param_decomp_lab.ui.console import PlainConsole

TOKENIZE = ("data", "tokenize", "--stdlib", "--out", "data/demo", "--seq-len", "64")
PRETRAIN = ("pretrain", "configs/demo/pretrain.yaml")
TRAIN = ("train", "configs/demo/decompose.yaml")
HARVEST = ("--tokens", "100e3")
BASELINES = ("--baselines", "--matched", "--batches", "1", "--batch-size", "8", "--attack", "20")
RUNS = "runs"
SAME_CODE = f"""
import sys
sys.path.append({str(Path(__file__).parents[2])!r})
sys.argv[0] = "pd"
from param_decomp_lab.cli import main
main()
"""
"""`pd` of this very package, also where it is not installed; nothing is imported from the folder it runs in."""


def demo(
    out: Annotated[
        Path, typer.Option(help="Folder for everything: `configs/`, `data/`, `runs/`. Made if it does not exist.")
    ] = Path("."),
    overrides: Overrides = None,
) -> None:
    """Pretrain a small Llama, decompose six of its matrices, write a report and a harvest: five minutes on two cores.

    At the end, the decomposition is held against what costs no training: singular vectors, neurons.

    Runs other commands of `pd` and shows them, so that you can repeat and vary each. What is there already, such as the
    data and the model, is used as it is. `--set` changes the decomposition.

    Examples:

        pd demo

        pd demo --out /tmp/demo --set pd.steps=200
    """
    from param_decomp_lab.config.shipped import find, write_copies

    console = PlainConsole()
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out: {out} cannot be made ({error.strerror})") from error
    if out != Path("."):
        _show(console, ("cd", str(out)))
    if not all((out / file).is_file() for _, file in (PRETRAIN, TRAIN)):
        _show(console, ("pd", "configs", "demo"))
        write_copies(find(["demo"]), out / "configs")
    sets = [word for assignment in overrides or () for word in ("--set", assignment)]
    tokenize = () if (out / "data" / "demo" / "meta.json").is_file() else (TOKENIZE,)
    for words in (*tokenize, PRETRAIN, (*TRAIN, *sets)):
        _show(console, ("pd", *words))
        status = _run(words, out)
        if status:
            raise typer.Exit(status)
    run = _newest_run(out / RUNS)
    if run is None:  # `--set` sent it elsewhere
        return
    folder = f"{RUNS}/{run.name}"
    # The report once more: it shows the comparison.
    for words in (("harvest", folder, *HARVEST), ("eval", folder, *BASELINES), ("report", folder)):
        _show(console, ("pd", *words))
        status = _run(words, out)
        if status:
            raise typer.Exit(status)
    console.print("\nits components, in a browser:", highlight=False)
    console.print(
        f"$ {shlex.join((_called(), 'browse', str(out / RUNS), '--open'))}",
        style="bold",
        soft_wrap=True,
        highlight=False,
    )


def _called() -> str:
    """`pd`, or how it was called where a shell does not find it by that: in an environment that is not activated."""
    return sys.argv[0] if Path(sys.argv[0]).name == "pd" and shutil.which("pd") is None else "pd"


def _newest_run(runs: Path) -> Path | None:
    found = [path for path in runs.glob("p-*") if (path / "config.yaml").is_file()]
    return max(found, key=lambda path: path.stat().st_mtime, default=None)


def _show(console: Console, words: tuple[str, ...]) -> None:
    line = f"\n$ {shlex.join(words)}"
    console.print(line, style="bold", soft_wrap=True, highlight=False)


def _run(words: tuple[str, ...], folder: Path) -> int:
    """`pd` in a process of its own; its exit status. It may take its time to save when it is told to stop."""
    process = subprocess.Popen([sys.executable, "-P", "-c", SAME_CODE, *words], cwd=folder)
    told: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        told.append(number)
        if number == signal.SIGTERM:  # Ctrl-C reaches the process from the terminal
            process.send_signal(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        status = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if status < 0:  # ended by a signal, for which shells have 128 and more
        return 128 - status
    return status or (128 + told[0] if told else 0)
