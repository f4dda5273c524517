"""report.html and the terminal summary, from run folders as runs leave them."""

import json
import math
import pydoc_data.topics
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from rich.console import Console

from param_decomp_lab.errors import UserError
from param_decomp_lab.metrics.figures import (
    activation_density,
    ci_histograms,
    figure_path,
    mean_ci_per_component,
    save_figure,
)
from param_decomp_lab.report import summary_table, write_report
from param_decomp_lab.report.snippets import Snippet, preview_html, snippet_html
from param_decomp_lab.report.verdict import sentence, verdict
from param_decomp_lab.runs.configuration import attack_name, attack_steps, component_counts, loss_terms
from param_decomp_lab.runs.evaluation_rows import l0_table
from param_decomp_lab.runs.position_attack import PositionAttack
from param_decomp_lab.runs.series import series_by_key, training_seconds
from param_decomp_lab.ui.charts import Series, line_chart, thin
from param_decomp_lab.ui.numbers import duration, number, percent, signed

MLP = ("gate_proj", "up_proj", "down_proj")
STEPS = 2000


def site_names(layers: range = range(2, 4)) -> list[str]:
    return [f"layers.{layer}.mlp.{kind}" for layer in layers for kind in MLP]


def configuration(C: int = 160) -> dict[str, Any]:
    schedule = {"start_val": 1e-3, "warmup_pct": 0.02, "final_val_frac": 0.1, "fn_type": "cosine"}
    pgd = {
        "type": "PGDReconLoss",
        "init": "random",
        "step_size": 0.1,
        "n_steps": 20,
        "mask_scope": "shared_across_batch",
    }
    return {
        "run_name": "demo: six MLP matrices",
        "run_id": "p-0badcafe",
        "out_dir": "runs",
        "mesh": {"replica": 1, "fsdp": 1, "tensor": 1},
        "memory": {"preset": "plain"},
        "data": {"train": "data/pydoc/train", "eval": "data/pydoc/eval"},
        "target": {"folder": "runs/demo-target"},
        "torch": {
            "pd": {
                "seed": 0,
                "sampling": "continuous",
                "sigmoid_type": "leaky_hard",
                "use_delta_component": True,
                "ci_config": {
                    "mode": "global",
                    "fn_type": "global_shared_transformer",
                    "simple_transformer_ci_cfg": {
                        "d_model": 96,
                        "n_blocks": 2,
                        "attn_config": {"n_heads": 4, "max_len": 128},
                    },
                },
                "decomposition_targets": [{"module_pattern": f"model.layers.*.mlp.{kind}", "C": C} for kind in MLP],
                "components_optimizer": {"lr_schedule": schedule, "grad_clip_norm": 0.1},
                "ci_fn_optimizer": {"lr_schedule": schedule},
                "steps": STEPS,
                "batch_size": 16,
                "faithfulness_warmup_steps": 200,
                "loss_metrics": [
                    {"type": "FaithfulnessLoss", "coeff": 1e5},
                    {
                        "type": "ImportanceMinimalityLoss",
                        "coeff": 3e-3,
                        "pnorm": 2.0,
                        "beta": 0.5,
                        "p_anneal_final_p": 0.4,
                    },
                    {
                        "type": "ChunkwiseSubsetReconLoss",
                        "coeff": 1.0,
                        "routing": {"type": "uniform_k_subset"},
                        "sites_per_chunk": 3,
                    },
                    {
                        "type": "PersistentPGDReconLoss",
                        "coeff": 0.5,
                        "n_warmup_steps": 2,
                        "start_frac": 0.25,
                        "scope": {"type": "broadcast_across_batch"},
                        "optimizer": {"type": "adam", "lr_schedule": {"start_val": 0.01}},
                    },
                ],
            },
            "runtime": {"autocast_bf16": False},
            "eval": {
                "n_steps": 4,
                "batch_size": 16,
                "every": 200,
                "slow_every": 1000,
                "metrics": [{"type": "CEandKLLosses", "rounding_threshold": 0.0}, pgd],
            },
            "data": {"max_seq_len": 64},
        },
    }


def metric_rows(sites: list[str], C: int = 160) -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    rows: list[dict[str, Any]] = []
    for step in [*range(0, STEPS, 10), STEPS - 1]:
        t = step / STEPS
        noise = lambda scale=0.1: float(np.exp(rng.normal(0, scale)))  # noqa: E731
        row: dict[str, Any] = {
            "step": step,
            "train/loss/FaithfulnessLoss": 2e-5 * math.exp(-5 * t) * noise(0.05),
            "train/loss/ImportanceMinimalityLoss": 400 * math.exp(-2.5 * t) * noise(),
            "train/loss/ChunkwiseSubsetReconLoss": (0.05 + 1.8 * math.exp(-9 * t)) * noise(0.15),
            "train/grad_norms/summary/components": 0.3 * noise(0.4),
            "train/grad_norms/summary/ci_fns": 0.1 * noise(0.4),
            "train/grad_norms/summary/total": 0.32 * noise(0.4),
            "train/schedules/components_lr": 1e-3 * (0.1 + 0.45 * (1 + math.cos(math.pi * t))),
            "train/schedules/pnorm": 2.0 - 1.6 * t,
            "train/perf/step_time_s": 0.07 * noise(0.05),
            "train/perf/tok_per_s": 14600 * noise(0.05),
            "train/mem/peak_gb_per_rank": 1.21,
        }
        if t >= 0.25:
            row["train/loss/PersistentPGDReconLoss"] = (0.2 + 0.9 * math.exp(-6 * (t - 0.25))) * noise(0.15)
        row["train/loss/total"] = row["train/loss/FaithfulnessLoss"] * 1e5 + row["train/loss/ChunkwiseSubsetReconLoss"]
        rows.append(row)
        if step % 200 and step != STEPS - 1:
            continue
        kls = {
            "unmasked": 0.008 + 0.4 * math.exp(-8 * t),
            "ci_masked": 0.11 + 2.6 * math.exp(-7 * t),
            "rounded_masked": 0.09 + 2.2 * math.exp(-7 * t),
            "stoch_masked": 0.07 + 2.1 * math.exp(-7 * t),
            "random_masked": 1.3 + 0.9 * math.exp(-7 * t),
            "zero_masked": 2.84 + 0.1 * t,
        }
        evaluated: dict[str, Any] = {"step": step, "eval/loss/PGDReconLoss": 0.52 + 2.4 * math.exp(-5 * t)}
        for masking, value in kls.items():
            evaluated[f"eval/ce_kl/kl_{masking}"] = value
            evaluated[f"eval/ce_kl/ce_difference_{masking}"] = value * 0.93
            evaluated[f"eval/ce_kl/ce_unrecovered_{masking}"] = value / kls["zero_masked"]
        evaluated["eval/ce_kl/ce_target"] = 2.15
        for i, site in enumerate(sites):
            final = 6 + 3.7 * ((i * 7) % 6) + 0.15 * i
            evaluated[f"eval/l0/0_{site}"] = final + (C / 2 - final) * math.exp(-6 * t)
        evaluated["eval/l0/0_all_mlp"] = sum(evaluated[f"eval/l0/0_{site}"] for site in sites)
        rows.append(evaluated)
    return rows


def examples(sites: list[str], C: int = 160, n_components: int = 12, n_snippets: int = 6) -> dict[str, Any]:
    rng = np.random.default_rng(1)
    text = pydoc_data.topics.topics["assignment"]
    result: dict[str, Any] = {}
    for site in sites:
        components: list[dict[str, Any]] = []
        for _ in range(n_components):
            letter = text[int(rng.integers(200, 4000))]
            snippets = []
            for _ in range(n_snippets):
                start = int(rng.integers(0, len(text) - 100))
                tokens = list(text[start : start + 80])
                hit = np.array([token == letter for token in tokens])
                ci = np.where(hit, rng.uniform(0.5, 1, 80), np.where(rng.random(80) < 0.15, rng.uniform(0, 0.3, 80), 0))
                snippets.append({"tokens": tokens, "ci": ci.round(4).tolist(), "peak": int(ci.argmax()), "row": start})
            mean = float(np.exp(rng.normal(-3, 1)).clip(0, 1))
            components.append({"component": int(rng.integers(C)), "mean_ci": mean, "examples": snippets})
        components.sort(key=lambda component: -component["mean_ci"])
        result[site] = {"C": C, "components": components}
    return {"sites": result}


def write_run(folder: Path, sites: list[str], C: int = 160, *, figures: bool = True, n_components: int = 12) -> Path:
    """A finished run, as ``pd train`` leaves it."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(configuration(C), sort_keys=False))
    with (folder / "metrics.jsonl").open("w") as file:
        for row in metric_rows(sites, C):
            file.write(json.dumps(row) + "\n")
    (folder / "examples.json").write_text(json.dumps(examples(sites, C, n_components)))
    environment = {
        "python": "3.11.2",
        "versions": {"jax": "0.10.2", "equinox": "0.13.2", "optax": "0.2.6"},
        "devices": ["TFRT_CPU_0"],
        "git": {"commit": "3f2a91c0d4", "dirty": False},
        "remote": "https://example.org/param-decomp.git",
    }
    (folder / "environment.json").write_text(json.dumps(environment))
    if figures:
        rng = np.random.default_rng(2)
        edges = np.linspace(0, 1, 51)
        for step in (0, 1000, STEPS - 1):
            counts, means, densities = {}, {}, {}
            for site in sites:
                live = int(rng.integers(C // 8, C // 3))
                mean = np.concatenate(
                    [np.exp(rng.normal(-3, 1.2, live)).clip(0, 1), np.exp(rng.normal(-13, 1, C - live))]
                )
                means[site] = np.where(mean > 1e-6, mean, 0)
                densities[site] = np.where(mean > 1e-5, (mean * 1.4).clip(0, 1), 0)
                counts[site] = np.histogram(np.concatenate([np.zeros(90_000), rng.beta(0.3, 0.3, 6000)]), edges)[0]
            save_figure(ci_histograms(counts, edges), figure_path(folder, "ci_histograms", step))
            save_figure(mean_ci_per_component(means), figure_path(folder, "mean_ci_per_component", step))
            save_figure(activation_density(densities), figure_path(folder, "activation_density", step))
    return folder


class Page(HTMLParser):
    """Fails on tags that do not match; collects text, tags and attributes."""

    VOID = frozenset({"meta", "img", "br", "hr", "input", "link"})

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(html)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len({name for name, _ in attrs}) == len(attrs), f"an attribute twice in <{tag}>"
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open[-1] == tag, f"</{tag}> closes <{self.open[-1]}> at {self.getpos()}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] not in ("script", "style"):
            self.text.append(data)

    def ids(self) -> set[str]:
        return {attrs["id"] or "" for _, attrs in self.tags if "id" in attrs}

    def content(self) -> str:
        return " ".join("".join(self.text).split())


def read_page(path: Path) -> Page:
    return Page(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "p-0badcafe", site_names())


def test_a_finished_run_has_every_section(run_folder: Path) -> None:
    path = write_report(run_folder)
    assert path == run_folder / "report.html"
    assert [p.name for p in run_folder.iterdir() if p.name.endswith(".tmp")] == []
    page = read_page(path)
    wanted = {
        "verdict",
        "training",
        "evaluation",
        "l0",
        "figures",
        "components",
        "configuration",
        "environment",
        "words",
    }
    assert page.ids() == wanted
    content = page.content()
    for part in (
        "demo: six MLP matrices",
        "Attack, one mask for the batch",
        "20 steps, ",
        "ChunkwiseSubsetReconLoss",
        "from step 500",
        "layers.3.mlp.down_proj",
        "global_shared_transformer",
        "3f2a91c0d4",
        "12 of 160 components",
    ):
        assert part in content
    images = [attrs["src"] or "" for tag, attrs in page.tags if tag == "img"]
    assert len(images) == 9
    assert all(image.startswith("data:image/png;base64,") for image in images)
    assert next(i for i, (tag, a) in enumerate(page.tags) if tag == "img" and "step 1999" in (a["alt"] or "")) == next(
        i for i, (tag, _) in enumerate(page.tags) if tag == "img"
    ), "the newest figure comes first"


def test_the_page_needs_nothing_from_outside(run_folder: Path) -> None:
    page = read_page(write_report(run_folder))
    for tag, attrs in page.tags:
        for name in ("src", "href", "srcset", "action", "xlink:href", "data"):
            value = attrs.get(name) or ""
            assert value == "" or value.startswith(("#", "data:")), f"<{tag} {name}={value[:60]}>"
        assert tag not in ("link", "iframe", "object", "embed")
        assert "url(" not in (attrs.get("style") or "")
    html = (run_folder / "report.html").read_text(encoding="utf-8")
    assert "@import" not in html
    assert "url(" not in html


def test_charts_carry_their_points(run_folder: Path) -> None:
    page = read_page(write_report(run_folder))
    charts = [json.loads(attrs["data-points"] or "") for _, attrs in page.tags if "data-points" in attrs]
    assert len(charts) >= 14
    by_lines = {tuple(line["n"] for line in chart["s"]): chart for chart in charts}
    faithfulness = by_lines[("FaithfulnessLoss",)]
    assert faithfulness["log"] is True
    assert faithfulness["s"][0]["p"][0][0] == 0
    assert by_lines[("pnorm",)]["log"] is False
    kls = next(chart for names, chart in by_lines.items() if "zero masked" in names)
    assert [line["n"] for line in kls["s"]][-1] == "attack, one mask for the batch"


@pytest.mark.parametrize("n_layers", [7, 40])
def test_lines_of_a_losses_parts_look_different(tmp_path: Path, n_layers: int) -> None:
    """In one chart, or in one for each kind of points, where the lines are in the order of layers."""
    points = [
        f"{kind}.{layer}"
        for kind in ("attn_out", "resid_post")[-1 if n_layers < 10 else 0 :]
        for layer in range(n_layers)
    ]
    folder = write_run(tmp_path / "run", site_names(), figures=False)
    row = {"step": 0, "train/loss/Late": 1.0, "train/loss/total": 1.0}
    row |= {f"train/loss/Late/{part}": 1.0 for part in sorted(["output", *points])}
    (folder / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    page = read_page(write_report(folder))
    charts = [json.loads(attrs["data-points"] or "")["s"] for _, attrs in page.tags if "data-points" in attrs]
    parts = [lines for lines in charts if lines[0]["n"] == "output" or "." in lines[0]["n"]]
    assert sorted(line["n"] for lines in parts for line in lines) == sorted(["output", *points])
    for lines in parts:
        assert len({line["c"] for line in lines}) == len(lines)
    if n_layers == 40:
        assert [[line["n"] for line in lines] for lines in parts] == [["output"], points[:40], points[40:]]
        assert page.content().count("first layer last layer") == 2


def test_tokens_are_escaped(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", site_names(), figures=False)
    nasty = ["<script>alert(1)</script>", '"', "&amp;", "\n", "\t", "\x00", "\ud800", "'><img src=x>"]
    site = "<b>site</b>"
    component = {
        "component": 3,
        "mean_ci": 0.5,
        "examples": [{"tokens": nasty, "ci": [0.9] * len(nasty), "peak": 0, "row": 1}],
    }
    content = {"sites": {site: {"C": 160, "components": [component]}}}
    (folder / "examples.json").write_text(json.dumps(content))
    config = configuration()
    config["run_name"] = "</title><script>alert(2)</script>"
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    page = read_page(write_report(folder))
    assert sum(tag == "script" for tag, _ in page.tags) == 1
    assert not [attrs for tag, attrs in page.tags if tag == "img"]
    content_text = page.content()
    for part in (
        "<script>alert(1)</script>",
        "<b>site</b>",
        "&amp;",
        "↵",
        "␉",
        "\\ud800",
        "␀",
        "'><img src=x>",
        "<script>alert(2)",
    ):
        assert part in content_text


@pytest.mark.parametrize("missing", ["environment.json", "examples.json", "figures"])
def test_optional_parts_may_be_missing(tmp_path: Path, missing: str) -> None:
    folder = write_run(tmp_path / "run", site_names(), figures=False)
    if missing != "figures":
        (folder / missing).unlink()
    page = read_page(write_report(folder))
    assert {"figures": "figures", "examples.json": "components", "environment.json": "environment"}[
        missing
    ] not in page.ids()
    assert "layers.2.mlp.gate_proj" in page.content()


@pytest.mark.parametrize("missing", ["config.yaml", "metrics.jsonl"])
def test_the_two_files_it_cannot_do_without_are_named(tmp_path: Path, missing: str) -> None:
    folder = write_run(tmp_path / "run", site_names(), figures=False)
    (folder / missing).unlink()
    with pytest.raises(UserError, match=missing):
        write_report(folder)
    assert not (folder / "report.html").exists()


def test_a_run_that_has_hardly_begun(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("run_name: new\n")
    (tmp_path / "metrics.jsonl").write_text("")
    assert "No evaluation has been logged yet" in read_page(write_report(tmp_path)).content()


def test_one_evaluation_a_nan_and_a_line_cut_off_by_a_kill(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", site_names(), figures=False)
    rows = [row for row in metric_rows(site_names()) if row["step"] == 0]
    rows.append({"step": 10, "train/loss/total": math.nan, "train/loss/FaithfulnessLoss": None, "train/note": "text"})
    lines = [json.dumps(row) for row in rows]
    (folder / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 20, "train/lo']))
    page = read_page(write_report(folder))
    assert "A single evaluation, at step 0." in page.content()
    assert "1 not finite" in page.content()
    (folder / "metrics.jsonl").write_text("\n".join([lines[0], "not json", lines[1]]))
    with pytest.raises(UserError, match=r"metrics\.jsonl:2"):
        write_report(folder)


def test_a_toy_run_without_cross_entropy(tmp_path: Path) -> None:
    config = {
        "experiment": "tms",
        "torch": {
            "pd": {"steps": 10, "decomposition_targets": [{"module_pattern": "linear*", "C": 20}]},
            "target": {"run_path": "tms"},
        },
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    row = {
        "step": 9,
        "train/loss/total": 0.1,
        "eval/l0/0_linear1": 1.2,
        "eval/l0/0_linear2": 1.1,
        "eval/identity_ci_error/linear1": 0,
        "eval/loss/PGDReconLoss": 0.01,
        "eval/mmcs": 1.0,
    }
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    content = read_page(write_report(tmp_path)).content()
    for part in ("CI pattern errors", "eval/mmcs", "linear2", "PGDReconLoss"):
        assert part in content


@pytest.mark.slow
def test_224_sites(tmp_path: Path) -> None:
    kinds = [
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
        "self_attn.o_proj",
        *(f"mlp.{kind}" for kind in MLP),
    ]
    names = [f"layers.{layer}.{kind}" for layer in range(32) for kind in kinds]
    folder = write_run(tmp_path / "run", names, figures=False, n_components=2)
    config = configuration()
    config["torch"]["pd"]["decomposition_targets"] = [{"module_pattern": "layers.*", "C": 160}]
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    page = read_page(write_report(folder))
    assert sum(tag == "option" for tag, _ in page.tags) == 224
    titles = {attrs.get("aria-label") for tag, attrs in page.tags if tag == "svg"}
    assert {"L0 / C, q_proj", "L0 / C, down_proj"} <= titles


def with_experts() -> tuple[dict[str, Series], dict[str, int]]:
    """Two experts' matrices, of which positions take one: 3 of 4 the first; and a matrix that exists everywhere."""
    names = ("h.0.attn", "h.0.experts.0.up", "h.0.experts.1.up")
    values = dict(zip(names, (2.0, 3.0, 0.5), strict=True))
    row = {"step": 4, **{f"eval/l0/0.0_{name}": value for name, value in values.items()}}
    row |= {"eval/routed/h.0.experts.0": 0.75, "eval/routed/h.0.experts.1": 0.25}
    return series_by_key([row]), dict.fromkeys(names, 10)


def test_shares_of_experts_are_over_the_positions_that_take_them() -> None:
    l0 = l0_table(*with_experts())
    assert l0 is not None
    assert [site.share for site in l0.sites] == pytest.approx([0.2, 0.4, 0.2])
    assert [site.routed for site in l0.sites] == [None, 0.75, 0.25]
    assert l0.mean == pytest.approx(5.5 / 2)  # over twice as many positions of sites as there are positions
    assert l0.mean_C == 10


def test_an_expert_that_no_position_takes() -> None:
    series, sites = with_experts()
    series["eval/routed/h.0.experts.1"] = Series((4,), (0.0,))
    l0 = l0_table(series, sites)
    assert l0 is not None
    assert l0.sites[2].share is None


def test_summary_of_experts_for_the_terminal() -> None:
    series, sites = with_experts()
    console = Console(width=80, record=True, file=None, quiet=False)
    with console.capture() as capture:
        console.print(*summary_table([{"step": 4, **{key: s.last for key, s in series.items()}}], sites))
    [mean] = [line for line in capture.get().splitlines() if "mean over sites" in line]
    assert mean.split()[3:] == ["10", "2.75", "2.75", "27.5", "%"]
    assert "over those that take the expert" in " ".join(capture.get().split())


def test_the_sentence_and_its_card_have_the_same_l0() -> None:
    series, sites = with_experts()
    series |= {"eval/ce_kl/kl_zero_masked": Series((4,), (0.4,)), "eval/ce_kl/kl_ci_masked": Series((4,), (0.03,))}
    l0 = l0_table(series, sites)
    assert "leaves 2.75 of 10 active" in sentence(series, l0)
    assert [card.value for card in verdict(series, {}, l0) if card.label == "Mean L0"] == ["2.75 of 10"]


def test_the_cards_of_attacks_say_what_shares_a_source() -> None:
    """The evaluation's by its configuration, and beside it that of the comparison with baselines."""
    series = {"eval/ce_kl/kl_zero_masked": Series((4,), (0.5,)), "eval/loss/PGDReconLoss": Series((4,), (0.1,))}

    def cards(
        scope: str, beside: PositionAttack | None = None, step: int | None = 4
    ) -> list[tuple[str, str, str, bool | None]]:
        config = {"eval": {"metrics": [{"type": "PGDReconLoss", "n_steps": 20, "mask_scope": scope}]}}
        return [(c.label, c.value, c.detail, c.good) for c in verdict(series, config, None, beside, step)]

    [found] = cards("per_row")
    assert found == ("Attack, a mask for each row", "0.100", "20 steps, 20.0\N{NO-BREAK SPACE}% of zero-masked", True)
    [_, found] = cards("shared_across_batch", PositionAttack(3, 80, 1.5))
    assert found == (
        "Attack, a mask for each position",
        "1.50",
        "80 steps, 300\N{NO-BREAK SPACE}% of zero-masked, at step 3",
        None,
    )
    for at, step, said in ((4, 4, False), (4, 3, True), (4, None, True)):
        [_, found] = cards("shared_across_batch", PositionAttack(at, 80, 1.5), step)
        assert (", at step 4" in found[2]) == said


def test_attacks_of_one_class_are_told_apart() -> None:
    """Each takes its scope and steps from the entry that it is logged under, whatever the order."""
    pgd = {"type": "PGDReconLoss"}
    metrics = [
        {**pgd, "name": "long", "n_steps": 40, "mask_scope": "unique_per_datapoint"},
        {**pgd, "n_steps": 20, "mask_scope": "shared_across_batch"},
        {**pgd, "name": None, "n_steps": 10, "mask_scope": "per_row"},
    ]
    config = {"eval": {"metrics": metrics}}
    for name, called, steps in (
        ("PGDReconLoss", "attack, one mask for the batch", 20),
        ("PGDReconLoss_2", "attack (PGDReconLoss_2), a mask for each row", 10),
        ("long", "attack (long), a mask for each position", 40),
        ("PGDReconLoss_3", "attack (PGDReconLoss_3)", None),
    ):
        assert (attack_name(config, name), attack_steps(config, name)) == (called, steps)


def test_summary_for_the_terminal() -> None:
    sites = dict.fromkeys(site_names(), 160)
    console = Console(width=120, record=True, file=None, quiet=False)
    with console.capture() as capture:
        console.print(*summary_table(metric_rows(site_names()), sites))
    text = capture.get()
    for part in (
        "FaithfulnessLoss",
        "zero",
        "attack",
        "layers.3.mlp.down_proj",
        "mean over sites",
        "time in training",
        "all_mlp",
        "Cross-entropy of the target itself: 2.15 nats",
    ):
        assert part in text
    assert summary_table([], sites) == []
    assert len(summary_table([{"step": 0, "train/loss/total": 1.0}], sites)) == 1


def test_series_merge_rows_of_a_step() -> None:
    rows: list[dict[str, Any]] = [
        {"step": 5, "a": 1.0},
        {"step": 0, "a": 3.0, "flag": True},
        {"step": 5, "a": 2.0, "b": "NaN"},
    ]
    series = series_by_key(rows)
    assert series["a"] == Series((0, 5), (3.0, 2.0))
    assert math.isnan(series["b"].last)
    assert "flag" not in series


def test_training_time_counts_every_step() -> None:
    rows = [{"step": step, "train/perf/step_time_s": 0.5} for step in (0, 10, 20)]
    assert training_seconds(series_by_key(rows)) == pytest.approx(21 * 0.5)


def test_sizes_come_from_patterns_with_and_without_model() -> None:
    names = ["layers.2.mlp.gate_proj", "all_mlp", "layers.9.self_attn.q_proj"]
    assert component_counts(configuration(), names) == {"layers.2.mlp.gate_proj": 160}


def test_terms_of_one_class_are_told_apart() -> None:
    terms = [{"type": "StochasticReconLoss", "coeff": 1}] * 2 + [
        {"type": "StochasticReconLoss", "name": "other", "coeff": 1}
    ]
    found = loss_terms({"pd": {"loss_metrics": terms}})
    assert [term.name for term in found] == ["StochasticReconLoss", "StochasticReconLoss_2", "other"]


def test_a_coefficient_on_a_schedule_is_a_setting() -> None:
    points = [{"at": 0, "frac": 1}, {"at": 1, "frac": 0.2, "interp": "cosine"}]
    term = {"type": "StochasticReconLoss", "coeff": {"max_val": 2.0, "points": points}}
    (found,) = loss_terms({"pd": {"loss_metrics": [term]}})
    assert found.coeff is None
    assert found.details == "coeff (max_val 2, points (at 0, frac 1), (at 1, frac 0.2, interp cosine))"


def test_thinning_keeps_peaks_and_ends() -> None:
    values = [(i, 1.0) for i in range(10_000)]
    values[4321] = (4321, 50.0)
    values[77] = (77, math.nan)
    kept = thin(values, 400)
    assert len(kept) <= 402
    assert {(0, 1.0), (4321, 50.0), (9999, 1.0)} <= set(kept)


@pytest.mark.parametrize(
    "values", [(1.0,), (0.0, 0.0), (1e-9, 1e9), (-3.0, 5.0), (7.0, 7.0), (1e-30, 2e-30), (1.0, math.inf)]
)
def test_charts_of_any_numbers(values: tuple[float, ...]) -> None:
    chart = line_chart("t", {"t": Series(tuple(range(len(values))), values)}, ["red"], x_max=1)
    assert chart is not None
    assert "nan" not in chart.lines[0].path
    assert chart.y_ticks
    assert all(-1 <= tick.at <= 101 for tick in (*chart.x_ticks, *chart.y_ticks))


def test_snippets_keep_every_character() -> None:
    snippet = Snippet(("a ", " b", "\n", "c"), (0.0, 1.0, 0.2, 0.0), 1, None)
    html = snippet_html(snippet)
    assert html == ('a <b class="p" style="--a:1" title="λ 1.000"> b</b><b style="--a:0.2" title="λ 0.200">↵</b>c')
    long = Snippet(tuple("x" * 200), (0.0,) * 100 + (1.0,) + (0.0,) * 99, 100, None)
    assert preview_html(long).striptags().count("x") < 100
    assert 'class="p"' in preview_html(long)


def test_numbers() -> None:
    assert [number(v) for v in (None, 0, 0.01234, 1234.6, 3e-6, math.nan, -0.5)] == [
        "–", "0", "0.0123", "1,235", "3.00e−6", "NaN", "−0.500",
    ]  # fmt: skip
    assert [percent(v) for v in (None, 0.0, 0.074, 1.0, 0.0012, 5e-7)] == [
        "–",
        "0\u00a0%",
        "7.4\u00a0%",
        "100\u00a0%",
        "0.12\u00a0%",
        "< 0.001\u00a0%",
    ]
    assert [signed(v) for v in (1.136, -1.136, 0.001, -0.001)] == ["+1.14", "−1.14", "0.00", "0.00"]
    assert [duration(s) for s in (4.2, 42, 185, 26_000)] == ["4.2 s", "42 s", "3 min 05 s", "7 h 13 min"]
