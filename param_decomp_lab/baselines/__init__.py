"""`pd eval --baselines`: compares a run with decompositions of its matrices that need no training (section 17)."""
