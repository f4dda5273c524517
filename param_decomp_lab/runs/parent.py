"""Fine-tuning: starts a run from the learned parameters of another (`init_from`), and records that run."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from param_decomp_jax.method.state import Learned
from param_decomp_lab.config import RunConfig, difference
from param_decomp_lab.errors import UserError
from param_decomp_lab.folders import write_whole
from param_decomp_lab.processes.group import ALONE, Processes
from param_decomp_lab.runs.checkpoints.damage import array_shapes, read_description
from param_decomp_lab.runs.checkpoints.fingerprints import combine_fingerprints
from param_decomp_lab.runs.checkpoints.store import Checkpoints, flatten
from param_decomp_lab.runs.folder import CONFIG_FILE
from param_decomp_lab.safe_io.json_text import read_json
from param_decomp_lab.safe_io.yaml_text import parse_yaml

PARENT_FILE = "parent.json"
SHOWN = 12
"""The most differences that a message lists."""

Matrix = tuple[int, int, int]
"""d_in, d_out and C of a site."""


@dataclass(frozen=True)
class Parent:
    """A checkpoint of another run. ``fingerprint``: of its components and CI function; "" if it was saved without.
    ``target``: that of its target's weights. ``changes``: the differences of the run that begins there.
    """

    folder: Path
    step: int
    fingerprint: str
    target: str
    changes: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.folder} at step {self.step}"

    def write(self, run_folder: Path) -> None:
        told = {"run_id": self.folder.name, **asdict(self), "folder": str(self.folder)}
        write_whole(run_folder / PARENT_FILE, json.dumps(told, indent=2) + "\n")


def find_parent(config: RunConfig, run_folder: Path | None = None) -> Parent | None:
    """Returns the checkpoint that `init_from` names; None without one. Reads no arrays.

    ``run_folder``: that of a run that was already started and has recorded its parent; another parent is then refused.
    Raises UserError if the checkpoint is missing, or `config` cannot start from it.
    """
    if config.wrapper.parent is None:
        return None
    folder, step = config.wrapper.parent
    if not (folder / CONFIG_FILE).is_file():
        raise UserError(f"init_from: {folder} is not a run folder: it has no {CONFIG_FILE}; give RUN or RUN@STEP")
    recorded = _recorded(run_folder)
    step = recorded.get("step", step)
    checkpoints = Checkpoints(folder)
    there = checkpoints.steps()
    if not there or (step is not None and step not in there):
        have = f"it has those of steps {', '.join(map(str, there))}" if there else "it has none"
        raise UserError(f"init_from: {folder} has no checkpoint{'' if step is None else f' of step {step}'}; {have}")
    step = there[-1] if step is None else step
    about, at = read_description(checkpoints.path(step)), f"the checkpoint of step {step} in {folder}"
    other = RunConfig.from_mapping(parse_yaml(about["configuration"], at), at)
    prints = about["fingerprints"].get("learned", {})
    changes = tuple(line for line in difference(other, config) if not line.startswith("init_from: "))
    parent = Parent(
        folder, step, combine_fingerprints(prints) if prints else "", about["inputs"].get("target", ""), changes
    )
    if recorded and recorded["fingerprint"] != parent.fingerprint:
        raise UserError(f"init_from: {parent} no longer holds what this run began with")
    return parent


def refuse_mismatch(parent: Parent, template: Learned) -> None:
    """Raises UserError, with the differences, if the parent's sites or its CI function are not
    those of ``template``.
    """
    theirs = array_shapes(Checkpoints(parent.folder).path(parent.step) / "learned")
    ours = {name: tuple(leaf.shape) for name, leaf in flatten(template).items()}
    lines = list(_unlike_sites(sites_from_shapes(theirs), sites_from_shapes(ours)))
    lines += [line for line in parent.changes if line.startswith(("pd.ci_config.", "pd.tied_weights"))]
    lines = [line for line in lines if "attn_config.max_len:" not in line]  # a limit, not part of the function
    if not lines:
        names = sorted(theirs.keys() | ours.keys())
        lines = [f"{n}: shape {_of(theirs, n)} -> {_of(ours, n)}" for n in names if theirs.get(n) != ours.get(n)]
    if lines:
        more = [f"and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else []
        told = "\n  ".join([*lines[:SHOWN], *more])
        raise UserError(
            f"init_from: {parent} has other sites or another CI function than this run (there -> here):\n  {told}"
        )


def restore_parent(parent: Parent, template: Learned, processes: Processes = ALONE) -> Learned:
    """Returns the parent's learned parameters, placed as ``template`` says. Reads nothing else of its checkpoint.

    Raises `Damaged` if they differ from what was saved; no other step is used instead.
    """
    return Checkpoints(parent.folder, processes=processes).restore_learned(parent.step, template)


def sites_from_shapes(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Matrix]:
    """The sites whose components have these shapes, by name: `components/layers.1-2.mlp.up_proj/V` holds two."""
    found: dict[str, Matrix] = {}
    for name, shape in shapes.items():
        group, _, rest = name.partition("/")
        stack, _, factor = rest.rpartition("/")
        if group == "components" and factor == "V" and f"components/{stack}/U" in shapes:
            d_out = shapes[f"components/{stack}/U"][-1]
            names = [stack]
            for n in shape[:-2]:  # layers, and experts
                names = [member for name in names for member in _members(name, n)]
            found |= dict.fromkeys(names, (shape[-2], d_out, shape[-1]))
    return found


def _members(stack: str, n_layers: int) -> list[str]:
    span = re.search(r"(?<![\w-])(\d+)-(\d+)(?![\w-])", stack)
    if span is None or int(span[2]) - int(span[1]) + 1 != n_layers:
        return [stack]
    return [f"{stack[: span.start()]}{n}{stack[span.end() :]}" for n in range(int(span[1]), int(span[2]) + 1)]


def _unlike_sites(theirs: Mapping[str, Matrix], ours: Mapping[str, Matrix]) -> Iterator[str]:
    for name in [*ours, *(name for name in theirs if name not in ours)]:
        if theirs.get(name) != ours.get(name):
            yield f"{name}: {_site(theirs.get(name))} -> {_site(ours.get(name))}"


def _site(matrix: Matrix | None) -> str:
    return "no site" if matrix is None else f"{matrix[0]} x {matrix[1]}, C {matrix[2]}"


def _of(shapes: Mapping[str, tuple[int, ...]], name: str) -> str:
    return " x ".join(map(str, shapes[name])) or "()" if name in shapes else "(absent)"


def _recorded(run_folder: Path | None) -> dict[str, Any]:
    if run_folder is None or not (run_folder / PARENT_FILE).is_file():
        return {}
    try:
        found = read_json(run_folder / PARENT_FILE, "what the run began with", dict)
        return {"step": int(found["step"]), "fingerprint": str(found["fingerprint"])}
    except (UserError, ValueError, KeyError, TypeError) as error:
        why = str(error) if isinstance(error, UserError) else repr(error)
        raise UserError(
            f"{run_folder / PARENT_FILE} cannot be read ({why}); it says what the run began with"
        ) from error
