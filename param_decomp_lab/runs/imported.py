"""`imported.json` of a run folder that `pd import` made: the run of the PyTorch project that it came from."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from param_decomp_lab.errors import UserError
from param_decomp_lab.safe_io.json_text import read_json

IMPORTED_FILE = "imported.json"


@dataclass(frozen=True)
class ImportOrigin:
    """``source``: a folder, or a run on wandb. ``checkpoint``, ``sha256``: the file in it, and its hash.
    ``configuration``: the file with its settings; ``left_out``: settings that were not translated. ``target``: the
    source of its weights.
    """

    source: str
    step: int
    checkpoint: str
    sha256: str
    configuration: str
    target: str
    left_out: Sequence[str] = ()

    def __str__(self) -> str:
        return f"imported from {self.source}, step {self.step:,}"

    def write(self, run_folder: Path) -> None:
        """Writes the file. Raises OSError."""
        (run_folder / IMPORTED_FILE).write_text(json.dumps(asdict(self), indent=2) + "\n")


def read_imported(run_folder: Path) -> ImportOrigin | None:
    """Returns the origin of the run; None for a run that was trained here. Raises UserError for a damaged file."""
    file = run_folder / IMPORTED_FILE
    if not file.is_file():
        return None
    found = read_json(file, "where the run was imported from", dict)
    try:
        return ImportOrigin(**found)
    except TypeError as error:
        raise UserError(f"{file} is damaged or of another version ({error})") from error
