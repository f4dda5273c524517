"""Makes the state that a run starts from: fresh, from a parent's components, or from its newest checkpoint."""

from dataclasses import replace
from functools import partial
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
from rich.text import Text

from param_decomp_jax.ci import ComponentReadout
from param_decomp_jax.decomposition.components import Components
from param_decomp_jax.method.initial_components import n_batches
from param_decomp_jax.method.state import State
from param_decomp_lab.config import RunConfig, difference
from param_decomp_lab.config.on_resume import allowed_changes
from param_decomp_lab.errors import NonFiniteLoss, UserError
from param_decomp_lab.runs.folder import saved_config
from param_decomp_lab.runs.parent import Parent, find_parent, refuse_mismatch, restore_parent
from param_decomp_lab.safe_io.printable import printable
from param_decomp_lab.safe_io.yaml_text import parse_yaml
from param_decomp_lab.setup.programs import (
    aligned_components_program,
    calibration_program,
    init_program,
    initial_components_program,
    learned_shapes,
    no_second_moments_program,
    second_moments_program,
    warmup_moments_program,
    warmup_program,
)
from param_decomp_lab.training.inputs import changed_inputs
from param_decomp_lab.training.job import NOTHING, TrainingJob
from param_decomp_lab.ui.progress import StepsBar
from param_decomp_lab.ui.warnings import print_warnings

WARMUP_CHUNK = 50
"""Warm-up steps per dispatch. The stop signal is checked between dispatches."""


def starting_state(job: TrainingJob, resumed: bool) -> tuple[State, bool]:
    """Returns the state that the job continues from, and whether it is on disk. Records the start in the run folder."""
    if resumed and (found := _restored(job)) is not None:
        return found, True
    if not resumed:
        job.record_start(0)
    return _fresh(job), False


def _initial(job: TrainingJob) -> State:
    job.stop.may_leave(f"while making the state; {NOTHING}")
    state: State = init_program(job.outline).function()
    return state


def _restored(job: TrainingJob) -> State | None:
    """Returns the state of the newest undamaged checkpoint; None without one. Renames newer, damaged checkpoints, so
    that their steps can be saved again.
    """
    job.stop.may_leave(f"while reading a checkpoint; {NOTHING}")
    if job.processes.first:
        job.checkpoints.sweep()
    with job.processes.sharing_errors():
        found = job.checkpoints.restore_newest(job.outline.state, partial(_refuse_mismatch, job))
    if found is None:
        job.console.print(f"{job.folder} has no checkpoint yet: starting from the beginning", soft_wrap=True)
        job.record_start(0, difference(saved_config(job.folder), job.config))
        return None
    step, state, damaged = found
    changes = difference(_checkpoint_config(job, step), job.config)
    for line in changes:
        text = Text.assemble((f"changed since step {step}:", "yellow"), f" {printable(line, 1000)}")
        job.console.print(text, highlight=False, soft_wrap=True)
    with job.processes.sharing_errors():
        renamed = job.checkpoints.rename_damaged(damaged) if job.processes.first else []
    for name, damage in zip(renamed, damaged.values(), strict=False):
        warning = f"a damaged checkpoint was renamed to {name}, and the one before it is used: {damage}"
        job.console.print(Text(printable(warning), "yellow"), highlight=False, soft_wrap=True)
    job.record_start(step, changes, renamed)
    job.console.print(f"resuming {job.folder} at step {step} of {job.spec.steps}", soft_wrap=True)
    return state


def _checkpoint_config(job: TrainingJob, step: int) -> RunConfig:
    at = f"the checkpoint of step {step}"
    return RunConfig.from_mapping(parse_yaml(job.checkpoints.configuration(step), at), at)


def _refuse_mismatch(job: TrainingJob, step: int) -> None:
    """Raises UserError if the checkpoint was saved with another configuration, target or data."""
    allowed_changes(_checkpoint_config(job, step), job.config, f"{job.folder} (step {step})")
    other = changed_inputs(job.checkpoints.inputs(step), job.inputs)
    if other:
        raise UserError(
            f"{job.folder} (step {step}) was made with another {' and another '.join(other)} than the present "
            "one; to resume, give the run what it was started with (its location may differ)"
        )


def _fresh(job: TrainingJob) -> State:
    """Returns the state before step 0."""
    parent = job.processes.in_turn(partial(_parent, job))
    if parent is None:
        return _calibrate(job, _warm_up(job, _from_weights(job, _initial(job))))
    job.console.print(f"starting from the components and CI function of {parent}", soft_wrap=True)
    if parent.target not in ("", job.inputs["target"]):
        print_warnings(["that run decomposed other weights than this one does"], job.console)
    fresh = _initial(job)
    for unlearned in jax.tree.leaves((fresh.components, fresh.ci)):
        unlearned.delete()
    with job.processes.sharing_errors():
        components, ci = restore_parent(parent, learned_shapes(job.setup.problem, job.setup.mesh), job.processes)
    return replace(fresh, components=components, ci=ci)


def _parent(job: TrainingJob) -> Parent | None:
    """Returns the checkpoint that the run starts from. Process 0 records it, and later starts use the same one."""
    parent = find_parent(job.config, job.folder)
    if parent is not None:
        refuse_mismatch(parent, learned_shapes(job.setup.problem, job.setup.mesh))
        if job.processes.first:
            parent.write(job.folder)
    return parent


def _from_weights(job: TrainingJob, state: State) -> State:
    """Returns the state with its initial components, if these are not the random ones."""
    begins_with = job.config.wrapper.begins_with
    if begins_with == "random":
        return state
    for drawn in jax.tree.leaves(state.components):
        drawn.delete()
    if begins_with == "nonlinearity_aligned":
        components = aligned_components_program(job.outline).function(job.setup.weights)
    else:
        components = _singular_vectors(job)
    return replace(state, components=components)


def _singular_vectors(job: TrainingJob) -> Components:
    """Returns singular vectors weighted by the outputs of the sites on the first batches (T6)."""
    where = f"while measuring the outputs of the sites; {NOTHING}"
    job.stop.may_leave(where)
    n = n_batches(job.setup.problem.target.sites, prod(job.setup.leading))
    moments = no_second_moments_program(job.outline).function()
    add = second_moments_program(job.outline).function
    with StepsBar(job.console, "second moments", n) as bar:
        for number in range(n):
            if job.stop():
                raise job.preempted(where)
            moments = add(moments, job.setup.weights, job.setup.train(number))
            bar.advance(number + 1)
    return initial_components_program(job.outline).function(moments, job.setup.weights)


def _warm_up(job: TrainingJob, state: State) -> State:
    """Returns the state after the faithfulness warm-up (T3), which runs in dispatches of a few steps each.

    If asked to stop, it exits without saving, since a run cannot be resumed in the middle of the warm-up.
    """
    total = job.spec.warmup.steps
    if total == 0:
        return state
    job.stop.may_leave("in the faithfulness warm-up; nothing was saved")
    components, loss = state.components, jnp.zeros(())
    moments = warmup_moments_program(job.outline).function(components)
    steps = warmup_program(job.outline).function
    with StepsBar(job.console, "faithfulness warm-up", total) as bar:
        for done in range(0, total, WARMUP_CHUNK):
            if job.stop():
                raise job.preempted("in the faithfulness warm-up; nothing was saved")
            n = min(WARMUP_CHUNK, total - done)
            components, moments, loss = steps(components, moments, job.setup.weights, np.int32(n))
            bar.advance(done + n)
            bar.show(f"faithfulness {float(loss):.3g}")
    if not np.isfinite(float(loss)):
        raise NonFiniteLoss(f"faithfulness is {float(loss)} in the warm-up (lr {job.spec.warmup.lr})")
    return replace(state, components=components)


def _calibrate(job: TrainingJob, state: State) -> State:
    """Returns the state with the scales of the component readout, if there is one (C8)."""
    if not isinstance(job.spec.ci, ComponentReadout):
        return state
    job.stop.may_leave(f"while reading the batch of step 0; {NOTHING}")
    inputs = job.setup.train.inputs(0, 1, 1)
    ci = calibration_program(job.outline).function(state.components, state.ci, job.setup.weights, inputs)
    return replace(state, ci=ci)
