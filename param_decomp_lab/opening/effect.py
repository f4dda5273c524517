"""What masking one component off does to the output at places where it fires (I5)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from param_decomp_lab.errors import UserError
from param_decomp_lab.harvest.files import Harvest
from param_decomp_lab.opening.intervention import log_softmax
from param_decomp_lab.runs.inputs import Inputs
from param_decomp_lab.runs.opened import ROWS_AT_ONCE, OpenedRun
from param_decomp_lab.safe_io.printable import printable
from param_decomp_lab.ui.numbers import number as shown_number
from param_decomp_lab.ui.numbers import percent, signed

PLACES = 64
"""Firings at which an effect is measured, unless told otherwise."""
OUTPUTS = 10
"""Outputs that go up, and that go down, in a list."""
LEAST = 1e-3
"""Mean probability that a token of a list has at least, with or without the component: the log-probabilities of very
unlikely tokens move most, and mean least."""


class ChangedOutput(NamedTuple):
    """A token, or a toy's feature. ``change``: the mean change of its log-probability, in nats; of a feature, of its
    value. ``before``, ``after``: the mean probability (value) with and without the component."""

    number: int
    name: str
    change: float
    before: float
    after: float


@dataclass(frozen=True)
class Effect:
    """What happens to the target's output when component ``number`` of ``site`` is zero-masked at one position, at each
    of ``n`` places by itself (I5).

    ``rows``, ``positions``: the places. ``activations``: of the component, at each. ``with_it``, ``without_it``: the
    log-probabilities of all tokens at each place, in nats; a toy's outputs.
    """

    site: str
    number: int
    rows: Int[np.ndarray, " n"]
    positions: Int[np.ndarray, " n"]
    activations: Float[np.ndarray, " n"]
    with_it: Float[np.ndarray, "n d"]
    without_it: Float[np.ndarray, "n d"]
    names: Callable[[Sequence[int]], list[str]]
    of_text: bool = True

    @property
    def n(self) -> int:
        """Number of places."""
        return len(self.positions)

    @cached_property
    def change(self) -> Float[np.ndarray, " d"]:
        """The mean over the places of the change of every output's log-probability, in nats; a toy's: of its value."""
        found: Float[np.ndarray, " d"] = (self.without_it - self.with_it).mean(axis=0)
        return found

    @cached_property
    def before(self) -> Float[np.ndarray, " d"]:
        """The mean probability (value) of every output with the component."""
        return self._mean(self.with_it)

    @cached_property
    def after(self) -> Float[np.ndarray, " d"]:
        """The mean probability (value) of every output without the component."""
        return self._mean(self.without_it)

    @cached_property
    def errors(self) -> Float[np.ndarray, " n"]:
        """At each place, KL(with ‖ without), in nats; a toy's mean squared difference."""
        difference = self.with_it - self.without_it
        if self.of_text:
            return np.asarray((np.exp(self.with_it) * difference).sum(axis=-1))
        return np.asarray((difference**2).mean(axis=-1))

    @property
    def error(self) -> float:
        """The mean of ``errors``."""
        return float(self.errors.mean())

    @property
    def standard_error(self) -> float | None:
        """The standard error of ``error``; None with one place."""
        return float(self.errors.std(ddof=1) / np.sqrt(self.n)) if self.n > 1 else None

    @property
    def up(self) -> tuple[ChangedOutput, ...]:
        """The `OUTPUTS` that go up most without the component, the most changed first, among the tokens with a mean
        probability of at least `LEAST` with or without it."""
        return self._largest(1)

    @property
    def down(self) -> tuple[ChangedOutput, ...]:
        """The same of those that go down."""
        return self._largest(-1)

    @property
    def up_by_probability(self) -> tuple[ChangedOutput, ...]:
        """The `OUTPUTS` whose mean probability (value) rises most without the component, the most changed first."""
        return self._named(self.after - self.before)

    @property
    def down_by_probability(self) -> tuple[ChangedOutput, ...]:
        """The same of those that fall."""
        return self._named(self.before - self.after)

    def at(self, chosen: Bool[np.ndarray, " n"]) -> "Effect":
        """The effect at some of the places: ``effect.at(effect.activations > 0)``."""
        arrays = ("rows", "positions", "activations", "with_it", "without_it")
        return replace(self, **{name: getattr(self, name)[chosen] for name in arrays})

    def by_sign(self) -> "dict[str, Effect]":
        """The effect at the places where the activation is positive, and where it is negative, if there are any: the
        component writes U in one direction or the other, so what one sign raises the other lowers."""
        signs = {"a > 0": self.activations > 0, "a < 0": self.activations < 0}
        return {name: self.at(chosen) for name, chosen in signs.items() if chosen.any()}

    def _mean(self, outputs: Float[np.ndarray, "n d"]) -> Float[np.ndarray, " d"]:
        return np.asarray((np.exp(outputs) if self.of_text else outputs).mean(axis=0))

    def _largest(self, sign: int) -> tuple[ChangedOutput, ...]:
        moved = sign * self.change
        if self.of_text:
            moved[np.maximum(self.before, self.after) < LEAST] = 0
        return self._named(moved)

    def _named(self, moved: Float[np.ndarray, " d"]) -> tuple[ChangedOutput, ...]:
        """The outputs of largest ``moved``, which is above 0."""
        chosen = [int(k) for k in np.argsort(-moved, kind="stable")[:OUTPUTS] if moved[k] > 0]
        return tuple(
            ChangedOutput(k, name, float(self.change[k]), float(self.before[k]), float(self.after[k]))
            for k, name in zip(chosen, self.names(chosen), strict=True)
        )

    def __repr__(self) -> str:
        show = percent if self.of_text else shown_number
        error = shown_number(self.error)
        error += "" if self.standard_error is None else f" ± {shown_number(self.standard_error)}"
        lines = [
            f"Effect of {self.site}:{self.number} off, at {self.n} places: {'KL' if self.of_text else 'MSE'} {error}"
        ]
        for sign, part in self.by_sign().items():
            lines.append(f"  where {sign}, at {part.n}")
            for title, found in (("down", part.down), ("up", part.up)):
                moved = (f"{o.name!r} {signed(o.change)} ({show(o.before)} → {show(o.after)})" for o in found[:3])
                lines.append(f"    {title:5} " + ", ".join(moved))
        return printable("\n".join(lines))


def effect_of(
    run: OpenedRun,
    site: str,
    number: int,
    places: int,
    harvest: Harvest | None,
    rows: Inputs | None,
    positions: Int[np.ndarray, " n"] | None,
) -> Effect:
    """`Run.effect`; without ``rows`` and ``positions``, at up to ``places`` firings that ``harvest`` has."""
    component = run.component(site, number)
    if (rows is None) != (positions is None):
        raise UserError("give rows and positions together, or neither to take the places of a harvest")
    if rows is None:
        if harvest is None:
            raise UserError("give a harvest to take places from, or rows and positions")
        if places < 1:
            raise UserError("places should be at least 1")
        numbers, positions = harvest.firing_sample(component.site, number, places)
        if not len(numbers):
            raise UserError(f"{component.site}:{number} fires nowhere in the harvest; give rows and positions")
        by_number = {int(row): harvest.row(int(row)) for row in np.unique(numbers)}
        rows = np.stack([by_number[int(row)] for row in numbers])
    else:
        numbers = np.arange(len(rows))
    assert positions is not None
    before, after = run.outputs_without(component.site, number, rows, positions)
    if run.is_language_model:
        before, after = log_softmax(before), log_softmax(after)
    positions = np.asarray(positions)
    a = _activations(run, component.site, number, np.asarray(rows), positions)
    with_it, without_it = before.astype(np.float64), after.astype(np.float64)
    return Effect(component.site, number, numbers, positions, a, with_it, without_it, run.names, run.is_language_model)


def _activations(
    run: OpenedRun, site: str, number: int, rows: Float[np.ndarray, "n d"] | Int[np.ndarray, "n T"], positions: Any
) -> Float[np.ndarray, " n"]:
    """The activations of one component, at one position of each row."""
    found, n = np.zeros(len(rows)), len(rows)
    for first in range(0, n, ROWS_AT_ONCE):
        # The last rows are filled up, so that there is one program.
        these = np.minimum(np.arange(first, first + ROWS_AT_ONCE), n - 1)
        a = run.activations(rows[these], site)[site].reshape(ROWS_AT_ONCE, -1, run.sites[site].C)
        found[these] = a[np.arange(ROWS_AT_ONCE), positions[these], number]
    return found
