"""`pd pretrain`."""

from pathlib import Path
from typing import Annotated

import typer


def pretrain(
    recipe: Annotated[Path, typer.Argument(help="Recipe YAML.")],
    overwrite: Annotated[bool, typer.Option(help="Replace a model made by another recipe.")] = False,
) -> None:
    """Train a network to decompose: a small Llama on tokenized text, saved as a Hugging Face folder, or a toy.

    Or a GPT (`architecture: gpt`), saved in a layout of our own.
    The toys are TMS and ResidMLP (`architecture: tms`, `resid_mlp`). Training one checks that it represents every
    feature, and tries the next seed if it does not. A model that the same recipe made before is left as it is.

    Examples:

        pd pretrain configs/demo/pretrain.yaml

        pd pretrain configs/toys/targets/tms_5-2.yaml
    """
    from param_decomp_lab.pretrain.pretrain import run_pretrain
    from param_decomp_lab.pretrain.recipe import PretrainRecipe, read_recipe
    from param_decomp_lab.pretrain.toys import pretrain_toy

    found = read_recipe(recipe)
    if isinstance(found, PretrainRecipe):
        run_pretrain(found, overwrite=overwrite)
    else:
        pretrain_toy(found, overwrite=overwrite)
