"""What a copy of the pages has: some components, and some graphs."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int

from param_decomp_lab.harvest.files import Groups


@dataclass(frozen=True)
class Chosen:
    """``components``: numbers by site, ascending. ``graphs``: names of kept graphs. ``examples``: at most so many in
    each list of a component's page, with at most ``context`` tokens each; None for all."""

    components: Mapping[str, Int[np.ndarray, " n"]]
    graphs: frozenset[str]
    examples: int | None = None
    context: int | None = None

    def of_site(self, site: str) -> Int[np.ndarray, " n"]:
        return self.components.get(site, np.zeros(0, int))

    @property
    def count(self) -> int:
        """Components of all sites."""
        return sum(map(len, self.components.values()))

    def groups(self, groups: Groups) -> Int[np.ndarray, " k"]:
        """Numbers of the groups with several members that one of the components is in, ascending."""
        found = {groups.group_of(site, int(n)) for site, numbers in self.components.items() for n in numbers}
        several = sorted(number for number in found if number is not None and groups.sizes[number] > 1)
        return np.asarray(several, int)


def around(numbers: Int[np.ndarray, " n"], number: int) -> tuple[int | None, int | None]:
    """Those before and after ``number`` in ascending ``numbers``; None at an end."""
    at, after = np.searchsorted(numbers, number), np.searchsorted(numbers, number, side="right")
    return (int(numbers[at - 1]) if at else None), (int(numbers[after]) if after < len(numbers) else None)
