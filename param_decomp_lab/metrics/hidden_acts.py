"""`eval/loss/CIHiddenActsReconLoss`: the error at the sites' outputs with masks equal to λ."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from param_decomp_lab.metrics.base import METRICS, Metric
from param_decomp_lab.schema.kinds import registered

if TYPE_CHECKING:
    from param_decomp_jax.method.losses import Term


@registered(METRICS)
class CIHiddenActsReconLoss(Metric):
    type: Literal["CIHiddenActsReconLoss"]

    def term(self) -> Term:
        from param_decomp_jax.method.masks import Constant
        from param_decomp_jax.method.recon import AllSites, Reconstruction
        from param_decomp_jax.method.routing import Everywhere

        return Reconstruction(self.type, 1.0, AllSites(), Everywhere(), Constant(0.0), error="hidden_acts")
