"""The table of metrics that `pd check` prints: what is evaluated, how often, at what cost."""

from dataclasses import replace

from rich.table import Table

from param_decomp_jax.method.recon import Reconstruction, n_attack_passes, n_forwards
from param_decomp_lab.check.tables import titled
from param_decomp_lab.config import RunConfig
from param_decomp_lab.config.core_specs import measured_terms
from param_decomp_lab.config.method_schema import EvalConfig
from param_decomp_lab.metrics import Metric
from param_decomp_lab.ui.descriptions import describe_term
from param_decomp_lab.ui.tables import plain_table


def evaluation_table(settings: EvalConfig, config: RunConfig, n_sites: int | None) -> Table:
    """The table of metrics of ``config``'s evaluation. ``n_sites``: None if the target is unknown."""
    batches = f"{settings.n_steps:,} batch{'es' if settings.n_steps > 1 else ''} of {settings.batch_size:,} rows"
    table = plain_table(f"Evaluation: {batches}", ("", "wrap"), ("every", "right"), ("passes", "right"))
    for metric, term in zip(settings.metrics, measured_terms(settings.metrics, config), strict=True):
        is_figure = isinstance(metric, Metric) and metric.titles and not metric.meanings
        every = settings.slow_every if is_figure or metric.slow else settings.every
        passes = ""
        if term is not None:
            name, words = term.name, describe_term(term, n_sites, config.method.pd.steps)
            if isinstance(term, Reconstruction) and n_sites is not None:
                # No parameters are trained, so one backward pass is enough, whatever the sources ascend (R6).
                passes = f"{n_forwards(term, n_sites) + n_attack_passes(replace(term, beside=None), n_sites):,}"
        else:
            assert isinstance(metric, Metric)
            name, words = metric.type, metric.describe()
        table.add_row(titled(name, words), f"{every:,}", passes)
    if not settings.metrics:
        table.add_row("no metrics", f"{settings.every:,}", "")
    return table
