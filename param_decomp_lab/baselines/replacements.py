"""Compares SAEs and transcoders with a run: measures the error when one of them replaces an activation (B6)."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from param_decomp_jax.analysis.dictionaries import Dictionary, fewer, most_active, read_and_encode, replaced_errors
from param_decomp_jax.decomposition.sites import PRE_IDENTITY, Site
from param_decomp_jax.method.step import Problem
from param_decomp_jax.targets.decoder import Decoder
from param_decomp_jax.targets.plain_linears import EXPERT_KINDS
from param_decomp_jax.targets.transformer_config import MLP
from param_decomp_lab.baselines.matching import mixed, shares
from param_decomp_lab.baselines.saelens import DictionaryFolder, read_dictionary
from param_decomp_lab.compilation import jitted
from param_decomp_lab.errors import UserError
from param_decomp_lab.opening import Run
from param_decomp_lab.safe_io.paths import checked_path
from param_decomp_lab.safe_io.printable import first_few, printable

ACTIVE, LARGEST = "active latents", "largest"
NAME_CHARACTERS = 60
"""Longest name in tables and figures."""


@dataclass(frozen=True)
class ReplacementPoint:
    """One choice of latents, measured on all batches. ``chosen``: `ACTIVE`, all that are above 0, or the ``number``
    `LARGEST` at each position; ``number`` is a mean over rows of the data if these differ (B5). ``l0``: the number of
    latents above 0 at a position, averaged over positions. ``error``: R1. ``cross_entropy``: in nats above that of the
    target.
    """

    chosen: str
    number: float
    l0: float
    error: float
    cross_entropy: float


@dataclass(frozen=True)
class Replacement:
    """An SAE or a transcoder. ``kind``: which of the two; ``architecture``: SAELens' name. ``reads``, ``writes``:
    hooks, by TransformerLens' names. ``d_sae``: the number of latents. ``model``: the model on which it was trained
    according to its folder, and whether rows of text began with a BOS token then. ``sites``: the run's sites whose
    outputs have no effect when it is used.
    """

    name: str
    folder: str
    kind: str
    architecture: str
    reads: str
    writes: str
    d_sae: int
    model: str | None
    prepends_bos: bool
    sites: tuple[str, ...]
    points: tuple[ReplacementPoint, ...]

    @property
    def active(self) -> ReplacementPoint:
        """The point with all latents."""
        return next(p for p in self.points if p.chosen == ACTIVE)

    def at(self, l0: float) -> list[ReplacementPoint]:
        """Returns the point with all latents and, if it has enough, the one with ``l0`` of the largest, chosen like a
        baseline's parts (B5).
        """
        has_as_many = shares(l0).keys() <= self.ladder.keys()
        return [self.active, *([mixed(self.ladder, l0)] if has_as_many else [])]

    @property
    def ladder(self) -> dict[float, ReplacementPoint]:
        """Returns the points by their number of latents."""
        return {p.number: p for p in self.points if p.chosen == LARGEST}


def caption(replacements: Sequence[Replacement], n_sites: int, l0: float) -> list[str]:
    """Describes how they compare with a decomposition of ``n_sites`` matrices with ``l0`` components on at each; []
    without replacements.
    """
    lines = []
    for r in replacements:
        bos = " with a BOS token before each row" if r.prepends_bos else ""
        trained = "" if r.model is None else f", trained on {r.model}{bos}"
        if r.kind == "SAE":
            place = f"its reconstruction replaces {r.writes}, and every matrix stays as it is"
        else:
            sites = f"sites of the run in this MLP: {', '.join(first_few(r.sites)) or 'none'}"
            place = f"it reads {r.reads} and replaces {r.writes}, thus this MLP's matrices ({sites})"
        lines.append(f"{r.name} ({r.architecture}, {r.d_sae:,} latents{trained}): {place}.")
    if replacements:
        lines.append(
            "The L0 of an SAE or a transcoder counts latents at that one place; the rest of the network is as it "
            f"is. The decomposition replaces {n_sites} matrices at once, with {l0:.1f} components on at each, "
            f"{n_sites * l0:.1f} together."
        )
    return lines


def read_dictionaries(folders: Sequence[Path]) -> list[DictionaryFolder]:
    """Reads the folders. Raises UserError for an invalid path, and as `read_dictionary` does."""
    return [read_dictionary(checked_path(str(folder), "--sae")) for folder in folders]


def fit_dictionaries(run: Run, folders: Sequence[DictionaryFolder]) -> list[Dictionary]:
    """Fits each folder to the run's target. Raises UserError for a toy, and as `DictionaryFolder.fitted` does."""
    if folders and not isinstance(run.target, Decoder):
        raise UserError(f"--sae: {run.folder} decomposes a toy; an SAE takes its place in a language model")
    return [folder.fitted(run.target) for folder in folders]


def names_of(folders: Sequence[DictionaryFolder]) -> list[str]:
    """Returns distinct names for tables: kind and folder."""
    names: list[str] = []
    for folder in folders:
        name = f"{folder.kind} {printable(folder.folder.absolute().name, NAME_CHARACTERS)}"
        taken = sum(name == other or other.startswith(f"{name} (") for other in names)
        names.append(f"{name} ({taken + 1})" if taken else name)
    return names


def replacement(
    run: Run,
    problem: Problem,
    batches: Sequence[Array],
    name: str,
    folder: DictionaryFolder,
    dictionary: Dictionary,
    clean: float,
    l0: float,
    matched_only: bool,
) -> Replacement:
    """Measures one dictionary. ``clean``: the target's cross-entropy. ``l0``: the decomposition's."""
    tensors = {key: jnp.asarray(x) for key, x in folder.tensors.items()}
    of_dictionary = (problem, dictionary, tensors, run.weights)
    with jax.set_mesh(run.mesh):
        most = max(int(jitted(most_active, (0, 1))(*of_dictionary, batch)) for batch in batches)
        ladder = shares(l0).keys() | ({2**n for n in range(16)} if not matched_only else set())
        choices: list[int | None] = [None, *(k for k in sorted(ladder) if k <= most)]
        found: dict[int | None, list[tuple[float, float, float]]] = {k: [] for k in choices}
        # Only the latents of one batch are kept at a time.
        for batch in batches:
            x, f = jitted(read_and_encode, (0, 1))(*of_dictionary, batch)
            for k in choices:
                kept = f if k is None else jitted(fewer, (2,))(tensors, f, k)
                errors = jax.device_get(jitted(replaced_errors, (0, 1))(*of_dictionary, batch, x, kept))
                found[k].append((float(errors.l0), float(errors.error), float(errors.cross_entropy)))
    points = []
    for k, of_batches in found.items():
        l0, error, cross_entropy = np.mean(of_batches, axis=0).tolist()
        chosen = ACTIVE if k is None else LARGEST
        points.append(ReplacementPoint(chosen, k or 0, l0, error, cross_entropy - clean))
    return Replacement(
        name,
        str(folder.folder),
        folder.kind,
        folder.config.architecture,
        str(dictionary.reads),
        str(dictionary.writes),
        folder.config.d_sae,
        folder.model,
        folder.prepends_bos,
        tuple(s.name for s in run.sites.values() if dictionary.is_transcoder and _in_mlp(s, dictionary.writes.layer)),
        tuple(points),
    )


def _in_mlp(site: Site, layer: int) -> bool:
    return site.layer == layer and site.kind.removesuffix(PRE_IDENTITY) in (*MLP, *EXPERT_KINDS)
