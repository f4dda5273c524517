"""Weights of targets from files, and back."""
