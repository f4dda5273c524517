"""`pd import`: converts a decomposition of the PyTorch project to a run folder."""
