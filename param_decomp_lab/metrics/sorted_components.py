"""The shared base of figures of a toy's components, which sort the components by the features that need them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar

from param_decomp_lab.metrics.base import Metric
from param_decomp_lab.schema.strict import ListOf

if TYPE_CHECKING:
    from jaxtyping import Int
    from numpy import ndarray

    from param_decomp_lab.metrics.snapshot import Snapshot


class SortedComponents(Metric):
    """``identity_patterns``: sites whose components are matched to features. ``dense_patterns``: sites whose components
    are sorted by how active they are, as are those that no pattern names; without any pattern, all are matched."""

    identity_patterns: ListOf[str] | None
    dense_patterns: ListOf[str] | None

    needs = "features"
    titles: ClassVar = {"tms_geometry": "Features and their components"}

    def describe(self) -> str:
        identity = [f"identity at {pattern}" for pattern in self.identity_patterns or ()]
        dense = [f"dense at {pattern}" for pattern in self.dense_patterns or ()]
        return ", ".join(["figures", *identity, *dense])

    def patterns(self) -> Iterator[tuple[str, tuple[str, ...]]]:
        yield from ((f"identity_patterns.{n}", (pattern,)) for n, pattern in enumerate(self.identity_patterns or ()))
        yield from ((f"dense_patterns.{n}", (pattern,)) for n, pattern in enumerate(self.dense_patterns or ()))

    def _orders(self, snapshot: Snapshot) -> dict[str, Int[ndarray, " C"]]:
        """Returns all components of each site, sorted."""
        from param_decomp_lab.metrics.ground_truth import dense_columns, match_components

        probed = snapshot.probed
        dense = {site for pattern in self.dense_patterns or () for site in probed.matching(pattern)}
        identity = {site for pattern in self.identity_patterns or () for site in probed.matching(pattern)}
        if not dense and not identity:
            identity = set(probed.importances)
        return {
            site: match_components(x).columns if site in identity else dense_columns(x)
            for site, x in probed.importances.items()
        }
