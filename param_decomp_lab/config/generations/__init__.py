"""Files of the original project (goodfire-ai/param-decomp) of June to August 2026, read as today's configurations.

`recognise.py` says of which generation a file is, `translate.py` translates it. `tables.py` has the keys as data:
what does not matter here, what is lacking, and other names.
"""

from param_decomp_lab.config.generations.recognise import TITLES, Generation, generation
from param_decomp_lab.config.generations.translate import Translation, translate

__all__ = ["TITLES", "Generation", "Translation", "generation", "translate"]
