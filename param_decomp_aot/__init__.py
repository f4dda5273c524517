"""Compiling for hardware that is not here: takes strings and abstract arguments, returns tables."""

JAX_VERSION = "0.10.2"
"""The JAX, with CUDA plugin, whose compiler this package drives and whose XLA texts it reads, as in the extra `probe`.
Another JAX with a plugin of its own version may work as well."""
