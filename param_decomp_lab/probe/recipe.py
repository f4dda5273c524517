"""Makes a pretraining the subject of a probe: its step on one GPU."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from param_decomp_aot.compile import device_bytes
from param_decomp_aot.flops import Flops, matmul_flops
from param_decomp_jax.sharding.mesh import MeshShape, whole
from param_decomp_lab.data.meta import META_FILE, DataMeta
from param_decomp_lab.errors import UserError
from param_decomp_lab.pretrain.program import step_program
from param_decomp_lab.pretrain.recipe import PretrainRecipe, read_recipe
from param_decomp_lab.probe.subject import STEP, Phase, Subject
from param_decomp_lab.setup.programs import Program


def recipe_subject(path: Path, batch: int | None = None, seq: int | None = None) -> Subject:
    """Returns the subject. ``batch``, ``seq``: replace the recipe's batch size and its data's row length.

    Raises UserError for a toy, and if neither the recipe nor its data give the row length and the vocabulary size.
    """
    recipe = read_recipe(path)
    if not isinstance(recipe, PretrainRecipe):
        raise UserError(f"{path}: is a toy's recipe, which fits anywhere; a probe takes a language model's")
    if batch is not None:
        recipe = recipe.model_copy(update={"batch_size": batch})
    if recipe.batch_size % recipe.micro_batches:
        raise UserError(f"--batch {batch}: cannot be cut into {recipe.micro_batches} micro-batches")
    data = DataMeta.read(Path(recipe.data)) if (Path(recipe.data) / META_FILE).is_file() else None
    length = seq or (data and data.seq_len)
    if not length:
        raise UserError(f"{path}: its data ({recipe.data}) is not here; say how long a row is with --seq")
    program = partial(step_program, recipe, length, None if data is None else data.vocab_size)
    described = {
        "model": " ".join(f"{key} {value}" for key, value in recipe.model if value is not None),
        "batch": f"{recipe.batch_size:,} × {length:,}"
        + (f" in {recipe.micro_batches} micro-batches" if recipe.micro_batches > 1 else ""),
        "numbers": recipe.dtype,
        "memory": f"layers {recipe.layers}, recomputed: {', '.join(sorted(recipe.recomputed)) or 'nothing'}",
    }
    decides = recipe.model_dump_json(exclude={"data", "out", "log_every", "eval"})
    return Subject(
        title=path.stem,
        described=described,
        identity=f"{decides} {length} {data and data.vocab_size}",
        mesh=MeshShape(),
        tokens=recipe.batch_size * length,
        phases={STEP: partial(_stepping, program)},
        flops=partial(_flops, program),
    )


def _stepping(program: Callable[..., Any], mesh: Mesh) -> Phase:
    function, arguments = program(whole(mesh))
    weights, moments, tokens, _ = arguments
    groups = {"weights": weights, "moments": moments, "batch": tokens}
    return Phase(Program(function, arguments), 0, {name: device_bytes(part) for name, part in groups.items()})


def _flops(program: Callable[..., Any]) -> Flops:
    function, arguments = program()
    return matmul_flops(jax.make_jaxpr(function)(*arguments))
