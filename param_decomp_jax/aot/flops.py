"""Arithmetic of a step, counted from its jaxpr: matrix products times the lengths of the loops around them.

XLA's own cost analysis counts the body of a loop once, so it says nothing of a scanned step. The jaxpr of a step has
its backward pass in it, recomputation included (`jax.checkpoint`), and the lengths of its scans. What no output needs
is left out first, as XLA would.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var, jaxprs_in_params
from jax.interpreters.partial_eval import dce_jaxpr

from param_decomp_jax.aot.trip_count import Known, constants, known_after, passed, trip_count

_RUN_ONCE = {
    "jit", "closed_call", "core_call", "remat2", "checkpoint", "custom_jvp_call", "custom_vjp_call",
    "custom_vjp_call_jaxpr", "custom_partitioning", "run_state", "mesh_cast",
}  # fmt: skip
"""Primitives that run each jaxpr in their parameters once. Others that have one are reported as unknown."""


@dataclass(frozen=True)
class Flops:
    """Floating-point operations of the matrix products of a whole program, summed over all devices.

    ``by_scope``: the same by `jax.named_scope` (and transformation: ``transpose(jvp(…))`` is the backward).
    ``unknown``: loops whose number of rounds the jaxpr does not say, and primitives that run a jaxpr in a way not known
    here; their bodies are counted once, so that ``total`` is a lower bound unless this is empty.
    """

    total: int
    by_scope: Mapping[str, int]
    unknown: tuple[str, ...]


@dataclass
class _Count:
    by_scope: Counter[str] = field(default_factory=Counter)
    unknown: list[str] = field(default_factory=list)

    @property
    def total(self) -> int:
        return sum(self.by_scope.values())

    def add(self, other: "_Count", times: int = 1) -> None:
        for scope, flops in other.by_scope.items():
            self.by_scope[scope] += times * flops
        self.unknown.extend(other.unknown)


def matmul_flops(program: ClosedJaxpr) -> Flops:
    """2 · batch · M · N · K of every matrix product and convolution of ``program`` (from `jax.make_jaxpr`), as often as
    it is run, over all devices.

    A scan's body counts once a round, a `shard_map`'s once on every device it splits over, and of the branches of a
    conditional (`jax.lax.platform_dependent` too) the largest. cuDNN's attention counts as the products it stands for,
    with nothing off for a causal mask: 2 forward, 5 backward. What feeds only the dead part of a `while` is counted.
    """
    count = _of(program.jaxpr, [True] * len(program.jaxpr.outvars), "", constants(program))
    return Flops(count.total, dict(count.by_scope), tuple(dict.fromkeys(count.unknown)))


def _of(jaxpr: Jaxpr, used: Sequence[bool], scope: str, known: Known) -> _Count:
    """``known``: integers that variables of the jaxpr (arguments, constants) are known to be."""
    arguments = jaxpr.invars
    jaxpr, kept = dce_jaxpr(jaxpr, list(used))
    # Elimination may rename what it keeps.
    renamed = zip((v for v, k in zip(arguments, kept, strict=True) if k), jaxpr.invars, strict=True)
    known = {**known, **{new: known[old] for old, new in renamed if old in known}}
    read = {v for v in jaxpr.outvars if isinstance(v, Var)}
    for eqn in jaxpr.eqns:
        read.update(v for v in eqn.invars if isinstance(v, Var))
    count = _Count()
    for eqn in jaxpr.eqns:
        known |= known_after(eqn, known)
        count.add(_of_equation(eqn, [v in read for v in eqn.outvars], scope, known))
    return count


def _of_equation(eqn: JaxprEqn, used: list[bool], outer: str, known: Known) -> _Count:
    scope = "/".join(part for part in (outer, str(eqn.source_info.name_stack)) if part)
    count = _Count()
    match eqn.primitive.name:
        case "dot_general":
            count.by_scope[scope] += _dot_general(eqn)
        case "conv_general_dilated":
            count.by_scope[scope] += _convolution(eqn)
        case "dot_product_attention_fwd_wrapper" | "dot_product_attention_fwd":
            count.by_scope[scope] += 2 * _attention_product(eqn)
        case "dot_product_attention_bwd_wrapper" | "dot_product_attention_bwd":
            count.by_scope[scope] += 5 * _attention_product(eqn)
        case "scan":
            body = eqn.params["jaxpr"]
            inside = _inside(body, eqn.invars[: _scan_constants(eqn)], known)
            count.add(_of(body.jaxpr, [True] * len(body.jaxpr.outvars), scope, inside), eqn.params["length"])
        case "while":
            count = _while(eqn, used, scope, known)
        case "cond":
            branches = [
                _of(b.jaxpr, [True] * len(b.jaxpr.outvars), scope, _inside(b, eqn.invars[1:], known))
                for b in eqn.params["branches"]
            ]
            count = max(branches, key=lambda branch: branch.total)
        case "shard_map":
            mesh = eqn.params["mesh"]
            devices = prod(mesh.shape[axis] for axis in eqn.params["newly_manual_axes"])
            count.add(_subjaxprs(eqn, scope, known), devices)
        case "pallas_call":
            count.add(_subjaxprs(eqn, scope, known), prod(eqn.params["grid_mapping"].grid))
        case name:
            count = _subjaxprs(eqn, scope, known)
            if count.total and name not in _RUN_ONCE:
                count.unknown.append(f"{name} in {scope or 'the program'}: what it runs is counted once")
    return count


def _subjaxprs(eqn: JaxprEqn, scope: str, known: Known) -> _Count:
    count = _Count()
    closed = {id(p.jaxpr): p for p in eqn.params.values() if isinstance(p, ClosedJaxpr)}
    for jaxpr in jaxprs_in_params(eqn.params):
        inside = constants(closed[id(jaxpr)]) if id(jaxpr) in closed else {}
        if len(jaxpr.invars) == len(eqn.invars):
            inside |= passed(jaxpr.invars, eqn.invars, known)
        count.add(_of(jaxpr, [True] * len(jaxpr.outvars), scope, inside))
    return count


def _inside(body: ClosedJaxpr, operands: Sequence[Any], known: Known) -> Known:
    """What is known inside ``body`` of its constants and of its first arguments, which are these operands."""
    return constants(body) | passed(body.jaxpr.invars, operands, known)


def _scan_constants(eqn: JaxprEqn) -> int:
    """How many of a scan's operands, the first ones, are the same in every round.

    Told from shapes, since JAX's parameters for it change: what is scanned over has one axis more outside than inside,
    and so have the stacked results, but not the carry.
    """
    body = eqn.params["jaxpr"].jaxpr
    scanned = sum(len(_shape(a)) > len(_shape(v)) for a, v in zip(eqn.invars, body.invars, strict=True))
    carried = sum(len(_shape(a)) == len(_shape(v)) for a, v in zip(eqn.outvars, body.outvars, strict=True))
    return len(eqn.invars) - carried - scanned


def _while(eqn: JaxprEqn, used: list[bool], scope: str, known: Known) -> _Count:
    """Rounds × (body + condition), of the body what the loop's used results need."""
    condition, body = eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"]
    of_condition, of_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    n_consts = of_condition + of_body
    _, read_by_condition = dce_jaxpr(condition.jaxpr, [True])
    live = [a or b for a, b in zip(used, read_by_condition[of_condition:], strict=True)]
    while True:
        _, needed = dce_jaxpr(body.jaxpr, live)
        grown = [a or b for a, b in zip(live, needed[of_body:], strict=True)]
        if grown == live:
            break
        live = grown
    inside = _inside(body, eqn.invars[of_condition:n_consts], known)
    count = _of(body.jaxpr, live, scope, inside)
    inside = _inside(condition, eqn.invars[:of_condition], known)
    count.add(_of(condition.jaxpr, [True], scope, inside))
    rounds = trip_count(eqn, known)
    if rounds is None:
        if count.total:
            count.unknown.append(f"while in {scope or 'the program'}: counted as one round")
        return count
    repeated = _Count()
    repeated.add(count, rounds)
    return repeated


def _dot_general(eqn: JaxprEqn) -> int:
    (contracting, _), (batch, _) = eqn.params["dimension_numbers"]
    left, right = (_shape(v) for v in eqn.invars)
    shared = prod(left[i] for i in contracting) * prod(left[i] for i in batch)
    # M = left / shared, N = right / shared; both have the batch and the contracted axes.
    return 2 * prod(left) * (prod(right) // shared) if shared else 0


def _convolution(eqn: JaxprEqn) -> int:
    kernel, out = _shape(eqn.invars[1]), _shape(eqn.outvars[0])
    out_channels = kernel[eqn.params["dimension_numbers"].rhs_spec[0]]
    # Every output element is a product over the kernel's spatial extent and its (per-group) input channels.
    return 2 * prod(out) * (prod(kernel) // out_channels)


def _attention_product(eqn: JaxprEqn) -> int:
    """One of the products of attention, of ``[B, T, heads, d]`` queries with ``[B, S, kv_heads, d]`` keys."""
    B, T, heads, d = _shape(eqn.invars[0])
    return 2 * B * heads * T * _shape(eqn.invars[1])[1] * d


def _shape(atom: Any) -> tuple[int, ...]:
    return tuple(atom.aval.shape)
