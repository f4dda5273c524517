"""What became of a folder or a file while it was open."""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from param_decomp_lab.errors import CannotWrite
from param_decomp_lab.runs.identity import Displaced, FolderIdentity


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "p-00000001").mkdir()
    return tmp_path / "p-00000001"


@pytest.fixture
def identity(run: Path) -> Iterator[FolderIdentity]:
    found = FolderIdentity(run)
    yield found
    found.close()


def replace(run: Path) -> None:
    run.rename(run.with_name("moved"))
    run.mkdir()


def remake(run: Path) -> None:
    """A file system likes to give a number again that has just become free."""
    run.rmdir()
    run.mkdir()


def move_above(run: Path) -> None:
    (run.parent / "new").mkdir()
    run.rename(run.parent / "new" / run.name)


@pytest.mark.parametrize(
    ("act", "says"),
    [
        (lambda run: run.rename(run.with_name("moved")), r"was renamed to .*/moved during .* --resume .*/moved`"),
        (move_above, r"was renamed to .*/new/p-00000001 during"),
        (shutil.rmtree, r"was removed or renamed during .* If it still exists, move it back and resume"),
        (replace, r"was replaced by another, and is now .*/moved during"),
        (remake, r"was replaced by another during"),
    ],
)
def test_a_folder_that_is_elsewhere(
    run: Path, identity: FolderIdentity, act: Callable[[Path], object], says: str
) -> None:
    identity.check()
    assert identity.is_in_place()
    act(run)
    with pytest.raises(Displaced, match=says):
        identity.check()
    assert not identity.is_in_place()


def test_a_folder_that_comes_back_or_only_changes(run: Path, identity: FolderIdentity) -> None:
    run.rename(run.with_name("moved"))
    run.with_name("moved").rename(run)
    (run / "file").write_text("new")
    os.utime(run)
    identity.check()


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(CannotWrite, match="nowhere cannot be opened: No such file or directory"):
        FolderIdentity(tmp_path / "nowhere")
