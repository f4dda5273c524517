"""`experiments/gpu_day/links.py`: what is sent, how it is timed, and what follows for latency and rate."""

import jax
import jax.numpy as jnp
import pytest

from experiments.gpu_day.links import (
    KINDS,
    Message,
    as_table,
    fit,
    fit_all,
    group_mesh,
    many,
    only_collective,
    plan,
    time_one,
)
from param_decomp_aot.compile import OPTIONS
from param_decomp_aot.topology import gpus, target_configs
from param_decomp_aot.traffic import Collective, traffic
from param_decomp_lab.probe.cards import TABLE
from tests.plugin import needs_plugin

ONE_TO_ONE = ("all-reduce", "all-to-all", "collective-permute")
"""Collectives whose result is as large as what they take."""


def test_latency_and_rate_of_links() -> None:
    def message(kind: str, group: int, size: int, off: float) -> Message:
        hops, ring = Collective(kind, size, group, group, "", "", "").hops, size * (group - 1) // group
        seconds = (20e-6 + hops * 3e-6 + ring / 400e9) * off
        return Message(kind, "node", group, size, ring, hops, seconds)

    exact = [message("all-reduce", group, 4**n << 16, 1.0) for group in (2, 8) for n in range(7)]
    found = fit(exact)
    assert (found.start_s, found.hop_s, found.rate_Bps) == pytest.approx((20e-6, 3e-6, 400e9), rel=1e-6)
    assert found.latency_s == pytest.approx(20e-6 + 14 * 3e-6)
    assert found.off < 1e-6
    # Small messages count as much as large ones.
    noisy = fit([message("all-gather", 8, 4**n << 16, 1 + 0.05 * (-1) ** n) for n in range(7)])
    assert noisy.hop_s is None
    assert noisy.latency_s == pytest.approx(41e-6, rel=0.1)
    assert noisy.rate_Bps == pytest.approx(400e9, rel=0.1)
    assert 0.03 < noisy.off < 0.1
    with pytest.raises(ValueError, match="do not grow"):
        fit([Message("all-gather", "node", 2, 4**n, 4**n, 1, 1 / 4**n) for n in range(7)])
    fits, reasons = fit_all([*exact, Message("all-to-all", "network", 2, 1, 0, 1, 1.0)])
    assert [one.kind for one in fits] == ["all-reduce"]
    assert reasons == ["all-to-all over the network: messages of one size tell no rate"]
    rows = ["kind,link,group,latency_s,start_s,hop_s,rate_Bps", "all-reduce,node,8,6.2e-05,2e-05,3e-06,4e+11"]
    assert as_table(fits).splitlines() == rows


def test_groups_of_links() -> None:
    sizes = (1, 2, 3, 4)
    assert list(plan(8, 1, sizes, 2)) == [("node", 2, (1, 2)), ("node", 4, (1, 2)), ("node", 8, sizes)]
    assert list(plan(6, 1, sizes, 2)) == [("node", 2, (1, 2)), ("node", 6, sizes)]
    assert list(plan(8, 4, sizes, 2)) == [("node", 2, sizes), ("network", 4, sizes)]
    assert list(plan(2, 2, sizes, 2)) == [("network", 2, sizes)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_message_between_simulated_devices(kind: str) -> None:
    mesh = group_mesh(jax.devices(), "node", 4, 2)
    found = time_one(kind, "node", mesh, 1 << 16, 4, runs=1)
    sent = {"all-reduce": 2 * 3 << 14, "collective-permute": 1 << 16}.get(kind, 3 << 14)
    assert (found.kind, found.group, found.payload, found.ring) == (kind, 4, 1 << 16, sent)
    assert found.seconds > 0


def test_a_program_that_sends_something_else_is_not_timed() -> None:
    program, shape = many("all-gather", group_mesh(jax.devices(), "node", 4, 2), 1 << 16, 4, jnp.float32)
    text = program.lower(shape).compile().as_text()
    with pytest.raises(ValueError, match=r"8 × all-gather: XLA made 4 × all-gather of 65,536 bytes of it"):
        only_collective(text, "all-gather", 8, 4)


@needs_plugin
@pytest.mark.parametrize("kind", KINDS)
def test_links_of_a_card_copy_nothing(kind: str) -> None:
    """A copy of a message would be counted as time of the link."""
    card = target_configs(TABLE.read_text())["h100"]
    program, shape = many(kind, group_mesh(gpus(card, 16, 8), "node", 8, 2), 1 << 28, 8, jnp.bfloat16)
    text = program.lower(shape).compile(compiler_options=dict(OPTIONS)).as_text()
    assert only_collective(text, kind, 8, 8).payload == 1 << 28
    moved = traffic(text, 8).memory
    of_collectives = sum(
        2 * c.payload if c.kind in ONE_TO_ONE else c.payload * 9 // 8 for c in traffic(text, 8).collectives
    )
    assert sum(moved.values()) < 8 * of_collectives * 1.001
