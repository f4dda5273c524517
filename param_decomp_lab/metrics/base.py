"""The base class of metrics that are not losses, and the table of all of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from param_decomp_lab.metrics.rows_shown import RowsShown
from param_decomp_lab.schema.mistakes import Wrong
from param_decomp_lab.schema.strict import Strict

if TYPE_CHECKING:  # a configuration is read without JAX and matplotlib
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
    """Whether `measure` and `row` are asked at the interval of figures only."""
    usual: ClassVar[Mapping[str, Any]] = {}
    """The keys besides `type` where `pd eval --metric` gives the type only and the run does not configure it."""
    meanings: ClassVar[Mapping[str, str]] = {}
    """What its numbers are, in the words of the report, by the beginnings of their keys."""
    titles: ClassVar[Mapping[str, str]] = {}
    """The titles of its figures, by name."""

    # ---- what is checked before a run ----

    def describe(self) -> str:
        """What `pd check` says of it."""
        return ""

    def logs_the_same(self, other: Self) -> bool:
        """Whether it logs the keys of another metric of its type, beside which it is then refused."""
        return True

    def patterns(self) -> Iterator[tuple[str, tuple[str, ...]]]:
        """Yields patterns of site names by key. At least one of each key must match a site."""
        return iter(())

    def misfits(self, n_features: int) -> Iterator[Wrong]:
        """Yields what does not fit a toy with this number of features."""
        return iter(())

    # ---- numbers ----

    def term(self) -> Term | None:
        """A term that is measured beside the losses, and logged as `eval/loss/<name>` with its name."""
        return None

    def measure(self, batch: Batch) -> Any:
        """A tree of arrays, whose means over the batches `row` gets. Traced into the one program of an evaluation, or
        of what is `slow`."""
        return None

    @classmethod
    def measure_all(cls, metrics: Sequence[Self], batch: Batch) -> list[Any]:
        """`measure` of each of the configured metrics of this type, which may share work."""
        return [metric.measure(batch) for metric in metrics]

    def row(self, means: Any, snapshot: Snapshot) -> dict[str, float]:
        """Its numbers by key (`eval/…`). ``means``: what `measure` gave, as NumPy arrays. Every process calls it."""
        return {}

    # ---- figures ----

    @property
    def histogram_batches(self) -> int | None:
        """How many batches the histograms of `Snapshot.statistics` are to have; None for all."""
        return None

    @property
    def density_threshold(self) -> float | None:
        """The λ above which a component is active in the densities of `Snapshot.statistics`; None for any."""
        return None

    @property
    def rows_shown(self) -> RowsShown | None:
        """How much of the first batch `Snapshot.rows` is to have; None for a metric that does not read it."""
        return None

    def site_notes(self, snapshot: Snapshot) -> dict[str, str]:
        """What figures of other metrics say of single sites, by site."""
        return {}

    def figures(self, means: Any, snapshot: Snapshot) -> dict[str, "Figure"]:
        """Its figures by name. ``means``: as of `row`. Every process calls it."""
        return {}


METRICS: dict[str, type[Metric]] = {}
"""Every metric that is not a loss, by the `type` that configurations have, in the order of their numbers and figures.

A class becomes one of them by ``@registered(METRICS)``.
"""
