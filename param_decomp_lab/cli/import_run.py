"""`pd import`."""

from pathlib import Path
from typing import Annotated

import typer

from param_decomp_lab.cli.options import Overrides
from param_decomp_lab.ui.console import PlainConsole


def import_run(
    run: Annotated[str, typer.Argument(help="Folder of the run, or wandb:entity/project/id.", show_default=False)],
    out: Annotated[Path, typer.Option(help="Run folder to make.", show_default=False)],
    target: Annotated[
        str | None,
        typer.Option(
            metavar="TARGET",
            help="What was decomposed: a folder, a name on the Hugging Face hub, a run path, or a file with its "
            "settings (config.json, model_config.yaml). Default: what the run says.",
            show_default=False,
        ),
    ] = None,
    step: Annotated[int | None, typer.Option(help="Step of the checkpoint. Default: the newest.")] = None,
    overrides: Overrides = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a folder that this command made.")] = False,
) -> None:
    """Turn a decomposition made by the PyTorch project into a run folder.

    RUN has final_config.yaml, run_meta.yaml or experiment_config.yaml, and model_<step>.pth. The new folder opens like
    any other run: `pd eval`, `pd harvest`, `pd browse`, `pd graph`, `pd export`, `load_run`. It cannot be resumed,
    since the optimizers' state is not imported; a new run can begin with it (`init_from`). Torch is not needed.

    The checkpoint holds the target's weights. They are used if the model's settings lie beside it or are given with
    --target. Otherwise the target is fetched, and its weights are compared with those in the checkpoint. `--set`
    changes keys of the translated configuration, such as the data.

    Examples:

        pd import out/s-55ea3f9b --out runs/s-55ea3f9b

        pd import out/s-55ea3f9b --out runs/s-55ea3f9b --target out/t-9d2b8f02/model_config.yaml

        pd import wandb:entity/project/s-55ea3f9b --out runs/s-55ea3f9b --step 200000

        pd import out/llama --out runs/llama --target meta-llama/Llama-3.1-8B --set 'data={train: data/train, eval:
        data/eval}'
    """
    from param_decomp_lab.importing.command import import_run as make
    from param_decomp_lab.ui.warnings import print_warnings

    console = PlainConsole()
    made = make(run, out, console, target=target, step=step, overrides=overrides or (), overwrite=overwrite)
    if made.imported.left_out:
        print_warnings(["not translated:\n  " + "\n  ".join(made.imported.left_out)], console)
    console.print(f"{out}: step {made.imported.step:,}, {made.describe()}", soft_wrap=True, highlight=False)
