"""Harvests a run: collects what each of its components does on a large amount of text."""
