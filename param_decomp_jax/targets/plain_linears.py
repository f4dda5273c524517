"""Passes in which nothing is masked: the network as it is, and the clean pass that keeps what the method reads."""

from dataclasses import dataclass, field
from typing import Any

import jax
from jaxtyping import Array, Float, Int, Shaped

from param_decomp_jax.decomposition.components import look_up
from param_decomp_jax.decomposition.sites import PRE_IDENTITY, Sites
from param_decomp_jax.nn.grouped import ExpertGroups, grouped_matmul
from param_decomp_jax.nn.numerics import matmul
from param_decomp_jax.sharding.memory import PLAIN, MemoryPolicy
from param_decomp_jax.sharding.mesh import Axes, constrain, gather
from param_decomp_jax.targets.base import WholeForward
from param_decomp_jax.targets.points import RESID_PRE, Point


def frozen_axes(memory: MemoryPolicy) -> Axes:
    """Returns the axes of one layer's frozen matrix at rest: split by output, as far as the policy splits it."""
    return Axes((None, "split"), product=True).held(memory.held_by("target"))


RESIDUAL = "residual"
"""The name of the record of a layer's input."""

CHOSEN = "chosen"
"""The name of the record of the experts that each position takes, in layers with sites among them."""

EXPERT_KINDS = ("experts.gate_proj", "experts.up_proj", "experts.down_proj")
"""The kinds of the matrices of experts, in the order in which they are applied (X2)."""


def output_record(kind: str) -> str:
    """Returns the name of the record of the output of a layer's site."""
    return f"{kind}.output"


def top_experts(logits: Float[Array, "*n experts"], k: int) -> Int[Array, "*n k"]:
    """Returns the k experts with the largest logits; of equal ones, those with the lower number (X1)."""
    return jax.lax.top_k(logits, k)[1]


@dataclass
class PlainLayer:
    """Applies every matrix as it is (F3). Keeps its input, and what is asked of the sites in ``reads`` (by kind).

    ``frozen``: see `frozen_axes`. ``hooks``: the hooks whose activation is kept, under the hook's name.
    """

    frozen: Axes
    reads: dict[str, str] = field(default_factory=dict)
    inputs: bool = True
    outputs: bool = False
    hooks: frozenset[str] = frozenset()
    records: dict[str, Array] = field(default_factory=dict)

    def enter(self, x: Shaped[Array, "*n"]) -> None:
        if self.reads:
            self.records[RESIDUAL] = x
        self.hook(RESID_PRE, x)

    def hook(self, name: str, x: Shaped[Array, "*n"]) -> Shaped[Array, "*n"]:
        if name in self.hooks:
            self.records[name] = x
        return x

    def choose(self, logits: Float[Array, "*n experts"], k: int) -> Int[Array, "*n k"]:
        chosen = top_experts(logits, k)
        if any(kind in self.reads for kind in EXPERT_KINDS):
            self.records[CHOSEN] = chosen
        return chosen

    def grouped(
        self, kind: str, x: Float[Array, "*n s d_in"], W: Float[Array, "experts d_in d_out"], groups: ExpertGroups
    ) -> Float[Array, "*n k d_out"]:
        y = constrain(grouped_matmul(x, gather(W, self.frozen.under(), x.dtype), groups), "batch")
        if kind in self.reads and self.inputs:
            self.records[self.reads[kind]] = x
        if kind in self.reads and self.outputs:
            self.records[output_record(kind)] = y
        return y

    def look_up(
        self, kind: str, rows: Int[Array, "*n"], table: Float[Array, "n d"], dtype: Any
    ) -> Float[Array, "*n d"]:
        y = constrain(look_up(table, rows, self.frozen).astype(dtype), "batch")
        if kind in self.reads and self.inputs:
            self.records[self.reads[kind]] = y
        if kind in self.reads and self.outputs:
            self.records[output_record(kind)] = y
        return y

    def __call__(
        self, kind: str, x: Float[Array, "*n d_in"], W: Float[Array, "d_in d_out"]
    ) -> Float[Array, "*n d_out"]:
        y = constrain(matmul(x, gather(W, self.frozen, x.dtype)), "batch")
        for site, output in ((kind + PRE_IDENTITY, x), (kind, y)):
            if site in self.reads:
                if self.inputs:
                    self.records[self.reads[site]] = x
                if self.outputs:
                    self.records[output_record(site)] = output
        return y


@dataclass(frozen=True)
class PlainLinears(WholeForward):
    """The clean pass (F4). Records, for every layer with a site, its residual and, if asked, what its sites read.

    Sites that read the same activation share one record. ``outputs`` adds the sites' outputs (for R2's exception).
    ``points`` are recorded under their hooks, in all layers of a scan that has one of them.
    """

    inputs: bool = True
    outputs: bool = False
    memory: MemoryPolicy = PLAIN
    points: tuple[Point, ...] = ()

    def slices(self, first: int, stop: int) -> Any:
        return None

    def layer(self, first: int, stop: int, slice_: Any) -> PlainLayer:
        reads = {stack.kind: stack.reads for stack in self.stacks_at(first)}
        hooks = frozenset(point.hook for point in self.points if first <= point.layer < stop)
        return PlainLayer(frozen_axes(self.memory), reads, self.inputs, self.outputs, hooks)


UNTOUCHED = PlainLinears(Sites(()))
"""The network as it is, with nothing recorded."""
