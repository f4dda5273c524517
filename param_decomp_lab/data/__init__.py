"""Text to rows of token ids, rows to batches, token ids back to text."""
