"""What every masked forward of a batch shares."""

from dataclasses import dataclass

from jaxtyping import Array, UInt32

from param_decomp_jax.reads import KeptReads, Reads, ReplayedReads, SiteInputs
from param_decomp_jax.targets.base import Forward, Target, Weights
from param_decomp_jax.targets.plain_linears import RESIDUAL


@dataclass(frozen=True)
class Scene:
    """A batch after its clean pass.

    ``site_inputs``: clean inputs of the sites by stack, empty where they are made again when they are read. ``at``:
    global numbers of the positions (M4).
    """

    target: Target
    weights: Weights
    inputs: Array
    clean: Forward
    site_inputs: SiteInputs
    at: UInt32[Array, "*leading"]
    batch: int
    use_delta: bool

    @property
    def leading(self) -> tuple[int, ...]:
        """Leading axes of an activation, global."""
        return self.at.shape

    @property
    def reads(self) -> Reads:
        """What the sites read on the clean pass."""
        if self.site_inputs:
            return KeptReads(self.site_inputs)
        return ReplayedReads(self.target, self.weights, dict(self.clean.records))

    def residual(self, live: tuple[int, ...]) -> Array:
        """F6: the clean residual where a forward with these live sites leaves the clean pass, its first live layer."""
        layer = self.target.sites.all[live[0]].layer
        first = max(start for start in self.clean.records if start <= layer)
        return self.clean.records[first][RESIDUAL][layer - first]
