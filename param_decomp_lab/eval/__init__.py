"""Evaluation (section 11): what a decomposition is judged by, in the loop and afterwards."""
