"""The compiler for GPUs that are not here, which not every environment has (`make test-probe` brings it)."""

import importlib.util
from typing import Any

import pytest

_IS_THERE = importlib.util.find_spec("jax_cuda13_plugin") is not None


def needs_plugin(test: Any) -> Any:
    """Marks a test that compiles for GPUs; it is skipped without JAX's CUDA plugin (the extra `probe`)."""
    skipped = pytest.mark.skipif(not _IS_THERE, reason="needs JAX's CUDA plugin (the extra `probe`)")
    return pytest.mark.plugin(skipped(test))
