"""Ahead-of-time compilation for GPUs that are not present, and analysis of the compiled programs."""

JAX_VERSION = "0.10.2"
"""The version of JAX, with CUDA plugin, whose compiler this package drives and whose XLA texts it reads; it is the one
in the extra `probe`. Other versions of JAX with a matching plugin may work as well."""
