"""Headline metrics of a decomposition, each compared with a rule of thumb."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any

from param_decomp_lab.runs.configuration import PER_POSITION, attack_name, attack_steps, least_p
from param_decomp_lab.runs.evaluation_rows import L0, attacks, kl, relative
from param_decomp_lab.runs.position_attack import PositionAttack
from param_decomp_lab.tracking.collapse import CI_GRADIENTS, LIMIT, growths
from param_decomp_lab.ui.charts import Series
from param_decomp_lab.ui.numbers import number, percent

BESIDE_BASELINES = "compare it with the baselines’"
"""The rule of the card that comes from a comparison with baselines, for pages that lead to it."""


@dataclass(frozen=True)
class HeadlineCard:
    """One number of the headline.

    ``share`` (0 … 1, or None) fills its meter and ``limit`` is the mark on it; ``good`` says whether the value is
    within the rule of thumb ``rule``; None where there is nothing to compare with.
    """

    label: str
    value: str
    detail: str
    rule: str
    share: float | None = None
    limit: float | None = None
    good: bool | None = None


def verdict(
    series: Mapping[str, Series],
    config: Mapping[str, Any],
    l0: L0 | None,
    position_attack: PositionAttack | None = None,
    step: int | None = None,
) -> list[HeadlineCard]:
    """Cards for whatever was logged: the KLs relative to zero-masked, the attack, L0; on toys the identity error.

    ``position_attack``: from the run's comparison with baselines, where it has one; shown beside the evaluation's.
    ``step``: how far the run is (None: unknown); the card of a comparison made at another step says so.
    """
    zero = kl(series, "zero_masked")
    cards: list[HeadlineCard] = []
    unmasked = kl(series, "unmasked")
    if unmasked:
        share = relative(unmasked.last, zero.last if zero else None)
        cards.append(_card("Unmasked KL", unmasked.last, share, 0.02, "≤ 0.02 nats", absolute=True))
    for masking, label, limit, rule in (
        ("ci_masked", "CI-masked KL", 0.1, "≤ 1/10 of zero-masked"),
        ("stoch_masked", "Stochastic KL", 0.25, "≤ 1/4 of zero-masked"),
    ):
        values = kl(series, masking)
        if values:
            share = relative(values.last, zero.last if zero else None)
            cards.append(_card(label, values.last, share, limit, rule))
    for name, values in attacks(series).items():
        label, n_steps = attack_name(config, name), attack_steps(config, name)
        share = relative(values.last, zero.last if zero else None)
        card = _card(f"A{label[1:]}", values.last, share, 0.25, "≤ 1/4 of zero-masked")
        cards.append(replace(card, detail=_listed(_steps(n_steps) if n_steps else "", card.detail)))
    if position_attack is not None:
        cards.append(_position_card(position_attack, zero, step))
    if l0 and l0.mean is not None and l0.mean_C:
        share = l0.mean / l0.mean_C
        value = f"{_mean_l0(l0.mean)} of {number(l0.mean_C)}"
        worst = max((site.share or 0.0 for site in l0.sites), default=0.0)
        detail = f"{percent(share)} of C; at most {percent(worst)} at a site"
        cards.append(HeadlineCard("Mean L0", value, detail, "≤ C/5 at every site", share, 0.2, worst <= 0.2))
    errors = [values.last for key, values in series.items() if key.startswith("eval/identity_ci_error/")]
    if errors:
        total = sum(errors)
        cards.append(
            HeadlineCard(
                "CI pattern errors",
                number(total),
                f"over {len(errors)} sites",
                "0 is a perfect recovery",
                good=total == 0,
            )
        )
    for key, label, rule, tolerance in (
        ("eval/tms/mmcs", "MMCS", "≥ 0.998: components point along the features", 0.002),
        ("eval/tms/ml2r", "ML2R", "within 0.035 of 1: components are as long as the features", 0.035),
    ):
        if key in series:
            last = series[key].last
            cards.append(
                HeadlineCard(label, f"{last:.4f}", "1 is a perfect recovery", rule, good=abs(last - 1) <= tolerance)
            )
    norms = series.get(CI_GRADIENTS)
    seen = growths(norms.finite) if norms and least_p(config) < 1 else ()
    growth = next((growth for growth in seen if growth.is_large), None)
    if growth is not None:
        detail = f"at step {growth.step:,}, since step {growth.since:,}"
        rule = f"below {LIMIT:.0f} times: importances may collapse"
        cards.append(HeadlineCard("CI gradients", f"× {number(growth.factor)}", detail, rule, good=False))
    return cards


def sentence(series: Mapping[str, Series], l0: L0 | None) -> str:
    """The finding in one plain sentence, empty when the numbers for it are missing."""
    zero, masked = kl(series, "zero_masked"), kl(series, "ci_masked")
    share = relative(masked.last, zero.last) if masked and zero else None
    if share is None or l0 is None or l0.mean is None or l0.mean_C is None:
        return ""
    return (
        f"With every component scaled by its causal importance, which leaves {_mean_l0(l0.mean)} of "
        f"{number(l0.mean_C)} active at an average site and position, the KL from the model's predictions is "
        f"{percent(share)} of the zero-masked KL."
    )


def _position_card(found: PositionAttack, zero: Series | None, step: int | None) -> HeadlineCard:
    """The comparison has rows of its own, so that its share of zero-masked is about right."""
    share = relative(found.error, zero.last if zero else None)
    of_zero = f"{percent(share)} of zero-masked" if share is not None else ""
    other = f"at step {found.step:,}" if found.step != step else ""
    detail = _listed(_steps(found.n_steps), of_zero, other)
    return HeadlineCard(f"Attack, {PER_POSITION}", number(found.error), detail, BESIDE_BASELINES, share)


def _steps(n: int) -> str:
    return f"{n} step{'s' if n != 1 else ''}"


def _listed(*parts: str) -> str:
    return ", ".join(part for part in parts if part)


def _mean_l0(mean: float) -> str:
    return number(round(mean, 2 if mean < 10 else 1))


def _card(
    label: str, value: float, share: float | None, limit: float, rule: str, *, absolute: bool = False
) -> HeadlineCard:
    detail = f"{percent(share)} of zero-masked" if share is not None else ""
    if not isfinite(value):
        return HeadlineCard(label, number(value), detail, rule, good=False)
    if absolute:
        return HeadlineCard(label, number(value), detail, rule, share, None, value <= limit)
    return HeadlineCard(label, number(value), detail, rule, share, limit, share <= limit if share is not None else None)
