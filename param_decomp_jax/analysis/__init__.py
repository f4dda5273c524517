"""What a trained decomposition is used for: attributions, importances, and comparisons with baselines and
dictionaries."""

from param_decomp_jax.analysis.attribution import Edges, Targets, edges, for_attribution
from param_decomp_jax.analysis.average_attribution import edge_sums, normalizers
from param_decomp_jax.analysis.baselines import masked_errors, mean_l0, second_moments
from param_decomp_jax.analysis.dictionaries import Dictionary, Encoder
from param_decomp_jax.analysis.hooks import Hook
from param_decomp_jax.analysis.importances import lower_importances, read_batch, read_sites
from param_decomp_jax.analysis.prompt_importances import Importances, lower

__all__ = [
    "Dictionary", "Edges", "Encoder", "Hook", "Importances", "Targets", "edge_sums", "edges", "for_attribution",
    "lower", "lower_importances", "masked_errors", "mean_l0", "normalizers", "read_batch", "read_sites",
    "second_moments",
]  # fmt: skip
