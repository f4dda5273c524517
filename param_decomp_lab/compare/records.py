"""Reads what is compared between runs (state, configuration and metrics) from small files, any of
which may be damaged.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import isfinite
from pathlib import Path
from typing import Any

from param_decomp_lab.errors import UserError
from param_decomp_lab.runs.configuration import attack_name, component_counts
from param_decomp_lab.runs.evaluation_rows import attacks, kl, l0_names, l0_table
from param_decomp_lab.runs.folder import CONFIG_FILE
from param_decomp_lab.runs.listing import RunStatus, find_runs
from param_decomp_lab.runs.metrics_file import read_metrics
from param_decomp_lab.runs.series import series_by_key
from param_decomp_lab.safe_io.printable import printable
from param_decomp_lab.safe_io.yaml_text import read_mapping
from param_decomp_lab.ui.charts import Series

MASKINGS = {"ci_masked": "λ as masks", "rounded_masked": "λ rounded", "stoch_masked": "stochastic"}
"""The maskings whose KL is compared."""


@dataclass(frozen=True)
class Record:
    """The readable parts of a run. ``config``: None if it cannot be read, for the reason in ``status.why``. ``series``:
    its metrics by key.
    """

    status: RunStatus
    config: Mapping[str, Any] | None
    series: Mapping[str, Series]

    @property
    def id(self) -> str:
        return self.status.id

    @property
    def finished(self) -> bool:
        return self.status.state == "finished"

    @property
    def of_text(self) -> bool:
        """Whether its errors are KL divergences."""
        return any(key.startswith("eval/ce_kl/kl_") for key in self.series)

    @cached_property
    def l0(self) -> Series | None:
        """The number of active components at a position, averaged over sites, at every evaluation."""
        table = l0_table(self.series, component_counts(self.config or {}, l0_names(self.series)))
        if table is None or not table.sites:
            return None
        steps = sorted(set.intersection(*(set(site.series.steps) for site in table.sites)))
        by_step = [dict(zip(site.series.steps, site.series.values, strict=True)) for site in table.sites]
        means = [table.mean_over_sites([values[step] for values in by_step]) for step in steps]
        found = [(step, mean) for step, mean in zip(steps, means, strict=True) if mean is not None]
        return Series(tuple(step for step, _ in found), tuple(mean for _, mean in found)) if found else None

    @cached_property
    def errors(self) -> dict[str, Series]:
        """The errors that are plotted against L0, by name: KL under maskings and attacks, or the losses of a toy's
        evaluation. Attacks that differ in what they find masks for have different names.
        """
        found = {words: series for name, words in MASKINGS.items() if (series := kl(self.series, name))}
        attacked = {attack_name(self.config or {}, name): series for name, series in attacks(self.series).items()}
        prefix = "eval/loss/"
        losses = {key.removeprefix(prefix): series for key, series in self.series.items() if key.startswith(prefix)}
        whole = {name: x for name, x in losses.items() if "/" not in name}  # not a part of one (R6)
        others = {} if found else {name: x for name, x in whole.items() if name not in attacks(self.series)}
        return {**found, **others, **attacked}

    def error(self, name: str) -> float | None:
        """Returns the last finite value of an error; None without one."""
        series = self.errors.get(name)
        return series.last if series is not None and isfinite(series.last) else None


def read_records(folders: Sequence[Path]) -> list[Record]:
    """Returns all runs in or below ``folders``, the oldest first. Raises UserError for a missing folder, and if there
    are no runs.
    """
    found = find_runs(folders)
    if not found:
        raise UserError(f"no runs in {', '.join(map(str, folders))}; give their folders: pd compare RUN RUN …")
    return [_record(status) for status in reversed(found)]


def _record(status: RunStatus) -> Record:
    if status.state == "broken":
        return Record(status, None, {})
    folder = Path(status.folder)
    try:
        config = read_mapping(folder / CONFIG_FILE, "the configuration of a run")
        series = series_by_key(read_metrics(folder))
    except (UserError, OSError) as error:
        return Record(replace(status, state="broken", why=printable(str(error), 2000)), None, {})
    return Record(status, config, series)
