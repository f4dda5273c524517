"""Names of sites: the patterns that match them, and the experts that they name."""

import re
from collections import Counter
from collections.abc import Sequence
from fnmatch import fnmatchcase

PREFIXES = ("gpt_neox.", "model.", "transformer.")
"""With which files begin the names of modules, and patterns may: the architectures' own, which need JAX to be asked."""


_WITH_HEADS = re.compile(r".*\.(?:[qkvo]_proj|c_attn\.[qkv]|attn\.c_proj|query_key_value\.[qkv]|attention\.dense)")


def has_attention_heads(site: str) -> bool:
    """Whether attention heads divide one side of a decoder's matrix (H1), judged by its name. The architecture knows
    (`Architecture.attention_matrices`), but asking it imports JAX.
    """
    return _WITH_HEADS.fullmatch(site) is not None


def matches_module(pattern: str, name: str) -> bool:
    """Whether an fnmatch pattern matches the module ``name``, alone or behind a prefix such as `model.`."""
    return any(fnmatchcase(prefix + name, pattern) for prefix in ("", *PREFIXES))


def expert_of(name: str) -> str:
    """An expert's name, from that of its matrix: ``layers.3.mlp.experts.5`` from ``layers.3.mlp.experts.5.up_proj``."""
    return name.rpartition(".")[0]


def of_all_experts(name: str) -> str:
    """``layers.3.mlp.experts.*.up_proj`` from ``layers.3.mlp.experts.5.up_proj``; other names as they are."""
    return re.sub(r"\.experts\.\d+\.", ".experts.*.", name)


def short_sites(sites: Sequence[str]) -> dict[str, str]:
    """Names of sites as short as they can be told apart: a letter or more of the matrix, then the numbers:
    ``layers.2.mlp.down_proj`` is ``d2``."""
    words = {site: tuple(word for word in site.split(".") if not word.isdecimal()) for site in sites}
    numbers = {site: ".".join(word for word in site.split(".") if word.isdecimal()) for site in sites}
    alike = Counter(own[-1:] for own in set(words.values()))
    kinds = {site: ".".join(own[-1:] if alike[own[-1:]] == 1 else own[-2:]) for site, own in words.items()}

    def cut(kind: str) -> str:
        others = {*kinds.values()} - {kind}
        beginnings = (kind[:n] for n in range(1, len(kind)))
        return next((own for own in beginnings if not any(other.startswith(own) for other in others)), kind)

    found = {site: f"{cut(kinds[site])}{numbers[site]}" for site in sites}
    return found if len({*found.values()}) == len(found) else {site: site for site in sites}
