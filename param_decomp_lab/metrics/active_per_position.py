"""The figure `active_per_position`: how many components are active at each position of a row."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from param_decomp_lab.metrics.base import METRICS, Metric
from param_decomp_lab.schema.kinds import registered

if TYPE_CHECKING:
    from jaxtyping import Array, Float
    from matplotlib.figure import Figure

    from param_decomp_lab.metrics.batch import Batch
    from param_decomp_lab.metrics.snapshot import Snapshot

THRESHOLDS = (0.0, 0.01, 0.1)


@registered(METRICS)
class CIActiveCountsPerPosition(Metric):
    type: Literal["CIActiveCountsPerPosition"]

    needs = "text"
    slow: ClassVar = True
    titles: ClassVar = {"active_per_position": "Active components at each position"}

    def describe(self) -> str:
        return f"figure, λ > {', '.join(f'{threshold:g}' for threshold in THRESHOLDS)}, over all sites"

    def measure(self, batch: Batch) -> Float[Array, "T thresholds"]:
        """Returns the number of components with λ above each of `THRESHOLDS`, summed over all sites and averaged over
        the rows.
        """
        import jax.numpy as jnp

        from param_decomp_jax.ci import per_position

        def active(logits: Float[Array, "*slots C"]) -> Float[Array, "*slots thresholds"]:
            lower = batch.reader.squash(logits)
            return jnp.stack([jnp.sum(lower > t, axis=-1, dtype=jnp.float32) for t in THRESHOLDS], axis=-1)

        found = per_position(batch.reader, batch.components, batch.target.sites, batch.target.memory, active)
        at_positions = [jnp.mean(jnp.sum(layers, axis=0), axis=0) for layers in found.values()]
        return jnp.sum(jnp.stack(at_positions), axis=0)

    def figures(self, means: Any, snapshot: Snapshot) -> dict[str, Figure]:
        from param_decomp_lab.metrics.figures import active_per_position

        return {"active_per_position": active_per_position(means, THRESHOLDS)}
