"""A harvest's files, and how they are read. Needs no JAX."""

from param_decomp_lab.harvest_files.averages import Averages
from param_decomp_lab.harvest_files.groups import Groups
from param_decomp_lab.harvest_files.reading import Example, Harvest, Summary, find_harvests, harvest_of, harvests_of

__all__ = ["Averages", "Example", "Groups", "Harvest", "Summary", "find_harvests", "harvest_of", "harvests_of"]
