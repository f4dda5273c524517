"""The browser's page of baselines: what it shows of a comparison that was kept, and what it says of a damaged one."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from param_decomp_lab.baselines.figure import comparison_figure
from param_decomp_lab.baselines.kept import Kept, find_comparison, keep
from param_decomp_lab.baselines.parts import BASELINES
from param_decomp_lab.baselines.result import (
    ACTIVE,
    BY_GRADIENT,
    LAMBDA,
    LARGEST,
    ON_OFF,
    OWN,
    BaselinePoint,
    Comparison,
    Replacement,
    ReplacementPoint,
)
from param_decomp_lab.browse import baselines_page
from param_decomp_lab.browse.baselines_page import DEPTH, plot
from param_decomp_lab.browse.catalog import Catalog
from param_decomp_lab.browse.chosen import Chosen
from param_decomp_lab.browse.pages import Pages
from param_decomp_lab.errors import UserError
from param_decomp_lab.runs.folder import EVALUATIONS
from param_decomp_lab.runs.position_attack import PositionAttack, comparison_file, find_position_attack
from tests.lab.test_browse import LLAMA, MARKUP, base, client, only_harvest
from tests.lab.tiny_run import STEPS

OF_RUN = (
    BaselinePoint(OWN, LAMBDA, 0.0, 1.75, 0.02, 0.03, 0.01, (0.5, 0.75)),
    BaselinePoint(OWN, ON_OFF, 0.0, 1.75, 0.015, 0.025, 0.008, (0.4, 0.6)),
    BaselinePoint(OWN, ON_OFF, 0.5, 1.0, 0.05, 0.06, 0.02),
    BaselinePoint(OWN, ON_OFF, 0.9, 0.0, 0.8, 0.9, 0.3),  # nothing is on
    BaselinePoint(OWN, LARGEST, 1.0, 0.9, 0.06, 0.07, 0.03),
)
OF_BASELINES = tuple(
    BaselinePoint(name, LARGEST, k, k, 0.25 / (1 + n) / k**8, 0.1, 0.1 / (1 + n), (2 / k, 4 / k) if k < 4 else ())
    for n, name in enumerate(BASELINES)
    for k in (1.0, 2.0, 4.0)
)
SAE = Replacement(
    "SAE <b>a</b>", "saes/a", "SAE", "topk", "blocks.1.hook_resid_post", "blocks.1.hook_resid_post", 64, "a model",
    True, (),
    (ReplacementPoint(ACTIVE, 0.0, 7.5, 0.125, 0.1), ReplacementPoint(LARGEST, 1.0, 1.0, 0.775, 0.6),
     ReplacementPoint(LARGEST, 2.0, 2.0, 0.375, 0.2)),
)  # fmt: skip


def comparison(**changes: Any) -> Comparison:
    return replace(Comparison(LLAMA, STEPS, True, 128, (5, 10), (*OF_RUN, *OF_BASELINES), 4, (SAE,)), **changes)


@pytest.fixture
def mine(harvested: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(harvested, tmp_path / "runs", ignore=shutil.ignore_patterns("ckpts")))


def page_of(folder: Path) -> str:
    with client(folder) as browser:
        page = browser.get(f"{base(folder)}/baselines")
    assert page.status_code == 200
    assert " style=" not in page.text
    return page.text


def text_of(page: str) -> str:
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", page)).split())


def test_nobody_has_measured_it(mine: Path) -> None:
    assert f"pd eval {mine / LLAMA} --baselines --step {STEPS}" in text_of(page_of(mine))


def test_what_was_measured(mine: Path) -> None:
    file = comparison_file(mine / LLAMA, STEPS)
    file.parent.mkdir(exist_ok=True)
    keep(file, Kept(comparison(), f"rows {MARKUP}"))
    assert find_comparison(mine / LLAMA, STEPS) == Kept(comparison(), f"rows {MARKUP}")
    assert find_position_attack(mine / LLAMA) == PositionAttack(STEPS, 10, 0.75)
    with client(mine) as browser:
        first, runs = (text_of(browser.get(page).text) for page in (base(mine), "/"))
    assert "Attack, one mask for the batch" in first
    assert "Attack, a mask for each position 0.750 10 steps" in first
    assert "attack, a mask for each position, beside baselines 0.750" in runs
    page = page_of(mine)
    assert not any(markup in page for markup in (MARKUP, "<b>a"))
    said = text_of(page)
    # A quarter of the rows has 1 part on, the others 2.
    best = 0.25 * 0.25 / len(BASELINES) * (1 + 3 / 2**8)
    assert (
        f"At L0 1.75 the decomposition's KL is {0.02 / best:.2f} times that of the best baseline ({BASELINES[-1]}, "
        "1.75 parts chosen by activation)" in said
    )
    for row in (
        "λ as masks 1.75 0.0200 0.0300 0.0100 0.500 0.750",
        "λ above 0 on 1.75 0.0150 0.0250 0.00800 0.400 0.600",
        f"{BASELINES[-1]} 1.75 {best:#.3g} 0.100 0.0250 1.25 2.50",
        "1 0.0600 0.250",
        "SAE <b>a</b> 7.50 0.125 0.100 – – –",
        "SAE <b>a</b>, 1.75 largest 1.75 0.475 0.300 – – –",
        "64 latents, trained on a model with a BOS token before each row",
    ):
        assert row in said, row
    # Points near the decomposition's own, which is drawn last, are seen through its ring.
    assert page.rindex('<g class="own">') > page.rindex('<g class="above">')
    style = (Path(baselines_page.__file__).parent / "browse.css").read_text()
    assert re.search(r"\.curves \.own circle \{ fill: none; stroke: currentColor", style)
    assert page.count("<circle") == len(OF_RUN) - 1 + len(OF_BASELINES) + len(SAE.points)


def test_a_comparison_of_another_step(mine: Path) -> None:
    """The card, the list of runs and the report say of which step it is, if the run is at another one."""
    file = comparison_file(mine / LLAMA, STEPS - 1)
    file.parent.mkdir(exist_ok=True)
    keep(file, Kept(comparison(step=STEPS - 1), "rows"))
    with client(mine) as browser:
        first, runs, report = (text_of(browser.get(page).text) for page in (base(mine), "/", f"{base(mine)}/report"))
        assert f", at step {STEPS - 1} compare it with" in first
        assert f"beside baselines at step {STEPS - 1} 0.750" in runs
        assert f", at step {STEPS - 1} compare it with" in report
        keep(comparison_file(mine / LLAMA, STEPS), Kept(comparison(), "rows"))
        first, report = (text_of(browser.get(page).text) for page in (base(mine), f"{base(mine)}/report"))
        assert re.search(r"10 steps(, [\d.]+\s*% of zero-masked)? compare it with", first)
        assert ", at step" not in report


def test_an_attack_of_one_step_that_finds_nothing(mine: Path) -> None:
    """A KL that rounding left below 0 is 0."""
    file = comparison_file(mine / LLAMA, STEPS)
    file.parent.mkdir(exist_ok=True)
    own = replace(OF_RUN[0], attacked=(-1e-9,))
    others = (replace(p, attacked=p.attacked[:1]) for p in (*OF_RUN[1:], *OF_BASELINES))
    keep(file, Kept(comparison(lengths=(1,), points=(own, *others)), "rows"))
    with client(mine) as browser:
        first, runs = (text_of(browser.get(page).text) for page in (base(mine), "/"))
    assert re.search(r"Attack, a mask for each position 0 1 step\b", first)
    assert re.search(r"beside baselines 0(?![.\d])", runs)


def test_a_copy_leads_to_no_baselines(mine: Path) -> None:
    """It has no page of them; the card stays."""
    file = comparison_file(mine / LLAMA, STEPS)
    file.parent.mkdir(exist_ok=True)
    keep(file, Kept(comparison(), "rows"))
    catalog = Catalog([mine])
    opened = catalog.harvest(LLAMA, only_harvest(mine).name)
    copy, whole = (Pages(catalog, "/static", only).harvest(opened, 1) for only in (Chosen({}, frozenset()), None))
    assert "compare it with the baselines’" in text_of(whole)
    for page in (copy, whole):
        assert "Attack, a mask for each position 0.750" in text_of(page)
        assert "≤ 1/10 of zero-masked" in text_of(page)
    assert "baselines" not in copy.lower()
    assert '<p class="rule"></p>' not in copy


def test_the_list_of_runs_follows_comparisons(mine: Path) -> None:
    """The first one, one of a later step, and one made again, while the browser runs."""
    with client(mine) as browser:

        def attack() -> str:
            found = re.search(r"beside baselines(?: at step \d+)? ([\d.]+)", text_of(browser.get("/").text))
            return found[1] if found else ""

        assert attack() == ""
        (mine / LLAMA / EVALUATIONS).mkdir(exist_ok=True)
        for step, error in ((STEPS - 1, 0.75), (STEPS, 0.25), (STEPS, 0.5)):
            own = replace(OF_RUN[0], attacked=(0.125, error))
            keep(comparison_file(mine / LLAMA, step), Kept(comparison(step=step, points=(own, *OF_RUN[1:])), "rows"))
            assert attack() == f"{error:.3f}"


def test_ratios_over_the_best_baseline() -> None:
    """Of each reading by the baseline that is best in it; NaN beside one without any error."""
    found = comparison()
    best = 0.25 * 0.25 / len(BASELINES) * (1 + 3 / 2**8)
    assert found.over_best(found.own) == pytest.approx({"error": 0.02 / best, "random": 0.4, "attack": 0.3})
    perfect = tuple(replace(p, error=0.0) for p in OF_BASELINES)
    without = comparison(points=(*OF_RUN, *perfect), lengths=())
    assert without.over_best(without.own) == pytest.approx({"error": float("nan"), "random": 0.4}, nan_ok=True)


def test_a_choice_by_gradient(mine: Path) -> None:
    """It is named wherever it counts. A file from before there was a choice has one by activation."""
    chosen = tuple(replace(p, chosen=BY_GRADIENT) for p in OF_BASELINES)
    own = (
        BaselinePoint(OWN, BY_GRADIENT, 1.0, 1.0, 0.0425, 0.08, 0.025, (0.65, 1.1)),
        BaselinePoint(OWN, BY_GRADIENT, 2.0, 2.0, 0.0125, 0.02, 0.005, (0.25, 0.5)),
    )
    by_gradient = comparison(points=(*OF_RUN[:-1], *own, *chosen), choice="gradient")
    file = comparison_file(mine / LLAMA, STEPS)
    file.parent.mkdir(exist_ok=True)
    keep(file, Kept(by_gradient, "rows"))
    assert find_comparison(mine / LLAMA, STEPS) == Kept(by_gradient, "rows")
    said = text_of(page_of(mine))
    for words in (
        "parts of baselines chosen by gradient",
        f"({BASELINES[-1]}, 1.75 parts chosen by gradient)",
        f"With 1.75 of its components, chosen in the same way, it is {0.02 / by_gradient.best.error:.2f} times",
        "decomposition, 1.75 by gradient 1.75 0.0200 0.0350 0.0100 0.350 0.650",
        "decomposition, by gradient",
        "KL with k parts on, chosen by gradient",
        "2 0.0125 ",
    ):
        assert words in said, words
    left, right = comparison_figure(by_gradient).axes
    assert "gradient" in left.get_title(loc="left")
    assert "decomposition, by gradient" in left.get_legend_handles_labels()[1]
    assert "decomposition, 1.75 parts" in right.get_legend_handles_labels()[1]
    keep(file, Kept(comparison(), "rows"))
    raw = json.loads(file.read_text())
    del raw["choice"]
    file.write_text(json.dumps(raw))
    assert find_comparison(mine / LLAMA, STEPS) == Kept(comparison(), "rows")


def test_points_stand_where_they_should() -> None:
    """What is far below the decomposition's error lies at the lower edge."""
    drawn = plot(comparison())
    assert drawn.floor == 0.02 / DEPTH
    by_name = {curve.name: curve for curve in drawn.curves}
    neurons = by_name["neurons"].dots
    assert [x for x, *_ in neurons] == sorted(x for x, *_ in neurons)
    # L0 1, 2, 4, on a linear axis. 0.25 and 0.25 / 2^8 are above the floor, 0.25 / 4^8 is below it.
    assert neurons[2][0] - neurons[1][0] == pytest.approx(2 * (neurons[1][0] - neurons[0][0]), abs=0.2)
    lowest = max(y for curve in drawn.curves for _, y, _ in curve.dots)
    assert neurons[2][1] == lowest
    assert neurons[0][1] < neurons[1][1] < lowest
    assert all(0 <= x <= 100 and 0 <= y <= 100 for curve in drawn.curves for x, y, _ in curve.dots)
    assert by_name["decomposition, λ as masks"].path == ""
    assert len(by_name["decomposition, λ above τ"].dots) == 2  # without the one that leaves nothing on


def without(key: str) -> Callable[[dict[str, Any]], Any]:
    return lambda raw: raw.pop(key)


def of_fewer(raw: dict[str, Any]) -> list[dict[str, Any]]:
    """What an L0 of 1.75 takes of baselines beside k = 2."""
    return [p for p in raw["points"] if p["parts"] != OWN and p["number"] == 1]


@pytest.mark.parametrize(
    ("before", "said"),
    [
        (lambda raw: [p.update(attacked=[]) for p in of_fewer(raw)], "not every point at L0 1.75 was attacked 2 times"),
        (
            lambda raw: [raw["points"].remove(p) for p in of_fewer(raw)],
            "lacks points with 1 and with 2 parts on, which L0 1.75 takes",
        ),
    ],
    ids=["every k", "matched only"],
)
def test_a_file_from_before_the_exact_match(mine: Path, before: Callable[[dict[str, Any]], Any], said: str) -> None:
    """It had a baseline at the L0 rounded up."""
    test_a_damaged_file(mine, before, f"{said}; `pd eval {mine / LLAMA} --baselines --step {STEPS}` makes it again")


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (without("points"), "points: Field required"),
        (without("data"), "no comparison at the decomposition's own L0"),
        (lambda raw: raw.update(choice="size"), "choice: Input should be 'activation' or 'gradient'"),
        (lambda raw: raw["points"].clear(), "no comparison at the decomposition's own L0"),
        (lambda raw: raw["points"].pop(0), "no comparison at the decomposition's own L0"),
        (lambda raw: raw["points"][0].update(error="much"), "points.0.error"),
        (lambda raw: raw["points"][0].update(attacked=[1.0]), "not every point at L0 1.75 was attacked 2 times"),
        (lambda raw: raw["points"][0].update(error=float("nan")), "not finite"),
    ],
)
def test_a_damaged_file(mine: Path, damage: Callable[[dict[str, Any]], Any], said: str) -> None:
    file = comparison_file(mine / LLAMA, STEPS)
    file.parent.mkdir(exist_ok=True)
    keep(file, Kept(comparison(), "rows"))
    raw = json.loads(file.read_text())
    damage(raw)
    file.write_text(json.dumps(raw))
    with pytest.raises(UserError, match=re.escape(said)):
        find_comparison(mine / LLAMA, STEPS)
    assert said in text_of(page_of(mine))
