"""A harvest as it lies on disk, and how it is read. Needs no JAX; `param_decomp_lab.harvest` makes one."""

from param_decomp_lab.harvest_files.reading import Example, Harvest, find_harvests, harvest_of

__all__ = ["Example", "Harvest", "find_harvests", "harvest_of"]
