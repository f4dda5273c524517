"""Folders that are whole or not there: what else appears at their place, and what killed processes leave."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from param_decomp_lab import folders
from param_decomp_lab.errors import CannotWrite, UserError
from param_decomp_lab.folders import new_folder
from tests.lab.tiny_run import ROOT

MARKER = "made.json"


def make(out: Path, text: str, *, overwrite: bool = False, meanwhile: Callable[[], object] = lambda: None) -> None:
    with new_folder(out, marker=MARKER, overwrite=overwrite) as partial:
        (partial / MARKER).write_text(text)
        meanwhile()


def appear(out: Path, text: str = "theirs", marker: str = MARKER) -> None:
    """Another process's result, or a file."""
    out.mkdir()
    (out / marker).write_text(text)


def contents(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("late", [False, True])
def test_what_appears_meanwhile_stays(tmp_path: Path, late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also what appears after the last look at the place."""
    out = tmp_path / "out"

    def meanwhile() -> None:
        appear(out)
        if late:
            monkeypatch.setattr(folders, "refuse_existing", lambda *_, **__: None)

    with pytest.raises(UserError, match=r"out appeared meanwhile; it stays as it is, and what this .* is discarded"):
        make(out, "mine", meanwhile=meanwhile)
    assert contents(tmp_path) == {f"out/{MARKER}": "theirs"}


def test_a_place_that_is_taken_away_is_named(tmp_path: Path) -> None:
    place = tmp_path / "place"

    def meanwhile() -> None:
        place.rename(tmp_path / "moved")
        (place / "out" / "rows").write_text("1")

    place.mkdir()
    with pytest.raises(
        CannotWrite, match="place was renamed, removed, emptied or replaced while something was written there"
    ):
        make(place / "out", "mine", meanwhile=meanwhile)
    with pytest.raises(FileNotFoundError):  # the user's file, not the place
        make(tmp_path / "out", "mine", meanwhile=(tmp_path / "no such text").read_text)


def take_away(place: Path, partial: Path) -> None:
    place.rename(place.with_name("moved"))
    partial.mkdir(parents=True)


def take_out(place: Path, partial: Path) -> None:
    (partial / MARKER).unlink()


@pytest.mark.parametrize("act", [take_away, take_out])
def test_half_of_a_result_gets_no_place(tmp_path: Path, act: Callable[[Path, Path], None]) -> None:
    """A library that makes missing folders goes on in a new one when the place has been taken away, or in what is left
    of the old one when somebody removes all files."""
    place = tmp_path / "place"
    place.mkdir()

    def write() -> None:
        with new_folder(place / "out", marker=MARKER, overwrite=False) as partial:
            (partial / MARKER).write_text("first half")
            act(place, partial)
            (partial / "rows").write_text("second half")

    with pytest.raises(
        CannotWrite, match="place was renamed, removed, emptied or replaced while something was written there"
    ):
        write()
    assert contents(place) == {}


def test_a_file_that_appears_stays(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(UserError, match="appeared meanwhile"):
        make(out, "mine", overwrite=True, meanwhile=lambda: out.write_text("a file"))
    assert contents(tmp_path) == {"out": "a file"}


def test_overwriting_keeps_the_old_one_until_the_new_one_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, rename = tmp_path / "out", Path.rename
    make(out, "old")

    def fails(path: Path, target: Path) -> Path:
        if ".partial-" in path.name:
            raise KeyboardInterrupt
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", fails)
    with pytest.raises(KeyboardInterrupt):
        make(out, "new", overwrite=True)
    assert contents(tmp_path) == {f"out/{MARKER}": "old"}

    def beaten(path: Path, target: Path) -> Path:
        if ".partial-" in path.name:
            appear(out, marker="not ours")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", beaten)
    with pytest.raises(UserError, match="appeared meanwhile"):
        make(out, "new", overwrite=True)
    found = contents(tmp_path)
    assert found.pop("out/not ours") == "theirs"
    assert list(found.values()) == ["old"]  # aside: nothing that was to replace it has its place
    monkeypatch.undo()


def test_empty_folders_and_links_to_them_are_filled(tmp_path: Path) -> None:
    (tmp_path / "far" / "away").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "far" / "away")
    make(tmp_path / "link", "new")
    make(tmp_path / "link", "newer", overwrite=True)
    assert (tmp_path / "link").is_symlink()
    assert contents(tmp_path / "far") == {f"away/{MARKER}": "newer"}
    assert [path.name for path in (tmp_path / "far").iterdir()] == ["away"]


KILLED = """
import os, signal, sys
from pathlib import Path
from param_decomp_lab.folders import new_folder
out, when = Path(sys.argv[1]), sys.argv[2]
rename = Path.rename
def stop(path, target):
    if ".partial-" in path.name:
        os.kill(os.getpid(), signal.SIGKILL)
    return rename(path, target)
Path.rename = stop
with new_folder(out, marker="made.json", overwrite=True) as partial:
    (partial / "made.json").write_text("killed")
    if when == "early":
        os.kill(os.getpid(), signal.SIGKILL)
"""


def killed(out: Path, when: str) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(out), when], cwd=ROOT)
    assert done.returncode == -signal.SIGKILL


def test_leftovers_of_killed_processes_are_swept(tmp_path: Path) -> None:
    """Of this folder alone, and of processes that have surely ended."""
    out, other = tmp_path / "out", tmp_path / "other"
    killed(out, "early")
    killed(other, "early")
    mine = folders._Maker.here()
    elsewhere = folders._Maker("elsewhere", "0", 1, 1, 1).name(out, "partial")
    parent = int(folders.process_start(os.getppid()))
    running = folders._Maker(mine.host, mine.boot, mine.space, os.getppid(), parent).name(out, "partial")
    container = folders._Maker(mine.host, mine.boot, mine.space + 1, 999_999_999, 1).name(out, "partial")
    users = tmp_path / ".out.partial-1234"
    before = folders._Maker(mine.host, "0abc", mine.space, os.getppid(), parent).name(out, "partial")
    for folder in (elsewhere, running, container, users, before):
        folder.mkdir()
    make(out, "new")
    left = {path for path in tmp_path.iterdir() if not path.name.startswith(".other.partial-")}
    assert left == {out, elsewhere, running, container, users}
    assert len(list(tmp_path.iterdir())) == len(left) + 1
    assert mine.name(out, "partial").name.endswith(f"-{os.getpid()}-{mine.began}")


def test_what_a_killed_process_had_moved_away_is_put_back(tmp_path: Path) -> None:
    out = tmp_path / "out"
    make(out, "old")
    killed(out, "late")
    assert not out.exists()
    with pytest.raises(UserError, match="exists and is not empty"):
        make(out, "new")
    assert contents(tmp_path) == {f"out/{MARKER}": "old"}


@pytest.mark.parametrize("error", [OSError("20001 requested and 2544 written"), OSError(28, "No space left on device")])
def test_a_full_disk_however_it_is_said(tmp_path: Path, error: OSError) -> None:
    """NumPy gives no number of an error."""

    def fails() -> None:
        raise error

    with pytest.raises(CannotWrite, match=r"cannot write .*out: .*; free some space"):
        make(tmp_path / "out", "mine", meanwhile=fails)
    assert not list(tmp_path.iterdir())
