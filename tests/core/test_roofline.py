"""A lower bound of a step's time, and the cards' rates."""

from pathlib import Path

import pytest

from param_decomp_aot.roofline import Rates, Work, card_rates, latencies, roofline
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


def test_every_card_has_rates() -> None:
    rates = card_rates(CARDS)
    assert set(rates) == {"b200", "h200", "h100", "a100_80", "a6000", "a5000"}
    assert rates["h100"].bf16_flops == 989e12
    assert rates["h100"].memory == 3352320000000
    for of in rates.values():
        assert of.bf16_flops > of.tf32_flops > of.fp32_flops
        assert of.memory > of.node_link >= of.network
        assert of.flops("tf32") == pytest.approx(of.bf16_flops / 2, rel=0.01)


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
