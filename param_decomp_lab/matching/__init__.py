"""Matches the components of two runs one to one (`pairs.py`) and holds the results (`result.py`). Needs no JAX."""
