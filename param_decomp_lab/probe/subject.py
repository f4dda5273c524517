"""The parts of a run that `pd probe` compiles for a mesh."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import jax
from jax.sharding import Mesh

from param_decomp_aot.compile import device_bytes, on_the_host
from param_decomp_aot.flops import Flops, matmul_flops
from param_decomp_jax.ci import ComponentReadout
from param_decomp_jax.method.state import State, init_state
from param_decomp_jax.method.step import training_step
from param_decomp_jax.sharding.mesh import MeshShape, make_mesh
from param_decomp_lab.config import RunConfig
from param_decomp_lab.eval.evaluation import Evaluation, evaluation_programs
from param_decomp_lab.probe.outline import known_target, outline_on
from param_decomp_lab.runs.checkpoints.fingerprints import fingerprint_program
from param_decomp_lab.runs.checkpoints.store import copy_program
from param_decomp_lab.setup.base import Outline
from param_decomp_lab.setup.known_target import KnownTarget
from param_decomp_lab.setup.programs import (
    Program,
    aligned_components_program,
    calibration_program,
    init_program,
    initial_components_program,
    second_moments_program,
    steps_program,
    warmup_program,
)
from param_decomp_lab.setup.resolved import ResolvedConfig
from param_decomp_lab.ui.descriptions import describe_memory

STEP = "training step"
EVALUATIONS = ("evaluation", "slow evaluation", "figures", "rows of figures")


@dataclass(frozen=True)
class Phase:
    """A part of a run on one mesh.

    ``elsewhere``: bytes of one device that are occupied meanwhile without being arguments of the program. ``groups``:
    bytes of one device by kind of argument.
    """

    program: Program
    elsewhere: int
    groups: Mapping[str, int]


@dataclass(frozen=True)
class Subject:
    """What is probed. ``identity``: a text that differs if another program would be compiled. ``tokens``: of a step.
    ``phases``: in the order of a run, including `STEP`. ``flops``: counts the products of a step. ``described``,
    ``notes``: for people.
    """

    title: str
    described: Mapping[str, str]
    identity: str
    mesh: MeshShape
    tokens: int
    phases: Mapping[str, Callable[[Mesh], Phase]]
    flops: Callable[[], Flops]
    notes: tuple[str, ...] = ()


def run_subject(config: RunConfig) -> Subject:
    """Returns a decomposition as a subject. Raises UserError if its target's shapes are unknown."""
    resolved = ResolvedConfig(config)
    target = known_target(resolved)
    outline, spec = partial(outline_on, resolved, target), resolved.decomposition
    phases: dict[str, Callable[[Outline], Phase]] = {"making the state": _making}
    match config.wrapper.begins_with:
        case "weighted_singular_vectors":
            phases["second moments"] = partial(_preparing, second_moments_program)
            phases["singular vectors"] = partial(_preparing, initial_components_program)
        case "nonlinearity_aligned":
            phases["aligned components"] = partial(_preparing, aligned_components_program)
    if spec.warmup.steps:
        phases["faithfulness warm-up"] = partial(_preparing, warmup_program)
    if isinstance(spec.ci, ComponentReadout):
        phases["calibration"] = _calibrating
    phases[STEP] = partial(_stepping, config.wrapper.steps_per_dispatch)
    if config.method.eval is not None:
        phases |= {name: partial(_evaluating, config, name) for name in evaluation_programs(config.method.eval)}
    phases |= {"save": _saving, "restore": _restoring}
    return Subject(
        title=config.wrapper.run_name,
        described=_described(resolved, target),
        identity=_identity(config, target),
        mesh=resolved.mesh,
        tokens=prod(resolved.leading),
        phases={name: partial(_on_mesh, outline, phase) for name, phase in phases.items()},
        flops=partial(_flops, outline),
        notes=config.notes,
    )


def _described(resolved: ResolvedConfig, target: KnownTarget) -> dict[str, str]:
    wrapper, sites = resolved.config.wrapper, target.problem.target.sites
    Cs = sorted({site.C for site in sites.all})
    C = f"C {Cs[0]:,}" if len(Cs) == 1 else f"C {Cs[0]:,} to {Cs[-1]:,}"
    axes = " × ".join(f"{name} {size}" for name, size in wrapper.mesh if size > 1 and name != "nodes") or "one device"
    if wrapper.mesh.nodes > 1:
        axes += f", fsdp over {wrapper.mesh.nodes} nodes"
    return {
        "target": target.architecture.describe(),
        "sites": f"{len(sites)}, {C}",
        "batch": " × ".join(f"{size:,}" for size in resolved.leading),
        "mesh": axes,
        "memory": describe_memory(wrapper.memory.preset or "", resolved.decomposition.memory),
    }


_NO_PROGRAM = {
    "wrapper": (
        "torch_config",
        "run_name",
        "run_id",
        "out_dir",
        "wandb_group",
        "wandb_tags",
        "milestones",
        "target",
        "init_from",
    ),
    "torch": ("wandb", "cadence", "target"),
}
"""Parts of a configuration on which no program depends; of the target, only its shapes matter."""


def _identity(config: RunConfig, target: KnownTarget) -> str:
    parts: dict[str, Any] = {
        "wrapper": config.wrapper.model_dump(mode="json"),
        "torch": config.method.model_dump(mode="json"),
    }
    for part, keys in _NO_PROGRAM.items():
        for key in keys:
            parts[part].pop(key, None)
    return json.dumps({**parts, "target": repr(target.architecture), "dtype": str(target.dtype)}, sort_keys=True)


# ---- the parts of a run ----


def _on_mesh(outline: Callable[[Mesh], Outline], phase: Callable[[Outline], Phase], mesh: Mesh) -> Phase:
    return phase(outline(mesh))


def _making(outline: Outline) -> Phase:
    return Phase(init_program(outline), device_bytes(outline.weights), {})


def _preparing(program: Callable[[Outline], Program], outline: Outline) -> Phase:
    """Returns a phase before training, in which the initial components are made while the other parts of the state wait
    in memory.
    """
    state = outline.state
    return Phase(program(outline), device_bytes(state) - device_bytes(state.components), {})


def _calibrating(outline: Outline) -> Phase:
    state = outline.state
    return Phase(calibration_program(outline), device_bytes(state) - device_bytes((state.components, state.ci)), {})


def _stepping(size: int, outline: Outline) -> Phase:
    program = steps_program(outline, size)
    state, weights, inputs, _ = program.arguments
    return Phase(program, 0, _groups(state, weights, inputs))


def _evaluating(config: RunConfig, which: str, outline: Outline) -> Phase:
    assert outline.eval is not None
    state = outline.state
    evaluation = Evaluation(config, outline.problem, _no_data, outline.mesh)
    program = evaluation.programs(state, outline.weights, outline.eval.batch())[which]
    return Phase(program, device_bytes(state) - device_bytes((state.components, state.ci)), {})


def _no_data(number: int) -> Any:
    raise AssertionError("a probe evaluates nothing")


def _saving(outline: Outline) -> Phase:
    """Returns the phase of saving. Arrays are fingerprinted one at a time; one in host memory is copied to the device
    for this.
    """
    leaves = jax.tree.leaves(outline.state)
    largest = max([x for x in leaves if on_the_host(x)] or leaves, key=lambda x: prod(x.shape))
    program = Program(fingerprint_program(largest), (largest,))
    return Phase(program, device_bytes((leaves, outline.weights)) - device_bytes(largest), {})


def _restoring(outline: Outline) -> Phase:
    """Returns the phase of restoring. Arrays are copied one at a time, so the largest one counts."""
    state = outline.state
    largest = max(jax.tree.leaves(state), key=device_bytes)
    program = Program(copy_program(largest), (largest,))
    return Phase(program, device_bytes((state, outline.weights)) - device_bytes(largest), {})


def _groups(state: State, weights: Any, inputs: Any) -> dict[str, int]:
    """Returns bytes of one device by kind of argument of a step."""
    source_moments = [(a.mean, a.square) for a in state.adversaries.values()]
    groups = {
        "target": weights,
        "components V, U": state.components,
        "moments of V, U": state.components_moments,
        "CI function": state.ci,
        "moments of the CI function": state.ci_moments,
        "sources": [a.raw for a in state.adversaries.values()],
        "moments of the sources": source_moments,
        "batch": inputs,
    }
    return {name: device_bytes(part) for name, part in groups.items() if jax.tree.leaves(part)}


def _flops(outline_on_mesh: Callable[[Mesh], Outline]) -> Flops:
    """Counts the FLOPs of a trace without a mesh, which has the same arithmetic except within a `shard_map`."""
    outline = outline_on_mesh(make_mesh(MeshShape()))
    spec, sites = outline.problem.decomposition, outline.problem.target.sites
    # It does not matter where the state waits, and shapes alone cannot express host memory.
    spec = replace(spec, memory=replace(spec.memory, offload_state=frozenset()))
    state = jax.eval_shape(partial(init_state, spec, sites, outline.leading))
    step = partial(training_step, replace(outline.problem, decomposition=spec))
    return matmul_flops(jax.make_jaxpr(step)(state, outline.weights, outline.train.batch()))
