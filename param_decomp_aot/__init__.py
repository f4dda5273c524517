"""Ahead-of-time compilation for GPUs that are not present, and analysis of the compiled programs."""

JAX_VERSION = "0.10.2"
"""The JAX, with CUDA plugin, whose compiler this package drives and whose XLA texts it reads, as in the extra `probe`.
Another JAX with a plugin of its own version may work as well."""
