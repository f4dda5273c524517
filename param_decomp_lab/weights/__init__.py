"""Reads the weights of targets from files, and writes them."""
