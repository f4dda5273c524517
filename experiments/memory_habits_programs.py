"""The programs of `memory_habits.py`: each is written twice, with one habit and without, and gives the same numbers.

A habit is a function of the sizes and of whether it is `kept`; its line is the one under ``if kept``. All but a few
are a scan over alike layers, differentiated, as in a decomposition: matrices split over the GPUs and gathered where
they are used, the layer recomputed in the backward.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from experiments.memory_habits_parts import (
    Given,
    Habit,
    Program,
    Size,
    batch,
    bf16,
    error,
    f32,
    gradients,
    mlp,
    mlps,
    normed,
    run,
    whole,
)
from param_decomp_jax.decomposition.components import U_AXES, V_AXES, Factors
from param_decomp_jax.method.losses import faithfulness
from param_decomp_jax.nn.numerics import matmul, rms_norm, wide
from param_decomp_jax.sharding.memory import LEAN, PLAIN
from param_decomp_jax.sharding.mesh import Axes, constrain, gather

split = lax.with_sharding_constraint
policies = jax.checkpoint_policies

HABITS: list[Habit] = []


def _habit(name: str, line: str, instead: str) -> Callable[[Any], Any]:
    def add(program: Callable[[Size, bool], Program]) -> Any:
        HABITS.append(Habit(name, line, instead, program))
        return program

    return add


# ---- shardings ----


@_habit("constraint that splits nothing", "`with_sharding_constraint(h, P(None, None, None))`", "nothing")
def empty_constraint(size: Size, kept: bool) -> Program:
    """All None does not mean "as it is": it means whole, on every device."""

    def layer(x: Array, W: dict[str, Array]) -> Array:
        h = jax.nn.silu(matmul(normed(x, W), whole(W["up"])))
        if kept:
            h = split(h, P(None, None, None))
        return constrain(x + matmul(h, whole(W["down"])), "batch")

    return Program(gradients(layer), (batch(size), mlps(size)))


@_habit("the same on what is whole anyway", "`with_sharding_constraint(angles, P(None, None))`", "nothing")
def empty_constraint_on_whole(size: Size, kept: bool) -> Program:
    """Of the angles of rotary embedding, say."""

    def layer(x: Array, W: dict[str, Array]) -> Array:
        angles = jnp.arange(size.T)[:, None] * 1e-4 ** (jnp.arange(size.d // 2) / (size.d // 2))
        if kept:
            angles = split(angles, P(None, None))
        cos, sin = jnp.cos(angles).astype(x.dtype), jnp.sin(angles).astype(x.dtype)
        a, b = jnp.split(x, 2, axis=-1)
        return mlp(jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1), W)

    return Program(gradients(layer), (batch(size), mlps(size)))


@_habit("mesh axes of size 1 in a spec", '`P(("replica", "fsdp"), None, "tensor")`', '`P("fsdp")`')
def axes_of_size_one(size: Size, kept: bool) -> Program:
    def layer(x: Array, W: dict[str, Array]) -> Array:
        h = jax.nn.silu(matmul(normed(x, W), whole(W["up"])))
        h = split(h, P(("replica", "fsdp"), None, "tensor") if kept else P("fsdp"))
        return constrain(x + matmul(h, whole(W["down"])), "batch")

    return Program(gradients(layer), (batch(size), mlps(size)))


@_habit("resharding around a block", '`block(constraint(y, P(None, "fsdp")))`, and back', "nothing")
def resharding(size: Size, kept: bool) -> Program:
    """The rows of a batch are as good a split for the block as its positions."""

    def layer(x: Array, W: dict[str, Array]) -> Array:
        y = normed(x, W)
        if kept:
            y = split(y, P(None, "fsdp"))
        y = matmul(jax.nn.silu(matmul(y, whole(W["up"]))), whole(W["down"]))
        if kept:
            y = split(y, P("fsdp"))
        return constrain(x + y, "batch")

    return Program(gradients(layer), (batch(size), mlps(size)))


@_habit("gathering fp32, then casting", "`constraint(V, P()).astype(bf16)`", "cast, then gather: `mesh.gather`")
def late_cast(size: Size, kept: bool) -> Program:
    """Lever 6, for V and U of a layer."""

    def in_use(w: Array, axes: Axes) -> Array:
        if kept:
            return split(constrain(w, *axes.names), P()).astype(bf16)
        return gather(w, axes, bf16)

    def layer(x: Array, W: dict[str, Array]) -> Array:
        inner = matmul(x, in_use(W["V"], V_AXES))
        return constrain(x + matmul(inner, in_use(W["U"], U_AXES)), "batch")

    V = Given((size.layers, size.d, size.C), f32, P(None, None, "fsdp"))
    U = Given((size.layers, size.C, size.d), f32, P(None, "fsdp"))
    return Program(gradients(layer, by=("V", "U")), (batch(size, size.few), {"V": V, "U": U}))


@_habit("shift by slice and concatenate", "`concatenate([new[None], stages[:-1]])`", "`ppermute` in a `shard_map`")
def shifting(size: Size, kept: bool) -> Program:
    """Stages of a pipeline hand on what they have, one stage on each GPU."""

    def shifted(stages: Array, new: Array) -> Array:
        if kept:
            return split(jnp.concatenate([new[None], stages[:-1]]), P("fsdp"))

        def own(stage: Array, new: Array) -> Array:
            handed = lax.ppermute(stage, "fsdp", [(i, i + 1) for i in range(7)])
            return jnp.where(lax.axis_index("fsdp") == 0, new[None], handed)

        return jax.shard_map(own, in_specs=(P("fsdp"), P()), out_specs=P("fsdp"))(stages, new)

    def loss(stages: Array, W: Array, stream: Array) -> Array:
        def tick(stages: Array, new: Array) -> tuple[Array, None]:
            y = jnp.einsum("sbtd,sde->sbte", shifted(stages, new), W)
            return split(y, P("fsdp")), None

        return error(lax.scan(jax.checkpoint(tick, prevent_cse=False), stages, stream)[0])

    held = (4, size.T, size.d)
    stages, W = Given((8, *held), spec=P("fsdp")), Given((8, size.d, size.d), spec=P("fsdp"))
    return Program(jax.grad(loss, argnums=(0, 1)), (stages, W, Given((size.layers, *held))))


# ---- arithmetic ----


@_habit("einsum for a plain product", "`einsum('...k,k->...k', y, scale)`", "`y * scale`")
def einsum(size: Size, kept: bool) -> Program:
    def layer(x: Array, W: dict[str, Array]) -> Array:
        y, scale = rms_norm(x, 1e-6), W["scale"].astype(x.dtype)
        y = jnp.einsum("...k,k->...k", y, scale) if kept else y * scale
        h = jax.nn.silu(matmul(y, whole(W["up"])))
        return constrain(x + matmul(h, whole(W["down"])), "batch")

    return Program(gradients(layer), (batch(size), mlps(size)))


@_habit("cast to the dtype it has", "`h.astype(h.dtype)`", "nothing")
def own_dtype(size: Size, kept: bool) -> Program:
    def layer(x: Array, W: dict[str, Array]) -> Array:
        h = jax.nn.silu(matmul(normed(x, W), whole(W["up"])))
        if kept:
            h = h.astype(h.dtype)
        return constrain(x + matmul(h, whole(W["down"])), "batch")

    return Program(gradients(layer), (batch(size), mlps(size)))


@_habit("no-op cast over the gradients", "`tree.map(lambda g: g.astype(float32), gradients)`", "nothing")
def cast_gradients(size: Size, kept: bool) -> Program:
    def step(W: dict[str, Array], x: Array) -> Any:
        found = jax.grad(lambda W: error(run(mlp, x, W)))(W)
        if kept:
            found = jax.tree.map(lambda g: g.astype(f32), found)
        return jax.tree.map(lambda w, g: w - 1e-3 * g, W, found)

    return Program(step, (mlps(size, f32), batch(size, size.few)), donated=(0,))


@_habit("causal mask as an array", "`mask = arange(T)[:, None] >= arange(T)`", "`is_causal=True`")
def causal_mask(size: Size, kept: bool) -> Program:
    """cuDNN's attention; the workspaces of its kernels are not in the figures."""
    T, heads = size.long, size.heads
    attend = jax.nn.dot_product_attention

    def attention(q: Array, implementation: Any) -> Array:
        if kept:
            mask = jnp.arange(T)[:, None] >= jnp.arange(T)
            return attend(q, q, q, mask=mask[None, None], implementation=implementation)
        return attend(q, q, q, is_causal=True, implementation=implementation)

    def layer(x: Array, W: dict[str, Array]) -> Array:
        q = matmul(rms_norm(x, 1e-6), whole(W["q"])).reshape(*x.shape[:2], heads, -1)
        forms = {
            "cuda": partial(attention, implementation="cudnn"),
            "default": partial(attention, implementation="xla"),
        }
        y = lax.platform_dependent(q, **forms).reshape(x.shape)
        return constrain(x + matmul(y, whole(W["o"])), "batch")

    square = Given((size.layers, size.d, size.d), spec=P(None, None, "fsdp"))
    x = Given((size.few, T, size.d), spec=P("fsdp"))
    return Program(gradients(layer, by=()), (x, {"q": square, "o": square}))


@_habit("one-hot embedding", "`one_hot(tokens, vocabulary) @ E`", "`E[tokens]`")
def one_hot(size: Size, kept: bool) -> Program:
    def embedded(E: Array, tokens: Array) -> Array:
        E = whole(E)
        if kept:
            return constrain(matmul(jax.nn.one_hot(tokens, size.vocabulary, dtype=bf16), E), "batch")
        return constrain(E[tokens], "batch")

    E = Given((size.vocabulary, size.d), spec=P(None, "fsdp"))
    return Program(embedded, (E, Given((size.rows, size.T), jnp.int32, P("fsdp"))))


# ---- what is kept ----


@_habit(
    "one tensor saved under two names",
    '`checkpoint_name(y, "gate_input")`, `checkpoint_name(y, "up_input")`',
    "one name",
)
def two_names(size: Size, kept: bool) -> Program:
    """Two matrices that read the same activation, which the gradients of both need."""

    def layer(x: Array, W: dict[str, Array]) -> Array:
        y = normed(x, W)
        of_gate = checkpoint_name(y, "gate_input")
        of_up = checkpoint_name(y, "up_input") if kept else of_gate
        h = jax.nn.silu(matmul(of_gate, whole(W["gate"]))) * matmul(of_up, whole(W["up"]))
        return constrain(x + matmul(h, whole(W["down"])), "batch")

    W = mlps(size)
    policy = policies.save_only_these_names("gate_input", "up_input")
    return Program(gradients(layer, policy, by=("gate", "up")), (batch(size), {**W, "gate": W["up"]}))


@_habit("dots_saveable on a scan", "`policy=dots_saveable`", '`policy=save_only_these_names("attention")`')
def every_product_saved(size: Size, kept: bool) -> Program:
    """The scores of attention are products too."""
    heads = size.heads

    def layer(x: Array, W: dict[str, Array]) -> Array:
        q = matmul(rms_norm(x, 1e-6), whole(W["q"])).reshape(*x.shape[:2], heads, -1)
        scores = wide(jnp.einsum("bthd,bshd->bhts", q, q)) * q.shape[-1] ** -0.5
        causal = jnp.arange(size.T)[:, None] >= jnp.arange(size.T)
        probabilities = jax.nn.softmax(jnp.where(causal, scores, -1e30)).astype(x.dtype)
        y = jnp.einsum("bhts,bshd->bthd", probabilities, q).reshape(x.shape)
        return mlp(constrain(x + matmul(checkpoint_name(y, "attention"), whole(W["o"])), "batch"), W)

    square = Given((size.layers, size.d, size.d), spec=P(None, None, "fsdp"))
    policy = policies.dots_saveable if kept else policies.save_only_these_names("attention")
    return Program(gradients(layer, policy), (batch(size, size.few), {**mlps(size), "q": square, "o": square}))


@_habit("donation off", "`jit(step)`", "`jit(step, donate_argnums=…)`")
def not_donated(size: Size, kept: bool) -> Program:
    """A step of Adam over fp32 masters."""

    def step(W: Any, first: Any, second: Any, x: Array) -> Any:
        found = jax.grad(lambda W: error(run(mlp, x, W)))(W)
        first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, first, found)
        second = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g * g, second, found)
        W = jax.tree.map(lambda w, m, v: w - 1e-3 * m * lax.rsqrt(v + 1e-8), W, first, second)
        return W, first, second

    state = (mlps(size, f32),) * 3
    return Program(step, (*state, batch(size, size.few)), donated=() if kept else (0, 1, 2))


# ---- levers that no configuration switches ----


@_habit("F1: Δ formed in the forward (lever 2)", "δ · x(W − VU) + (xV ⊙ m)U", "δ · xW + (xV ⊙ (m − δ))U")
def delta_formed(size: Size, kept: bool) -> Program:
    """Both in bf16 throughout, so that they differ in nothing else; the core's F2 accumulates in fp32.

    The factors are there whole, so every GPU makes all of Δ by itself; the count of FLOPs has that product once.
    """

    def masked(x: Array, W: Array, V: Array, U: Array, mask: Array, delta: Array) -> Array:
        delta = delta[..., None]
        if kept:
            return matmul(matmul(x, V) * mask, U) + delta * matmul(x, W - matmul(V, U))
        return matmul(matmul(x, V) * (mask - delta), U) + delta * matmul(x, W)

    def loss(learned: dict[str, Array], x: Array, frozen: dict[str, Array]) -> Array:
        def site(total: Array, s: dict[str, Array]) -> tuple[Array, None]:
            V, U = gather(s["V"], V_AXES, bf16), gather(s["U"], U_AXES, bf16)
            y = masked(x, whole(s["W"]), V, U, s["mask"], s["delta"])
            return total + error(constrain(y, "batch")), None

        return lax.scan(jax.checkpoint(site, prevent_cse=False), jnp.zeros(()), learned | frozen)[0]

    n, d, m, C, here = size.sites, size.d, size.d_mlp, size.C, (size.few, size.T)
    learned = {
        "V": Given((n, d, C), f32, P(None, None, "fsdp")),
        "U": Given((n, C, m), f32, P(None, "fsdp")),
        "delta": Given((n, *here), spec=P(None, "fsdp")),
    }
    frozen = {
        "W": Given((n, d, m), spec=P(None, None, "fsdp")),
        "mask": Given((n, *here, C), spec=P(None, "fsdp")),
    }
    return Program(jax.value_and_grad(loss), (learned, batch(size, size.few), frozen))


@_habit("faithfulness of all sites at once (lever 3)", "Σ (W − VU)² over stacked sites", "a scan over sites")
def all_deltas(size: Size, kept: bool) -> Program:
    n, d, m, C = size.sites, size.d, size.d_mlp, size.C

    def loss(V: Array, U: Array, W: Array) -> Array:
        return faithfulness({"up": Factors(V, U)}, {"up": W}, PLAIN if kept else LEAN)

    V, U = Given((n, d, C), f32, P(None, None, "fsdp")), Given((n, C, m), f32, P(None, "fsdp"))
    W = Given((n, d, m), spec=P(None, None, "fsdp"))
    return Program(jax.value_and_grad(loss, argnums=(0, 1)), (V, U, W))


@_habit("masked forwards from the embedding (lever 4)", "`run(live, run(frozen, x))`", "`run(live, clean)`")
def from_the_embedding(size: Size, kept: bool) -> Program:
    """Three masked forwards of the upper quarter of the layers."""
    first = size.layers - size.layers // 4

    def of(x: Array, W: dict[str, Array]) -> Array:
        frozen, live = ({name: w[rows] for name, w in W.items()} for rows in (slice(first), slice(first, None)))
        clean = run(mlp, x, frozen)

        def loss(scale: Array) -> Array:
            total = jnp.zeros(())
            for n in range(1, 4):
                start = clean
                if kept:
                    start = run(mlp, x, frozen)
                total += error(run(mlp, start, {**live, "scale": n * scale}))
            return total

        return jax.grad(loss)(live["scale"])

    return Program(of, (batch(size), mlps(size)))
