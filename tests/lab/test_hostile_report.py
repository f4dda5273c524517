"""`pd report` of run folders that are damaged, or made to do harm."""

import base64
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from param_decomp_lab.errors import CannotWrite, UserError
from param_decomp_lab.report import write, write_report
from param_decomp_lab.ui.charts import Series, line_chart
from tests.lab.test_report import configuration, examples, metric_rows, read_page, site_names, write_run

SITES = site_names(range(1))
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", SITES, figures=False, n_components=2)


def aliases() -> str:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    for n in range(1, 9):
        lines.append(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]")
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.yaml", b"run_name: \xff", "not UTF-8 text"),
        ("config.yaml", b"a: " + b"[" * 100_000, "nested more than 100 levels"),
        ("config.yaml", aliases().encode(), "counting what aliases"),
        ("environment.json", b'{"a": "\xff"}', "not UTF-8 text"),
        ("environment.json", b"[" * 100_000, "nested more than 100 levels"),
        ("environment.json", b'{"a": 1e999}', "not finite"),
        ("environment.json", b"[]", "should be an object"),
        ("examples.json", b'{"sites": "\xff"}', "not UTF-8 text"),
        ("examples.json", b"[" * 100_000, "not in the format"),
        ("examples.json", b'{"sites": {"a": {"C": 1e999, "components": []}}}', "not in the format"),
    ],
)
def test_one_message_for_a_broken_file(run: Path, name: str, content: bytes, message: str) -> None:
    (run / name).write_bytes(content)
    with pytest.raises(UserError, match=message) as raised:
        write_report(run)
    assert str(run / name) in str(raised.value)
    assert not (run / "report.html").exists()


def test_words_where_numbers_are_due(run: Path) -> None:
    config = configuration()
    config |= {"run_id": 5, "out_dir": 7}
    method = config["torch"]["pd"]
    method["steps"] = "many"
    method["decomposition_targets"][0]["C"] = "wide"
    method["loss_metrics"][0]["coeff"] = "heavy"
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    text = read_page(write_report(run)).content()
    assert all(word in text for word in ("many", "wide", "heavy"))


def test_halves_of_surrogate_pairs(run: Path) -> None:
    content = examples(SITES, 160, 1)
    content["sites"]["half \ud800"] = next(iter(content["sites"].values()))
    (run / "examples.json").write_text(json.dumps(content))
    assert "half \N{REPLACEMENT CHARACTER}" in write_report(run).read_text(encoding="utf-8")


@pytest.mark.parametrize("values", [(5e-324, 1e308), (-1e308, 1e308), (0.0, 5e-324)])
@pytest.mark.parametrize("from_zero", [False, True])
def test_charts_of_numbers_at_the_ends_of_the_range(values: tuple[float, ...], from_zero: bool) -> None:
    chart = line_chart("t", {"t": Series((0, 1), values)}, ["red"], x_max=1, from_zero=from_zero)
    assert chart is not None
    assert "nan" not in chart.lines[0].path
    assert "inf" not in chart.lines[0].path
    assert all(-1 <= tick.at <= 101 for tick in chart.y_ticks)


@pytest.mark.parametrize("extreme", [5e-324, 1e308])
def test_a_page_of_extreme_numbers(run: Path, extreme: float) -> None:
    rows = metric_rows(SITES)
    for row in rows[1:]:
        row |= {key: extreme for key, value in row.items() if key != "step" and isinstance(value, float)}
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    read_page(write_report(run))


def a_link_elsewhere(figure: Path) -> None:
    figure.symlink_to(figure.parents[2] / "secret")


def a_dangling_link(figure: Path) -> None:
    figure.symlink_to("nowhere")


def a_large_file(figure: Path) -> None:
    with figure.open("wb") as file:
        file.truncate(1 << 40)


def a_folder(figure: Path) -> None:
    figure.mkdir()


@pytest.mark.parametrize("make", [a_link_elsewhere, a_dangling_link, os.mkfifo, a_large_file, a_folder])
@pytest.mark.parametrize("step", ["5", "2"])  # the newest, and an older one
def test_only_files_of_the_run_are_figures(run: Path, make: Callable[[Path], None], step: str) -> None:
    (run.parent / "secret").write_bytes(b"a private key")
    (run / "figures").mkdir()
    (run / "figures" / "plot_3.png").write_bytes(PNG)
    make(run / "figures" / f"plot_{step}.png")
    page = read_page(write_report(run))
    images = [attrs["src"] for tag, attrs in page.tags if tag == "img"]
    assert images == ["data:image/png;base64," + base64.b64encode(PNG).decode()]
    said = page.content()
    assert f"larger than 64 MiB): figures/plot_{step}.png." in said
    assert "a private key" not in said


@pytest.mark.parametrize(("number", "kind"), [(13, UserError), (28, CannotWrite), (30, CannotWrite)])
def test_a_page_that_cannot_be_written(
    run: Path, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[Exception]
) -> None:
    (run / "report.html").write_text("the old one")

    def fails(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(write, "write_whole", fails)
    with pytest.raises(kind, match=r"cannot write .*report\.html"):
        write_report(run)
    assert (run / "report.html").read_text() == "the old one"


@pytest.mark.parametrize("name", ["config.yaml", "metrics.jsonl", "environment.json", "examples.json"])
def test_only_files_of_the_run_are_read(run: Path, name: str) -> None:
    """A link out of the folder would put somebody's file into a page that is passed on."""
    (run.parent / "secret").write_text("private: key")
    (run / name).unlink(missing_ok=True)
    (run / name).symlink_to("../secret")
    with pytest.raises(UserError, match=f"{name} is a link to a file outside"):
        write_report(run)
