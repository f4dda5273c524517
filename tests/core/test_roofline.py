"""A step's time on a card, and the cards' rates."""

from pathlib import Path

import pytest

from param_decomp_aot.roofline import Precision, Rates, Work, card_rates, latencies, reached_rates, roofline
from param_decomp_aot.traffic import KINDS

GPUS = Path(__file__).parents[2] / "param_decomp_aot/gpus"
CARDS = (GPUS / "cards.csv").read_text()
RATES = Rates(bf16_flops=100.0, tf32_flops=50.0, fp32_flops=10.0, memory=1000.0, node_link=20.0, network=5.0)


def test_the_longest_term_bounds() -> None:
    found = roofline(Work({"bf16": 300, "tf32": 100, "fp32": 10}, memory=2000, within=80, across=15), RATES)
    assert found.terms == {"arithmetic": 3 + 2 + 1, "memory": 2, "node links": 4, "network": 3}
    assert (found.least, found.one_by_one, found.bound_by) == (6, 15, "arithmetic")
    assert roofline(Work({}, memory=2000, within=80, across=15), RATES).bound_by == "node links"
    assert roofline(Work({}, memory=2000, within=0, across=15), RATES).bound_by == "network"
    assert roofline(Work({}, memory=2000, within=0, across=0), RATES).bound_by == "memory"


def test_products_read_and_write_while_they_multiply() -> None:
    """All of them together, as long as that takes no longer than their arithmetic; as a bound everything counts."""
    dense = roofline(Work({"bf16": 300, "fp32": 10}, memory=5000, within=0, across=0, products=3500), RATES)
    assert dense.multiplying == {"bf16": 3, "fp32": 1}
    assert (dense.waiting_for_memory, dense.terms["memory"], dense.one_by_one) == (0, 1.5, 5.5)
    assert (dense.least, dense.bound_by) == (5, "memory")
    thin = roofline(Work({"bf16": 300}, memory=5000, within=0, across=0, products=3500), RATES)
    assert (thin.waiting_for_memory, thin.terms["memory"], thin.one_by_one) == (0.5, 2, 5)


def test_every_card_has_rates() -> None:
    rates = card_rates(CARDS)
    assert rates["h100"].bf16_flops == 989e12
    assert rates["h100"].memory == 3352320000000
    for of in rates.values():
        assert of.bf16_flops > of.tf32_flops >= of.fp32_flops
        assert of.memory > of.node_link >= of.network
        assert of.flops("tf32") == pytest.approx(of.bf16_flops / 2, rel=0.01)


def test_what_cards_reach() -> None:
    """An H200 was measured; the others have its shares of their data sheets, and the data sheet's links."""
    promised, reached = card_rates(CARDS), reached_rates(CARDS)
    assert set(promised) == set(reached)
    h200 = reached["h200"]
    assert (h200.bf16_flops, h200.tf32_flops, h200.fp32_flops, h200.memory) == (719e12, 359e12, 48.6e12, 3.74e12)
    assert [name for name, of in reached.items() if of.source.startswith("measured")] == ["h200"]
    for name, of in reached.items():
        for rate in ("bf16_flops", "tf32_flops", "fp32_flops", "memory"):
            share = getattr(h200, rate) / getattr(promised["h200"], rate)
            assert getattr(of, rate) == pytest.approx(share * getattr(promised[name], rate), rel=0.01)
        assert (of.node_link, of.network) == (promised[name].node_link, promised[name].network)


@pytest.mark.parametrize(
    ("tflop", "memory_gb", "products_gb", "measured_s"),
    [
        pytest.param({"bf16": 440.827, "tf32": 1.924, "fp32": 25.976}, 1522.28, 370.43, 1.4601, id="plain"),
        pytest.param({"bf16": 551.671, "fp32": 34.635}, 1084.37, 352.30, 1.6731, id="balanced"),
        pytest.param({"bf16": 571.050, "fp32": 34.635}, 1195.09, 390.80, 1.7185, id="lean"),
    ],
)
def test_the_clock_is_right(
    tflop: dict[Precision, float], memory_gb: float, products_gb: float, measured_s: float
) -> None:
    """Layer 18 of Llama-3.1-8B, 8 × 512 tokens, on one H200: what `pd probe` counted in these steps, and how long they
    took (docs/measurements/probe.md, docs/measurements/gpu.md)."""
    flops: dict[Precision, float] = {precision: 1e12 * n for precision, n in tflop.items()}
    work = Work(flops, 1e9 * memory_gb, 0, 0, products=1e9 * products_gb)
    assert roofline(work, reached_rates(CARDS)["h200"]).one_by_one == pytest.approx(measured_s, rel=0.1)


def test_collectives_have_latencies() -> None:
    """Of 8 GPUs in a node what others measured: 1 MB at 23 GB/s, 64 MB at 580 (speed of the link: 900)."""
    every = latencies((GPUS / "collectives.csv").read_text())
    assert set(every) == set(KINDS)
    each = every["all-gather"].of(1, 7, 0)
    rate = card_rates(CARDS)["b200"].node_link
    assert 1e6 / (each + 1e6 / rate) == pytest.approx(23e9, rel=0.1)
    assert 64e6 / (each + 64e6 / rate) == pytest.approx(580e9, rel=0.05)
    assert every["all-reduce"].of(2, 6, 4) == pytest.approx(2 * 16e-6 + 6 * 3.4e-6 + 4 * 14e-6)
    waiting = roofline(Work({}, memory=1000, within=20, across=0, latency=0.5), RATES)
    assert (waiting.one_by_one, waiting.least) == (2.5, 1)
