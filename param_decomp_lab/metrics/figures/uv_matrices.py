"""Draws the components of a toy model: their vectors and, for TMS, how these compare with the target's."""

from collections.abc import Mapping

import numpy as np
from jaxtyping import Float, Integer
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from param_decomp_lab.metrics.figures.heat_maps import (
    DPI,
    FONT_SIZE,
    draw_heat_map,
    heat_map_sizes,
    label_columns,
    stack_grid,
    style_bar,
)  # fmt: skip
from param_decomp_lab.metrics.figures.style import BLUE, GRID, INK, QUIET, VERMILION, style_axes, title_axes
from param_decomp_lab.metrics.ground_truth import BestVersions, best_versions, mmcs_and_ml2r

SIGNED = LinearSegmentedColormap.from_list("signed", ["#00405f", BLUE, "#ffffff", VERMILION, "#7a3000"], N=1001)


def uv_matrices(
    factors: Mapping[str, tuple[Float[np.ndarray, "d_in C"], Float[np.ndarray, "C d_out"]]],
    orders: Mapping[str, Integer[np.ndarray, "shown"]],
) -> Figure:
    """Draws heat maps of V and, below it, the transpose of U, so that a component is the same column in both.

    ``factors``: site name -> (V, U). ``orders``: site name -> the components to draw, in order; it need not have all
    components, and the panel says how many are left out. To draw those of `permuted_ci`: ``order[:n_shown(λ, order)]``.
    """
    matrices = {name: (V[:, orders[name]], U[orders[name]].T) for name, (V, U) in factors.items()}
    sizes = [heat_map_sizes([len(V), len(U)], V.shape[1]) for V, U in matrices.values()]
    figure, stacks = stack_grid(
        list(factors),
        sizes,
        "Vectors of the components",
        "V (inputs x components) over the transpose of U (outputs x components). Every map has its own colour scale.",
        beside=60,
        gap=34,
    )
    for name, stack, pair in zip(factors, stacks, sizes, strict=True):
        order, (V, U) = orders[name], factors[name]
        left_out = V.shape[1] - len(order)
        above, below = stack
        for axes, matrix, size in zip(stack, matrices[name], pair, strict=True):
            top = float(np.abs(matrix).max(initial=0)) or 1.0
            image = draw_heat_map(axes, matrix, size, SIGNED, -top, top)
            place, pixel = axes.get_position(), 1 / DPI / figure.get_figwidth()
            bar = figure.add_axes((place.x1 + 8 * pixel, place.y0, 8 * pixel, place.height))
            figure.colorbar(image, cax=bar, ticks=[-top, 0, top], format=lambda tick, _: f"{tick:.2g}")
            style_bar(bar)
            # Inside the bar's ends: the line of detail is just above.
            lowest, _, highest = bar.get_yticklabels()
            lowest.set_verticalalignment("bottom")
            highest.set_verticalalignment("top")
        above.tick_params(bottom=False, labelbottom=False)
        label_columns(below, order, pair[1])
        for axes, size, rows in ((above, pair[0], "V: input"), (below, pair[1], "Uᵀ: output")):
            several = f", strongest of {size.rows_per_cell}" if size.rows_per_cell > 1 else ""
            axes.set_ylabel(rows + several, fontsize=FONT_SIZE, color=QUIET, labelpad=1)
        detail = f"{V.shape[0]} inputs · {U.shape[1]} outputs · C = {V.shape[1]}"
        title_axes(above, name, detail + (f", {left_out} not drawn" if left_out else ""), FONT_SIZE + 0.5)
    return figure


def tms_geometry(W: Float[np.ndarray, "n h"], V: Float[np.ndarray, "n C"], U: Float[np.ndarray, "C h"]) -> Figure:
    """Draws each feature's vector ``W[j, :]`` of a TMS's ``linear1`` and its best component's version of it (section
    11).

    With h = 2, both are drawn in the plane, labelled with feature and component; otherwise, the figure shows the cosine
    of the two and the ratio of their lengths for each feature.
    """
    best = best_versions(W, V, U)
    mmcs, ml2r = mmcs_and_ml2r(W, V, U)
    plane = W.shape[1] == 2
    figure = Figure(figsize=(5.2, 5.6) if plane else (6.4, 4.2), dpi=DPI, facecolor="white")
    FigureCanvasAgg(figure)
    width, height = figure.get_size_inches()
    figure.text(
        0.15 / width,
        1 - 0.16 / height,
        "Features and their components",
        fontsize=12,
        fontweight="bold",
        color=INK,
        va="top",
    )
    figure.text(
        0.15 / width,
        1 - 0.42 / height,
        f"MMCS {mmcs:.3f} · ML2R {ml2r:.3f} · {W.shape[0]} features in {W.shape[1]} dimensions · C = {V.shape[1]}",
        fontsize=8.5,
        color=QUIET,
        va="top",
    )
    if plane:
        strength = np.where(best.component >= 0, V[np.arange(len(V)), best.component], 0)
        _draw_plane(figure, W, strength[:, None] * U[best.component], best.component)
    else:
        _draw_dots(figure, best)
    return figure


def _draw_plane(
    figure: Figure,
    W: Float[np.ndarray, "n 2"],
    versions: Float[np.ndarray, "n 2"],
    components: Integer[np.ndarray, "n"],
) -> None:
    """Draws arrows from the origin. Beside the longer one of a pair is the number of the feature, and below it the
    component's.
    """
    axes = figure.add_axes((0.09, 0.06, 0.88, 0.78))
    style_axes(axes, FONT_SIZE - 0.5)
    axes.grid(True, color=GRID, linewidth=0.7)
    reach = 1.25 * max(float(np.abs(W).max()), float(np.abs(versions).max()))
    axes.set(xlim=(-reach, reach), ylim=(-reach, reach), aspect="equal")
    for vectors, colour, width, label in (
        (W, "#c3cad1", 8.0, "feature: W[j]"),
        (versions, BLUE, 2.4, "its best component c: V[j, c] U[c]"),
    ):
        x, y = vectors.T
        origin = np.zeros(len(x))
        axes.quiver(
            origin,
            origin,
            x,
            y,
            angles="xy",
            scale_units="xy",
            scale=1,
            units="dots",
            width=width,
            headwidth=3.2,
            headlength=3.6,
            headaxislength=3.4,
            color=colour,
            label=label,
        )
    for j, (w, version, component) in enumerate(zip(W, versions, components, strict=True)):
        tip = max(w, version, key=lambda vector: float(np.hypot(*vector)))
        away = tip / max(float(np.hypot(*tip)), 1e-30) * 15
        for text, below, points, colour, weight in (
            (str(j), 0, 9, INK, "bold"),
            (f"c {component}" if component >= 0 else "no c", 9.5, 7, BLUE, "normal"),
        ):
            axes.annotate(
                text,
                tip,
                away - (0, below - 4),
                textcoords="offset points",
                ha="center",
                va="center",
                fontsize=points,
                fontweight=weight,
                color=colour,
            )
    axes.legend(
        loc="lower left",
        bbox_to_anchor=(0, 1),
        borderaxespad=0.2,
        ncols=2,
        fontsize=FONT_SIZE,
        frameon=False,
        handlelength=1.2,
        labelcolor=INK,
    )


def _draw_dots(figure: Figure, best: BestVersions) -> None:
    """Draws a dot for each feature; the three farthest from 1 have labels."""
    features = np.arange(len(best.cosine))
    for place, values, name in (
        ((0.09, 0.47, 0.88, 0.3), best.cosine, "Cosine of W[j] and its best component's version"),
        ((0.09, 0.1, 0.88, 0.24), best.norm_ratio, "Length of that version over the length of W[j]"),
    ):
        axes = figure.add_axes(place)
        style_axes(axes, FONT_SIZE - 0.5)
        axes.axhline(1, color=QUIET, linewidth=0.8)
        axes.scatter(features, values, s=14, color=BLUE, linewidths=0, zorder=3)
        off = np.abs(np.nan_to_num(values, nan=1.0) - 1)
        span = max(1.15 * float(off.max()), 0.02)
        axes.set_ylim(1 - span, 1 + (span if (values > 1.001).any() else 0.15 * span))
        axes.set_xlim(-1, len(features))
        axes.xaxis.set_major_locator(MaxNLocator(10, integer=True))
        axes.locator_params(axis="y", nbins=5)
        for j in np.argsort(-off, kind="stable")[:3]:
            if off[j] > 0.01:
                axes.annotate(
                    str(j),
                    (j, values[j]),
                    (4, 0),
                    textcoords="offset points",
                    va="center",
                    fontsize=FONT_SIZE - 0.5,
                    color=VERMILION,
                )
        title_axes(axes, name, f"from {np.nanmin(values):.3f} to {np.nanmax(values):.3f}", FONT_SIZE + 0.5)
    axes.set_xlabel("feature", fontsize=FONT_SIZE, color=QUIET, labelpad=1)
