"""`pd compare`: compares runs with each other."""

from param_decomp_lab.compare.page import Compared, compare

__all__ = ["Compared", "compare"]
