"""Groups of components that act together, found by minimum description length. Needs no JAX."""
