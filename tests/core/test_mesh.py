"""Logical axes on real (simulated) devices: how arrays are split, cut into blocks, gathered and scattered."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params
from jax.sharding import PartitionSpec

from param_decomp_aot.traffic import traffic
from param_decomp_jax.sharding.mesh import (
    Axes,
    MeshShape,
    cast_tree,
    constrain,
    fitting_blocks,
    gather,
    gather_tree,
    held,
    hold,
    indices,
    join_blocks,
    make_mesh,
    n_parts,
    physical,
    rows_at_rest,
    scatter,
    sharding,
    spec,
    split_blocks,
    split_tree,
    whole,
    with_block,
    with_row,
)
from tests.cases import slow_but

RNG = np.random.default_rng(0)
FOUR = [MeshShape(fsdp=4), MeshShape(tensor=4), MeshShape(fsdp=2, tensor=2), MeshShape(replica=2, fsdp=2)]
ON_FOUR = pytest.mark.parametrize("shape", FOUR, ids=str)
COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")


def collectives(text: str) -> set[str]:
    return {name for name in COLLECTIVES if f" {name}" in text}


def emitted(function: Any, *args: Any) -> int:
    """Sharding constraints in a function's program."""
    return str(jax.make_jaxpr(function)(*args)).count("sharding_constraint")


# ---- the mesh and the table ----


def test_mesh() -> None:
    shape = MeshShape(replica=2, fsdp=2, tensor=2)
    assert shape.n_devices == 8
    assert dict(make_mesh(shape).shape) == {"replica": 2, "nodes": 1, "fsdp": 2, "tensor": 2}
    assert list(make_mesh(MeshShape(fsdp=4)).devices.ravel()) == jax.devices()[:4]
    with pytest.raises(AssertionError, match="needs 16 devices, there are 8"):
        make_mesh(MeshShape(fsdp=16))


@pytest.mark.parametrize(
    ("shape", "name", "size", "expected"),
    [
        (MeshShape(2, 2, 2), "component", 8, ("tensor", "fsdp")),
        (MeshShape(2, 2, 2), "component_in_use", 8, ("tensor",)),
        (MeshShape(2, 2, 2), "batch", 8, ("replica", "fsdp")),
        # Axes of size 1 are left out, and so are those that do not divide what the ones before them leave.
        (MeshShape(1, 4, 1), "component", 8, ("fsdp",)),
        (MeshShape(1, 1, 1), "component", 8, ()),
        (MeshShape(1, 2, 2), "component", 2, ("tensor",)),
        (MeshShape(1, 2, 4), "component", 6, ("fsdp",)),
        (MeshShape(1, 2, 4), "component", 5, ()),
        (MeshShape(2, 2, 1), "batch", 6, ("replica",)),
        # No logical axis, or one that the table does not have.
        (MeshShape(2, 2, 2), None, 8, ()),
        (MeshShape(2, 2, 2), "seq", 8, ()),
    ],
)
def test_physical_axes(shape: MeshShape, name: str | None, size: int, expected: tuple[str, ...]) -> None:
    mesh = make_mesh(shape)
    assert physical(name, size, mesh) == expected
    parts = {"replica": shape.replica, "fsdp": shape.fsdp, "tensor": shape.tensor}
    if name is not None:
        assert n_parts(name, size) == 1, "no mesh is in force"
        with jax.set_mesh(mesh):
            assert n_parts(name, size) == np.prod([parts[axis] for axis in expected], dtype=int)


@pytest.mark.parametrize(
    ("array", "names", "expected"),
    [
        ((8, 8, 8), (None, "component", None), PartitionSpec(None, ("tensor", "fsdp"))),
        ((8, 8, 8), ("batch", None, "component_in_use"), PartitionSpec("fsdp", None, "tensor")),
        ((8, 8), ("batch",), PartitionSpec("fsdp")),
        ((3, 8, 3), ("batch", "component_in_use", "component"), PartitionSpec(None, "tensor")),
        ((3, 5), ("batch", "component"), PartitionSpec()),
        ((), (), PartitionSpec()),
    ],
)
def test_spec(array: tuple[int, ...], names: tuple[str | None, ...], expected: PartitionSpec) -> None:
    """One mesh axis by itself, several as a tuple, and nothing said of trailing axes that are not split."""
    mesh = make_mesh(MeshShape(fsdp=2, tensor=2))
    assert spec(array, names, mesh) == expected
    assert sharding(mesh, array, names).spec == expected
    assert whole(mesh).spec == PartitionSpec()


def test_axes() -> None:
    axes = Axes((None, "component", "split", "batch"), product=True)
    assert axes.in_use == (None, "component_in_use", None, "batch")
    assert axes.under() == Axes((None, None, "component", "split", "batch"), product=True)
    assert axes.under("batch").below() == axes
    assert (axes.at("component"), axes.at("component_in_use"), axes.at("batch"), axes.at("seq")) == (1, 1, 3, None)
    assert Axes(("component_in_use",)).at("component") == 0


# ---- constraints ----


@ON_FOUR
def test_constrain(shape: MeshShape) -> None:
    """As the logical axes say, and the values are the same."""
    mesh, x = make_mesh(shape), RNG.normal(size=(8, 3, 8)).astype(np.float32)
    with jax.set_mesh(mesh):
        got = jax.jit(lambda x: constrain(x + 1, "batch", None, "component_in_use"))(x)
    assert got.sharding.is_equivalent_to(sharding(mesh, x.shape, ("batch", None, "component_in_use")), 3)
    np.testing.assert_array_equal(got, x + 1)


def test_nothing_is_emitted_that_says_nothing() -> None:
    """Without a mesh, along axes of size 1, and for sizes that are not divided."""
    x = jnp.zeros((8, 6, 5))
    assert emitted(lambda x: constrain(x, "batch", None, "component"), x) == 0
    assert emitted(lambda x: gather(x, Axes(("component",)), x.dtype), x) == 0
    assert emitted(lambda x: scatter(x, Axes(("component",))), x) == 0
    with jax.set_mesh(make_mesh(MeshShape())):
        assert emitted(lambda x: constrain(x, "batch", None, "component"), x) == 0
        assert emitted(lambda x: gather(x, Axes(("component",)), x.dtype), x) == 0
    with jax.set_mesh(make_mesh(MeshShape(fsdp=4))):
        assert emitted(lambda x: constrain(x, None, "component", "split"), x) == 0
        assert emitted(lambda x: constrain(x, None, None, "component"), x) == 0
        assert emitted(lambda x: gather(x, Axes((None, "component", "split")), x.dtype), x) == 0
        assert emitted(lambda x: constrain(x, "batch"), x) == 1
    with jax.set_mesh(make_mesh(MeshShape(tensor=4))):
        assert emitted(lambda x: constrain(x, "batch"), x) == 0


# ---- blocks ----


def by_formula(x: np.ndarray, axis: int, n_blocks: int, parts: int) -> np.ndarray:
    """Block j has the elements d · size/parts + j · b + i for every device d and every i below b."""
    size = x.shape[axis]
    b = size // (parts * n_blocks)
    numbers = [[d * size // parts + j * b + i for d in range(parts) for i in range(b)] for j in range(n_blocks)]
    return np.stack([np.take(x, of, axis=axis) for of in numbers])


@pytest.mark.parametrize("shape", slow_but(FOUR[2:], FOUR), ids=str)
@pytest.mark.parametrize("name", ["component", "component_in_use", "batch", "seq"])
def test_split_and_join(shape: MeshShape, name: str) -> None:
    """Each block has elements of every device; `join_blocks` gives the array back; neither moves data."""
    mesh = make_mesh(shape)
    x = RNG.normal(size=(24, 24, 24)).astype(np.float32)
    for axis, n_blocks in ((0, 1), (0, 2), (1, 3), (2, 6)):
        names = [None, None, None]
        names[axis] = name
        with jax.set_mesh(mesh):
            parts = n_parts(name, x.shape[axis])
            placed = jax.device_put(x, sharding(mesh, x.shape, names))

            @jax.jit
            def there(x: Any, axis: int = axis, n: int = n_blocks, names: Any = tuple(names)) -> Any:
                return constrain(split_blocks(x, axis, n, name), None, *names)

            @jax.jit
            def back(x: Any, axis: int = axis, n: int = n_blocks, names: Any = tuple(names)) -> Any:
                return constrain(join_blocks(x, axis, name), *names)

            blocks = there(placed)
            assert collectives(there.lower(placed).compile().as_text()) == set()
            assert collectives(back.lower(blocks).compile().as_text()) == set()
            again = back(blocks)
        np.testing.assert_array_equal(blocks, by_formula(x, axis, n_blocks, parts))
        np.testing.assert_array_equal(again, x)
        assert blocks.sharding.is_equivalent_to(sharding(mesh, blocks.shape, (None, *names)), 4)


def test_cut_without_a_mesh() -> None:
    """Into neighbours."""
    x = np.arange(12)
    np.testing.assert_array_equal(split_blocks(jnp.asarray(x), 0, 3, "component"), x.reshape(3, 4))
    np.testing.assert_array_equal(join_blocks(split_blocks(jnp.asarray(x), 0, 3, "component"), 0, "component"), x)


def test_the_numbers_of_what_is_cut_are_cut_with_it() -> None:
    """M4: a block knows the global numbers of its elements."""
    with jax.set_mesh(make_mesh(MeshShape(fsdp=2, tensor=2))):
        x = RNG.normal(size=(3, 16)).astype(np.float32)
        blocks, numbers = jax.jit(
            lambda x: (split_blocks(x, 1, 2, "component"), split_blocks(indices(16), 0, 2, "component"))
        )(x)
    assert numbers.dtype == jnp.uint32
    assert sorted(np.ravel(numbers)) == list(range(16))
    assert not np.array_equal(np.ravel(numbers), np.arange(16)), "every device's own part, not neighbours"
    for block, own in zip(blocks, numbers, strict=True):
        np.testing.assert_array_equal(block, x[:, own])


def test_blocks_must_divide_each_part() -> None:
    with jax.set_mesh(make_mesh(MeshShape(fsdp=4))), pytest.raises(AssertionError, match="3 blocks do not cut 8"):
        jax.jit(lambda x: split_blocks(x, 0, 3, "component"))(jnp.zeros(8))


@pytest.mark.parametrize(
    ("shape", "size", "largest", "expected"),
    [
        (None, 12, None, 1), (None, 12, 12, 1), (None, 12, 5, 3), (None, 7, 3, 7), (None, 12, 1, 12),
        (MeshShape(fsdp=2, tensor=2), 32, None, 1), (MeshShape(fsdp=2, tensor=2), 32, 31, 2),
        (MeshShape(fsdp=2, tensor=2), 32, 8, 4),
        # No smaller than one element of every device.
        (MeshShape(fsdp=2, tensor=2), 32, 2, 8), (MeshShape(fsdp=2, tensor=2), 24, 8, 3),
        # A size that is not split.
        (MeshShape(fsdp=2, tensor=2), 9, 3, 3),
    ],
)  # fmt: skip
def test_fitting_blocks(shape: MeshShape | None, size: int, largest: int | None, expected: int) -> None:
    if shape is None:
        assert fitting_blocks(size, largest, "component") == expected
        return
    with jax.set_mesh(make_mesh(shape)):
        assert fitting_blocks(size, largest, "component") == expected
        assert jax.jit(lambda x: split_blocks(x, 0, expected, "component"))(jnp.zeros(size)).shape[0] == expected


def test_cutting_a_tree() -> None:
    """What has the axis, at rest or in use, is cut along it; the rest stays; a block can take the tree's place."""
    axes = {"V": Axes((None, "component")), "mask": Axes(("batch", "component_in_use")), "x": Axes((None,)), "no": None}
    tree = {"V": jnp.arange(12.0).reshape(2, 6), "mask": jnp.arange(18.0).reshape(3, 6), "x": jnp.ones(6), "no": None}
    blocks = split_tree(tree, axes, 3, "component")
    assert blocks["x"] is None
    assert {name: blocks[name].shape for name in ("V", "mask")} == {"V": (3, 2, 2), "mask": (3, 3, 2)}
    second = with_block(tree, jax.tree.map(lambda x: x[1], blocks))
    np.testing.assert_array_equal(second["V"], tree["V"][:, 2:4])
    np.testing.assert_array_equal(second["mask"], tree["mask"][:, 2:4])
    assert second["x"] is tree["x"]
    assert second["no"] is None


# ---- from rest to use and back ----

V_AXES = Axes((None, "component"), product=True)


@ON_FOUR
@pytest.mark.parametrize("axes", [V_AXES, Axes((None, "split"), product=True), Axes((None, "component"))], ids=str)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_gather(shape: MeshShape, axes: Axes, dtype: Any) -> None:
    """Cast if it is multiplied (N1), laid out as in use; its gradient has the master's dtype and layout."""
    mesh = make_mesh(shape)
    master = jax.device_put(RNG.normal(size=(6, 8)).astype(np.float32), sharding(mesh, (6, 8), axes.names))
    to = jnp.asarray(RNG.normal(size=(6, 8)), jnp.float32)

    def used(x: jax.Array) -> jax.Array:
        return gather(x, axes, dtype)

    def loss(x: jax.Array) -> jax.Array:
        return jnp.sum(used(x).astype(jnp.float32) ** 2 * to)

    with jax.set_mesh(mesh):
        got, gradient = jax.jit(used)(master), jax.jit(jax.grad(loss))(master)
    want = master.astype(dtype) if axes.product else master
    assert got.dtype == want.dtype
    np.testing.assert_array_equal(got, want)
    assert got.sharding.is_equivalent_to(sharding(mesh, (6, 8), axes.in_use), 2)
    assert gradient.dtype == jnp.float32
    assert gradient.sharding.is_equivalent_to(sharding(mesh, (6, 8), axes.names), 2)
    of_cast = (2 * want.astype(jnp.float32) * to).astype(want.dtype).astype(jnp.float32)
    np.testing.assert_array_equal(gradient, of_cast)


# ---- copies that are held ----

TWO_NODES = [MeshShape(fsdp=4, nodes=2), MeshShape(fsdp=8, nodes=4), MeshShape(fsdp=4, nodes=2, tensor=2)]


@pytest.mark.parametrize("shape", slow_but(TWO_NODES[2:], TWO_NODES), ids=str)
@pytest.mark.parametrize("by", ["node", "device"])
@pytest.mark.parametrize("axes", [V_AXES, Axes((None, "split"), product=True), Axes((None, "component"))], ids=str)
def test_a_held_copy_is_used_in_its_place(shape: MeshShape, by: Any, axes: Axes) -> None:
    """The values, gradients, dtypes and layouts of `gather`, in a scan over the rows of a stack."""
    mesh, stacked = make_mesh(shape), axes.under()
    master = jax.device_put(RNG.normal(size=(3, 6, 16)).astype(np.float32), sharding(mesh, (3, 6, 16), stacked.names))
    to = jnp.asarray(RNG.normal(size=(3, 6, 16)), jnp.float32)

    def loss(x: jax.Array, by: Any) -> jax.Array:
        whole_stack = held({"x": x}, hold({"x": x}, {"x": stacked}, by, jnp.bfloat16), by)

        def add(total: jax.Array, layer: Any) -> tuple[jax.Array, None]:
            own, to, row = layer
            used = gather(with_row(own, whole_stack, row)["x"], axes, jnp.bfloat16)
            return total + jnp.sum(used.astype(jnp.float32) ** 2 * to), None

        rows = rows_at_rest(whole_stack, slice(0, 3))
        return jax.lax.scan(jax.checkpoint(add), jnp.zeros(()), (rows, to, jnp.arange(3)))[0]

    with jax.set_mesh(mesh):
        step = jax.jit(jax.value_and_grad(loss), static_argnums=1)
        (want, gradient), (got, of_held) = step(master, None), step(master, by)
        copy = jax.jit(lambda x: hold(x, stacked, by, jnp.bfloat16))(master)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-4)
    np.testing.assert_array_equal(of_held, gradient)
    assert of_held.sharding.is_equivalent_to(master.sharding, 3)
    assert copy.dtype == (jnp.bfloat16 if axes.product else jnp.float32)
    assert copy.sharding.is_equivalent_to(sharding(mesh, copy.shape, stacked.held(by).names), 3)
    parts = {str(shard.index) for shard in copy.addressable_shards}
    tensor = shape.tensor if "component" in axes.names or by == "node" else 1
    assert len(parts) == tensor * (shape.fsdp // shape.nodes if by == "node" else 1)


def test_a_device_that_has_all_of_an_array_holds_it_cast() -> None:
    x = jnp.asarray(RNG.normal(size=(3, 6, 16)), jnp.float32)

    def loss(x: jax.Array, by: Any) -> jax.Array:
        used = gather(held(x, hold(x, V_AXES.under(), by, jnp.bfloat16), by), V_AXES.under(), jnp.bfloat16)
        return jnp.sum(used.astype(jnp.float32) ** 2)

    copy = hold(x, V_AXES.under(), "device", jnp.bfloat16)
    np.testing.assert_array_equal(copy, x.astype(jnp.bfloat16))
    assert hold(x, V_AXES.under(), "device", jnp.float32) is None
    assert hold(x, V_AXES.under(), "node", jnp.bfloat16) is None
    (want, gradient), (got, of_held) = (jax.value_and_grad(loss)(x, by) for by in (None, "device"))
    assert got == want
    np.testing.assert_array_equal(of_held, gradient)


def test_a_copy_is_made_once() -> None:
    """Gathers as executed: of a copy as many as it has stages, whatever uses it; without one, in every pass and row."""
    mesh = make_mesh(MeshShape(fsdp=8, nodes=2))
    x = jax.ShapeDtypeStruct((5, 6, 16), jnp.float32, sharding=sharding(mesh, (5, 6, 16), (None, None, "component")))

    def two_passes(x: jax.Array, by: Any) -> jax.Array:
        stack = held(x, hold(x, V_AXES.under(), by, jnp.bfloat16), by)

        def one_pass(scale: jax.Array) -> jax.Array:
            def add(total: jax.Array, row: jax.Array) -> tuple[jax.Array, None]:
                own = with_row(rows_at_rest(stack, slice(0, 5))[row], stack, row)
                return total + jnp.sum(jnp.sin(scale * gather(own, V_AXES, jnp.bfloat16).astype(jnp.float32))), None

            return jax.lax.scan(jax.checkpoint(add), jnp.zeros(()), jnp.arange(5))[0]

        return jax.grad(one_pass)(one_pass(jnp.float32(2)))

    def gathers(by: Any) -> int:
        with jax.set_mesh(mesh):
            program = jax.jit(two_passes, static_argnums=1).lower(x, by).compile()
        found = traffic(program.as_text(), gpus_per_node=4)
        return sum(n for c, n in found.collectives.items() if c.kind == "all-gather")

    assert gathers("device") == 2  # between the nodes, then within them
    assert gathers("node") == 1 + 2 * 5
    assert gathers(None) == 2 * 5


def test_gather_without_a_mesh_is_a_cast() -> None:
    x = jnp.asarray(RNG.normal(size=(6, 8)), jnp.float32)
    np.testing.assert_array_equal(gather(x, V_AXES, jnp.bfloat16), x.astype(jnp.bfloat16))
    assert gather(x, Axes((None, "component")), jnp.bfloat16).dtype == jnp.float32
    gradient = jax.grad(lambda x: jnp.sum(gather(x, V_AXES, jnp.bfloat16).astype(jnp.float32)))(x)
    assert gradient.dtype == jnp.float32
    np.testing.assert_array_equal(gradient, jnp.ones_like(x))


def test_what_is_gathered_has_been_cast() -> None:
    """N1: the constraint before the gather is on bf16, so that half as much travels; back, bf16 is scattered."""
    x = jax.ShapeDtypeStruct((6, 8), jnp.float32)

    def dtypes(function: Any) -> list[Any]:
        program = jax.make_jaxpr(function)(x)
        inner = [e for e in equations(program.jaxpr) if e.primitive.name == "sharding_constraint"]
        return [str(e.invars[0].aval.dtype) for e in inner]

    with jax.set_mesh(make_mesh(MeshShape(fsdp=4))):
        there = dtypes(lambda x: gather(x, V_AXES, jnp.bfloat16))
        back = dtypes(lambda x: jax.vjp(lambda x: gather(x, V_AXES, jnp.bfloat16), x)[1](x.astype(jnp.bfloat16)))
    assert there == ["bfloat16", "bfloat16"]  # at rest, then in use
    assert back[:2] == there
    assert set(back[2:-1]) == {"bfloat16"}
    assert back[-1] == "float32"


def equations(jaxpr: Any) -> list[Any]:
    """With those of inner programs."""
    found = []
    for e in jaxpr.eqns:
        found.append(e)
        for inner in jaxprs_in_params(e.params):
            found += equations(inner)
    return found


@ON_FOUR
def test_scatter(shape: MeshShape) -> None:
    """A product over a split axis: the sum over the devices, split; its gradients are the plain ones."""
    mesh = make_mesh(shape)
    V, U, to = (RNG.normal(size=s).astype(np.float32) for s in ((6, 8), (8, 16), (6, 16)))
    axes = Axes((None, "split"))

    def product(V: jax.Array, U: jax.Array) -> jax.Array:
        return scatter(V @ U, axes)

    with jax.set_mesh(mesh):
        places = sharding(mesh, V.shape, (None, "component")), sharding(mesh, U.shape, ("component",))
        placed = tuple(map(jax.device_put, (V, U), places))
        got, backward = jax.jit(lambda *args: jax.vjp(product, *args))(*placed)
        gradients = jax.jit(lambda f, to: f(to))(backward, jax.device_put(to, sharding(mesh, to.shape, axes.names)))
    assert got.sharding.is_equivalent_to(sharding(mesh, got.shape, axes.names), 2)
    np.testing.assert_allclose(got, V @ U, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(gradients[0], to @ U.T, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(gradients[1], V.T @ to, rtol=1e-5, atol=1e-5)


def test_trees() -> None:
    """Every array as its own description says."""
    tree = {"V": jnp.ones((6, 8)), "b": jnp.ones((8,)), "nothing": None}
    axes = {"V": V_AXES, "b": Axes(("component",)), "nothing": None}
    for of in (partial(gather_tree, tree, axes), partial(cast_tree, tree, axes)):
        made = of(jnp.bfloat16)
        assert (made["V"].dtype, made["b"].dtype, made["nothing"]) == (jnp.bfloat16, jnp.float32, None)
    mesh = make_mesh(MeshShape(fsdp=2, tensor=2))
    with jax.set_mesh(mesh):
        cast = jax.jit(lambda tree: cast_tree(tree, axes, jnp.bfloat16))(tree)
    assert cast["V"].sharding.is_equivalent_to(sharding(mesh, (6, 8), V_AXES.names), 2)


@pytest.mark.parametrize("shape", [*FOUR, MeshShape(2, 2, 2), MeshShape(2, 1, 4), MeshShape(1, 4, 2)], ids=str)
@pytest.mark.parametrize("columns", ["component", "split"])
def test_gradient_of_matrices_that_are_multiplied_one_by_one(shape: MeshShape, columns: str) -> None:
    """A matrix for each component, or each layer, and rows on all devices.

    XLA (of JAX 0.10.2) permutes the components of the first kind's gradient on 2x2x2 where the product's own layout,
    that in use, is not pinned before the one at rest.
    """
    mesh = make_mesh(shape)
    x, W, to = (RNG.normal(size=s).astype(np.float32) for s in ((8, 16, 2), (8, 2, 8), (8, 16, 8)))
    axes = Axes(("component", None, None) if columns == "component" else (None, None, "split"), product=True)
    of_rows = (axes.in_use[0], "batch")

    def loss(W: jax.Array, x: jax.Array, to: jax.Array) -> jax.Array:
        product = jnp.einsum("cbi,cio->cbo", constrain(x, *of_rows), gather(W, axes, jnp.float32))
        return jnp.sum(constrain(product, *of_rows) * to)

    with jax.set_mesh(mesh):
        gradient = jax.jit(jax.grad(loss))(jax.device_put(W, sharding(mesh, W.shape, axes.names)), x, to)
    np.testing.assert_allclose(gradient, np.einsum("cbi,cbo->cio", x, to), rtol=1e-5, atol=1e-5)
    assert gradient.sharding.is_equivalent_to(sharding(mesh, W.shape, axes.names), 3)
