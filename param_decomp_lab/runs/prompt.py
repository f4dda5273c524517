"""Reads inputs as a person types them: a text, or the active features of a toy such as ``3 7=0.5``."""

from typing import Any

import numpy as np

from param_decomp_jax.targets.architecture import FeatureInputs
from param_decomp_lab.errors import UserError


def read_prompt(run: Any, text: str) -> tuple[np.ndarray, list[int]]:
    """Returns the input of an opened run's target, and the tokens or active features of which it consists.

    A text begins with BOS if the rows of the run's data do; one that is longer than the longest row that the run takes
    is cut off. Raises UserError.
    """
    reads = run.architecture.inputs
    if isinstance(reads, FeatureInputs):
        values = np.zeros(reads.n_features, np.float32)
        for word in text.replace(",", " ").split():
            feature, _, value = word.partition("=")
            try:
                number, size = int(feature), float(value or 1)
            except ValueError as error:
                raise UserError(f"'{word[:40]}' should be the number of a feature, such as 3 or 3=0.5") from error
            if not 0 <= number < reads.n_features or not np.isfinite(size):
                raise UserError(f"'{word[:40]}': features go from 0 to {reads.n_features - 1}")
            values[number] = size
        return values, np.flatnonzero(values).tolist()
    if run.text is None:
        raise UserError("no tokenizer beside the run's data or target: texts cannot be read")
    if not run.text.ids(text):
        raise UserError("this text has no tokens")
    tokens = run.text.prompt(text)
    longest = run.longest_row
    if longest is not None:
        tokens = tokens[:longest]
    return np.asarray(tokens, np.int32), tokens


def read_output(run: Any, text: str, called: str = "target") -> int:
    """Returns the number of an output: a token's from its text, or a toy's feature's from its number. Raises
    UserError, which says what the output is ``called``.
    """
    if isinstance(run.architecture.inputs, FeatureInputs):
        if not text.strip().isdecimal() or int(text) >= run.n_outputs:
            raise UserError(f"{called} '{text[:40]}': features go from 0 to {run.n_outputs - 1}")
        return int(text)
    if run.text is None:
        raise UserError("no tokenizer beside the run's data or target: give tokens by number")
    tokens = run.text.one_token(text)
    if len(tokens) != 1:
        pieces = ", ".join(f"'{piece}'" for piece in run.text.tokens(tokens[:8]))
        raise UserError(
            f"{called} '{text[:40]}' should be one token of the vocabulary, not {len(tokens)} ({pieces}); most words "
            "have a space in front of them"
        )
    return tokens[0]
