"""A run opened for reading: its components, its CI function and its target, on whatever devices are here."""

from param_decomp_lab.opening.load import load_run
from param_decomp_lab.opening.run import Component, Run

__all__ = ["Component", "Run", "load_run"]
