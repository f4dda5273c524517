"""`pd data tokenize`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from param_decomp_lab.display.console import PlainConsole
from param_decomp_lab.errors import UserError

app = typer.Typer(no_args_is_help=True, help="Token data for language models.")


@app.command("tokenize")
def tokenize(
    inputs: Annotated[
        list[str] | None, typer.Argument(help="Text files, folders or globs.", show_default=False)
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder to make: train/, eval/, meta.json.")] = Path("data/tokens"),
    stdlib: Annotated[bool, typer.Option(help="Use the English text that comes with every CPython.")] = False,
    tokenizer: Annotated[str, typer.Option(help="`bytes`, or a Hugging Face tokenizer.json or its folder.")] = "bytes",
    seq_len: Annotated[int, typer.Option(help="Tokens per row.")] = 512,
    eval_fraction: Annotated[float, typer.Option(help="Share of the text held out.")] = 0.05,
    rows_per_shard: Annotated[int, typer.Option(help="Rows in one Parquet file.")] = 65536,
    seed: Annotated[int, typer.Option(help="Chooses what is held out.")] = 0,
    overwrite: Annotated[bool, typer.Option(help="Replace the folder if it exists.")] = False,
) -> None:
    """Turn text into Parquet shards of fixed-length rows, split so that train and eval share nothing.

    Examples:

        pd data tokenize --stdlib --out data/demo --seq-len 64

        pd data tokenize corpus/*.txt --tokenizer meta/tokenizer.json --out data/mine --seq-len 512
    """
    from param_decomp_lab.data.stdlib_text import stdlib_documents
    from param_decomp_lab.data.tokenize import tokenize_documents, tokenize_files

    if stdlib == bool(inputs):
        raise UserError("pass either text files, folders or globs, or --stdlib")
    options: dict[str, Any] = {
        "tokenizer": tokenizer, "seq_len": seq_len, "eval_fraction": eval_fraction,
        "rows_per_shard": rows_per_shard, "seed": seed, "overwrite": overwrite,
    }  # fmt: skip
    if stdlib:
        meta = tokenize_documents(stdlib_documents(), out, sources=("the standard library",), **options)
    else:
        meta = tokenize_files(inputs or (), out, **options)
    PlainConsole().print(
        f"{out}: {meta.train.rows} training and {meta.eval.rows} held-out rows of {meta.seq_len} tokens, "
        f"vocabulary {meta.vocab_size}, unigram entropy {meta.eval.unigram_entropy:.3f} nats",
        soft_wrap=True,
    )
