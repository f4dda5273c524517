"""Averages of attributions over data (E8): computed on an opened run, kept beside its harvest."""
