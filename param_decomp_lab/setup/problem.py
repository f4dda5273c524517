"""What a run decomposes: its target, made from an architecture, with the sites that the configuration chooses."""

from pathlib import Path

import jax.numpy as jnp

from param_decomp_jax.ci import (
    ChunkwiseTransformer,
    LayerwiseMLP,
    UnfitGroups,
    stacks_read,
)
from param_decomp_jax.decomposition.sites import Sites
from param_decomp_jax.method.step import Problem
from param_decomp_jax.targets.architecture import Architecture, FeatureInputs, TokenInputs
from param_decomp_lab.config import RunConfig
from param_decomp_lab.config.core_specs import ci_function
from param_decomp_lab.config.method_schema import AnyCI, EvalConfig, LanguageModelFile
from param_decomp_lab.errors import Errors, UserError
from param_decomp_lab.metrics import Metric
from param_decomp_lab.schema.strict import broken_rules
from param_decomp_lab.setup.base import check_site_patterns
from param_decomp_lab.setup.resolved import ResolvedConfig
from param_decomp_lab.setup.sites import build_sites


def make_problem(resolved: ResolvedConfig, architecture: Architecture, origin: str | Path) -> Problem:
    """The decomposition of a network of this architecture. ``origin``: where that was read, for errors.

    UserError lists what does not fit the architecture: the kind of the experiment, rows that are too long, patterns,
    ties, metrics.
    """
    spec, errors = resolved.decomposition, Errors()
    sites = _fitting_sites(resolved.config, architecture, origin, errors)
    errors.raise_all()
    assert sites is not None
    return Problem(spec, architecture.target(sites, spec.memory, jnp.dtype(spec.compute_dtype)))


def misfits(config: RunConfig, architecture: Architecture, origin: str | Path) -> list[str]:
    """What of ``config`` does not fit the architecture. Parts of it may be missing that could not be read."""
    errors = Errors()
    _fitting_sites(config, architecture, origin, errors)
    return errors.lines


def _fitting_sites(config: RunConfig, architecture: Architecture, origin: str | Path, errors: Errors) -> Sites | None:
    """The sites, None where that cannot be told. Notes in ``errors`` what does not fit."""
    method = config.method
    with errors:
        _check_kind(config, architecture, origin)
    with errors:
        _check_length(config, architecture, origin)
    if errors.lines:  # patterns are those of another network
        return None
    sites = None
    with errors:
        sites = build_sites(method.pd, architecture.matrices())
    if sites is None:
        return None
    with errors:
        _check_init(config, sites)
    with errors:
        _check_ci(method.pd.ci_config, sites)
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


def _check_init(config: RunConfig, sites: Sites) -> None:
    experts = [site.name for site in sites.all if site.expert is not None]
    if experts and config.wrapper.begins_with_singular_vectors:
        raise UserError(
            f"init_components: is weighted_singular_vectors, which experts' matrices ({experts[0]}) cannot begin with; "
            "remove it"
        )


def _check_ci(config: AnyCI, sites: Sites) -> None:
    if any(broken_rules(config)):  # which the mistakes in the file say
        return
    function = ci_function(config)
    tables = [site.name for site in sites.all if site.lookup]
    if tables and isinstance(function, LayerwiseMLP) and function.kind == "mlp":
        raise UserError(
            f"pd.ci_config.fn_type: mlp cannot read {tables[0]}, of which rows are looked up (F7); take vector_mlp, "
            "shared_mlp or a global one"
        )
    if isinstance(function, ChunkwiseTransformer):
        try:
            stacks_read(function, sites)
        except UnfitGroups as error:
            raise UserError(f"pd.ci_config.input_patterns: {error}") from error


def _check_kind(config: RunConfig, architecture: Architecture, origin: str | Path) -> None:
    """UserError where the configuration is of another kind of network."""
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
