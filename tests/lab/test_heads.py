"""Attention heads of a run (section 19): against the reference, on the browser's page, and where an induction head is
planted."""

import re
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import Any
from urllib.parse import quote

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from starlette.testclient import TestClient

from param_decomp_jax.analysis.heads import SCORES
from param_decomp_jax.targets.gpt2 import GPT2Config
from param_decomp_jax.targets.transformer import language_logits
from param_decomp_lab import load_run
from param_decomp_lab.browse.heads_page import HEADS, PARTNERS, TEXT
from param_decomp_lab.browse.server import make_app
from param_decomp_lab.errors import UserError
from param_decomp_lab.harvest.files import find_harvests
from param_decomp_lab.harvest.harvest import harvest
from param_decomp_lab.harvest.plan import HarvestRequest
from param_decomp_lab.opening import Run
from param_decomp_lab.ui.numbers import percent, signed
from param_decomp_lab.weights.target_folder import save_target
from tests import reference as ref
from tests.core import tiny as core
from tests.lab.tiny_run import ARCHITECTURE, LIGHT, Tiny, pd_here
from tests.lab.worker_here import answer_here

Q, K, V, OUT = (f"layers.1.self_attn.{kind}_proj" for kind in "qkvo")
UP = "layers.0.mlp.up_proj"
C = {Q: 10, K: 9, V: 8, OUT: 7, UP: 6}
N_HEADS, N_KV = ARCHITECTURE.n_heads, ARCHITECTURE.n_kv_heads
FREQUENCIES = ref.rope_frequencies(ARCHITECTURE.head_dim, ARCHITECTURE.rope_theta)


def decomposed(tiny: Tiny, folder: Path, sites: dict[str, int], *assignments: str) -> Run:
    """A run of a few steps."""
    targets = ", ".join(f"{{module_pattern: '{name}', C: {n}}}" for name, n in sites.items())
    outcome = pd_here(*tiny.train(folder, 1, *LIGHT, f"pd.decomposition_targets=[{targets}]", *assignments))
    assert outcome.status == 0, outcome
    return load_run(folder / "p-00000001", devices=1)


@pytest.fixture(scope="module")
def run(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Of the tiny Llama, whose two query heads share one of keys and values."""
    return decomposed(tiny, tmp_path_factory.mktemp("attends"), C)


def component(run: Run, site: str, number: int) -> tuple[np.ndarray, np.ndarray]:
    found = run.component(site, number)
    return found.V.astype(np.float64), found.U.astype(np.float64)


def kappa(run: Run, i: int, j: int, distance: int) -> np.ndarray:
    """Of component i of the queries and j of the keys."""
    return ref.kappa(component(run, Q, i)[1], component(run, K, j)[1], N_HEADS, N_KV, distance, FREQUENCIES)


# ---- against the reference ----


def test_shares(run: Run) -> None:
    for site, n_heads in ((Q, N_HEADS), (K, N_KV), (V, N_KV), (OUT, N_HEADS)):
        vectors = run.factors(site)[0].T if site == OUT else run.factors(site)[1]
        found = run.heads(site)
        np.testing.assert_allclose(found.share, ref.head_shares(vectors, n_heads), atol=1e-12)
        np.testing.assert_allclose(found.share.sum(axis=1), 1)
        assert (found.side, found.served, found.layer) == ("V" if site == OUT else "U", N_HEADS // n_heads, 1)
        np.testing.assert_array_equal(run.heads(site, 3).share, found.share[3])
        np.testing.assert_allclose((found.norm**2).sum(axis=1), (vectors.astype(np.float64) ** 2).sum(axis=1))


def test_a_direction_of_zeros_lies_nowhere(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    U = run.directions(Q, "U").copy()
    U[3] = 0
    monkeypatch.setattr(run, "directions", lambda name, side: U)
    assert run.heads(Q).share[3].tolist() == [0, 0]


def test_scores_of_heads_and_components(run: Run) -> None:
    tokens = np.random.default_rng(0).integers(0, 6, (3, 12))
    target = core.ref_target(run.problem.target, run.weights, tokens)
    clean = ref.clean_pass(target, [Q])
    weights = run.weights["layers"]
    q, k = (clean.inputs[Q] @ np.asarray(weights[kind][1], np.float64) for kind in ("q_proj", "k_proj"))
    pairs = zip(q, k, strict=True)
    patterns = np.stack([ref.attention_pattern(*rows, N_HEADS, N_KV, FREQUENCIES) for rows in pairs])
    np.testing.assert_allclose(run.attention(tokens, 1), patterns, atol=1e-5)
    np.testing.assert_allclose(run.attention(tokens[0], 1), patterns[0], atol=1e-5)
    expected, found = ref.head_scores(patterns, tokens), run.head_scores(tokens)
    for name in SCORES:
        np.testing.assert_allclose(getattr(found, name)[1], expected[name], atol=1e-5)
        for site in (Q, K, V, OUT):
            heads = run.heads(site)
            np.testing.assert_allclose(
                found.of(heads)[name], ref.component_scores(heads.share, expected[name]), atol=1e-5
            )
            np.testing.assert_allclose(found.of(run.heads(site, 2))[name], found.of(heads)[name][2])
    assert found.previous.shape == (2, N_HEADS)
    assert found.positions["previous"] == 33
    without = run.head_scores([1, 2, 3])
    assert np.isnan(without.induction).all()
    assert np.isnan(without.chance["duplicate"])
    assert without.chance["previous"] == pytest.approx((1 / 2 + 1 / 3) / 2)


@pytest.mark.parametrize("at_once", [4, 1 << 12])
def test_partners_are_those_of_largest_contribution(run: Run, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("param_decomp_lab.opening.heads.AT_ONCE", at_once)
    distances = range(3)
    everything = np.array(
        [
            [[ref.query_key(component(run, Q, i), component(run, K, j), kappa(run, i, j, d)) for d in distances]
             for j in range(C[K])]
            for i in range(C[Q])
        ]
    )  # fmt: skip
    for site, number, other, own in ((Q, 4, K, everything[4]), (K, 2, Q, everything[:, 2])):
        lists = run.partners(site, number, most=5, distances=3)
        assert len(lists) == N_HEADS
        for head, found in enumerate(lists):
            order = np.argsort(-np.abs(own[:, :, head]).max(axis=1), kind="stable")[:5]
            assert [(p.head, p.site, p.number) for p in found] == [(head, other, n) for n in order]
            np.testing.assert_allclose([p.contributions for p in found], own[order, :, head], rtol=1e-4, atol=1e-6)


def test_contributions_on_a_text(run: Run) -> None:
    tokens = np.random.default_rng(1).integers(0, 256, 7)
    a = {name: np.asarray(x, np.float64) for name, x in run.activations(tokens, [Q, K]).items()}
    found = run.contributions(tokens, Q, 4, [2, 0])
    assert found.shape == (2, N_HEADS, 7, 7)
    for n, j in enumerate((2, 0)):
        kappas = [kappa(run, 4, j, d) for d in range(7)]
        expected = ref.query_key_on_text(a[Q][:, 4], a[K][:, j], kappas)
        np.testing.assert_allclose(found[n], expected, atol=1e-5 * np.abs(expected).max())
    np.testing.assert_allclose(run.contributions(tokens, K, 2, [4])[0], found[0], rtol=1e-5, atol=1e-7)
    assert run.contributions(tokens, Q, 4, []).shape == (0, N_HEADS, 7, 7)


def test_all_pairs_give_the_scores(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """With components whose Δ is 0, V and U a matrix and an identity: their contributions add up to what the pattern is
    the softmax of."""

    def factors(site: str) -> tuple[np.ndarray, np.ndarray]:
        W = run.matrix(site)
        return W, np.eye(W.shape[1], dtype=np.float32)

    tokens = np.arange(6)
    target = core.ref_target(run.problem.target, run.weights, tokens[None])
    x = ref.clean_pass(target, [Q]).inputs[Q][0]
    pairs = np.zeros((N_HEADS, 6, 6))
    (VQ, UQ), (VK, UK) = factors(Q), factors(K)
    for i in range(len(UQ)):
        for j in range(len(UK)):
            kappas = [ref.kappa(UQ[i], UK[j], N_HEADS, N_KV, d, FREQUENCIES) for d in range(6)]
            pairs += ref.query_key_on_text(x @ VQ[:, i], x @ VK[:, j], kappas)
    expected = np.exp(pairs) * np.tril(np.ones((6, 6)))
    np.testing.assert_allclose(run.attention(tokens, 1), expected / expected.sum(-1, keepdims=True), atol=1e-5)


def test_wrong_questions(run: Run, toy: Path) -> None:
    tokens = [1, 2, 3]
    for ask, message in (
        (lambda: run.heads("nowhere"), "unknown site 'nowhere'"),
        (lambda: run.heads(UP), "is not cut into attention heads"),
        (lambda: run.heads(Q, 10), "and no component 10"),
        (lambda: run.attention(tokens, 2), "there is no layer 2"),
        (lambda: run.partners(V, 0), "has neither queries nor keys"),
        (lambda: run.partners(Q, 0, distances=0), "at least 1, not 0"),
        (lambda: run.contributions([tokens], Q, 0, [1]), "a text or token ids"),
        (lambda: run.contributions(tokens, Q, 0, [9]), "and no component 9"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=message):
            ask()
    features = load_run(toy / "p-00000001", devices=1)
    with pytest.raises(UserError, match="has no attention heads"):
        features.head_scores(np.zeros(5))
    with pytest.raises(UserError, match="is not cut into attention heads"):
        features.heads(next(iter(features.sites)))


# ---- the page ----


@pytest.fixture(scope="module")
def shown(run: Run) -> Iterator[TestClient]:
    harvest(run, HarvestRequest(tokens=640, examples=4))
    with TestClient(make_app([run.folder.parent]), base_url="http://localhost:8720", follow_redirects=False) as found:
        yield found


def cells(row: str) -> list[str]:
    return [unescape(re.sub("<[^>]*>", "", cell)).strip() for cell in re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row)]


@pytest.mark.parametrize("site", [Q, K, OUT])
@pytest.mark.parametrize("text", ["", "12 times 12 makes"])
def test_the_page(run: Run, shown: TestClient, site: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has what the run says, here in this process; and the component's page leads to it."""
    answer_here(run, monkeypatch)
    [made] = find_harvests(run.folder)
    base = f"/{run.id}/{made.name}"
    link = f"{base}/heads?site={site}&component=3"
    assert f'href="{link.replace("&", "&amp;")}"' in shown.get(f"{base}/sites/{site}/3").text
    page = shown.get(f"{link}&text={quote(text)}")
    assert page.status_code == 200
    assert len(page.content) <= 50_000
    first, *lists = re.findall("<tbody>(.*?)</tbody>", page.text, re.DOTALL)
    rows = [cells(row) for row in first.split("</tr>")[:-1]]
    heads, tokens = run.heads(site, 3), run.tokens(text or TEXT)
    scores = run.head_scores(tokens)
    by_head = scores.by_head(heads)
    for head, row in enumerate(rows[:-2]):
        assert row[1:] == [percent(x) for x in (heads.share[head], *(by_head[name][head] for name in SCORES))]
    assert len(rows) == len(heads.share) + 2
    assert rows[-2][2:] == [percent(x) for x in scores.of(heads).values()]
    assert rows[-1][2:] == [percent(x) for x in scores.chance.values()]
    if site == OUT:
        assert not lists
        return
    largest = np.argsort(-heads.share.repeat(heads.served), kind="stable")[:HEADS]
    partners = run.partners(site, 3, most=PARTNERS)
    names = run.names(tokens.tolist())
    assert len(lists) == len(largest)
    for head, listed in zip(largest, lists, strict=True):
        found = [cells(row) for row in listed.split("</tr>")[:-1]]
        assert [(row[0], *row[1:3]) for row in found] == [
            (str(p.number), *(signed(x) for x in p.contributions)) for p in partners[head]
        ]
        values = run.contributions(tokens, site, 3, [p.number for p in partners[head]])[:, head]
        for row, own in zip(found, values, strict=True):
            t, s = np.unravel_index(np.abs(own).argmax(), own.shape)
            assert row[3].split(" ")[0] == signed(own[t, s])
            assert row[3].replace(" ", "") == f"{signed(own[t, s])}{names[t]}→{names[s]}".replace(" ", "")


def test_a_page_that_there_is_not(shown: TestClient, run: Run) -> None:
    [made] = find_harvests(run.folder)
    base = f"/{run.id}/{made.name}"
    assert f"{base}/heads" not in shown.get(f"{base}/sites/{UP}/3").text
    for wrong in (f"site={UP}&component=3", f"site={Q}&component=99", f"site={Q}", "site=x&component=0"):
        assert shown.get(f"{base}/heads?{wrong}").status_code == 404
    assert "a text may have" in shown.get(f"{base}/heads?site={Q}&component=3&text={'a' * 5001}").text


# ---- an induction head that is planted ----

LETTERS, T, FIRST = 16, 32, 97
PLANTED = GPT2Config.from_config(
    {"vocab_size": 256, "n_embd": 2 * LETTERS + T, "n_layer": 2, "n_head": 2, "n_positions": T, "n_inner": 4}
)
PREVIOUS_HEAD, INDUCTION_HEAD = (0, 0), (1, 1)
TOKEN, POSITION, BEFORE = slice(0, LETTERS), slice(LETTERS, LETTERS + T), slice(LETTERS + T, 2 * LETTERS + T)
"""Dimensions of the residual stream that have the letter, its position, and the letter before it."""


def planted() -> Any:
    """A GPT-2 that goes on with what came before, by two of its four heads: one writes to each position which letter
    was before it, one looks for the position before which its own letter was, and says what is there. All else is
    noise."""
    rng = np.random.default_rng(0)

    def leaf(path: Any, shape: tuple[int, ...]) -> np.ndarray:
        noise = rng.normal(0, 0.02, shape)
        name = path[-1].key
        return 1 + noise if "norm" in name and "bias" not in name else noise

    shapes = PLANTED.weight_shapes()
    made = jax.tree_util.tree_map_with_path(leaf, shapes, is_leaf=lambda x: isinstance(x, tuple))
    made["embed"][FIRST : FIRST + LETTERS, TOKEN] += np.eye(LETTERS)
    made["positions"][:, POSITION] += np.eye(T)

    def plant(
        at: tuple[int, int], query: tuple[slice, Any], key: tuple[slice, Any], writes: slice, gain: float
    ) -> None:
        layer, head = at
        width = PLANTED.d_model
        qkv, o = made["layers"]["qkv_proj"][layer], made["layers"]["o_proj"][layer]
        start = head * PLANTED.head_dim
        for number, (reads, matrix) in enumerate((query, key, (TOKEN, np.eye(LETTERS)))):
            columns = slice(number * width + start, number * width + start + matrix.shape[1])
            qkv[reads, columns] += matrix
        o[start : start + LETTERS, writes] += gain * np.eye(LETTERS)

    plant(PREVIOUS_HEAD, (POSITION, 4 * np.eye(T)), (POSITION, np.eye(T, k=1)), BEFORE, 0.2)
    plant(INDUCTION_HEAD, (TOKEN, 5 * np.eye(LETTERS)), (BEFORE, np.eye(LETTERS)), TOKEN, 2)
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), made)


def loss_of_repeated(weights: Any, tokens: np.ndarray, period: np.ndarray) -> float:
    """Cross-entropy of the letters that come again."""
    log_p = np.asarray(jax.nn.log_softmax(language_logits(weights, PLANTED, jnp.asarray(tokens))))
    errors = -np.take_along_axis(log_p[:, :-1], tokens[:, 1:, None], axis=2)[..., 0]
    return float(errors[np.arange(1, T)[None] > period].mean())


def ablated(weights: Any, layer: int, head: int) -> Any:
    """With the rows of o_proj that read one head at 0."""
    o = weights["layers"]["o_proj"]
    rows = slice(head * PLANTED.head_dim, (head + 1) * PLANTED.head_dim)
    return {**weights, "layers": {**weights["layers"], "o_proj": o.at[layer, rows].set(0)}}


@pytest.fixture(scope="module")
def planted_run(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("planted")
    save_target(folder / "target", PLANTED, planted())
    sites = {f"h.1.attn.{name}": 4 for name in ("c_attn.q", "c_attn.k", "c_proj")}
    model = f"target.folder={folder / 'target'}", "target.spec.model_class=transformers.GPT2LMHeadModel"
    return decomposed(tiny, folder / "runs", sites, *model)


def test_the_scores_name_the_heads_that_an_ablation_names(planted_run: Run) -> None:
    """In text with an induction pattern: of the second layer the head with the largest induction score is the one
    without which what comes again is predicted worst, and of the first that with the largest previous-token score."""
    rng = np.random.default_rng(1)
    period = rng.integers(T // 4, T // 2, (16, 1))
    letters = FIRST + np.stack([rng.permutation(LETTERS) for _ in period])
    tokens = np.take_along_axis(letters, np.arange(T)[None] % period, axis=1).astype(np.int32)
    weights = planted_run.weights
    clean = loss_of_repeated(weights, tokens, period)
    worse = np.array(
        [[loss_of_repeated(ablated(weights, n, h), tokens, period) - clean for h in range(2)] for n in range(2)]
    )
    assert clean < 0.5
    scores = planted_run.head_scores(tokens)
    for found, (layer, head), name in (
        (scores.previous, PREVIOUS_HEAD, "previous"), (scores.induction, INDUCTION_HEAD, "induction"),
    ):  # fmt: skip
        assert np.unravel_index(found.argmax(), found.shape) == (layer, head)
        assert found[layer].argmax() == worse[layer].argmax()
        assert worse[layer, head] > 2 > 0.2 > worse[layer, 1 - head]
        assert found[layer, head] > 0.8 > 3 * scores.chance[name]


def test_heads_of_a_gpt2(planted_run: Run) -> None:
    """Slices of its fused matrix are cut into heads, without rotation: a contribution is the same at all distances."""
    q, k, o = planted_run.sites
    for site in (q, k, o):
        vectors = planted_run.factors(site)[0].T if site == o else planted_run.factors(site)[1]
        np.testing.assert_allclose(planted_run.heads(site).share, ref.head_shares(vectors, 2), atol=1e-12)
    (VQ, UQ), (VK, UK) = (planted_run.factors(site) for site in (q, k))
    for head, found in enumerate(planted_run.partners(q, 1, distances=3)):
        assert sorted(p.number for p in found) == [0, 1, 2, 3]
        for p in found:
            pair = (VQ[:, 1], UQ[1]), (VK[:, p.number], UK[p.number])
            expected = ref.query_key(*pair, ref.kappa(UQ[1], UK[p.number], 2, 2, 0))[head]
            np.testing.assert_allclose(p.contributions, [expected] * 3, rtol=1e-4, atol=1e-7)
