"""`pd compare`, on folders written here; `tests/lab/test_slurm.py` compares the runs of a real sweep."""

import json
from collections.abc import Callable
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from param_decomp_lab.compare.agreement import Fired, agreements, matched, of_site
from param_decomp_lab.compare.command import as_json, compare_runs
from param_decomp_lab.compare.differences import differences, labels, seed_groups, short_names
from param_decomp_lab.compare.fronts import on_front
from param_decomp_lab.compare.page import compared, render
from param_decomp_lab.compare.records import read_records
from param_decomp_lab.errors import UserError
from param_decomp_lab.runs.checkpoints.store import Checkpoints
from param_decomp_lab.ui.charts import axis
from tests.lab.tiny_run import pd_here

SITES = {"layers.0.mlp.up_proj": 8, "layers.0.mlp.down_proj": 4}
MASKINGS = ("ci_masked", "rounded_masked", "stoch_masked")
Write = Callable[..., Path]


def configuration(seed: int, coeff: float, **wrapper: Any) -> dict[str, Any]:
    return {
        "wrapper": {"run_name": "one of many", "run_id": None, "mesh": {"fsdp": 1}, **wrapper},
        "torch": {
            "pd": {
                "seed": seed,
                "steps": 10,
                "decomposition_targets": [{"module_pattern": name, "C": C} for name, C in SITES.items()],
                "loss_metrics": [
                    {"type": "FaithfulnessLoss", "coeff": 1.0},
                    {"type": "ImportanceMinimalityLoss", "coeff": coeff},
                ],
            }
        },
    }


def metrics(step: int, l0: float, kl: float) -> dict[str, float]:
    return {
        "step": step,
        **{f"eval/ce_kl/kl_{name}": kl * (n + 1) for n, name in enumerate(MASKINGS)},
        "eval/loss/PGDReconLoss": 10 * kl,
        **{f"eval/l0/0.0_{name}": 2 * l0 * C / sum(SITES.values()) for name, C in SITES.items()},
        "train/loss/total": kl,
    }


@pytest.fixture
def written(tmp_path: Path) -> Write:
    """Writes a run: its number, seed, coefficient, last L0 and KL."""

    def write(
        number: int, seed: int, coeff: float, l0: float, kl: float, ends: str | None = "finished", **wrapper: Any
    ) -> Path:
        folder = tmp_path / "sweep" / f"p-{number:08x}"
        folder.mkdir(parents=True)
        (folder / "config.yaml").write_text(yaml.safe_dump(configuration(seed, coeff, **wrapper), sort_keys=False))
        rows = [metrics(0, 3 * l0, 3 * kl), metrics(10, l0, kl)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        if ends:
            (folder / "ended.json").write_text(json.dumps({"how": ends, "why": "" if ends == "finished" else "it did"}))
        else:
            (folder / "ckpts" / "5").mkdir(parents=True)
        return folder

    return write


def test_a_sweep(written: Write, tmp_path: Path) -> None:
    numbers = ((0, 1e-3, 2.0, 0.4), (1, 1e-3, 2.4, 0.2), (0, 1e-2, 1.0, 0.9), (1, 1e-2, 3.0, 0.9), (0, 1e-1, 0.1, 0.01))
    for n, values in enumerate(numbers[:4]):
        written(n, *values)
    failed = written(4, *numbers[4], ends="failed")
    cut = written(5, 2, 1e-2, 1.5, 0.1)
    (cut / "metrics.jsonl").write_text("{not json\n" + (cut / "metrics.jsonl").read_text())
    bare = tmp_path / "sweep" / "p-00000006"
    (bare / "ckpts").mkdir(parents=True)
    out = tmp_path / "page.html"
    found = json.loads(as_json(compare_runs([tmp_path / "sweep"], False, out)))
    by_id = {run["id"]: run for run in found["runs"]}
    assert {id: run["state"] for id, run in by_id.items()} == {
        **{f"p-{n:08x}": "finished" for n in range(4)},
        failed.name: "failed", cut.name: "broken", bare.name: "broken",
    }  # fmt: skip
    assert "metrics.jsonl:1" in by_id[cut.name]["why"]
    assert "config.yaml" in by_id[bare.name]["why"]
    for n, (seed, coeff, l0, kl) in enumerate(numbers):
        run = by_id[f"p-{n:08x}"]
        assert run["l0"] == pytest.approx(l0)
        expected = {"λ as masks": kl, "λ rounded": 2 * kl, "stochastic": 3 * kl, "attack": 10 * kl}
        assert run["errors"] == {name: pytest.approx(value) for name, value in expected.items()}
        assert run["differences"] == {"pd.seed": str(seed), "pd.loss_metrics.1.coeff": f"{coeff:g}"}
        assert run["label"] == f"seed {seed}, ImportanceMinimalityLoss.coeff {coeff:g}"
    # The failed run is better than all others, and on no front.
    errors = [front["error"] for front in found["fronts"]]
    assert errors == ["λ as masks", "λ rounded", "stochastic", "attack"]
    assert all(front["runs"] == ["p-00000002", "p-00000000", "p-00000001"] for front in found["fronts"])
    assert sorted(map(sorted, found["seeds"])) == [["p-00000000", "p-00000001"], ["p-00000002", "p-00000003"]]
    page = out.read_text()
    for text in ("4 finished", "1 failed", "2 broken", "metrics.jsonl:1", "it did", "2.20", "2 to 2.40", "0.300"):
        assert text in page, text
    assert page.count('class="run best"') == 12
    assert page.count('class="run unfinished"') == 4


def test_attacks_of_different_scopes_are_not_compared(written: Write, tmp_path: Path) -> None:
    """A mask for each position does far more harm than one for the batch."""
    for number, scope in enumerate(("shared_across_batch", "unique_per_datapoint", "unique_per_datapoint")):
        file = written(number, number, 1.0, 2.0, 0.5) / "config.yaml"
        config = yaml.safe_load(file.read_text())
        config["torch"]["eval"] = {"metrics": [{"type": "PGDReconLoss", "n_steps": 20, "mask_scope": scope}]}
        file.write_text(yaml.safe_dump(config, sort_keys=False))
    records = sorted(read_records([tmp_path]), key=lambda record: record.id)
    names = [[name for name in record.errors if "attack" in name] for record in records]
    of_position = ["attack, a mask for each position"]
    assert names == [["attack, one mask for the batch"], of_position, of_position]


def test_one_run_and_what_is_no_run(written: Write, tmp_path: Path) -> None:
    written(1, 0, 1.0, 2.0, 0.5)
    page = render(compared(read_records([tmp_path])))
    assert "None: all readable configurations" in page
    assert 'id="seeds"' not in page
    (tmp_path / "empty").mkdir()
    for path, said in ((tmp_path / "empty", "no runs in"), (tmp_path / "nowhere", "is not a folder")):
        with pytest.raises(UserError, match=said):
            read_records([path])
    refused = (
        (tmp_path / "empty", "is a folder"),
        (tmp_path / "sweep" / "p-00000001" / "report.html", "lies in the folder of the run"),
    )
    for out, said in refused:
        outcome = pd_here("compare", tmp_path, "--out", out)
        assert outcome.status == 2
        assert said in outcome.err
    outcome = pd_here("compare", tmp_path, "--out", tmp_path / "page.html")
    assert outcome.status == 0
    assert "0.500*" in outcome.out
    assert (tmp_path / "page.html").is_file()


def test_what_differs(written: Write, tmp_path: Path) -> None:
    """How a run is called, and where it is computed, make no group of their own; the latter is shown."""
    written(1, 0, 1.0, 2.0, 0.5)
    written(2, 1, 1.0, 2.0, 0.5, run_name="another", out_dir="elsewhere", mesh={"fsdp": 8}, newer=False)
    records = sorted(read_records([tmp_path]), key=lambda record: record.id)
    assert differences(records) == {"mesh.fsdp": ["1", "8"], "pd.seed": ["0", "1"]}
    assert seed_groups(records) == [[0, 1]]
    assert labels(records) == ["seed 0", "seed 1"]
    keys = ["pd.loss_metrics.0.coeff", "pd.loss_metrics.1.coeff", "pd.seed", "data.seed", "mesh.fsdp"]
    assert list(short_names(keys, records).values()) == [
        "FaithfulnessLoss.coeff", "ImportanceMinimalityLoss.coeff", "pd.seed", "data.seed", "fsdp",
    ]  # fmt: skip
    written(3, 1, 1.0, 2.0, 0.5)
    records = sorted(read_records([tmp_path]), key=lambda record: record.id)
    assert labels(records) == ["one of many p-00000001", "another p-00000002", "one of many p-00000003"]


points = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=12)


@given(points)
def test_the_front(given_points: list[tuple[int, int]]) -> None:
    """P2, as it is defined."""
    beaten = [
        any(a[0] <= b[0] and a[1] <= b[1] and a != b for a in given_points) for b in given_points
    ]  # fmt: skip
    assert on_front(given_points) == [n for n, is_beaten in enumerate(beaten) if not is_beaten]


@settings(max_examples=25)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 10**6))
def test_matched_components(n: int, m: int, seed: int) -> None:
    """P4, by trying all matchings."""
    rng = np.random.default_rng(seed)
    one = Fired(rng.standard_normal((5, n)), rng.standard_normal((n, 3)))
    other = Fired(rng.standard_normal((5, m)), rng.standard_normal((m, 3)))

    def best(cosine: Callable[[int, int], float]) -> float:
        k = min(n, m)
        pairs = [zip(range(n), way, strict=True) for way in permutations(range(m), k)] if n <= m else [
            zip(way, range(m), strict=True) for way in permutations(range(n), k)
        ]  # fmt: skip
        return max(sum(cosine(i, j) for i, j in pair) / k for pair in map(list, pairs))

    def cos(a: np.ndarray, b: np.ndarray) -> float:
        return float((a * b).sum() / np.sqrt((a * a).sum() * (b * b).sum()))

    found = matched(one, other)
    assert pytest.approx(best(lambda i, j: abs(cos(one.V[:, i], other.V[:, j])))) == found.V
    assert pytest.approx(best(lambda i, j: abs(cos(one.U[i], other.U[j])))) == found.U
    matrices = best(lambda i, j: cos(np.outer(one.V[:, i], one.U[i]), np.outer(other.V[:, j], other.U[j])))
    assert found.matrix == pytest.approx(matrices)


def test_the_same_components_agree() -> None:
    """Whatever their order, sizes and common sign; random directions do not."""
    rng = np.random.default_rng(0)
    one = Fired(rng.standard_normal((40, 10)), rng.standard_normal((10, 30)))
    order, sizes = rng.permutation(10), rng.choice([-2.0, -0.5, 3.0], 10)
    found = of_site("a", one, Fired(one.V[:, order] * sizes, one.U[order] * sizes[:, None]))
    assert found.cosines is not None
    assert found.by_chance is not None
    assert [found.cosines.V, found.cosines.U, found.cosines.matrix] == pytest.approx([1, 1, 1])
    assert found.by_chance.V < 0.5
    assert found.by_chance.matrix < 0.2
    nothing = Fired(one.V[:, :0], one.U[:0])
    assert of_site("a", one, nothing).cosines is None
    # A change of one sign alone makes other matrices.
    assert matched(one, Fired(-one.V, one.U)).matrix < 0.2


def test_runs_agree_with_themselves(toy: Path) -> None:
    """Checkpoints of real runs; one that cannot be opened is said to be so."""
    records = read_records([toy])
    twice = [records[0], records[0]]
    (pair,) = agreements(twice, [[0, 1]])
    assert pair.why == ""
    assert pair.cosines is not None
    assert all(one == other for site in pair.sites for one, other in [site.counts])
    assert [pair.cosines.V, pair.cosines.U, pair.cosines.matrix] == pytest.approx([1, 1, 1])


def test_runs_of_other_targets_are_not_matched(toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their checkpoints have other fingerprints of the target's weights."""
    records = read_records([toy])
    prints = iter(["ab", "cd"])
    monkeypatch.setattr(Checkpoints, "inputs", lambda self, step: {"target": next(prints)})
    (pair,) = agreements([records[0], records[0]], [[0, 1]])
    assert pair.why.endswith("have the same sizes but different weights")
    assert pair.sites == ()


@pytest.mark.parametrize(
    ("values", "ticks"),
    [((1e-5, 1.02e-5), ["10⁻⁵", "1.01·10⁻⁵", "1.02·10⁻⁵"]), ((1.0, 1000.0), ["1", "10", "100", "1,000"])],
)
def test_ticks_differ(values: tuple[float, float], ticks: list[str]) -> None:
    labels = [tick.label for tick in axis(values).ticks]
    assert len(set(labels)) == len(labels)
    assert set(ticks) <= set(labels)
