#!/bin/bash
# One start of a job: the run goes on from its last checkpoint, or begins, in one task per GPU.
#
#   bash RUN/code/slurm/start.sh RUN
#
# What `pd launch` submits ends in this, and so does train.sbatch. It is in the run's own copy of the code, as everything
# else that the job runs. From outside come PYTHON (of the environment with the packages), PD_AGAIN (the command that puts
# the run into the queue once more, for people) and PD_JOB (the job for `scontrol requeue`: of an array, the number of one
# of its jobs may stand for all of them).

set -u
run=$(cd -- "$1" > /dev/null && pwd) || exit 2   # where CDPATH is set, cd may print
job=${PD_JOB:-$SLURM_JOB_ID}

# Submitted from inside another job, this one inherits that job's variables, and srun takes options from them that
# contradict its own. sbatch has set anew what describes this job; the rest goes, and srun is told everything below.
unset "${!SLURM_STEP_@}" "${!SLURM_CPU_BIND@}" "${!SLURM_MEM_BIND@}" "${!SLURM_MEM_PER_@}" \
    SLURM_GPUS_PER_TASK SLURM_DISTRIBUTION SLURM_HINT SLURM_THREADS_PER_CORE SLURM_EXPORT_ENV SLURM_NTASKS SLURM_NPROCS

echo "$(date '+%F %T') job $job, start ${SLURM_RESTART_COUNT:-0}: $run"

# srun --kill-on-bad-exit=1 ends all tasks as soon as one fails, instead of letting them wait for it. It would do so too
# when the first of them leaves with 75 (preempted and saved), hence a task says that in this file, and leaves with 0.
export PD_PREEMPTED=$run/.preempted-$job
rm -f "$PD_PREEMPTED"
srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks-per-node="${SLURM_NTASKS_PER_NODE:?say --ntasks-per-node to sbatch}" \
    --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" --mem=0 --kill-on-bad-exit=1 \
    bash "$run/code/slurm/task.sh" "$run"
status=$?

# No task of this start is left. One that was killed has left its name in the lock, where other machines would believe it.
if grep -qs "\"job\": \"$SLURM_JOB_ID\"" "$run/lock"; then
    : > "$run/lock"
fi

if [ -e "$PD_PREEMPTED" ] || [ $status -eq 75 ]; then
    rm -f "$PD_PREEMPTED"
    echo "$(date '+%F %T') stopped; back into the queue"
    scontrol requeue "$job" && exit 0
    echo "not requeued; resume with: ${PD_AGAIN:-sbatch, as before}" >&2
    exit 75
fi
if [ $status -ne 0 ]; then
    echo "$(date '+%F %T') failed with status $status; once that is fixed, resume with: ${PD_AGAIN:-sbatch, as before}" >&2
fi
exit $status
