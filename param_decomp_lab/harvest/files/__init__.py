"""The files of a harvest, and their readers. Needs no JAX."""

from param_decomp_lab.harvest.files.averages import Averages
from param_decomp_lab.harvest.files.example import Example
from param_decomp_lab.harvest.files.finding import chosen_harvest, find_harvests, harvest_of, harvests_of
from param_decomp_lab.harvest.files.groups import Groups
from param_decomp_lab.harvest.files.known import KnownComponent
from param_decomp_lab.harvest.files.reading import Harvest, Summary

__all__ = [
    "Averages", "Example", "Groups", "Harvest", "KnownComponent", "Summary", "chosen_harvest", "find_harvests",
    "harvest_of", "harvests_of",
]  # fmt: skip
