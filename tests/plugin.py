"""The compiler for GPUs that are not here, which not every environment has."""

import importlib.util

import pytest

needs_plugin = pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda13_plugin") is None, reason="needs JAX's CUDA plugin (the extra `probe`)"
)
