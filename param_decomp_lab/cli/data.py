"""`pd data tokenize`."""

import re
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

from param_decomp_lab.errors import UserError
from param_decomp_lab.ui.console import PlainConsole

app = typer.Typer(no_args_is_help=True, help="Token data for language models.")


@app.command("tokenize")
def tokenize(
    inputs: Annotated[
        list[str] | None,
        typer.Argument(
            help="Files, folders or globs: text, JSON lines, Parquet; text and JSON also as .gz, .zst, .bz2.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder to make: train/, eval/, meta.json.")] = Path("data/tokens"),
    stdlib: Annotated[bool, typer.Option(help="Use the English text that comes with every CPython.")] = False,
    dataset: Annotated[
        str | None, typer.Option(help="A data set of the Hugging Face hub, by name.", show_default=False)
    ] = None,
    config: Annotated[str | None, typer.Option(help="With --dataset: its configuration.", show_default=False)] = None,
    split: Annotated[str, typer.Option(help="With --dataset: the split.")] = "train",
    eval_split: Annotated[
        str | None,
        typer.Option(help="With --dataset: hold out this whole split, and nothing of the other.", show_default=False),
    ] = None,
    revision: Annotated[
        str | None, typer.Option(help="With --dataset: a commit, branch or tag.", show_default=False)
    ] = None,
    data_files: Annotated[
        str | None, typer.Option(help="With --dataset: only files that this glob matches.", show_default=False)
    ] = None,
    format: Annotated[
        str | None,
        typer.Option(help="text, json or parquet, if the files' names do not say.", show_default=False),
    ] = None,
    column: Annotated[
        str | None,
        typer.Option(help="The column to read. Default: text; with --tokenized, input_ids.", show_default=False),
    ] = None,
    tokenized: Annotated[bool, typer.Option(help="The column holds token ids, not text.")] = False,
    row_starts: Annotated[
        bool, typer.Option(help="With --tokenized: a row is the first --seq-len ids of a row; rows are not joined.")
    ] = False,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            help="`bytes` (the default), a Hugging Face tokenizer.json or its folder, or a model's name on the hub.",
            show_default=False,
        ),
    ] = None,
    bpe: Annotated[
        int | None,
        typer.Option(
            help="Train a byte-level BPE tokenizer of this many tokens on the training text, in place of --tokenizer.",
            show_default=False,
        ),
    ] = None,
    bos: Annotated[
        bool | None,
        typer.Option(
            "--bos/--no-bos",
            help="Begin rows and documents with the tokenizer's BOS, or not. Default: as the tokenizer does.",
            show_default=False,
        ),
    ] = None,
    seq_len: Annotated[int, typer.Option(help="Tokens per row.")] = 512,
    tokens: Annotated[
        float | None, typer.Option(help="Stop after this many training tokens, such as 2e9.", show_default=False)
    ] = None,
    eval_fraction: Annotated[float, typer.Option(help="Share of the text held out.")] = 0.05,
    rows_per_shard: Annotated[int, typer.Option(help="Largest number of rows in a file.")] = 65536,
    seed: Annotated[int, typer.Option(help="Seed of the choice of what is held out.")] = 0,
    processes: Annotated[
        int | None, typer.Option(min=1, help="Processes that tokenize. Default: one per core.", show_default=False)
    ] = None,
    part: Annotated[
        str | None,
        typer.Option(help="i/n: this is job i, from 0, of n jobs that make one folder.", show_default=False),
    ] = None,
    skip_bad_records: Annotated[
        bool, typer.Option("--skip-bad-records", help="Leave out records without text; count and name them.")
    ] = False,
    overwrite: Annotated[bool, typer.Option(help="Replace the folder if it exists.")] = False,
) -> None:
    """Turn text into rows of token ids, split so that train and eval share nothing.

    Rerun the same command to resume after an interruption: nothing is done twice, and the result is the same to the
    last byte, however many processes there are.

    Several jobs make one folder together with `--part`: start n of them with the same options and an `--out` that all
    of them can see. The job that finds all parts done puts the folder in place.

    If the tokenizer puts BOS before every text, as those of Llama and Gemma do, every row begins with BOS, and so does
    every document within a row. `--bos` does the same with a tokenizer that has a BOS but does not add it; `--no-bos`
    leaves it out. Prompts are tokenized as the run's data were.

    `--bpe` trains a byte-level BPE tokenizer, and uses it. Its BOS `<|endoftext|>` begins every text. It is trained on
    the first 134 million characters at most, none of them held out. The folder keeps it: pass the folder to
    `--tokenizer` for other text.

    Examples:

        pd data tokenize --stdlib --out data/bytes --seq-len 64

        pd data tokenize --stdlib --bpe 1024 --out data/demo --seq-len 64

        pd data tokenize corpus/*.txt --tokenizer meta/tokenizer.json --out data/mine --seq-len 512

        pd data tokenize dumps/*.jsonl.zst --column body --tokenizer models/mine --tokens 2e9 --out data/mine

        pd data tokenize --dataset roneneldan/TinyStories --eval-split validation --tokenizer gpt2 --out data/stories

        pd data tokenize dumps/*.jsonl --skip-bad-records --tokenizer models/mine --out data/mine

        pd data tokenize corpus/*.txt --tokenizer models/mine --no-bos --out data/mine

        pd data tokenize ids/*.parquet --tokenized --seq-len 2048 --out data/mine

        pd data tokenize corpus --tokenizer models/mine --out data/mine --part 3/64
    """
    from param_decomp_lab.data.bpe import train_bpe
    from param_decomp_lab.data.hub_tokenizer import fetch_tokenizer
    from param_decomp_lab.data.meta import COLUMN, META_FILE
    from param_decomp_lab.data.plan import Settings
    from param_decomp_lab.data.records import BadRecord, Column
    from param_decomp_lab.data.tokenize import make_plan, tokenize
    from param_decomp_lab.data.tokenize_processes import available_cores
    from param_decomp_lab.data.tokenize_unit import training_text
    from param_decomp_lab.data.tokenizers import BYTES
    from param_decomp_lab.safe_io.printable import first_few

    if stdlib + bool(inputs) + (dataset is not None) != 1:
        raise UserError("pass either text files, folders or globs, or --dataset NAME, or --stdlib")
    only_of_hub = {"--config": config, "--eval-split": eval_split, "--revision": revision, "--data-files": data_files}
    for option, value in only_of_hub.items():
        if value is not None and dataset is None:
            raise UserError(f"{option} is for --dataset; files are given as they are")
    if row_starts and not tokenized:
        raise UserError("--row-starts is for --tokenized; text is joined, so that no row has a gap")
    if bpe is not None and (tokenized or tokenizer is not None):
        other = "--tokenized takes token ids" if tokenized else "--tokenizer names an existing one"
        raise UserError(f"--bpe trains a tokenizer, and {other}: leave one of them out")
    settings = Settings(
        seq_len=seq_len,
        eval_fraction=eval_fraction,
        seed=seed,
        rows_per_shard=rows_per_shard,
        tokens=None if tokens is None else whole_number(tokens, "--tokens"),
        column=Column(column or (COLUMN if tokenized else "text"), tokenized),
        row_starts=row_starts,
        skip_bad_records=skip_bad_records,
    )
    units, sources = _units(inputs, dataset, (config, revision, data_files), split, eval_split, format)
    console = PlainConsole()
    count = available_cores() if processes is None else processes
    with TemporaryDirectory() as folder:
        try:
            if bpe is not None:
                console.print(f"training a tokenizer of {bpe:,} tokens …")
                train_bpe(training_text(make_plan(units, settings, BYTES, sources)), bpe, Path(folder))
                tokenizer = folder
            elif tokenizer is not None or not tokenized:
                tokenizer = fetch_tokenizer(tokenizer or BYTES)
            plan = make_plan(units, settings, tokenizer, sources, bos)
            meta = tokenize(plan, out, processes=count, part=_part(part), overwrite=overwrite, console=console)
        except BadRecord as error:
            raise UserError(
                f"{error}\nPass --skip-bad-records to leave such records out; they are counted and named"
            ) from error
    if meta is None:
        console.print(f"part {part} is done; {out} appears when all parts are", soft_wrap=True)
        return
    vocabulary = f"vocabulary {meta.vocab_size}, unigram entropy {meta.eval.unigram_entropy:.3f} nats"
    begins = "" if meta.bos is None else f", each begins with BOS (token {meta.bos})"
    console.print(
        f"{out}: {meta.train.rows} training and {meta.eval.rows} held-out rows of {meta.seq_len} tokens{begins}, "
        f"{vocabulary}",
        soft_wrap=True,
    )
    if meta.skipped_records:
        kept = f"{meta.documents:,} documents were read, and {meta.skipped_records:,} records left out:"
        lines = [kept, *first_few(meta.skipped, 5)]
        if meta.skipped_records > 5:
            lines.append(f"({META_FILE} names the first {len(meta.skipped)})")
        console.print("\n  ".join(lines), soft_wrap=True, highlight=False, markup=False)


def _units(
    inputs: list[str] | None,
    dataset: str | None,
    of_dataset: tuple[str | None, str | None, str | None],
    split: str,
    eval_split: str | None,
    format: str | None,
) -> tuple[list[Any], tuple[str, ...]]:
    """The text, and in words where it is from."""
    from param_decomp_lab.data.hub_text import HubDataset
    from param_decomp_lab.data.spans import FORMATS
    from param_decomp_lab.data.stdlib_text import stdlib_documents
    from param_decomp_lab.data.tokenize import file_units, memory_unit

    if dataset is not None:
        config, revision, data_files = of_dataset
        hub = HubDataset(dataset, config, revision, data_files).pinned()
        if eval_split is None:
            return hub.units(split, "by hash"), (f"{hub.describe()}, {split}",)
        units = [*hub.units(split, "train"), *hub.units(eval_split, "eval")]
        return units, (f"{hub.describe()}, {split}", f"{hub.describe()}, {eval_split}")
    if inputs:
        named = next((known for known in FORMATS if known == format), None)
        if format is not None and named is None:
            raise UserError(f"--format: should be one of {', '.join(FORMATS)}, not {format}")
        return file_units(inputs, named), tuple(inputs)
    return [memory_unit(stdlib_documents())], ("the standard library",)


def _part(text: str | None) -> tuple[int, int] | None:
    """Number and count of a part."""
    if text is None:
        return None
    found = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text)
    if found is None or int(found[1]) >= int(found[2]):
        raise UserError(f"--part: should be i/n with i from 0 to n - 1, such as 0/4, not {text}")
    return int(found[1]), int(found[2])


def whole_number(value: float, option: str) -> int:
    """The whole number in a text such as 2e9. Raises UserError."""
    if not (1 <= value < 1e18 and value == int(value)):
        raise UserError(f"{option}: should be a whole number of at least 1, not {value:g}")
    return int(value)
