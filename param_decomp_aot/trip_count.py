"""Trip counts of `while` loops in a jaxpr whose counter, step and bound are known integers."""

from collections.abc import Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal

Known = dict[Any, int]
"""The integers that variables are known to be."""

_MIRRORED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le"}


def constants(closed: ClosedJaxpr) -> Known:
    """Returns the integers among the constants of a jaxpr."""
    values = zip(closed.jaxpr.constvars, closed.consts, strict=True)
    return {var: int(value) for var, value in values if _is_integer(value)}


def _is_integer(value: Any) -> bool:
    return getattr(value, "shape", None) == () and value.dtype.kind in "iu"


def known_after(eqn: JaxprEqn, known: Known) -> Known:
    """Returns what the results of an equation are known to be: integers that it casts or passes on."""
    if eqn.primitive.name not in ("convert_element_type", "copy", "optimization_barrier"):
        return {}
    values = {out: scalar(atom, known) for out, atom in zip(eqn.outvars, eqn.invars, strict=True)}
    return {out: value for out, value in values.items() if value is not None}


def scalar(atom: Any, known: Known) -> int | None:
    """Returns the integer that an atom of a jaxpr is known to be, or None."""
    if isinstance(atom, Literal):
        return int(atom.val) if _is_integer(atom.aval) else None
    return known.get(atom)


def trip_count(eqn: JaxprEqn, known: Known) -> int | None:
    """Returns the trip count of a ``while`` equation, or None if it depends on data.

    The forms that `jax.lax.fori_loop` and similar functions make are recognised: one comparison of a carry with a fixed
    bound, and a fixed step of the carry. ``known``: the integers that variables outside are known to be.
    """
    condition, body = eqn.params["cond_jaxpr"].jaxpr, eqn.params["body_jaxpr"].jaxpr
    n_condition_constants, n_body_constants = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    starts = [scalar(atom, known) for atom in eqn.invars[n_condition_constants + n_body_constants :]]
    carried = list(zip(body.invars[n_body_constants:], body.outvars, strict=True))
    if len(condition.eqns) != 1 or condition.outvars != condition.eqns[0].outvars:
        return None
    compared = condition.eqns[0]
    if compared.primitive.name not in _MIRRORED:
        return None

    fixed = constants(eqn.params["cond_jaxpr"]) | passed(condition.invars, eqn.invars[:n_condition_constants], known)
    position = {v: n for n, v in enumerate(condition.invars[n_condition_constants:])}
    for v, n in position.items():
        before, after = carried[n]
        if before is after and (start := starts[n]) is not None:
            fixed[v] = start
    steps = constants(eqn.params["body_jaxpr"])
    steps |= passed(body.invars, eqn.invars[n_condition_constants : n_condition_constants + n_body_constants], known)
    for relation, counter, bound in (
        (compared.primitive.name, *compared.invars),
        (_MIRRORED[compared.primitive.name], *reversed(compared.invars)),
    ):
        limit = scalar(bound, fixed)
        if limit is None or isinstance(counter, Literal) or counter not in position:
            continue
        start, step = starts[position[counter]], _step(body, *carried[position[counter]], steps)
        if start is not None and step is not None:
            return rounds(relation, start, limit, step)
    return None


def passed(variables: Sequence[Any], atoms: Sequence[Any], known: Known) -> Known:
    """Returns what the first variables are known to be, given these atoms."""
    values = ((v, scalar(atom, known)) for v, atom in zip(variables, atoms, strict=False))
    return {v: value for v, value in values if value is not None}


def _step(body: Any, before: Any, after: Any, constants: Known) -> int | None:
    """Returns by how much an iteration moves the carry; None if not by a fixed integer."""
    made_by = [eqn for eqn in body.eqns if any(v is after for v in eqn.outvars)]
    if len(made_by) != 1:
        return None
    left, right = made_by[0].invars[0], made_by[0].invars[-1]
    match made_by[0].primitive.name:
        case "add" if left is before:
            return scalar(right, constants)
        case "add" if right is before:
            return scalar(left, constants)
        case "sub" if left is before and (step := scalar(right, constants)) is not None:
            return -step
        case _:
            return None


def rounds(relation: str, start: int, limit: int, step: int) -> int | None:
    """Returns the trip count of a loop whose counter goes from ``start`` in steps of ``step`` while it is on one side
    of ``limit``, given by ``relation`` (lt, le, gt, ge); None if the loop would never end."""
    if step == 0 or (relation in ("lt", "le")) != (step > 0):
        return None
    return len(range(start, limit + {"lt": 0, "le": 1, "gt": 0, "ge": -1}[relation], step))
