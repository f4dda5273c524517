"""Which Python `make` takes, from paths made for the purpose, with Pythons that are few lines of shell."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.lab.tiny_run import ROOT

MAKE = shutil.which("make")
SHIM = 'echo "pyenv: $0: command not found" >&2; exit 127'
OLD = 'case "$2" in *version_info*) exit 1 ;; esac'
WITHOUT_VENV = 'case "$2" in *ensurepip*) exit 1 ;; esac'
GOOD = "exit 0"

pytestmark = pytest.mark.skipif(MAKE is None, reason="needs make")


def chosen(folder: Path, pythons: dict[str, str], *words: str) -> tuple[int, str]:
    """The status of `make python` and what it says, where these Pythons (``folder/name``: script) are all there is."""
    places = []
    for name, script in pythons.items():
        python = folder / name
        python.parent.mkdir(parents=True, exist_ok=True)
        python.write_text(f"#!/bin/sh\n{script}\n")
        python.chmod(0o755)
        places.append(str(python.parent))
    (folder / "shell").mkdir()
    (folder / "shell" / "sh").symlink_to("/bin/sh")
    path = ":".join([*dict.fromkeys(place for place in places if "/.pyenv/" not in place), str(folder / "shell")])
    told = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PYENV", "MAKE", "MFLAGS"))
    }
    assert MAKE is not None
    done = subprocess.run(
        [MAKE, "--silent", "python", *words],
        env={**told, "PATH": path, "HOME": str(folder)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.returncode, (done.stdout + done.stderr).replace(f"{folder}/", "").strip()


@pytest.mark.parametrize(
    ("pythons", "path"),
    [
        ({"a/python3.13": GOOD, "b/python3.12": GOOD, "b/python3": GOOD}, "b/python3.12"),
        ({"a/python3.12": GOOD, "b/python3.11": GOOD}, "b/python3.11"),
        ({"shims/python3.12": SHIM, "shims/python3.13": SHIM, "b/python3.13": GOOD}, "b/python3.13"),
        ({"shims/python3.12": SHIM, "b/python3.12": GOOD, "b/python3.13": GOOD}, "b/python3.12"),
        ({"a/python3.11": WITHOUT_VENV, "b/python3": GOOD}, "b/python3"),
        ({"a/python3": OLD, "b/python3": GOOD}, "b/python3"),
        ({"a/python3.11": SHIM, ".pyenv/versions/3.12.1/bin/python3": GOOD}, ".pyenv/versions/3.12.1/bin/python3"),
        ({".pyenv/versions/3.12/bin/python3.12": GOOD, "b/python3.14": GOOD}, ".pyenv/versions/3.12/bin/python3.12"),
    ],
)  # fmt: skip
def test_the_first_that_works(tmp_path: Path, pythons: dict[str, str], path: str) -> None:
    assert chosen(tmp_path, pythons) == (0, path)


def test_another_can_be_named(tmp_path: Path) -> None:
    pythons = {"a/python3.11": GOOD, "elsewhere/python3.12": GOOD}
    assert chosen(tmp_path, pythons, f"PYTHON={tmp_path}/elsewhere/python3.12") == (0, "elsewhere/python3.12")


def test_a_real_one(tmp_path: Path) -> None:
    """What these tests run with is new enough and has a venv."""
    assert chosen(tmp_path, {}, f"PYTHON={sys.executable}") == (0, sys.executable)


@pytest.mark.parametrize(
    ("pythons", "words", "said"),
    [
        ({}, (), "needs CPython 3.11 or newer, and none of these runs: python3.11 python3.12 python3.13"),
        ({"a/python3.12": SHIM, "a/python3": OLD}, (), "if there is one elsewhere: make PYTHON=<path>"),
        ({"a/python3.11": GOOD}, ("PYTHON=/nowhere/python",), "none of these runs: /nowhere/python;"),
        (
            {"a/python3.12": WITHOUT_VENV, "a/python3": OLD},
            (),
            "python3.12 is new enough, but its modules venv and ens",
        ),
    ],
)
def test_none(tmp_path: Path, pythons: dict[str, str], words: tuple[str, ...], said: str) -> None:
    status, text = chosen(tmp_path, pythons, *words)
    assert status == 2
    assert said in text.splitlines()[0]
