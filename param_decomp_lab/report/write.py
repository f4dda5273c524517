"""Writes ``report.html``: a run as one self-contained page."""

import re
from collections.abc import Callable, Mapping
from math import isfinite
from pathlib import Path
from typing import Any

from param_decomp_lab.errors import UserError
from param_decomp_lab.folders import not_written, write_whole
from param_decomp_lab.metrics import CI_L0, METRICS, CEandKLLosses
from param_decomp_lab.metrics.ce_kl import MEASURES
from param_decomp_lab.report.figure_files import read_figures
from param_decomp_lab.report.snippets import (
    SiteExamples,
    preview_html,
    read_examples,
    snippet_html,
    snippets_per_component,
)
from param_decomp_lab.report.verdict import sentence, verdict
from param_decomp_lab.runs import configuration
from param_decomp_lab.runs.evaluation_rows import L0, attacks, ce_kl_table, kl, l0_names, l0_table
from param_decomp_lab.runs.folder import CONFIG_FILE, ENVIRONMENT_FILE, EXAMPLES_FILE
from param_decomp_lab.runs.imported import IMPORTED_FILE, read_imported
from param_decomp_lab.runs.metrics_file import METRICS_FILE, read_metrics
from param_decomp_lab.runs.position_attack import find_position_attack
from param_decomp_lab.runs.series import series_by_key, training_seconds
from param_decomp_lab.safe_io.files import read_text
from param_decomp_lab.safe_io.json_text import read_json
from param_decomp_lab.safe_io.paths import path_within
from param_decomp_lab.safe_io.yaml_text import parse_yaml
from param_decomp_lab.ui.charts import Chart, Series, line_chart, ramp_colors
from param_decomp_lab.ui.numbers import duration, exact, number, percent
from param_decomp_lab.ui.templates import templates_beside

PALETTE = [f"var(--c{i})" for i in range(8)]
KL_COLORS = {
    "unmasked": "var(--c0)",
    "ci_masked": "var(--c1)",
    "stoch_masked": "var(--c2)",
    "rounded_masked": "var(--c4)",
    "random_masked": "var(--c3)",
    "zero_masked": "var(--c7)",
}
FOLDED = {
    "train/schedules/": "Schedules",
    "train/grad_norms/": "Gradient norms",
    "train/perf/": "Speed",
    "train/mem/": "Memory",
}
_SURROGATES = re.compile("[\ud800-\udfff]")
"""Halves of surrogate pairs, which JSON can hold and UTF-8 cannot."""
FEW_LINES = 8
"""Up to so many sites, or parts of a loss, share one chart with a legend; of more, each kind has a chart."""


def write_report(run_folder: Path) -> Path:
    """Read ``run_folder`` and write its ``report.html`` atomically; returns that path.

    Needs ``config.yaml`` and ``metrics.jsonl``; uses ``figures/*.png``, ``environment.json`` and ``examples.json``
    where they are. Errors: ``UserError`` naming the file that is missing or broken.
    """
    page = _SURROGATES.sub("\N{REPLACEMENT CHARACTER}", render_report(run_folder))
    target = run_folder / "report.html"
    try:
        write_whole(target, page)
    except OSError as error:
        raise not_written(target, error, "make the folder writable, or copy it and report on the copy") from error
    return target


def render_report(run_folder: Path, component_address: Callable[[str, int], str] | None = None) -> str:
    """The page as a string. Raises UserError as `write_report` does, and for files that are links out of the folder.

    ``component_address``: of the page of a component, by site and number, "" if it has none; for a page that is served.
    """
    for name in (CONFIG_FILE, METRICS_FILE, ENVIRONMENT_FILE, EXAMPLES_FILE, IMPORTED_FILE):
        path_within(run_folder, name, str(run_folder), links=False)
    config_text, config = _read_config(run_folder / CONFIG_FILE)
    if not (run_folder / METRICS_FILE).is_file():
        raise UserError(f"{run_folder / METRICS_FILE} does not exist: a report needs the metrics of a run")
    rows = read_metrics(run_folder)
    examples = read_examples(run_folder / EXAMPLES_FILE)
    imported = read_imported(run_folder)
    series = series_by_key(rows)
    last_step = max((int(row["step"]) for row in rows), default=None)
    n_steps = configuration.get(config, "pd", "steps")
    x_max = (last_step or 0) + 1
    sites = configuration.component_counts(config, l0_names(series)) | {e.site: e.C for e in examples}
    l0 = l0_table(series, sites)
    seconds = training_seconds(series)
    terms = configuration.loss_terms(config)
    loss_charts = _loss_charts(series, terms, x_max)
    ce_kl = ce_kl_table(series)
    eval_steps = sorted({step for key, values in series.items() if key.startswith("eval/") for step in values.steps})

    environment = templates_beside(__file__)
    environment.filters.update(
        exact=exact,
        number=number,
        percent=percent,
        snippet=snippet_html,
        preview=preview_html,
        label=lambda key: key.replace("_", " "),
    )
    return environment.get_template("page.html").render(
        run_id=config.get("run_id") or run_folder.name,
        place=Path(str(config.get("out_dir") or "runs"), str(config.get("run_id") or run_folder.name)),
        run_name=config.get("run_name") or config.get("run_id") or run_folder.name,
        last_step=last_step,
        n_steps=n_steps if isinstance(n_steps, int) else None,
        duration=duration(seconds) if seconds and isfinite(seconds) else None,
        sentence=sentence(series, l0),
        cards=verdict(series, config, l0, find_position_attack(run_folder), last_step),
        terms=terms,
        loss_charts=loss_charts,
        folded_charts=_folded_charts(series, x_max),
        ce_kl=ce_kl,
        toy=any(key.startswith("eval/identity_ci_error/") for key in series),
        measures=[m for m in MEASURES if any(m in row.cells for row in ce_kl)],
        ce_target=next((s for key, s in series.items() if key in ("eval/ce_kl/ce_target", "eval/ce_target")), None),
        attacks=_attacks(series, config),
        eval_steps=eval_steps,
        kl_chart=_kl_chart(series, config, x_max),
        l0=l0,
        l0_charts=_l0_charts(l0, x_max),
        other_metrics=_other_metrics(series),
        figures=read_figures(run_folder / "figures"),
        examples=examples,
        component_address=component_address or (lambda site, number: ""),
        n_snippets=snippets_per_component(examples),
        n_snippets_available=_most_snippets(examples),
        overview=[
            *([("Origin", str(imported))] if imported is not None else []),
            *configuration.overview(config, len(l0.sites) if l0 else len(sites), last_step),
        ],
        config_text=config_text,
        environment=_flat(_read_environment(run_folder / ENVIRONMENT_FILE)),
    )


def _loss_charts(series: Mapping[str, Series], terms: list[configuration.LossTerm], x_max: int) -> list[Chart]:
    prefix = "train/loss/"
    logged = [key.removeprefix(prefix) for key in series if key.startswith(prefix) and "/" not in key[len(prefix) :]]
    configured = {term.name: term for term in terms}
    order = [
        *(n for n in configured if n in logged),
        *(n for n in logged if n not in configured and n != "total"),
        "total",
    ]
    charts: list[Chart] = []
    for name in order:
        values = series.get(prefix + name)
        if values is None:
            continue
        notes = (
            [f"× {exact(configured[name].coeff)}"] if name in configured and configured[name].coeff is not None else []
        )
        if values.steps[0] > 0.02 * x_max:
            notes.append(f"from step {values.steps[0]:,}")
        color = "var(--ink-2)" if name == "total" else "var(--c0)"
        title = "total (sum of coefficient × term)" if name == "total" else name
        chart = line_chart(title, {name: values}, [color], x_max=x_max, note=" · ".join(notes))
        charts += [chart] if chart else []
        own = f"{prefix}{name}/"
        parts = {key.removeprefix(own): values for key, values in series.items() if key.startswith(own)}
        charts += _part_charts(name, parts, x_max)
    return charts


def _part_charts(name: str, parts: dict[str, Series], x_max: int) -> list[Chart]:
    """The parts of a loss over steps: the output's error, and relative errors at points (R6)."""
    if len(parts) <= FEW_LINES:
        chart = line_chart(f"{name}: output, and relative errors at points", parts, PALETTE, x_max=x_max)
        return [chart] if chart else []
    charts: dict[str, dict[str, Series]] = {}
    for part in sorted(parts, key=lambda part: (len(part), part)):  # layer 2 before layer 10
        title = f"relative errors at {part.rsplit('.', 1)[0]}" if "." in part else part
        charts.setdefault(f"{name}: {title}", {})[part] = parts[part]
    return _ramp_charts(charts, "layer", x_max)


def _ramp_charts(lines: Mapping[str, dict[str, Series]], ramp: str, x_max: int, from_zero: bool = False) -> list[Chart]:
    """A chart for each title, its lines coloured from the first to the last ``ramp``."""
    charts = [
        line_chart(title, own, ramp_colors(len(own)), x_max=x_max, from_zero=from_zero, ramp=ramp)
        for title, own in lines.items()
    ]
    return [chart for chart in charts if chart]


def _folded_charts(series: Mapping[str, Series], x_max: int) -> dict[str, list[Chart]]:
    """Charts by heading: schedules, gradient norms, speed, memory, and every other key under ``train/``."""
    groups: dict[str, list[Chart]] = {}
    for key, values in series.items():
        if not key.startswith("train/") or key.startswith("train/loss/"):
            continue
        prefix = next((prefix for prefix in FOLDED if key.startswith(prefix)), "train/")
        title = key.removeprefix(prefix).removeprefix("summary/")
        chart = line_chart(title, {title: values}, ["var(--c0)"], x_max=x_max)
        if chart:
            groups.setdefault(FOLDED.get(prefix, "Everything else"), []).append(chart)
    order = [*FOLDED.values(), "Everything else"]
    return {heading: groups[heading] for heading in order if heading in groups}


def _attacks(series: Mapping[str, Series], config: Mapping[str, Any]) -> list[tuple[str, str, Series]]:
    """Key, what it is called, and values."""
    found = attacks(series).items()
    return [(name, configuration.attack_name(config, name), values) for name, values in found]


def _kl_chart(series: Mapping[str, Series], config: Mapping[str, Any], x_max: int) -> Chart | None:
    drawn: dict[str, Series] = {}
    colors: list[str] = []
    for masking, color in KL_COLORS.items():
        values = kl(series, masking)
        if values:
            drawn[masking.replace("_", " ")] = values
            colors.append(color)
    for _, called, values in _attacks(series, config):
        drawn[called] = values
        colors.append("var(--c5)")
    if any(key.startswith("eval/ce_kl/kl_") for key in series):
        title, note = "KL from the target's output at every evaluation", "nats per position"
    else:
        title, note = "Loss under attack at every evaluation", ""
    return line_chart(title, drawn, colors, x_max=x_max, note=note, dashed=["zero masked"])


def _l0_charts(l0: L0 | None, x_max: int) -> list[Chart]:
    """L0 as a share of C over steps: one chart, or with many sites one for each kind with a colour ramp over them."""
    if l0 is None:
        return []
    shares = {
        site.name: Series(site.series.steps, tuple(site.share_of(value) or 0.0 for value in site.series.values))
        for site in l0.sites
        if site.share is not None
    }
    if len(shares) <= FEW_LINES:
        chart = line_chart("L0 / C", shares, PALETTE, x_max=x_max, from_zero=True)
        return [chart] if chart else []
    kinds: dict[str, dict[str, Series]] = {}
    for name, values in shares.items():
        kinds.setdefault(name.rsplit(".", 1)[-1], {})[name] = values
    if len(kinds) > FEW_LINES:
        kinds = {"all sites": shares}
    return _ramp_charts({f"L0 / C, {kind}": own for kind, own in kinds.items()}, "site", x_max, from_zero=True)


def _other_metrics(series: Mapping[str, Series]) -> list[tuple[str, str, Series]]:
    """What the evaluations logged beyond the tables above: keys, what they mean ("" if no metric says so), values."""
    shown = (*CEandKLLosses.meanings, *CI_L0.meanings)
    attacked = {f"eval/loss/{name}" for name in attacks(series)}
    return [
        (key, _meaning(key), values)
        for key, values in series.items()
        if not key.startswith(("train/", *shown)) and key not in attacked
    ]


def _meaning(key: str) -> str:
    meanings = (pair for metric in METRICS.values() for pair in metric.meanings.items())
    return next((words for beginning, words in meanings if key.startswith(beginning)), "")


def _most_snippets(examples: list[SiteExamples]) -> int:
    return max((len(component.snippets) for site in examples for component in site.components), default=0)


def _read_config(path: Path) -> tuple[str, Mapping[str, Any]]:
    if not path.is_file():
        raise UserError(f"{path} does not exist: is {path.parent} the folder of a run?")
    text = read_text(path, "the configuration")
    content = parse_yaml(text, str(path))
    if not isinstance(content, dict):
        raise UserError(f"{path}: expected a mapping of keys to values")
    wrapper = content.get("wrapper")
    return text, {**wrapper, **content} if isinstance(wrapper, dict) else content


def _read_environment(path: Path) -> Any:
    return read_json(path, "the environment", dict) if path.is_file() else {}


def _flat(value: Any, prefix: str = "") -> list[tuple[str, str]]:
    """Nested objects as dotted keys; lists of plain values on one line."""
    if isinstance(value, Mapping):
        return [pair for key, item in value.items() for pair in _flat(item, f"{prefix}.{key}" if prefix else str(key))]
    if isinstance(value, list) and any(isinstance(item, Mapping | list) for item in value):
        return [pair for i, item in enumerate(value) for pair in _flat(item, f"{prefix}[{i}]")]
    items = value if isinstance(value, list) else [value]
    text = ", ".join(str(item).lower() if isinstance(item, bool) else str(item) for item in items)
    return [(prefix, text)] if prefix else []
