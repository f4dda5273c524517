"""`eval/l0/*`: how many components are active at a position; `eval/routed/*`: how many positions take an expert."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import Field

from param_decomp_lab.metrics.base import METRICS, Metric
from param_decomp_lab.schema.kinds import registered
from param_decomp_lab.schema.site_names import expert_of, matches_module
from param_decomp_lab.schema.strict import ListOf, NonNegative
from param_decomp_lab.ui.numbers import exact

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int

    from param_decomp_jax.nn.grouped import OverPositions
    from param_decomp_lab.metrics.batch import Batch
    from param_decomp_lab.metrics.snapshot import Snapshot


@registered(METRICS)
class CI_L0(Metric):
    type: Literal["CI_L0"]
    groups: dict[str, Annotated[ListOf[str], Field(min_length=1)]] | None
    ci_alive_threshold: NonNegative = 0.0

    usual: ClassVar = {"groups": None}
    meanings: ClassVar = {
        "eval/l0/": "active components per position",
        "eval/routed/": "share of the positions that take the expert",
    }

    def describe(self) -> str:
        groups = f"; groups {', '.join(self.groups)}" if self.groups else ""
        return f"active components per position, λ > {exact(self.ci_alive_threshold)}{groups}"

    def logs_the_same(self, other: Self) -> bool:
        return self.ci_alive_threshold == other.ci_alive_threshold

    def patterns(self) -> Iterator[tuple[str, tuple[str, ...]]]:
        for group, patterns in (self.groups or {}).items():
            yield f"groups.{group}", patterns

    @classmethod
    def measure_all(cls, metrics: Sequence[Self], batch: Batch) -> list[Any]:
        """Measures all thresholds in one pass; the shares of the experts, which have no threshold, are with the last
        one.
        """
        thresholds = [metric.ci_alive_threshold for metric in metrics]
        found, routed = mean_l0(batch, thresholds), routed_shares(batch)
        return [*({"l0": l0, "routed": {}} for l0 in found[:-1]), {"l0": found[-1], "routed": routed}]

    def row(self, means: Any, snapshot: Snapshot) -> dict[str, float]:
        sites, prefix = snapshot.sites, f"eval/l0/{self.ci_alive_threshold}_"
        by_site = {name: float(value) for name, value in sites.unstack(means["l0"]).items()}
        row = {prefix + name: value for name, value in by_site.items()}
        for group, patterns in (self.groups or {}).items():
            members = [v for name, v in by_site.items() if any(matches_module(p, name) for p in patterns)]
            row[prefix + group] = float(sum(members))
        for site, (stack, place) in zip(sites.all, sites.stack_rows, strict=True):
            if stack.name in means["routed"]:
                row[f"eval/routed/{expert_of(site.name)}"] = float(means["routed"][stack.name][place])
        return row


def mean_l0(batch: Batch, thresholds: Sequence[float]) -> list[dict[str, Float[Array, "*lead"]]]:
    """Returns, for each threshold, the mean number of components with λ above it per position, by stack and layer."""
    import jax.numpy as jnp

    from param_decomp_jax.ci import per_component

    def alive(logits: Float[Array, "*n C"], over: OverPositions) -> Float[Array, "*experts C thresholds"]:
        lower = batch.reader.squash(logits)
        return jnp.stack([over.sum((lower > t).astype(jnp.float32)) / batch.n_positions for t in thresholds], axis=-1)

    found = per_component(batch.reader, batch.components, batch.target.sites, batch.target.memory, alive)
    return [{name: jnp.sum(x[..., n], axis=-1) for name, x in found.items()} for n in range(len(thresholds))]


def routed_shares(batch: Batch) -> dict[str, Float[Array, "layers experts"]]:
    """Returns, for stacks of experts only, the share of the positions that take each expert (X3), by stack."""
    import jax
    import jax.numpy as jnp

    def of_layer(chosen: Int[Array, "*n k"], n_experts: int) -> Float[Array, " experts"]:
        taken = chosen.reshape(-1, 1) == jnp.arange(n_experts)
        return jnp.sum(taken, axis=0, dtype=jnp.float32) / batch.n_positions

    experts = {stack.name: stack.experts for stack in batch.target.sites.stacks if stack.experts is not None}
    return {name: jax.vmap(partial(of_layer, n_experts=n))(batch.reader.chosen[name]) for name, n in experts.items()}
