"""Reads and writes a run on disk: its folder, its checkpoints and its records; and opens it."""
