"""Hostile and unlucky input: one message, nothing lost, and one bad folder does not hide the others."""

import errno
import io
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from rich.text import Text
from safetensors.numpy import load_file, save_file

from param_decomp_jax.targets.architecture import LARGEST, WIDEST, UnsupportedConfig
from param_decomp_jax.targets.registry import read_config
from param_decomp_lab.cli import main
from param_decomp_lab.config.wrapper import Wrapper
from param_decomp_lab.errors import UserError
from param_decomp_lab.launch.job import parse_more
from param_decomp_lab.pretrain.finished import find_finished
from param_decomp_lab.pretrain.recipe import read_recipe
from param_decomp_lab.probe import pages
from param_decomp_lab.runs.checkpoints.damage import (
    ARRAYS,
    DESCRIPTION,
    FILES,
    Damaged,
    array_shapes,
    find_file_damage,
    read_description,
)
from param_decomp_lab.runs.checkpoints.store import Checkpoints
from param_decomp_lab.runs.ending import read_ending
from param_decomp_lab.runs.folder import resume_command
from param_decomp_lab.runs.identity import Displaced, FolderIdentity
from param_decomp_lab.runs.lock import holder
from param_decomp_lab.runs.metrics_file import read_metrics
from param_decomp_lab.runs.target_file import read_target
from param_decomp_lab.schema.mistakes import ConfigSource, Mistake
from param_decomp_lab.schema.strict import LayerCount, Width, validate
from param_decomp_lab.ui.console import PlainConsole
from tests.lab import toy_run
from tests.lab.test_bad_input import assert_refused
from tests.lab.test_untrusted import BOMB
from tests.lab.tiny_run import pd_here

# ---- pd runs ----


def config_text(**wrapper: object) -> str:
    return json.dumps({"wrapper": {"run_name": "good", **wrapper}, "torch": {"pd": {"steps": 5}}})


def no_utf8(run: Path) -> None:
    (run / "config.yaml").write_bytes(b"a: \xff")


def row(text: str) -> Callable[[Path], object]:
    return lambda run: (run / "metrics.jsonl").write_text(text + '\n{"step": 1, "train/loss/total": 0.5}\n')


RUNS: dict[str, tuple[Callable[[Path], object], str]] = {
    "markup": (lambda run: (run / "config.yaml").write_text(config_text(run_name="[/] [red]")), "[/] [red]"),
    "emoji": (lambda run: (run / "config.yaml").write_text(config_text(run_name=":warning:")), ":warning:"),
    "escape": (lambda run: (run / "config.yaml").write_text(config_text(run_name="a\x1b[2Jb")), "\\x1b[2J"),
    "long name": (lambda run: (run / "config.yaml").write_text(config_text(run_name="a" * 10**5)), "more characters"),
    "bomb": (lambda run: (run / "config.yaml").write_text(BOMB), "100,000 values"),
    "brackets": (lambda run: (run / "config.yaml").write_text("[" * 10**5), "nested"),
    "not UTF-8": (no_utf8, "not UTF-8"),
    "pipe": (lambda run: [(run / "config.yaml").unlink(), os.mkfifo(run / "config.yaml")], "p-"),
    "huge steps": (
        lambda run: (run / "config.yaml").write_text(config_text().replace("5", "1" + "0" * 400)), "too large"
    ),
    "steps as text": (lambda run: (run / "config.yaml").write_text("wrapper: {}\ntorch: {pd: {steps: true}}"), "True"),
    "wrapper as text": (lambda run: (run / "config.yaml").write_text("wrapper: a\ntorch: {pd: {steps: 1}}"), "a"),
    "huge number": (row('{"step": 0, "train/loss/total": 1' + "0" * 400 + "}"), "loss 0.5"),
    "huge step": (row('{"step": 1' + "0" * 400 + "}"), "loss 0.5"),
    "true as a step": (row('{"step": true, "train/x": 1}'), "loss 0.5"),
    "deep row": (row("[" * 10**5), "loss 0.5"),
    "pipe as a lock": (lambda run: os.mkfifo(run / "lock"), "good"),
    "pipe as an end": (lambda run: os.mkfifo(run / "ended.json"), "good"),
    "list as an end": (lambda run: (run / "ended.json").write_text("[1]"), "good"),
    "deep end": (lambda run: (run / "ended.json").write_text("[" * 10**5), "good"),
    "lock of other types": (
        lambda run: (run / "lock").write_text('{"host": [], "boot": 1, "pid": "../x", "began": 1, "since": 1}'), "good"
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", RUNS)
def test_a_bad_run_among_good_ones(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "400")  # whole paths
    act, says = RUNS[kind]
    for number in (1, 2):
        run = tmp_path / f"p-0000000{number}"
        run.mkdir()
        (run / "config.yaml").write_text(config_text())
    act(run)
    outcome = pd_here("runs", tmp_path)
    assert outcome.status == 0, outcome
    assert "p-00000001" in outcome.out
    assert "p-00000002" in outcome.out
    assert says in " ".join(outcome.out.split())
    assert "\x1b" not in outcome.out
    assert len(outcome.out) < 10_000
    as_json = pd_here("runs", tmp_path, "--json")
    assert len(json.loads(as_json.out)) == 2


def test_a_folder_that_may_not_be_looked_into(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of processes in /proc, which refuse even root."""
    (tmp_path / "p-00000001").mkdir()
    (tmp_path / "p-00000001" / "config.yaml").write_text(config_text())
    (tmp_path / "closed").mkdir()
    is_file = Path.is_file

    def refused(path: Path, **options: Any) -> bool:
        if path.parent.name == "closed":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return is_file(path, **options)

    monkeypatch.setattr(Path, "is_file", refused)
    monkeypatch.setenv("COLUMNS", "400")  # whole paths
    outcome = pd_here("runs", tmp_path)
    assert outcome.status == 0, outcome
    assert "p-00000001" in outcome.out


def test_a_name_that_is_no_text(tmp_path: Path) -> None:
    run = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff\x1b[2J"))
    run.mkdir()
    (run / "config.yaml").write_text(config_text())
    outcome = pd_here("runs", tmp_path)
    assert outcome.status == 0
    assert "\\udcff\\x1b[2J" in "".join(outcome.out.split())


# ---- sizes ----


LLAMA = {
    "model_type": "llama", "vocab_size": 10, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
    "intermediate_size": 16,
}  # fmt: skip
SIZES = {
    "layers": ({**LLAMA, "num_hidden_layers": 10**8}, "n_layers: should be a whole number from 1 to 4,096"),
    "no heads": ({**LLAMA, "num_attention_heads": 0}, "num_attention_heads: should be a whole number of at least 1"),
    "no layers": ({**LLAMA, "num_hidden_layers": 0}, "n_layers: should be a whole number from 1"),
    "width": ({**LLAMA, "hidden_size": 2 * 10**9}, "d_model: should be a whole number from 1 to 16,777,216"),
    "negative": ({**LLAMA, "vocab_size": -1}, "vocab_size: should be a whole number from 1"),
    "infinite": ({**LLAMA, "hidden_size": float("inf")}, "hidden_size: should be a whole number, not inf"),
    "a fraction": ({**LLAMA, "num_hidden_layers": 1.5}, "num_hidden_layers: should be a whole number, not 1.5"),
    "a list": ({**LLAMA, "num_key_value_heads": []}, r"num_key_value_heads: should be a whole number, not \[\]"),
    "a switch": ({**LLAMA, "vocab_size": True}, "vocab_size: should be a whole number, not True"),
    "theta": ({**LLAMA, "rope_theta": float("inf")}, "rope_theta: should be a positive number"),
    "toy": ({"model_type": "tms", "n_features": 5, "n_hidden": 2, "n_hidden_layers": 10**9}, "n_hidden_layers: should"),
    "type": ({"model_type": ["llama"]}, "model_type is"),
}  # fmt: skip


@pytest.mark.parametrize("kind", SIZES)
def test_sizes_of_a_network(kind: str) -> None:
    raw, says = SIZES[kind]
    with pytest.raises(UnsupportedConfig, match=says):
        read_config(raw)


def test_the_limits_of_a_configuration_are_those_of_a_network() -> None:
    def most(kind: object) -> int:
        return next(bound.le for bound in kind.__metadata__[0].metadata if hasattr(bound, "le"))  # type: ignore[attr-defined]

    assert set(LARGEST.values()) == {most(LayerCount)}
    assert most(Width) == WIDEST


@pytest.mark.parametrize("size", ["n_hidden_layers: 1000000000", "n_hidden: 2000000000", "n_features: 2000000000"])
def test_sizes_of_a_recipe(tmp_path: Path, size: str) -> None:
    key, _, value = size.partition(": ")
    model = {"architecture": "tms", "n_features": 5, "n_hidden": 2, "hidden_init": "identity", "n_hidden_layers": 1}
    recipe = {
        "model": {**model, key: int(value)}, "data": {"feature_probability": 0.05}, "out": "o", "steps": 1,
        "batch_size": 1, "optimizer": {"lr": 0.1},
    }  # fmt: skip
    (tmp_path / "r.yaml").write_text(json.dumps(recipe))
    with pytest.raises(UserError, match=rf"model.{key}: should be less than or equal to"):
        read_recipe(tmp_path / "r.yaml")


def test_sizes_of_target_json(tmp_path: Path) -> None:
    fields = {"architecture": "tms", "n_features": 5, "n_hidden": 2, "n_hidden_layers": 10**9}
    for wrong in (fields, {**fields, "n_hidden_layers": "1"}, [], {**fields, "architecture": []}):
        (tmp_path / "target.json").write_text(json.dumps(wrong))
        with pytest.raises(UserError, match=r"target.json is damaged or of another version"):
            read_target(tmp_path)


# ---- files of a run ----


def test_small_files_of_a_run(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("{}")
    (tmp_path / "summary.json").write_text("[" * 10**5)
    with pytest.raises(UserError, match=r"summary.json: the summary of a pretraining: nested"):
        find_finished(tmp_path, {})
    (tmp_path / "ended.json").write_text('{"how": ["failed"], "why": 1}')
    assert read_ending(tmp_path) is None
    (tmp_path / "lock").write_text('{"host": "a", "boot": "b", "pid": "1", "began": "c", "since": "d"}')
    assert holder(tmp_path) is None
    (tmp_path / "lock").write_text('{"host": "a", "boot": "b", "pid": 1, "began": "c", "since": "d"}')
    assert holder(tmp_path) is not None


@pytest.mark.parametrize("step", ['"x"', "null", "1.5", "true", "-1", "[0]", "1" + "0" * 400])
def test_steps_of_metrics(tmp_path: Path, step: str) -> None:
    good = '{"step": 0, "a": NaN}\n'
    (tmp_path / "metrics.jsonl").write_text(good + f'{{"step": {step}}}\n' + good)
    with pytest.raises(UserError, match=r"metrics.jsonl:2: (the step should be|the number 1000)"):
        read_metrics(tmp_path)
    (tmp_path / "metrics.jsonl").write_text(good * 2)
    assert len(read_metrics(tmp_path)) == 2


def test_metrics_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 0, "a": "\xff"}\n')
    with pytest.raises(UserError, match=r"metrics.jsonl:\d+: cannot read the metrics: not UTF-8"):
        read_metrics(tmp_path)
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 0}\n' + b"\0" * (1 << 21))
    with pytest.raises(UserError, match=r"metrics.jsonl:2: cannot read the metrics: a line of more than 1,048,576"):
        read_metrics(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n' + "[" * 10**5 + '\n{"step": 1}\n')
    with pytest.raises(UserError, match=r"metrics.jsonl:2: nested too deep"):
        read_metrics(tmp_path)


LISTS = ["[]", "null", "1", '"x"', "[" * 10**5, '{"custom_metadata": []}', '{"custom_metadata": {"configuration": 1}}',
         '{"custom_metadata": {"configuration": "", "fingerprints": {"learned": []}}}',
         '{"custom_metadata": {"configuration": "", "inputs": {"target": 1}}}',
         '{"tree_metadata": []}', '{"tree_metadata": {"a": 1}}',
         '{"tree_metadata": {"a": {"key_metadata": [{"key": "a"}],'
         '"value_metadata": {"write_shape": ["x"]}}}}']  # fmt: skip


@pytest.mark.parametrize("text", LISTS)
def test_lists_of_a_checkpoint(tmp_path: Path, text: str) -> None:
    for name in (FILES, DESCRIPTION, ARRAYS):
        (tmp_path / name).write_text(text)
    with pytest.raises(Damaged):
        read_description(tmp_path)
    with pytest.raises(Damaged):
        array_shapes(tmp_path)
    assert find_file_damage(tmp_path, ["learned"])


@pytest.mark.parametrize("sizes", [{"../x": 1}, {"a": "1"}, {"a": None}, {"a": {"b": 1}}, {"a\0": 1}])
def test_names_and_sizes_of_a_checkpoint(tmp_path: Path, sizes: object) -> None:
    (tmp_path / "a").write_text("x")
    (tmp_path / FILES).write_text(json.dumps(sizes))
    assert find_file_damage(tmp_path, ["..", "learned"])
    (tmp_path / FILES).write_text('{"a": 1}')
    assert not find_file_damage(tmp_path, ["learned"])


@pytest.mark.slow
def test_a_run_falls_back_to_the_checkpoint_before(toy: Path, tmp_path: Path) -> None:
    shutil.copytree(toy / "p-00000001", tmp_path / "p-00000001")
    (tmp_path / "p-00000001/ckpts/12" / FILES).write_text("[]")
    with mock.patch("param_decomp_lab.runs.checkpoints.store.RETRY_AFTER_S", 0.0):
        outcome = pd_here("train", "--resume", tmp_path / "p-00000001")
    assert outcome.status == 0, outcome
    assert "was renamed to damaged-12" in " ".join(outcome.out.split())


# ---- paths and messages ----

LONG = "x" * 256
NOT_TEXT = os.fsdecode(b"\xff")
COMMANDS = {
    "report": ("report",), "runs": ("runs",), "check": ("check",), "train": ("train", "--resume"),
    "pretrain": ("pretrain",),
    "export": ("export", "--out", "o"), "eval": ("eval",), "eval --out": ("eval", "run", "--out"), "wandb": ("wandb",),
    "eval --metrics": ("eval", "run", "--metrics"), "probe --json": ("probe", "a", "--json"),
    "harvest": ("harvest",), "harvest --data": ("harvest", "run", "--data"), "browse": ("browse",),
    "launch": ("launch",), "cluster": ("cluster",),
    "data": ("data", "tokenize", "x", "--out"), "configs": ("configs", "tms", "--out"),
}  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("path", [LONG, NOT_TEXT], ids=["long", "not UTF-8"])
def test_paths_of_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, path: str) -> None:
    monkeypatch.chdir(tmp_path)
    outcome = pd_here(*COMMANDS[command], path)
    assert_refused(outcome, "more than 255 bytes" if path == LONG else "is not UTF-8 text")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("key", ["torch_config", "out_dir", "init_from"])
@pytest.mark.parametrize("path", ["a\0b", "~nobody-of-this-name/x", LONG], ids=["null", "user", "long"])
def test_paths_of_a_configuration(key: str, path: str) -> None:
    with pytest.raises(UserError, match=rf"^file: {key}: .* (contains|names)"):
        validate(Wrapper, {"torch_config": "a", "run_name": "a", key: path}, ConfigSource("file"))


def test_messages_are_short(tmp_path: Path) -> None:
    keys = "".join(f"unknown_key_{n}: 1\n" for n in range(3000))
    (tmp_path / "a.yaml").write_text(f"torch_config: a\nrun_name: a\n{keys}")
    outcome = pd_here("check", tmp_path / "a.yaml")
    assert_refused(outcome, "unknown key 'unknown_key_0'", "and 2,961 more unknown keys")
    assert len(outcome.err) < 21_000
    outcome = pd_here("check", tmp_path / "b.yaml", "--set", "run_name=[" + "a" * 10**5)
    assert_refused(outcome, "more characters")
    assert len(outcome.err) < 21_000
    many = ConfigSource("file").error([Mistake(f"key{n}", "is wrong") for n in range(1000)])
    assert str(many).endswith("… and 960 more")


def test_messages_are_printable(tmp_path: Path) -> None:
    assert_refused(pd_here("runs", "a\x1b[2J[/b]"), "a\\x1b[2J[/b] is not a folder")
    (tmp_path / "a.yaml").write_text('torch_config: a\nrun_name: a\n"a\\e[2J[/b]": 1\n')
    outcome = pd_here("check", tmp_path / "a.yaml")
    assert_refused(outcome, "unknown key 'a\\x1b[2J[/b]'")


def test_what_is_printed_is_no_markup() -> None:
    text = io.StringIO()
    console = PlainConsole(file=text, width=200)
    console.print("t[/b] [red]a[/red] :warning: \x1b[2J")
    assert text.getvalue() == "t[/b] [red]a[/red] :warning: \\x1b[2J\n"


@pytest.mark.slow
def test_a_folder_whose_name_is_markup(tmp_path: Path, toy: Path) -> None:
    run = tmp_path / "t[" / "b]" / "p-00000001"  # t[/b]
    shutil.copytree(toy / "p-00000001", run, ignore=shutil.ignore_patterns("ckpts"))
    outcome = pd_here("report", run)
    assert outcome.status == 0, outcome
    assert f"{run}/report.html" in outcome.out


ERRORS = {
    "full": (OSError(errno.ENOSPC, "No space left on device", "a"), 1, "nothing more can be written: a"),
    "long": (OSError(errno.ENAMETOOLONG, "File name too long", "a"), 2, "the name is too long for a file: a"),
    "memory": (MemoryError(), 1, "not enough memory"),
    "device memory": (RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 1 bytes"), 1, "not enough memory"),
}


@pytest.mark.parametrize("kind", ERRORS)
def test_what_the_machine_refuses(tmp_path: Path, kind: str) -> None:
    error, status, says = ERRORS[kind]
    with mock.patch("param_decomp_lab.runs.listing.find_runs", side_effect=error):
        outcome = pd_here("runs", tmp_path)
    assert outcome.status == status
    assert says in outcome.err
    assert "Traceback" not in outcome.err


def test_other_errors_keep_their_traceback(tmp_path: Path) -> None:
    with (
        mock.patch("param_decomp_lab.runs.listing.find_runs", side_effect=OSError(errno.EIO, "x")),
        pytest.raises(OSError, match="x"),
    ):
        pd_here("runs", tmp_path)


def test_full_standard_output(tmp_path: Path) -> None:
    with (
        Path("/dev/full").open("w") as full,
        mock.patch.object(sys, "argv", ["pd", "runs", str(tmp_path), "--json"]),
        mock.patch.object(sys, "stdout", full),
        mock.patch.object(sys, "stderr", io.StringIO()) as said,
        pytest.raises(SystemExit) as ended,
    ):
        main()
    assert ended.value.code == 1
    assert "nothing more can be written" in said.getvalue()


def test_a_working_directory_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    outcome = pd_here("check", toy_run.CONFIG)
    assert_refused(outcome, "the current folder no longer exists")


def test_metrics_that_are_binary(toy: Path, tmp_path: Path) -> None:
    (tmp_path / "metrics.yaml").write_bytes(b"\xff\xfe")
    assert_refused(pd_here("eval", toy / "p-00000001", "--metrics", tmp_path / "metrics.yaml"), "not UTF-8 text")


# ---- a run ----


@pytest.mark.slow
def test_weights_that_are_not_finite_are_named(tmp_path: Path) -> None:
    toy_run.save_toy(tmp_path)
    file = tmp_path / "target" / "model.safetensors"
    arrays = load_file(file)
    name = sorted(arrays)[0]
    save_file({**arrays, name: np.full_like(arrays[name], np.nan)}, file)
    outcome = pd_here("train", toy_run.CONFIG, *toy_run.settings(tmp_path, 1))
    assert outcome.status == 1
    assert "the target's weights hold NaN or infinities (" in outcome.err


def test_checkpoints_that_are_taken_away(tmp_path: Path) -> None:
    (tmp_path / "ckpts").mkdir()
    checkpoints = Checkpoints(tmp_path)
    checkpoints._check_folder()
    shutil.rmtree(tmp_path / "ckpts")
    with pytest.raises(
        Displaced, match=r"ckpts was removed or renamed during the run.* resume with `pd train --resume"
    ):
        checkpoints.save(3, None, "")  # type: ignore[arg-type]
    assert not (tmp_path / "ckpts").exists()
    checkpoints.close()


def test_commands_in_messages_are_quoted(tmp_path: Path) -> None:
    assert resume_command(Path("a b/p-1")) == "pd train --resume 'a b/p-1'"
    run = tmp_path / "a b"
    run.mkdir()
    identity = FolderIdentity(run)
    run.rename(tmp_path / "c d")
    with pytest.raises(Displaced, match=rf"`pd train --resume '{tmp_path}/c d'`"):
        identity.check()
    identity.close()


@pytest.mark.parametrize("text", ["sig=x", "arr=0-3", "out", "no-req", "nt=2", "open=append", "c=/"])
def test_abbreviated_options_of_sbatch(text: str) -> None:
    with pytest.raises(UserError, match=rf"^--sbatch {text}: .* cannot be set \(sbatch takes"):
        parse_more([text])
    assert parse_more(["constraint=h100", "nodelist=a", "time-min=1"])


def test_no_picture_beside_a_device(tmp_path: Path) -> None:
    names = (
        "ledger",
        "timeline",
        "find_peak",
        "timeline_figure",
        "memory_page",
        "write_whole",
        "save_figure",
        "_summary",
    )
    with mock.patch.multiple(pages, **dict.fromkeys(names, mock.MagicMock())):
        assert pages.write_pages(mock.MagicMock(), Path("/dev/null")) == (Path("/dev/null"), None)
        assert pages.write_pages(mock.MagicMock(), tmp_path / "a.html") == (tmp_path / "a.html", tmp_path / "a.png")


def test_control_characters_in_a_styled_text() -> None:
    stream = io.StringIO()
    PlainConsole(file=stream, width=80).print(Text("a\x1b[2Jb\u202ec", style="bold"), Text("[/]"))
    assert stream.getvalue() == "a\\x1b[2Jb\\u202ec [/]\n"
