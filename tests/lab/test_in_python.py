"""What a notebook uses: texts and tokens, finding components, what objects print, cards, figures."""

import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from matplotlib.figure import Figure

from param_decomp_lab.compare.page import Compared, compared
from param_decomp_lab.compare.records import read_records
from param_decomp_lab.errors import UserError
from param_decomp_lab.graph.graph import Graph
from param_decomp_lab.harvest.files import Harvest, find_harvests
from param_decomp_lab.opening import Run, load_run
from param_decomp_lab.opening.intervention import Intervention
from param_decomp_lab.runs.generation import extended
from param_decomp_lab.ui.numbers import percent
from tests.lab.test_browse import LLAMA, MARKS, MARKUP, SITE, TOY

TEXT = "3 times 4 makes"
ELEMENTS = {"div", "style", "h4", "h5", "p", "span", "table", "thead", "tbody", "tr", "th", "td", "br"}
"""Those of cards."""


@pytest.fixture(scope="module")
def run(harvested: Path) -> Run:
    return load_run(harvested / LLAMA, devices=1)


@pytest.fixture(scope="module")
def toy_run(harvested: Path) -> Run:
    return load_run(harvested / TOY, devices=1)


@pytest.fixture(scope="module")
def found(run: Run) -> Intervention:
    return run.intervene(TEXT, f"{SITE}:3", samples=1, attack_steps=1, continue_tokens=2)


@pytest.fixture(scope="module")
def graph(run: Run) -> Graph:
    return run.graph(TEXT)


@pytest.fixture
def mine(harvested: Path, tmp_path: Path) -> Harvest:
    """The Llama's harvest, in a copy that may be changed."""
    copy = shutil.copytree(harvested / LLAMA, tmp_path / LLAMA, ignore=shutil.ignore_patterns("ckpts"))
    return Harvest(find_harvests(copy)[0])


# ---- texts and tokens ----


def test_tokens_and_their_text(run: Run) -> None:
    assert run.tokens("a\né").tolist() == list("a\né".encode())
    assert run.decode(run.tokens("a\né")) == "a\né"
    assert run.decode([0xC3]) == "\\xc3"


def greedy(run: Run, tokens: list[int], n: int, masks: Any = None, delta: float = 0.0) -> list[int]:
    row = list(tokens)
    for _ in range(n):
        row.append(int(np.asarray(run.logits(row, masks, delta))[-1].argmax()))
    return row[len(tokens) :]


def test_generate(run: Run, found: Intervention) -> None:
    """Rows that are filled up give what rows of each length give."""
    tokens = run.tokens("3 times").tolist()
    assert run.generate(tokens, 3).tolist() == greedy(run, tokens, 3)
    assert run.generate("3 times", 3) == run.decode(greedy(run, tokens, 3))
    only = {SITE: [3]}
    assert run.generate(tokens, 2, masks=only, delta=1.0).tolist() == greedy(run, tokens, 2, only, 1.0)
    assert run.generate(run.tokens(TEXT), 2, masks="ci").tolist() == list(found.continuation[0])
    drawn = [run.generate(tokens, 6, temperature=5.0, seed=seed).tolist() for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert run.generate(tokens, 0).tolist() == []
    assert run.longest_row == 16
    assert len(run.generate([1] * 14, 5)) == 2  # as far as the CI function reads


def test_extended_asks_for_one_token_at_a_time() -> None:
    asked: list[list[int]] = []

    def next_token(tokens: list[int]) -> int:
        asked.append(list(tokens))
        return len(tokens)

    assert extended([7, 8], 3, 4, next_token) == (2, 3)
    assert asked == [[7, 8], [7, 8, 2]]


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (lambda run, toy: toy.tokens("1"), "a toy has no tokens"),
        (lambda run, toy: toy.decode([1]), "a toy has no tokens"),
        (lambda run, toy: toy.generate("1"), "a toy has no text"),
        (lambda run, toy: run.tokens("x" * 17), "up to 16 tokens"),
        (lambda run, toy: run.generate([[1, 2]], 3), "one row"),
        (lambda run, toy: run.generate("x", -1), "at least 0"),
        (lambda run, toy: run.harvest.find(), "give token=…, label=…, or both"),
        (lambda run, toy: run.harvest.find(token="no such text"), "no token has this text"),
        (lambda run, toy: run.harvest.find(token=256), "from 0 to 255"),
        (lambda run, toy: run.harvest.find(token="t", sites="*.q_proj"), "matches no site"),
        (lambda run, toy: toy.plot.heat_map("1"), "a toy has no positions"),
        (lambda run, toy: run.plot.active([[1, 2]]), "one row"),
        (lambda run, toy: run.plot.active("x", thresholds=()), "one to 3"),
    ],
)
def test_wrong_questions(run: Run, toy_run: Run, asked: Callable[[Run, Run], Any], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        asked(run, toy_run)


# ---- finding components ----


def test_find_by_token(run: Run) -> None:
    """Those that fire on it at 2 % of their firings or more, and more often than elsewhere, by share times log-lift."""
    harvest = run.harvest
    token = int(np.argsort(-harvest.input_totals)[5])
    expected = {}
    for site in harvest.sites:
        for c in range(harvest.site(site).C):
            for row in harvest.tokens(site, c).to_pylist():
                if row["token"] == token and row["precision"] >= 0.02 and row["lift"] > 1 and row["total"] >= 10:
                    expected[site, c] = row["precision"] * np.log(row["lift"])
    table = harvest.find(token=token).to_pylist()
    assert {(row["site"], row["component"]): row["match"] for row in table} == pytest.approx(expected)
    assert [row["match"] for row in table] == pytest.approx(sorted(expected.values(), reverse=True))
    assert len(expected) > 3
    assert harvest.find(token=token, most=2).to_pylist() == table[:2]
    name = harvest.names([token])[0]
    by_name = harvest.find(token=f" {name.strip()} ", sites="layers.0.*").to_pylist()
    assert {row["site"] for row in by_name} <= {"layers.0.mlp.up_proj", "layers.0.mlp.down_proj"}
    best = table[0]
    assert best["density"] == harvest.component(best["site"], best["component"])["density"]
    assert set(best["tokens"]) <= set(harvest.names(range(256)))


def test_find_by_label(mine: Harvest) -> None:
    mine.labels.set(SITE, 3, "Digits after ×", "me")
    mine.labels.set(SITE, 5, "a digit", "me")
    rows = mine.find(label="DIGIT").to_pylist()
    assert {row["component"]: row["label"] for row in rows} == {3: "Digits after ×", 5: "a digit"}
    assert [row["importance_mean"] for row in rows] == sorted((r["importance_mean"] for r in rows), reverse=True)
    assert mine.find(label="no such").num_rows == 0
    both = mine.find(label="digit", token=int(np.argmax(mine.input_totals))).to_pylist()
    assert {row["component"] for row in both} <= {3, 5}
    assert mine.read(SITE, 3).label == "Digits after ×"


def test_find_in_a_toy(toy_run: Run) -> None:
    found = toy_run.harvest.find(token="3").to_pylist()
    assert found == toy_run.harvest.find(token=3).to_pylist()
    assert found[0]["match"] > 0


def test_means_beside_sums(run: Run) -> None:
    harvest = run.harvest
    table, summary = harvest.components(SITE), harvest.summary(SITE)
    for name in ("density", "importance_mean", "activation_mean"):
        np.testing.assert_array_equal(table[name], getattr(summary, name))
    assert harvest.components(SITE, ["density", "firings"]).column_names == ["density", "firings"]
    tokens, outputs = harvest.tokens(SITE, 3), harvest.outputs(SITE, 3)
    for rows in (tokens, outputs):
        assert rows["text"].to_pylist() == harvest.names(rows["token"].to_pylist())


# ---- what is printed ----


def test_printed(run: Run, found: Intervention, graph: Graph, toy_run: Run) -> None:
    example = run.harvest.examples(SITE, 3)[0]
    here = example.position - example.first
    assert example.names == tuple(run.names(example.tokens))
    assert f"{''.join(example.names[:here])}⟦{example.names[here]}⟧" in example.text
    assert repr(example.text) in repr(example)
    known = repr(run.harvest.read(SITE, 3))
    assert known.startswith(f"{SITE}:3\n")
    assert repr(example) in known
    toy_example = toy_run.harvest.examples(next(iter(toy_run.harvest.sites)), 0)[0]
    assert re.fullmatch(r"(feature \d(, )?)+", toy_example.text)

    first = graph.components[0]
    text = repr(graph)
    assert text.count("\n") <= 6
    assert repr(TEXT) in text
    assert f"{first.id} {graph.tokens[first.position]!r}" in text
    assert repr(first).startswith(f"Node({first.id}, ")

    text = repr(found)
    assert text.startswith(f"Intervention on {TEXT!r}: {SITE}:3 off")
    for name in ("ci", "random", "attack"):
        assert re.search(rf"^  {name} +KL ", text, re.MULTILINE)
    assert repr(run.text.text(found.continuation[1])) in text  # type: ignore[union-attr]


def test_outputs_of_an_intervention(run: Run, found: Intervention) -> None:
    rows = found.outputs("ci")
    before, after = found.readings["ci"].probabilities()
    names = run.names(range(256))
    for name, p, q in rows:
        n = names.index(name)
        assert (p, q) == (before[n], after[n])
    changes = [abs(q - p) for _, p, q in rows]
    assert changes == sorted(changes, reverse=True)
    assert {names[int(before.argmax())], names[int(after.argmax())]} <= {name for name, *_ in rows}
    assert found.distance("ci") == found.readings["ci"].kl()
    part = run.intervene(TEXT, f"{SITE}:3@2", scale=0.5, readings=("ci",))
    assert part.what == f"{SITE}:3 × 0.5, at some positions"
    assert run.intervene(TEXT, {SITE: [1, 2]}, alone=True, readings=("ci",)).what == "2 components alone"


# ---- cards ----


class Elements(HTMLParser):
    """Names of elements and attributes, and how many elements are open at the end."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.names, self.attributes, self.open = set[str](), set[str](), 0
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.add(tag)
        self.attributes |= {name for name, _ in attrs}
        self.open += tag != "br"

    def handle_endtag(self, tag: str) -> None:
        self.open -= 1


def checked(html: str) -> str:
    """The card, which needs nothing from elsewhere and runs nothing."""
    found = Elements(html)
    assert found.names <= ELEMENTS
    assert found.attributes <= {"class", "title", "style"}
    assert found.open == 0
    [style] = re.findall(r"<style>(.*?)</style>", html, re.DOTALL)
    assert "prefers-color-scheme: dark" in style
    assert "url(" not in style
    assert "@import" not in style
    assert not set("\u202e\u200f\x1b\x00") & set(html)
    return re.sub(r"<style>.*?</style>", "", html, flags=re.DOTALL)


def test_cards(run: Run, toy_run: Run, found: Intervention, graph: Graph, harvested: Path) -> None:
    harvest = run.harvest
    card = checked(run._repr_html_())
    assert "layers.0-1.mlp.up_proj" in card
    assert "16 × 24" in card
    card = checked(harvest._repr_html_())
    assert card.count("<tr>") == 1 + len(harvest.sites)
    row, known = harvest.component(SITE, 3), harvest.read(SITE, 3)
    card = checked(known._repr_html_())
    assert f"{row['firings']:,} of" in card
    assert card.count('class="context"') == len(known.examples)
    assert card.count('at"') == len(known.examples)
    assert "‖V‖" in checked(run.component(SITE, 3)._repr_html_())
    assert 'class="context"' in checked(harvest.examples(SITE, 3)[0]._repr_html_())
    card = checked(graph._repr_html_())
    assert card.count("<tr>") == 1 + min(12, len(graph.components))
    assert graph.components[0].id.partition("@")[0] in card
    card = checked(found._repr_html_())
    for name in found.readings:
        assert f"{found.outputs(name)[0][1]:.0%}".strip("%")[0] in card
    assert f"{SITE}:3 off" in card
    card = checked(comparison(harvested)._repr_html_())
    assert card.count("<tr>") == 3
    card = checked(run.matched(run)._repr_html_())
    assert card.count("<tr>") == 1 + len(run.sites)
    assert card.count(percent(1.0)) >= 2 * len(run.sites)
    site = next(iter(toy_run.harvest.sites))
    assert "feature" in checked(toy_run.harvest.read(site, 0)._repr_html_())
    assert "TMS" in checked(toy_run._repr_html_())
    checked(toy_run.graph("1 3")._repr_html_())
    checked(toy_run.intervene("1 3", f"{site}:0", readings=("ci",))._repr_html_())


def comparison(folder: Path) -> Compared:
    return compared(read_records([folder]))


def test_hostile_texts_on_cards(
    mine: Harvest, run: Run, found: Intervention, graph: Graph, harvested: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Labels, tokens, names of runs and prompts: as on the browser's pages."""
    hostile = MARKUP + MARKS
    pq.write_table(pa.table({"text": [f"{hostile}{i}" for i in range(256)]}), mine.folder / "vocabulary.parquet")
    mine.labels.set(SITE, 3, hostile, MARKUP)
    mine.plan = replace(mine.plan, run=hostile)
    known = mine.read(SITE, 3)
    named = replace(run.config, wrapper=run.config.wrapper.model_copy(update={"run_name": hostile}))
    monkeypatch.setattr(run, "config", named)
    names = dict.fromkeys(graph.output_names, MARKUP)
    shown = [
        mine, known, known.examples[0], run,
        replace(graph, prompt=hostile, tokens=(MARKUP,) * len(graph.tokens), output_names=names),
        replace(found, what=hostile, prompt=hostile, output_names=dict.fromkeys(found.output_names, MARKUP),
                continuation_text=(hostile, hostile)),
        replace(comparison(harvested), labels=[hostile] * 2),
        replace(run.matched(run), one=hostile, missing=((MARKUP,), (MARKUP,))),
    ]  # fmt: skip
    for value in shown:
        assert "&lt;script&gt;" in checked(value._repr_html_())
        assert not set("\u202e\u200f\x1b\x00") & set(repr(value))


# ---- figures ----


def test_figures(run: Run, harvested: Path) -> None:
    plot, harvest = run.plot, run.harvest
    assert plot.names == ["l0", "importances", "mean_importance", "density", "heat_map", "active"]
    for name in plot.names[:4]:
        assert isinstance(getattr(plot, name)(), Figure)
    widths = [bar.get_width() for bar in plot.l0().axes[0].patches]
    assert widths == [pytest.approx(harvest.densities(site).sum()) for site in harvest.sites]
    assert len(plot.density("layers.1.*").axes) == 2
    [histogram] = plot.importances(SITE).axes[0].patches
    counts = histogram.get_data().values  # type: ignore[attr-defined]
    fires = harvest.components(SITE)["firings"].to_numpy().sum()
    assert counts.sum() == pytest.approx(harvest.plan.n_positions * harvest.site(SITE).C)
    assert counts[1:].sum() <= fires
    lines = plot.active(TEXT, thresholds=[0.0, 0.5]).axes[0].lines
    lam = run.causal_importances(TEXT)
    for line, threshold in zip(lines, (0.0, 0.5), strict=True):
        expected = sum((np.asarray(x) > threshold).sum(axis=1) for x in lam.values())
        np.testing.assert_array_equal(line.get_ydata(), expected)
    shown = plot.heat_map(TEXT, SITE).axes[0].images[0].get_array()
    assert shown is not None
    by_mean = np.asarray(lam[SITE])[:, np.argsort(-np.asarray(lam[SITE]).mean(axis=0), kind="stable")]
    assert np.asarray(shown)[: len(TEXT), 0].max() == pytest.approx(by_mean[:, 0].max(), abs=1e-6)

    found = comparison(harvested)
    axes = found.plot("λ as masks").axes[0]
    [front] = [f for f in found.fronts if f.name == "λ as masks"]
    assert [(x, y) for x, y in zip(*axes.lines[0].get_data(), strict=True)] == [
        (p.l0, p.error) for p in front.points if p.run in front.front
    ]
    with pytest.raises(UserError, match="'loss' should be one of λ as masks"):
        found.plot("loss")
