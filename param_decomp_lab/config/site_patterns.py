"""Matches the patterns of `decomposition_targets` against the module names of a target."""

import difflib
from collections.abc import Iterable, Mapping, Sequence

from param_decomp_lab.config.method_schema import DecompositionTarget
from param_decomp_lab.errors import Errors, UserError
from param_decomp_lab.schema.site_names import PREFIXES, matches_module
from param_decomp_lab.schema.spelling import nearest


def match_sites(
    targets: Sequence[DecompositionTarget], module_names: Sequence[str], key: str = "pd.decomposition_targets"
) -> list[tuple[str, int]]:
    """Returns the decomposed modules with their C, in the order of ``module_names``. ``key``: the key of the patterns,
    for errors.

    Raises a UserError that lists the patterns that match nothing, or match a module that another pattern matches.
    """
    names = list(module_names)
    found: dict[str, tuple[int, DecompositionTarget]] = {}
    errors = Errors()
    for n, target in enumerate(targets):
        with errors:
            found |= dict.fromkeys(_matching(target, n, names, found, key), (n, target))
    errors.raise_all()
    return [(name, found[name][1].C) for name in names if name in found]


def _matching(
    target: DecompositionTarget,
    n: int,
    names: Sequence[str],
    found: Mapping[str, tuple[int, DecompositionTarget]],
    key: str,
) -> list[str]:
    """Returns the names that pattern ``n`` matches. Raises UserError if it matches none, or one
    that is in ``found``.
    """
    where = f"{key}.{n}.module_pattern"
    matching = [name for name in names if matches_module(target.module_pattern, name)]
    if not matching:
        raise UserError(f"{where}: '{target.module_pattern}' matches no module; {_nearest(target, names)}")
    for name in matching:
        if name in found:
            earlier, other = found[name]
            raise UserError(
                f"{where}: '{target.module_pattern}' matches {name}, which {key}.{earlier} "
                f"('{other.module_pattern}') matches already; a module may be decomposed once"
            )
    return matching


def chosen_sites(names: Iterable[str], patterns: str | Iterable[str] | None, where: str = "") -> tuple[str, ...]:
    """Returns the sites that any of the patterns matches, in the order of ``names``; None matches all. ``where``: the
    origin of the patterns, for errors.

    Raises UserError if a pattern matches none.
    """
    names = list(names)
    wanted = ["*"] if patterns is None else [patterns] if isinstance(patterns, str) else list(patterns)
    for pattern in wanted:
        if not any(matches_module(pattern, name) for name in names):
            raise UserError(f"{where}'{pattern}' matches no site; {nearest(pattern, names)}")
    return tuple(name for name in names if any(matches_module(pattern, name) for pattern in wanted))


def _nearest(target: DecompositionTarget, names: Sequence[str]) -> str:
    prefix = next((prefix for prefix in PREFIXES if target.module_pattern.startswith(prefix)), "")
    close = difflib.get_close_matches(target.module_pattern.removeprefix(prefix), names, n=3, cutoff=0.0)
    return f"the nearest are {', '.join(close)}" if close else "this target has no modules to decompose"
