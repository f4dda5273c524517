"""Reads files of the original project (goodfire-ai/param-decomp) of June to August 2026 as current configurations.

`recognise.py` tells the generation of a file, and `translate.py` translates it. `tables.py` lists keys as data: those
without effect here, those that are unsupported, and those with other names.
"""

from param_decomp_lab.config.generations.recognise import TITLES, Generation, generation
from param_decomp_lab.config.generations.translate import Translation, translate

__all__ = ["TITLES", "Generation", "Translation", "generation", "translate"]
