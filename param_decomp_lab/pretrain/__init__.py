"""Training a small language model to decompose."""
