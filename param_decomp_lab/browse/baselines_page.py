"""The page of a run's baselines: tables and a figure of what `pd eval --baselines` has left."""

from collections.abc import Sequence
from dataclasses import dataclass

from param_decomp_lab.baselines.kept import find_comparison
from param_decomp_lab.baselines.parts import BASELINES
from param_decomp_lab.baselines.result import (
    LAMBDA,
    LARGEST,
    ON_OFF,
    OWN,
    WITH_K_ON,
    BaselinePoint,
    Comparison,
    ReplacementPoint,
    caption,
)
from param_decomp_lab.baselines.verdict import title, verdict, with_k_on
from param_decomp_lab.browse.catalog import Opened
from param_decomp_lab.browse.pages import Pages
from param_decomp_lab.errors import UserError
from param_decomp_lab.ui.charts import Scatter, axis
from param_decomp_lab.ui.numbers import number

WIDTH, HEIGHT = 640, 300
BESIDE = 4
"""Colours of SAEs and transcoders, which follow each other."""
DEPTH = 100.0
"""Errors that are smaller than the decomposition's by more than this are drawn at the lower edge."""

AnyPoint = BaselinePoint | ReplacementPoint


@dataclass(frozen=True)
class Curve:
    """``path``: of SVG, in a box of 1000 by 1000; empty for a single point. ``dots``: percents from the left and the
    top, and what each says under the pointer. ``kind``: the class that gives it its colour."""

    name: str
    kind: str
    path: str
    dots: list[tuple[float, float, str]]


@dataclass(frozen=True)
class Plot:
    """``floor``: the error below which a point is drawn at the lower edge; None if all are above it."""

    axes: Scatter
    curves: list[Curve]
    floor: float | None


def baselines_page(pages: Pages, opened: Opened) -> str:
    """What is kept for the harvest's step, or the command that measures it."""
    step = opened.harvest.plan.step
    try:
        kept = find_comparison(opened.run_folder, step)
    except UserError as error:
        return pages.render("baselines.html", opened=opened, step=step, found=None, wrong=str(error))
    if kept is None:
        return pages.render("baselines.html", opened=opened, step=step, found=None, wrong="")
    found = kept.comparison
    replaced = [(_said(r.name, p), p) for r in found.replacements for p in r.at(found.own.l0)]
    return pages.render(
        "baselines.html", opened=opened, step=step, found=found, data=kept.data, wrong="",
        what="KL" if found.of_text else "mean squared error", sentence=verdict(found), plot=plot(found),
        with_k_on=with_k_on(found.choice),
        rows=[(title(p), p) for p in found.at_own_l0], replaced=replaced,
        captions=caption(found.replacements, found.n_sites, found.own.l0),
        width=WIDTH, height=HEIGHT,
    )  # fmt: skip


def plot(found: Comparison) -> Plot:
    """Errors with the masks as they are, by L0."""
    named: list[tuple[str, str, list[AnyPoint]]] = [
        (kind, f"baseline{n}", [p for p in found.points if p.parts == kind]) for n, kind in enumerate(BASELINES)
    ]
    named += [(r.name, f"beside{n % BESIDE}", list(r.points)) for n, r in enumerate(found.replacements)]
    with_k_on = WITH_K_ON[found.choice]
    for chosen, kind, which in ((with_k_on, "largest", with_k_on), (ON_OFF, "above", "λ above τ")):
        named.append((f"{OWN}, {which}", kind, [p for p in found.points if p.parts == OWN and p.chosen == chosen]))
    named.append((f"decomposition, {LAMBDA}", "own", [found.own]))
    # A point without any part on has no place on a logarithmic axis.
    drawn = [(name, kind, sorted((p for p in points if p.l0 > 0), key=lambda p: p.l0)) for name, kind, points in named]
    drawn = [entry for entry in drawn if entry[2]]
    errors = [p.error for *_, points in drawn for p in points]
    floor = max(found.own.error, 1e-12) / DEPTH
    axes = Scatter(axis([p.l0 for *_, points in drawn for p in points]), axis([max(error, floor) for error in errors]))
    curves = [_curve(name, kind, points, axes, floor) for name, kind, points in drawn]
    return Plot(axes, curves, floor if min(errors) < floor else None)


def _said(name: str, p: AnyPoint) -> str:
    """What a point is called. ``name``: of its curve."""
    if isinstance(p, BaselinePoint):
        return title(p)
    return f"{name}, {number(p.number)} largest" if p.chosen == LARGEST else name


def _curve(name: str, kind: str, points: Sequence[AnyPoint], axes: Scatter, floor: float) -> Curve:
    places = [(p.l0, max(p.error, floor)) for p in points]
    said = [f"{_said(name, p)}, L0 {number(p.l0)}: {number(max(p.error, 0.0))}" for p in points]
    dots = [(*axes.place(*place), text) for place, text in zip(places, said, strict=True)]
    return Curve(name, kind, axes.path(places) if len(dots) > 1 else "", dots)
