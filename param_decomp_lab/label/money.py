"""What requests cost, in whole billionths of a dollar, so that sums are exact; and the most that one can cost."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

NANO = 1_000_000_000
TEMPLATE_TOKENS = 256
"""Allowance for what a server adds to a prompt: marks between messages, and a system prompt of its own."""
BYTES_PER_TOKEN = 4
"""Bytes of a token of English text, about: for estimates."""

Message = dict[str, str]
"""``role`` and ``content``."""


@dataclass(frozen=True)
class Prices:
    """In dollars per million tokens."""

    input: float
    output: float

    def cost(self, prompt_tokens: int, completion_tokens: int) -> int:
        """In billionths of a dollar, rounded up."""
        # Dollars per million tokens are thousands of billionths per token.
        exact = Fraction(str(self.input)) * prompt_tokens + Fraction(str(self.output)) * completion_tokens
        return math.ceil(exact * 1000)


def most_tokens(messages: Sequence[Message]) -> int:
    """No tokenizer that works on bytes makes more tokens of a prompt than it has bytes."""
    return sum(len(message["content"].encode()) for message in messages) + TEMPLATE_TOKENS


def expected_tokens(messages: Sequence[Message]) -> int:
    return sum(len(message["content"].encode()) for message in messages) // BYTES_PER_TOKEN


def dollars(nano: int) -> str:
    """``$0.0123``; four digits after the point below ten dollars."""
    value = nano / NANO
    return f"${value:,.2f}" if value >= 10 else f"${value:.4f}"
