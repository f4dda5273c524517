"""The notebooks of the documentation: kept without outputs, and executed from the first cell to the last."""

import os
import re
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.lab.tiny_run import ROOT, TIMEOUT, Tiny

NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
NAMES = [path.stem for path in NOTEBOOKS]


def test_which_there_are() -> None:
    assert {"first_look", "your_model", "at_scale"} <= set(NAMES)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=NAMES)
def test_kept_without_outputs(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert not cell.outputs, cell.source
            assert cell.execution_count is None, cell.source
            # Otherwise a command that fails is passed over.
            assert not cell.source.startswith(("!", "%%sh", "%%script")), cell.source
            assert not re.search(r"^pd .*\|", cell.source, re.MULTILINE), cell.source
            assert "%%bash" not in cell.source or cell.source.startswith("%%bash -e\n"), cell.source


@pytest.mark.slow
@pytest.mark.always
@pytest.mark.parametrize("path", NOTEBOOKS, ids=NAMES)
def test_executes(path: Path, tiny: Tiny, tmp_path: Path) -> None:
    """No cell raises, and no command fails."""
    notebook = nbformat.read(path, as_version=4)
    environment = tiny.environment()
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment["PATH"]])
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])
    environment["TMPDIR"] = str(tmp_path)
    where = {"metadata": {"path": str(ROOT)}}
    client = NotebookClient(notebook, timeout=TIMEOUT, kernel_name="python3", resources=where)
    client.execute(env=environment)
    assert all(cell.execution_count for cell in notebook.cells if cell.cell_type == "code")
