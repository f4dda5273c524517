"""`data.json` of a run folder: how a prompt must be made to resemble the run's data, so that the
data are not needed.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from param_decomp_lab.data.tokenizers import LARGEST_ID
from param_decomp_lab.errors import UserError
from param_decomp_lab.folders import write_whole
from param_decomp_lab.safe_io.json_text import read_json

DATA_FILE = "data.json"


@dataclass(frozen=True)
class TextOfRun:
    """``bos``: the token id that the rows of the run's data begin with; None without one."""

    bos: int | None


def write_data(run_folder: Path, text: TextOfRun) -> None:
    """Writes `data.json`. Raises OSError."""
    write_whole(run_folder / DATA_FILE, json.dumps(asdict(text)) + "\n")


def read_data(run_folder: Path) -> TextOfRun | None:
    """What `data.json` says; None for runs older than that file, and for toys. Raises UserError if it is damaged."""
    file = run_folder / DATA_FILE
    if not file.is_file():
        return None
    try:
        bos = read_json(file, "what the run's data are like", dict)["bos"]
    except KeyError as error:
        raise UserError(
            f"{file} is damaged or of another version (no bos); remove it to read the data instead"
        ) from error
    if not (bos is None or (type(bos) is int and 0 <= bos <= LARGEST_ID)):
        raise UserError(f"{file} is damaged (bos is {bos!r:.80}); remove it to read the data instead")
    return TextOfRun(bos)
