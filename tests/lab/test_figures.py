"""The figures draw what they are given, for one site and for 224."""

from pathlib import Path

import numpy as np
import pytest
from matplotlib import rcParams
from matplotlib.figure import Figure

from param_decomp_lab.figures import activation_density, ci_histograms, figure_path, mean_ci_per_component, save_figure
from param_decomp_lab.figures.grid import n_columns

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
