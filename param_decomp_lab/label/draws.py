"""Draws the texts that a judge is asked about from a harvest, so that the right answers are certain.

At the sampled positions, a harvest has all firings, so a component that is not among them does not fire there.
Elsewhere, it only has the contexts of examples. Draws depend only on the seed, the component and the kind of score.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from param_decomp_lab.harvest.files import Example
from param_decomp_lab.label.choose import Component
from param_decomp_lab.label.naming import shown_examples
from param_decomp_lab.label.texts import LEAST_SHOWN, Text, Texts, as_text, firing_places

INTRUDERS = 5
"""The number of texts in a group, of which one does not belong."""
NEIGHBOURS = 20
"""The number of components of nearest density from which an intruder is drawn."""
LEAST_FIRINGS = 4
SPARE = 8
"""This many times the needed positions are considered, since the namer may have seen some of them."""
Place = tuple[int, int]
"""Row, and position in it."""


@dataclass(frozen=True)
class Judged:
    """A text, and whether the right answer is yes."""

    text: Text
    truth: bool


class Draws:
    """Draws texts. ``texts``: the number of texts of each class, or of groups of texts, for each component."""

    def __init__(self, texts: Texts, seed: int, n_texts: int) -> None:
        self._texts, self._harvest = texts, texts.harvest
        self._seed, self._n = seed, n_texts
        self._by_density: dict[str, np.ndarray] = {}

    @property
    def name(self) -> str:
        """Names everything that determines the draws."""
        return f"{self._harvest.folder.name}, seed {self._seed}, {self._n} texts"

    def detection(self, component: Component) -> list[Judged]:
        """Returns texts with a marked position, in random order: equally many where the component fires there and where
        it certainly does not, if there are enough. Both are uniform samples, without texts that the namer has seen if
        possible.
        """
        rng = self._rng("detection", component)
        firing = self._some(rng, self._firings(component))
        silent = self._some(rng, self._silent(rng, component))
        judged = [Judged(self._texts.window(*place), True) for place in firing]
        judged += [Judged(self._texts.window(*place), False) for place in silent]
        rng.shuffle(judged)
        return judged

    def fuzzing(self, component: Component) -> list[Judged]:
        """Returns texts of the uniform sample, with the right tokens marked and with as many wrong ones marked: those
        at which λ is below 1/510, or below the threshold if that is larger. Texts with too few such tokens are left
        out.
        """
        rng = self._rng("fuzzing", component)
        judged = []
        for example in self._unseen_examples(component)[: self._n]:
            right = firing_places(example, self._harvest.plan.threshold)
            certain = np.flatnonzero(example.importances <= LEAST_SHOWN).tolist()
            others = [place for place in certain if place not in right]
            if len(others) >= len(right):
                judged += [Judged(as_text(example, right), True)]
                judged += [Judged(as_text(example, rng.sample(others, len(right))), False)]
        rng.shuffle(judged)
        return judged

    def intruder(self, component: Component) -> list[tuple[list[Text], int]]:
        """Returns groups of five texts with a marked position each, and the index of the intruder: the text where
        another component of the site fires and this one certainly does not. The density of that component is among the
        nearest.
        """
        rng = self._rng("intruder", component)
        own = self._firings(component)
        if len(own) < LEAST_FIRINGS:
            return []
        mine = set(self._harvest.firing_places(*component).tolist())
        groups: list[tuple[list[Text], int]] = []
        neighbours = self._neighbours(component)
        for _ in range(self._n):
            rng.shuffle(neighbours)
            places = (self._harvest.firing_places(component[0], other).tolist() for other in neighbours)
            foreign = next(filter(None, ([p for p in found if p not in mine] for found in places)), None)
            if foreign is None:
                return groups
            stranger = self._place(rng.choice(foreign))
            group = [self._texts.window(*place) for place in rng.sample(own, INTRUDERS - 1)]
            where = rng.randrange(INTRUDERS)
            group.insert(where, self._texts.window(*stranger))
            groups.append((group, where))
        return groups

    def _rng(self, kind: str, component: Component) -> random.Random:
        return random.Random(f"{self._seed}/{kind}/{component[0]}/{component[1]}")

    def _some(self, rng: random.Random, places: Sequence[Place]) -> list[Place]:
        return rng.sample(list(places), min(self._n, len(places)))

    def _place(self, number: int) -> Place:
        rows, positions = self._harvest.sampled_positions
        return int(rows[number]), int(positions[number])

    def _firings(self, component: Component) -> list[Place]:
        """Returns certain firings, a uniform sample of all: those at sampled positions, then the uniform examples."""
        numbers = self._harvest.firing_places(*component)[: SPARE * self._n].tolist()
        examples = self._harvest.examples(*component)
        uniform = [(e.row, e.position) for e in examples if e.kind == "uniform"]
        places = list(dict.fromkeys([*map(self._place, numbers), *uniform]))
        return self._unseen(places, examples) or places

    def _silent(self, rng: random.Random, component: Component) -> list[Place]:
        """Returns sampled positions at which the component does not fire: a uniform sample, larger than needed."""
        fires = self._harvest.firing_places(*component)
        numbers = np.setdiff1d(np.arange(self._harvest.n_sampled), fires, assume_unique=True).tolist()
        places = list(map(self._place, rng.sample(numbers, min(len(numbers), SPARE * self._n))))
        return self._unseen(places, self._harvest.examples(*component)) or places

    def _unseen_examples(self, component: Component) -> list[Example]:
        """Returns the examples of the uniform sample that the namer has not seen; the whole sample if it has seen the
        context of every one.
        """
        examples = self._harvest.examples(*component)
        uniform = {(e.row, e.position): e for e in examples if e.kind == "uniform"}
        unseen = self._unseen(list(uniform), examples)
        return [uniform[place] for place in unseen or uniform]

    def _unseen(self, places: list[Place], examples: list[Example]) -> list[Place]:
        """Returns the places that are not in a text that the namer was shown."""
        seen = {(e.row, e.first + k) for e in shown_examples(examples) for k in range(len(e.tokens))}
        return [place for place in places if place not in seen]

    def _neighbours(self, component: Component) -> list[int]:
        """Returns the components of the site with the nearest densities."""
        site, number = component
        if site not in self._by_density:
            self._by_density[site] = self._harvest.densities(site)
        density = self._by_density[site]
        distance = np.abs(np.log(np.maximum(density, 1e-300)) - np.log(max(density[number], 1e-300)))
        distance[(density == 0) | (np.arange(len(density)) == number)] = np.inf
        order = np.argsort(distance, kind="stable")[:NEIGHBOURS]
        return [int(n) for n in order if np.isfinite(distance[n])]
