"""Evaluates decompositions (section 11), during training and afterwards."""
