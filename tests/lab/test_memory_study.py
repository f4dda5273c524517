"""`experiments/memory_study.py`: its page on made-up records, and its habits, each with and without its line."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from experiments import memory_habits
from experiments.memory_habits_parts import Given, Habit, Program, Size
from experiments.memory_habits_programs import HABITS
from experiments.memory_study import LEVERS, PUBLISHED
from experiments.memory_study_numbers import table
from experiments.memory_study_page import (
    LADDER,
    MISSING,
    PUBLISHED_GIB,
    TRENDS,
    habits_table,
    ladder_table,
    lever_differences,
    levers_table,
    published_table,
    trends_table,
    write_page,
)
from experiments.memory_study_words import NOTES
from param_decomp_jax.sharding.mesh import MeshShape, make_mesh
from param_decomp_lab.config import load_config
from tests.cases import slow_but

REFERENCE, REFERENCE_128 = (row.name for row in LEVERS if row.name.startswith("reference"))
TINY = Size(rows=16, T=16, long=16, d=64, d_mlp=128, layers=4, heads=4, sites=2, C=128, vocabulary=96)


def test_published_steps_take_whole_batches() -> None:
    """As those beside them do, whatever the configuration itself has come to."""
    for row in PUBLISHED:
        memory = load_config(row.config, row.sets).wrapper.memory
        assert (memory.preset, memory.micro_batches) == ("published", 1)


def record(peak: float, **others: float) -> dict[str, Any]:
    of = {"temp": peak / 2, "arguments": peak / 2, "host": 0.0, "flops": 1e17, "compile_s": 64.2}
    return {"peak": peak, **of, "unknown": [], "hbm": 3.3e12, "within": 2e11, "across": 0, **others}


def lines(text: str) -> dict[str, list[str]]:
    """Cells of a table's lines by the first one."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    return {row[0]: row[1:] for row in rows}


def habit_record(same: bool = False) -> dict[str, Any]:
    kept, without = ({**record(peak), "flops": 2e12, "within": 0} for peak in (9.0, 1.5))
    return {"line": "a", "instead": "b", "with": kept, "without": without, "same_program": same}


# ---- the page ----


def test_every_lever_has_its_line_before_anything_is_compiled() -> None:
    found = lines(levers_table({}, LEVERS))
    assert [found[row.name][0] for row in LEVERS] == [MISSING] * len(LEVERS)


def test_a_lever_is_held_against_the_reference_of_its_batch() -> None:
    found = {
        f"{REFERENCE}, unlimited": record(14.0),
        f"{REFERENCE_128}, unlimited": record(20.0, flops=2e17),
        "layers unrolled, unlimited": record(16.5, flops=1.25e17, host=0.5),
        "batch 128 in 2 micro-batches, unlimited": record(17.0, flops=2e17),
    }
    rows = lines(levers_table(found, LEVERS))
    assert rows[REFERENCE][:2] == ["14.00", "0"]
    assert rows["layers unrolled"] == [
        "16.50", "+2.50", "8.25", "8.25", "0.50", "1.25", "3,300", "200", "0", "64 s",
    ]  # fmt: skip
    assert rows["batch 128 in 2 micro-batches"][:6] == ["17.00", "−3.00", "8.50", "8.50", "0", "1"]
    assert rows["attention plain"][0] == MISSING
    assert lever_differences(found, LEVERS) == {"layers unrolled": 2.5, "batch 128 in 2 micro-batches": -3.0}


def test_a_lever_without_its_reference_is_held_against_nothing() -> None:
    found = {"layers unrolled, unlimited": record(16.5)}
    assert lines(levers_table(found, LEVERS))["layers unrolled"][:2] == ["16.50", ""]
    assert lever_differences(found, LEVERS) == {}


def test_published_rows_compare_what_was_published() -> None:
    """Temporaries of layer 18, peaks of the others; a figure that the card's limit has changed says so."""
    assert set(PUBLISHED_GIB) == {row.name for row in PUBLISHED}
    of_27, of_18 = "27 sites, seq 2048, 64 GPUs, batch 64", "layer 18, 8 GPUs, batch 32"
    found = {
        f"{of_27}, real": record(170.05),
        f"{of_27}, unlimited": record(268.5),
        f"{of_18}, unlimited": record(178.0),
    }
    rows = lines(published_table(found, PUBLISHED))
    assert rows[of_27] == ["peak", "179.0", "170.1 (limit-bound)", "268.5", "0.95", "1.50"]
    assert rows[of_18] == ["temp", "44.5", "", "89.00", "", "2.00"]
    assert rows["27 sites, seq 2048, 64 GPUs, batch 128"][:3] == ["peak", "210.2 (did not fit)", MISSING]


def test_trends_are_of_one_doubling() -> None:
    assert {row for first, second, _ in TRENDS.values() for row in (first, second)} == set(PUBLISHED_GIB)
    first, second = (f"27 sites, seq 512, 64 GPUs, batch {batch}" for batch in (64, 256))
    rows = lines(trends_table({f"{first}, real": record(100.0), f"{second}, real": record(400.0)}))
    assert rows["27 sites, seq 512: batch 64 to 256, each doubling"] == [
        "+2.75 (× 1.02)", "+150.0 (× 2.00)", MISSING,
    ]  # fmt: skip
    assert rows["layer 18, batch 32: remat on to off"] == ["+12.10 (× 1.27)", MISSING, MISSING]


def test_ladder_is_in_the_published_unit() -> None:
    variant = "bf16, scan, remat Block"
    gib = 3.8e9 / 2**30
    found = {f"ladder: {variant}, {limit}": {"peak": gib} for limit in ("real", "unlimited")}
    rows = lines(ladder_table(found))
    assert rows[variant] == ["3.8", "3.8", "3.8", "1.00"]
    assert sum(row[1:2] == [MISSING] for row in rows.values()) == len(LADDER) - 1


def test_habits_that_cost_and_habits_that_do_not() -> None:
    assert habits_table({}) == f"({MISSING})"
    text = habits_table({"habit: one": habit_record(), "habit: two": habit_record(same=True), "other": {}})
    figures, words = text.split("\n\n")
    assert lines(figures)["one"] == ["9.00", "1.50", "7.50 GiB", "1", "1", ""]
    assert lines(figures)["two"][2] == "same program"
    assert lines(words)["one"] == ["a", "b"]


def test_page_of_incomplete_records(tmp_path: Path) -> None:
    page = tmp_path / "docs" / "memory_study.md"
    page.parent.mkdir()
    write_page(page, {}, LEVERS, PUBLISHED)
    image = page.parent / "images" / "memory_study.png"
    assert not image.exists()
    assert "![" not in page.read_text()
    found = {f"{row.name}, unlimited": record(14.0 + i) for i, row in enumerate(LEVERS[:5])}
    write_page(page, {**found, "habit: one": habit_record()}, LEVERS, PUBLISHED)
    text = page.read_text()
    assert image.read_bytes().startswith(b"\x89PNG")
    assert all(f"| {row.name} " in text for row in (*LEVERS, *PUBLISHED))
    assert all(note in text for note in NOTES.values())
    assert "--set 'mesh={replica: 8, fsdp: 8}'" in text


def test_a_table_is_readable_as_it_is() -> None:
    assert table(["a", "b"], [["long name", "1.00"], ["x", "words"]]).splitlines() == [
        "| a         | b     |",
        "|-----------|-------|",
        "| long name |  1.00 |",
        "| x         | words |",
    ]


# ---- habits ----


def results(program: Program) -> list[np.ndarray]:
    """Of a run on 8 simulated devices, with drawn arguments."""
    mesh, rng = make_mesh(MeshShape(fsdp=8)), np.random.default_rng(0)

    def drawn(given: Given) -> jax.Array:
        shape = given.shape
        integers = jnp.issubdtype(given.dtype, jnp.integer)
        values = rng.integers(TINY.vocabulary, size=shape) if integers else 0.1 * rng.random(size=shape)
        return jax.device_put(jnp.asarray(values, given.dtype), NamedSharding(mesh, given.spec))

    with jax.set_mesh(mesh):
        arguments = jax.tree.map(drawn, program.arguments)
        found = jax.jit(program.function, donate_argnums=program.donated)(*arguments)
    return [np.asarray(x.astype(jnp.float32)) for x in jax.tree.leaves(found)]


@pytest.mark.parametrize("habit", slow_but(HABITS[::5], HABITS), ids=lambda habit: habit.name)
def test_a_habit_changes_no_result(habit: Habit, monkeypatch: pytest.MonkeyPatch) -> None:
    # cuDNN's attention is not even traced where there is none.
    monkeypatch.setattr(jax.lax, "platform_dependent", lambda *arrays, cuda, default: default(*arrays))
    kept, without = (results(habit.program(TINY, is_kept)) for is_kept in (True, False))
    for a, b in zip(kept, without, strict=True):
        scale = np.abs(b).max()
        assert scale > 0
        np.testing.assert_allclose(a / scale, b / scale, atol=0.02)  # bf16


def test_habits_are_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = tmp_path / "study.json"
    kept.write_text(json.dumps({"a lever, unlimited": record(1.0)}))
    asked: list[str] = []

    def made_up(habit: Habit, size: Size) -> dict[str, Any]:
        asked.append(habit.name)
        return habit_record()

    monkeypatch.setattr(memory_habits, "measure", made_up)
    for more in ([], [], ["--force", "--only", "einsum"]):
        monkeypatch.setattr("sys.argv", ["memory_habits", "--kept", str(kept), *more])
        memory_habits.main()
    assert asked == [*(habit.name for habit in HABITS), "einsum for a plain product"]
    assert next(iter(json.loads(kept.read_text()))) == "a lever, unlimited"


def test_kept_figures_are_of_the_habits_there_are() -> None:
    found = memory_habits.load(memory_habits.KEPT)
    kept = {key: (r["line"], r["instead"]) for key, r in found.items() if key.startswith("habit: ")}
    assert kept == {memory_habits.key(habit): (habit.line, habit.instead) for habit in HABITS}


def test_an_unknown_habit_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["memory_habits", "--only", "nonsense"])
    with pytest.raises(SystemExit):
        memory_habits.main()
    assert "einsum for a plain product" in capsys.readouterr().err


def test_programs_that_differ_in_names_alone_are_the_same() -> None:
    texts = [
        '%a.1 = f32[8] add(%b, %b), metadata={op_name="x"}',
        "%c = f32[8] add(%d.2, %d.2)",
        "%c = f32[16] add(%d, %d)",
    ]
    first, second, third = map(memory_habits.anonymous, texts)
    assert first == second != third
