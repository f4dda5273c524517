"""`pd profile`: the trace of a few steps of a run, and what of it is said on the terminal."""

import json
import re
from pathlib import Path

import pytest
from jax.profiler import ProfileData

from param_decomp_lab.profile.scopes import INNER, PHASES, Part, classify_scope, read_times
from param_decomp_lab.profile.table import Profile
from tests.lab.tiny_run import LIGHT, ROOT, SEQ_LEN, STEPS, Tiny, pd_here

KINDS = ("up_proj", "down_proj", "up_proj.pre_identity")
ATTACKED = (
    *LIGHT,
    f"pd.steps={STEPS}",
    "pd.loss_metrics=[{type: FaithfulnessLoss, coeff: 100}, {type: PersistentPGDReconLoss, coeff: 1, start_frac: 0.1,"
    " n_warmup_steps: 1, scope: {type: single_source}, optimizer: {type: sign, lr_schedule: {start_val: 0.1}}}]",
)


@pytest.mark.slow
def test_profile(tiny: Tiny, tmp_path: Path) -> None:
    sets = [word for assignment in (*ATTACKED, f"out_dir={tmp_path}") for word in ("--set", assignment)]
    outcome = pd_here("profile", tiny.config, "--steps", "2", "--warmup", "3", *sets)
    assert outcome.status == 0, outcome
    (folder,) = (tmp_path / "profiles").iterdir()
    assert list(tmp_path.iterdir()) == [tmp_path / "profiles"], "a profile is no run"
    for pattern in ("*.xplane.pb", "*.trace.json.gz"):
        assert len(list((folder / "plugins" / "profile" / folder.name).glob(pattern))) == 1
    phases = [phase for phase in PHASES if phase != "hold"]  # this run holds nothing
    for text in (*phases, "backward, error", "tokens/s", "ui.perfetto.dev", f"8791 {folder}"):
        assert text in " ".join(outcome.out.split())

    found = json.loads((folder / "profile.json").read_text())
    assert found["steps"] == 2
    assert found["first_step"] == STEPS // 10 + 3, "from the step on at which the attack is on"
    assert found["tokens_per_s"] == pytest.approx(8 * SEQ_LEN / found["step_s_untraced"])
    assert {row["phase"] for row in found["scopes"]} >= set(phases)
    # Of the table's rows those above half a percent: which these are is the machine's affair.
    assert ("losses", "forward", ["up_proj"]) in [(row["phase"], row["way"], row["inner"]) for row in found["scopes"]]
    assert all(row["share"] >= 0 for row in found["scopes"])
    assert sum(row["share"] for row in found["scopes"]) == pytest.approx(1)
    assert next(row["share"] for row in found["scopes"] if row["phase"] == "losses") > 0
    assert sum(row["share"] for row in found["scopes"] if row["phase"] not in PHASES) < 0.3
    assert 0 < found["busy"] <= 1


@pytest.mark.slow
def test_several_steps_at_once(tiny: Tiny, tmp_path: Path) -> None:
    """The run's own program: of so many steps; and nothing before the trace if it is told so."""
    sets = [word for assignment in (*LIGHT, "steps_per_dispatch=4") for word in ("--set", assignment)]
    outcome = pd_here("profile", tiny.config, "--steps", "6", "--warmup", "0", "--out", tmp_path / "out", *sets)
    assert outcome.status == 0, outcome
    found = json.loads((tmp_path / "out" / "profile.json").read_text())
    assert (found["steps"], found["first_step"], found["step_s_untraced"]) == (6, 0, None)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--set", "pd.stepz=3"), "did you mean 'steps'"),
        (("--set", "mesh.fsdp=64", "--set", "pd.batch_size=64", "--set", "eval=null"), "needs 64 devices"),
        (("--out", "FILE/below"), "choose another place with --out"),
        (("--steps", "0"), "--steps"),
    ],
)
def test_refused(tiny: Tiny, tmp_path: Path, arguments: tuple[str, ...], reason: str) -> None:
    (tmp_path / "file").touch()
    given = [word.replace("FILE", str(tmp_path / "file")) for word in arguments]
    outcome = pd_here("profile", tiny.config, *given)
    assert outcome.status == 2, outcome
    assert reason in outcome.err


@pytest.mark.parametrize(
    ("path", "part"),
    [
        ("jit(f)/while/body/clean_pass/dot_general", Part("clean_pass")),
        ("jit(f)/jvp(causal_importance)/add", Part("causal_importance", "forward")),
        (
            "jit(f)/warm_up_ascents/while/body/transpose(jvp())/down_proj/mul",
            Part("warm_up_ascents", "backward", ("down_proj",)),
        ),
        (
            "jit(f)/transpose(jvp(losses))/jvp(losses)/checkpoint/rematted_computation/up_proj.pre_identity/draws/xor",
            Part("losses", "recomputed", ("up_proj.pre_identity", "draws")),
        ),
        ("jit(f)/jvp(losses)/error/jvp(jit(g))/exp;jit(f)/clean_pass/add", Part("losses", "forward", ("error",))),
        ("jit(f)/while/body/optimization_barrier", Part("(no scope)")),
        ("", Part("(no scope)")),
    ],
)
def test_part_of(path: str, part: Part) -> None:
    assert classify_scope(path, KINDS) == part


def test_every_scope_of_the_core_is_known() -> None:
    core = "\n".join(file.read_text() for file in (ROOT / "param_decomp_jax").rglob("*.py"))
    given = set(re.findall(r"named_scope\((.*?)\)", core))
    assert given == {f'"{scope}"' for scope in (*PHASES, *INNER)} | {"kind"}


PROGRAM = """HloModule jit_step, is_scheduled=true

ENTRY %main (a: f32[8]) -> f32[8] {
  %a = f32[8]{0} parameter(0), metadata={op_name="x"}
  %fusion.1 = f32[8]{0} fusion(%a), kind=kLoop, calls=%f, metadata={op_name="jit(step)/clean_pass/mul"}
  %while.2 = (f32[8]{0}, s32[]) while(%fusion.1), body=%b, metadata={op_name="jit(step)/jvp(losses)/while"}
  ROOT %dot.3 = f32[8]{0} dot(%fusion.1, %a), metadata={op_name="jit(step)/jvp(losses)/up_proj/dot_general"}
}
"""


def trace(plane: str, lines: list[list[tuple[str, int, int]]], module: str = "jit_step") -> bytes:
    """A trace in which each line has (instruction, start, end) in ns; a name in capitals is no instruction."""
    names = sorted({name for line in lines for name, _, _ in line})
    metadata = "".join(
        f'event_metadata {{ key: {n} value {{ id: {n} name: "{name}" }} }}\n' for n, name in enumerate(names, 1)
    )

    def event(name: str, start: int, end: int) -> str:
        stats = f'stats {{ metadata_id: 1 str_value: "{name}" }} stats {{ metadata_id: 2 str_value: "{module}" }}'
        return (
            f"events {{ metadata_id: {names.index(name) + 1} offset_ps: {start * 1000} "
            f"duration_ps: {(end - start) * 1000} {'' if name.isupper() else stats} }}\n"
        )

    stats = "".join(
        f'stat_metadata {{ key: {n} value {{ id: {n} name: "{name}" }} }}\n'
        for n, name in enumerate(("hlo_op", "hlo_module"), 1)
    )
    text = "".join(f"lines {{ id: {n} {''.join(event(*e) for e in line)} }}\n" for n, line in enumerate(lines))
    return ProfileData.text_proto_to_serialized_xspace(f'planes {{ name: "{plane}" {text} {metadata} {stats} }}')


def test_times_of_a_gpu(tmp_path: Path) -> None:
    """Two streams, kernels that overlap, and one that nobody names."""
    lines = [[("fusion.1", 0, 10), ("dot.3", 10, 40)], [("dot.3", 30, 50), ("GRAPH", 60, 65)]]
    file = tmp_path / "x.xplane.pb"
    file.write_bytes(trace("/device:GPU:0", lines))
    times = read_times(file, PROGRAM, KINDS, 1)
    assert times.by_part == {Part("clean_pass"): 10, Part("losses", "forward", ("up_proj",)): 50}
    assert (times.busy_ns, times.unknown_ns) == (50, 5)
    (longest,) = Profile(1, 0, 16, 1e-6, None, times).kernels(1)
    assert (longest["kernel"], longest["phase"], longest["inner"]) == ("dot.3", "losses", ["up_proj"])
    assert longest["ms_per_step"] == pytest.approx(50e-6)


def test_times_of_a_cpu(tmp_path: Path) -> None:
    """What contains others counts without them, loops not at all; other programs and host events do not count."""
    line = [("PYTHON", 0, 100), ("while.2", 0, 50), ("fusion.1", 5, 25), ("dot.3", 10, 20), ("dot.3", 30, 40)]
    file = tmp_path / "x.xplane.pb"
    file.write_bytes(trace("/host:CPU", [line]))
    times = read_times(file, PROGRAM, KINDS, 2)
    assert times.by_part == {Part("clean_pass"): 10, Part("losses", "forward", ("up_proj",)): 20}
    assert (times.busy_ns, times.unknown_ns) == (30, 0)
    profile = Profile(2, 0, 16, 1e-6, None, times)
    assert profile.phases() == [("clean_pass", 10), ("losses", 20)]
    assert profile.ms(20) == pytest.approx(20e-6 / 2 / 2), "per step and device"
    file.write_bytes(trace("/host:CPU", [line], "jit_other"))
    assert read_times(file, PROGRAM, KINDS, 1).by_part == {}
