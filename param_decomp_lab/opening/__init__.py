"""Opening a run for reading: its components, CI function and target, on any number of devices."""

from param_decomp_lab.opening.load import load_run
from param_decomp_lab.opening.run import Component, Run

__all__ = ["Component", "Run", "load_run"]
