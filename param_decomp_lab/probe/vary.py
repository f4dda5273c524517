"""`--vary`: reads what `pd fit` may choose, as kinds of runs and batches."""

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, get_args

from param_decomp_lab.config import RunConfig
from param_decomp_lab.config.memory import KEEP_ALL, Preset
from param_decomp_lab.errors import UserError
from param_decomp_lab.probe.search import Variant
from param_decomp_lab.safe_io.yaml_text import parse_yaml

ROWS_PER_GPU = tuple(2**k for k in range(7))
"""Default batches to try: numbers of rows on each GPU that has its own rows."""


SHORT = {
    "pd.batch_size": "batch=64..2048",
    "data.max_seq_len": "seq=512,2048",
    "memory.preset": "memory=lean,balanced",
    "remat_recon_forwards": "memory=plain,lean",
    "mesh.replica": "mesh=1x64x1,8x8x1",
    "mesh.fsdp": "mesh=1x64x1,8x8x1",
    "mesh.tensor": "mesh=1x64x1,1x32x2",
}
"""Keys of the configuration that have a short name here, with an example."""


Axes = tuple[int, int, int]
"""Sizes of a mesh: replica, fsdp, tensor."""


def parse_vary(texts: Sequence[str]) -> dict[str, list[Any]]:
    """``batch=64..2048`` doubles from 64 on; ``seq=512,2048`` lists; ``mesh=1x64x1,2x32x1`` are replica x fsdp x
    tensor; ``memory=lean,balanced`` are presets; any other key is one of the configuration. Raises UserError for other
    texts.
    """
    found: dict[str, list[Any]] = {}
    for text in texts:
        key, equals, value_text = text.partition("=")
        if not equals or not value_text:
            raise UserError(f"--vary {text}: should be key=values, such as batch=64..2048 or seq=512,2048")
        if key in SHORT:
            raise UserError(f"--vary {text}: this is varied as a whole, such as --vary {SHORT[key]}")
        if key in found:
            raise UserError(f"--vary {text}: {key} is given twice; put all its values into one")
        values = [_value(key, part, text) for part in value_text.split(",")]
        found[key] = [v for value in values for v in (value if isinstance(value, list) else [value])]
    return found


def _value(key: str, value_text: str, text: str) -> Any:
    match key:
        case "batch" | "seq":
            first, dots, last = value_text.partition("..")
            if not first.isdecimal() or int(first) < 1 or (dots and not last.isdecimal()):
                raise UserError(f"--vary {text}: '{value_text}' is neither a number nor a range such as 64..2048")
            if not dots:
                return int(first)
            if int(last) < int(first):
                raise UserError(f"--vary {text}: the range ends before it begins")
            return [n for n in (int(first) * 2**k for k in range(40)) if n <= int(last)]
        case "mesh":
            sizes = value_text.split("x")
            if len(sizes) != 3 or not all(size.isdecimal() and int(size) for size in sizes):
                raise UserError(f"--vary {text}: '{value_text}' should be replica x fsdp x tensor, such as 1x64x1")
            return tuple(map(int, sizes))
        case "memory":
            if value_text not in get_args(Preset):
                raise UserError(
                    f"--vary {text}: there is no preset '{value_text}'; there are {', '.join(get_args(Preset))}"
                )
            return value_text
        case _:
            return parse_yaml(value_text, f"--vary {text}")


def kinds(
    config: RunConfig,
    n_gpus: int,
    vary: Mapping[str, Sequence[Any]],
    set_keys: Collection[str] = (),
    per_node: int = 8,
) -> list[Variant]:
    """Returns all combinations. Keys that are not varied have the configuration's own value, with its mesh stretched
    over the GPUs.

    Batch and preset are varied by default, unless they are in ``set_keys``. Raises UserError for a mesh whose axes do
    not multiply to the number of GPUs.
    """
    meshes = meshes_of(config, n_gpus, vary)
    own_preset = config.wrapper.memory.preset
    others = () if {"memory", "memory.preset", "remat_recon_forwards"} & {*set_keys} else ("balanced", "lean")
    presets = list(vary.get("memory", ())) or list(dict.fromkeys((own_preset, *others)))
    seqs = list(vary.get("seq", ())) or [None]
    keys = {key: values for key, values in vary.items() if key not in ("batch", "seq", "mesh", "memory")}
    # A configuration that ignores nodes continues to do so, as if all GPUs were in one node.
    in_node = per_node if config.wrapper.mesh.nodes > 1 else n_gpus
    found = []
    for mesh, preset, seq, *rest in itertools.product(meshes, presets, seqs, *keys.values()):
        settings: list[tuple[str, Any]] = [
            ("mesh", mesh_sizes(mesh, in_node)),
            ("memory.preset", preset),
            ("remat_recon_forwards", preset not in KEEP_ALL),
        ]
        if seq is not None:
            settings.append(("data.max_seq_len", seq))
        settings += zip(keys, rest, strict=True)
        settings = list(fitting_evaluation(config, dict(settings), keys))
        rows = batch_multiple(config, dict(settings))
        batches = tuple(vary.get("batch", ())) or tuple(rows * n for n in ROWS_PER_GPU)
        if "batch" not in vary and "pd.batch_size" in set_keys:
            batches = (config.method.pd.batch_size,)
        words = [preset, "×".join(map(str, mesh)) if len(meshes) > 1 else "", f"seq {seq:,}" if len(seqs) > 1 else ""]
        words += [f"{key} {value}" for key, value in zip(keys, rest, strict=True)]
        found.append(Variant(", ".join(filter(None, map(str, words))), tuple(settings), batches))
    return found


def sets_mesh(keys: Collection[str]) -> bool:
    """Whether the mesh is among ``keys``, or a part of it."""
    return any(key.partition(".")[0] == "mesh" for key in keys)


def meshes_of(config: RunConfig, n_gpus: int, vary: Mapping[str, Sequence[Any]]) -> list[Axes]:
    """Returns the meshes that ``vary`` gives, else the configuration's, stretched over the GPUs. Raises UserError for a
    mesh whose axes do not multiply to the number of GPUs.
    """
    own = config.wrapper.mesh
    meshes = list(vary.get("mesh", ()))
    if not meshes:
        fixed = own.replica * own.tensor
        if n_gpus % fixed:
            sizes = f"replica {own.replica} × tensor {own.tensor}"
            raise UserError(f"the configuration's {sizes} do not divide {n_gpus} GPUs; give --vary mesh=1x{n_gpus}x1")
        meshes = [(own.replica, n_gpus // fixed, own.tensor)]
    for mesh in meshes:
        if mesh[0] * mesh[1] * mesh[2] != n_gpus:
            shape = "x".join(map(str, mesh))
            raise UserError(f"--vary mesh={shape}: takes {mesh[0] * mesh[1] * mesh[2]} GPUs, --gpus says {n_gpus}")
    return meshes


def mesh_sizes(mesh: Axes, per_node: int) -> dict[str, int]:
    """Returns the mesh as a setting, with its fsdp axis divided by nodes if it spans several."""
    replica, fsdp, tensor = mesh
    nodes, rest = divmod(fsdp * tensor, per_node)
    whole_nodes = nodes > 1 and not rest and fsdp % nodes == 0
    return {"replica": replica, "fsdp": fsdp, "tensor": tensor, "nodes": nodes if whole_nodes else 1}


def fitting_evaluation(
    config: RunConfig, settings: Mapping[str, Any], said: Collection[str]
) -> tuple[tuple[str, Any], ...]:
    """Returns ``settings`` and, if the evaluation's batch does not fit the mesh and its size is not among the keys
    ``said``, a larger batch.
    """
    rows, evaluated = batch_multiple(config, settings), config.method.eval
    if evaluated is not None and evaluated.batch_size % rows and "eval.batch_size" not in said:
        settings = {**settings, "eval.batch_size": -(-evaluated.batch_size // rows) * rows}
    return tuple(settings.items())


def evaluating_less(config: RunConfig, kind: Variant) -> Variant | None:
    """Returns ``kind`` with smaller and correspondingly more batches in an evaluation, so that it sees the same number
    of rows; None if a batch is already as small as the mesh allows.
    """
    own, settings = config.method.eval, dict(kind.settings)
    assert own is not None
    rows = batch_multiple(config, settings)
    times = settings.get("eval.batch_size", own.batch_size) // rows
    fewer = max((n for n in range(1, times) if times % n == 0), default=None)
    if fewer is None:
        return None
    settings["eval.batch_size"] = fewer * rows
    settings["eval.n_steps"] = settings.get("eval.n_steps", own.n_steps) * times // fewer
    return replace(kind, settings=tuple(settings.items()))


def batch_multiple(config: RunConfig, settings: Mapping[str, Any]) -> int:
    """Returns the number of rows of which a batch is a multiple: one on each GPU that has its own rows, in each
    micro-batch.
    """
    mesh, parts = settings["mesh"], settings.get("memory.micro_batches", config.wrapper.memory.micro_batches)
    return int(mesh["replica"] * mesh["fsdp"] * parts)
