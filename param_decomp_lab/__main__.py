"""`python -m param_decomp_lab` is `pd`."""

from param_decomp_lab.cli import main

main()
