"""Finds the fastest layout that fits, probing only a few of very many.

Layouts of one mesh differ in what they spend memory on. The search begins with the layout that spends most, which
should be the fastest. If it does not fit, the search probes how much memory each single choice would free and how much
time that would cost, frees enough memory where a GiB is cheapest, and probes the combination. If a layout fits with
memory to spare, the search probes how much time each single choice would save. Meshes are searched in the order of the
times of their first layouts. A mesh whose first layout is slower than the best result so far is skipped.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from param_decomp_lab.probe.search import SearchPoint, Variant

WORTH = 0.005
"""The least share of a step's time that a change must save to count."""
SPARE = 1.05
"""The factor by which more memory is freed than is missing, since the parts of a peak do not add up exactly."""


@dataclass(frozen=True)
class LayoutChoice:
    """A choice that a layout makes. ``levels``: from least to most memory, each with its name (empty for the usual one)
    and its assignments. ``helps``: terms of the roofline that a higher level may reduce. ``ordered``: False if it is
    unknown which level needs more.
    """

    name: str
    levels: tuple[tuple[str, tuple[tuple[str, Any], ...]], ...]
    helps: frozenset[str] = frozenset()
    ordered: bool = True


@dataclass(frozen=True)
class Space:
    """Layouts of one mesh. ``begin``: the level of each choice that the search begins with. ``batch``: in rows.
    ``make``: turns the assignments of chosen levels into a kind's settings.
    """

    name: str
    choices: tuple[LayoutChoice, ...]
    begin: tuple[int, ...]
    batch: int
    make: Callable[[Sequence[tuple[str, Any]]], tuple[tuple[str, Any], ...]]

    def kind(self, levels: Sequence[int]) -> Variant:
        """Returns the variant to probe at these levels."""
        chosen = [choice.levels[level] for choice, level in zip(self.choices, levels, strict=True)]
        name = "; ".join(filter(None, (self.name, *(words for words, _ in chosen))))
        return Variant(name, self.make([pair for _, pairs in chosen for pair in pairs]), (self.batch,))


AskAll = Callable[[Sequence[Variant]], list[SearchPoint]]
"""Probes several layouts at a time; returns fewer points than layouts if the time is up."""
Levels = tuple[int, ...]


@dataclass
class _Search:
    ask_all: AskAll
    points: dict[tuple[str, Levels], SearchPoint] = field(default_factory=dict)
    effects: dict[tuple[str, int, int], tuple[float, float]] = field(default_factory=dict)
    """GiB and seconds that a choice's step from one level to the next adds."""

    def ask(self, wanted: Sequence[tuple[Space, Levels]]) -> None:
        """Probes those layouts that were not probed yet."""
        new = {(space.name, levels): space.kind(levels) for space, levels in wanted}
        new = {key: kind for key, kind in new.items() if key not in self.points}
        if new:
            self.points |= zip(new, self.ask_all([*new.values()]), strict=False)

    def known(self, space: Space, levels: Levels) -> bool:
        point = self.points.get((space.name, levels))
        return point is not None and point.answer is not None

    def at(self, space: Space, levels: Levels) -> SearchPoint:
        return self.points[space.name, levels]

    def fits(self, space: Space, levels: Levels) -> bool:
        return self.at(space, levels).verdict == "fits"

    def fastest(self, space: Space) -> Levels | None:
        """Returns the fastest levels of this space that fit."""
        fitting = [levels for name, levels in self.points if name == space.name and self.fits(space, levels)]
        return min(fitting, key=lambda levels: self.at(space, levels).step_s, default=None)

    @property
    def best_s(self) -> float:
        """Seconds of the fastest step that fits."""
        return min((p.step_s for p in self.points.values() if p.verdict == "fits"), default=float("inf"))

    def effect(self, space: Space, levels: Levels, i: int, to: int) -> tuple[float, float] | None:
        """Returns the GiB and seconds that choice ``i`` adds when it changes from its level to ``to``: measured from
        ``levels``, else from other levels; None if it was not measured.
        """
        name, other = space.choices[i].name, _with(levels, i, to)
        if self.known(space, other):
            here, there = self.at(space, levels), self.at(space, other)
            self.effects[name, levels[i], to] = (there.peak_gib - here.peak_gib, there.step_s - here.step_s)
        if (back := self.effects.get((name, to, levels[i]))) is not None:
            self.effects.setdefault((name, levels[i], to), (-back[0], -back[1]))
        return self.effects.get((name, levels[i], to))


def fastest(spaces: Sequence[Space], ask_all: AskAll) -> list[SearchPoint]:
    """Returns every probed point, fastest first; `search.best` chooses among them."""
    search = _Search(ask_all)
    search.ask([(space, space.begin) for space in spaces])
    begun = [space for space in spaces if search.known(space, space.begin)]
    for space in sorted(begun, key=lambda space: search.at(space, space.begin).step_s):
        if search.at(space, space.begin).step_s < (1 - WORTH) * search.best_s:
            _make_fit(space, search)
    of_each = [(search.at(space, levels).step_s, space) for space in begun if (levels := search.fastest(space))]
    if of_each:
        _spend_what_is_left(min(of_each, key=lambda each: each[0])[1], search)
    return sorted(search.points.values(), key=lambda point: point.step_s)


def _make_fit(space: Space, search: _Search) -> None:
    """Steps down from the space's first layout until one fits or no memory is left to free."""
    levels = space.begin
    while not search.fits(space, levels):
        steps = [(i, to) for i, choice in enumerate(space.choices) for to in _others(choice, levels[i], -1)]
        unknown = [(i, to) for i, to in steps if search.effect(space, levels, i, to) is None]
        search.ask([(space, _with(levels, i, to)) for i, to in unknown])
        found = [(i, to, effect) for i, to in steps if (effect := search.effect(space, levels, i, to)) is not None]
        here = search.at(space, levels)
        freeing = [step for step in found if step[2][0] <= 0]
        freed = _cheapest(freeing, SPARE * (here.pool_gib - here.peak_gib)) or [(i, to) for i, to, _ in freeing]
        costs = {(i, to): seconds for i, to, (_, seconds) in found}
        expected = here.step_s + sum(costs[step] for step in freed)
        if not freed or expected >= search.best_s:
            return
        for i, to in freed:
            levels = _with(levels, i, to)
        search.ask([(space, levels)])
        if not search.known(space, levels):
            return


_Step = tuple[int, int, tuple[float, float]]
"""The index of a choice, its new level, and the GiB and seconds that this adds."""


def _cheapest(steps: Sequence[_Step], most_gib: float) -> list[tuple[int, int]]:
    """Returns the set of steps that adds at most ``most_gib`` and the least time, by the sums of their single effects;
    empty if no set does, or none is better than no step.
    """
    sums: list[tuple[float, float, list[tuple[int, int]]]] = [(0.0, 0.0, [])]
    for i, of_one in itertools.groupby(sorted(steps), key=lambda step: step[0]):
        more = [(gib, seconds, to) for _, to, (gib, seconds) in of_one]
        grown = [(g + gib, s + seconds, [*chosen, (i, to)]) for g, s, chosen in sums for gib, seconds, to in more]
        sums = _unbeaten([*sums, *grown])
    return min(((s, chosen) for g, s, chosen in sums if g <= most_gib), key=lambda each: each[0], default=(0.0, []))[1]


def _unbeaten(
    sums: Sequence[tuple[float, float, list[tuple[int, int]]]],
) -> list[tuple[float, float, list[tuple[int, int]]]]:
    """Removes the sums that need at least as much memory and time as another."""
    kept: list[tuple[float, float, list[tuple[int, int]]]] = []
    for each in sorted(sums, key=lambda each: each[:2]):
        if not kept or each[1] < kept[-1][1]:
            kept.append(each)
    return kept


def _spend_what_is_left(space: Space, search: _Search) -> None:
    """Steps up from the space's fastest layout, and exchanges one choice for others, as long as that is faster."""
    while (levels := search.fastest(space)) is not None:
        here = search.at(space, levels)
        room = here.pool_gib - here.peak_gib
        wanted = []
        for i, choice in enumerate(space.choices):
            for to in _others(choice, levels[i], 1):
                effect = search.effect(space, levels, i, to)
                hopeless = effect is not None and (effect[0] > room or effect[1] >= 0)
                if not hopeless and _can_gain(choice, here.terms) > WORTH * here.step_s:
                    wanted.append((space, _with(levels, i, to)))
        search.ask(wanted)
        known = []
        for i, choice in enumerate(space.choices):
            for to in range(len(choice.levels)):
                if to != levels[i] and (effect := search.effect(space, levels, i, to)) is not None:
                    known.append((i, to, effect))
        together = levels
        for i, to in _cheapest(known, room):
            together = _with(together, i, to)
        search.ask([(space, together)])
        if search.best_s > (1 - WORTH) * here.step_s:
            return


def _can_gain(choice: LayoutChoice, terms: Mapping[str, float]) -> float:
    """Returns the most seconds that a higher level could save."""
    return sum(seconds for name, seconds in terms.items() if name in choice.helps or not choice.helps)


def _others(choice: LayoutChoice, level: int, step: int) -> list[int]:
    """Returns the next level in this direction; all other levels if they have no order."""
    if not choice.ordered:
        return [n for n in range(len(choice.levels)) if n != level]
    return [level + step] if 0 <= level + step < len(choice.levels) else []


def _with(levels: Levels, i: int, to: int) -> Levels:
    return (*levels[:i], to, *levels[i + 1 :])
