"""Readable scope names: which part of the step an instruction belongs to, from its op_name in XLA."""

import re

_BEFORE_PACKAGE = re.compile(r"^.*/(?:site-packages/|(?=param_decomp_(?:jax|lab)/|experiments/))")


def from_package(source: str) -> str:
    """Returns a source line without the folders of this machine that contain its package."""
    return _BEFORE_PACKAGE.sub("", source)


_CALLED = ("jit(", "branch_")
"""Prefixes of parts that say how something is called, not what it is."""

_PASSED = {
    "", "while", "body", "cond", "closed_call", "checkpoint", "remat", "rematted_computation", "custom_vjp_call",
    "custom_jvp_call",
}  # fmt: skip


def stage(scope: str, depth: int = 2) -> str:
    """Returns the first ``depth`` named scopes of an origin (`Instructions.origin`), and the pass to which it belongs.

    ``jit(step)/transpose(jvp(layers))/while/body/closed_call/checkpoint/rematted_computation/up_proj/dot_general``
    becomes ``layers/up_proj, recomputed``. An argument becomes the first two parts of its name: ``state.components``.
    Without a named scope the result is the pass alone, and without either the function.
    """
    parts = _parts(scope)
    if len(parts) == 1 and "(" not in scope and scope not in _PASSED:
        return ".".join(scope.partition("[")[0].split(".")[:2])
    names, which = scopes_and_pass(scope)
    return ", ".join(filter(None, ["/".join(names[:depth]), which])) or _function(parts)


def scopes_and_pass(scope: str) -> tuple[tuple[str, ...], str]:
    """Returns all named scopes of an instruction's origin, outermost first, and ``forward``, ``recomputed``,
    ``backward`` or, if nothing is differentiated, an empty string."""
    parts = _parts(scope)
    function = _function(parts)
    # The last part of a path is the operation.
    path = parts[:-1] if len(parts) > 1 else parts
    names: list[str] = []
    for part in path[1:] if function else path:
        name = _unwrapped(part)
        if name not in {*_PASSED, function, *names} and not name.startswith(_CALLED):
            names.append(name)
    if "rematted_computation" in path:
        which = "recomputed"
    elif any("transpose(" in part for part in path):
        which = "backward"
    else:
        which = "forward" if any("jvp(" in part for part in path) else ""
    return tuple(names), which


def _function(parts: list[str]) -> str:
    return _unwrapped(parts[0], "jit") if parts[0].startswith("jit(") else ""


def _parts(scope: str) -> list[str]:
    """Splits a scope at the slashes outside of parentheses."""
    parts, open_, start = [], 0, 0
    for i, character in enumerate(scope):
        open_ += {"(": 1, ")": -1}.get(character, 0)
        if character == "/" and not open_:
            parts.append(scope[start:i])
            start = i + 1
    return [*parts, scope[start:]]


def _unwrapped(part: str, *more: str) -> str:
    """Returns the innermost name: ``layers`` for ``transpose(jvp(layers))``."""
    for wrapper in ("transpose", "jvp", "vmap", *more):
        if part.startswith(f"{wrapper}(") and part.endswith(")"):
            return _unwrapped(part[len(wrapper) + 1 : -1], *more)
    return part
