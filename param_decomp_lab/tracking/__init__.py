"""Writes the metrics of a training run to their destinations, and watches them for signs of collapse."""
