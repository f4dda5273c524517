"""Defines the tables of a harvest: their files, their columns, and the row groups of a site's components.

Each site has a file of every kind, sorted by component. A row group has the rows of `GROUPS` components, so the data of
one component are read from one row group, whose number follows from the component's.
"""

from pathlib import Path
from typing import Literal

import pyarrow as pa

IMPORTANCE_BINS = 20
"""The number of equal bins over (0, 1] for λ where a component fires."""
OCTAVES = range(-12, 12)
"""Bins of ``|a|`` where a component fires: from 2^o to 2^(o+1), the first and the last open."""
ACTIVATION_BINS = 2 * len(OCTAVES)
"""The number of bins: those of negative activations, largest first, then those of positive ones."""
AT_ONE = 0.999
"""λ from here on counts as 1."""
TOP_TOKENS = 4
RARE_TOKEN = 10
"""Tokens that occur less often can have a large lift by chance."""
Table = Literal["components", "examples", "tokens", "weights"]
GROUPS: dict[Table, int] = {"components": 2048, "examples": 512, "tokens": 512, "weights": 512}
"""Components in a row group. A list reads all rows of `components`, which are small; of the other tables, one row group
is read.
"""

COMPONENTS = pa.schema(
    [
        ("component", pa.int32()),
        ("firings", pa.int64()),
        ("firings_at_one", pa.int64()),
        ("importance_sum", pa.float64()),
        ("importance_max", pa.float32()),
        ("activation_sum", pa.float64()),
        ("activation_max", pa.float32()),
        ("firing_activation_sum", pa.float64()),
        ("V_norm", pa.float32()),
        ("U_norm", pa.float32()),
        ("tokens", pa.list_(pa.int32())),
        ("importance_histogram", pa.list_(pa.uint32())),
        ("activation_histogram", pa.list_(pa.uint32())),
    ]
)
"""``firings_at_one``: the firings with λ of `AT_ONE` or more; harvests of format 1 lack the column (`schema_of`). Sums
are over all positions, except ``firing_activation_sum``; activations enter them by their absolute value. ``tokens``:
the up to `TOP_TOKENS` most informative tokens of a component, by n · PMI; -1 fills up.
"""

EXAMPLES = pa.schema(
    [
        ("component", pa.int32()),
        ("kind", pa.dictionary(pa.int8(), pa.string())),
        ("row", pa.int32()),
        ("position", pa.int32()),
        ("importance", pa.float32()),
        ("activation", pa.float32()),
        ("scale", pa.float32()),
        ("importances", pa.binary()),
        ("activations", pa.binary()),
    ]
)
"""``importances``: a byte for each position of the context, λ in 255ths. ``activations``: a signed byte, in 127ths of
``scale``, the largest |a| among them.
"""

TOKENS = pa.schema([("component", pa.int32()), ("token", pa.int32()), ("n", pa.int64())])

WEIGHTS = pa.schema(
    [
        ("component", pa.int32()),
        ("inputs", pa.list_(pa.int32())),
        ("input_cosines", pa.list_(pa.float32())),
        ("outputs", pa.list_(pa.int32())),
        ("output_cosines", pa.list_(pa.float32())),
        ("promoted", pa.list_(pa.int32())),
        ("promoted_logits", pa.list_(pa.float32())),
        ("suppressed", pa.list_(pa.int32())),
        ("suppressed_logits", pa.list_(pa.float32())),
    ]
)
"""The largest entries of V and U, as cosines to the neurons; the tokens whose logits U raises and lowers most."""

SCHEMAS: dict[Table, pa.Schema] = {
    "components": COMPONENTS, "examples": EXAMPLES, "tokens": TOKENS, "weights": WEIGHTS
}  # fmt: skip


def schema_of(table: Table, plan_format: int) -> pa.Schema:
    """The columns of a table in a harvest of this format (`Plan.format`)."""
    schema = SCHEMAS[table]
    if table == "components" and plan_format < 2:
        return schema.remove(schema.get_field_index("firings_at_one"))
    return schema


PLAN_FILE = "harvest.json"
ROWS_FILE = "rows.parquet"
INPUTS_FILE = "inputs.parquet"
POSITIONS_FILE = "positions.parquet"
FIRINGS_FILE = "firings.npy"
"""The file with the firings of every component, numbered across all sites."""
NEGATIVE_FILE = "components_negative.npy"
"""The file that says of every firing at a sampled position, by component, whether a is negative; since format 3."""
VOCABULARY_FILE = "vocabulary.parquet"
"""The file with the name of each token, by id; missing if the run has no tokenizer."""


def table_file(folder: Path, table: Table, site: int) -> Path:
    """Returns the file of a table. ``site``: its number among those of the harvest."""
    return folder / table / f"{site}.parquet"
