"""`pd export`: writes learned parameters as safetensors, with a description for use without this package."""

import json
import platform
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open

from param_decomp_jax.ci import ComponentReadout, taps_of_groups, without_readout
from param_decomp_jax.sharding.mesh import MeshShape, make_mesh
from param_decomp_lab.errors import UserError
from param_decomp_lab.export.checkpoint_arrays import CheckpointArrays
from param_decomp_lab.export.safetensors_writer import INDEX_FILE, Slot, lay_out, map_tensor
from param_decomp_lab.export.tensors import TensorPiece, pieces
from param_decomp_lab.folders import DISK_ERRORS, new_folder
from param_decomp_lab.runs.checkpoints.store import Checkpoints, flatten
from param_decomp_lab.runs.load import FoundCheckpoint, find_checkpoint
from param_decomp_lab.setup.programs import learned_shapes
from param_decomp_lab.ui.templates import templates_beside
from param_decomp_lab.version import __version__
from param_decomp_lab.weights.recorded_target import describe

DESCRIPTION_FILE = "description.json"
README_FILE = "README.md"
FORMAT = 1
LARGEST_FILE = 4 * 10**9
"""Largest file in bytes. Larger exports are split into several files with an index, in Hugging Face's layout."""


def export_run(
    folder: Path, out: Path, step: int | None = None, *, overwrite: bool = False, largest: int = LARGEST_FILE
) -> dict[str, Slot]:
    """Writes V, U and the CI function of a run into the new folder ``out``; returns where every tensor is stored.

    The arrays are copied chunk by chunk, so the host holds at most one chunk: what one device held of a stack of sites.
    ``out`` appears when it is complete. ``largest``: bytes of a file. Raises UserError as `load_run` does, and if
    ``out`` exists or cannot be written.
    """
    found = find_checkpoint(folder, step)
    item = Checkpoints(found.folder).path(found.step) / "learned"
    arrays = CheckpointArrays(item)
    _check_arrays(arrays, found, item)
    parts = pieces(found.problem.target.sites, arrays.shapes)
    shapes = {piece.name: piece.shape for array_pieces in parts.values() for piece in array_pieces}
    with new_folder(out, marker=DESCRIPTION_FILE, overwrite=overwrite) as partial:
        try:
            slots = lay_out(partial, dict(sorted(shapes.items(), key=lambda entry: _order(found, entry[0]))), largest)
            for name, array_pieces in parts.items():
                _copy(arrays, name, array_pieces, partial, slots)
            _verify_files(partial, slots)
            description = _description(found, slots)
            (partial / DESCRIPTION_FILE).write_text(json.dumps(description, indent=2) + "\n")
            (partial / README_FILE).write_text(_readme(description, slots), encoding="utf-8")
        except OSError as error:
            if error.errno in DISK_ERRORS:
                raise  # `new_folder` handles these
            raise UserError(f"cannot write {out}: {error.strerror or error}") from error
    return slots


def _check_arrays(arrays: CheckpointArrays, found: FoundCheckpoint, item: Path) -> None:
    """Raises UserError unless the arrays match the configuration in shape and dtype."""
    wanted = flatten(learned_shapes(found.problem, make_mesh(MeshShape())))
    expected = {name: tuple(x.shape) for name, x in wanted.items()}
    wrong = sorted(name for name in {*expected, *arrays.shapes} if expected.get(name) != arrays.shapes.get(name))
    if wrong:
        here, then = arrays.shapes.get(wrong[0]), expected.get(wrong[0])
        raise UserError(f"{item}: {wrong[0]} is {here}, but the configuration implies {then} ({len(wrong)} such)")
    other = sorted(name for name, dtype in arrays.dtypes.items() if dtype != np.float32)
    if other:
        raise UserError(f"{item}: {other[0]} is {arrays.dtypes[other[0]]}, not float32")


def _order(found: FoundCheckpoint, name: str) -> tuple[int, int, str]:
    """Sort key that puts the components first, site by site in canonical order, and the CI function last."""
    names = [f"components.{site.name}." for site in found.problem.target.sites.all]
    number = next((n for n, prefix in enumerate(names) if name.startswith(prefix)), len(names))
    return (0 if number < len(names) else 1, number, name)


def _copy(
    arrays: CheckpointArrays, name: str, array_pieces: list[TensorPiece], folder: Path, slots: Mapping[str, Slot]
) -> None:
    places = {piece.name: map_tensor(folder, slots[piece.name]) for piece in array_pieces}
    for part, values in arrays.chunks(name):
        for piece in array_pieces:
            whole = places[piece.name].T if piece.transposed else places[piece.name]
            if piece.row is None:
                whole[part] = values
            elif all(p.start <= n < p.stop for p, n in zip(part, piece.rows, strict=False)):
                n_lead = len(piece.rows)
                whole[part[n_lead:]] = values[tuple(n - p.start for p, n in zip(part, piece.rows, strict=False))]
    for place in places.values():
        place.flush()


def _verify_files(folder: Path, slots: Mapping[str, Slot]) -> None:
    """Checks that the safetensors library reads back the tensors that were written."""
    for file in {slot.file for slot in slots.values()}:
        with safe_open(folder / file, framework="numpy") as tensors:
            here = {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
        assert here == {name: slot.shape for name, slot in slots.items() if slot.file == file}


def _description(found: FoundCheckpoint, slots: Mapping[str, Slot]) -> dict[str, Any]:
    config, spec, sites = found.resolved.config, found.problem.decomposition, found.problem.target.sites
    tied = {second: first for first, second in sites.tied}
    return {
        "format": FORMAT,
        "run": {
            "id": config.wrapper.run_id or found.folder.name,
            "name": config.wrapper.run_name,
            "step": found.step,
            "steps": spec.steps,
        },
        "versions": {
            "python": platform.python_version(),
            "param-decomp": __version__,
            **{name: version(name) for name in ("jax", "orbax-checkpoint", "safetensors", "numpy")},
        },
        "target": describe(found.architecture),
        "sites": [
            {
                **{key: getattr(site, key) for key in ("name", "layer", "kind", "d_in", "d_out", "C", "lookup")},
                "V": f"components.{site.name}.V",
                "U": f"components.{site.name}.U",
                "tied_to": tied.get(site.name),
            }
            for site in sites.all
        ],
        "ci": {
            "fn_type": config.method.pd.ci_config.fn_type,
            **asdict(without_readout(spec.ci)),
            "boundaries": [list(group) for group in taps_of_groups(spec.ci, sites)],
            "component_readout": isinstance(spec.ci, ComponentReadout),
            "sigmoid_type": spec.squashing,
        },
        "use_delta_component": spec.use_delta,
        "tensors": {
            name: {"file": slot.file, "shape": list(slot.shape), "dtype": "float32"} for name, slot in slots.items()
        },
        "configuration": {
            "wrapper": config.wrapper.model_dump(mode="json"),
            "torch": config.method.model_dump(mode="json"),
        },
    }


def _readme(description: dict[str, Any], slots: Mapping[str, Slot]) -> str:
    files = sorted({slot.file for slot in slots.values()})
    template = templates_beside(__file__, html=False).get_template("README.md.jinja")
    return template.render(**description, files=files, index=INDEX_FILE if len(files) > 1 else None)
