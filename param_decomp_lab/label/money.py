"""Computes what requests cost, and can cost at most, in integer billionths of a dollar so that sums are exact."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

NANO = 1_000_000_000
TEMPLATE_TOKENS = 256
"""Allowance for what a server adds to a prompt: separators of messages, and its own system prompt."""
BYTES_PER_TOKEN = 4
"""Approximate bytes per token of English text, for estimates."""

Message = dict[str, str]
"""A message: ``role`` and ``content``."""


@dataclass(frozen=True)
class Prices:
    """Prices in dollars per million tokens."""

    input: float
    output: float

    def cost(self, prompt_tokens: int, completion_tokens: int) -> int:
        """Returns the cost in billionths of a dollar, rounded up."""
        # A dollar per million tokens is a thousand billionths per token.
        exact = Fraction(str(self.input)) * prompt_tokens + Fraction(str(self.output)) * completion_tokens
        return math.ceil(exact * 1000)


def most_tokens(messages: Sequence[Message]) -> int:
    """Returns the most tokens that a prompt can have: a byte-based tokenizer makes at most one token per byte."""
    return sum(len(message["content"].encode()) for message in messages) + TEMPLATE_TOKENS


def expected_tokens(messages: Sequence[Message]) -> int:
    return sum(len(message["content"].encode()) for message in messages) // BYTES_PER_TOKEN


def dollars(nano: int) -> str:
    """``$0.0123``; four digits after the point below ten dollars."""
    value = nano / NANO
    return f"${value:,.2f}" if value >= 10 else f"${value:.4f}"
