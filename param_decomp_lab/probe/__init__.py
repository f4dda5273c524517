"""`pd probe` measures what a run needs of GPUs that are not present; `pd fit` finds the best run that fits on them."""

MEM_FRACTION = 0.92
"""Share of a device's memory that JAX reserves (``XLA_PYTHON_CLIENT_MEM_FRACTION``; slurm/task.sh)."""
MARGIN_GIB = 5.0
"""Margin for workspaces of libraries, which XLA's plan does not include."""
