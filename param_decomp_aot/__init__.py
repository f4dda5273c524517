"""Ahead-of-time compilation for GPUs that are not present, and analysis of the compiled programs."""
