"""Opening a run for reading: what it learned and its target, its harvest and graphs, on any number of devices."""

from param_decomp_lab.opening.run import Run, load_run
from param_decomp_lab.runs.opened import Component

__all__ = ["Component", "Run", "load_run"]
