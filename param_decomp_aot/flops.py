"""The arithmetic of a step, counted from its jaxpr: matrix products times the lengths of the loops around them.

XLA's own cost analysis counts the body of a loop once, so it says nothing about a scanned step. The jaxpr of a step
includes its backward pass, recomputation (`jax.checkpoint`), and the lengths of its scans. Dead code is left out first,
as XLA does.

Each product is counted in the precision in which an NVIDIA GPU since Ampere multiplies it, which follows from the
operands' dtype and the ``precision`` that the program asks for. XLA takes TF32 for float32 at default precision and at
`HIGH`, and has no tensor cores for it at `HIGHEST`.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var, jaxprs_in_params
from jax.interpreters.partial_eval import dce_jaxpr
from jax.lax import DotAlgorithm, DotAlgorithmPreset
from jax.lax import Precision as JaxPrecision

from param_decomp_aot.roofline import Precision
from param_decomp_aot.trip_count import Known, constants, known_after, passed, trip_count

_RUN_ONCE = {
    "jit", "closed_call", "core_call", "remat2", "checkpoint", "custom_jvp_call", "custom_vjp_call",
    "custom_vjp_call_jaxpr", "custom_partitioning", "run_state", "mesh_cast", "eval_jaxpr",
}  # fmt: skip
"""Primitives that run each jaxpr in their parameters once. Other primitives with a jaxpr are reported as unknown."""


@dataclass(frozen=True)
class Flops:
    """Floating-point operations of the matrix products of a whole program, summed over all devices.

    ``by_scope``: the same by `jax.named_scope` (and transformation: ``transpose(jvp(…))`` is the backward pass).
    ``by_precision``: the same by the precision in which a GPU multiplies; precisions that do not occur are left out.
    ``unknown``: loops whose trip count the jaxpr does not give, and primitives that run a jaxpr in an unknown way.
    Their bodies are counted once, so ``total`` is a lower bound unless this is empty.
    """

    total: int
    by_scope: Mapping[str, int]
    by_precision: Mapping[Precision, int]
    unknown: tuple[str, ...]


@dataclass
class _Count:
    products: Counter[tuple[str, Precision]] = field(default_factory=Counter)
    """FLOPs by scope and precision."""
    unknown: list[str] = field(default_factory=list)

    @property
    def total(self) -> int:
        return self.products.total()

    def add(self, other: "_Count", times: int = 1) -> None:
        for key, flops in other.products.items():
            self.products[key] += times * flops
        self.unknown.extend(other.unknown)


def matmul_flops(program: ClosedJaxpr) -> Flops:
    """Returns 2 · batch · M · N · K of every matrix product and convolution of ``program`` (from `jax.make_jaxpr`),
    times how often it runs, over all devices.

    Products count as they run: one that is emulated by three of a narrower dtype (`BF16_BF16_F32_X3`) counts three
    times. The body of a scan counts once per iteration, that of a `shard_map` once per device that it splits over. Of
    the branches of `jax.lax.platform_dependent` the one for CUDA counts, of other conditionals the largest branch.
    cuDNN's attention counts as the products it stands for, without a deduction for a causal mask: 2 forward, 5
    backward. What feeds only the dead part of a `while` is counted.
    """
    count = _count_jaxpr(program.jaxpr, [True] * len(program.jaxpr.outvars), "", constants(program))
    by_scope, by_precision = Counter[str](), Counter[Precision]()
    for (scope, precision), flops in count.products.items():
        by_scope[scope] += flops
        by_precision[precision] += flops
    return Flops(count.total, dict(by_scope), dict(by_precision), tuple(dict.fromkeys(count.unknown)))


def _count_jaxpr(jaxpr: Jaxpr, used: Sequence[bool], scope: str, known: Known) -> _Count:
    """Counts the products of a jaxpr. ``known``: the integers that variables of the jaxpr (arguments, constants) are
    known to be."""
    arguments = jaxpr.invars
    jaxpr, kept = dce_jaxpr(jaxpr, list(used))
    # Dead code elimination may rename what it keeps.
    renamed = zip((v for v, k in zip(arguments, kept, strict=True) if k), jaxpr.invars, strict=True)
    known = {**known, **{new: known[old] for old, new in renamed if old in known}}
    read = {v for v in jaxpr.outvars if isinstance(v, Var)}
    for eqn in jaxpr.eqns:
        read.update(v for v in eqn.invars if isinstance(v, Var))
    count = _Count()
    for eqn in jaxpr.eqns:
        known |= known_after(eqn, known)
        count.add(_count_equation(eqn, [v in read for v in eqn.outvars], scope, known))
    return count


def _count_equation(eqn: JaxprEqn, used: list[bool], outer: str, known: Known) -> _Count:
    scope = "/".join(part for part in (outer, str(eqn.source_info.name_stack)) if part)
    count = _Count()
    match eqn.primitive.name:
        case "dot_general":
            precision, times = _multiplied_in(eqn)
            count.products[scope, precision] += times * _dot_general(eqn)
        case "conv_general_dilated":
            precision, times = _multiplied_in(eqn)
            count.products[scope, precision] += times * _convolution(eqn)
        case "dot_product_attention_fwd_wrapper" | "dot_product_attention_fwd":
            count.products[scope, _precision_of(_operands(eqn))] += 2 * _attention_product(eqn)
        case "dot_product_attention_bwd_wrapper" | "dot_product_attention_bwd":
            count.products[scope, _precision_of(_operands(eqn))] += 5 * _attention_product(eqn)
        case "scan":
            body = eqn.params["jaxpr"]
            inside = _inside(body, eqn.invars[: _scan_constants(eqn)], known)
            count.add(_count_jaxpr(body.jaxpr, [True] * len(body.jaxpr.outvars), scope, inside), eqn.params["length"])
        case "while":
            count = _while(eqn, used, scope, known)
        case "cond":
            branches = [
                _count_jaxpr(b.jaxpr, [True] * len(b.jaxpr.outvars), scope, _inside(b, eqn.invars[1:], known))
                for b in _branches(eqn)
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
        count.add(_count_jaxpr(jaxpr, [True] * len(jaxpr.outvars), scope, inside))
    return count


def _inside(body: ClosedJaxpr, operands: Sequence[Any], known: Known) -> Known:
    """Returns what is known inside ``body`` about its constants and its first arguments, which are these operands."""
    return constants(body) | passed(body.jaxpr.invars, operands, known)


def _scan_constants(eqn: JaxprEqn) -> int:
    """Returns how many of a scan's first operands are the same in every iteration.

    It is inferred from shapes, because JAX's parameters for it change between versions: scanned operands and stacked
    results have one more axis outside than inside, the carry does not.
    """
    body = eqn.params["jaxpr"].jaxpr
    scanned = sum(len(_shape(a)) > len(_shape(v)) for a, v in zip(eqn.invars, body.invars, strict=True))
    carried = sum(len(_shape(a)) == len(_shape(v)) for a, v in zip(eqn.outvars, body.outvars, strict=True))
    return len(eqn.invars) - carried - scanned


def _while(eqn: JaxprEqn, used: list[bool], scope: str, known: Known) -> _Count:
    """Counts iterations × (body + condition), with only those parts of the body that the loop's used results need."""
    condition, body = eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"]
    n_condition_constants, n_body_constants = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    n_consts = n_condition_constants + n_body_constants
    _, read_by_condition = dce_jaxpr(condition.jaxpr, [True])
    live = [a or b for a, b in zip(used, read_by_condition[n_condition_constants:], strict=True)]
    while True:
        _, needed = dce_jaxpr(body.jaxpr, live)
        grown = [a or b for a, b in zip(live, needed[n_body_constants:], strict=True)]
        if grown == live:
            break
        live = grown
    inside = _inside(body, eqn.invars[n_condition_constants:n_consts], known)
    count = _count_jaxpr(body.jaxpr, live, scope, inside)
    inside = _inside(condition, eqn.invars[:n_condition_constants], known)
    count.add(_count_jaxpr(condition.jaxpr, [True], scope, inside))
    rounds = trip_count(eqn, known)
    if rounds is None:
        if count.total:
            count.unknown.append(f"while in {scope or 'the program'}: counted as one round")
        return count
    repeated = _Count()
    repeated.add(count, rounds)
    return repeated


def _branches(eqn: JaxprEqn) -> Sequence[ClosedJaxpr]:
    """Returns the branches of a conditional that a GPU may run: for `jax.lax.platform_dependent` the one for CUDA, else
    the default."""
    branches, platforms = eqn.params["branches"], eqn.params.get("branches_platforms")
    if platforms is None:
        return branches
    by_platform = {name: branch for names, branch in zip(platforms, branches, strict=True) for name in names or (None,)}
    branch = by_platform.get("cuda", by_platform.get(None))
    return branches if branch is None else (branch,)


def _multiplied_in(eqn: JaxprEqn) -> tuple[Precision, int]:
    """Returns the precision in which a GPU multiplies, and how many products it makes of this one."""
    match eqn.params["precision"]:
        case DotAlgorithmPreset(name=name) if name != "DEFAULT":
            emulated = re.search(r"_X(\d)$", name)
            return _PRESETS.get(name.partition("_")[0], "bf16"), int(emulated[1]) if emulated else 1
        case DotAlgorithm() as asked:
            dtypes = jnp.dtype(asked.lhs_precision_type), jnp.dtype(asked.rhs_precision_type)
            return _precision_of(dtypes, of_float32="fp32"), asked.num_primitive_operations
        case (left, right) if JaxPrecision.HIGHEST in (left, right):
            return _precision_of(_operands(eqn), of_float32="fp32"), 1
        case _:
            return _precision_of(_operands(eqn)), 1


_PRESETS: Mapping[str, Precision] = {"TF32": "tf32", "F32": "fp32", "F64": "fp32"}
"""The precision of the operands, by the first word of a preset's name; other presets have narrower operands."""


def _operands(eqn: JaxprEqn) -> Sequence[Any]:
    """Returns the dtypes of the first two operands."""
    atoms: Sequence[Any] = eqn.invars[:2]
    return [atom.aval.dtype for atom in atoms]


def _precision_of(dtypes: Sequence[Any], of_float32: Precision = "tf32") -> Precision:
    """Returns the precision of a product; the wider operand decides. Dtypes of at most 16 bits count as bf16, those
    wider than float32 as fp32."""
    size = max(dtype.itemsize for dtype in dtypes)
    return "bf16" if size <= 2 else of_float32 if size == 4 else "fp32"


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
    """Counts one of the products of attention, of ``[B, T, heads, d]`` queries with ``[B, S, kv_heads, d]`` keys."""
    B, T, heads, d = _shape(eqn.invars[0])
    return 2 * B * heads * T * _shape(eqn.invars[1])[1] * d


def _shape(atom: Any) -> tuple[int, ...]:
    return tuple(atom.aval.shape)
