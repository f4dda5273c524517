"""The figures draw what they are given, for one site and for 224."""

from pathlib import Path

import numpy as np
import pytest
from matplotlib import rcParams
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from param_decomp_lab.metrics.figures import (
    activation_density,
    active_per_position,
    ci_heat_map,
    ci_histograms,
    figure_path,
    mean_ci_per_component,
    n_shown,
    permuted_ci,
    save_figure,
    tms_geometry,
    uv_matrices,
)  # fmt: skip
from param_decomp_lab.metrics.figures.grid import n_columns
from param_decomp_lab.metrics.figures.heat_maps import MAX_HEIGHT, MAX_WIDTH, heat_map_sizes, strongest
from param_decomp_lab.metrics.ground_truth import dense_columns, match_components
from param_decomp_lab.report.figure_files import captions

EDGES = np.linspace(0, 1, 51)
ATTENTION = [f"self_attn.{kind}_proj" for kind in "qkvo"]
MLP = ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]


def names(layers: int, kinds: list[str]) -> list[str]:
    return [f"layers.{layer}.{kind}" for layer in range(layers) for kind in kinds]


def figures(sites: list[str], C: int = 160) -> dict[str, Figure]:
    rng = np.random.default_rng(0)
    live = C // 5
    mean = np.concatenate(
        [np.exp(rng.normal(-3, 1.2, live)).clip(0, 1), np.exp(rng.normal(-12, 1, C - live - 9)), np.zeros(9)]
    )
    counts = np.histogram(np.concatenate([np.zeros(90_000), rng.beta(0.3, 0.3, 6000)]), EDGES)[0]
    return {
        "ci_histograms": ci_histograms(dict.fromkeys(sites, counts), EDGES),
        "mean_ci_per_component": mean_ci_per_component(dict.fromkeys(sites, mean)),
        "activation_density": activation_density(dict.fromkeys(sites, np.where(mean > 1e-4, mean, 0))),
    }


def texts(figure: Figure) -> list[str]:
    return [text.get_text() for axes in figure.axes for text in axes.texts]


@pytest.mark.parametrize("sites", [["linear1"], names(2, MLP), [f"site{i}" for i in range(7)]])
def test_every_site_has_its_panels_and_a_png(sites: list[str], tmp_path: Path) -> None:
    before = dict(rcParams)
    for name, figure in figures(sites).items():
        assert len(figure.axes) == len(sites) * (2 if name == "mean_ci_per_component" else 1)
        assert set(sites) <= set(texts(figure))
        path = figure_path(tmp_path, name, 100)
        save_figure(figure, path)
        assert path == tmp_path / "figures" / f"{name}_100.png"
        assert path.read_bytes().startswith(b"\x89PNG")
    assert len(list((tmp_path / "figures").iterdir())) == 3, "nothing unfinished is left"
    assert dict(rcParams) == before


@pytest.mark.slow
def test_224_sites_keep_a_layer_to_a_row() -> None:
    sites = names(32, ATTENTION + MLP)
    assert n_columns(sites) == 7
    figure = ci_histograms(dict.fromkeys(sites, np.ones(50, dtype=int)), EDGES)
    assert len(figure.axes) == 224
    width, height = figure.get_size_inches()
    assert width < 16
    assert height < 60


@pytest.mark.parametrize(
    ("sites", "columns"), [(["linear1", "linear2"], 2), (names(2, MLP), 3), (names(32, MLP), 6), (["a"], 1)]
)
def test_columns(sites: list[str], columns: int) -> None:
    assert n_columns(sites) == columns


def test_titles_count_the_dead_and_the_living() -> None:
    densities = np.concatenate([np.zeros(130), np.full(30, 0.2)])
    assert "30 alive · 130 dead · C = 160" in texts(activation_density({"layers.2.mlp.gate_proj": densities}))
    means = np.concatenate([np.zeros(100), np.full(20, 0.2), np.full(40, 0.01)])
    shown = texts(mean_ci_per_component({"layers.2.mlp.gate_proj": means}))
    assert "20 above 0.1 · C = 160" in shown
    assert "60 above 0.001 · 100 at 0" in shown


@pytest.mark.parametrize("values", [np.zeros(8), np.ones(8), np.full(8, 1e-12), np.array([0.5])])
def test_extremes_can_be_drawn(values: np.ndarray, tmp_path: Path) -> None:
    save_figure(activation_density({"s": values}), tmp_path / "a.png")
    save_figure(mean_ci_per_component({"s": values}), tmp_path / "b.png")
    save_figure(ci_histograms({"s": np.zeros(50, dtype=np.int64)}, EDGES), tmp_path / "c.png")


def test_a_failed_save_leaves_the_old_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.png"
    path.write_bytes(b"old")
    figure = ci_histograms({"s": np.ones(50, dtype=int)}, EDGES)

    def half(target: Path, **_: object) -> None:
        Path(target).write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(figure, "savefig", half)
    with pytest.raises(OSError, match="disk full"):
        save_figure(figure, path)
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["x.png"]


def heat_map(sites: list[str], tokens: list[list[str]] | None, n: int = 40) -> Figure:
    lam = np.random.default_rng(0).random((2, 4, n)) < 0.3
    return ci_heat_map(dict.fromkeys(sites, (np.arange(n) * 100, lam.astype(float))), tokens)


def test_tokens_stand_beside_the_leftmost_maps(tmp_path: Path) -> None:
    """Also such as would be read as a formula, are too long, or are not in the font."""
    tokens = [["$a", "b$", "漢字", "unbelievably"], ["\\frac", "}", "", "é"]]
    figure = heat_map(names(2, MLP), tokens)
    *maps, _ = figure.axes
    left = [[label.get_text() for label in axes.get_yticklabels()] for axes in (maps[0], maps[3])]
    assert left == [["$a", "b$", "□□", "unbeliev…", "\\frac", "}", "", "é"]] * 2
    assert all(axes.yaxis.get_tick_params()["labelleft"] is False for axes in (maps[1], maps[2], maps[4]))
    save_figure(figure, tmp_path / "a.png")


@pytest.mark.parametrize("sites", [["linear1"], names(11, MLP)])
def test_positions_stand_where_tokens_do_not(sites: list[str], tmp_path: Path) -> None:
    figure = heat_map(sites, None if len(sites) == 1 else [["a"] * 4] * 2, n=700)
    assert next(label.get_text() for label in figure.axes[0].get_yticklabels()) == "0"
    assert figure.axes[0].get_ylabel() == "position"
    assert "strongest of" in figure.axes[0].get_xlabel()
    save_figure(figure, tmp_path / "a.png")


def test_active_components_at_each_position(tmp_path: Path) -> None:
    for counts in (np.arange(30.0).reshape(10, 3), np.zeros((1, 3))):
        figure = active_per_position(counts, (0.0, 0.01, 0.1))
        assert [list(line.get_ydata()) for line in figure.axes[0].lines] == [list(x) for x in counts.T]
        save_figure(figure, tmp_path / "a.png")


# The toys' figures


def identity(features: int, C: int, *, extra: int = 0) -> np.ndarray:
    """λ of an identity recovery; ``extra`` further components are a little on for the last feature."""
    columns = np.random.default_rng(C).permutation(C)
    matrix = np.full((features, C), 0.02)
    matrix[np.arange(features), columns[:features]] = 1.0
    matrix[-1, columns[features : features + extra]] = 0.3
    return matrix


def drawn(axes: Axes) -> np.ndarray:
    (image,) = axes.images
    return np.asarray(image.get_array())


@pytest.mark.parametrize(
    ("sites", "features", "C"),
    [(["linear1", "linear2"], 5, 20), (["linear1", "linear2"], 40, 200), (names(3, ["mlp_in", "mlp_out"]), 102, 500)],
)
def test_toy_heat_maps_show_the_matching(sites: list[str], features: int, C: int, tmp_path: Path) -> None:
    before = dict(rcParams)
    importances = dict.fromkeys(sites, identity(features, C, extra=3))
    orders = {site: match_components(matrix).columns for site, matrix in importances.items()}
    figure = permuted_ci(importances, orders, {sites[0]: "identity: error 3"})
    panels = figure.axes[: len(sites)]
    assert len(figure.axes) == len(sites) + 1, "and one colour bar"
    for axes, site in zip(panels, sites, strict=True):
        assert site in texts(figure)
        np.testing.assert_array_equal(drawn(axes)[:, :features] > 0.5, np.eye(features, dtype=bool))
        assert drawn(axes).shape == (features, features + 3)
    cut = f"{C - features - 3} further columns below 0.1"
    assert texts(figure).count(f"identity: error 3 · {cut}") == 1
    assert texts(figure).count(cut) == len(sites) - 1
    save_figure(figure, figure_path(tmp_path, "permuted_ci", 1))
    assert dict(rcParams) == before


def test_columns_are_cut_at_the_last_that_is_on() -> None:
    order = np.arange(20)
    matrix = np.zeros((5, 20))
    assert n_shown(matrix, order) == 5, "as many as features, to keep the diagonal"
    matrix[0, 7] = 0.1
    assert n_shown(matrix, order) == 5
    matrix[0, 7] = 0.11
    assert n_shown(matrix, order) == 8
    assert n_shown(matrix, order[::-1]) == 13
    assert n_shown(matrix[:, :3], order[:3]) == 3
    figure = permuted_ci({"s": np.eye(4)}, {"s": np.arange(4)})
    assert not any("further" in text for text in texts(figure))


def test_vectors_are_drawn_in_the_given_order(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    V, U, order = rng.normal(size=(5, 20)), rng.normal(size=(20, 2)), np.array([7, 3, 11])
    figure = uv_matrices({"linear1": (V, U), "linear2": (U.T, V.T)}, {"linear1": order, "linear2": np.arange(20)})
    above, below, *_ = figure.axes
    np.testing.assert_array_equal(drawn(above), V[:, [7, 3, 11]])
    np.testing.assert_array_equal(drawn(below), U[[7, 3, 11]].T)
    assert [label.get_text() for label in below.get_xticklabels()] == ["7", "3", "11"]
    low, high = above.images[0].get_clim()
    assert -low == high == np.abs(V[:, order]).max()
    assert "5 inputs · 2 outputs · C = 20, 17 not drawn" in texts(figure)
    assert "2 inputs · 5 outputs · C = 20" in texts(figure)
    assert len(figure.axes) == 8, "two maps a site, a colour bar each"
    save_figure(figure, tmp_path / "uv.png")
    save_figure(uv_matrices({"s": (np.zeros((1, 1)), np.zeros((1, 1)))}, {"s": np.arange(1)}), tmp_path / "zero.png")


def test_cells_are_whole_pixels_and_lose_nothing() -> None:
    for rows, columns in (([5], 5), ([5, 2], 20), ([40, 10], 200), ([102], 500), ([1000, 17], 100), ([3], 2000)):
        for n, size in zip(rows, heat_map_sizes(rows, columns), strict=True):
            assert 0 < size.width <= MAX_WIDTH
            assert 0 < size.height <= MAX_HEIGHT
            assert size.width % -(-columns // size.columns_per_cell) == 0
            assert size.height % -(-n // size.rows_per_cell) == 0
    values = np.zeros((1001, 2))
    values[1000, 0], values[5, 1], values[6, 1] = 0.5, 1.0, -2.0
    cells = strongest(values, 4)
    assert cells.shape == (251, 2)
    assert cells[250, 0] == 0.5
    assert cells[1].tolist() == [0, -2.0]
    assert np.count_nonzero(cells) == 2


def test_geometry_of_a_tms(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for h, n_axes in ((2, 1), (3, 2)):
        W = rng.normal(size=(5, h))
        order = np.array([2, 0, 3, 1, 4])
        V, U = np.eye(5)[:, order], 0.5 * W[order]
        figure = tms_geometry(W, V, U)
        assert len(figure.axes) == n_axes
        assert any("MMCS 1.000 · ML2R 0.500" in text.get_text() for text in figure.texts)
        save_figure(figure, tmp_path / f"{h}.png")
        if h == 2:
            component = np.argsort(order)
            assert texts(figure) == [text for j in range(5) for text in (str(j), f"c {component[j]}")]
            features, versions = (np.stack([arrows.U, arrows.V], 1) for arrows in figure.axes[0].collections)
            np.testing.assert_allclose(features, W)
            np.testing.assert_allclose(versions, 0.5 * W)
        else:
            ratios = figure.axes[1].collections[0].get_offsets()
            np.testing.assert_allclose(ratios, np.stack([np.arange(5), np.full(5, 0.5)], 1))


def test_toy_figures_are_known_to_the_report() -> None:
    """Each carries its own title, which is the report's caption."""
    matrix = identity(5, 20)
    orders = {"s": dense_columns(matrix)}
    W = np.random.default_rng(0).normal(size=(5, 2))
    for name, figure in {
        "permuted_ci": permuted_ci({"s": matrix}, orders),
        "uv_matrices": uv_matrices({"s": (matrix, matrix.T)}, orders),
        "tms_geometry": tms_geometry(W, np.eye(5), W),
    }.items():
        assert figure.texts[0].get_text() == captions()[name]
