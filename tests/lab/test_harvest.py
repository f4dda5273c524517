"""A harvest against plain loops over what an opened run says, and its bytes however it was made."""

import math
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np
import pyarrow.parquet as pq
import pytest
from scipy.stats import chisquare

from param_decomp_jax.method.step import run_clean_pass
from param_decomp_lab import load_run
from param_decomp_lab.errors import CannotWrite, UserError
from param_decomp_lab.harvest.examples import Examples, TopExamples
from param_decomp_lab.harvest.files import Harvest
from param_decomp_lab.harvest.firings import HostFirings, ListedFirings, Ranked, Tables, find_firings
from param_decomp_lab.harvest.harvest import harvest
from param_decomp_lab.harvest.keys import keys, stream
from param_decomp_lab.harvest.plan import HarvestRequest
from param_decomp_lab.harvest.share import Share, find_share
from param_decomp_lab.harvest.state import HarvestState, blocks_done
from param_decomp_lab.harvest.token_counts import TokenCounts, pack
from param_decomp_lab.harvest.totals import Totals
from param_decomp_lab.opening import Run
from param_decomp_lab.runs.lock import only_job
from tests.cases import same_roundings, slow_but
from tests.lab.tiny_run import SEQ_LEN, pd_here

TOKENS = 40 * SEQ_LEN


@dataclass
class Counted:
    """What the plain loops read: for every position of the rows, in order."""

    importances: dict[str, np.ndarray]  # [N, C]
    activations: dict[str, np.ndarray]  # [N, C]
    inputs: np.ndarray  # [rows, T], or [N, features]
    outputs: np.ndarray  # [N, vocabulary]: probabilities, or a toy's outputs


def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many blocks, the last of which is not full."""
    monkeypatch.setattr("param_decomp_lab.harvest.plan.MOST_ROWS", 3)
    monkeypatch.setattr("param_decomp_lab.harvest.plan.VALUES_OF_A_BLOCK", 3 * SEQ_LEN * 64)


def read_all(run: Run, inputs: np.ndarray) -> Counted:
    """With the public functions of a run, and x from the clean pass."""
    importances = {name: np.asarray(x) for name, x in run.causal_importances(inputs).items()}
    with jax.set_mesh(run.mesh):
        clean = run_clean_pass(run.problem, run.ci, run.weights, jax.numpy.asarray(inputs), outputs=False)
    activations = {}
    for (stack, row), name in zip(run.problem.target.sites.stack_rows, run.sites, strict=True):
        V, U = run.factors(name)
        x = np.asarray(clean.site_inputs[stack.name][row], np.float64)
        activations[name] = (x @ V.astype(np.float64)) * np.linalg.norm(U.astype(np.float64), axis=1)
    outputs = np.asarray(run.output(inputs), np.float64)
    if inputs.dtype.kind == "i":
        outputs = np.exp(outputs - outputs.max(-1, keepdims=True))
        outputs /= outputs.sum(-1, keepdims=True)

    def flat(x: np.ndarray) -> np.ndarray:
        return x.reshape(-1, x.shape[-1])

    return Counted(
        {n: flat(x) for n, x in importances.items()},
        {n: flat(x) for n, x in activations.items()},
        inputs,
        flat(outputs),
    )


@pytest.fixture(scope="module")
def runs(finished: Path, toy: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Copies of this process's own: only one harvests in a folder at a time."""
    folder = tmp_path_factory.mktemp("harvested")
    found = {"llama": finished, "toy": toy / "p-00000001"}
    return {name: Path(shutil.copytree(run, folder / name / run.name)) for name, run in found.items()}


@pytest.fixture(scope="module", params=["llama", "toy"])
def made(request: pytest.FixtureRequest, runs: dict[str, Path]) -> Iterator[tuple[Run, Harvest, Counted]]:
    folder = runs[request.param]
    tokens = TOKENS if request.param == "llama" else 200
    with pytest.MonkeyPatch.context() as monkeypatch:
        small_blocks(monkeypatch)
        run = load_run(folder, devices=1)
        found = harvest(run, HarvestRequest(tokens=tokens, examples=5, threshold=THRESHOLD[request.param]))
        assert found is not None
        read = Harvest(found)
        inputs = np.stack([read.row(n) for n in range(read.plan.rows)])
        yield run, read, read_all(run, inputs)


THRESHOLD = {"llama": 0.3, "toy": 0.0}


def test_totals_and_histograms(made: tuple[Run, Harvest, Counted]) -> None:
    _, read, counted = made
    for site in read.sites:
        lam, a = counted.importances[site], counted.activations[site]
        fires = lam > read.plan.threshold
        table = read.components(site)
        for c in range(lam.shape[1]):
            row = table.slice(c, 1).to_pylist()[0]
            mine = fires[:, c]
            assert row["firings"] == mine.sum()
            assert abs(row["firings_at_one"] - (lam[:, c] >= 0.999).sum()) <= (np.abs(lam[:, c] - 0.999) < 1e-5).sum()
            assert row["importance_sum"] == pytest.approx(lam[:, c].sum(dtype=float), abs=1e-4)
            assert row["importance_max"] == pytest.approx(lam[mine, c].max(initial=0), abs=1e-5)
            assert row["activation_sum"] == pytest.approx(np.abs(a[:, c]).sum(), rel=1e-4, abs=1e-4)
            assert row["activation_max"] == pytest.approx(np.abs(a[:, c]).max(), rel=1e-4, abs=1e-6)
            assert row["firing_activation_sum"] == pytest.approx(np.abs(a[mine, c]).sum(), rel=1e-4, abs=1e-4)
            bins = np.zeros(20, int)
            for value in lam[mine, c]:
                bins[min(19, math.ceil(value * 20) - 1)] += 1
            assert np.abs(np.subtract(row["importance_histogram"], bins)).sum() <= 2  # a value on an edge
            octaves = np.zeros(48, int)
            for value in a[mine, c]:
                octave = min(11, max(-12, math.floor(math.log2(abs(value))))) + 12
                octaves[24 + octave if value > 0 else 23 - octave] += 1
            assert np.abs(np.subtract(row["activation_histogram"], octaves)).sum() <= 2
    assert any(read.components(site)["firings"].to_numpy().any() for site in read.sites)


def test_input_tokens(made: tuple[Run, Harvest, Counted]) -> None:
    _, read, counted = made
    N = read.plan.n_positions

    def at(position: int) -> list[int]:
        if read.plan.inputs == "tokens":
            return [int(counted.inputs.reshape(-1)[position])]
        return np.flatnonzero(counted.inputs[position]).tolist()

    totals = Counter(token for position in range(N) for token in at(position))
    for site in read.sites:
        fires = counted.importances[site] > read.plan.threshold
        for c in range(fires.shape[1]):
            n = Counter(token for position in np.flatnonzero(fires[:, c]) for token in at(position))
            f = fires[:, c].sum()
            rows = read.tokens(site, c).to_pylist()
            assert {row["token"]: row["n"] for row in rows}.items() <= n.items()
            assert len(rows) == len(n) or len(rows) >= 32
            assert (
                sorted((row["n"] for row in rows), reverse=True)[:32]
                == sorted(n.values(), reverse=True)[: min(32, len(n))]
            )
            told = {t: k * math.log(k * N / (f * totals[t])) for t, k in n.items() if totals[t] >= 10}
            best = sorted((score for score in told.values() if score > 0), reverse=True)[:4]
            kept = [t for t in read.summary(site).tokens[c].tolist() if t >= 0]
            assert [told[t] for t in kept] == pytest.approx(best)
            for row in rows:
                k, t = n[row["token"]], totals[row["token"]]
                assert row["total"] == t
                assert row["precision"] == pytest.approx(k / f)
                assert row["recall"] == pytest.approx(k / t)
                assert row["pmi"] == pytest.approx(math.log(k * N / (f * t)))


def test_examples(made: tuple[Run, Harvest, Counted]) -> None:
    _, read, counted = made
    plan, of_both_signs = read.plan, 0
    for site in read.sites:
        lam, a = counted.importances[site], counted.activations[site]
        fires = lam > plan.threshold
        for c in range(lam.shape[1]):
            examples = read.examples(site, c)
            top = [e for e in examples if e.kind == "top"]
            uniform = [e for e in examples if e.kind == "uniform"]
            assert len(uniform) == min(5, fires[:, c].sum())
            # Of each sign the best two of every row; of these the best two of each sign, and the best that are left.
            best, left = [], []
            for sign in (1, -1):
                mine = fires[:, c] & (np.where(np.signbit(a[:, c]), -1, 1) == sign)
                sizes = np.where(mine, lam[:, c] * np.abs(a[:, c]), -1).reshape(plan.rows, plan.length)
                by_row = np.sort(sizes, axis=1)[:, -2:]
                of_sign = np.sort(by_row[by_row >= 0])[::-1]
                best += [*(sign * of_sign[:2])]
                left += [*(sign * of_sign[2:])]
            best = sorted(best + sorted(left, key=abs)[::-1][: 5 - len(best)], key=abs)[::-1]
            np.testing.assert_allclose([e.importance * e.activation for e in top], best, rtol=1e-3, atol=1e-5)
            assert max(Counter((e.row, e.activation < 0) for e in top).values(), default=0) <= 2
            of_both_signs += len({e.activation > 0 for e in top}) == 2
            assert len({(e.row, e.position) for e in uniform}) == len(uniform)
            for e in examples:
                at = e.row * plan.length + e.position
                assert fires[at, c]
                assert e.importance == pytest.approx(lam[at, c], abs=1e-5)
                assert e.activation == pytest.approx(a[at, c], rel=1e-3, abs=1e-5)
                around = slice(e.row * plan.length + e.first, e.row * plan.length + e.first + len(e.importances))
                assert e.first == max(0, e.position - plan.around)
                assert len(e.importances) == min(plan.length, e.position + plan.around + 1) - e.first
                np.testing.assert_allclose(e.importances, lam[around, c], atol=1 / 255 + 1e-5)
                np.testing.assert_allclose(e.activations, a[around, c], atol=np.abs(a[around, c]).max() / 127 + 1e-6)
                if plan.inputs == "tokens":
                    assert e.tokens == tuple(counted.inputs.reshape(-1)[around].tolist())
                else:
                    assert e.tokens == tuple(np.flatnonzero(counted.inputs[at]).tolist())
    assert of_both_signs or plan.inputs == "features"


def test_co_firing_components_and_outputs(made: tuple[Run, Harvest, Counted], monkeypatch: pytest.MonkeyPatch) -> None:
    """All positions are sampled in so small a harvest, so that estimates are counts."""
    _, read, counted = made
    for limit in ("MOST_POSITIONS", "MOST_MEMBERS"):
        monkeypatch.setattr(f"param_decomp_lab.harvest.files.reading.{limit}", 10**9)
    N = read.plan.n_positions
    fires = {site: counted.importances[site] > read.plan.threshold for site in read.sites}
    k = read.plan.outputs
    kept = np.sort(counted.outputs, axis=1)[:, -k][:, None]
    everywhere = np.where(counted.outputs >= kept, counted.outputs, 0).mean(0)
    for site in read.sites:
        for c in range(0, fires[site].shape[1], 3):
            mine = fires[site][:, c]
            found = {(row["site"], row["component"]): row for row in read.co_firing(site, c, 10**6).to_pylist()}
            assert read.companions(site, c) == read.co_firing(site, c)  # the old name
            for other in read.sites:
                for d in range(fires[other].shape[1]):
                    theirs = fires[other][:, d]
                    both = int((mine & theirs).sum())
                    if (other, d) == (site, c) or both <= (mine.sum() >= 32):
                        assert (other, d) not in found
                        continue
                    row = found[other, d]
                    assert (row["n"], row["of"]) == (both, mine.sum())
                    assert row["precision"] == pytest.approx(both / mine.sum())
                    assert row["recall"] == pytest.approx(both / theirs.sum())
                    assert row["jaccard"] == pytest.approx(both / (mine | theirs).sum())
                    assert row["pmi"] == pytest.approx(math.log(both * N / (mine.sum() * theirs.sum())))
            if not mine.any():
                continue
            here = np.where(counted.outputs >= kept, counted.outputs, 0)[mine].mean(0)
            for row in read.outputs(site, c).to_pylist():
                assert row["mean"] == pytest.approx(here[row["token"]], abs=2e-3)
                assert row["everywhere"] == pytest.approx(everywhere[row["token"]], abs=2e-3)


def test_tokens_and_outputs_by_sign(made: tuple[Run, Harvest, Counted], monkeypatch: pytest.MonkeyPatch) -> None:
    _, read, counted = made
    monkeypatch.setattr("param_decomp_lab.harvest.files.reading.MOST_SIGNED", 10**9)
    N, k, both = read.plan.n_positions, read.plan.outputs, 0
    kept = np.sort(counted.outputs, axis=1)[:, -k][:, None]
    outputs = np.where(counted.outputs >= kept, counted.outputs, 0)
    old = Harvest(read.folder)
    old.plan = replace(old.plan, format=2)
    for site in read.sites:
        fires = counted.importances[site] > read.plan.threshold
        for c in range(fires.shape[1]):
            a = counted.activations[site][:, c]
            at = {"a ≥ 0": fires[:, c] & (a >= 0), "a < 0": fires[:, c] & (a < 0)}
            found = {of.sign: of for of in read.by_sign(site, c, 10**6)}
            assert old.by_sign(site, c) == []
            n_of = [places.sum() for places in at.values()]
            rarer, total = min(n_of), max(1, sum(n_of))
            for least, is_split in (((rarer, 0), True), ((rarer + 1, 0), False), ((1, (rarer + 0.5) / total), False)):
                if rarer and not both:  # one table for all where a few firings have the other sign
                    with monkeypatch.context() as patched:
                        patched.setattr("param_decomp_lab.harvest.files.reading.LEAST_OF_SIGN", least)
                        assert bool(read.by_sign(site, c)) is is_split
            if min(n_of) < max(4, 0.01 * sum(n_of)):
                assert not found
                continue
            both += 1
            assert list(found) == list(at)
            for sign, places in at.items():
                of = found[sign]
                assert of.n == places.sum()
                if read.plan.inputs == "tokens":
                    tokens = counted.inputs.ravel()
                    for row in of.tokens.to_pylist():
                        n, total = (tokens[places] == row["token"]).sum(), (tokens == row["token"]).sum()
                        assert row["n"] == n
                        assert row["precision"] == pytest.approx(n / of.n)
                        assert row["pmi"] == pytest.approx(math.log(n * N / (of.n * total)))
                    assert sum(of.tokens["n"].to_pylist()) == of.n
                else:
                    assert len(of.tokens) == 0
                for row in of.outputs.to_pylist():
                    assert row["mean"] == pytest.approx(outputs[places, row["token"]].mean(), abs=2e-3)
    assert both > 1


def test_weights(made: tuple[Run, Harvest, Counted]) -> None:
    run, read, _ = made
    for site in read.sites:
        V, U = run.factors(site)
        for c in (0, V.shape[1] - 1):
            found = read.weights(site, c)
            row = read.component(site, c)
            assert row["V_norm"] == pytest.approx(np.linalg.norm(V[:, c]), rel=1e-5)
            assert row["U_norm"] == pytest.approx(np.linalg.norm(U[c]), rel=1e-5)
            for vector, name in ((V[:, c], "input"), (U[c], "output")):
                cosines = vector / np.linalg.norm(vector)
                order = np.argsort(-np.abs(cosines), kind="stable")[:8]
                assert found[f"{name}s"] == order.tolist()
                np.testing.assert_allclose(found[f"{name}_cosines"], cosines[order], rtol=1e-5)
            if read.plan.inputs == "tokens" and site.endswith("down_proj"):
                logits = (U[c] * np.asarray(run.weights["norm"])) @ np.asarray(run.weights["embed"]).T
                logits -= logits.mean()
                assert found["promoted"][0] == logits.argmax()
                assert found["suppressed"][0] == logits.argmin()
                assert found["promoted_logits"][0] == pytest.approx(logits.max(), rel=1e-4)
            else:
                assert found["promoted"] == []


def test_opened_run_has_it(made: tuple[Run, Harvest, Counted]) -> None:
    run, read, counted = made
    for site, found in run.activations(counted.inputs).items():
        expected = counted.activations[site]
        np.testing.assert_allclose(np.asarray(found).reshape(expected.shape), expected, rtol=1e-4, atol=1e-5)
    assert run.harvest.folder == read.folder
    assert run.harvest.plan.n_positions == read.plan.n_positions
    with pytest.raises(UserError, match="unknown site"):
        read.component("nowhere", 0)
    with pytest.raises(UserError, match="and no component"):
        read.examples(next(iter(read.sites)), 10**6)


# ---- the same bytes ----


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


@pytest.fixture(scope="module", params=slow_but(["llama"], ["llama", "toy"]))
def undisturbed(request: pytest.FixtureRequest, runs: dict[str, Path]) -> tuple[Path, Any, dict[str, bytes]]:
    folder = runs[request.param]
    with pytest.MonkeyPatch.context() as monkeypatch:
        small_blocks(monkeypatch)
        found = harvest(load_run(folder, devices=1), REQUEST[request.param])
    assert found is not None
    bytes_of = contents(found)
    shutil.rmtree(found)
    return folder, REQUEST[request.param], bytes_of


REQUEST = {"llama": HarvestRequest(tokens=TOKENS, seed=7), "toy": HarvestRequest(tokens=100, seed=7)}


WAYS = ["8 devices", "2 processes", "4 processes", "interrupted", "fewer processes then"]


@same_roundings
@pytest.mark.parametrize("how", slow_but(["8 devices"], WAYS))
def test_the_same_bytes(
    undisturbed: tuple[Path, Any, dict[str, bytes]], how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, request, expected = undisturbed
    small_blocks(monkeypatch)
    run = load_run(folder, devices=8 if how == "8 devices" else 1)
    found = None
    match how:
        case "8 devices":
            found = harvest(run, request)
        case "2 processes" | "4 processes":
            count = int(how[0])
            for number in reversed(range(count)):
                found = harvest(run, request, Share(number, count))
        case "fewer processes then":
            calls = iter(range(10**6))
            assert harvest(run, request, Share(2, 3), stop=lambda: next(calls) >= 1) is None
            assert harvest(run, request, Share(1, 3)) is None
            found = harvest(run, request)
        case _:
            for _ in range(4):
                assert found is None
                found = harvest(run, request, stop=lambda: True)
            found = found or harvest(run, request)
    assert found is not None
    made = contents(found)
    shutil.rmtree(found)
    assert made.keys() == expected.keys()
    assert [name for name in made if made[name] != expected[name]] == []
    assert not list(found.parent.glob(".*"))


def test_what_a_killed_process_left_is_no_part_of_it(
    undisturbed: tuple[Path, Any, dict[str, bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, request, expected = undisturbed
    small_blocks(monkeypatch)
    run = load_run(folder, devices=1)
    assert harvest(run, request, stop=lambda: True) is None
    [work] = (folder / "harvests").glob(".*")
    state = work / "process-0" / "state"
    (state / "partial-9").mkdir()
    (state / "partial-9" / "0.top.rank.npy").write_bytes(b"half")
    (state / "tokens-block-99.parquet").write_bytes(b"half")
    found = harvest(run, request)
    assert found is not None
    assert contents(found) == expected
    shutil.rmtree(found)


@pytest.mark.parametrize("damage", [lambda data: data[: len(data) // 2], lambda data: b"", lambda data: b"[" * 10**5])
def test_a_damaged_save_is_named(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    folder = tmp_path / "process-0" / "state"
    state = HarvestState(folder, [3], 2)
    state.sweep()
    state.save()
    assert blocks_done(folder) == set()
    saved = folder / "save-1"
    for file in [*saved.iterdir(), None]:
        whole = b""
        if file is None:
            (saved / "done.json").unlink()
        else:
            whole = file.read_bytes()
            file.write_bytes(damage(whole))
        with pytest.raises(UserError, match=r"save-1 is damaged .*; remove .*process-0, and its part of the work"):
            HarvestState.restore(folder, [3], 2)
        if file is None or file.name == "done.json":
            with pytest.raises(UserError, match="save-1 is damaged"):
                blocks_done(folder)
        if file is not None:
            file.write_bytes(whole)


def test_a_run_that_is_taken_away(runs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is made anew at its old place; renamed back, the harvest is made."""
    small_blocks(monkeypatch)
    folder, moved = tmp_path / "run", tmp_path / "moved"
    shutil.copytree(runs["toy"], folder)
    run = load_run(folder, devices=1)

    def take_away() -> bool:
        if not moved.exists():
            folder.rename(moved)
        return False

    with pytest.raises(CannotWrite, match=rf"the run folder {folder} was renamed to {moved} during the harvest"):
        harvest(run, REQUEST["toy"], stop=take_away)
    assert [path.name for path in tmp_path.iterdir()] == ["moved"]
    with pytest.raises(CannotWrite, match="cannot be opened"):
        harvest(run, REQUEST["toy"])
    moved.rename(folder)
    found = harvest(run, REQUEST["toy"])
    assert found is not None
    assert not list(found.parent.glob(".*"))


def test_a_harvest_that_was_made_meanwhile(runs: dict[str, Path], tmp_path: Path) -> None:
    """By another job, after this one had looked for it."""
    folder = tmp_path / "run"
    shutil.copytree(runs["toy"], folder)
    run, other = load_run(folder, devices=1), load_run(folder, devices=1)
    found: list[Path | None] = []

    @contextmanager
    def meanwhile(*arguments: Any) -> Iterator[Any]:
        with mock.patch("param_decomp_lab.harvest.harvest.only_job", only_job):
            found.append(harvest(other, REQUEST["toy"]))
        arguments[0].mkdir(parents=True, exist_ok=True)
        with only_job(*arguments) as check:
            yield check

    with mock.patch("param_decomp_lab.harvest.harvest.only_job", meanwhile):
        assert harvest(run, REQUEST["toy"]) == found[0]
    assert not list((folder / "harvests").glob(".*"))  # no work is left


# ---- parts ----


def test_the_sample_is_uniform() -> None:
    """Each of 60 firings is as likely in the sample of 6, over 200 seeds; in two parts that are merged, too."""
    n, chosen = 60, np.zeros((2, 60), int)
    positions, ones = np.arange(10, dtype=np.int32), np.ones(10, np.float32)
    row = ListedFirings(
        positions, ones.astype(np.int32), ones, ones, lambda at, components: (np.ones(at.shape, np.float32),) * 2
    )
    for seed in range(200):
        drawn = keys(stream(seed, 1), np.arange(n)) + keys(stream(seed, 1, 0), np.arange(3))[1]
        for which, halves in enumerate(([slice(0, n)], [slice(0, 20), slice(20, n)])):
            merged = None
            for of in halves:
                sample = Examples.empty(3, 6, 2)
                for first in range(of.start, of.stop, 10):
                    sample.add(row, Ranked(np.arange(10), drawn[first : first + 10]), first // 10, 10)
                if merged is None:
                    merged = sample
                else:
                    merged.merge(sample)
            assert merged is not None
            chosen[which, merged.row[1] * 10 + merged.position[1]] += 1
    assert (chosen[0] == chosen[1]).all()
    assert chosen[0].sum() == 1200
    assert chisquare(chosen[0]).pvalue > 1e-3


@pytest.mark.parametrize("K", [1, 2, 5, 12])
def test_top_examples_are_the_best_of_each_sign(K: int) -> None:
    """In whatever parts they are found: firings of 3 components, block by block, in two states that are merged."""
    rng = np.random.default_rng(K)
    length, rows, block = 8, 24, 3
    for n_negative in (0.0, 0.1, 0.5, 1.0):
        lam = rng.choice([0.2, 1.0], (rows * length, 3)).astype(np.float32)
        size = rng.exponential(size=lam.shape).astype(np.float32)
        a = np.where(rng.random(lam.shape) < n_negative, -size, size)
        lam[rng.random(lam.shape) < 0.3] = 0
        halves = [TopExamples.empty(3, K, 2) for _ in range(2)]
        for number in range(rows // block):
            half, here = halves[number % 2], slice(number * block * length, (number + 1) * block * length)
            found = HostFirings(lam[here], a[here], np.float32(0))
            counted = tables(block * length, 3, np.zeros(block * length, np.int32), 0)
            ranked, _ = found.count(counted._replace(worst_top=half.worst), len(found))
            half.add(found, ranked, number * block, length)
        halves[0].merge(halves[1])
        for c in range(3):
            worth = lam[:, c] * np.abs(a[:, c])
            signs = []
            for mine in (a[:, c] > 0, a[:, c] < 0):
                places = [p for p in np.argsort(-worth, kind="stable") if mine[p] and worth[p] > 0]
                signs.append(
                    [p for k, p in enumerate(places) if [q // length for q in places[:k]].count(p // length) < 2]
                )
            first = [p for of in signs for p in of[: K // 2]]
            left = sorted((p for of in signs for p in of[K // 2 :]), key=lambda p: -worth[p])
            expected = {(p // length, p % length) for p in first + left[: K - len(first)]}
            kept = halves[0].rank[c] != np.iinfo(np.uint64).max
            assert set(zip(halves[0].row[c][kept], halves[0].position[c][kept], strict=True)) == expected


def tables(n: int, C: int, places: np.ndarray, worst: int) -> Tables:
    """For n positions; ``places`` of one of up to 4 inputs at each. Every other component has its examples already."""
    totals, high = Totals.zeros(C), np.iinfo(np.uint64).max
    limit = np.where(np.arange(C) % 2, np.uint64(worst), high)
    counts = totals.firings, totals.firings_at_one, totals.importance_max
    of_firings = *counts, totals.importance_histogram, totals.activation_histogram
    drawn = keys(1, np.arange(n)), keys(2, np.arange(C))
    return Tables(
        *of_firings, np.zeros(C), np.zeros((C, 4), np.int32), places, *drawn, np.stack([limit, limit], 1), limit
    )


def test_bins() -> None:
    lam = np.array([1e-9, 0.05, 0.0500001, 0.999, 1.0, 1.3, 1, 0.998], np.float32)
    a = np.array([1.0, 1.99, 2.0, -1.0, 1e-9, 1e9, -1e9, -1e-9], np.float32)
    counted = tables(1, 8, np.zeros(1, np.int32), 0)
    HostFirings(lam[None], a[None], np.float32(0)).count(counted, 8)
    assert counted.importance_histogram.argmax(1).tolist() == [0, 0, 1, 19, 19, 19, 19, 19]
    assert counted.activation_histogram.argmax(1).tolist() == [36, 36, 37, 11, 24, 47, 0, 23]
    assert (counted.firings == 1).all()
    assert counted.firings_at_one.tolist() == [0, 0, 0, 1, 1, 1, 1, 0]
    np.testing.assert_array_equal(counted.activation_sum, np.abs(a.astype(float)))


def test_firings_of_another_device_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """What fires is found on a device that is no CPU, and only that is fetched. Many, so that they are counted in parts
    (`firings.AT_ONCE`)."""
    rng = np.random.default_rng(0)
    shape = (1, 900, 170)
    lam = np.where(rng.random(shape) < 0.1, rng.random(shape), 0).astype(np.float32)
    a = rng.normal(size=lam.shape).astype(np.float32)
    here = find_firings(jax.numpy.asarray(lam), jax.numpy.asarray(a), 880, 0.0)
    from param_decomp_lab.harvest.firings import _from_device

    there = _from_device(jax.numpy.asarray(lam), jax.numpy.asarray(a), 880, 0.0)
    assert isinstance(here, HostFirings)
    assert len(here) == len(there) == (lam[:, :880] > 0).sum()
    chosen = np.array([3, 4, 700])
    at = rng.integers(0, 880, (5, 7)).astype(np.int32)
    for mine, theirs in (
        (here.places(), there.places()),
        (here.components_at(chosen), there.components_at(chosen)),
        (here.gather(at, there.component[:5]), there.gather(at, there.component[:5])),
    ):
        for one, other in zip(mine, theirs, strict=True):
            np.testing.assert_array_equal(one, other)
    counted = [tables(880, 170, (np.arange(880) % 4).astype(np.int32), 1 << 61) for _ in range(2)]
    ranked = here.count(counted[0], len(here)), there.count(counted[1], len(there))
    for one, other in zip(*counted, strict=True):
        np.testing.assert_array_equal(one, other)
    for one, other in zip(*ranked, strict=True):
        np.testing.assert_array_equal(one.rank, other.rank)
        assert 0.5 < len(one.rank) / len(here) < 0.65
        for mine, theirs in zip(here.select(one.number), there.select(other.number), strict=True):
            np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"sites": ("nowhere",)}, "matches no site"),
        ({"threshold": 1.0}, "--threshold: should be"),
        ({"tokens": 0}, "--tokens: should be"),
        ({"tokens": math.nan}, "--tokens: should be"),
        ({"data": Path("/nowhere")}, "no shards of tokens"),
    ],
)
def test_wrong_requests(runs: dict[str, Path], given: dict[str, Any], message: str) -> None:
    run = load_run(runs["llama"], devices=1)
    with pytest.raises(UserError, match=message):
        harvest(run, HarvestRequest(**given))


def test_shares() -> None:
    assert find_share(None, None, {}) == Share()
    assert find_share(4, 2, {}) == Share(2, 4)
    for count, number in ((None, 1), (2, None), (2, 2)):
        with pytest.raises(UserError, match="--process"):
            find_share(count, number, {})
    slurm = {
        "SLURM_JOB_ID": "1",
        "SLURM_STEP_NODELIST": "a",
        "SLURM_NTASKS": "3",
        "SLURM_PROCID": "1",
        "SLURM_LOCALID": "1",
    }
    assert find_share(None, None, slurm) == Share(1, 3)


def test_a_site_that_fires_nowhere_has_no_tokens(tmp_path: Path) -> None:
    """As that of an expert that no position takes."""
    counts = TokenCounts(tmp_path)
    counts.add(0, pack(np.zeros(0, int), np.zeros(0, int), np.zeros(0, int)))
    counts.add(1, pack(np.array([4, 3, 4]), np.array([7, 9, 7]), np.array([1, 2, 5])))
    counts.spill("all", always=True)
    [file] = counts.paths
    found = pq.read_table(file)
    assert [column.to_pylist() for column in found.columns] == [[1, 1], [3, 4], [9, 7], [2, 6]]


def test_the_command(runs: dict[str, Path]) -> None:
    finished = runs["llama"]
    first = pd_here("harvest", finished, "--tokens", "64", "--devices", "1")
    assert first.status == 0, first
    folder = Path(first.out.split()[-1])
    assert Harvest(folder).plan.rows == 4
    assert pd_here("harvest", finished, "--tokens", "64", "--devices", "1").out.split()[-1] == str(folder)
    shutil.rmtree(folder)
    wrong = pd_here("harvest", finished, "--sites", "layers.9.*")
    assert wrong.status == 2
    assert "matches no site" in wrong.err
