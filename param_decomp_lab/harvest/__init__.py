"""Harvesting: collecting what every component of a run does on much text."""
