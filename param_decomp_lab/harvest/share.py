"""Finds the share of a harvest that a process does."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from param_decomp_lab.errors import UserError
from param_decomp_lab.processes.joining import SLURM, task_devices


@dataclass(frozen=True)
class Share:
    """Process ``number`` of ``count``, each of which harvests a share of the blocks."""

    number: int = 0
    count: int = 1

    @property
    def n_devices(self) -> int:
        """The number of devices of this process."""
        import jax

        return jax.local_device_count()


def find_share(count: int | None, number: int | None, environment: Mapping[str, str] = os.environ) -> Share:
    """Returns the share that is given, else the one from `srun`, in which case it takes this task's GPUs. Raises
    UserError if only one of the two arguments is given.
    """
    if count is None and number is None:
        if not all(name in environment for name in SLURM) or int(environment["SLURM_NTASKS"]) == 1:
            return Share()
        own = task_devices(environment)
        if own is not None:
            import jax

            jax.config.update("jax_cuda_visible_devices", ",".join(map(str, own)))
        return Share(int(environment["SLURM_PROCID"]), int(environment["SLURM_NTASKS"]))
    if count is None or number is None:
        missing = "--processes" if count is None else "--process-id"
        raise UserError(f"{missing} missing: several processes need --processes N and --process-id I (0 to N - 1)")
    if not 0 <= number < count:
        raise UserError(f"--process-id: is {number}, but with --processes {count} it goes from 0 to {count - 1}")
    return Share(number, count)
