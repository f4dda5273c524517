"""Keeps what a process has harvested in memory, saves it from time to time, and merges it with other processes' at the
end.
"""

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tokenize import TokenError
from typing import Any
from zipfile import BadZipFile

import numpy as np

from param_decomp_lab.errors import UserError
from param_decomp_lab.harvest.examples import AROUND, Examples, TopExamples
from param_decomp_lab.harvest.positions import BlockPositions
from param_decomp_lab.harvest.token_counts import TokenCounts
from param_decomp_lab.harvest.totals import Totals
from param_decomp_lab.safe_io.files import LISTING_BYTES, read_text, regular_file

DONE_FILE = "done.json"


@dataclass
class SiteState:
    """What is known about the components of one site."""

    totals: Totals
    top: TopExamples
    uniform: Examples

    @classmethod
    def empty(cls, C: int, n_examples: int, around: int) -> "SiteState":
        kept = C, n_examples, around
        return cls(Totals.zeros(C), TopExamples.empty(*kept), Examples.empty(*kept))

    def parts(self) -> Iterable[tuple[str, Totals | Examples]]:
        return vars(self).items()

    def load(self, folder: Path, number: int) -> None:
        """Reads the data of site ``number`` from a save in ``folder``."""
        for part, arrays in self.parts():
            for name in vars(arrays):
                setattr(arrays, name, np.load(regular_file(folder / f"{number}.{part}.{name}.npy", "a save")))

    def merge(self, other: "SiteState") -> None:
        """Adds the data of ``other``, which come from other blocks."""
        self.totals.merge(other.totals)
        self.top.merge(other.top)
        self.uniform.merge(other.uniform)


class HarvestState:
    """The sites' state, the counts of tokens, the sampled positions by block, and the blocks that are ``done``.

    ``folder``: that of one process, with the last save and the spilled counts of tokens. A save is either complete or
    absent.
    """

    def __init__(self, folder: Path, C: Sequence[int], n_examples: int, around: int = AROUND) -> None:
        self.folder = folder
        self.sites = [SiteState.empty(c, n_examples, around) for c in C]
        self.tokens = TokenCounts(folder)
        self.positions: dict[int, BlockPositions] = {}
        self.done: set[int] = set()
        self.merged_tokens: list[Path] = []
        self._saves = 0

    @classmethod
    def restore(cls, folder: Path, C: Sequence[int], n_examples: int, around: int = AROUND) -> "HarvestState":
        """Returns the last save in ``folder``, or an empty state; other files there are left alone. Raises UserError
        for a damaged save.
        """
        state = cls(folder, C, n_examples, around)
        saved = last_save(folder)
        if saved is not None:
            with _named_if_damaged(saved):
                about = json.loads(read_text(saved / DONE_FILE, "a save", LISTING_BYTES))
                state._saves, state.done = about["save"], set(about["blocks"])
                state.tokens.files = about["tokens"]
                for number, site in enumerate(state.sites):
                    site.load(saved, number)
                state.positions = _read_positions(saved / "positions.npz")
        return state

    def sweep(self) -> None:
        """Removes files that belong to no save, because the process that wrote them was killed."""
        self.folder.mkdir(parents=True, exist_ok=True)
        saved = last_save(self.folder)
        kept = {*self.tokens.files, *(() if saved is None else (saved.name,))}
        for path in self.folder.iterdir():
            if path.name not in kept:
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    def save(self) -> None:
        """Saves everything, replacing the previous save. Raises OSError."""
        self._saves += 1
        self.tokens.spill(f"tokens-{self._saves}", always=True)
        partial, whole = (self.folder / f"{kind}-{self._saves}" for kind in ("partial", "save"))
        partial.mkdir()
        for number, site in enumerate(self.sites):
            for part, arrays in site.parts():
                for name, array in vars(arrays).items():
                    np.save(partial / f"{number}.{part}.{name}.npy", array)
        _write_positions(partial / "positions.npz", self.positions)
        about = {"save": self._saves, "blocks": sorted(self.done), "tokens": self.tokens.files}
        (partial / DONE_FILE).write_text(json.dumps(about))
        os.rename(partial, whole)
        for path in self.folder.glob("save-*"):
            if path != whole:
                shutil.rmtree(path)

    def merge(self, folder: Path) -> None:
        """Adds what another process has saved, site by site, because two states may not fit into memory."""
        saved = last_save(folder)
        if saved is None:
            return
        with _named_if_damaged(saved):
            about = json.loads(read_text(saved / DONE_FILE, "a save", LISTING_BYTES))
            assert not self.done & set(about["blocks"]), "two processes harvested the same block"
            for number, mine in enumerate(self.sites):
                _, K, width = mine.top.importances.shape
                theirs = SiteState.empty(0, K, width // 2)
                theirs.load(saved, number)
                mine.merge(theirs)
            self.positions |= _read_positions(saved / "positions.npz")
        self.done |= set(about["blocks"])
        self.merged_tokens += [folder / file for file in about["tokens"]]

    @property
    def token_files(self) -> list[Path]:
        """Returns all files of token counts, including those of merged processes."""
        return self.tokens.paths + self.merged_tokens


@contextmanager
def _named_if_damaged(saved: Path) -> Iterator[None]:
    """A block that reads a save; raises a UserError that names the save if it is damaged. Disk
    errors are not changed.
    """
    try:
        yield
    except (
        UserError,
        ValueError,
        KeyError,
        TypeError,
        EOFError,
        RecursionError,
        TokenError,
        SyntaxError,
        BadZipFile,
    ) as error:
        raise UserError(
            f"{saved} is damaged ({type(error).__name__}: {error}), so the harvest cannot continue from it; remove "
            f"{saved.parent.parent}, and its part of the work is done again"
        ) from error


def last_save(folder: Path) -> Path | None:
    """Returns the folder of the last complete save of a process."""
    saves = [(int(path.name.partition("-")[2]), path) for path in folder.glob("save-*")]
    return max(saves)[1] if saves else None


def blocks_done(folder: Path) -> set[int]:
    """Returns the blocks in the last complete save of a process. Raises UserError for a damaged save."""
    for attempt in range(5):
        saved = last_save(folder)
        if saved is None:
            break
        if attempt < 4 and not (saved / DONE_FILE).exists():  # the process has saved again in the meantime
            continue
        with _named_if_damaged(saved):
            return set(json.loads(read_text(saved / DONE_FILE, "a save", LISTING_BYTES))["blocks"])
    return set()


def _write_positions(file: Path, positions: dict[int, BlockPositions]) -> None:
    blocks = sorted(positions)
    arrays: dict[str, Any] = {"blocks": np.asarray(blocks, np.int64)}
    if blocks:
        chosen = [positions[block] for block in blocks]
        arrays["sizes"] = np.asarray([len(p.positions) for p in chosen])
        for name in ("positions", "tokens", "outputs", "values"):
            arrays[name] = np.concatenate([getattr(p, name) for p in chosen])
        for site in chosen[0].counts:
            for name in ("counts", "components", "negative"):
                arrays[f"{name}.{site}"] = np.concatenate([getattr(p, name)[site] for p in chosen])
    np.savez(file, **arrays)


def _read_positions(file: Path) -> dict[int, BlockPositions]:
    with np.load(regular_file(file, "a save")) as archive:
        arrays = dict(archive)
    blocks = arrays.pop("blocks").tolist()
    if not blocks:
        return {}
    ends = np.cumsum(arrays.pop("sizes"))[:-1]
    split = {name: np.split(arrays[name], ends) for name in ("positions", "tokens", "outputs", "values")}
    counts = {int(name[7:]): np.split(x, ends) for name, x in arrays.items() if name.startswith("counts.")}
    components, negative = (
        {
            site: np.split(arrays[f"{name}.{site}"], np.cumsum([x.sum() for x in of_site])[:-1].astype(int))
            for site, of_site in counts.items()
        }
        for name in ("components", "negative")
    )
    return {
        block: BlockPositions(
            split["positions"][n], split["tokens"][n], split["outputs"][n], split["values"][n],
            *({site: x[n] for site, x in by_site.items()} for by_site in (counts, components, negative)),
        )
        for n, block in enumerate(blocks)
    }  # fmt: skip
