"""`pd probe`: measures a configuration on given GPUs."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from param_decomp_jax.sharding.mesh import MeshShape
from param_decomp_lab.config import load_config
from param_decomp_lab.errors import UserError
from param_decomp_lab.folders import not_written, write_whole
from param_decomp_lab.probe.answer import OnProgress, ProbeAnswer, compile_parts
from param_decomp_lab.probe.cards import Card, MemoryPool
from param_decomp_lab.probe.compiler import refuse_another_version
from param_decomp_lab.probe.measure import Where
from param_decomp_lab.probe.recipe import recipe_subject
from param_decomp_lab.probe.subject import Subject, run_subject
from param_decomp_lab.safe_io.yaml_text import read_mapping
from param_decomp_lab.ui.warnings import print_warnings


def probe(
    path: Path,
    overrides: Sequence[str],
    batch: int | None,
    seq: int | None,
    card: Card,
    nodes: int | None,
    per_node: int | None,
    pool: MemoryPool,
    cache: Path | None,
    console: Console,
    quick: bool,
) -> ProbeAnswer:
    """Probes the configuration in ``path``. Raises UserError for invalid arguments."""
    refuse_another_version()
    compile_without_gpus()
    subject = make_subject(path, overrides, batch, seq)
    where = Where(card.description, gpus_per_node_of_mesh(subject.mesh, nodes, per_node), cache)
    print_warnings(subject.notes, console)
    with progress(console) as on_progress:
        return compile_parts(subject, card, where, pool, on_progress, quick)


def make_subject(path: Path, overrides: Sequence[str], batch: int | None, seq: int | None) -> Subject:
    """Returns what the file describes: a wrapper's run, or a recipe's pretraining. ``batch``,
    ``seq``: replace its own.
    """
    raw = read_mapping(path, "the configuration")
    if "model" in raw and "torch_config" not in raw:
        if overrides:
            raise UserError(f"{path}: is a recipe, which takes no --set, only --batch and --seq")
        return recipe_subject(path, batch, seq)
    given = {"pd.batch_size": batch, "data.max_seq_len": seq}
    sets = [f"{key}={value}" for key, value in given.items() if value is not None]
    return run_subject(load_config(path, [*overrides, *sets]))


def compile_without_gpus() -> None:
    """Selects the CPU backend, before JAX starts: with a GPU, JAX would reserve it and compile only for that one."""
    jax.config.update("jax_platforms", "cpu")


def gpus_per_node_of_mesh(mesh: MeshShape, nodes: int | None, per_node: int | None) -> int:
    """Returns the GPUs per node. Raises UserError unless the mesh uses all GPUs of all nodes, and each of its nodes is
    within one real node.
    """
    each = _gpus_per_node(mesh, nodes, per_node)
    together = mesh.fsdp // mesh.nodes * mesh.tensor
    if mesh.nodes > 1 and each % together:
        right = max(1, mesh.fsdp * mesh.tensor // each)
        raise UserError(
            f"mesh: fsdp {mesh.fsdp} × tensor {mesh.tensor} in {mesh.nodes} nodes are {together} GPUs in each, but a "
            f"node has {each}; try --set mesh.nodes={right}"
        )
    return each


def _gpus_per_node(mesh: MeshShape, nodes: int | None, per_node: int | None) -> int:
    n = mesh.n_devices
    each = per_node or (8 if nodes is None else max(1, n // nodes))
    axes = f"mesh: replica {mesh.replica} × fsdp {mesh.fsdp} × tensor {mesh.tensor} are {n} devices"
    if nodes is None and per_node is None:
        if n > each and n % each:
            raise UserError(
                f"{axes}, which do not fill whole nodes of {each}; say how many GPUs a node has (--gpus-per-node)"
            )
        return min(n, each)
    there = (nodes or max(1, -(-n // each))) * each
    if there != n:
        which = f"{nodes or there // each} node{'s'[: (nodes or 2) > 1]} of {each} GPUs are {there}"
        fsdp = there // (mesh.replica * mesh.tensor) or 1
        raise UserError(f"{axes}, but {which}; make them equal, such as with --set mesh.fsdp={fsdp}")
    return each


@contextmanager
def progress(console: Console) -> Iterator[OnProgress]:
    """Shows the current activity and its duration: one transient line on a terminal, else a line each."""
    if not console.is_terminal:
        yield lambda what: console.print(f"{what} …", highlight=False, soft_wrap=True)
        return
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("reading")

        def on_progress(what: str) -> None:
            bar.reset(task, description=what)

        yield on_progress


def write_json(answer: Mapping[str, Any], file: Path) -> None:
    """Writes the answer as JSON. Raises UserError if it cannot be written."""
    try:
        write_whole(file, json.dumps(answer, indent=1) + "\n")
    except OSError as error:
        raise not_written(file, error, "choose another place with --json") from error
