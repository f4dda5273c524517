"""`pd configs`."""

from pathlib import Path
from typing import Annotated

import typer


def configs(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME]...",
            help="What to copy: names from the list, or a folder of them; or `convert` and files to convert.",
        ),
    ] = None,
    out: Annotated[
        Path, typer.Option(help="Folder to write to; with `convert` and one file, also the name of the wrapper.")
    ] = Path("configs"),
    overwrite: Annotated[bool, typer.Option(help="Replace files that have other contents.")] = False,
) -> None:
    """List the configurations that come with the package, or write copies of some to start from.

    A wrapper comes with its schema file and, for a toy, with the recipe of its target. With the default folder, paths
    of data and models in them lead to `data/` and `runs/` of the folder you are in.

    `pd configs convert FILE` writes a configuration of the original project, of spring, June, July or August 2026, in
    today's form: a wrapper, and its schema file in `torch/` beside it. Their headers say what was translated, what was
    left out and what differs here. `pd check`, `pd train` and the other commands take such files as they are.

    Examples:

        pd configs

        pd configs toys/tms_5-2

        pd configs demo toys --out mine/configs

        pd configs llama8b_l18 --overwrite

        pd configs convert theirs/llama3_1_8b.yaml --out mine/llama8b.yaml
    """

    from param_decomp_lab.config.shipped import find, shipped, write_copies
    from param_decomp_lab.ui.console import PlainConsole
    from param_decomp_lab.ui.tables import plain_table

    console = PlainConsole()
    if not names:
        every = shipped()
        for title, command in (("runs, for `pd train`", "train"), ("networks to train, for `pd pretrain`", "pretrain")):
            table = plain_table(title, ("name", "left"), ("description", "wrap"))
            for one in every:
                if one.command == command:
                    table.add_row(one.name, one.about)
            console.print(table)
        console.print("`pd configs NAME` writes a copy of one.", soft_wrap=True, highlight=False)
        return
    if names[0] == "convert":
        _convert([Path(name) for name in names[1:]], out)
        return
    chosen = find(names)
    for path, written in write_copies(chosen, out, overwrite=overwrite).items():
        console.print(f"{path}{'' if written else ' (there already)'}", soft_wrap=True, highlight=False)
    first = chosen[0]
    use = "check" if first.command == "train" else first.command
    console.print(f"next: pd {use} {out / first.name}.yaml", soft_wrap=True, highlight=False)


def _convert(files: list[Path], out: Path) -> None:
    from param_decomp_lab.config.convert import convert
    from param_decomp_lab.errors import UserError
    from param_decomp_lab.ui.console import PlainConsole
    from param_decomp_lab.ui.warnings import print_warnings

    console = PlainConsole()
    if not files:
        raise UserError("name the files to convert: pd configs convert FILE")
    if len(files) > 1 and out.suffix in (".yaml", ".yml"):
        raise UserError(f"--out {out}: several files need a folder to go to")
    for file in files:
        written, notes = convert(file, out)
        print_warnings(notes, console)
        console.print(f"{file}: written as {written}", soft_wrap=True, highlight=False)
    console.print(f"next: pd check {written}", soft_wrap=True, highlight=False)
