"""Draws the figure of a comparison: error against the number of parts that are on."""

import textwrap
from itertools import cycle

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from param_decomp_lab.baselines.parts import BASELINES
from param_decomp_lab.baselines.result import LAMBDA, ON_OFF, OWN, WITH_K_ON, BaselinePoint, Comparison, caption
from param_decomp_lab.metrics.figures.style import BLUE, QUIET, VERMILION
from param_decomp_lab.ui.numbers import number

COLOURS = {"neurons": "#009e73", "singular vectors": "#cc79a7", "weighted singular vectors": "#e69f00",
           "random rotation": QUIET}  # fmt: skip
BESIDE = ("#7a5bb5", "#8c564b", "#56b4e9", "#b5a100")
"""Colours of SAEs and transcoders, in order."""
FLOOR = 1e-6
CAPTION_CHARACTERS = 190
"""The most characters in a line below the figure."""


def comparison_figure(found: Comparison) -> Figure:
    """Returns the figure. Left: error without attack by L0, and that of SAEs and transcoders by their number of
    latents, or bars if the baselines were measured only at the decomposition's L0. Right: the error under attack, at
    the decomposition's L0. Below: what the SAEs and transcoders replace.
    """
    below = [
        line
        for text in caption(found.replacements, found.n_sites, found.own.l0)
        for line in textwrap.wrap(text, CAPTION_CHARACTERS)
    ]
    figure = Figure(figsize=(10, 4.2 + 0.15 * len(below)), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    what = "KL from the target, nats" if found.of_text else "mean squared error"
    if found.matched_only:
        _draw_bars(left, found, what)
    else:
        _draw_by_l0(left, found, what)
    steps = (0, *found.lengths)
    for point in _shown(found):
        label = point.parts if point.chosen == LAMBDA else f"{point.parts}, {number(point.number)} parts"
        right.plot(
            steps, [max(x, FLOOR) for x in (point.random, *point.attacked)], ".-", color=_colour(point), label=label
        )
    right.set(yscale="log", xticks=steps, xlabel="steps of the attack (0: at random)")
    right.legend(fontsize=7, frameon=False)
    left.set_title(f"parts of baselines chosen by {found.choice}", loc="left", fontsize=8)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8)
    if below:
        figure.supxlabel(plain("\n".join(below)), x=0.01, ha="left", fontsize=7, color=QUIET)
    return figure


def _shown(found: Comparison) -> list[BaselinePoint]:
    """Returns the points at the decomposition's L0, without the one whose parts with λ above 0 are on."""
    return [p for p in found.at_own_l0 if p.chosen != ON_OFF]


def _colour(point: BaselinePoint) -> str:
    if point.parts != OWN:
        return COLOURS[point.parts]
    return VERMILION if point.chosen == LAMBDA else BLUE


def _draw_bars(axes: Axes, found: Comparison, what: str) -> None:
    """Draws bars: the decomposition with λ as masks, then with parts chosen by gradient, then the baselines."""
    rows = []
    for p in _shown(found):
        number_on = f"L0 {number(p.l0)}" if p.chosen == LAMBDA else f"{number(p.number)} parts"
        rows.append((f"{p.parts}, {number_on}", p.error, _colour(p)))
    for r, colour in zip(found.replacements, cycle(BESIDE)):
        rows += [(f"{plain(r.name)}, {p.l0:.3g} latents", p.error, colour) for p in r.points]
    labels, errors, colours = zip(*rows, strict=True)
    bars = axes.barh(labels, [max(error, 0.0) for error in errors], color=colours)
    axes.bar_label(bars, [number(max(error, 0.0)) for error in errors], padding=4, fontsize=8)
    axes.invert_yaxis()
    axes.set(xlabel=what)
    axes.margins(x=0.12)


def _draw_by_l0(axes: Axes, found: Comparison, what: str) -> None:
    for kind in BASELINES:
        points = sorted((p for p in found.points if p.parts == kind), key=lambda p: p.l0)
        axes.plot([p.l0 for p in points], [max(p.error, FLOOR) for p in points], ".-", color=COLOURS[kind], label=kind)
    with_k_on = WITH_K_ON[found.choice]
    for chosen, style, which in ((with_k_on, ".-", with_k_on), (ON_OFF, "s--", "λ above τ")):
        label = f"{OWN}, {which}"
        points = sorted((p for p in found.points if p.parts == OWN and p.chosen == chosen), key=lambda p: p.l0)
        axes.plot([p.l0 for p in points], [max(p.error, FLOOR) for p in points], style, color=BLUE, ms=4, label=label)
    # Under the others: the run's other points may lie near it.
    own = max(found.own.error, FLOOR)
    axes.plot(found.own.l0, own, "*", color=VERMILION, ms=14, zorder=1.5, label="decomposition, λ as masks")
    for replacement, colour in zip(found.replacements, cycle(BESIDE)):
        label, ladder = plain(replacement.name), replacement.ladder.values()
        axes.plot([p.l0 for p in ladder], [max(p.error, FLOOR) for p in ladder], ".:", color=colour)
        active = replacement.active
        axes.plot(active.l0, max(active.error, FLOOR), ":", marker="D", color=colour, ms=5, label=label)
    parts = "parts on, a site and position (L0)"
    xlabel = f"{parts}; latents of an SAE or transcoder" if found.replacements else parts
    axes.set(xscale="log", yscale="log", xlabel=xlabel, ylabel=what)
    axes.legend(fontsize=7, frameon=False)


def plain(text: str) -> str:
    """Escapes ``text`` for Matplotlib, where a dollar sign would begin a formula."""
    return text.replace("$", r"\$")
