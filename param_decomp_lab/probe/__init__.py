"""What a run needs of GPUs that are not here (`pd probe`), and the best run that fits on them (`pd fit`)."""

MEM_FRACTION = 0.92
"""Share of a device's memory that JAX is told to take (``XLA_PYTHON_CLIENT_MEM_FRACTION``; slurm/task.sh)."""
MARGIN_GIB = 5.0
"""For workspaces of libraries, which XLA's plan does not contain."""
