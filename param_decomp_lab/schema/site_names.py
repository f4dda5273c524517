"""Names of sites: the patterns that match them, and the experts that they name."""

import re
from fnmatch import fnmatchcase

PREFIXES = ("gpt_neox.", "model.", "transformer.")
"""With which files begin the names of modules, and patterns may: the architectures' own, which need JAX to be asked."""


def matches_module(pattern: str, name: str) -> bool:
    """Whether an fnmatch pattern matches the module ``name``, alone or behind a prefix such as `model.`."""
    return any(fnmatchcase(prefix + name, pattern) for prefix in ("", *PREFIXES))


def expert_of(name: str) -> str:
    """An expert's name, from that of its matrix: ``layers.3.mlp.experts.5`` from ``layers.3.mlp.experts.5.up_proj``."""
    return name.rpartition(".")[0]


def of_all_experts(name: str) -> str:
    """``layers.3.mlp.experts.*.up_proj`` from ``layers.3.mlp.experts.5.up_proj``; other names as they are."""
    return re.sub(r"\.experts\.\d+\.", ".experts.*.", name)
