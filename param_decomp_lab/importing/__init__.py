"""`pd import`: a decomposition that the PyTorch project made, as a run folder."""
