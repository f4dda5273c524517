"""`pd eval`."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from param_decomp_lab.cli.options import Devices, Overrides, RunFolder, Step, TargetFolder
from param_decomp_lab.ui.console import PlainConsole


def evaluate(
    run: RunFolder,
    step: Step = None,
    metric: Annotated[
        list[str] | None,
        typer.Option(metavar="TYPE", help="A metric by its type, or as a YAML mapping; may be repeated."),
    ] = None,
    metrics: Annotated[Path | None, typer.Option(help="YAML file with a list of metrics.", show_default=False)] = None,
    batches: Annotated[int | None, typer.Option(min=1, help="Instead of eval.n_steps.", show_default=False)] = None,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Instead of eval.batch_size.", show_default=False)
    ] = None,
    baselines: Annotated[
        bool,
        typer.Option("--baselines", help="Compare with neurons, singular vectors and rotations, in place of metrics."),
    ] = False,
    attack: Annotated[
        str, typer.Option(metavar="STEPS", help="With --baselines: lengths of attacks, such as 20,80; empty for none.")
    ] = "20,40,80,160,320",
    matched: Annotated[
        bool, typer.Option("--matched", help="With --baselines: only at the run's own L0, which is much faster.")
    ] = False,
    choose: Annotated[
        Literal["activation", "gradient"],
        typer.Option(
            help="With --baselines: how parts are chosen. The KL's gradient is slower, and makes stronger baselines."
        ),
    ] = "activation",
    sae: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FOLDER",
            help="With --baselines: compare with this SAE or transcoder, as SAELens writes them; may be repeated.",
            show_default=False,
        ),
    ] = None,
    overrides: Overrides = None,
    out: Annotated[
        Path | None, typer.Option(help="JSON file to write. Default: a new one in RUN/evals.", show_default=False)
    ] = None,
    devices: Devices = None,
    target: TargetFolder = None,
) -> None:
    """Evaluate a run afterwards: any metric, on any of its checkpoints, on as many batches as wanted.

    Without --metric and --metrics, the run's own metrics are measured. A TYPE has the keys with which the run evaluates
    it, else those with which it trains on it, else its defaults; pass a mapping for other keys. Numbers are printed and
    written as JSON, figures into a folder beside it. The run may still be training; its `metrics.jsonl` stays as it is.

    `--baselines` compares the run, at exactly its L0, with parts that cost no training: the matrices' neurons, their
    singular vectors, and a random rotation. Inactive parts are zeroed, random, or adversarial. The parts with the
    largest activations are active; with `--choose gradient`, those that lower the KL most, which makes stronger
    baselines. The decomposition's components are then chosen in the same way, too.
    `--sae` adds SAEs and transcoders, each in place of the activation that its folder names.

    `--set` changes keys that begin with eval, data or memory.

    Examples:

        pd eval runs/p-1a2b3c4d

        pd eval runs/p-1a2b3c4d --step 20000 --metric CI_L0 --metric PGDReconLoss --batches 8

        pd eval runs/p-1a2b3c4d --metric '{type: PGDReconLoss, init: random, step_size: 0.05, n_steps: 100,
        mask_scope: unique_per_datapoint}' --out attack.json

        pd eval runs/p-1a2b3c4d --baselines --batches 4 --attack 20,80

        pd eval runs/p-1a2b3c4d --baselines --matched --batches 1 --attack 20

        pd eval runs/p-1a2b3c4d --baselines --matched --choose gradient

        pd eval runs/p-1a2b3c4d --baselines --sae saes/blocks.2.hook_resid_post --sae saes/layer_2_transcoder

        pd eval runs/p-1a2b3c4d --metrics metrics.yaml --set 'data={train: data/other/train, eval: data/other/eval}'
    """
    from param_decomp_lab.eval.command import evaluate as measure
    from param_decomp_lab.eval.request import EvaluationRequest, read_metric_file

    if baselines:
        from param_decomp_lab.baselines.command import compare_with_baselines
        from param_decomp_lab.errors import UserError

        if metric or metrics is not None:
            raise UserError("--baselines: takes no metrics; run `pd eval` a second time for these")
        if not all(length.strip().isdecimal() for length in attack.split(",") if attack.strip()):
            raise UserError(f"--attack {attack}: should be numbers of steps, such as 20,80")
        lengths = tuple(sorted({int(length) for length in attack.split(",")} - {0})) if attack.strip() else ()
        asked = EvaluationRequest(None, batches, batch_size, tuple(overrides or ()))
        compare_with_baselines(
            run, asked, lengths, step, out, devices, target, PlainConsole(), matched, sae or (), choose
        )
        return
    for option, given in (("--matched", matched), ("--choose", choose != "activation"), ("--sae", sae)):
        if given:
            from param_decomp_lab.errors import UserError

            raise UserError(f"{option}: is for --baselines")
    chosen = [*(metric or ()), *(read_metric_file(metrics) if metrics is not None else ())]
    asked = EvaluationRequest(chosen or None, batches, batch_size, tuple(overrides or ()))
    measure(run, asked, step, out, devices, target, PlainConsole())
