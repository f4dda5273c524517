"""Every kind of damage to a run folder, with real processes; and the page that tells what comes of it."""

import errno
import os
from pathlib import Path

import pytest

from param_decomp_lab.runs.unwritable import why_not_written
from tests.lab.tiny_run import ROOT
from tests.robustness.damage_cases import CASES, Rig, make_whole
from tests.robustness.damage_table import unlike


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_whole(tmp_path_factory.mktemp("damage"))


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_what_comes_of_it(whole: Path, tmp_path: Path, name: str) -> None:
    case = CASES[name]
    if case.needs_root and os.geteuid() != 0:
        pytest.skip("mounting a small disk takes root")
    seen = case.act(Rig(tmp_path, whole))
    assert unlike(case, seen) == [], seen


def test_the_page_has_every_case() -> None:
    rows = (ROOT / "docs" / "measurements" / "damage.md").read_text()
    assert [case.what for case in CASES.values() if f"| {case.what} |" not in rows] == []


def test_a_file_removed_while_a_checkpoint_is_saved(tmp_path: Path) -> None:
    """As `rm -r` does, of which the folder itself is left where it is still being written."""
    (tmp_path / "ckpts").mkdir()
    lost = FileNotFoundError(errno.ENOENT, "No such file or directory", str(tmp_path / "ckpts" / "6" / "_METADATA"))
    assert why_not_written(lost, tmp_path / "ckpts") == f"{lost.filename} was removed meanwhile"
    assert why_not_written(lost, tmp_path / "other") == f"{tmp_path / 'other'} is gone"
    as_orbax_says = ValueError(f"Checkpoint directory does not exist: {tmp_path}/ckpts/3.tmp/learned.tmp.")
    assert (
        why_not_written(as_orbax_says, tmp_path / "ckpts")
        == f"{tmp_path}/ckpts/3.tmp/learned.tmp was removed meanwhile"
    )
    as_orbax_says = ValueError(f"No ArrayMetadata found in the directory: {tmp_path}/ckpts/3.tmp. But input PyTree …")
    assert why_not_written(as_orbax_says, tmp_path / "ckpts") == f"{tmp_path}/ckpts/3.tmp was removed meanwhile"
    (tmp_path / "ckpts" / "3.tmp").mkdir()
    emptied = f"files were removed from {tmp_path}/ckpts/3.tmp meanwhile"
    assert why_not_written(as_orbax_says, tmp_path / "ckpts") == emptied
    assert why_not_written(FileNotFoundError(errno.ENOENT, "No such file", "/elsewhere"), tmp_path) is None
