"""Checks the inputs of an opened run against what its target and its CI function take."""

from typing import Any

import numpy as np
from jaxtyping import Float, Int

from param_decomp_jax.targets.architecture import FeatureInputs, TokenInputs
from param_decomp_lab.errors import UserError

Inputs = Any
"""Language model: token ids ``[B, T]`` or ``[T]``, or a text, which begins with BOS if the rows of the run's data do.
Toy: features ``[B, n]`` or ``[n]``."""


def read_inputs(run: Any, inputs: Inputs) -> Int[np.ndarray, "*B T"] | Float[np.ndarray, "*B n"]:
    """Token ids or features as an array. Raises UserError if they do not fit the run."""
    reads = run.architecture.inputs
    return _features(reads, inputs) if isinstance(reads, FeatureInputs) else _tokens(run, reads, inputs)


def _tokens(run: Any, reads: TokenInputs, inputs: Inputs) -> Int[np.ndarray, "*B T"]:
    if isinstance(inputs, str):
        if run.text is None:
            raise UserError("no tokenizer next to the data or the target: give token ids instead of a text")
        inputs = np.asarray(run.text.prompt(inputs), np.int32)
    rows, vocabulary = np.asarray(inputs), reads.vocab_size
    if rows.dtype.kind not in "iu" or rows.ndim not in (1, 2) or rows.size == 0:
        raise UserError(f"inputs should be token ids [B, T] or [T], not {rows.dtype} {list(rows.shape)}")
    if rows.min() < 0 or rows.max() >= vocabulary:
        raise UserError(f"token ids go from 0 to {vocabulary - 1}; the inputs have {rows.min()} to {rows.max()}")
    if reads.longest is not None and rows.shape[-1] > reads.longest:
        raise UserError(f"the target takes up to {reads.longest} tokens; the inputs have {rows.shape[-1]}")
    longest = run.longest_row
    if longest is not None and rows.shape[-1] > longest:
        raise UserError(f"the CI function takes up to {longest} tokens; the inputs have {rows.shape[-1]}")
    return rows.astype(np.int32)


def _features(reads: FeatureInputs, inputs: Inputs) -> Float[np.ndarray, "*B n"]:
    n, rows = reads.n_features, np.asarray(inputs)
    if rows.dtype.kind not in "fiub" or rows.ndim not in (1, 2) or rows.shape[-1] != n or rows.size == 0:
        raise UserError(f"inputs should be features [B, {n}] or [{n}], not {rows.dtype} {list(rows.shape)}")
    return rows.astype(np.float32)
