"""Bytes that a compiled program moves: hand-written programs, the one of `dump/`, and one compiled for 16 GPUs."""

import re
from pathlib import Path
from textwrap import dedent
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from param_decomp_aot.compile import compile_for
from param_decomp_aot.fused_bytes import Bytes, bytes_moved
from param_decomp_aot.hlo import instruction, module, parse_arrays
from param_decomp_aot.loops import trips
from param_decomp_aot.replica_groups import replica_groups, source_target_pairs
from param_decomp_aot.scopes import stage
from param_decomp_aot.traffic import Collective, Sum, traffic
from param_decomp_jax.sharding.mesh import MeshShape
from tests.core.test_aot import CARDS, needs_plugin

DUMP = (Path(__file__).parent / "dump" / "program.txt").read_text()


def program(entry: str, *computations: str, n_devices: int = 1) -> str:
    """A program's text. The first line of ``entry`` and of each computation is its heading."""
    head = f"HloModule jit_f, is_scheduled=true, num_partitions={n_devices}"
    texts = []
    for n, text in enumerate((*computations, entry)):
        heading, *lines = dedent(text).strip().splitlines()
        texts.append("\n".join([f"{'ENTRY ' * (n == len(computations))}{heading} {{", *(f"  {x}" for x in lines), "}"]))
    return "\n\n".join([head, *texts]) + "\n"


# ---- the text ----


def test_an_instruction_taken_apart() -> None:
    found = instruction("w", '(s32[], (f32[2]{0:T(8,128)}, pred[4])) while(%t.1, %u), condition=%c, body=%b, x="(}"')
    assert (found.shape, found.opcode) == ("(s32[], (f32[2]{0:T(8,128)}, pred[4]))", "while")
    assert found.operands == ("t.1", "u")
    assert (found.called("condition"), found.called("body"), found.called("calls")) == (("c",), ("b",), ())
    assert found.n_bytes == 4 + 8 + 4
    branches = instruction("c", "f32[] conditional(%i, %a, %b), branch_computations={%left, %right}")
    assert branches.called("branch_computations") == ("left", "right")
    with pytest.raises(ValueError, match="not an instruction"):
        instruction("x", "f32[] 17")


@pytest.mark.parametrize(
    ("shape", "n_bytes"),
    [
        ("bf16[3,5]{1,0}", 30),
        ("f32[]", 4),
        ("pred[7]", 7),
        ("s4[5]{0:E(4)}", 3),
        ("f8e4m3fn[10]", 10),
        ("c64[2]", 16),
        ("token[]", 0),
        ("f32[0,4]", 0),
    ],
)
def test_sizes(shape: str, n_bytes: int) -> None:
    assert sum(a.n_bytes for a in parse_arrays(shape)) == n_bytes
    assert not any(a.on_host for a in parse_arrays(shape))


def test_where_an_array_lies() -> None:
    assert [a.on_host for a in parse_arrays("(f32[8]{0:S(5)}, f32[8]{0}, u32[]{:S(2)})")] == [True, False, False]


def test_a_text_that_is_no_program() -> None:
    with pytest.raises(ValueError, match="no entry computation"):
        module("nothing")
    with pytest.raises(ValueError, match="not closed"):
        module("ENTRY %f () -> f32[] {\n  ROOT %x = f32[] add(%a\n}\n")


# ---- loops ----

LOOP = """\
%main () -> s32[]
%zero = s32[] constant(START)
%copy = s32[] copy(%zero)
%bound = s32[] parameter(0)
%t = (s32[], s32[]) tuple(%copy, %bound)
ROOT %w = (s32[], s32[]) while(%t), condition=%cond, body=%body
"""
CONDITION = """\
%cond (p: (s32[], s32[])) -> pred[]
%p = (s32[], s32[]) parameter(0)
%i = s32[] get-tuple-element(%p), index=0
%n = s32[] constant(20)
ROOT %less = pred[] compare(%i, %n), direction=LT
"""
BODY = """\
%body (q: (s32[], s32[])) -> (s32[], s32[])
%q = (s32[], s32[]) parameter(0)
%j = s32[] get-tuple-element(%q), index=0
%k = s32[] get-tuple-element(%q), index=1
%next = s32[] fusion(%j), kind=kLoop, calls=%add_three
ROOT %r = (s32[], s32[]) tuple(%next, %k)
"""
ADD = """\
%add_three (a: s32[]) -> s32[]
%a = s32[] parameter(0)
%three = s32[] constant(3)
ROOT %sum = s32[] add(%a, %three)
"""


def rounds_of(text: str) -> int | None:
    found = module(text)
    entry = found.computations[found.entry]
    return trips(found, entry, entry.instructions["w"])


def test_rounds_that_the_program_does_not_note() -> None:
    """A constant start, a fixed step, within a fusion too, a constant bound."""
    written = [LOOP.replace("START", "2"), CONDITION, BODY, ADD]
    assert rounds_of(program(*written)) == 6
    mirrored = CONDITION.replace("compare(%i, %n), direction=LT", "compare(%n, %i), direction=GE")
    assert rounds_of(program(written[0], mirrored, BODY, ADD)) == 7
    assert rounds_of(program(written[0], CONDITION.replace("LT", "NE"), BODY, ADD)) is None
    assert rounds_of(program(written[0], CONDITION, BODY, ADD.replace("add(", "multiply("))) is None
    assert rounds_of(program(written[0], CONDITION.replace("constant(20)", "parameter(1)"), BODY, ADD)) is None


def test_rounds_that_the_program_notes() -> None:
    noted = 'body=%body, backend_config={"known_trip_count":{"n":"5"},"known_init_step":{"init":"0","step":"1"}}'
    assert rounds_of(program(LOOP.replace("body=%body", noted), CONDITION, BODY, ADD)) == 5


def test_the_loops_of_the_dump() -> None:
    found = module(DUMP)
    entry = found.computations[found.entry]
    assert found.n_devices == 8
    assert [trips(found, entry, i) for i in entry.instructions.values() if i.opcode == "while"] == [3, 3]


def test_operands_that_are_parts_of_tuples() -> None:
    """JAX 0.11's XLA writes ``%p#1`` and defines no such instruction."""
    given = "%main () -> f32[8]\n%p = (f32[4]{0:T(8,128)}, (s8[2]{0}, u32[]), /*index=2*/f32[8]{0}) parameter(0)\n"
    found = module(program(given + "%part = u32[] copy(%p#1#1)\nROOT %x = f32[8]{0} negate(%p#2)\n"))
    entry = found.computations[found.entry]
    assert [i.shape for i in entry.instructions.values() if i.opcode == "get-tuple-element"] == [
        "(s8[2]{0}, u32[])", "u32[]", "f32[8]{0}"
    ]  # fmt: skip
    assert bytes_moved(found, entry, entry.instructions["x"]) == Bytes(2 * 8 * 4)
    assert [i.name for i in entry.users["p"]] == ["p#1", "p#2"]


# ---- who talks to whom ----


@pytest.mark.parametrize(
    ("written", "groups"),
    [
        ("{{0,1},{2,3}}", ((0, 1), (2, 3))),
        ("{}", ((0, 1, 2, 3),)),
        ("[2,2]<=[4]", ((0, 1), (2, 3))),
        ("[2,2]<=[2,2]T(1,0)", ((0, 2), (1, 3))),
        ("[4,2]<=[2,2,2]T(0,2,1)", ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("mesh['a'=2,'b'=2] {'b'}", ((0, 1), (2, 3))),
        ("mesh['a'=2,'b'=2] {'a'}", ((0, 2), (1, 3))),
        ("mesh['a'=2,'b'=1,'c'=2] {'a','c'}", ((0, 1, 2, 3),)),
        ("mesh['a'=4] {'a':(2)2}", ((0, 1), (2, 3))),
        ("mesh['a'=4] {'a':(1)2}", ((0, 2), (1, 3))),
        ("mesh['a'=2,'b'=2] {'a','b'}", ((0, 1, 2, 3),)),
        ("mesh['a'=2,'b'=2] {'b','a'}", ((0, 2, 1, 3),)),
        ("mesh['a'=4] {'a':(2)2,'a':(1)2}", ((0, 2, 1, 3),)),
        ("mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'b'}", ((0, 2), (1, 3))),
        ("mesh['a'=2,'b'=2], device_ids=(3,2,1,0) {'b'}", ((3, 2), (1, 0))),
    ],
)
def test_groups(written: str, groups: Any) -> None:
    assert replica_groups(f"channel_id=1, replica_groups={written}, dimensions={{0}}", 4) == groups


@pytest.mark.parametrize("shape", [(2, 2, 2), (2, 4, 1), (1, 4, 2), (4, 1, 2)])
@pytest.mark.parametrize("among", ["ft", "tf", "tr", "rt", "t", "f", "r", "rf", "fr", "tfr"])
def test_groups_as_xla_writes_them(shape: tuple[int, int, int], among: str) -> None:
    """Gathered along axes of a mesh, in this order: a group are the devices at one place of the other axes."""
    mesh = jax.make_mesh(shape, ("r", "f", "t"), axis_types=(AxisType.Auto,) * 3)

    def gathered(x: jax.Array) -> jax.Array:
        return jax.lax.with_sharding_constraint(x * 2, P())

    with jax.set_mesh(mesh):
        x = jax.ShapeDtypeStruct((64, 8), jnp.float32, sharding=NamedSharding(mesh, P(tuple(among))))
        text = jax.jit(gathered).lower(x).compile().as_text()
    others = [axis for axis in "rft" if axis not in among]
    ids = np.arange(8).reshape(shape).transpose(["rft".index(axis) for axis in (*others, *among)])
    want = ids.reshape(-1, int(np.prod([shape["rft".index(axis)] for axis in among]))).tolist()
    gathers = re.findall(r" all-gather\(.*", text)
    assert len(gathers) == (len(want[0]) > 1)
    for line in gathers:
        assert sorted(replica_groups(line, 8)) == sorted(map(tuple, want))


def test_groups_that_are_not_named_or_not_known() -> None:
    assert replica_groups("dimensions={0}", 3) == ((0, 1, 2),)
    with pytest.raises(ValueError, match="not groups of devices: <<0>>"):
        replica_groups("replica_groups=<<0>>", 3)
    with pytest.raises(ValueError, match=r"not devices of a mesh: \[3\]x"):
        replica_groups("replica_groups=mesh['a'=3], device_ids=([3]x) {'a'}", 3)
    assert source_target_pairs("source_target_pairs={{0,1},{1,0}}, x={2}") == ((0, 1), (1, 0))


# ---- bytes in memory ----


def moved(line: str, *more: str) -> Bytes:
    """By the instruction ``%x`` of an entry that has arrays of 1000 and 10 numbers."""
    given = """\
    %main () -> f32[]
    %large = f32[100,10]{1,0} parameter(0)
    %row = f32[1,10]{1,0} parameter(1)
    %i = s32[] parameter(2)
    %there = f32[100,10]{1,0:S(5)} parameter(3)
    """
    found = module(program(dedent(given) + f"ROOT %x = {line}\n", *more))
    entry = found.computations[found.entry]
    return bytes_moved(found, entry, entry.instructions["x"])


@pytest.mark.parametrize(
    ("line", "device", "host"),
    [
        ("f32[100,10]{1,0} add(%large, %large)", 3 * 4000, 0),
        ("bf16[1000]{0} bitcast(%large)", 0, 0),
        ("f32[1,10]{1,0} dynamic-slice(%large, %i, %i)", 40 + 4 + 4 + 40, 0),
        ("f32[100,10]{1,0} dynamic-update-slice(%large, %row, %i, %i)", 40 + 4 + 4 + 40, 0),
        ("f32[5,10]{1,0} gather(%large, %row)", 200 + 40 + 200, 0),
        ("f32[100,10]{1,0} scatter(%large, %i, %row), to_apply=%add", 4 + 40 + 40, 0),
        ("(f32[100,10]{1,0:S(5)}, f32[100,10]{1,0}, u32[]) copy-start(%large)", 4000, 4000),
        ("(f32[100,10]{1,0}, f32[100,10]{1,0:S(5)}, u32[]) copy-start(%there)", 4000, 4000),
        ("f32[100,10]{1,0} copy-done(%large)", 0, 0),
        ("f32[1,10]{1,0} dynamic-slice(%there, %i, %i)", 4 + 4 + 40, 40),
        ('(f32[7], s8[99]) custom-call(%large), custom_call_target="__cublas$lt$matmul"', 4000 + 28, 0),
        ('(f32[7], s8[99]) custom-call(%large), custom_call_target="mine"', 4000 + 28 + 99, 0),
    ],
)
def test_an_operation_alone(line: str, device: int, host: int) -> None:
    assert moved(line) == Bytes(device, host)


FUSED = """\
%fused (a: f32[100,10], b: s32[], c: f32[1,10]) -> RESULT
%a = f32[100,10]{1,0} parameter(0)
%b = s32[] parameter(1)
%c = f32[1,10]{1,0} parameter(2)
%cast = bf16[100,10]{1,0} convert(%a)
"""
FUSION = "fusion(%large, %i, %row), kind=kLoop, calls=%fused"


@pytest.mark.parametrize(
    ("result", "lines", "device"),
    [
        ("bf16[1,10]", "ROOT %s = bf16[1,10] dynamic-slice(%cast, %b, %b)", 40 + 4 + 20),
        ("f32[100,10]", "ROOT %u = f32[100,10] dynamic-update-slice(%a, %c, %b, %b)", 4 + 40 + 40),
        ("f32[10,100]", "%v = f32[10,100] bitcast(%a)\nROOT %u = f32[10,100] dynamic-update-slice(%v, %c, %b, %b)", 84),
        (
            "f32[100,10]",
            "%z = f32[100,10] broadcast(%b)\nROOT %u = f32[100,10] dynamic-update-slice(%z, %c, %b, %b)",
            4 + 40 + 4000,
        ),
        ("bf16[100,10]", "ROOT %n = bf16[100,10] negate(%cast)", 4000 + 2000),
        (
            "(bf16[1,10], f32[1,10])",
            "%s = bf16[1,10] dynamic-slice(%cast, %b, %b)\n%n = f32[1,10] negate(%c)\n"
            "ROOT %t = (bf16[1,10], f32[1,10]) tuple(%s, %n)",
            40 + 4 + 40 + 20 + 40,
        ),
        (
            "f32[]",
            "%n = f32[100,10] negate(%a)\n%d = f32[1,10] dynamic-slice(%a, %b, %b)\nROOT %r = f32[] f(%n, %d)",
            4008,
        ),
    ],
)
def test_slices_inside_a_fusion(result: str, lines: str, device: int) -> None:
    """What is not used is not read; what is updated in its place is not written whole."""
    assert moved(f"{result} {FUSION}", FUSED.replace("RESULT", result) + lines) == Bytes(device)


def test_a_fusion_inside_a_fusion() -> None:
    inner = """\
    %inner (d: f32[100,10], e: s32[]) -> f32[1,10]
    %d = f32[100,10] parameter(0)
    %e = s32[] parameter(1)
    ROOT %s = f32[1,10] dynamic-slice(%d, %e, %e)
    """
    outer = FUSED.replace("RESULT", "f32[1,10]") + "ROOT %f = f32[1,10] fusion(%a, %b), kind=kLoop, calls=%inner"
    assert moved(f"f32[1,10] {FUSION}", dedent(inner), outer) == Bytes(40 + 4 + 40)


# ---- whole programs ----


def gather(kind: str, operand: str, result: str, more: str) -> str:
    return f"""\
    %main () -> {result}
    %p = {operand} parameter(0)
    ROOT %x = {result} {kind}(%p), channel_id=1, {more}
    """


@pytest.mark.parametrize(
    ("text", "expected", "memory"),
    [
        (
            gather("all-gather", "f32[10]", "f32[160]", "replica_groups=[1,16]<=[16]"),
            Collective("all-gather", 640, 16, 8, "f32[10]", "", ""),
            40 + 640,
        ),
        (
            gather("reduce-scatter", "f32[80]", "f32[10]", "replica_groups=[2,8]<=[16]"),
            Collective("reduce-scatter", 320, 8, 8, "f32[80]", "", ""),
            320 + 40,
        ),
        (
            gather("all-reduce", "f32[10]", "f32[10]", "replica_groups=[8,2]<=[2,8]T(1,0)"),
            Collective("all-reduce", 40, 2, 1, "f32[10]", "", ""),
            80,
        ),
        (
            gather("collective-permute", "f32[10]", "f32[10]", "source_target_pairs={{0,1},{7,8}}"),
            Collective("collective-permute", 40, 2, 1, "f32[10]", "", ""),
            80,
        ),
        (
            gather("all-to-all", "f32[10]", "f32[10]", "replica_groups={}"),
            Collective("all-to-all", 40, 16, 8, "f32[10]", "", ""),
            80,
        ),
    ],
)
def test_collectives(text: str, expected: Collective, memory: int) -> None:
    found = traffic(program(text, n_devices=16))
    assert dict(found.collectives) == {expected: 1}
    assert found.hbm == memory


def test_rings() -> None:
    """Over 2 nodes of 8 the ring leaves each once, by 8 network cards; alone in its node a GPU has its own."""
    whole = Collective("all-gather", 1600, 16, 8, "", "", "")
    assert (whole.ring, whole.within, whole.across, whole.crosses) == (1500, 1500, 187, True)
    node = Collective("reduce-scatter", 1600, 8, 8, "", "", "")
    assert (node.ring, node.within, node.across, node.crosses) == (1400, 1400, 0, False)
    apart = Collective("all-reduce", 1600, 4, 1, "", "", "")
    assert (apart.ring, apart.within, apart.across, apart.crosses) == (2400, 0, 2400, True)
    assert Collective("collective-permute", 1600, 2, 2, "", "", "").within == 1600
    assert Collective("all-reduce", 1600, 1, 1, "", "", "").ring == 0


def test_devices_that_a_message_passes() -> None:
    def hops(kind: str, group: int, in_node: int) -> tuple[int, int]:
        found = Collective(kind, 1600, group, in_node, "", "", "")
        return found.hops, found.network_hops

    assert hops("all-gather", 16, 8) == (15, 1)
    assert hops("reduce-scatter", 8, 8) == (7, 0)
    assert hops("all-reduce", 8, 1) == (14, 14)
    assert hops("collective-permute", 2, 1) == (1, 1)
    assert hops("all-gather", 1, 1) == (0, 0)


def test_what_is_started_and_awaited_counts_once_and_has_its_origin() -> None:
    body = """\
    %async (a: f32[80]) -> f32[10]
    %a = f32[80] parameter(0)
    ROOT %r = f32[10] reduce-scatter(%a), channel_id=1, replica_groups=mesh['x'=8] {'x'}, to_apply=%add
    """
    entry = """\
    %main (p: f32[80]) -> f32[10]
    %p = f32[80] parameter(0)
    %n = f32[80] negate(%p), metadata={op_name="jit(f)/gradient/neg"}
    %s = ((f32[80]), f32[10]) async-start(%n), calls=%async
    ROOT %d = f32[10] async-done(%s)
    """
    found = traffic(program(entry, body, n_devices=8))
    assert dict(found.collectives) == {Collective("reduce-scatter", 320, 8, 8, "f32[80]", "jit(f)/gradient/neg", ""): 1}
    assert found.memory == {"jit(f)/gradient/neg": 640 + 360}


def test_what_products_move() -> None:
    """By a library's kernel or a fusion of ours, in every round of a loop; cub's are none."""
    fused = """\
    %inner (a: f32[10,10]) -> f32[10,10]
    %a = f32[10,10] parameter(0)
    ROOT %d = f32[10,10] dot(%a, %a), lhs_contracting_dims={1}, rhs_contracting_dims={0}
    """
    nested = """\
    %outer (b: f32[10,10]) -> f32[10,10]
    %b = f32[10,10] parameter(0)
    ROOT %f = f32[10,10] fusion(%b), kind=kCustom, calls=%inner
    """
    condition = "%cond (c: f32[10,10]) -> pred[]\n%c = f32[10,10] parameter(0)\nROOT %ever = pred[] constant(true)"
    body = """\
    %body (e: f32[10,10]) -> f32[10,10]
    %e = f32[10,10] parameter(0)
    %x = f32[10,10] fusion(%e), kind=kCustom, calls=%outer
    ROOT %y = f32[10,10] negate(%x)
    """
    entry = """\
    %main (p: f32[10,10]) -> f32[10,10]
    %p = f32[10,10] parameter(0)
    %w = f32[10,10] while(%p), condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"5"}}
    %m = (f32[10,10], s8[99]) custom-call(%w, %p), custom_call_target="__cublas$lt$matmul"
    %part = f32[10,10] get-tuple-element(%m), index=0
    ROOT %s = f32[10,10] custom-call(%part), custom_call_target="__cub$DeviceRadixSort"
    """
    found = traffic(program(entry, *(dedent(text) for text in (fused, nested, condition, body))))
    assert found.products == 5 * 800 + 1200
    assert found.hbm == found.products + 5 * 800 + 800


def test_loops_and_branches() -> None:
    """The largest branch; a loop inside a loop; one of unknown length counts once and is named."""
    small = "%small (a: f32[10]) -> f32[10]\n%a = f32[10] parameter(0)\nROOT %y = f32[10] negate(%a)"
    large = "%large (b: f32[10]) -> f32[10]\n%b = f32[10] parameter(0)\nROOT %z = f32[20] broadcast(%b)"
    condition = "%cond (c: f32[10]) -> pred[]\n%c = f32[10] parameter(0)\nROOT %ever = pred[] constant(true)"
    noted = 'backend_config={"known_trip_count":{"n":"5"}}'
    inner = """\
    %inner (d: f32[10]) -> f32[10]
    %d = f32[10] parameter(0)
    %i = s32[] constant(0)
    ROOT %k = f32[10] conditional(%i, %d, %d), branch_computations={%small, %large}
    """
    outer = f"""\
    %outer (e: f32[10]) -> f32[10]
    %e = f32[10] parameter(0)
    ROOT %w1 = f32[10] while(%e), condition=%cond, body=%inner, {noted}
    """
    entry = """\
    %main (p: f32[10]) -> f32[10]
    %p = f32[10] parameter(0)
    ROOT %w2 = f32[10] while(%p), condition=%cond, body=%outer, MORE
    """
    computations = [dedent(text) for text in (small, large, condition, inner, outer)]
    found = traffic(program(entry.replace("MORE", noted), *computations))
    assert (found.hbm, found.unknown) == (5 * 5 * 120, ())
    # All there is: the loop over steps, of which one is counted.
    steps = traffic(program(entry.replace("MORE", "x=1"), *computations))
    assert (steps.hbm, steps.unknown) == (5 * 120, ())
    # Inside another loop it is not that; nor where it is little of the whole.
    unnoted = [text.replace(noted, "x=1") for text in computations]
    assert traffic(program(entry.replace("MORE", noted), *unnoted)).unknown == ("w1 in : counted as one round",)
    more = entry.replace("ROOT %w2", "%all = f32[1000] broadcast(%p)\n    ROOT %w2").replace("MORE", "x=1")
    assert traffic(program(more, *computations)).unknown == ("w2 in : counted as one round",)


def test_a_loop_that_fetches_from_the_host() -> None:
    body = """\
    %body (d: f32[10]) -> f32[10]
    %d = f32[10]{0:S(5)} parameter(0)
    %start = (f32[10]{0}, f32[10]{0:S(5)}, u32[]) copy-start(%d)
    ROOT %k = f32[10]{0} copy-done(%start)
    """
    condition = "%cond (c: f32[10]) -> pred[]\n%c = f32[10] parameter(0)\nROOT %ever = pred[] constant(true)"
    entry = """\
    %main (p: f32[10]) -> f32[10]
    %p = f32[10] parameter(0)
    ROOT %w = f32[10] while(%p), condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"5"}}
    """
    found = traffic(program(entry, dedent(body), condition))
    assert (found.hbm, found.host) == (5 * 40, 5 * 40)


def test_groups_that_cannot_be_read_are_reported() -> None:
    text = gather("all-reduce", "f32[10]", "f32[10]", "replica_groups=<<1>>")
    found = traffic(program(text, n_devices=4))
    assert found.unknown == ("x: not groups of devices: <<1>>; counted as among all devices",)
    assert [c.group for c in found.collectives] == [4]


def test_the_dump() -> None:
    """Three layers: the weight is gathered forward and backward, its gradient is scattered, in bf16, within a node."""
    found = traffic(DUMP)
    layer = 1024 * 1024 * 2
    assert found.by_kind() == {
        ("all-gather", False): Sum(6, 6 * layer, 6 * layer * 7 // 8, 0, 6 * 7),
        ("reduce-scatter", False): Sum(3, 3 * layer, 3 * layer * 7 // 8, 0, 3 * 7),
    }
    assert (found.within, found.across, found.host, found.unknown) == (9 * layer * 7 // 8, 0, 0, ())
    assert {stage(c.scope) for c in found.collectives} == {"layers/layer, forward", "layers/layer, backward"}
    # Three products a layer, each of two operands and a result; besides, what is gathered and scattered.
    rows = 128 * 1024 * 2
    products = 3 * (3 * layer + 2 * 3 * rows)
    assert found.hbm > products + 9 * layer * 9 // 8
    # Each of two nodes of four: the ring leaves its node by four cards.
    assert traffic(DUMP, gpus_per_node=4).across == 9 * layer * 7 // 8 // 4


@needs_plugin
def test_a_loop_of_products_compiled_for_two_nodes() -> None:
    """4 layers of [1024, 1024] weights, split 4 ways by row and 2 by column, on 2 replicas of 8 GPUs."""
    n, layers = 1024, 4

    def descent(mesh: Mesh) -> tuple[Any, tuple[Any, ...]]:
        at_rest = NamedSharding(mesh, P(None, "fsdp", "tensor"))
        by_row = NamedSharding(mesh, P(("replica", "fsdp")))
        weights = jax.ShapeDtypeStruct((layers, n, n), jnp.bfloat16, sharding=at_rest)
        batch = jax.ShapeDtypeStruct((n, n), jnp.bfloat16, sharding=by_row)

        def layer(x: Any, w: Any) -> tuple[Any, None]:
            w = jax.lax.with_sharding_constraint(w, NamedSharding(mesh, P(None, "tensor")))
            return jax.lax.with_sharding_constraint(jnp.tanh(x @ w), by_row), None

        def loss(w: Any, x: Any) -> Any:
            return jnp.sum(jax.lax.scan(layer, x, w)[0].astype(jnp.float32))

        return jax.jit(jax.grad(loss), out_shardings=at_rest), (weights, batch)

    compiled = compile_for(descent, MeshShape(replica=2, fsdp=4, tensor=2), CARDS["b200"])
    found = traffic(compiled.program.as_text())
    assert found.unknown == ()
    column, rows, batch = n * n // 2 * 2, n * n // 8 * 2, n * n // 8 * 2
    of = {(c.kind, c.group, c.in_node, c.payload): count for c, count in found.collectives.items()}
    assert of == {
        # Half a weight from the 4 that have a part of it; the two halves of the product's columns.
        ("all-gather", 4, 4, column): layers,
        ("all-gather", 2, 2, rows): layers,
        # The gradient of half a weight is of 8 parts of the batch, 4 in each node; that of the input of both halves.
        ("all-reduce", 8, 4, column): layers,
        ("all-reduce", 2, 2, batch): layers,
    }
    assert found.across == layers * (2 * column * 7 // 8) // 4
    assert found.within == layers * (column * 3 // 4 + rows // 2 + 2 * column * 7 // 8 + batch)


@needs_plugin
def test_the_loop_over_the_steps_of_a_dispatch_counts_once() -> None:
    """A dynamic number of steps, each a scan of 3 products: one step is counted, and nothing is unknown."""

    def steps(mesh: Mesh) -> tuple[Any, tuple[Any, ...]]:
        x = jax.ShapeDtypeStruct((512, 512), jnp.float32, sharding=NamedSharding(mesh, P("fsdp")))
        w = jax.ShapeDtypeStruct((3, 512, 512), jnp.float32, sharding=NamedSharding(mesh, P(None, "fsdp")))
        n = jax.ShapeDtypeStruct((), jnp.int32, sharding=NamedSharding(mesh, P()))

        def program(x: Any, w: Any, n: Any) -> Any:
            def step(_: Any, x: Any) -> Any:
                return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]

            return jax.lax.fori_loop(jnp.zeros((), jnp.int32), n, step, x)

        return jax.jit(program), (x, w, n)

    found = traffic(compile_for(steps, MeshShape(fsdp=8), CARDS["b200"]).program.as_text())
    assert found.unknown == ()
    assert {c.kind: count for c, count in found.collectives.items()} == {"all-gather": 3}
