"""What every choice that saves memory saves, and what it costs, compiled for GPUs that are not here.

    pip install -e '.[probe]'
    python -m experiments.memory_study                    # everything; a few hours on two cores, resumable
    python -m experiments.memory_study --only levers      # levers, habits, published or ladder
    python -m experiments.memory_study --table            # only write the page of what is there

Levers: the training step of one reference configuration, each lever taken off or put on by itself, same work. Habits:
small programs with and without one line. Published: the rows that others have published of their step, beside ours
with a policy like theirs. Ladder: the pretraining transformer of the classic ladder. Writes docs/memory_study.md and
its figures. Every compile is a process of its own and is kept by `pd probe`'s cache; figures of what has been compiled
are kept beside the page, in docs/memory_study.json.
"""

import argparse
import json
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"  # before JAX is imported: with a GPU at hand it would take its memory

from experiments.memory_study_page import versions, write_page
from param_decomp_lab.config import load_config
from param_decomp_lab.probe.answer import GIB, read_step
from param_decomp_lab.probe.cache import cache_folder
from param_decomp_lab.probe.cards import card
from param_decomp_lab.probe.fit import workers
from param_decomp_lab.probe.measure import Where, measure
from param_decomp_lab.probe.recipe import recipe_subject
from param_decomp_lab.probe.subject import STEP, run_subject

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "memory_study.md"
REFERENCE = ROOT / "configs" / "llama8b_l18-26_9layer_chunkwise_seq2048.yaml"
LAYER_18 = ROOT / "configs" / "llama8b_l18.yaml"
BATCH = "pd.batch_size=64"


@dataclass(frozen=True)
class Row:
    """One compile of a training step. ``limits``: for the card as it is, without limit, or both."""

    part: str
    name: str
    config: Path
    sets: tuple[str, ...]
    limits: tuple[str, ...] = ("unlimited",)


def _lever(name: str, *sets: str) -> Row:
    return Row("levers", name, REFERENCE, (BATCH, *sets))


LEVERS = (
    _lever("reference: `lean`"),
    _lever("layers unrolled", "memory.layers=unroll"),
    _lever("importance logits kept (not lazy)", "memory.save=[attack_outputs,logits]"),
    _lever("layers kept (nothing recomputed in them)", "memory.save=[attack_outputs,layers]"),
    _lever("site outputs and attention kept", "memory.save=[attack_outputs,site_outputs,attention]"),
    _lever("attack outputs recomputed too", "memory.recompute=[attack_outputs]"),
    _lever("attack outputs on the host", "memory.offload=[attack_outputs]"),
    _lever("site inputs kept", "memory.save=[attack_outputs,site_inputs]"),
    _lever("inside of the CI function kept", "memory.save=[attack_outputs,ci]"),
    _lever("KL not fused", "memory.save=[attack_outputs,vocabulary]"),
    _lever("no blocks of components", "memory.component_block=null"),
    _lever("no blocks of components, blocks of tokens", "memory.component_block=null", "memory.token_block=16384"),
    _lever("blocks of tokens too", "memory.token_block=16384"),
    _lever("attention plain", "memory.attention=plain"),
    _lever("attention blocked", "memory.attention=blocked"),
    _lever("nothing donated", "memory.donate=false"),
    _lever("state replicated on nodes (replica 8 × fsdp 8)", "mesh={replica: 8, fsdp: 8}"),
    _lever("components split (fsdp 32 × tensor 2)", "mesh={fsdp: 32, tensor: 2}"),
    _lever("moments of V, U on the host", "memory.offload=[components_moments]"),
    _lever("all moments on the host", "memory.offload=[components_moments,ci_moments,sources_moments]"),
    _lever("moments of V, U in bf16", "memory.state_dtypes={components_moments: bfloat16}"),
    _lever("nested checkpoints, 3 layers", "memory.layer_group=3"),
    _lever("Lion for V, U", "memory.optimizers={components: lion}"),
    _lever("Adafactor for V, U", "memory.optimizers={components: adafactor}"),
    _lever("XLA's own rematerialisation too", "memory.xla_remat=true"),
    Row("levers", "reference, batch 128", REFERENCE, ("pd.batch_size=128",)),
    Row(
        "levers",
        "batch 128 in 2 micro-batches",
        REFERENCE,
        ("pd.batch_size=128", "eval.batch_size=128", "memory.micro_batches=2"),
    ),
    _lever("preset `balanced`", "memory.preset=balanced"),
    _lever("preset `plain`", "memory.preset=plain", "remat_recon_forwards=false"),
    _lever("preset `published`", "memory.preset=published"),
)

BOTH = ("real", "unlimited")
_ALL_KEPT = "memory.save=[logits,layers,attention,site_outputs,attack_outputs,site_inputs,ci,vocabulary]"


def _published(name: str, config: Path, batch: int, seq: int, remat: bool = True) -> Row:
    # Whole batches: the configuration of layer 18 itself has them in two parts.
    preset = ("memory.preset=published", "memory.micro_batches=1")
    sets = (*preset, f"pd.batch_size={batch}", f"eval.batch_size={batch}", f"data.max_seq_len={seq}")
    return Row("published", name, config, (*sets, *(() if remat else (_ALL_KEPT,))), BOTH)


PUBLISHED = (
    _published("27 sites, seq 2048, 64 GPUs, batch 64", REFERENCE, 64, 2048),
    _published("27 sites, seq 2048, 64 GPUs, batch 128", REFERENCE, 128, 2048),
    _published("27 sites, seq 512, 64 GPUs, batch 64", REFERENCE, 64, 512),
    _published("27 sites, seq 512, 64 GPUs, batch 256", REFERENCE, 256, 512),
    *(_published(f"layer 18, 8 GPUs, batch {batch}", LAYER_18, batch, 2048) for batch in (32, 64, 128)),
    *(_published(f"layer 18, 8 GPUs, batch {batch}, remat off", LAYER_18, batch, 2048, False) for batch in (32, 64)),
)
LADDER = tuple(
    Row("ladder", f"ladder: {variant}", ROOT / "configs" / "ladder" / f"{file}.yaml", (), BOTH)
    for variant, file in {
        "fp32, scan, no remat": "fp32-scan",
        "bf16, scan, no remat": "bf16-scan",
        "bf16, unrolled, no remat": "bf16-unroll",
        "bf16, scan, remat MLP + Attn": "bf16-scan-remat-parts",
        "bf16, scan, remat Block": "bf16-scan-remat-block",
        "bf16, scan, remat MLP + Attn, one batch of 64": "bf16-scan-remat-parts-whole-64",
        "bf16, scan, remat MLP + Attn, one batch of 256": "bf16-scan-remat-parts-whole-256",
    }.items()
)
PARTS = {"levers": LEVERS, "published": PUBLISHED, "ladder": LADDER}
ROWS = {row.name: row for rows in PARTS.values() for row in rows}


def compile_row(row: Row, limit: str) -> dict[str, Any]:
    """Sizes in GiB of one GPU; the arithmetic of all of them; what one moves."""
    if row.part == "ladder":
        subject, where = recipe_subject(row.config, seq=512), Where(card("a5000"), 1, cache_folder())
    else:
        subject, where = run_subject(load_config(row.config, row.sets)), Where(card("b200"), 8, cache_folder())
    measured = measure(subject, STEP, where, limited=limit == "real", dump=True)
    step, memory = read_step(subject, measured, where), measured.memory
    sizes = {"peak": memory.peak, "temp": memory.temp, "arguments": memory.arguments, "host": memory.host}
    return {
        **{name: size / GIB for name, size in sizes.items()},
        "groups": {name: size / GIB for name, size in measured.groups.items()},
        "flops": step.matmul_flops,
        "hbm": step.hbm,
        "within": step.within,
        "across": step.across,
        "ledger": step.planned / GIB,
        "explained": step.explained,
        "buffers": [[b.n_bytes / GIB, b.role, b.shape, b.scope, b.source] for b in step.buffers[:12]],
        "compile_s": measured.compile_s,
        "lower_s": measured.lower_s,
        "unknown": list(step.unknown),
        "versions": versions(),
    }


def in_a_process(row: Row, limit: str) -> dict[str, Any] | None:
    command = [sys.executable, "-m", "experiments.memory_study", "--one", row.name, "--limit", limit]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        print(f"{row.name}, {limit}: failed\n{done.stderr[-1500:]}", file=sys.stderr, flush=True)
        return None
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(f"{row.name}, {limit}: {found['peak']:.2f} GiB, {found['compile_s']:.0f} s", file=sys.stderr, flush=True)
    return found


def run(rows: Sequence[Row], page: Path) -> None:
    """Compiles what is missing, several at a time, and writes the page after each."""
    kept = page.with_suffix(".json")
    found = _records(kept)
    missing = [(row, limit) for row in rows for limit in row.limits if f"{row.name}, {limit}" not in found]

    def one(task: tuple[Row, str]) -> None:
        row, limit = task
        answer = in_a_process(row, limit)
        if answer is not None:
            with writing:
                # Read again: the habits are written by another script, perhaps at this moment.
                records = {**_records(kept), f"{row.name}, {limit}": answer}
                kept.write_text(json.dumps(records, indent=1) + "\n")

    writing = threading.Lock()
    with ThreadPoolExecutor(workers(max(1, len(missing)))) as pool:
        list(pool.map(one, missing))
    write_page(page, _records(kept), LEVERS, PUBLISHED)


def _records(kept: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(kept.read_text()) if kept.exists() else {}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=[*PARTS, "habits"])
    parser.add_argument("--table", action="store_true", help="compile nothing")
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--limit", choices=BOTH, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one is not None:
        print(json.dumps(compile_row(ROWS[options.one], options.limit)))
        return
    if options.only in (None, "habits") and not options.table:
        subprocess.run(
            [sys.executable, "-m", "experiments.memory_habits", "--kept", str(options.page.with_suffix(".json"))],
            cwd=ROOT,
        )
    chosen = [row for part, rows in PARTS.items() if options.only in (None, part) for row in rows]
    run([] if options.table else chosen, options.page)
    print(f"written: {options.page}")


if __name__ == "__main__":
    main()
