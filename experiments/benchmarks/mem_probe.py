"""Compares planned with live memory for a run's own training step, with random weights, on the devices of this machine.

    srun --nodes=8 --ntasks-per-node=8 python -m experiments.benchmarks.mem_probe  # 64 GPUs; see slurm/mem_probe.sbatch
    python -m experiments.benchmarks.mem_probe --first_layer 18 --last_layer 18 --C 24576 --seq 512 --per_gpu_batch 8
    python -m experiments.benchmarks.mem_probe --per_gpu_batch 2 --no_remat --set memory.layers=unroll

The configuration is a wrapper of `pd train`. The flags replace parts of it, as `--set` would; the mesh takes all
devices (fsdp). Weights and tokens are drawn on the devices, so nothing is loaded and no folder is made.

Planned memory is XLA's account of the compiled step: temp + arguments + output - alias. Live memory is the largest
`peak_bytes_in_use` of any device (CPUs report none). It includes making the state; the JSON has the peak of that alone.
The last line, from process 0, is the JSON.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from experiments.gpu_day.job import ROOT
from experiments.gpu_day.measure import Runner, allocated
from param_decomp_aot.compile import memory_plan
from param_decomp_lab.config import RunConfig, load_config
from param_decomp_lab.config.loss_schema import ChunkwiseSubsetReconLoss, StochasticReconSubsetLoss
from param_decomp_lab.config.method_schema import ChunkwiseCI, GlobalCI, LanguageModelFile
from param_decomp_lab.errors import UserError
from param_decomp_lab.probe.outline import known_target, outline_on
from param_decomp_lab.processes.group import Processes
from param_decomp_lab.processes.joining import joined
from param_decomp_lab.setup.base import Outline, build_mesh
from param_decomp_lab.setup.programs import steps_program
from param_decomp_lab.setup.resolved import ResolvedConfig

GIB = 2**30
DEFAULT = ROOT / "configs" / "llama8b_l18-26_9layer_chunkwise.yaml"


def assignments(options: argparse.Namespace, config: RunConfig, devices: int) -> Iterator[str]:
    """Yields the flags as `--set` takes them. ``config``: the configuration without them.

    Raises UserError for one that cannot apply.
    """
    method = config.method
    if not isinstance(method, LanguageModelFile):
        raise UserError(f"{options.config}: decomposes a toy; this probe is for language models")
    if (options.first_layer is None) != (options.last_layer is None):
        raise UserError("--first_layer and --last_layer go together")
    if options.first_layer is not None:
        C = options.C or method.pd.decomposition_targets[0].C
        targets = [
            {"module_pattern": f"model.layers.{layer}.mlp.*_proj", "C": C}
            for layer in range(options.first_layer, options.last_layer + 1)
        ]
        yield f"pd.decomposition_targets={json.dumps(targets)}"
    elif options.C is not None:
        for n in range(len(method.pd.decomposition_targets)):
            yield f"pd.decomposition_targets.{n}.C={options.C}"
    if options.sites_per_chunk is not None:
        yield f"pd.loss_metrics.{_place(config, ChunkwiseSubsetReconLoss)}.sites_per_chunk={options.sites_per_chunk}"
    if options.recon_coeff is not None:
        place = _place(config, ChunkwiseSubsetReconLoss, StochasticReconSubsetLoss)
        yield f"pd.loss_metrics.{place}.coeff={options.recon_coeff}"
    if options.seq is not None:
        yield f"data.max_seq_len={options.seq}"
        ci = method.pd.ci_config
        transformer = ci.simple_transformer_ci_cfg if isinstance(ci, GlobalCI | ChunkwiseCI) else None
        if transformer is not None and transformer.attn_config.max_len < options.seq:
            yield f"pd.ci_config.simple_transformer_ci_cfg.attn_config.max_len={options.seq}"
    if options.no_remat:
        yield "remat_recon_forwards=false"
        yield "memory={preset: plain}"
    yield f"mesh={{replica: 1, fsdp: {devices}}}"
    if options.per_gpu_batch is not None:
        yield f"pd.batch_size={options.per_gpu_batch * devices}"
    yield "eval=null"
    yield from options.set


def _place(config: RunConfig, *kinds: type[Any]) -> int:
    """Returns the place of the first loss of one of these kinds."""
    for n, loss in enumerate(config.method.pd.loss_metrics):
        if isinstance(loss, kinds):
            return n
    raise UserError(f"pd.loss_metrics: has no {' or '.join(kind.__name__ for kind in kinds)} to change")


def measure(outline: Outline, steps: int, processes: Processes) -> dict[str, Any]:
    """Returns the line of JSON. ``steps``: the number of timed steps, after a first one."""
    with jax.set_mesh(outline.mesh):
        started = time.perf_counter()
        step = steps_program(outline, 1).lower().compile()
        compile_s = time.perf_counter() - started
        runner = Runner(outline, step, 1)
        made = _peak()
        times = [runner.run([number]) for number in range(steps + 1)]
    live, made = (max(map(int, processes.gather(str(peak)))) for peak in (_peak(), made))
    seconds, batch, length = statistics.median(times[1:]), *outline.leading
    return {
        "device": f"{outline.mesh.size} x {outline.mesh.devices.flat[0].device_kind}",
        "sites": len(outline.problem.target.sites),
        "batch": batch,
        "seq": length,
        "planned_gib": memory_plan(step).peak / GIB,
        "live_gib": live / GIB or None,
        "live_gib_before_steps": made / GIB or None,
        "step_s": seconds,
        "tokens_per_s": batch * length / seconds,
        "compile_s": compile_s,
    }


def _peak() -> int:
    """Returns the largest peak among this process's devices; 0 if they do not report one."""
    return max(int(allocated(device).get("peak_bytes_in_use", 0)) for device in jax.local_devices())


def as_text(line: dict[str, Any]) -> str:
    live = "–" if line["live_gib"] is None else f"{line['live_gib']:.2f} GiB"
    over = "" if line["live_gib"] is None else f" ({line['live_gib'] / line['planned_gib'] - 1:+.0%})"
    return (
        f"{line['sites']} sites, {line['batch']} × {line['seq']} tokens on {line['device']}: "
        f"planned {line['planned_gib']:.2f} GiB, live {live}{over}, "
        f"step {line['step_s']:.3f} s, {line['tokens_per_s']:,.0f} tokens/s, compiled in {line['compile_s']:.0f} s"
    )


def probe(options: argparse.Namespace) -> None:
    """Takes one measurement, which process 0 prints. Raises UserError as `load_config` does."""
    with joined(options.coordinator, options.processes, options.process_id) as processes:
        with processes.sharing_errors():
            sets = list(assignments(options, load_config(options.config), jax.device_count()))
            resolved = ResolvedConfig(load_config(options.config, sets))
            outline = outline_on(resolved, known_target(resolved), build_mesh(resolved.mesh))
        line = measure(outline, options.steps, processes)
        if processes.first:
            print(as_text(line))
            print(json.dumps({**line, "config": options.config.stem, "set": sets}), flush=True)


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=DEFAULT, help="wrapper YAML (default: %(default)s)")
    parser.add_argument("--first_layer", type=int, help="first layer whose MLP matrices are decomposed")
    parser.add_argument("--last_layer", type=int, help="last layer whose MLP matrices are decomposed")
    parser.add_argument("--C", type=int, help="components of a site")
    parser.add_argument("--sites_per_chunk", type=int, help="sites_per_chunk of ChunkwiseSubsetReconLoss")
    parser.add_argument(
        "--recon_coeff", type=float, help="coefficient of ChunkwiseSubsetReconLoss or StochasticReconSubsetLoss"
    )
    parser.add_argument("--seq", type=int, help="tokens of a row")
    parser.add_argument("--per_gpu_batch", type=int, help="rows on each device")
    parser.add_argument("--no_remat", action="store_true", help="memory preset plain")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as for pd train; applied last")
    parser.add_argument("--steps", type=int, default=5, help="steps to time, after a first one")
    parser.add_argument(
        "--coordinator", metavar="HOST:PORT", help="for several processes without Slurm, as of pd train"
    )
    parser.add_argument("--processes", type=int)
    parser.add_argument("--process_id", type=int)
    options = parser.parse_args(arguments)
    if options.steps < 1:
        parser.error("--steps: at least 1")
    return options


def main() -> None:
    try:
        probe(parsed())
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
