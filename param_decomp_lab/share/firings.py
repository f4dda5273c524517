"""A component's examples with what other tools say of the list that an example is in."""

from collections.abc import Iterator
from dataclasses import dataclass

from param_decomp_lab.harvest.files import Example
from param_decomp_lab.share.shared_run import SharedRun, ShownExample, rounded


@dataclass(frozen=True)
class ExampleFiring:
    """``low``, ``high``: bounds of λ at the firings of the example's list. ``share``: of all firings, those within."""

    example: Example
    shown: ShownExample
    low: float
    high: float
    share: float


def shown_firings(run: SharedRun, site: str, number: int) -> Iterator[ExampleFiring]:
    """The firings of largest ``λ · |a|``, then a uniform sample of all."""
    firings = run.harvest.component(site, number)["firings"]
    examples = run.harvest.examples(site, number)
    for kind in ("top", "uniform"):
        found = [example for example in examples if example.kind == kind]
        peaks = [example.importance for example in found]
        # The top examples are the most extreme of all firings, the others a sample of all.
        low, share = (
            (min(peaks, default=0.0), len(found) / firings) if kind == "top" else (run.harvest.plan.threshold, 1.0)
        )
        for example in found:
            yield ExampleFiring(
                example, run.shown(example), rounded(low), rounded(max(peaks)), rounded(min(share, 1.0))
            )
