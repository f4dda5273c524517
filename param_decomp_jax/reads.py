"""What the sites read on the clean pass (F5), for a CI function that reads all of it: kept, or made again.

A global CI function takes every site's clean input into one sum (`JointAffine`). Kept, those inputs are the largest
arrays of the clean pass. They can also be made again, layer by layer, from the residual that each layer began with,
which masked forwards need anyway (F6).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import jax
from jax import lax
from jaxtyping import Array, Float

from param_decomp_jax.sites import PRE_IDENTITY, Segment, Sites
from param_decomp_jax.targets.base import Run, Target, Weights
from param_decomp_jax.targets.plain_linears import RESIDUAL, PlainLayer

SiteInputs = dict[str, Float[Array, "layers *n d_in"]]
"""Clean inputs of the sites, by stack."""

OfSite = Callable[[Float[Array, "*n d_in"], Any], Array]
"""From a site's clean input and its own parameters to its share of a sum."""


@runtime_checkable
class Reads(Protocol):
    """Clean inputs of all sites. ``inputs``: themselves, by stack; empty where they are made again."""

    @property
    def inputs(self) -> SiteInputs: ...

    def total(self, start: Array, of_site: OfSite, parameters: dict[str, Any], recompute: bool) -> Array:
        """``start + Σ of_site(input, parameters)`` over all sites; ``parameters`` by stack, with a layer axis.

        ``recompute``: a site's share is made again in the backward.
        """
        ...


@dataclass(frozen=True)
class KeptReads:
    """The inputs as the clean pass recorded them."""

    inputs: SiteInputs

    def total(self, start: Array, of_site: OfSite, parameters: dict[str, Any], recompute: bool) -> Array:
        share = jax.checkpoint(of_site, prevent_cse=False) if recompute else of_site
        for name, x in self.inputs.items():
            # Added outside of what is recomputed, so that no partial sum is kept.
            start, _ = lax.scan(lambda h, site: (h + share(*site), None), start, (x, parameters[name]))
        return start


@dataclass
class _SummingLayer(PlainLayer):
    """A layer of the clean pass that sums up its sites' shares as they read."""

    of_site: OfSite = field(kw_only=True)
    parameters: dict[str, Any] = field(kw_only=True)
    shares: list[Array] = field(default_factory=list, kw_only=True)

    def __call__(
        self, kind: str, x: Float[Array, "*n d_in"], W: Float[Array, "d_in d_out"]
    ) -> Float[Array, "*n d_out"]:
        for site in (kind + PRE_IDENTITY, kind):
            if site in self.parameters:
                self.shares.append(self.of_site(lax.stop_gradient(x), self.parameters[site]))
        return super().__call__(kind, x, W)


@dataclass(frozen=True)
class ReplayedReads:
    """The inputs made again. ``records``: of the clean pass, with every residual."""

    target: Target
    weights: Weights
    records: dict[int, dict[str, Array]]

    @property
    def inputs(self) -> SiteInputs:
        return {}

    def total(self, start: Array, of_site: OfSite, parameters: dict[str, Any], recompute: bool) -> Array:
        for run in self.target.runs(self.weights):
            for segment in self.target.sites.segments:
                if run.first <= segment.first < run.stop:
                    start = self._segment(start, run, segment, of_site, parameters)
        return start

    def _segment(self, start: Array, run: Run, segment: Segment, of_site: OfSite, parameters: dict[str, Any]) -> Array:
        by_kind = {stack.kind: parameters[stack.name] for stack in segment.stacks}

        def share(residual: Array, weights: Weights, own: dict[str, Any]) -> Array:
            layer = _SummingLayer(of_site=of_site, parameters=own)
            run.layer(residual, weights, layer)
            total = layer.shares[0]
            for other in layer.shares[1:]:
                total = total + other
            return total

        # The layer is always made again: to keep what it makes would be to keep what is read.
        again = jax.checkpoint(share, prevent_cse=False)
        xs = (self.records[segment.first][RESIDUAL], run.of(segment.first, segment.stop), by_kind)
        return lax.scan(lambda h, layer: (h + again(*layer), None), start, xs)[0]


def site_inputs(sites: Sites, records: dict[int, dict[str, Array]]) -> SiteInputs:
    """From the records of a clean pass that kept what its sites read."""
    return {stack.name: records[segment.first][stack.reads] for segment in sites.segments for stack in segment.stacks}
