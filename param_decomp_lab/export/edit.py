"""Writes an edited target: the run's network with some components scaled in its weights."""

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from param_decomp_jax.decomposition.sites import PRE_IDENTITY
from param_decomp_jax.method.step import Problem
from param_decomp_jax.nn.numerics import kl_divergence
from param_decomp_jax.sharding.placement import batch_sharding, from_host
from param_decomp_jax.targets.architecture import TokenInputs
from param_decomp_jax.targets.base import Weights
from param_decomp_lab.errors import UserError
from param_decomp_lab.folders import new_folder
from param_decomp_lab.opening import Run
from param_decomp_lab.opening.selection import Selection, selected
from param_decomp_lab.runs.forward import clean
from param_decomp_lab.runs.prompt import read_prompt
from param_decomp_lab.runs.target import weights_folder
from param_decomp_lab.weights.dtypes import Dtype
from param_decomp_lab.weights.target_folder import CONFIG_FILE, TargetFolder, save_target

EDIT_FILE = "edit.json"
"""Records what was edited and how much the outputs changed; marks a folder that this program wrote."""
SHOWN = 5
BATCH = 8
LARGEST_EXTRA = 64 << 20
"""Largest size in bytes of a file beside the weights, such as a tokenizer, that is copied along."""


@dataclass(frozen=True)
class Prompted:
    """Predictions after a prompt: the most likely tokens of either network, each with both probabilities."""

    prompt: str
    tokens: list[tuple[str, float, float]]


@dataclass(frozen=True)
class Edit:
    """What was edited. ``components``: by site. ``kl``: KL(original ‖ edited) in nats, averaged over the positions of
    ``rows`` held-out rows (None for a toy).
    """

    run: str
    step: int
    components: dict[str, list[int]]
    scale: float
    kl: float | None
    rows: int
    prompts: list[Prompted]


def export_edited(
    run: Run,
    selection: Selection,
    scale: float,
    out: Path,
    *,
    dtype: Dtype | None = None,
    rows: int = 64,
    prompts: tuple[str, ...] = (),
    overwrite: bool = False,
) -> Edit:
    """Writes the target with the selected components multiplied by ``scale`` into the new folder ``out``.

    The folder has the layout of the target's own (Hugging Face's for a language model), with the target's tokenizer if
    it is beside the weights. ``dtype``: of the tensors; None keeps that of the target's folder.

    Raises UserError for what cannot be edited, and if ``out`` exists.
    """
    numbers = _numbers(run, selection)
    weights = edited_weights(run, numbers, scale)
    source = weights_folder(run.resolved.target)
    stored = TargetFolder(source).dtype.name
    to: Dtype = dtype if dtype is not None else "bfloat16" if stored == "bfloat16" else "float32"
    moved = jax.tree.map(lambda x: x.astype(to).astype(x.dtype), weights)
    is_text = isinstance(run.architecture.inputs, TokenInputs)
    kl = _kl(run, moved, rows) if is_text else None
    told = [_prompted(run, moved, prompt) for prompt in prompts]
    edit = Edit(run.id, run.step, numbers, scale, kl, rows if is_text else 0, told)
    with new_folder(out, marker=EDIT_FILE, overwrite=overwrite) as partial:
        raw = json.loads((source / CONFIG_FILE).read_text())
        eos = raw.get("eos_token_id")
        save_target(partial, run.architecture, weights, to, eos_token_id=eos if isinstance(eos, int) else None)
        for file in source.iterdir():
            if _comes_along(file):
                shutil.copyfile(file, partial / file.name)
        (partial / EDIT_FILE).write_text(
            json.dumps(asdict(edit), indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
        )
    return edit


def _comes_along(file: Path) -> bool:
    """Whether a file is copied along: tokenizers and generation settings are; weights and training records are not."""
    named = file.name.startswith(("tokenizer", "special_tokens", "vocab", "merges", "generation_config", "meta.json"))
    return named and file.is_file() and file.stat().st_size <= LARGEST_EXTRA


def _numbers(run: Run, selection: Selection) -> dict[str, list[int]]:
    """Returns the selected components by site. Raises UserError for a site without its own matrix in the target."""
    found = {}
    for name, mask in selected(selection, run.sites, 1, may_have_positions=False, groups=lambda: run.groups).items():
        site = run.sites[name]
        if site.kind.endswith(PRE_IDENTITY):
            raise UserError(f"{name} is an identity put before a matrix: the target has nothing there to edit")
        if site.lookup and getattr(run.architecture, "tied", False):
            raise UserError(f"{name}: the head is tied to this table, so an edit would change the head as well")
        found[name] = np.flatnonzero(mask[0]).tolist()
    return found


def edited_weights(run: Run, components: dict[str, list[int]], scale: float) -> Weights:
    """Returns the target's weights in fp32 with each of these components multiplied by ``scale``: ``W + (scale − 1) Σ
    V_c U_c``.
    """
    sites = run.target.sites
    with jax.set_mesh(run.mesh):
        weights = jax.tree.map(lambda x: x.astype(jnp.float32), run.weights)
        by_stack, back = jax.vjp(run.target.site_weights, weights)
        changes = jax.tree.map(lambda x: np.zeros(x.shape, np.float32), by_stack)
        for site, (stack, place) in zip(sites.all, sites.stack_rows, strict=True):
            numbers = components.get(site.name)
            if numbers:
                V, U = run.factors(site.name)
                changes[stack.name][place] = (scale - 1) * (V[:, numbers].astype(np.float64) @ U[numbers])
        # A site's matrix is a slice of a weight array; the transpose of slicing puts the change in its place.
        [change] = back(jax.tree.map(jnp.asarray, changes))
        edited: Weights = jax.tree.map(jnp.add, weights, change)
    return edited


def _kl(run: Run, edited: Weights, rows: int) -> float:
    data = run.resolved.held_out_rows
    longest = run.longest_row
    chosen = np.sort(np.random.default_rng(0).permutation(len(data))[:rows])
    total, count = 0.0, 0
    measure = jax.jit(_row_kl, static_argnums=0)
    with jax.set_mesh(run.mesh):
        for start in range(0, len(chosen), BATCH):
            own = data.rows(chosen[start : start + BATCH])[:, :longest]
            padded = np.concatenate([own, np.repeat(own[:1], BATCH - len(own), axis=0)])
            batch = from_host(padded, batch_sharding(run.mesh, padded.shape))
            kl = np.asarray(measure(run.problem, run.weights, edited, batch))[: len(own)]
            total, count = total + float(kl.sum()), count + kl.size
    return total / count


def _row_kl(problem: Problem, weights: Weights, edited: Weights, inputs: Array) -> Float[Array, "*n"]:
    return kl_divergence(clean(problem, weights, inputs), clean(problem, edited, inputs))


def _prompted(run: Run, edited: Weights, prompt: str) -> Prompted:
    values, _ = read_prompt(run, prompt)
    of_either = []
    with jax.set_mesh(run.mesh):
        for weights in (run.weights, edited):
            output = np.asarray(jax.jit(clean, static_argnums=0)(run.problem, weights, jnp.asarray(values)[None]))
            of_either.append(output.reshape(-1, output.shape[-1])[-1].astype(np.float64))
    if run.text is None:
        outputs = of_either
        largest = np.argsort(-np.abs(outputs).max(axis=0), kind="stable")[:SHOWN]
    else:
        outputs = [np.exp(x - x.max()) / np.exp(x - x.max()).sum() for x in of_either]
        largest = np.argsort(-np.maximum(*outputs), kind="stable")[:SHOWN]
    before, after = (x[largest].tolist() for x in outputs)
    return Prompted(prompt, list(zip(run.names(largest.tolist()), before, after, strict=True)))


def edit_table(edit: Edit) -> list[Any]:
    """Returns a table for each prompt, for the terminal."""
    from param_decomp_lab.ui.numbers import number, percent
    from param_decomp_lab.ui.tables import plain_table

    tables = []
    for prompted in edit.prompts:
        table = plain_table(prompted.prompt, ("next", "left"), ("original", "right"), ("edited", "right"))
        for name, before, after in prompted.tokens:
            shown = (percent(before), percent(after)) if edit.kl is not None else (number(before), number(after))
            table.add_row(f"'{name}'", *shown)
        tables.append(table)
    return tables
