"""The table of metrics that `pd check` prints: what is evaluated, how often, at what cost."""

from rich.table import Table

from param_decomp_jax.method.recon import Reconstruction, n_attack_passes, n_forwards
from param_decomp_lab.check.tables import titled
from param_decomp_lab.config import term_names
from param_decomp_lab.config.core_specs import term
from param_decomp_lab.config.loss_schema import Loss
from param_decomp_lab.config.method_schema import EvalConfig, PDConfig
from param_decomp_lab.config.metric_schema import (
    CI_L0,
    CEandKLLosses,
    CIHiddenActsReconLoss,
    CIHistograms,
    CIMeanPerComponent,
    ComponentActivationDensity,
    IdentityCIError,
    OnlyMeasured,
    PermutedCIPlots,
    UVPlots,
)
from param_decomp_lab.ui.descriptions import describe_term
from param_decomp_lab.ui.numbers import exact
from param_decomp_lab.ui.tables import plain_table

FIGURES = (CIHistograms, ComponentActivationDensity, CIMeanPerComponent, PermutedCIPlots, UVPlots)


def evaluation_table(settings: EvalConfig, pd: PDConfig, n_sites: int | None) -> Table:
    """The table of metrics. ``n_sites``: None if the target is unknown."""
    batches = f"{settings.n_steps:,} batch{'es' if settings.n_steps > 1 else ''} of {settings.batch_size:,} rows"
    table = plain_table(f"Evaluation: {batches}", ("", "wrap"), ("every", "right"), ("passes", "right"))
    names = iter(term_names(tuple(metric for metric in settings.metrics if isinstance(metric, Loss))))
    for metric in settings.metrics:
        name = next(names) if isinstance(metric, Loss) else metric.type
        every = settings.slow_every if isinstance(metric, FIGURES) else settings.every
        passes = ""
        if isinstance(metric, Loss | CIHiddenActsReconLoss):
            made = term(metric, name, pd)
            words = describe_term(made, n_sites, pd.steps)
            if isinstance(made, Reconstruction) and n_sites is not None:
                passes = f"{n_forwards(made, n_sites) + n_attack_passes(made, n_sites):,}"
        else:
            words = _describe_metric(metric)
        table.add_row(titled(name, words), f"{every:,}", passes)
    if not settings.metrics:
        table.add_row("no metrics", f"{settings.every:,}", "")
    return table


def _describe_metric(metric: OnlyMeasured) -> str:
    match metric:
        case CEandKLLosses():
            return f"six maskings, rounded at {exact(metric.rounding_threshold)}"
        case CI_L0():
            groups = f"; groups {', '.join(metric.groups)}" if metric.groups else ""
            return f"active components per position, λ > {exact(metric.ci_alive_threshold)}{groups}"
        case CIHistograms(n_batches_accum=n):
            return f"figure, over {'all batches' if n is None else f'{n} batch' + 'es' * (n > 1)}"
        case ComponentActivationDensity():
            return f"figure, λ > {exact(metric.ci_alive_threshold)}"
        case CIMeanPerComponent():
            return "figure"
        case IdentityCIError():
            identity = [f"identity {p.n_features} at {p.layer_pattern}" for p in metric.identity_ci or ()]
            return ", ".join([*identity, *(f"dense {p.k} at {p.layer_pattern}" for p in metric.dense_ci or ())])
        case PermutedCIPlots() | UVPlots():
            identity = [f"identity at {pattern}" for pattern in metric.identity_patterns or ()]
            dense = [f"dense at {pattern}" for pattern in metric.dense_patterns or ()]
            return ", ".join(["figures", *identity, *dense])
        case CIHiddenActsReconLoss():
            raise AssertionError("is a term")
