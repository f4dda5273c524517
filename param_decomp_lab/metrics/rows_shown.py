"""Says how much of an evaluation's first batch figures show."""

from typing import NamedTuple


class RowsShown(NamedTuple):
    """The first positions of the first rows of the first batch, and the components of largest mean λ of each site."""

    n_rows: int
    n_positions: int
    n_components: int
