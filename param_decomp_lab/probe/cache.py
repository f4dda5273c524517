"""Caches results of the compiler on disk."""

import hashlib
import json
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import jax

from param_decomp_lab import folders
from param_decomp_lab.errors import UserError
from param_decomp_lab.folders import write_whole
from param_decomp_lab.probe.compiler import installed
from param_decomp_lab.safe_io.files import LISTING_BYTES
from param_decomp_lab.safe_io.json_text import read_json
from param_decomp_lab.ui.console import PlainConsole
from param_decomp_lab.ui.warnings import print_warnings

ROOT = Path(__file__).parents[2]
PACKAGES = (
    "jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda13-pjrt", "nvidia-cudnn-cu13", "nvidia-cuda-nvcc", "nvidia-nvvm",
    "equinox", "optax",
)  # fmt: skip
"""Packages whose versions are part of the cache key, besides our own code."""
NO_PROGRAM = ("cache", "platform", "log", "cpu_")
"""Parts of the names of JAX's settings that no program for a GPU depends on."""


def cache_folder() -> Path:
    """Returns the folder of cached answers."""
    return folders.cache_folder("probe")


def cached(folder: Path | None, question: str, answer: Callable[[], dict[str, Any]]) -> tuple[dict[str, Any], bool]:
    """Returns ``answer()``, or its cached value for the same ``question``, and whether it was cached. It must be JSON.

    ``folder``: None caches nothing. An unreadable file is computed again. If the answer cannot be saved, this is
    reported, since it may have taken minutes.
    """
    if folder is None:
        return answer(), False
    key = hashlib.sha256(f"{_code()}\n{_versions()}\n{_settings()}\n{question}".encode()).hexdigest()[:32]
    file = folder / f"{key}.json"
    try:
        return read_json(file, "a cached result", dict, LISTING_BYTES), True
    except UserError:
        found = answer()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(file, json.dumps(found))
    except OSError as error:
        print_warnings([f"{folder}: the result cannot be cached ({error.strerror})"], PlainConsole(stderr=True))
    return found, False


@cache
def _code() -> str:
    """Returns a digest of all our code that may affect what is compiled."""
    digest = hashlib.sha256()
    for package in ("param_decomp_jax", "param_decomp_aot", "param_decomp_lab"):
        for file in sorted((ROOT / package).rglob("*.py")):
            digest.update(file.read_bytes())
    return digest.hexdigest()


def _versions() -> str:
    return " ".join(f"{package} {installed(package) or 'none'}" for package in PACKAGES)


def _settings() -> str:
    """Returns the settings of JAX and XLA that affect compilation."""
    values = sorted(jax.config.values.items())
    settings = [f"{name} {value!r}" for name, value in values if not any(part in name for part in NO_PROGRAM)]
    return " ".join((os.environ.get("XLA_FLAGS", ""), *settings))
