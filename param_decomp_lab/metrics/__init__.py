"""The metrics of evaluations that are not losses."""
