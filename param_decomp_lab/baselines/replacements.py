"""Compares SAEs and transcoders with a run: measures the error when one of them replaces an activation (B6)."""

from collections.abc import Sequence
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
from param_decomp_lab.baselines.matching import shares
from param_decomp_lab.baselines.result import ACTIVE, LARGEST, Replacement, ReplacementPoint
from param_decomp_lab.baselines.saelens import DictionaryFolder, read_dictionary
from param_decomp_lab.compilation import jitted
from param_decomp_lab.errors import UserError
from param_decomp_lab.opening import Run
from param_decomp_lab.safe_io.paths import checked_path
from param_decomp_lab.safe_io.printable import printable

NAME_CHARACTERS = 60
"""Longest name in tables and figures."""


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
