"""The base class of metrics that are not losses, and the table of all of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from param_decomp_lab.metrics.rows_shown import RowsShown
from param_decomp_lab.schema.mistakes import Wrong
from param_decomp_lab.schema.strict import Strict

if TYPE_CHECKING:  # configurations are read without JAX and matplotlib
    from matplotlib.figure import Figure

    from param_decomp_jax.method.losses import Term
    from param_decomp_lab.metrics.batch import Batch
    from param_decomp_lab.metrics.snapshot import Snapshot


class Metric(Strict):
    """A metric that is not a loss; its fields are the keys that configurations give.

    Each metric overrides some of the methods, and imports JAX and matplotlib within them.
    """

    type: str

    needs: ClassVar[Literal["text", "features"] | None] = None
    """The inputs of the targets that it can evaluate: a language model's text, or a toy's features. None: both."""
    slow: ClassVar[bool] = False
    """Whether `measure` and `row` are called only at the interval of figures."""
    usual: ClassVar[Mapping[str, Any]] = {}
    """The keys besides `type` that `pd eval --metric` uses if the run does not configure the metric."""
    meanings: ClassVar[Mapping[str, str]] = {}
    """What its numbers are, in the words of the report, by prefixes of their keys."""
    titles: ClassVar[Mapping[str, str]] = {}
    """The titles of its figures, by name."""

    # ---- what is checked before a run ----

    def describe(self) -> str:
        """Returns what `pd check` says about it."""
        return ""

    def logs_the_same(self, other: Self) -> bool:
        """Whether it logs the same keys as another metric of its type, in which case both together are refused."""
        return True

    def patterns(self) -> Iterator[tuple[str, tuple[str, ...]]]:
        """Yields patterns of site names by key. At least one of each key must match a site."""
        return iter(())

    def misfits(self, n_features: int) -> Iterator[Wrong]:
        """Yields what does not fit a toy with this number of features."""
        return iter(())

    # ---- numbers ----

    def term(self) -> Term | None:
        """Returns a term that is measured with the losses, and logged as `eval/loss/<name>` with its name."""
        return None

    def measure(self, batch: Batch) -> Any:
        """Returns a tree of arrays, whose means over the batches are passed to `row`. Traced into the program of an
        evaluation, or of its `slow` part.
        """
        return None

    @classmethod
    def measure_all(cls, metrics: Sequence[Self], batch: Batch) -> list[Any]:
        """Returns `measure` of each configured metric of this type, which may share work."""
        return [metric.measure(batch) for metric in metrics]

    def row(self, means: Any, snapshot: Snapshot) -> dict[str, float]:
        """Returns its numbers by key (`eval/…`). ``means``: averages of what `measure` returned, as NumPy arrays. Every
        process calls it.
        """
        return {}

    # ---- figures ----

    @property
    def histogram_batches(self) -> int | None:
        """Returns how many batches the histograms of `Snapshot.statistics` use; None for all."""
        return None

    @property
    def density_threshold(self) -> float | None:
        """Returns the λ above which a component is active in the densities of `Snapshot.statistics`; None for any."""
        return None

    @property
    def rows_shown(self) -> RowsShown | None:
        """Returns how much of the first batch `Snapshot.rows` has; None for a metric that does not read it."""
        return None

    def site_notes(self, snapshot: Snapshot) -> dict[str, str]:
        """Returns what the figures of other metrics say about single sites, by site."""
        return {}

    def figures(self, means: Any, snapshot: Snapshot) -> dict[str, "Figure"]:
        """Returns its figures by name. ``means``: as in `row`. Every process calls it."""
        return {}


METRICS: dict[str, type[Metric]] = {}
"""Every metric that is not a loss, by the `type` that configurations have, in the order of their numbers and figures.

``@registered(METRICS)`` adds a class.
"""
