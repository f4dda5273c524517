"""Finds the sites that a configuration chooses among a target's matrices."""

from collections.abc import Mapping, MutableMapping, Sequence
from itertools import groupby

from param_decomp_jax.decomposition.sites import PRE_IDENTITY, Matrix, Site, Sites
from param_decomp_jax.targets.base import choose_sites
from param_decomp_lab.config.method_schema import PDConfig
from param_decomp_lab.config.site_patterns import match_sites
from param_decomp_lab.errors import Errors, UserError
from param_decomp_lab.schema.site_names import matches_module


def build_sites(pd: PDConfig, matrices: Sequence[Matrix]) -> Sites:
    """Matches `decomposition_targets`, `identity_decomposition_targets` and `tied_weights` with a target's matrices.

    Raises UserError for patterns that match nothing, matrices that match twice, and sites that cannot be tied.
    """
    names = [matrix.name for matrix in matrices]
    of_matrices = [matrix.name for matrix in matrices if not matrix.lookup]
    errors = Errors()
    with errors:
        given = match_sites(pd.decomposition_targets, names, "pd.decomposition_targets")
    with errors:
        before = pd.identity_decomposition_targets or ()
        identities = match_sites(before, of_matrices, "pd.identity_decomposition_targets")
    errors.raise_all()
    chosen = _without_slices(matrices, dict(given))
    chosen |= {name + PRE_IDENTITY: C for name, C in _without_slices(matrices, dict(identities)).items()}
    _refuse_some_experts(matrices, chosen)
    return choose_sites(matrices, chosen, _tied(pd, choose_sites(matrices, chosen)))


def _refuse_some_experts(matrices: Sequence[Matrix], chosen: Mapping[str, int]) -> None:
    """Enforces X2: raises UserError unless, for each kind of matrix, all or none of a layer's experts are chosen, with
    one C.
    """
    where = "pd.decomposition_targets"
    for matrix in matrices:
        if matrix.expert is not None and matrix.name + PRE_IDENTITY in chosen:
            raise UserError(f"pd.identity_{where[3:]}: {matrix.name} is an expert's, which has no identity before it")
    experts = [m for m in matrices if m.expert is not None]
    for _, group in groupby(experts, lambda m: (m.layer, m.kind)):
        own = list(group)
        given = {chosen.get(m.name) for m in own}
        if len(given) > 1 and None in given:
            taken, left = (next(m.name for m in own if (m.name in chosen) is is_in) for is_in in (True, False))
            raise UserError(
                f"{where}: {taken} is chosen, but {left} is not; choose the matrices of all {len(own)} experts of a "
                "layer, or of none"
            )
        if len(given) > 1:
            raise UserError(
                f"{where}: the experts of {own[0].name} and its like have different C; give all of them one"
            )


def _without_slices(matrices: Sequence[Matrix], chosen: Mapping[str, int]) -> dict[str, int]:
    """Returns ``chosen`` without slices of matrices that are chosen as a whole: `*.attn.*` means the whole ones.

    Raises UserError if one layer's matrix is chosen as a whole and another's by its slices, because a forward pass
    treats all layers alike.
    """
    whole = {matrix.name: matrix.part_of for matrix in matrices}
    found = {name: C for name, C in chosen.items() if whole[name] not in chosen}
    slices = [name for name in found if whole[name] is not None]
    fused = {part_of for part_of in whole.values() if part_of is not None}
    if slices and (others := [name for name in found if name in fused]):
        raise UserError(
            f"pd.decomposition_targets: {slices[0]} is a slice, but {others[0]} is chosen as a whole; choose the whole "
            "matrix or its slices, in all layers alike"
        )
    return found


def _tied(pd: PDConfig, sites: Sites) -> list[tuple[str, str]]:
    by_name = {site.name: site for site in sites.all}
    taken: dict[str, int] = {}
    pairs: list[tuple[str, str]] = []
    errors = Errors()
    for n, given in enumerate(pd.tied_weights or ()):
        with errors:
            pairs.append(_pair(given, n, by_name, taken))
    errors.raise_all()
    return pairs


def _pair(
    given: tuple[str, str], n: int, by_name: Mapping[str, Site], taken: MutableMapping[str, int]
) -> tuple[str, str]:
    """Returns the names of the two sites of pair ``n``. ``taken``: the sites of earlier pairs, with the pairs' numbers;
    gets extended.
    """
    where = f"pd.tied_weights.{n}"
    pair = []
    for name in given:
        site = next((known for known in by_name if matches_module(name, known)), None)
        if site is None:
            raise UserError(f"{where}: unknown site '{name}'; the sites are {', '.join(by_name)}")
        if site in taken:
            raise UserError(f"{where}: {site} is in pd.tied_weights.{taken[site]} already; a site is tied once")
        taken[site] = n
        pair.append(site)
    a, b = (by_name[name] for name in pair)
    if a.expert is not None or b.expert is not None:
        raise UserError(f"{where}: experts' matrices cannot be tied")
    if (a.d_in, a.d_out, a.C) != (b.d_out, b.d_in, b.C):
        raise UserError(
            f"{where}: {a.name} is {a.d_in} x {a.d_out} with C {a.C} and {b.name} {b.d_in} x {b.d_out} with "
            f"C {b.C}; tied sites are each other's transpose, with equal C"
        )
    return a.name, b.name
