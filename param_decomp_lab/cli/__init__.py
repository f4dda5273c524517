"""The command line, `pd <command>`: a file for each command, which imports what it needs when it is called."""

from param_decomp_lab.cli.app import app, main

__all__ = ["app", "main"]
