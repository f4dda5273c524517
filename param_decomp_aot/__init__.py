"""Compiling for hardware that is not here: takes strings and abstract arguments, returns tables."""
