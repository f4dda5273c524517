"""Turns text into rows of token ids, rows into batches, and token ids back into text."""
