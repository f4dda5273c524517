"""Prints the groups that `pd cluster` has found."""

from rich.console import Console

from param_decomp_lab.harvest.files import Groups
from param_decomp_lab.ui.numbers import number, percent
from param_decomp_lab.ui.tables import plain_table

LARGEST = 10
SITES = 3
"""The number of a group's sites that are named."""


def print_groups(groups: Groups, console: Console) -> None:
    """Prints the largest groups, then their number and cost, and how well the seeds agree."""
    several = int((groups.sizes > 1).sum())
    table = plain_table(
        "Largest groups", ("group", "right"), ("members", "right"), ("density", "right"), ("sites", "wrap")
    )
    for group in range(min(LARGEST, several)):
        names = list(dict.fromkeys(site for site, _ in groups.members(group)))
        more = f" and {len(names) - SITES} more" if len(names) > SITES else ""
        table.add_row(
            f"{group}",
            f"{groups.sizes[group]:,}",
            percent(float(groups.densities[group])),
            ", ".join(names[:SITES]) + more,
        )
    if several:
        console.print(table)
    C = len(groups.index)
    apart = C - len(groups.components)
    rare = f", or at less than {groups.options.min_density:g} of the positions" if groups.options.min_density else ""
    lines = [
        f"{len(groups.components):,} components in {len(groups):,} groups, {several:,} of them with several members"
        f" ({int(groups.sizes[groups.sizes > 1].sum()):,} components)",
        f"{apart:,} of {C:,} components fire nowhere{rare}, and are kept apart" if apart else "",
        f"cost {number(groups.cost_before)} bits a position before, {number(groups.cost)} after",
    ]
    for line in filter(None, lines):
        console.print(line, highlight=False, soft_wrap=True)
    if len(groups.results) > 1:
        seeds = plain_table(
            "Seeds", ("seed", "right"), ("groups", "right"), ("cost", "right"), ("adjusted Rand", "right"),
            ("pairs kept", "right"),
        )  # fmt: skip
        for seed, result in enumerate(groups.results):
            chosen = seed == groups.seed
            seeds.add_row(
                f"{seed}", f"{result.groups:,}", f"{result.cost:.4f}",
                "chosen" if chosen else f"{result.adjusted_rand:.3f}", "" if chosen else percent(result.kept),
            )  # fmt: skip
        console.print(seeds)
