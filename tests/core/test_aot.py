"""Compiling for GPUs that are not here: descriptions of cards, what is read from XLA, and what comes out of it.

Tests that compile need JAX's CUDA plugin (`pip install -e '.[probe]'`) and are skipped without it.
"""

from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from param_decomp_aot.buffers import Buffer, ledger, live_at_peak, table
from param_decomp_aot.compile import Compiled, Estimate, ProgramMemory, compile_for, estimate
from param_decomp_aot.flops import matmul_flops
from param_decomp_aot.instructions import Instructions
from param_decomp_aot.topology import UNLIMITED, card_memory, gpus, target_configs, with_memory
from param_decomp_aot.traffic import traffic
from param_decomp_jax.nn.attention import attend
from param_decomp_jax.sharding.mesh import MeshShape
from tests.plugin import needs_plugin

ROOT = Path(__file__).parents[2]
CARDS = target_configs((ROOT / "param_decomp_aot/gpus/cards.csv").read_text())
DUMP = {
    name: (Path(__file__).parent / "dump" / f"{name}.txt").read_text()
    for name in ("buffer-assignment", "live-range", "program")
}
"""A step of gradient descent through a scan of three layers on 8 B200s, as JAX 0.10.2's XLA dumps it (the compiler's
settings of single kernels and its own list at the peak are cut off): `state` donated, both arguments split in 8."""


# ---- cards ----


def test_descriptions_of_cards() -> None:
    assert CARDS.keys() >= {"b200", "h200", "h100", "a100_80", "a6000", "a5000", "gb200", "b300", "l40s", "rtx4090"}
    assert card_memory(CARDS["b200"]) == 191514411008
    for line in (
        'platform_version: "Compute Capability 10.0a"',
        "major: 10 minor: 0 feature_extension",
        "core_count: 148",
    ):
        assert line in CARDS["b200"]
    assert "feature_extension" not in CARDS["a5000"]
    assert all(text.count("{") == text.count("}") for text in CARDS.values())


def test_another_amount_of_memory() -> None:
    unlimited = with_memory(CARDS["h100"], UNLIMITED)
    assert card_memory(unlimited) == UNLIMITED
    assert with_memory(unlimited, card_memory(CARDS["h100"])) == CARDS["h100"]
    with pytest.raises(ValueError, match="device_memory_size"):
        with_memory("platform_name: 'CUDA'", 1)


def test_gpus_come_in_whole_nodes() -> None:
    with pytest.raises(ValueError, match="12 GPUs are not whole nodes of 8"):
        gpus(CARDS["b200"], 12)


def test_the_cpu_must_be_asked_for() -> None:
    jax.config.update("jax_platforms", "cuda,cpu")
    try:
        with pytest.raises(RuntimeError, match="JAX_PLATFORMS=cpu"):
            gpus(CARDS["b200"], 8)
    finally:
        jax.config.update("jax_platforms", "cpu")


# ---- buffers ----


def dumped() -> Any:
    return live_at_peak(DUMP["buffer-assignment"], DUMP["live-range"], DUMP["program"])


def test_buffers_at_the_peak() -> None:
    """Every byte of the temporary allocation is a buffer or between buffers, and arguments are there."""
    peak = dumped()
    assert peak.temp == 41159224
    assert sum(b.n_bytes for b in peak.buffers if b.role == "temp") + peak.unused == peak.temp
    assert 0 <= peak.unused < 0.01 * peak.temp
    sizes = [b.n_bytes for b in peak.buffers]
    assert sizes == sorted(sizes, reverse=True)
    assert peak.explained > 0.99
    arguments = {b.scope: (b.n_bytes, b.shape) for b in peak.buffers if b.role == "argument"}
    assert arguments == {
        "state['ws']": (3 * 1024 * 128 * 4, "f32[3,1024,128]"),
        "batch": (128 * 1024 * 2, "bf16[128,1024]"),
    }


def test_a_buffer_knows_where_it_comes_from() -> None:
    """A weight that is gathered whole; what a loop carries, by what writes it and not by the loop's parameter."""
    buffers = dumped().buffers
    gathered = next(b for b in buffers if b.shape == "bf16[1024,1024]")
    assert gathered.scope == "jit(step)/jvp(layers)/while/body/closed_call/layer/dot_general"
    assert gathered.source == "experiment.py:12"
    carried = next(b for b in buffers if b.shape == "bf16[128,3,1024]")
    assert "dynamic_update_slice" in carried.scope


def test_the_table_of_buffers() -> None:
    text = table(dumped(), rows=6)
    assert len(text.splitlines()) == 6 + 3
    assert "f32[3,1024,128]  state['ws']" in text
    assert "lie between buffers" in text
    many = (Buffer(2**30, "temp", "f32[4]", "a", "here", "x.py:1"),) * 3
    assert "3.000 GiB  temp      3 × f32[4]  here  x.py:1" in table(type(dumped())(many, 3 * 2**30, 0))


def test_what_lies_on_the_host_is_set_apart() -> None:
    moved = DUMP["buffer-assignment"].replace("parameter 0, shape", "color 5, parameter 0, shape")
    peak = live_at_peak(moved, DUMP["live-range"], DUMP["program"])
    assert [b.scope for b in peak.buffers if b.role == "host"] == ["state['ws']"]
    assert [b.scope for b in peak.buffers if b.role == "argument"] == ["batch"]


def test_texts_of_something_else() -> None:
    with pytest.raises(ValueError, match="no live range"):
        live_at_peak(DUMP["buffer-assignment"], "", DUMP["program"])
    with pytest.raises(ValueError, match="no live range"):
        live_at_peak(DUMP["buffer-assignment"], "    other{}:0-3\n", DUMP["program"])
    with pytest.raises(ValueError, match="no instruction"):
        Instructions("nothing")
    with pytest.raises(ValueError, match="not a value"):
        live_at_peak("allocation 1: size 4, preallocated-temp:\n value: ?", DUMP["live-range"], DUMP["program"])


# ---- compiling ----


@needs_plugin
def test_an_argument_that_is_not_used() -> None:
    """XLA is not given it, but on the device it is."""

    def program(mesh: Mesh) -> tuple[Any, tuple[Any, ...]]:
        split = jax.ShapeDtypeStruct((1024, 4), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec("fsdp")))
        return jax.jit(lambda used, unused, n: used * n), (split, split, jax.ShapeDtypeStruct((), jnp.int32))

    found = compile_for(program, MeshShape(fsdp=4), CARDS["b200"], per_node=4)
    assert found.memory.arguments == 1024 * 4 + 4
    assert found.unused == pytest.approx(1024 * 4, abs=4)


def test_sums() -> None:
    memory = ProgramMemory(temp=5, arguments=7, output=4, alias=3, host=100)
    assert memory.peak == 13
    bound = Estimate(Compiled(memory, 0, 0.0, 0.0, None), Compiled(ProgramMemory(6, 7, 4, 3, 0), 0, 0.0, 0.0, None), 20)
    assert bound.limit_bound
    assert not Estimate(bound.real, bound.real, 20).limit_bound


def descent(mesh: Mesh) -> tuple[Any, tuple[Any, ...]]:
    """A step of gradient descent: weights donated and split by column, a batch split by row."""
    by_column = NamedSharding(mesh, PartitionSpec(None, None, "fsdp"))
    weights = jax.ShapeDtypeStruct((3, 1024, 1024), jnp.float32, sharding=by_column)
    batch = jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16, sharding=NamedSharding(mesh, PartitionSpec("fsdp")))

    def step(weights: Any, batch: Any) -> Any:
        def layer(x: Any, w: Any) -> tuple[Any, None]:
            return jnp.tanh(x @ w.astype(x.dtype)), None

        def loss(weights: Any) -> Any:
            return jnp.sum(jax.lax.scan(layer, batch, weights)[0].astype(jnp.float32) ** 2)

        return weights - 0.1 * jax.grad(loss)(weights)

    return jax.jit(step, donate_argnums=0, out_shardings=by_column), (weights, batch)


def read_dump(folder: Path) -> list[str]:
    endings = ("-buffer-assignment", "-live-range", "")
    return [next(folder.glob(f"*gpu_after_optimizations{ending}.txt")).read_text() for ending in endings]


@needs_plugin
def test_a_step_compiled_for_a_node(tmp_path: Path) -> None:
    found = estimate(descent, MeshShape(fsdp=8), CARDS["b200"], str(tmp_path))
    memory = found.real.memory
    donated, rows = 3 * 1024 * 1024 * 4 // 8, 1024 * 1024 * 2 // 8
    assert (memory.arguments, memory.output, memory.alias, memory.host) == (donated + rows, donated, donated, 0)
    assert not found.limit_bound
    assert found.capacity == card_memory(CARDS["b200"])
    assert found.real.compile_s > 0
    peak = live_at_peak(*read_dump(tmp_path))
    assert peak.temp == memory.temp
    assert sum(b.n_bytes for b in peak.buffers if b.role == "argument") == memory.arguments
    # The ledger is XLA's plan, to the byte but for constants, which XLA's own sum leaves out.
    found_in_dump = ledger(*read_dump(tmp_path))
    constants = sum(b.n_bytes for b in found_in_dump.fixed if b.role == "constant")
    assert found_in_dump.planned - constants == memory.peak
    assert constants < 0.02 * memory.peak


@needs_plugin
def test_what_a_step_keeps_on_the_host_is_counted_there(tmp_path: Path) -> None:
    """The mesh that a program is made for is the abstract one: on the topology's own the memory kind would be dropped
    in silence."""

    def program(mesh: Mesh) -> tuple[Any, tuple[Any, ...]]:
        split = NamedSharding(mesh, PartitionSpec("fsdp"))
        here, there = (
            jax.ShapeDtypeStruct((1024, 1024), jnp.float32, sharding=split.with_memory_kind(kind))
            for kind in ("device", "pinned_host")
        )

        def step(w: Any, moment: Any) -> Any:
            moment = 0.9 * jax.device_put(moment, jax.memory.Space.Device) + jnp.tanh(w)
            return w - moment, jax.device_put(moment, jax.memory.Space.Host)

        return jax.jit(step, donate_argnums=(0, 1)), (here, there)

    part = 1024 * 1024 * 4 // 8
    compiled = compile_for(program, MeshShape(fsdp=8), CARDS["b200"], str(tmp_path))
    memory = compiled.memory
    assert (memory.arguments, memory.host) == (part, part)
    assert traffic(compiled.program.as_text()).host == 2 * part  # there and back
    assert sum(b.n_bytes for b in live_at_peak(*read_dump(tmp_path)).buffers if b.role == "host") == part


@needs_plugin
@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize("n_gpus", [1, 64])
def test_every_card(card: str, n_gpus: int) -> None:
    memory = compile_for(descent, MeshShape(fsdp=n_gpus), CARDS[card]).memory
    assert memory.arguments == (3 * 1024 * 1024 * 4 + 1024 * 1024 * 2) // n_gpus


@needs_plugin
@pytest.mark.parametrize(("heads", "kv_heads", "d", "causal"), [(32, 8, 128, True), (64, 64, 64, False)])
def test_flash_attention_is_cudnn_on_a_gpu(heads: int, kv_heads: int, d: int, causal: bool) -> None:
    """In a scan whose layers are recomputed, with rows split: a kernel forward, one backward, and nothing else."""
    shape = MeshShape(fsdp=8)

    def program(mesh: Mesh) -> tuple[Any, tuple[Any, ...]]:
        rows = NamedSharding(mesh, PartitionSpec(None, "fsdp"))
        q, k = (jax.ShapeDtypeStruct((3, 8, 2048, n, d), jnp.bfloat16, sharding=rows) for n in (heads, kv_heads))
        form = partial(attend, causal=causal, implementation="flash")

        def loss(q: Any, k: Any) -> Any:
            def layer(x: Any, qk: Any) -> tuple[Any, None]:
                return x + form(x + qk[0], qk[1], qk[1]), None

            return jnp.sum(jax.lax.scan(jax.checkpoint(layer), q[0], (q, k))[0].astype(jnp.float32))

        return jax.jit(jax.grad(loss, argnums=(0, 1)), out_shardings=rows), (q, k)

    compiled = compile_for(program, shape, CARDS["b200"])
    text = compiled.program.as_text()
    assert text.count('custom_call_target="__cudnn$fmhaSoftmax"') == 2  # forward, and again in the backward
    assert text.count('custom_call_target="__cudnn$fmhaSoftmaxBackward"') == 1
    for unwanted in ("conditional(", "all-gather", "all-to-all", "collective-permute"):
        assert unwanted not in text
    scores = heads * 2048 * 2048 * 2
    assert compiled.memory.temp < scores


@needs_plugin
def test_flash_attention_under_vmap_takes_what_is_not_mapped() -> None:
    q = jax.ShapeDtypeStruct((2, 1, 256, 4, 64), jnp.bfloat16)
    k = jax.ShapeDtypeStruct((1, 256, 2, 64), jnp.bfloat16)
    loss = lambda q, k: jnp.sum(attend(q, k, k, True, "flash"), dtype=jnp.float32)  # noqa: E731
    mapped = jax.vmap(jax.value_and_grad(loss, argnums=(0, 1)), in_axes=(0, None))
    compile_for(lambda _: (jax.jit(mapped), (q, k)), MeshShape(), CARDS["h100"])
    _, (of_q, of_k) = jax.eval_shape(mapped, q, k)
    assert (of_q.shape, of_k.shape) == (q.shape, (2, *k.shape))


@needs_plugin
def test_flash_attention_counts_as_the_products_it_stands_for() -> None:
    B, T, heads, d = 2, 64, 4, 16
    q = jax.ShapeDtypeStruct((B, T, heads, d), jnp.bfloat16)
    loss = lambda q: jnp.sum(attend(q, q, q, True, "flash"), dtype=jnp.float32)  # noqa: E731
    count = matmul_flops(jax.make_jaxpr(jax.value_and_grad(loss))(q))
    assert (count.total, count.unknown) == (7 * 2 * B * heads * T * T * d, ())
    assert count.by_precision == {"bf16": count.total}
