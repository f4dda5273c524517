"""Reads back from the metrics what section 11 of docs/semantics.md defines: the CE/KL table,
attacks, L0 for each site.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite

from param_decomp_lab.metrics.ce_kl import MASKINGS, MEASURES
from param_decomp_lab.schema.site_names import expert_of
from param_decomp_lab.ui.charts import Series


@dataclass(frozen=True)
class MaskingRow:
    """One masking of the CE/KL table; ``cells[measure]`` is its series, absent if it was not logged."""

    masking: str
    meaning: str
    cells: dict[str, Series]


@dataclass(frozen=True)
class SiteL0:
    """Mean number of active components of a site, or of a named group of sites (``C`` then is None).

    ``others``: the same at other thresholds, by threshold. ``routed``: of an expert's matrix, the share of the
    positions that take the expert; None for a site that exists at every position.
    """

    name: str
    C: int | None
    series: Series
    others: dict[str, Series]
    routed: float | None = None

    @property
    def exists(self) -> float:
        """Share of the positions at which the site exists."""
        return 1.0 if self.routed is None else self.routed

    @property
    def share(self) -> float | None:
        """Last L0 over C, at the positions where the site exists."""
        return self.share_of(self.series.last)

    def share_of(self, l0: float) -> float | None:
        return l0 / (self.C * self.exists) if self.C and self.exists > 0 else None


@dataclass(frozen=True)
class L0:
    """All of ``eval/l0``: the sites and the groups, at the lowest threshold that was logged."""

    threshold: str
    sites: list[SiteL0]
    groups: list[SiteL0]
    other_thresholds: list[str]

    @property
    def mean(self) -> float | None:
        """Mean of the last L0 over the sites and the positions where they exist."""
        return self.mean_over_sites([site.series.last for site in self.sites])

    @property
    def first_mean(self) -> float | None:
        return self.mean_over_sites([site.series.first for site in self.sites])

    @property
    def mean_C(self) -> float | None:
        return self.mean_over_sites([(site.C or 0) * site.exists for site in self.sites])

    @property
    def has_experts(self) -> bool:
        return any(site.routed is not None for site in self.sites)

    def mean_over_sites(self, values: Sequence[float]) -> float | None:
        """The mean over the positions where the sites exist, from means over all positions, one for each site."""
        weight = sum(site.exists for site in self.sites)
        return sum(values) / weight if weight > 0 else None


def ce_kl_table(series: Mapping[str, Series]) -> list[MaskingRow]:
    """The rows of ``eval/ce_kl`` that were logged, known maskings first."""
    cells: dict[str, dict[str, Series]] = {}
    for key, values in series.items():
        found = re.fullmatch(rf"eval/ce_kl/({'|'.join(MEASURES)})_(\w+)", key)
        if found:
            cells.setdefault(found[2], {})[found[1]] = values
    order = [*MASKINGS, *sorted(set(cells) - set(MASKINGS))]
    return [MaskingRow(name, MASKINGS.get(name, ""), cells[name]) for name in order if name in cells]


def kl(series: Mapping[str, Series], masking: str) -> Series | None:
    """The series ``eval/ce_kl/kl_<masking>``, if there is one."""
    return series.get(f"eval/ce_kl/kl_{masking}")


def attacks(series: Mapping[str, Series]) -> dict[str, Series]:
    """Returns the evaluation losses under a fresh attack, by name: everything under ``eval/loss/`` that is called PGD,
    without the parts of a loss (R6).
    """
    prefix = "eval/loss/"
    found = {
        key.removeprefix(prefix): values
        for key, values in series.items()
        if key.startswith(prefix)
        and "pgd" in key.lower()
        and "persistent" not in key.lower()
        and "/" not in key.removeprefix(prefix)
    }
    return dict(sorted(found.items(), key=lambda item: (item[0] != "PGDReconLoss", item[0])))


def l0_table(series: Mapping[str, Series], sites: Mapping[str, int]) -> L0 | None:
    """``eval/l0/<threshold>_<name>`` for the sites (name -> C) and for every other name, taken as a group of sites.
    With ``eval/routed/<expert>`` where it was logged."""
    by_threshold: dict[str, dict[str, Series]] = {}
    for key, values in series.items():
        found = re.fullmatch(r"eval/l0/([^_]+)_(.+)", key)
        if found:
            by_threshold.setdefault(found[1], {})[found[2]] = values
    if not by_threshold:
        return None
    lowest, *others = sorted(by_threshold, key=_threshold_value)

    def entry(name: str, values: Series) -> SiteL0:
        routed = series.get(f"eval/routed/{expert_of(name)}")
        at_others = {t: by_threshold[t][name] for t in others if name in by_threshold[t]}
        return SiteL0(name, sites.get(name), values, at_others, routed.last if routed else None)

    entries = [entry(name, values) for name, values in by_threshold[lowest].items()]
    order = {name: i for i, name in enumerate(sites)}
    return L0(
        threshold=lowest,
        sites=sorted((e for e in entries if e.C is not None), key=lambda e: order[e.name]),
        groups=[e for e in entries if e.C is None],
        other_thresholds=others,
    )


def l0_names(series: Mapping[str, Series]) -> list[str]:
    """Every name under ``eval/l0``, sites and groups alike, in the order of logging."""
    names: dict[str, None] = {}
    for key in series:
        found = re.fullmatch(r"eval/l0/[^_]+_(.+)", key)
        if found:
            names[found[1]] = None
    return list(names)


def relative(value: float | None, reference: float | None) -> float | None:
    """Returns ``value / reference`` if that is meaningful."""
    if value is None or reference is None or not isfinite(value) or not isfinite(reference) or reference <= 0:
        return None
    return value / reference


def _threshold_value(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return float("inf")
