#!/bin/bash
# One task of a run, from the run's own copy of the code: `pd train --resume RUN`, which begins a run without checkpoints.
#
#   bash RUN/code/slurm/task.sh RUN [OPTIONS OF pd train]
#
# Of a job (start.sh) or of `pd launch --local`. PYTHON: of the environment with the packages. PD_PREEMPTED: a file to make
# when the run was told to stop, in place of status 75.

set -u
run=$1
shift

# Programs that were compiled once: a start after a requeue then takes seconds. To be seen by all nodes, like the run.
export JAX_COMPILATION_CACHE_DIR=${JAX_COMPILATION_CACHE_DIR:-$(dirname "$run")/compiled}
# Of a GPU's memory; what `pd probe` reckons with. The rest is for NCCL and cuDNN. JAX's own default is 0.75.
export XLA_PYTHON_CLIENT_MEM_FRACTION=${XLA_PYTHON_CLIENT_MEM_FRACTION:-0.92}
# Not the checkout, which may have been edited meanwhile. (-P: not even if this is its folder.)
export PYTHONPATH=$run/code${PYTHONPATH:+:$PYTHONPATH}

# This shell must outlive SIGTERM, which Slurm sends to it and to what it runs.
told=
trap 'told=yes' TERM INT
"$PYTHON" -P -m param_decomp_lab train --resume "$run" "$@"
status=$?

# 143: told to stop so early that nobody listened yet. Nothing is lost: the run goes on from its last checkpoint.
if [ -n "${PD_PREEMPTED:-}" ] && { [ $status -eq 75 ] || { [ $status -eq 143 ] && [ -n "$told" ]; }; }; then
    : > "$PD_PREEMPTED" && exit 0
fi
exit $status
