"""`eval/identity_ci_error/<site>`: how far a toy's importances are from their expected pattern."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from param_decomp_lab.metrics.base import METRICS, Metric
from param_decomp_lab.schema.kinds import registered
from param_decomp_lab.schema.mistakes import Wrong
from param_decomp_lab.schema.strict import Count, ListOf, Strict, Width, rule

if TYPE_CHECKING:
    from param_decomp_lab.metrics.snapshot import Snapshot


class IdentityPattern(Strict):
    layer_pattern: str
    n_features: Width


class DensePattern(Strict):
    layer_pattern: str
    k: Count


@registered(METRICS)
class IdentityCIError(Metric):
    type: Literal["IdentityCIError"]
    identity_ci: ListOf[IdentityPattern] | None
    dense_ci: ListOf[DensePattern] | None

    needs = "features"
    meanings: ClassVar = {"eval/identity_ci_error/": "entries that break the expected pattern; 0 is a perfect recovery"}

    @rule
    def _measures_something(self) -> Iterator[Wrong]:
        if not (self.identity_ci or self.dense_ci):
            neither = "has neither identity_ci nor dense_ci, so it measures nothing; give one of them"
            yield "type", f"{self.type} {neither}"

    def describe(self) -> str:
        identity = [f"identity {p.n_features} at {p.layer_pattern}" for p in self.identity_ci or ()]
        return ", ".join([*identity, *(f"dense {p.k} at {p.layer_pattern}" for p in self.dense_ci or ())])

    def patterns(self) -> Iterator[tuple[str, tuple[str, ...]]]:
        yield from ((f"identity_ci.{n}", (p.layer_pattern,)) for n, p in enumerate(self.identity_ci or ()))
        yield from ((f"dense_ci.{n}", (p.layer_pattern,)) for n, p in enumerate(self.dense_ci or ()))

    def misfits(self, n_features: int) -> Iterator[Wrong]:
        for n, pattern in enumerate(self.identity_ci or ()):
            if pattern.n_features != n_features:
                yield (
                    f"identity_ci.{n}.n_features",
                    f"is {pattern.n_features}, but the target has {n_features} features",
                )

    def row(self, means: Any, snapshot: Snapshot) -> dict[str, float]:
        return {f"eval/identity_ci_error/{site}": error for site, error in self._errors(snapshot).items()}

    def site_notes(self, snapshot: Snapshot) -> dict[str, str]:
        return {site: f"{error} errors" for site, error in self._errors(snapshot).items()}

    def _errors(self, snapshot: Snapshot) -> dict[str, int]:
        from param_decomp_lab.metrics.ground_truth import dense_ci_error, identity_ci_error

        probed = snapshot.probed
        errors: dict[str, int] = {}
        for identity in self.identity_ci or ():
            for site in probed.matching(identity.layer_pattern):
                errors[site] = identity_ci_error(probed.importances[site], identity.n_features)
        for dense in self.dense_ci or ():
            for site in probed.matching(dense.layer_pattern):
                errors[site] = dense_ci_error(probed.importances[site], dense.k)
        return errors
