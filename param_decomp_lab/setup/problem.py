"""Makes what a run decomposes: its target, built from an architecture, with the sites that the
configuration chooses.
"""

from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp

from param_decomp_jax.ci import (
    ChunkwiseTransformer,
    FunctionConfig,
    LayerwiseMLP,
    Taps,
    UnfitGroups,
    UnfitTaps,
    groups_with_taps,
    stacks_read,
    with_residual_width,
)
from param_decomp_jax.decomposition.sites import Site, Sites
from param_decomp_jax.method.step import Problem
from param_decomp_jax.targets.architecture import Architecture, FeatureInputs, TokenInputs
from param_decomp_jax.targets.points import UnfitPoints, match_points
from param_decomp_lab.config import RunConfig
from param_decomp_lab.config.checks import losses_of
from param_decomp_lab.config.core_specs import ci_function
from param_decomp_lab.config.loss_schema import Loss, NonlinearityLocalityLoss, ReconLoss
from param_decomp_lab.config.method_schema import AnyCI, EvalConfig, LanguageModelFile, LayerwiseCI
from param_decomp_lab.errors import Errors, UserError
from param_decomp_lab.metrics import Metric
from param_decomp_lab.schema.strict import broken_rules
from param_decomp_lab.setup.base import check_site_patterns
from param_decomp_lab.setup.resolved import ResolvedConfig
from param_decomp_lab.setup.sites import build_sites


def make_problem(resolved: ResolvedConfig, architecture: Architecture, origin: str | Path) -> Problem:
    """Returns the decomposition of a network of this architecture. ``origin``: where the architecture was read, for
    errors.

    Raises a UserError that lists what does not fit the architecture: the kind of experiment, rows that are too long,
    patterns, ties, metrics.
    """
    spec, errors = resolved.decomposition, Errors()
    sites = _fitting_sites(resolved.config, architecture, origin, errors)
    errors.raise_all()
    assert sites is not None
    spec = replace(spec, ci=with_residual_width(spec.ci, architecture.residual_width))
    return Problem(spec, architecture.target(sites, spec.memory, jnp.dtype(spec.compute_dtype)))


def misfits(config: RunConfig, architecture: Architecture, origin: str | Path) -> list[str]:
    """Lists what in ``config`` does not fit the architecture. Parts that could not be read may be missing."""
    errors = Errors()
    _fitting_sites(config, architecture, origin, errors)
    return errors.lines


def _fitting_sites(config: RunConfig, architecture: Architecture, origin: str | Path, errors: Errors) -> Sites | None:
    """Returns the sites; None if they cannot be determined. Adds what does not fit to ``errors``."""
    method = config.method
    with errors:
        _check_kind(config, architecture, origin)
    with errors:
        _check_length(config, architecture, origin)
    if errors.lines:  # the patterns are for another network
        return None
    sites = None
    with errors:
        sites = build_sites(method.pd, architecture.matrices())
    if sites is None:
        return None
    with errors:
        _check_init(config, sites)
    with errors:
        _check_ci(method.pd.ci_config, sites, architecture)
    for key, loss in losses_of(method):
        with errors:
            _check_units(key, loss, sites)
        with errors:
            _check_points(key, loss, architecture)
    with errors:
        if method.eval is not None:
            check_site_patterns(method.eval, sites)
    with errors:
        if method.eval is not None and isinstance(architecture.inputs, FeatureInputs):
            _check_features(method.eval, architecture.inputs.n_features)
    return sites


def _check_length(config: RunConfig, architecture: Architecture, origin: str | Path) -> None:
    if not (isinstance(config.method, LanguageModelFile) and isinstance(architecture.inputs, TokenInputs)):
        return
    given, longest = config.method.data.max_seq_len, architecture.inputs.longest
    if longest is not None and given > longest:
        raise UserError(
            f"data.max_seq_len: is {given}, but the target takes at most {longest} tokens ({origin}); decompose it on "
            "shorter rows"
        )


def _check_points(key: str, loss: Loss, architecture: Architecture) -> None:
    own = loss.hidden_acts_reconstruction if isinstance(loss, ReconLoss) else None
    if own is not None:
        try:
            match_points(architecture.points(), own.points)
        except UnfitPoints as error:
            raise UserError(f"{key}.hidden_acts_reconstruction.points: {error}") from error


def _check_units(key: str, loss: Loss, sites: Sites) -> None:
    if isinstance(loss, NonlinearityLocalityLoss):
        faced = {site.faces.kind for site in sites.all if site.faces is not None}
        missing = [kind for kind in loss.unit_kind_coefficients.given if kind not in faced]
        if missing:
            kinds = " and no ".join(f"{kind.replace('_', ' ')}s" for kind in missing)
            raise UserError(
                f"{key}.unit_kind_coefficients: gives {' and '.join(missing)} a weight, but the sites face no {kinds} "
                "(L7); set that to null"
            )


def _check_init(config: RunConfig, sites: Sites) -> None:
    begins_with = config.wrapper.begins_with
    if begins_with == "random":
        return
    experts = [site.name for site in sites.all if site.expert is not None]
    if experts:
        raise UserError(
            f"init_components: is {begins_with}, which experts' matrices ({experts[0]}) cannot begin with; remove it"
        )
    if begins_with == "nonlinearity_aligned":
        _check_aligned([sites.all[n] for stack in sites.stacks if stack.name not in sites.views for n in stack.sites])


def _check_aligned(trained: list[Site]) -> None:
    """Checks the requirements of T9."""
    errors = Errors()
    for site in trained:
        if site.faces is None:
            errors.lines.append(
                f"init_components: is nonlinearity_aligned, but {site.name} faces no nonlinearity; leave it out, or "
                "take another init_components"
            )
        elif site.d_in * site.d_out < site.C:
            errors.lines.append(
                "init_components: is nonlinearity_aligned, which gives each component an entry of the matrix at least: "
                f"{site.name} has {site.d_in * site.d_out:,} and C {site.C:,}; lower its C"
            )
    errors.raise_all()


def _check_ci(config: AnyCI, sites: Sites, architecture: Architecture) -> None:
    if any(broken_rules(config)):  # already listed among the mistakes in the file
        return
    function = ci_function(config)
    tables = [site.name for site in sites.all if site.lookup]
    if tables and isinstance(function, LayerwiseMLP) and function.kind == "mlp":
        raise UserError(
            f"pd.ci_config.fn_type: mlp cannot read {tables[0]}, whose rows are looked up (F7); take vector_mlp, "
            "shared_mlp or a global one"
        )
    if not isinstance(config, LayerwiseCI) and config.input_tap is not None:
        _check_taps(function, sites, architecture)
    elif isinstance(function, ChunkwiseTransformer):
        try:
            stacks_read(function, sites)
        except UnfitGroups as error:
            raise UserError(f"pd.ci_config.input_patterns: {error}") from error


def _check_taps(function: FunctionConfig, sites: Sites, architecture: Architecture) -> None:
    """Checks the requirements of C10."""
    n_blocks = len({point.layer for point in architecture.points()})
    if n_blocks == 0:
        raise UserError(
            f"pd.ci_config.input_tap: a {architecture.title} has no residual stream; without the key, the CI function "
            "reads the inputs of the sites"
        )
    errors, taps_by_last = Errors(), dict[int, Taps]()
    for taps, layers in groups_with_taps(function, sites):
        with errors:
            try:
                taps_by_last[taps.boundaries(layers)[-1]] = taps
            except UnfitTaps as error:
                raise UserError(f"pd.ci_config.input_tap: {error}") from error
    last = max(taps_by_last, default=0)
    if last > n_blocks:
        offsets = taps_by_last[last].choice
        assert isinstance(offsets, tuple), "without offsets, blocks with sites are read"
        errors.lines.append(
            f"pd.ci_config.input_tap.residual_boundaries: reach the residual stream that enters block {last} "
            f"({offsets[-1]} after block {last - offsets[-1]}, the first of its group with a site), but the target has "
            f"{n_blocks} blocks; the highest is {n_blocks}, what the last one gives"
        )
    errors.raise_all()


def _check_kind(config: RunConfig, architecture: Architecture, origin: str | Path) -> None:
    """Raises UserError if the configuration is for another kind of network."""
    if config.experiment != architecture.experiment:
        raise UserError(
            f"{origin}: the target's architecture is {architecture.name}, but the experiment is {config.experiment}"
        )
    if isinstance(config.method, LanguageModelFile):
        given = config.method.target.spec.model_class
        if given.rpartition(".")[2] not in architecture.model_classes:
            raise UserError(
                f"target.spec.model_class: is {given}, but {origin} holds a {architecture.title}; say "
                f"{' or '.join(architecture.model_classes)}"
            )


def _check_features(settings: EvalConfig, n_features: int) -> None:
    for n, metric in enumerate(settings.metrics):
        for key, message in metric.misfits(n_features) if isinstance(metric, Metric) else ():
            raise UserError(f"eval.metrics.{n}.{key}: {message}")
