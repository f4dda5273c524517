"""docs/development.md, "A new reconstruction loss" and "Another loss", followed to the letter: two losses that are not
part of the project are configured, checked, trained, evaluated and reported on by the same commands as the others."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import jax.numpy as jnp
import pytest
from jaxtyping import Array, Float, Int

from param_decomp_jax.method.clean_pass import DecomposedBatch
from param_decomp_jax.method.losses import DirectTerm, Term
from param_decomp_lab.config.loss_parts import DEFAULT_ROUTING, Routing
from param_decomp_lab.config.loss_schema import LOSSES, Loss, ReconLoss
from param_decomp_lab.config.term_maker import TermMaker
from param_decomp_lab.schema.kinds import registered
from param_decomp_lab.schema.strict import Count, NonNegative
from tests.lab.tiny_run import pd_here, rows
from tests.lab.toy_run import CONFIG, save_toy, settings

# --8<-- a new reconstruction loss: what somebody adds to `config/loss_schema.py`, there with @registered(LOSSES)


class CIMaskedChunkwiseReconLoss(ReconLoss):
    """Masks equal to λ, on groups of consecutive sites in turn."""

    type: Literal["CIMaskedChunkwiseReconLoss"]
    sites_per_chunk: Count
    routing: Routing = DEFAULT_ROUTING

    def term(self, make: TermMaker) -> Term:
        return make.reconstruction(make.constant(0.0), live=make.chunks(self.sites_per_chunk), routing=self.routing)


# --8<-- another loss: what somebody adds to `losses.py` ...


@dataclass(frozen=True)
class ComponentNorm(DirectTerm):
    """Mean squared entry of V and U above a threshold."""

    threshold: float

    def value(self, batch: DecomposedBatch, step: Int[Array, ""]) -> Float[Array, ""]:
        entries = [jnp.ravel(matrix) for factors in batch.components.values() for matrix in (factors.V, factors.U)]
        squares = jnp.concatenate(entries) ** 2
        return jnp.mean(jnp.where(squares > self.threshold**2, squares, 0.0))

    def describe(self) -> str:
        return f"mean squared entry of V and U above {self.threshold}"


# --8<-- ... and to `config/loss_schema.py`


class ComponentNormLoss(Loss):
    """Mean squared entry of V and U above a threshold."""

    type: Literal["ComponentNormLoss"]
    threshold: NonNegative = 0.0

    def term(self, make: TermMaker) -> Term:
        return ComponentNorm(make.name, make.coeff, self.threshold)


# --8<-- the end
NEW = (CIMaskedChunkwiseReconLoss, ComponentNormLoss)
CHUNKS = "type: CIMaskedChunkwiseReconLoss, sites_per_chunk: 2"
TERMS = (
    f"pd.loss_metrics=[{{{CHUNKS}, coeff: 0.5}}, {{type: ComponentNormLoss, coeff: 100.0, name: norm}}]",
    "pd.components_optimizer.lr_schedule={start_val: 0.1}",
    "pd.steps=2",
    "pd.faithfulness_warmup_steps=0",
    "eval.every=2",
    "eval.slow_every=2",
    f"eval.metrics=[{{{CHUNKS}}}, {{type: ComponentNormLoss, threshold: 1000.0}}]",
)


@pytest.fixture(autouse=True)
def new_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Registers them until the end of the test."""
    for model in NEW:
        monkeypatch.setitem(LOSSES, model.__name__, model)


def test_new_losses_go_the_whole_way(tmp_path: Path) -> None:
    save_toy(tmp_path)
    said = " ".join(pd_here("check", CONFIG, *settings(tmp_path, 1, *TERMS)).out.split())
    assert "CIMaskedChunkwiseReconLoss 0.5 2 0 2 chunks of 2 sites live, the last of 1; routed to a uniform" in said
    assert "norm 100 – – mean squared entry of V and U above 0" in said
    outcome = pd_here("train", CONFIG, *settings(tmp_path, 1, *TERMS))
    assert outcome.status == 0, outcome
    run = tmp_path / "p-00000001"
    first, second, last = rows(run)
    for row in (first, second):
        assert row["train/loss/CIMaskedChunkwiseReconLoss"] > 0
        total = 0.5 * row["train/loss/CIMaskedChunkwiseReconLoss"] + 100 * row["train/loss/norm"]
        assert row["train/loss/total"] == pytest.approx(total, rel=1e-5)
    assert second["train/loss/norm"] < first["train/loss/norm"]
    assert last["eval/loss/CIMaskedChunkwiseReconLoss"] > 0
    assert last["eval/loss/ComponentNormLoss"] == 0  # nothing is above its threshold
    page = (run / "report.html").read_text()
    for name in ("CIMaskedChunkwiseReconLoss", "norm", "sites_per_chunk", "ComponentNormLoss"):
        assert name in page
    assert pd_here("report", run).status == 0


def test_mistakes_in_new_losses(tmp_path: Path) -> None:
    """As in all others; no metric of their own name exists without them."""
    wrong = f"pd.loss_metrics=[{{{CHUNKS}, coefff: 1, name: a/b}}, {{type: ComponentNorm, threshold: -1, coeff: 1}}]"
    outcome = pd_here("check", CONFIG, *settings(tmp_path, 1, wrong))
    assert outcome.status == 2
    for text in (
        "pd.loss_metrics.0.coefff: unknown key 'coefff'; did you mean 'coeff'?",
        "pd.loss_metrics.0.name: should match pattern",
        "pd.loss_metrics.1: unknown 'type' 'ComponentNorm'; did you mean 'ComponentNormLoss'?",
        "pd.loss_metrics.1.threshold: should be greater than or equal to 0, not -1",
    ):
        assert text in outcome.err


def test_a_type_is_taken_once() -> None:
    with pytest.raises(AssertionError, match="two models have the type ComponentNormLoss"):
        registered(LOSSES)(ComponentNormLoss)
