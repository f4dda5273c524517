"""Components of two runs matched one to one: how (`pairs.py`), and what is found (`result.py`). Needs no JAX."""
