"""The end of a run on the terminal: losses, CE/KL, L0, the attack, the time."""

from collections.abc import Iterable, Mapping
from typing import Any

from rich.table import Table
from rich.text import Text

from param_decomp_lab.metrics.ce_kl import MEASURES
from param_decomp_lab.runs.configuration import attack_name
from param_decomp_lab.runs.evaluation_rows import attacks, ce_kl_table, kl, l0_table, relative
from param_decomp_lab.runs.series import series_by_key, training_seconds
from param_decomp_lab.ui.charts import Series
from param_decomp_lab.ui.numbers import duration, number, percent
from param_decomp_lab.ui.tables import plain_table

MANY_SITES = 32
"""With more sites than this the table shows those with the largest and the smallest shares."""


def summary_table(
    metrics_rows: Iterable[Mapping[str, Any]], sites: Mapping[str, int], config: Mapping[str, Any] | None = None
) -> list[Table]:
    """Tables for ``console.print(*tables)``, only those for which the rows (of ``metrics.jsonl``) have numbers.

    ``sites``: site name -> C, in canonical order. ``config``: the run's, which says what the attack is.
    """
    series = series_by_key(metrics_rows)
    tables = [_losses(series), _ce_kl(series, config or {}), _l0(series, sites), _toy(series)]
    return [table for table in tables if table.row_count]


def _toy(series: Mapping[str, Series]) -> Table:
    table = plain_table("Toy ground truth", ("", "left"), ("first", "right"), ("last", "right"))
    for key in (key for key in series if key.startswith(("eval/identity_ci_error/", "eval/tms/"))):
        words = key.removeprefix("eval/").replace("identity_ci_error/", "errors of ").replace("tms/", "").split(" ")
        name = " ".join(word.upper() if word in ("mmcs", "ml2r") else word for word in words)
        table.add_row(name, number(series[key].first), number(series[key].last))
    return table


def _losses(series: Mapping[str, Series]) -> Table:
    table = plain_table("Training", ("", "left"), ("first", "right"), ("last", "right"))
    prefix = "train/loss/"
    whole = (key for key in series if key.startswith(prefix) and "/" not in key.removeprefix(prefix))  # no parts (R6)
    keys = sorted(whole, key=lambda key: key == prefix + "total")
    for key in keys:
        table.add_row(key.removeprefix(prefix), number(series[key].first), number(series[key].last))
    seconds = training_seconds(series)
    if seconds:
        speed = series.get("train/perf/tok_per_s")
        table.add_section()
        table.add_row("time in training steps", "", duration(seconds))
        if speed:
            table.add_row("tokens per second", number(speed.first), number(speed.last))
    return table


def _ce_kl(series: Mapping[str, Series], config: Mapping[str, Any]) -> Table:
    rows = ce_kl_table(series)
    measures = [measure for measure in MEASURES if any(measure in row.cells for row in rows)]
    short = {"kl": "kl", "ce_difference": "Δ ce", "ce_unrecovered": "not recovered"}
    columns = [(short.get(measure, measure), "right") for measure in measures]
    # Narrow enough for 80 columns: only the KL shows where it began.
    table = plain_table("Evaluation by masking (kl: first → last)", ("", "left"), *columns, ("of zero's", "right"))
    zero = kl(series, "zero_masked")
    for row in rows:
        cells = [
            _first_last(cell) if measure == "kl" else Text(number(cell.last) if cell else "–")
            for measure, cell in ((measure, row.cells.get(measure)) for measure in measures)
        ]
        own = row.cells.get("kl")
        share = relative(own.last, zero.last) if own and zero and row.masking != "zero_masked" else None
        table.add_row(row.masking.removesuffix("_masked"), *cells, percent(share) if share is not None else "")
    for name, values in attacks(series).items():
        label = attack_name(config, name).replace(", ", ",\n")
        share = relative(values.last, zero.last) if zero else None
        padding = [Text("")] * max(len(measures) - 1, 0)
        if not measures:
            table.add_row(label, _first_last(values))
            continue
        table.add_row(label, _first_last(values), *padding, percent(share) if share is not None else "")
    if target := series.get("eval/ce_kl/ce_target"):
        table.caption = f"Cross-entropy of the target itself: {number(target.last)} nats per token"
        table.caption_justify = "left"
    return table


def _l0(series: Mapping[str, Series], sites: Mapping[str, int]) -> Table:
    l0 = l0_table(series, sites)
    title = f"Active components per position (L0, λ > {l0.threshold})" if l0 else ""
    table = plain_table(
        title,
        ("site", "wrap"),
        ("C", "right"),
        ("first", "right"),
        ("last", "right"),
        ("share of C", "right"),
        ("", "left"),
    )
    if l0 is None:
        return table
    shown = l0.sites
    if len(shown) > MANY_SITES:
        by_share = sorted((site for site in shown if site.share is not None), key=lambda site: -(site.share or 0.0))
        extremes = {site.name for site in (*by_share[: MANY_SITES // 2], *by_share[-MANY_SITES // 2 :])}
        shown = [site for site in shown if site.name in extremes]
    for site in shown:
        share = site.share
        bar = Text("█" * round(10 * min(share or 0.0, 1.0)) or "▏", style="cyan")
        table.add_row(
            site.name, number(site.C), number(site.series.first), number(site.series.last), percent(share), bar
        )
    if len(shown) < len(l0.sites):
        table.add_row(f"… {len(l0.sites) - len(shown)} others", "", "", "", "", "")
    table.add_section()
    for group in l0.groups:
        table.add_row(group.name, "", number(group.series.first), number(group.series.last), "", "")
    if len(l0.sites) > 1:
        share = l0.mean / l0.mean_C if l0.mean is not None and l0.mean_C else None
        means = (number(value) for value in (l0.mean_C, l0.first_mean, l0.mean))
        table.add_row("mean over sites", *means, percent(share), "")
    if l0.has_experts:
        table.caption = "L0 is over all positions. Shares and the mean are over those that take the expert."
        table.caption_justify = "left"
    return table


def _first_last(values: Series | None) -> Text:
    if values is None:
        return Text("–", style="dim")
    if len(values.steps) == 1:
        return Text(number(values.last))
    return Text.assemble((f"{number(values.first)} → ", "dim"), number(values.last))
