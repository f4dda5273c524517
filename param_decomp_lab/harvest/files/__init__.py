"""A harvest's files, and how they are read. Needs no JAX."""

from param_decomp_lab.harvest.files.averages import Averages
from param_decomp_lab.harvest.files.finding import chosen_harvest, find_harvests, harvest_of, harvests_of
from param_decomp_lab.harvest.files.groups import Groups
from param_decomp_lab.harvest.files.reading import Example, Harvest, Summary

__all__ = [
    "Averages", "Example", "Groups", "Harvest", "Summary", "chosen_harvest", "find_harvests", "harvest_of",
    "harvests_of",
]  # fmt: skip
